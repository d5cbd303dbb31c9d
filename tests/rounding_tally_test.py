import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
import statistics_oracle
import tpu
from arrays import normal, words
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mixprec
from mixprec.rounding import tiling

SHAPES = [
    (), (1,), (7,), (5000,), (300_000,), (1, 1), (8, 128), (37, 300), (600, 700),
    (1024, 3), (2100, 1), (3, 5, 7), (40, 33, 130), (3, 40, 2, 300),
    (2, 3, 4, 5, 300), (2, 3, 1, 5, 7),
]  # fmt: skip
TILE = tiling.tile


def run(x, backend="pallas", dtype=jnp.bfloat16, **options):
    return mixprec.round_with_statistics(
        x, dtype, mode="stochastic", key=3, backend=backend, **options
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_add_up_to_the_array(shape):
    x = normal(*shape)
    rounded, found = run(x)
    np.testing.assert_array_equal(
        words(rounded), words(mixprec.round_to(x, mode="stochastic", key=3))
    )
    statistics_oracle.check(found, x, rounded)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_counts_of_any_patterns(shape):
    patterns = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    x = jnp.asarray(np.asarray(patterns).view(np.float32).reshape(shape))
    rounded, found = run(x, dtype="float8_e4m3fn")
    expected = mixprec.round_to(x, "float8_e4m3fn", mode="stochastic", key=3)
    np.testing.assert_array_equal(words(rounded), words(expected))
    statistics_oracle.check(found, x, rounded, "float8_e4m3fn", sums=False)


@pytest.mark.parametrize("shape", [(40_000,), (600, 700), (41, 33, 130)], ids=str)
def test_nothing_depends_on_the_blocks(shape, monkeypatch):
    x = normal(*shape)
    expected = run(x, "xla")
    steps = set()
    for budget in (2**16, 2**18, 2**20):
        small = functools.partial(TILE, vmem_budget_bytes=budget)
        monkeypatch.setattr(tiling, "tile", small)
        steps.add(np.prod(tiling.tile(shape, 6).grid))
        rounded, found = run(x)
        np.testing.assert_array_equal(words(rounded), words(expected[0]))
        assert [int(n) for n in found[:6]] == [int(n) for n in expected[1][:6]]
        statistics_oracle.check(found, x, rounded)
    assert len(steps) > 1
    assert max(steps) > 4


@pytest.mark.parametrize(
    ("view", "block", "whole"),
    [
        ((7,), (8192,), (8192,)),
        ((4, 5, 7), (4, 5, 7), (4, 8, 128)),
        ((1, 600, 700), (1, 64, 700), (1, 64, 768)),
        ((1, 5000, 4097), (1, 320, 1408), (1, 320, 1408)),
    ],
    ids=str,
)
def test_blocks_are_of_whole_vectors(view, block, whole):
    grid = tuple(-(-n // b) for n, b in zip(view, block, strict=True))
    tiles = tiling.Tiling(
        order=tuple(range(len(view))), view_shape=view, block_shape=block, grid=grid
    )
    changed = tiles.in_whole_vectors()
    assert changed.block_shape == whole
    assert changed.grid == tuple(-(-n // b) for n, b in zip(view, whole, strict=True))
    assert changed.vmem_bytes(6) == tiles.vmem_bytes(6)


def extra_traffic(compiled, shape):
    """Gives what is read and written besides the array once, and the partial sums."""
    found = tpu.moves(compiled, shape)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # Two vectors a block, twice where the compiler moves them to VMEM; and the seed.
    allowed = max(2**19, 0.005 * 4 * np.prod(shape))
    return found + ([f"{temporary} bytes"] if temporary > allowed else [])


TELLING = {
    kind: shapes.SHAPES[kind]
    for kind in ("scalar", "GPT-2", "experts", "convolutions", "activations", "odd")
}


@pytest.mark.tpu_compile
@pytest.mark.parametrize("kind", TELLING)
@pytest.mark.parametrize("generation", [tpu.GENERATIONS[0], tpu.GENERATIONS[-1]])
def test_every_shape_compiles_to_one_kernel(generation, kind):
    for shape in TELLING[kind]:
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        compiled = tpu.compile_for(generation, jax.jit(run), x)
        assert tpu.kernels(compiled) == 1, shape
        assert extra_traffic(compiled, shape) == [], shape


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", tpu.GENERATIONS)
def test_one_pass_where_xla_makes_two(generation):
    # What fits VMEM the compiler for tpu7x copies there first.
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    least = 6 * x.size
    for backend, most in (("pallas", 1.01), ("xla", 1.67)):
        function = functools.partial(
            mixprec.round_with_statistics, mode="nearest_even", backend=backend
        )
        compiled = tpu.compile_for(generation, jax.jit(function), x)
        assert tpu.kernels(compiled) == (backend == "pallas")
        accessed = compiled.cost_analysis()["bytes accessed"]
        assert least <= accessed <= most * least
        assert extra_traffic(compiled, x.shape) == []


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", tpu.GENERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_other_formats_and_inputs_compile(dtype, generation):
    for shape, source, out_dtype in (
        ((5000,), "float32", None),
        ((5000,), "bfloat16", jnp.float32),
        ((37, 300), "float8_e5m2", None),
        ((3, 40, 5, 300), "float32", jnp.float32),
    ):
        x = jax.ShapeDtypeStruct(shape, source)
        function = functools.partial(run, dtype=dtype, out_dtype=out_dtype)
        compiled = tpu.compile_for(generation, jax.jit(function), x)
        assert tpu.kernels(compiled) == 1
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((37, 300), jnp.float32)
        assert tpu.kernels(tpu.compile_for(generation, jax.jit(run), x)) == 1


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", ["v4:2x2x1", "tpu7x:2x2x1"])
def test_batches_and_gradients_compile(generation):
    x = jax.ShapeDtypeStruct((16, 512, 1024), jnp.float32)
    batch = tpu.compile_for(generation, jax.jit(jax.vmap(run)), x)
    assert tpu.kernels(batch) == 1  # in a loop

    def loss(x):
        rounded, found = run(x, out_dtype=jnp.float32)
        return jnp.sum(rounded**2), found

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    assert tpu.kernels(tpu.compile_for(generation, gradient, x)) == 1


@pytest.mark.tpu_compile
@pytest.mark.parametrize("backend", ["pallas", "xla"])
@pytest.mark.parametrize("spec", [("a", "b"), (None, ("b", "a")), ("b",), ()], ids=str)
def test_shards_compile_with_sums_over_devices_alone(spec, backend):
    devices = np.array(tpu.topology("v5e:2x2").devices).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    x = jax.ShapeDtypeStruct((4096, 8192), jnp.float32, sharding=sharding)
    function = functools.partial(run, backend=backend, sharding=sharding)
    compiled = jax.jit(function).lower(x).compile()
    assert tpu.kernels(compiled) == (backend == "pallas")
    assert tpu.moves(compiled, sharding.shard_shape(x.shape)) == []
    text = compiled.as_text()
    assert not re.search("all-gather|all-to-all|collective-permute", text)
    # Of counts, of sums, and of the largest.
    sums = re.findall(r" all-reduce(?:-start)?\(", text)
    assert len(sums) <= 3
    assert bool(sums) == (spec != ())
