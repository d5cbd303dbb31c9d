"""What holds for all tests: eight CPU devices; in the library, no silent promotion."""

import os
import pathlib
import sys

# Read when JAX is first imported; a test process must not look for other devices.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# The TPU compiler without a TPU, in several processes at once.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_MIN_LOG_LEVEL"] = "3"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
# Where `make setup` puts it.
sys.path.append(str(pathlib.Path(sys.prefix) / "libtpu"))
if "MIXPREC_GPU_COMPILE" in os.environ:  # as `make gpu-compile` sets it
    sys.path.append(str(pathlib.Path(sys.prefix) / "cuda"))

import importlib.util

import jax
import pytest

# The trainer's and the models' libraries (optax, clu, jax.nn) promote by themselves.
STRICT = (
    "rounding_",
    "policy_",
    "scopes_",
    "linen_",
    "views_",
    "standins_",
    "nnx_",
    "wrap_",
    "rules_",
    "tensors_",
    "coverage_",
)


@pytest.fixture(autouse=True)
def _promotion(request):
    if not request.path.name.startswith(STRICT):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def pytest_runtest_setup(item):
    """Skips what needs a compiler where it is absent; for TPU that fails in CI."""
    if item.get_closest_marker("gpu_compile") and (
        "MIXPREC_GPU_COMPILE" not in os.environ
    ):
        pytest.skip(
            "compiles for GPUs: run `make gpu-compile`, which gets the compiler"
        )
    if item.get_closest_marker("outside") and "MIXPREC_OUTSIDE" not in os.environ:
        pytest.skip("needs the outside models: run `make outside`")
    if not item.get_closest_marker("tpu_compile") or importlib.util.find_spec("libtpu"):
        return
    reason = "libtpu is not installed (it exists for Linux on x86-64)"
    if os.environ.get("MIXPREC_REQUIRE_TPU_COMPILE"):
        pytest.fail(reason)
    pytest.skip(reason)
