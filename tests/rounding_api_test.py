import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounding_oracle as oracle
from arrays import normal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mixprec

KEY = jax.random.key(0)
BACKENDS = ("xla", "pallas")


def halves(x):
    return np.asarray(x).view(np.uint16)


def expected_bfloat16(x, mode):
    patterns = np.asarray(x).view(np.uint32).ravel()
    return oracle.round_patterns(patterns, "bfloat16", mode)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", oracle.DETERMINISTIC)
def test_round_to_equals_the_oracle(mode, backend):
    x = normal(65, 130)
    expected = expected_bfloat16(x, mode)
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
    for found, mode in ((down, "toward_zero"), (up, "away_from_zero")):
        expected = expected_bfloat16(x, mode)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_inputs_are_converted_exactly(dtype, backend):
    x = normal(9, 9).astype(dtype)
    found = mixprec.round_to(x, mode="toward_zero", backend=backend)
    expected = expected_bfloat16(x.astype(jnp.float32), "toward_zero")
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


# Options


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", oracle.FORMATS)
def test_every_format_with_both_overflows(name, backend):
    x = jnp.asarray(oracle.telling_inputs()[::101].view(np.float32))
    patterns = np.asarray(x).view(np.uint32)
    for overflow in ("inf", "saturate"):
        saturate = overflow == "saturate"
        for mode in oracle.DETERMINISTIC:
            expected = oracle.round_patterns(patterns, name, mode, saturate=saturate)
            found = mixprec.round_to(
                x, name, mode=mode, overflow=overflow, backend=backend
            )
            assert found.dtype == name
            nan = oracle.is_nan(expected, name)
            found = np.asarray(found).view(f"u{found.dtype.itemsize}")
            np.testing.assert_array_equal(found[~nan], expected[~nan])
            assert oracle.is_nan(found[nan], name).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bracket_can_be_made_never_empty(backend):
    x = jnp.array([0.0, -0.0, 1.5, 1.501, 448.0, -448.0, np.inf], jnp.float32)
    options = dict(exact="next", out_dtype=jnp.float32, backend=backend)
    down, up = mixprec.round_bracket(x, jnp.float8_e4m3fn, **options)
    assert down.tolist()[:6] == [0, 0, 1.5, 1.5, 448, -448]
    least = 2.0**-9
    assert up.tolist()[:4] == [least, -least, 1.625, 1.625]
    assert jnp.isnan(up[4:]).all()  # E4M3 has no infinities
    down, up = mixprec.round_bracket(
        x, jnp.float8_e4m3fn, overflow="saturate", **options
    )
    assert up.tolist()[4:6] == [448, -448]
    down, up = mixprec.round_bracket(x, jnp.float16, **options)
    assert down.tolist()[-1] == up.tolist()[-1] == np.inf


@pytest.mark.parametrize("number", [1, 3, 8])
def test_few_random_bits_make_few_probabilities(number):
    n = 1 << 18
    word = np.uint32(0x3F80_1A00)  # 0x1A00 / 2^16: 0.1015625 of the way
    x = jnp.full((n,), word.view(np.float32))
    up = mixprec.round_to(x, mode="stochastic", key=KEY, random_bits=number) > 1
    expected = np.floor(0.1015625 * 2**number + 0.5) / 2**number
    sigma = np.sqrt(expected * (1 - expected) / n)
    assert abs(float(up.mean()) - expected) <= 4.9 * sigma


MODES_OF_GFLOAT = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "toward_positive": gfloat.RoundMode.TowardPositive,
    "toward_negative": gfloat.RoundMode.TowardNegative,
}
FORMATS_OF_GFLOAT = {
    "bfloat16": gfloat.formats.format_info_bfloat16,
    "float16": gfloat.formats.format_info_binary16,
    "float8_e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "float8_e5m2": gfloat.formats.format_info_ocp_e5m2,
}


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("mode", MODES_OF_GFLOAT)
@pytest.mark.parametrize("name", FORMATS_OF_GFLOAT)
def test_agrees_with_gfloat_in_float64(name, mode, saturate):
    x = oracle.telling_inputs()[::23].view(np.float32)
    x = x[np.isfinite(x)]  # gfloat saturates infinities
    expected = gfloat.round_ndarray(
        FORMATS_OF_GFLOAT[name], x.astype(np.float64), MODES_OF_GFLOAT[mode], saturate
    )
    found = mixprec.round_to(
        x,
        name,
        mode=mode,
        overflow="saturate" if saturate else "inf",
        out_dtype=jnp.float32,
    )
    np.testing.assert_array_equal(np.asarray(found, np.float64), expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


# Errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "neares_even"}, ValueError, "Did you mean 'nearest_even'"),
        ({"mode": "stochastic"}, ValueError, "`key` must be given for mode"),
        (
            {"mode": "toward_zero", "key": 1},
            ValueError,
            '`key` must be left out for mode "toward_zero"',
        ),
        (
            {"mode": "toward_zero", "dtype": jnp.int8},
            TypeError,
            "`dtype` must be one of bfloat16, .*, got int8",
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
        (
            {"mode": "toward_zero", "random_bits": 8},
            ValueError,
            '`random_bits` must be left out for mode "toward_zero"',
        ),
        *(
            (
                {"mode": "stochastic", "key": 1, "random_bits": number},
                ValueError,
                f"`random_bits` must be from 1 to 32, got {number}",
            )
            for number in (0, 33, np.int8(-1))
        ),
        *(
            (
                {"mode": "stochastic", "key": 1, "random_bits": number},
                TypeError,
                "`random_bits` must be an integer from 1 to 32 or None, got ",
            )
            for number in (
                8.0,
                True,
                np.True_,
                "8",
                [8],
                np.array(8),
                jnp.array(8),
                np.ones(3),
            )
        ),
        *(
            (
                {"mode": "toward_zero", "out_dtype": jnp.float32, "in_place": value},
                TypeError,
                "`in_place` must be True or False, got ",
            )
            for value in (1, 0, "yes", None, [], np.ones(3))
        ),
        (
            {"mode": "toward_zero", "overflow": "saturated"},
            ValueError,
            "`overflow` must be one of inf, saturate, .* Did you mean 'saturate'",
        ),
        (
            {"mode": "toward_zero", "gradient": "none"},
            ValueError,
            "`gradient` must be one of straight_through, clipped, zero, got 'none'",
        ),
        ({"mode": "stochastic", "key": 1.5}, TypeError, "`key` must be one JAX key"),
        (
            {"mode": "toward_zero", "random_source": "hardware"},
            ValueError,
            '`random_source` must be left out for mode "toward_zero"',
        ),
        (
            {"mode": "stochastic", "key": 1, "random_source": "hardwear"},
            ValueError,
            "`random_source` must be one of hash, hardware, .* Did you mean 'hardware'",
        ),
        *(
            (
                {
                    "mode": "stochastic",
                    "key": 1,
                    "random_source": "hardware",
                    "backend": backend,
                },
                ValueError,
                f'`random_source` must be "hash" for {where}, got "hardware"',
            )
            for backend, where in (
                ("auto", "backend 'auto'"),
                ("xla", "backend 'xla'"),
                ("pallas", "a CPU"),
            )
        ),
        (
            {"mode": "toward_zero", "in_place": True},
            ValueError,
            "`in_place` must be False unless .* float32, got float32 and bfloat16",
        ),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        mixprec.round_to(jnp.zeros(3), **options)


NO_CHOICES = (None, 3, [], ["inf"], {}, np.ones(3), np.array("inf"), jnp.ones(3))


@pytest.mark.parametrize("value", NO_CHOICES)
@pytest.mark.parametrize(
    "name", ["mode", "overflow", "gradient", "backend", "random_source"]
)
def test_what_is_no_string_is_no_choice(name, value):
    options = {"mode": "stochastic", "key": 1, name: value}
    with pytest.raises(ValueError, match=f"`{name}` must be one of "):
        mixprec.round_to(jnp.zeros(3), **options)


@pytest.mark.parametrize("value", NO_CHOICES)
@pytest.mark.parametrize("name", ["exact", "overflow", "gradient", "backend"])
def test_what_is_no_string_is_no_choice_for_the_bracket(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be one of "):
        mixprec.round_bracket(jnp.zeros(3), **{name: value})


NO_DTYPES = ("foo", "", "(2,", 3, [], {"a": 1}, ["a"], np.ones(3), np.ones)


@pytest.mark.parametrize("dtype", [*NO_DTYPES, jnp.zeros(3)])
def test_what_is_no_dtype_is_refused_by_the_name_of_the_argument(dtype):
    x = jnp.zeros(3)
    for message, options in (
        ("`dtype` must be one of bfloat16, float16, .*, got ", {"dtype": dtype}),
        ("`out_dtype` must be bfloat16 or float32, got ", {"out_dtype": dtype}),
    ):
        with pytest.raises(TypeError, match=message):
            mixprec.round_to(x, mode="toward_zero", **options)
        with pytest.raises(TypeError, match=message):
            mixprec.round_bracket(x, **options)


def test_integers_and_booleans_of_numpy_are_taken():
    x = normal(4, 5)
    for options in ({}, {"out_dtype": np.dtype("float32"), "in_place": np.True_}):
        found, expected = (
            mixprec.round_to(x, mode="stochastic", key=3, random_bits=bits, **options)
            for bits in (np.uint8(5), 5)
        )
        np.testing.assert_array_equal(found, expected)


def mesh_of_two():
    return jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize(
    "make",
    [
        lambda mesh: PartitionSpec("a"),
        lambda mesh: mesh,
        lambda mesh: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        lambda mesh: NamedSharding(mesh.abstract_mesh, PartitionSpec("a")),
        lambda mesh: NamedSharding(
            jax.sharding.Mesh(np.array([]), ("a",)), PartitionSpec("a")
        ),
        *(lambda mesh, v=v: v for v in ("a", 0, 1, False, (), np.ones(2))),
    ],
)
def test_what_is_no_sharding_over_devices_is_refused(make, backend):
    options = dict(backend=backend, sharding=make(mesh_of_two()))
    message = "`sharding` must be a jax.sharding.NamedSharding over a mesh of devices"
    with pytest.raises(TypeError, match=message):
        mixprec.round_to(normal(4, 6), mode="toward_zero", **options)
    with pytest.raises(TypeError, match=message):
        mixprec.round_bracket(normal(4, 6), **options)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_a_sharding_that_leaves_a_dimension_open_is_refused(backend):
    spec = PartitionSpec("a", PartitionSpec.UNCONSTRAINED)
    options = dict(backend=backend, sharding=NamedSharding(mesh_of_two(), spec))
    message = "`sharding` must say how each dimension is split, got .*UNCONSTRAINED"
    with pytest.raises(ValueError, match=message):
        mixprec.round_to(normal(4, 6), mode="toward_zero", **options)
    with pytest.raises(ValueError, match=message):
        mixprec.round_bracket(normal(4, 6), **options)


def test_xla_takes_a_sharding_that_does_not_divide():
    x = normal(5, 7)
    sharding = NamedSharding(mesh_of_two(), PartitionSpec("a"))
    found = mixprec.round_to(x, mode="to_odd", backend="xla", sharding=sharding)
    np.testing.assert_array_equal(found, mixprec.round_to(x, mode="to_odd"))


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (None, "NoneType"),
        ("one", "str"),
        (["one"], "list"),
        ([None], "list"),
        ([[1.0, 2.0], [3.0]], "list"),
        ({"a": np.zeros(3, np.float32)}, "dict"),
        (object(), "object"),
        (10**30, "int"),
        (jnp.bfloat16, "_ScalarMeta"),
        (jax.ShapeDtypeStruct((3,), jnp.float32), "ShapeDtypeStruct"),
        (np.array(["one"]), "ndarray of <U3"),
        (np.zeros(3, ">f4"), "ndarray of >f4"),
        (np.ma.zeros(3, np.float32), "MaskedArray of float32"),
    ],
)
def test_what_is_no_array_is_refused(x, got):
    message = f"`x` must be float32, bfloat16, .*, got {got}. .*one array"
    for function in (
        lambda x: mixprec.round_to(x, mode="toward_zero"),
        mixprec.round_bracket,
        mixprec.round_down_and_up,
    ):
        with pytest.raises(TypeError, match=message):
            function(x)


def test_lists_of_numbers_and_of_arrays_are_taken():
    for x in ([1.001, 2], [np.float32(1.001), jnp.float32(2)]):
        assert mixprec.round_to(x, mode="toward_zero").tolist() == [1, 2]


def test_a_tracer_that_has_leaked_is_not_taken_for_a_wrong_type():
    leaked = []
    jax.jit(leaked.append)(jnp.zeros(3))
    for x in (leaked[0], leaked):
        with pytest.raises(jax.errors.UnexpectedTracerError):
            mixprec.round_to(x, mode="toward_zero")


@pytest.mark.parametrize("x", [jnp.zeros(3, jnp.int32), np.zeros(3, bool)])
def test_other_dtypes_are_refused(x):
    with pytest.raises(TypeError, match="`x` must be float32, bfloat16, float16, "):
        mixprec.round_to(x, mode="toward_zero")


def test_float64_is_refused_where_jax_would_make_it_float32_first():
    for x in (np.zeros(3), np.float64(1)):
        with pytest.raises(
            TypeError, match="with jax_enable_x64, float64, got float64"
        ):
            mixprec.round_bracket(x)
    assert mixprec.round_to(1.001, mode="toward_zero") == 1  # no array of any dtype


def test_round_down_and_up_refuses_what_is_no_single_kernel():
    for shape in ((), (0,), (3, 0)):
        with pytest.raises(
            ValueError, match="`x` must have a dimension, and none of 0"
        ):
            mixprec.round_down_and_up(jnp.zeros(shape))
    with pytest.raises(TypeError, match="`x` must be float32, got bfloat16"):
        mixprec.round_down_and_up(jnp.zeros(3, jnp.bfloat16))


def test_round_down_and_up_refuses_a_symbolic_shape():
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a, b"), jnp.float32)
    with pytest.raises(ValueError, match=r"`x` must have a shape .*, got \(a, b\)"):
        jax.export.export(jax.jit(mixprec.round_down_and_up))(x)
