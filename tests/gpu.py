"""Lowers and compiles for NVIDIA GPUs that are not there. Nothing is run."""

import contextlib
import functools
import warnings

import jax
from jax.experimental import topologies

# Name of the chip -> its memory in bytes and bytes a second, from the data sheets.
CHIPS = {
    "NVIDIA H100 80GB HBM3": (85_899_345_920, 3_350_000_000_000),
    "NVIDIA H200": (151_397_597_184, 4_800_000_000_000),
}
H100, H200 = CHIPS
KERNEL = "__gpu$xla.gpu.triton"
# CUDA C++ Programming Guide, table of technical specifications, compute capability 9.0.
_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{chip}"
"""


@contextlib.contextmanager
def on_gpu(chip=H100):
    """Gives a context in which kernels are lowered for a GPU."""
    # A private class, since JAX has no public way to say for which device a kernel is
    # lowered when that device is not present.
    from jax._src.mesh import AbstractDevice

    kind = AbstractDevice(device_kind=chip, num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        # jax 0.12 announces the end of what it still has.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        yield


def export(function, *arguments):
    """Lowers a jitted `function` for CUDA; needs no compiler for it."""
    with on_gpu():
        # JAX promises nothing for stored programs with kernels; this one is not stored.
        allowed = [jax.export.DisabledSafetyCheck.custom_call(KERNEL)]
        export = jax.export.export(
            function, platforms=["cuda"], disabled_checks=allowed
        )
        return export(*arguments)


@functools.cache
def topology(chip, shape="1x1x1"):
    memory, bandwidth = CHIPS[chip]
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=chip,
        target_config=_TARGET.format(chip=chip, memory=memory, bandwidth=bandwidth),
        topology=shape,
    )


def compile_for(chip, function, *arguments):
    """Compiles a jitted `function` for one GPU; needs XLA's compiler for it."""
    sharding = jax.sharding.SingleDeviceSharding(topology(chip).devices[0])
    placed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arguments
    ]
    with on_gpu(chip):
        return compile_on(function, *placed)


def compile_on(function, *arguments):
    """Compiles a jitted `function` for the devices on which its arguments are."""
    with warnings.catch_warnings():
        # jax 0.12 announces the end of what it still has.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        return function.lower(*arguments).compile()
