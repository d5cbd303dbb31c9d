import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import rounding_oracle as oracle

from mixprec.rounding import bits

INPUTS = oracle.telling_inputs()


def round_to_halves(inputs, mode, random_bits=None):
    """Gives bfloat16 patterns; checks on the way that the lower half is 0."""
    words = np.array(bits.round_bits(jnp.asarray(inputs), mode, random_bits))
    assert not (words & 0xFFFF).any()
    return (words >> 16).astype(np.uint16)


def is_nan(halves):
    return (halves & 0x7FFF) > 0x7F80


@pytest.mark.parametrize("mode", oracle.DETERMINISTIC)
def test_every_upper_half_with_the_telling_lower_halves(mode):
    found, expected = (
        round_to_halves(INPUTS, mode),
        oracle.round_bfloat16(INPUTS, mode),
    )
    nan = (INPUTS & 0x7FFFFFFF) > 0x7F800000
    np.testing.assert_array_equal(found[~nan], expected[~nan])
    assert is_nan(found[nan]).all()
    np.testing.assert_array_equal(found[nan] >> 15, INPUTS[nan] >> 31)
    assert (found[nan] & 0x40).all()  # quiet


def test_nearest_even_agrees_with_ml_dtypes():
    with np.errstate(all="ignore"):
        expected = INPUTS.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    found = round_to_halves(INPUTS, "nearest_even")
    nan = is_nan(expected)
    np.testing.assert_array_equal(is_nan(found), nan)
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
    found = round_to_halves(np.array([pattern], np.uint32), mode)[0]
    assert f"{found:04x}" == f"{expected:04x}"


@pytest.mark.parametrize("lower", [0, 1, 0x1234, 0x8000, 0xFFFF])
@pytest.mark.parametrize("upper", [0x0000, 0x3F80, 0xBFFF, 0x7F7F, 0x807F])
def test_stochastic_goes_up_for_exactly_its_share_of_all_random_bits(upper, lower):
    word = np.uint32((upper << 16) | lower)
    draws = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0xABCD  # the rest is unused
    inputs = np.full(draws.shape, word)
    found = round_to_halves(inputs, "stochastic", jnp.asarray(draws))
    down, up = oracle.neighbours(np.array([word & 0x7FFFFFFF], np.int64))
    went_up = (found & 0x7FFF) == up[0]
    assert (went_up | ((found & 0x7FFF) == down[0])).all()
    np.testing.assert_array_equal(found >> 15, word >> 31)
    assert (found != upper).sum() == lower


def test_stochastic_keeps_nan_and_infinity_for_every_draw():
    special = np.array(
        [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7F80FFFF], np.uint32
    )
    for draw in (0, 0x7FFFFFFF, 0xFFFFFFFF):
        draws = jnp.full(special.shape, draw, jnp.uint32)
        found = round_to_halves(special, "stochastic", draws)
        assert [f"{half:04x}" for half in found] == [
            "7f80", "ff80", "7fc0", "ffff", "7fc0",
        ]  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_to_float_keeps_every_pattern(dtype):
    words = np.arange(1 << 16, dtype=np.uint32) << 16
    found = np.asarray(bits.to_float(jnp.asarray(words), dtype))
    assert found.dtype == dtype
    if dtype == jnp.float32:
        np.testing.assert_array_equal(found.view(np.uint32), words)
    else:
        np.testing.assert_array_equal(found.view(np.uint16), words >> 16)


def test_from_float32_keeps_every_pattern():
    floats = jnp.asarray(INPUTS.view(np.float32))
    np.testing.assert_array_equal(np.asarray(bits.from_float32(floats)), INPUTS)
