import jax.numpy as jnp
import numpy as np
import rounding_oracle as oracle

from mixprec.rounding import api, elements, random

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
PATTERNS = np.asarray(X).view(np.uint32)


def test_one_result_a_mode_as_floats_or_as_integers():
    rounding = api.make_rounding("bfloat16", ("toward_zero", "away_from_zero"))
    floats = elements.round_elements(X, rounding)
    integers = elements.round_elements(X, rounding, as_patterns=True)
    for mode, y, z in zip(rounding.modes, floats, integers, strict=True):
        assert (y.dtype, z.dtype) == (jnp.bfloat16, jnp.uint16)
        expected = oracle.round_patterns(PATTERNS, "bfloat16", mode)
        np.testing.assert_array_equal(np.asarray(y).view(np.uint16), expected)
        np.testing.assert_array_equal(z, expected)


def test_the_draw_is_given_the_patterns():
    rounding = api.make_rounding("bfloat16", ("stochastic",))
    seen = []

    def draw(patterns):
        seen.append(np.asarray(patterns))
        return jnp.zeros_like(patterns)

    (down,) = elements.round_elements(X, rounding, draw, as_patterns=True)
    np.testing.assert_array_equal(seen[0], PATTERNS)
    np.testing.assert_array_equal(down, PATTERNS >> 16)


def test_values_count_in_the_hash_where_they_should():
    seed = random.seed_from_key(3)
    index = random.index_words(X.shape, random.row_major_strides(X.shape))

    def draw(patterns, **options):
        rounding = api.make_rounding("bfloat16", ("stochastic",), **options)
        return np.asarray(elements.hashed(seed, index, rounding)(patterns))

    patterns = jnp.asarray(PATTERNS)
    np.testing.assert_array_equal(draw(patterns), draw(patterns + 1))
    other = draw(patterns, hash_values=True)
    assert (other != draw(patterns)).mean() > 0.99
    assert (other != draw(patterns + 1, hash_values=True)).all()
