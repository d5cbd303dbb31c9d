import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounding_oracle as oracle

import mixprec
from mixprec.rounding import api

KEY = jax.random.key(0)
BACKENDS = ("xla", "pallas")


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def halves(x):
    return np.asarray(x).view(np.uint16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", oracle.DETERMINISTIC)
def test_round_to_equals_the_oracle(mode, backend):
    x = normal(65, 130)
    expected = oracle.round_bfloat16(np.asarray(x).view(np.uint32).ravel(), mode)
    found = mixprec.round_to(x, mode=mode, backend=backend)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(halves(found).ravel(), expected)
    carried = mixprec.round_to(x, mode=mode, out_dtype=jnp.float32, backend=backend)
    assert carried.dtype == jnp.float32
    np.testing.assert_array_equal(carried, found.astype(jnp.float32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_round_bracket_gives_both_neighbours(backend):
    x = normal(65, 130).at[0, 0].set(1.5)
    down, up = mixprec.round_bracket(x, backend=backend)
    patterns = np.asarray(x).view(np.uint32).ravel()
    for found, mode in ((down, "toward_zero"), (up, "away_from_zero")):
        expected = oracle.round_bfloat16(patterns, mode)
        np.testing.assert_array_equal(halves(found).ravel(), expected)
    assert down[0, 0] == up[0, 0] == 1.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_goes_up_with_the_probability_of_the_fraction(backend):
    n = 1 << 20
    for lower in (1 << 8, 0x4000, 0x8000, 0xC000, 0xFF00):
        word = np.uint32(0x3F800000 | lower)
        x = jnp.full((n // 1024, 1024), word.view(np.float32))
        up = mixprec.round_to(x, mode="stochastic", key=KEY, backend=backend) > 1
        expected = lower / 2**16
        sigma = np.sqrt(expected * (1 - expected) / n)
        assert abs(float(up.mean()) - expected) < 4.9 * sigma


def test_stochastic_draws_depend_on_the_key_alone():
    x = normal(100, 100)

    def draw(key):
        return halves(mixprec.round_to(x, mode="stochastic", key=key))

    assert (draw(KEY) == draw(jax.random.key(0))).all()
    assert (draw(KEY) != draw(jax.random.key(1))).any()
    assert (draw(7) == draw(7)).all()
    assert (draw(7) != draw(8)).any()
    jitted = jax.jit(lambda x, key: mixprec.round_to(x, mode="stochastic", key=key))
    assert (halves(jitted(x, KEY)) == draw(KEY)).all()
    # A new key without a new trace.
    assert (halves(jitted(x, jax.random.key(1))) == draw(jax.random.key(1))).all()
    assert jitted._cache_size() == 1


def test_shards_draw_what_the_whole_array_draws():
    x = normal(64, 96)
    round_it = jax.jit(lambda x: mixprec.round_to(x, mode="stochastic", key=KEY))
    expected = halves(round_it(x))
    for shape in ((2, 4), (8, 1), (1, 8)):
        mesh = jax.make_mesh(
            shape, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
        )
        spec = jax.sharding.PartitionSpec("a", "b")
        placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        np.testing.assert_array_equal(halves(round_it(placed)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_inputs_are_converted_exactly(dtype, backend):
    x = normal(9, 9).astype(dtype)
    found = mixprec.round_to(x, mode="toward_zero", backend=backend)
    exact = np.asarray(x.astype(jnp.float32)).view(np.uint32).ravel()
    expected = oracle.round_bfloat16(exact, "toward_zero")
    np.testing.assert_array_equal(halves(found).ravel(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_scalar_and_numpy_inputs(backend):
    empty = mixprec.round_to(jnp.zeros((0, 3)), mode="toward_zero", backend=backend)
    assert empty.shape == (0, 3)
    assert empty.dtype == jnp.bfloat16
    scalar = mixprec.round_to(np.float32(1.001), mode="toward_zero", backend=backend)
    assert scalar.shape == ()
    assert scalar == 1
    array = mixprec.round_to(
        np.float32([1.001]), mode="away_from_zero", backend=backend
    )
    assert array.tolist() == [1.0078125]


def test_the_example_of_the_docstring():
    x = jnp.float32([1.0, 1.001, -1.001])
    assert mixprec.round_to(x, mode="toward_zero").tolist() == [1, 1, -1]
    up = mixprec.round_to(x, mode="away_from_zero").tolist()
    assert up == [1, 1.0078125, -1.0078125]


# Gradients


def gradient_of(backend, **options):
    def loss(x, y):
        rounded = mixprec.round_to(
            x, mode="stochastic", key=KEY, backend=backend, **options
        )
        return jnp.sum(rounded.astype(jnp.float32) * y)

    return jax.grad(loss)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.remat(f))]
)
def test_gradient_is_that_of_the_identity(transform, backend):
    x, y = normal(5, 7), jnp.arange(35, dtype=jnp.float32).reshape(5, 7)
    gradient = transform(gradient_of(backend, out_dtype=jnp.float32))(x, y)
    np.testing.assert_array_equal(gradient, y)
    # A cotangent of the result's dtype, bfloat16, holds these whole numbers exactly.
    np.testing.assert_array_equal(transform(gradient_of(backend))(x, y), y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_jvp_vjp_and_scan(backend):
    x, t = normal(4, 6), normal(4, 6) * 2

    def round_it(x):
        return mixprec.round_bracket(x, out_dtype=jnp.float32, backend=backend)

    (down, up), (down_t, up_t) = jax.jvp(round_it, (x,), (t,))
    np.testing.assert_array_equal(down_t, t)
    np.testing.assert_array_equal(up_t, t)
    assert (abs(down) <= abs(x)).all()
    assert (abs(up) >= abs(x)).all()
    _, vjp = jax.vjp(round_it, x)
    np.testing.assert_array_equal(vjp((t, t))[0], t + t)

    def through_scan(x):
        carry, _ = jax.lax.scan(lambda c, row: (c + round_it(row)[0], None), x[0], x)
        return carry.sum()

    np.testing.assert_array_equal(
        jax.grad(through_scan)(x), jnp.ones_like(x).at[0].add(1.0)
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_gives_each_member_what_it_gets_alone(axis):
    x = normal(4, 4, 4)
    keys = jax.random.split(KEY, 4)

    def one(x, key, backend):
        return mixprec.round_to(x, mode="stochastic", key=key, backend=backend)

    alone = [one(jnp.take(x, i, axis), key, "xla") for i, key in enumerate(keys)]
    shared = [one(jnp.take(x, i, axis), keys[0], "xla") for i in range(4)]
    for backend in BACKENDS:

        def run(in_axes, x, keys, backend=backend):
            mapped = jax.vmap(lambda x, key: one(x, key, backend), in_axes)
            return halves(mapped(x, keys))

        np.testing.assert_array_equal(run((axis, 0), x, keys), halves(jnp.stack(alone)))
        np.testing.assert_array_equal(
            run((axis, None), x, keys[0]), halves(jnp.stack(shared))
        )
        many = run((None, 0), x[0], keys)
        np.testing.assert_array_equal(many[2], halves(one(x[0], keys[2], "xla")))
        gradient = jax.vmap(
            jax.grad(lambda x, b=backend: one(x, KEY, b).astype(jnp.float32).sum()),
            axis,
        )(x)
        np.testing.assert_array_equal(gradient, jnp.ones((4, 4, 4)))


# Errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "neares_even"}, ValueError, "Did you mean 'nearest_even'"),
        ({"mode": "stochastic"}, ValueError, "`key` must be given for mode"),
        (
            {"mode": "toward_zero", "key": 1},
            ValueError,
            '`key` must be None for mode "toward_zero"',
        ),
        (
            {"mode": "toward_zero", "dtype": jnp.float16},
            TypeError,
            "`dtype` must be bfloat16, got float16",
        ),
        (
            {"mode": "toward_zero", "out_dtype": jnp.float16},
            TypeError,
            "`out_dtype` must be bfloat16 or float32, got float16",
        ),
        (
            {"mode": "toward_zero", "backend": "triton"},
            ValueError,
            "`backend` must be one of auto, pallas, xla, got 'triton'",
        ),
        ({"mode": "stochastic", "key": 1.5}, TypeError, "`key` must be one JAX key"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        mixprec.round_to(jnp.zeros(3), **options)


@pytest.mark.parametrize("x", [jnp.zeros(3, jnp.int32), np.zeros(3, bool)])
def test_other_dtypes_are_refused(x):
    with pytest.raises(TypeError, match="`x` must be float32, bfloat16 or float16"):
        mixprec.round_to(x, mode="toward_zero")


def test_float64_is_refused_and_not_rounded_twice():
    with jax.enable_x64(True), pytest.raises(TypeError, match="got float64"):
        mixprec.round_bracket(jnp.zeros(3, jnp.float64))


def test_pallas_is_refused_where_it_cannot_be_had(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match='on this platform .gpu., got "pallas"'):
        api.choose_backend("pallas")
    assert api.choose_backend("auto") == "xla"
