import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
import tpu
from arrays import words
from jax.experimental.pallas import tpu as pltpu

from mixprec.rounding import (
    api,
    bits,
    dispatch,
    formats,
    modes,
    pallas_tpu,
    random,
    tiling,
)

SHAPES = [
    (), (1,), (7,), (5000,), (300_000,), (1, 1), (8, 128), (37, 300), (600, 700),
    (1024, 3), (2100, 1), (3, 5, 7), (40, 33, 130), (2, 3, 4, 5), (3, 40, 2, 300),
    (2, 3, 1, 5, 7), (2, 1, 2, 3, 2, 9),
]  # fmt: skip
SEED = random.seed_from_key(11)


def inputs(shape):
    """Random patterns: every exponent, NaN and infinities among them."""
    words = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    return jnp.asarray(np.asarray(words).view(np.float32).reshape(shape))


def make_rounding(mode_names, dtype="bfloat16", **options):
    return api.make_rounding(dtype, mode_names, **options)


def in_kernel(x, rounding, strides=None, interpret=True):
    words = None
    if "stochastic" in rounding.modes:
        words = jnp.concatenate([SEED, jnp.zeros(2, jnp.uint32)])
    if strides is None:
        strides = random.row_major_strides(x.shape)
    return pallas_tpu.round_pallas(
        x, words, rounding=rounding, strides=strides, interpret=interpret
    )


def in_xla(x, rounding):
    seed = SEED if "stochastic" in rounding.modes else None
    return dispatch.round_seeded(x, rounding, seed=seed, backend="xla")


def check_equal(x, rounding):
    found, expected = in_kernel(x, rounding), in_xla(x, rounding)
    for name, y, z in zip(rounding.modes, found, expected, strict=True):
        assert y.dtype == z.dtype == rounding.out_dtype
        np.testing.assert_array_equal(words(y), words(z), err_msg=name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interpreted_kernel_equals_xla_everywhere(shape):
    x = inputs(shape)
    for names in (modes.MODES, ("toward_zero", modes.NEXT), ("stochastic",)):
        check_equal(x, make_rounding(names))


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("to_float32", [False, True])
@pytest.mark.parametrize("dtype", [f.dtype for f in formats.FORMATS])
def test_every_format_and_result(dtype, to_float32, overflow):
    out_dtype = jnp.float32 if to_float32 else None
    options = dict(dtype=dtype, out_dtype=out_dtype, overflow=overflow)
    check_equal(inputs((70, 200)), make_rounding(modes.MODES, **options))


@pytest.mark.parametrize("dtype", [f.dtype for f in formats.FORMATS])
def test_narrow_inputs_are_widened_in_the_kernel(dtype):
    source = formats.find_format(dtype)
    patterns = np.arange(1 << source.bits, dtype=np.uint32)
    x = jnp.asarray(patterns.astype(source.pattern_dtype).view(dtype)).reshape(-1, 64)
    for to in ("bfloat16", "float8_e4m3fn"):
        check_equal(x, make_rounding(modes.MODES, dtype=to))


@pytest.mark.parametrize("options", [{"hash_values": True}, {"random_bits": 3}])
def test_both_other_kinds_of_draw(options):
    check_equal(inputs((70, 200)), make_rounding(("stochastic",), **options))


@pytest.mark.parametrize("shape", [(300_000,), (600, 700), (40, 33, 130)], ids=str)
def test_bits_do_not_depend_on_the_blocks(shape, monkeypatch):
    x, rounding = inputs(shape), make_rounding(("stochastic",))
    expected = words(in_kernel(x, rounding)[0])
    steps = set()
    for budget in (2**16, 2**18, 2**20):
        small = functools.partial(TILE, vmem_budget_bytes=budget)
        monkeypatch.setattr(tiling, "tile", small)
        steps.add(np.prod(tiling.tile(shape, 6).grid))
        np.testing.assert_array_equal(words(in_kernel(x, rounding)[0]), expected)
    assert len(steps) > 1


TILE = tiling.tile


def test_the_draw_follows_the_strides():
    x, rounding = jnp.full((4, 300), 1.001), make_rounding(("stochastic",))

    def draw(*strides):
        return words(in_kernel(x, rounding, random.Strides(*strides))[0])

    still, moving = draw((0, 1), (0, 0)), draw((300, 1), (0, 0))
    assert (still == still[0]).all()
    assert (moving[0] == still[0]).all()
    assert (moving[1] != still[1]).any()
    high = draw((0, 1), (1, 0))
    assert all((high[i] != high[j]).any() for i in range(4) for j in range(i))


def test_the_second_word_of_the_index_is_that_of_the_xla_path():
    """As in an array of more than 2^32 elements, of which these are the last ones."""
    shape = (5, 3, 200)
    x = inputs(shape)
    strides = random.Strides((0, 200, 1), (1, 0, 0))
    (found,) = in_kernel(x, make_rounding(("stochastic",)), strides)
    draws = random.random_bits(SEED, random.index_words(shape, strides))
    patterns = bits.round_bits(
        bits.from_float32(x),
        formats.find_format("bfloat16"),
        "stochastic",
        random_bits=draws,
    )
    np.testing.assert_array_equal(words(found), np.asarray(patterns).astype(np.uint16))


def test_bits_from_the_hardware_reach_the_rounding():
    """The TPU interpreter's generator gives nothing but zeros: always down."""
    rounding = make_rounding(("stochastic",), random_source="hardware")
    down = make_rounding(("toward_zero",))
    for shape in ((), (7,), (5000,), (37, 300), (3, 40, 2, 300)):
        x = inputs(shape)
        (found,) = in_kernel(x, rounding, interpret=pltpu.InterpretParams())
        np.testing.assert_array_equal(words(found), words(in_xla(x, down)[0]))


@pytest.mark.parametrize("shape", [(40_000,), (600, 700), (40, 33, 130)], ids=str)
def test_each_block_and_seed_sets_the_generator_anew(shape, monkeypatch):
    """With a generator that gives one word, made of the seeds, for a whole block."""
    seeds = []
    monkeypatch.setattr(pltpu, "prng_seed", lambda *given: seeds.append(given))

    def one_word(shape):
        first, second = (seed.astype(jnp.uint32) for seed in seeds[-1])
        return jnp.full(shape, first ^ (second >> 16), jnp.uint32)

    monkeypatch.setattr(pltpu, "prng_random_bits", one_word)
    small = functools.partial(TILE, vmem_budget_bytes=2**17)
    monkeypatch.setattr(tiling, "tile", small)
    steps = np.prod(tiling.tile(shape, 8).grid)
    assert steps > 4
    # Between 1 and its upper neighbour, at each of 2^16 places: where the draw begins
    # to go up tells the draw.
    rounding = make_rounding(
        ("stochastic",), random_source="hardware", out_dtype=jnp.float32
    )
    whole = random.Strides((0,) * len(shape), (0,) * len(shape))

    def draws(seed, first):
        scalars = jnp.concatenate([seed, jnp.array(first, jnp.uint32)])
        bits_up = []
        for fraction in range(2048, 2**16, 4096):
            x = np.full(shape, 0x3F800000 + fraction, np.uint32).view(np.float32)
            (found,) = pallas_tpu.round_pallas(
                jnp.asarray(x),
                scalars,
                rounding=rounding,
                strides=whole,
                interpret=True,
            )
            bits_up.append(np.asarray(found).ravel() > 1)
        return np.sum(bits_up, 0)

    base = draws(SEED, (0, 0))
    assert len(set(base)) > 4
    for other in (draws(SEED ^ 1, (0, 0)), draws(SEED, (1, 0)), draws(SEED, (0, 1))):
        assert (other != base).mean() > 0.5


@pytest.mark.parametrize("shape", [(), (5000,), (37, 300)], ids=str)
@pytest.mark.parametrize("mode", ["nearest_even", "stochastic"])
def test_the_result_can_take_the_memory_of_the_input(shape, mode):
    x = inputs(shape)
    key = 3 if mode == "stochastic" else None
    options = dict(mode=mode, key=key, out_dtype=jnp.float32)
    expected = words(api.round_to(x, **options))
    in_place = jax.jit(
        lambda x: api.round_to(x, **options, backend="pallas", in_place=True),
        donate_argnums=0,
    )
    address = x.unsafe_buffer_pointer()
    found = in_place(x)
    assert x.is_deleted()
    assert found.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(words(found), expected)
    # What is needed afterwards is copied first, not lost.
    y = inputs(shape)
    found, kept = jax.jit(lambda x: (in_place(x), x))(y)
    np.testing.assert_array_equal(words(found), expected)
    np.testing.assert_array_equal(words(kept), words(y))


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", tpu.GENERATIONS)
@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_in_place_needs_no_second_array_on_a_tpu(backend, generation):
    shape = (16384, 16384)  # too large for XLA to move to VMEM first
    x = jax.ShapeDtypeStruct(shape, jnp.float32)

    def run(x):
        return api.round_to(
            x,
            mode="stochastic",
            key=3,
            out_dtype=jnp.float32,
            backend=backend,
            in_place=True,
        )

    compiled = tpu.compile_for(generation, jax.jit(run, donate_argnums=0), x)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * math.prod(shape)
    assert extra_traffic(compiled, shape) == []


def shards(function, devices, check_vma):
    """Runs `function` on two shards of an array's rows."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("data",), axis_types=auto)
    spec = jax.sharding.PartitionSpec("data", None)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return jax.jit(mapped), jax.sharding.NamedSharding(mesh, spec)


def bracket_in_kernel(x, *, interpret):
    rounding = make_rounding(("toward_zero", "away_from_zero"))
    return in_kernel(x, rounding, interpret=interpret)


def test_runs_on_shards():
    x = inputs((64, 200))
    run, _ = shards(
        lambda x: bracket_in_kernel(x, interpret=True), jax.devices(), check_vma=False
    )
    whole = bracket_in_kernel(x, interpret=True)
    for found, expected in zip(run(x), whole, strict=True):
        np.testing.assert_array_equal(words(found), words(expected))


@pytest.mark.tpu_compile
@pytest.mark.parametrize("check_vma", [True, False])
def test_compiles_on_shards_without_communication(check_vma):
    devices = tpu.topology("v5e:2x2").devices
    run, sharding = shards(
        lambda x: bracket_in_kernel(x, interpret=False), devices, check_vma
    )
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=sharding)
    compiled = run.lower(x).compile()
    assert tpu.kernels(compiled) == 1
    assert tpu.moves(compiled, (2048, 4096)) == []
    collective = "all-gather|all-reduce|all-to-all|collective-permute"
    assert not re.search(collective, compiled.as_text())


def bracket_to_float32(x):
    return api.round_bracket(x, out_dtype=jnp.float32, backend="pallas")


def to_bfloat16(x):
    return api.round_bracket(x, backend="pallas")


def stochastic(x):
    return api.round_to(x, mode="stochastic", key=3, backend="pallas")


def to_one_byte(x):
    return api.round_to(
        x, jnp.float8_e4m3fn, mode="stochastic", key=3, backend="pallas"
    )


def from_hardware(x):
    return api.round_to(
        x, mode="stochastic", key=3, backend="pallas", random_source="hardware"
    )


def without_grid(x):
    """The kernel of the bug report: the same bits, the whole array as one block."""

    def kernel(x_ref, down_ref, up_ref):
        patterns, to = bits.from_float32(x_ref[...]), formats.find_format("bfloat16")
        for ref, mode in ((down_ref, "toward_zero"), (up_ref, "away_from_zero")):
            rounded = bits.round_bits(patterns, to, mode)
            ref[...] = bits.to_float(rounded, to, jnp.float32)

    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return pallas_tpu.pl.pallas_call(kernel, out_shape=(out, out))(x)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", tpu.GENERATIONS)
def test_the_array_of_the_report_compiles_with_no_other_traffic(generation):
    x = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)
    compiled = tpu.compile_for(generation, jax.jit(bracket_to_float32), x)
    assert tpu.kernels(compiled) == 1
    assert tpu.moves(compiled, x.shape) == []
    assert compiled.memory_analysis().temp_size_in_bytes == 0
    # 4 bytes in, 8 out, as the kernel's own estimate says; and some of bookkeeping.
    least = 12 * 2048 * 4096
    assert least <= compiled.cost_analysis()["bytes accessed"] <= least + 1024


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", ["v4:2x2x1", "v5e:2x2", "v6e:2x2"])
def test_the_same_kernel_without_a_grid_is_refused(generation):
    small = jax.ShapeDtypeStruct((128, 256), jnp.float32)
    assert tpu.kernels(tpu.compile_for(generation, jax.jit(without_grid), small)) == 1
    large = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"(?i)RESOURCE_EXHAUSTED.*vmem"
    ):
        tpu.compile_for(generation, jax.jit(without_grid), large)


def extra_traffic(compiled, shape):
    """Gives what a program does with an array besides reading and writing it once."""
    found = tpu.moves(compiled, shape)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # The seed's words may take a page.
    return found + ([f"{temporary} bytes"] if temporary > 128 * 1024 else [])


@pytest.mark.tpu_compile
@pytest.mark.parametrize("kind", shapes.SHAPES)
@pytest.mark.parametrize(
    ("function", "generation"),
    # For the others the oldest and the newest are enough.
    [(stochastic, name) for name in tpu.GENERATIONS]
    + [
        (function, name)
        for function in (to_bfloat16, to_one_byte, from_hardware)
        for name in (tpu.GENERATIONS[0], tpu.GENERATIONS[-1])
    ],
)
def test_every_shape_compiles_with_no_other_traffic(generation, kind, function):
    for shape in shapes.SHAPES[kind]:
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        compiled = tpu.compile_for(generation, jax.jit(function), x)
        # The compiler stores one-byte elements in another order than float32 here.
        is_reordered = function is to_one_byte and shape == (5, 4, 3, 2, 129, 9)
        assert tpu.kernels(compiled) == (0 if is_reordered else 1), shape
        if not is_reordered:
            assert extra_traffic(compiled, shape) == [], shape


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4096, 1, 4096), "bfloat16"),
        ((128, 1, 100), "bfloat16"),
        ((5, 4, 3, 2, 129, 9), "float8_e4m3fn"),
        ((30, 400, 2, 300), "float8_e5m2"),
    ],
    ids=str,
)
def test_between_two_orders_in_memory_xla_reads_and_writes_once(shape, dtype):
    def run(x, mode, key, **options):
        return api.round_to(x, dtype, mode=mode, key=key, backend="pallas", **options)

    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    for mode, key in (("toward_zero", None), ("stochastic", 3)):
        jitted = jax.jit(functools.partial(run, mode=mode, key=key))
        compiled = tpu.compile_for("v5p:2x2x1", jitted, x)
        assert tpu.kernels(compiled) == 0
        assert compiled.memory_analysis().temp_size_in_bytes <= 128 * 1024
    # Its bits come from the kernel alone, with a copy.
    jitted = jax.jit(
        functools.partial(run, mode="stochastic", key=3, random_source="hardware")
    )
    assert tpu.kernels(tpu.compile_for("v5p:2x2x1", jitted, x)) == 1


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", tpu.GENERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_inputs_compile_with_no_other_traffic(dtype, generation):
    # What fits VMEM the compiler for tpu7x copies there first.
    x = jax.ShapeDtypeStruct((8192, 8192), dtype)
    compiled = tpu.compile_for(generation, jax.jit(to_one_byte), x)
    assert tpu.kernels(compiled) == 1
    assert extra_traffic(compiled, x.shape) == []
    least = (x.dtype.itemsize + 1) * x.size
    assert least <= compiled.cost_analysis()["bytes accessed"] <= least + 128 * 1024


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", tpu.GENERATIONS)
def test_compiles_where_python_numbers_have_64_bits(generation):
    with jax.enable_x64(True):
        for function in (stochastic, to_one_byte, from_hardware, bracket_to_float32):
            for shape in ((), (5000,), (37, 300), (3, 40, 5, 300)):
                x = jax.ShapeDtypeStruct(shape, jnp.float32)
                compiled = tpu.compile_for(generation, jax.jit(function), x)
                assert tpu.kernels(compiled) == 1
                assert extra_traffic(compiled, shape) == []


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", tpu.GENERATIONS)
def test_bits_from_the_hardware_compile_for_every_generation(generation):
    for shape in ((5000,), (8000, 4097), (3, 5, 7)):
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        compiled = tpu.compile_for(generation, jax.jit(from_hardware), x)
        assert tpu.kernels(compiled) == 1
        assert extra_traffic(compiled, shape) == []


@pytest.mark.tpu_compile
def test_more_than_2_to_32_elements_compile():
    shape = (10, 8, 4096, 14336)  # 4.8e9 elements, 29 GB with the result
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    compiled = tpu.compile_for("v5p:2x2x1", jax.jit(stochastic), x)
    assert tpu.kernels(compiled) == 1
    assert extra_traffic(compiled, shape) == []


@pytest.mark.tpu_compile
def test_the_xla_path_reads_and_writes_the_least_too():
    x = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)

    def nearest(x):
        return api.round_to(x, mode="nearest_even", backend="xla")

    for function in (nearest, lambda x: api.round_to(x, mode="stochastic", key=3)):
        compiled = tpu.compile_for("v5e:2x2", jax.jit(function), x)
        accessed = compiled.cost_analysis()["bytes accessed"]
        # 4 bytes in, 2 out; of the seed, 8 bytes and a page.
        assert 6 * 2048 * 4096 <= accessed <= 6 * 2048 * 4096 + 128 * 1024


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", tpu.GENERATIONS)
@pytest.mark.parametrize("dtype", [f.dtype for f in formats.FORMATS])
def test_every_format_and_mode_compiles_with_no_other_traffic(dtype, generation):
    x = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)
    size = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}[dtype]
    for out_dtype in (None, jnp.float32):
        for mode in ("to_odd", "stochastic"):
            compiled = tpu.compile_for(
                generation,
                jax.jit(
                    lambda x, mode=mode, out_dtype=out_dtype: api.round_to(
                        x,
                        dtype,
                        mode=mode,
                        key=3 if mode == "stochastic" else None,
                        overflow="saturate",
                        out_dtype=out_dtype,
                        backend="pallas",
                    )
                ),
                x,
            )
            assert tpu.kernels(compiled) == 1
            assert tpu.moves(compiled, x.shape) == []
            least = (8 if out_dtype else 4 + size) * 2048 * 4096
            accessed = compiled.cost_analysis()["bytes accessed"]
            if dtype == "float16" and not out_dtype:
                # The TPU's kernels know no float16: its patterns are read once more.
                least += 4 * 2048 * 4096
            else:
                assert compiled.memory_analysis().temp_size_in_bytes <= 128 * 1024
            assert least <= accessed <= least + 128 * 1024
