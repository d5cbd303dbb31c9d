import logging

import gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu
from arrays import normal, words
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mixprec
from mixprec.rounding import platforms

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def round_stochastically(x, **options):
    return mixprec.round_to(x, mode="stochastic", key=0, **options)


def test_runs_without_jit():
    x = normal(5, 7)
    with jax.disable_jit():
        found = round_stochastically(x, backend="pallas")
        down, _ = mixprec.round_down_and_up(x)
    np.testing.assert_array_equal(words(found), words(round_stochastically(x)))
    np.testing.assert_array_equal(down, mixprec.round_down_and_up(x)[0])


def test_runs_where_python_numbers_have_64_bits():
    x = normal(37, 300)
    expected = words(round_stochastically(x))
    with jax.enable_x64(True):
        found = round_stochastically(x, backend="pallas")
        np.testing.assert_array_equal(words(found), expected)


def lower_for(platform, function):
    x = jax.ShapeDtypeStruct((37, 300), jnp.float32)
    with gpu.on_gpu():
        return jax.jit(function).trace(x).lower(lowering_platforms=(platform,))


def test_what_no_gpu_can_do_is_refused():
    def from_hardware(x):
        return round_stochastically(x, backend="pallas", random_source="hardware")

    def stochastic(x):
        return round_stochastically(x, backend="pallas")

    for platform, function, message in (
        ("cuda", from_hardware, '`random_source` must be "hash" for a GPU'),
        ("cuda", mixprec.round_down_and_up, "for TPUs and, interpreted, for CPUs"),
        ("rocm", mixprec.round_down_and_up, "for TPUs and, interpreted, for CPUs"),
        ("rocm", stochastic, '`backend` must be "xla" or "auto" on an AMD GPU'),
    ):
        with pytest.raises(ValueError, match=message):
            lower_for(platform, function)
    assert lower_for("cuda", stochastic).as_text().count(gpu.KERNEL) == 1
    assert "custom_call" not in lower_for("rocm", round_stochastically).as_text()


def test_what_xla_splits_it_rounds(caplog):
    x = normal(64, 96)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    platforms._log_fallback.cache_clear()
    run = jax.jit(lambda x: round_stochastically(x, backend="pallas"))
    with caplog.at_level(logging.WARNING):
        compiled = run.lower(placed).compile()
    assert [r for r in caplog.records if "the sharding of `x` is not" in r.getMessage()]
    found = compiled(placed)
    np.testing.assert_array_equal(words(found), words(round_stochastically(x)))
    assert found.sharding.is_equivalent_to(placed.sharding, 2)
    assert not any(name in compiled.as_text() for name in COLLECTIVES)
    from_hardware = jax.jit(
        lambda x: round_stochastically(x, backend="pallas", random_source="hardware")
    )
    with pytest.raises(ValueError, match="`sharding` must be given for `random_source"):
        from_hardware(placed)


@pytest.mark.tpu_compile
def test_what_xla_splits_it_rounds_on_a_tpu():
    devices = np.array(tpu.topology("v5e:2x2").devices)
    mesh = jax.sharding.Mesh(devices, ("a",), axis_types=(AxisType.Auto,))
    for spec in (PartitionSpec("a"), PartitionSpec()):
        sharding = NamedSharding(mesh, spec)
        x = jax.ShapeDtypeStruct((4096, 8192), jnp.float32, sharding=sharding)
        run = jax.jit(lambda x: round_stochastically(x, backend="pallas"))
        compiled = run.lower(x).compile()
        assert tpu.kernels(compiled) == 0
        assert tpu.moves(compiled, sharding.shard_shape(x.shape)) == []
        assert not any(name in compiled.as_text() for name in COLLECTIVES)
