import functools
import re

import gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounding_oracle as oracle
import statistics_oracle
from arrays import normal, words
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mixprec
from mixprec.rounding import formats, platforms, statistics

BACKENDS = ("xla", "pallas")
KEY = jax.random.key(0)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def stochastically(x, key=KEY, **options):
    return mixprec.round_with_statistics(x, mode="stochastic", key=key, **options)


def check_same(found, expected):
    """Compares statistics of the same elements, summed up in another order."""
    for name, a, b in zip(expected._fields, found, expected, strict=True):
        assert a.dtype == b.dtype
        if a.dtype == jnp.uint32 or name == "largest_error":
            np.testing.assert_array_equal(a, b, err_msg=name)
    np.testing.assert_allclose(found.squared_error, expected.squared_error, 1e-5)
    np.testing.assert_allclose(found.squared_value, expected.squared_value, 1e-5)
    # Up to 2^-8 of 1 each, of either sign.
    np.testing.assert_allclose(found.error, expected.error, atol=1e-4)


def rounded_by_oracle(x, name, mode, overflow):
    patterns = oracle.round_patterns(
        np.asarray(x).view(np.uint32).ravel(), name, mode, saturate=overflow != "inf"
    )
    return patterns.astype(f"u{jnp.dtype(name).itemsize}").view(name)


# Values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", oracle.FORMATS)
def test_counts_of_telling_inputs(name, backend):
    x = jnp.asarray(oracle.telling_inputs()[::101].view(np.float32))
    for which, mode in enumerate(oracle.DETERMINISTIC):
        # Interpreting takes long: there each mode with one of both.
        step = 1 if backend == "xla" else 2
        for overflow in ("inf", "saturate")[which % step :: step]:
            _, found = mixprec.round_with_statistics(
                x, name, mode=mode, overflow=overflow, backend=backend
            )
            expected = rounded_by_oracle(x, name, mode, overflow)
            statistics_oracle.check(found, x, expected, name, sums=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", oracle.FORMATS)
def test_sums_of_numbers_as_in_training(name, backend):
    exponents = np.random.default_rng(1).integers(-20, 9, (70, 200))
    x = normal(70, 200) * np.exp2(exponents).astype(np.float32)
    for mode in oracle.DETERMINISTIC[:: 1 if backend == "xla" else 3]:
        _, found = mixprec.round_with_statistics(x, name, mode=mode, backend=backend)
        expected = rounded_by_oracle(x, name, mode, "inf")
        statistics_oracle.check(found, x, expected, name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", oracle.FORMATS)
def test_draws_are_those_of_round_to(name, backend):
    x = normal(70, 200)
    for options in ({}, {"random_bits": 3}, {"out_dtype": jnp.float32}):
        expected = mixprec.round_to(x, name, mode="stochastic", key=KEY, **options)
        rounded, found = stochastically(x, dtype=name, backend=backend, **options)
        assert rounded.dtype == expected.dtype
        np.testing.assert_array_equal(words(rounded), words(expected))
        statistics_oracle.check(found, x, expected, name)
        assert 0.3 < int(found.up) / int(found.inexact) < 0.7


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_values_one_by_one(backend):
    largest, least = 448.0, 2.0**-9
    nothing = dict.fromkeys(statistics_oracle.COUNTS, 0)
    for value, options, counts in (
        (0.0, {}, {}),
        (-0.0, {}, {}),
        (1.5, {}, {}),
        (1e-45, {}, {"inexact": 1, "underflowed": 1}),
        (-1e-45, {"mode": "toward_negative"}, {"inexact": 1, "up": 1}),
        (least, {}, {}),
        (largest, {}, {}),
        # Back to the largest, but beyond it.
        (449.0, {}, {"inexact": 1, "overflowed": 1}),
        (1e9, {}, {"inexact": 1, "up": 1, "overflowed": 1, "nan": 1}),
        (-1e9, {"overflow": "saturate"}, {"inexact": 1, "overflowed": 1}),
        (np.inf, {}, {"not_finite": 1, "nan": 1}),
        (-np.inf, {"overflow": "saturate"}, {"not_finite": 1, "nan": 1}),
        (np.inf, {"dtype": "float8_e5m2"}, {"not_finite": 1}),
        (np.nan, {}, {"not_finite": 1}),
    ):
        options = {"dtype": "float8_e4m3fn", "mode": "nearest_even"} | options
        _, found = mixprec.round_with_statistics(
            jnp.float32(value), **options, backend=backend
        )
        given = {name: int(getattr(found, name)) for name in nothing}
        assert given == nothing | counts, value
        assert np.isfinite(found.largest_error)


def test_every_payload_of_a_nan_counts_once():
    patterns = np.arange(0x7F800001, 0x80000000, 4099, np.uint32)
    x = jnp.asarray(np.concatenate([patterns, patterns | 0x80000000]).view(np.float32))
    for name in oracle.FORMATS:
        _, found = mixprec.round_with_statistics(x, name, mode="away_from_zero")
        assert int(found.not_finite) == x.size
        assert not any(float(n) for n in found._replace(not_finite=0))


def test_sums_do_not_drift_with_the_size_of_the_array():
    """As a running sum in float32 would, by 3% for as many elements."""
    x = jnp.full(1 << 24, 1.001)
    _, found = mixprec.round_with_statistics(x, mode="toward_zero")
    error = 1 - float(np.float32(1.001))
    np.testing.assert_allclose(found.error, x.size * error, 1e-5)
    np.testing.assert_allclose(found.squared_error, x.size * error**2, 1e-5)


def test_counts_reach_2_to_32():
    many = jnp.full(3, 2**30 + 1, jnp.int32)
    parts = statistics.Statistics(*[many] * 6, *[many.astype(jnp.float32)] * 4)
    for total in (statistics.total, statistics._total_at_once):
        sums = total(parts)
        assert int(sums.inexact) == int(sums.not_finite) == 3 * 2**30 + 3
        assert float(sums.error) == 3 * 2**30
        assert float(sums.largest_error) == 2**30


@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (2, 3, 4)], ids=str)
def test_both_ways_to_sum_up_agree(shape):
    patterns = jnp.asarray(
        np.random.default_rng(0).integers(0x30000000, 0x45000000, shape), jnp.uint32
    )
    to = formats.find_format("bfloat16")
    parts = statistics.of_elements(patterns, (patterns >> 16) + np.uint32(1), to)
    check_same(
        jax.jit(statistics._total_at_once)(parts), jax.jit(statistics.total)(parts)
    )


# Inputs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()], ids=str)
def test_no_element_and_no_dimension(shape, backend):
    x = jnp.full(shape, 1.001)
    run = functools.partial(stochastically, backend=backend)
    for rounded, found in (run(x), jax.jit(run)(x)):
        assert rounded.shape == shape
        statistics_oracle.check(found, x, rounded)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_narrow_inputs(dtype, backend):
    x = normal(37, 300).astype(dtype)
    rounded, found = stochastically(x, dtype="float8_e4m3fn", backend=backend)
    statistics_oracle.check(found, x, rounded, "float8_e4m3fn")


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_python_numbers_have_64_bits(backend):
    narrow = normal(37, 300)
    expected = stochastically(narrow)
    with jax.enable_x64(True):
        rounded, found = stochastically(narrow, backend=backend)
        np.testing.assert_array_equal(words(rounded), words(expected[0]))
        check_same(found, expected[1])
        # What float32 does not hold counts as well.
        x = jnp.array([1 + 2.0**-40, 1.5, 1e300, -1e-300, np.inf], jnp.float64)
        rounded, found = mixprec.round_with_statistics(
            x, mode="nearest_even", backend=backend
        )
        assert rounded.astype(jnp.float64).tolist() == [1, 1.5, np.inf, 0, np.inf]
        counts = [int(n) for n in found[:6]]
        assert counts == [3, 1, 1, 1, 0, 1]


def test_too_many_elements_are_refused():
    for shape in ((2**16, 2**16), (2**20, 2**13)):
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        for backend in BACKENDS:
            with pytest.raises(
                ValueError, match=r"fewer than 2\*\*32 elements, as far"
            ):
                jax.eval_shape(functools.partial(stochastically, backend=backend), x)
    x = jax.ShapeDtypeStruct((2**16, 2**16 - 1), jnp.float32)
    assert jax.eval_shape(stochastically, x)[0].shape == x.shape


def test_what_round_to_refuses_is_refused():
    x = jnp.ones(3)
    run = mixprec.round_with_statistics
    for error, match, options in (
        (ValueError, "`mode` must be one of", {"mode": "down"}),
        (ValueError, "`key` must be given", {"mode": "stochastic"}),
        (ValueError, "`key` must be left out", {"mode": "to_odd", "key": 1}),
        (ValueError, "`random_bits` must be", {"mode": "to_odd", "random_bits": 1}),
        (ValueError, "`overflow` must be", {"mode": "to_odd", "overflow": "nan"}),
        (ValueError, "`gradient` must be", {"mode": "to_odd", "gradient": "one"}),
        (ValueError, "`backend` must be", {"mode": "to_odd", "backend": "gpu"}),
        (TypeError, "`sharding` must be", {"mode": "to_odd", "sharding": "a"}),
        (TypeError, "`dtype` must be", {"mode": "to_odd", "dtype": "float32"}),
        (TypeError, "`out_dtype` must be", {"mode": "to_odd", "out_dtype": "int8"}),
    ):
        with pytest.raises(error, match=match):
            run(x, **options)
    with pytest.raises(TypeError, match="`x` must be float32"):
        run(jnp.ones(3, jnp.int32), mode="to_odd")
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a, b"), jnp.float32)
    with pytest.raises(ValueError, match=r"for statistics and .*, got \(a, b\)"):
        jax.eval_shape(functools.partial(run, mode="to_odd"), x)


# Transformations


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_gradient_is_that_of_the_rounded_array_alone(transform, backend):
    x, y = normal(5, 7), jnp.arange(35, dtype=jnp.float32).reshape(5, 7)

    def loss(x, **options):
        rounded, found = stochastically(
            x, out_dtype=jnp.float32, backend=backend, **options
        )
        sums = found.error + found.squared_error * found.largest_error
        return jnp.sum(rounded * y) + sums * found.inexact.astype(jnp.float32)

    np.testing.assert_array_equal(transform(jax.grad(loss))(x), y)
    stopped = functools.partial(loss, gradient="zero")
    np.testing.assert_array_equal(transform(jax.grad(stopped))(x), jnp.zeros((5, 7)))
    primals, tangents = jax.jvp(
        transform(functools.partial(stochastically, backend=backend)), (x,), (y,)
    )
    check_same(primals[1], stochastically(x)[1])
    for field, tangent in zip(primals[1], tangents[1], strict=True):
        assert tangent.dtype == (
            jax.dtypes.float0 if field.dtype == jnp.uint32 else jnp.float32
        )
        assert tangent.dtype == jax.dtypes.float0 or float(tangent) == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", [0, 2])
def test_vmap_gives_each_member_its_own(axis, backend):
    x, keys = normal(4, 4, 4), jax.random.split(KEY, 4)

    def one(x, key, backend=backend):
        return stochastically(x, key, backend=backend)

    for in_axes, arguments in (
        ((axis, 0), (x, keys)),
        ((axis, None), (x, KEY)),
        ((None, 0), (x, keys)),
    ):
        rounded, found = jax.jit(jax.vmap(one, in_axes))(*arguments)
        for i in range(4):
            member = x if in_axes[0] is None else jnp.take(x, i, axis)
            key = KEY if in_axes[1] is None else keys[i]
            expected = one(member, key, "xla")
            np.testing.assert_array_equal(words(rounded[i]), words(expected[0]))
            check_same(jax.tree.map(lambda n, i=i: n[i], found), expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_of_batches_of_gradients_and_in_scan(backend):
    x = normal(3, 4, 50)

    def one(x):
        return mixprec.round_with_statistics(x, mode="to_odd", backend=backend)

    expected = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *[one(row) for row in x.reshape(12, 50)]
    )
    _, scanned = jax.lax.scan(lambda c, row: (c, one(row)), 0, x.reshape(12, 50))
    rounded, nested = jax.vmap(jax.vmap(one))(x)
    np.testing.assert_array_equal(words(rounded).reshape(12, 50), words(expected[0]))
    np.testing.assert_array_equal(words(scanned[0]), words(expected[0]))
    check_same(jax.tree.map(lambda n: n.reshape(12), nested), expected[1])
    check_same(scanned[1], expected[1])

    def loss(x):
        rounded, found = one(x)
        return rounded.astype(jnp.float32).sum(), found

    gradient, found = jax.vmap(jax.grad(loss, has_aux=True))(x.reshape(12, 50))
    np.testing.assert_array_equal(gradient, jnp.ones((12, 50)))
    check_same(found, expected[1])
    rounded, found = jax.vmap(one)(jnp.zeros((0, 5)))
    assert (rounded.shape, found.inexact.shape) == ((0, 5), (0,))


# Shards


SPECS = [("a", "b"), (None, ("b", "a")), ("b",), ()]


def place(x, spec, kind):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_statistics_are_of_the_whole_array(spec, kind, backend):
    x = normal(64, 96)
    expected = stochastically(x)
    placed = place(x, spec, kind)
    sharding = placed.sharding if kind == AxisType.Auto else None

    def run(x):
        return stochastically(x, backend=backend, sharding=sharding)

    compiled = jax.jit(run).lower(placed).compile()
    for rounded, found in (run(placed), compiled(placed)):
        np.testing.assert_array_equal(words(rounded), words(expected[0]))
        assert rounded.sharding.is_equivalent_to(placed.sharding, 2)
        check_same(found, expected[1])
        assert found.error.sharding.is_fully_replicated
    text = compiled.as_text()
    assert not any(name in text for name in COLLECTIVES if name != "all-reduce")
    assert ("all-reduce" in text) == (spec != ())


@pytest.mark.parametrize("spec", [("a", "b"), (None, "a", "b"), ()], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_batch_can_itself_be_split(kind, spec):
    x, keys = normal(8, 8, 16), jax.random.split(KEY, 8)
    placed = place(x, spec, kind)
    placed_keys = jax.device_put(
        keys, NamedSharding(placed.sharding.mesh, PartitionSpec(*spec[:1]))
    )

    def one(x, key, backend="pallas"):
        return stochastically(x, key, backend=backend)

    def without_draws(x, _, backend="pallas"):
        return mixprec.round_with_statistics(x, mode="to_odd", backend=backend)

    for function in (one, without_draws):
        in_xla = functools.partial(function, backend="xla")
        for keys_in, placed_in, axes in (
            (KEY, KEY, (0, None)),
            (keys, placed_keys, (0, 0)),
        ):
            if function is without_draws and keys_in is keys:
                continue
            expected = jax.vmap(in_xla, axes)(x, keys_in)
            batched = jax.vmap(function, axes)
            for run in (batched, jax.jit(batched)):
                rounded, found = run(placed, placed_in)
                np.testing.assert_array_equal(words(rounded), words(expected[0]))
                check_same(found, expected[1])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_inside_shard_map_statistics_are_of_the_shard(backend, check_vma):
    x = normal(64, 96)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("a")

    def on_shard(x):
        def loss(x):
            rounded, found = stochastically(x, backend=backend)
            return rounded.astype(jnp.float32).sum(), (rounded, found)

        gradient, (rounded, found) = jax.grad(loss, has_aux=True)(x)
        return rounded, jax.tree.map(lambda n: n[None], found), gradient

    rounded, found, gradient = jax.jit(
        jax.shard_map(
            on_shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
        )
    )(x)
    expected = jax.vmap(stochastically)(x.reshape(8, 8, 96))
    np.testing.assert_array_equal(words(rounded).reshape(8, 8, 96), words(expected[0]))
    check_same(found, expected[1])
    np.testing.assert_array_equal(gradient, jnp.ones((64, 96)))


# GPUs


def test_on_a_gpu_xla_gives_them(caplog):
    platforms._log_fallback.cache_clear()
    x = jax.ShapeDtypeStruct((37, 300), jnp.float32)
    run = jax.jit(functools.partial(stochastically, backend="pallas"))
    with gpu.on_gpu():
        lowered = run.trace(x).lower(lowering_platforms=("cuda",))
    assert gpu.KERNEL not in lowered.as_text()
    (message,) = {r.getMessage() for r in caplog.records if "GPU" in r.getMessage()}
    assert "the kernel for GPUs gives no statistics" in message


@pytest.mark.gpu_compile
@pytest.mark.parametrize("chip", gpu.CHIPS)
@pytest.mark.parametrize("shape", [(5000,), (37, 300), (8192, 8192)], ids=str)
def test_compiles_for_gpus(shape, chip):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    for backend in BACKENDS:
        run = jax.jit(functools.partial(stochastically, backend=backend))
        compiled = gpu.compile_for(chip, run, x)
        # One fusion or two read the array. Of a large one the errors are kept
        # besides partial sums, as another fusion is to sum them up.
        assert len(re.findall(r" fusion\(%x[.\d]*[,)]", compiled.as_text())) <= 2
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * x.size + 2**20
