import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounding_oracle as oracle
from arrays import normal, words

import mixprec
from mixprec.rounding import dispatch, formats

KEY = jax.random.key(0)
BACKENDS = ("xla", "pallas")


def round_stochastically(x, **options):
    return mixprec.round_to(x, mode="stochastic", key=KEY, **options)


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [f.dtype for f in formats.FORMATS])
def test_other_gradients(dtype, backend):
    largest = np.float32(formats.find_format(dtype).largest_value)
    x = jnp.array([0, 1, -largest, largest, np.inf, -np.inf, np.nan], jnp.float32)
    if dtype != "bfloat16":
        x = x.at[1].set(largest * 2)
    cotangents = jnp.arange(1, 8, dtype=jnp.float32)

    def gradient(kind):
        def loss(x):
            rounded = mixprec.round_to(
                x,
                dtype,
                mode="toward_zero",
                out_dtype=jnp.float32,
                gradient=kind,
                backend=backend,
            )
            return jnp.vdot(rounded, cotangents)

        return jax.jit(jax.grad(loss))(x).tolist()

    within = [True, dtype == "bfloat16", True, True, False, False, False]
    assert gradient("straight_through") == cotangents.tolist()
    assert gradient("zero") == [0] * 7
    assert gradient("clipped") == [
        c if k else 0 for c, k in zip(cotangents, within, strict=True)
    ]


def test_float64_just_beyond_the_largest_is_clipped():
    with jax.enable_x64(True):
        x = jnp.array([65504, 65504.0000001, -65504.0000001, 1e300, np.nan])
        assert x.dtype == jnp.float64

        def loss(x):
            rounded = mixprec.round_to(
                x, jnp.float16, mode="toward_zero", gradient="clipped"
            )
            return rounded.astype(x.dtype).sum()

        assert jax.grad(loss)(x).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e5m2])
def test_the_gradient_has_the_dtype_of_the_input(dtype):
    x = normal(5).astype(dtype)
    gradient = jax.grad(lambda x: round_stochastically(x).astype(jnp.float32).sum())(x)
    assert gradient.dtype == dtype
    assert gradient.astype(jnp.float32).tolist() == [1] * 5


# Inputs


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_is_rounded_once(backend):
    just_above = [1 + 2.0**-40, 1 + 2.0**-8 + 2.0**-40, -1 - 2.0**-40, 1e300, 1e-320]
    with jax.enable_x64(True):
        x = jnp.array(just_above)
        assert x.dtype == jnp.float64

        def round_to(mode):
            found = mixprec.round_to(x, mode=mode, backend=backend)
            return np.asarray(found).astype(np.float64).tolist()

        up, least = 1.0078125, 2.0**-133
        assert round_to("away_from_zero") == [up, up, -up, np.inf, least]
        # By way of float32 the second would be a tie, and go to 1.
        assert round_to("nearest_even") == [1, up, -1, np.inf, 0]
        assert round_to("toward_positive") == [up, up, -1, np.inf, least]
        gradient = jax.grad(lambda x: mixprec.round_bracket(x)[0].astype(x.dtype).sum())
        assert gradient(x).dtype == jnp.float64


# Symbolic shapes


def exported(function, dtype="float32"):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a, b"), dtype)
    return jax.export.export(jax.jit(function))(x)


@pytest.mark.parametrize("mode", oracle.DETERMINISTIC)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_exported_function_of_any_shape_rounds_the_same(dtype, mode):
    def round_it(x):
        return mixprec.round_to(x, mode=mode)

    called = exported(round_it, dtype).call
    for shape in ((3, 5), (16, 130)):
        x = normal(*shape).astype(dtype)
        np.testing.assert_array_equal(words(called(x)), words(round_it(x)))


def test_gradients_and_brackets_of_any_shape_are_exported():
    def both(x):
        down, up = mixprec.round_bracket(x, out_dtype=jnp.float32, gradient="clipped")
        return jnp.sum(down * up)

    called = exported(jax.value_and_grad(both)).call
    for shape in ((3, 5), (16, 130)):
        x = normal(*shape)
        for found, expected in zip(called(x), jax.value_and_grad(both)(x), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "stochastic", "key": 1},
        {"mode": "stochastic", "key": 1, "backend": "pallas"},
        {"mode": "toward_zero", "backend": "pallas"},
        {"mode": "toward_zero", "backend": "pallas", "sharding": "a"},
    ],
)
def test_neither_draws_nor_the_kernel_take_a_symbolic_shape(options):
    if "sharding" in options:
        mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec(options["sharding"])
        options = options | {"sharding": jax.sharding.NamedSharding(mesh, spec)}
    with pytest.raises(ValueError, match=r"`x` must have a shape .*, got \(a, b\)"):
        exported(lambda x: mixprec.round_to(x, **options))


# Platforms


def test_pallas_is_refused_where_it_cannot_be_had(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "neuron")
    with pytest.raises(ValueError, match='on this platform .neuron., got "pallas"'):
        dispatch.choose_backend("pallas")
    assert dispatch.choose_backend("auto") == "xla"


@pytest.mark.parametrize("backend", ["triton", None, [], np.array(["xla", "auto"])])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(ValueError, match="`backend` must be one of auto, pallas, xla"):
        dispatch.choose_backend(backend)
