import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounding_oracle as oracle

from mixprec.rounding import bits, formats, modes

INPUTS = oracle.telling_inputs()
NAN = (INPUTS & 0x7FFFFFFF) > 0x7F800000
BFLOAT16 = formats.find_format("bfloat16")


def round_patterns(inputs, name, mode, **options):
    """Gives patterns of a format; checks on the way that nothing stands above them."""
    to = formats.find_format(name)
    patterns = np.array(
        jax.jit(lambda x: bits.round_bits(x, to, mode, **options))(jnp.asarray(inputs))
    )
    assert not (patterns >> to.bits).any()
    return patterns.astype(np.int64)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("mode", oracle.DETERMINISTIC)
@pytest.mark.parametrize("name", oracle.FORMATS)
def test_every_upper_half_with_the_telling_lower_halves(name, mode, saturate):
    found = round_patterns(INPUTS, name, mode, saturate=saturate)
    expected = oracle.round_patterns(INPUTS, name, mode, saturate=saturate)
    np.testing.assert_array_equal(found[~NAN], expected[~NAN])
    assert oracle.is_nan(found[NAN], name).all()
    sign = oracle.table(name).bits - 1
    np.testing.assert_array_equal(found[NAN] >> sign, INPUTS[NAN] >> 31)
    quiet = 1 << (oracle.table(name).mantissa_bits - 1)
    assert (found[NAN] & quiet).all()


@pytest.mark.parametrize("name", oracle.FORMATS)
def test_next_is_the_number_after_the_lower_neighbour(name):
    largest = oracle.table(name).largest
    down, _ = oracle.neighbours(np.minimum(INPUTS & 0x7FFFFFFF, 0x7F7FFFFF), name)
    finite = (INPUTS & 0x7FFFFFFF) < 0x7F800000
    magnitude = (1 << (oracle.table(name).bits - 1)) - 1
    for saturate in (False, True):
        expected = np.minimum(down + 1, largest) if saturate else down + 1
        found = round_patterns(INPUTS, name, modes.NEXT, saturate=saturate)
        np.testing.assert_array_equal(found[finite] & magnitude, expected[finite])
        infinite = (INPUTS & 0x7FFFFFFF) == 0x7F800000
        assert (found[infinite] & magnitude == largest + 1).all()
        assert oracle.is_nan(found[NAN], name).all()


@pytest.mark.parametrize("name", oracle.FORMATS)
def test_nearest_even_agrees_with_ml_dtypes(name):
    dtype = np.dtype(name)
    with np.errstate(all="ignore"):
        expected = INPUTS.view(np.float32).astype(dtype).view(f"u{dtype.itemsize}")
    found = round_patterns(INPUTS, name, "nearest_even")
    nan = oracle.is_nan(expected, name)
    np.testing.assert_array_equal(oracle.is_nan(found, name), nan)
    np.testing.assert_array_equal(found[~nan], expected[~nan])


# Where published converters have been seen to go wrong: pattern, mode, right answer.
@pytest.mark.parametrize(
    ("pattern", "mode", "expected"),
    [
        (0x7F7FFFFF, "toward_zero", 0x7F7F),  # largest finite
        (0x7F7FFFFF, "away_from_zero", 0x7F80),
        (0x7F7FFFFF, "nearest_even", 0x7F80),
        (0x7F7FFFFF, "toward_positive", 0x7F80),
        (0xFF7FFFFF, "toward_positive", 0xFF7F),
        (0xFF7FFFFF, "toward_negative", 0xFF80),
        (0x3F808000, "nearest_even", 0x3F80),  # ties
        (0x3F818000, "nearest_even", 0x3F82),
        (0x00008000, "nearest_even", 0x0000),
        (0x00018000, "nearest_even", 0x0002),
        (0x00000001, "toward_positive", 0x0001),  # the smallest subnormals
        (0x80000001, "toward_negative", 0x8001),
        (0x80000001, "toward_zero", 0x8000),
        (0x80000001, "toward_positive", 0x8000),
        (0x80000000, "away_from_zero", 0x8000),  # zeros keep their sign
        (0x00000000, "toward_negative", 0x0000),
        (0x417FFFFF, "toward_zero", 0x417F),  # tops of binades
        (0x80FFFFFE, "toward_positive", 0x80FF),
        (0x007FFFFF, "away_from_zero", 0x0080),  # from subnormal to normal
        (0x3F800000, "away_from_zero", 0x3F80),  # exact
        (0x7F800000, "toward_zero", 0x7F80),  # infinities
        (0xFF800000, "toward_positive", 0xFF80),
        (0x7F800001, "toward_zero", 0x7FC0),  # NaN of every kind
        (0xFF800001, "away_from_zero", 0xFFC0),
        (0x7FFFFFFF, "nearest_even", 0x7FFF),
        (0xFFFFFFFF, "away_from_zero", 0xFFFF),
    ],
)
def test_where_others_go_wrong(pattern, mode, expected):
    found = round_patterns(np.array([pattern], np.uint32), "bfloat16", mode)[0]
    assert f"{found:04x}" == f"{expected:04x}"


# Stochastic


def fraction(word, name):
    """Gives the patterns around a positive float32 and the exact share of the way."""
    down, up = (int(n[0]) for n in oracle.neighbours(np.array([word], np.int64), name))
    value, low, high = (
        fractions.Fraction(float(np.uint32(pattern).view(np.float32)))
        for pattern in (word, *oracle.table(name).numbers[[down, up]])
    )
    return (
        down,
        up,
        fractions.Fraction(0) if down == up else (value - low) / (high - low),
    )


@pytest.mark.parametrize("lower", [0, 1, 0x1234, 0x8000, 0xFFFF])
@pytest.mark.parametrize("upper", [0x0000, 0x3F80, 0x3FFF, 0x7F7E, 0x007F])
def test_bfloat16_goes_up_for_exactly_its_share_of_all_random_bits(upper, lower):
    word = upper << 16 | lower
    draws = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0xABCD  # the rest is unused
    inputs = np.full(draws.shape, word, np.uint32)
    found = round_patterns(inputs, "bfloat16", "stochastic", random_bits=draws)
    down, up, share = fraction(word, "bfloat16")
    assert set(found) <= {down, up}
    assert fractions.Fraction(int((found == up).sum()), 1 << 16) == (
        share or down == up
    )


def smallest_draw_that_goes_up(word, name, **options):
    """Searches the 2^32 draws: those from some number on go up."""
    down, _, _ = fraction(word, name)
    halves = np.arange(1 << 16, dtype=np.uint32)

    def goes_up(draws):
        inputs = np.full(draws.shape, word, np.uint32)
        return (
            round_patterns(inputs, name, "stochastic", random_bits=draws, **options)
            > down
        )

    last_of_each_upper_half = goes_up((halves << 16) | 0xFFFF)
    if not last_of_each_upper_half.any():
        return 2**32
    upper = int(last_of_each_upper_half.argmax()) << 16
    return upper + int(goes_up(halves + np.uint32(upper)).argmax())


# Normal numbers, subnormals that lose bits below the fraction, and almost 0.
CASES = [
    ("float16", 0x3F801234), ("float16", 0x477FDFFF), ("float16", 0x33C00001),
    ("float16", 0x33000123), ("float16", 0x2F123456), ("float16", 0x26000000),
    ("float8_e4m3fn", 0x3F812345), ("float8_e4m3fn", 0x3B123456),
    ("float8_e4m3fn", 0x36ABCDEF), ("float8_e4m3fn", 0x43DFFFFF),
    ("float8_e5m2", 0x40ABCDEF), ("float8_e5m2", 0x37123456),
    ("float8_e5m2", 0x32000001), ("bfloat16", 0x00012345),
]  # fmt: skip


@pytest.mark.parametrize(("name", "word"), CASES)
def test_every_format_goes_up_for_its_share_of_all_random_bits(name, word):
    _, _, share = fraction(word, name)
    up = 2**32 - smallest_draw_that_goes_up(word, name)
    # The draws are as fine as 2^-32.
    assert up == int(share * 2**32)


@pytest.mark.parametrize("width", [1, 4, 8, 13, 14, 16, 20, 21, 24, 31])
@pytest.mark.parametrize(("name", "word"), CASES)
def test_few_random_bits_round_the_share_to_so_many(name, word, width):
    _, _, share = fraction(word, name)
    up = 2**32 - smallest_draw_that_goes_up(word, name, random_width=width)
    half = fractions.Fraction(1, 2)
    assert up == math.floor(share * 2**width + half) << (32 - width)


@pytest.mark.parametrize("width", [None, 1, 8, 16, 20])
@pytest.mark.parametrize("name", oracle.FORMATS)
def test_no_draw_moves_what_is_exact_or_special(name, width):
    numbers = oracle.table(name).numbers[:-1].astype(np.uint32)
    numbers = np.concatenate([numbers, numbers | np.uint32(1 << 31)])
    special = np.array([0x7F800000, 0xFF800000], np.uint32)
    inputs = np.concatenate([numbers, special])
    expected = oracle.round_patterns(inputs, name, "toward_zero")
    for draw in (0, 1, 0x7FFFFFFF, 0xFFFFFFFF):
        draws = np.full(inputs.shape, draw, np.uint32)
        options = dict(random_bits=draws, random_width=width)
        found = round_patterns(inputs, name, "stochastic", **options)
        np.testing.assert_array_equal(found, expected)
        nan = np.array([0x7F800001, 0xFFFFFFFF, 0x7F80FFFF], np.uint32)
        options["random_bits"] = draws[:3]
        found = round_patterns(nan, name, "stochastic", **options)
        assert oracle.is_nan(found, name).all()


@pytest.mark.parametrize("draw", [0, 1, 0xFFFFFFFF])
@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_a_whole_step_beyond_the_largest_overflows_for_every_draw(name, draw):
    numbers = oracle.table(name).numbers
    inputs = np.array([numbers[-1], numbers[-1] + 1, 0x7F7FFFFF], np.uint32)
    draws = np.full(3, draw, np.uint32)
    found = round_patterns(inputs, name, "stochastic", random_bits=draws)
    assert (found == oracle.table(name).largest + 1).all()
    found = round_patterns(inputs, name, "stochastic", random_bits=draws, saturate=True)
    assert (found == oracle.table(name).largest).all()


# Reading and writing


@pytest.mark.parametrize("name", oracle.FORMATS)
def test_widening_keeps_every_number(name):
    to = formats.find_format(name)
    patterns = np.arange(1 << to.bits, dtype=np.uint32)
    found = np.asarray(bits.widen(jnp.asarray(patterns), to))
    numbers = oracle.table(name).numbers
    magnitudes = patterns & ((1 << (to.bits - 1)) - 1)
    finite = magnitudes <= to.largest
    expected = numbers[magnitudes[finite]] | (
        patterns[finite].astype(np.int64) >> (to.bits - 1) << 31
    )
    np.testing.assert_array_equal(found[finite], expected)
    nan = oracle.is_nan(patterns, name)
    np.testing.assert_array_equal((found & 0x7FFFFFFF) > 0x7F800000, nan)
    np.testing.assert_array_equal(found[nan] >> 31, patterns[nan] >> (to.bits - 1))
    infinite = ~finite & ~nan
    assert ((found[infinite] & 0x7FFFFFFF) == 0x7F800000).all()


@pytest.mark.parametrize("name", oracle.FORMATS)
def test_to_float_keeps_every_pattern(name):
    to = formats.find_format(name)
    patterns = np.arange(1 << to.bits, dtype=np.uint32)
    found = np.asarray(bits.to_float(jnp.asarray(patterns), to, np.dtype(name)))
    assert found.dtype == np.dtype(name)
    np.testing.assert_array_equal(found.view(to.pattern_dtype), patterns)
    found = np.asarray(bits.to_float(jnp.asarray(patterns), to, np.dtype("float32")))
    assert found.dtype == np.float32
    widened = np.asarray(bits.widen(jnp.asarray(patterns), to))
    np.testing.assert_array_equal(found.view(np.uint32), widened)


def test_from_float32_keeps_every_pattern():
    floats = jnp.asarray(INPUTS.view(np.float32))
    np.testing.assert_array_equal(np.asarray(bits.from_float32(floats)), INPUTS)


def float64_inputs():
    """Float32 numbers, their middles, both with the least added; and far outside."""
    generator = np.random.default_rng(0)
    words = generator.integers(0, 2**32, 20_000, np.uint32)
    words = np.concatenate([words, np.arange(100, dtype=np.uint32), INPUTS[::50]])
    with np.errstate(all="ignore"):
        floats = words.view(np.float32).astype(np.float64)
        after = np.nextafter(words.view(np.float32), np.float32(np.inf))
        middles = (floats + after.astype(np.float64)) / 2
        base = np.concatenate([floats, middles])
        near = [base, np.nextafter(base, np.inf), np.nextafter(base, -np.inf)]
    far = [1e300, -1e300, 1e-300, -1e-300, 5e-324, 0.0, -0.0, np.inf, -np.inf, np.nan]
    return np.concatenate(
        [*near, far, generator.integers(0, 2**64, 20_000, np.uint64).view(np.float64)]
    )


def test_from_float64_rounds_to_odd():
    x = float64_inputs()
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(bits.from_float64)(jnp.asarray(x)))
    nan = np.isnan(x)
    assert np.isnan(found[nan].view(np.float32)).all()
    np.testing.assert_array_equal(found >> 31, np.signbit(x))
    x, found = abs(x[~nan]), found[~nan] & 0x7FFFFFFF
    with np.errstate(all="ignore"):
        nearest = x.astype(np.float32)
    # Toward zero: one step back where rounding to nearest went up.
    exact = nearest.astype(np.float64) == x
    down = nearest.view(np.uint32) - (nearest.astype(np.float64) > x)
    expected = np.where(exact, down, down | 1)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", oracle.FORMATS)
def test_narrow_floats_are_widened_exactly(name):
    to = formats.find_format(name)
    patterns = np.arange(1 << to.bits, dtype=np.uint32).astype(to.pattern_dtype)
    x = jnp.asarray(patterns.view(name))
    found = np.asarray(jax.jit(bits.from_float)(x)).view(np.float32)
    nan = oracle.is_nan(patterns, name)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(np.signbit(found), patterns >> (to.bits - 1) == 1)
    with np.errstate(all="ignore"):
        expected = patterns.view(name).astype(np.float32)
    np.testing.assert_array_equal(found[~nan], expected[~nan])
