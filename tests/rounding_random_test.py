import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import randomness

from mixprec.rounding import random

SEED = (jnp.uint32(123), jnp.uint32(456))
N = 1 << 20


def lowbias32(x):
    """The published function, on Python's whole numbers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def draw(seed=SEED, start=0, n=N, values=None, high=None):
    index = [jnp.arange(start, start + n, dtype=jnp.uint32)]
    index += [] if high is None else [high]
    return np.asarray(random.random_bits(seed, index, values))


def correlation(a, b):
    return randomness.correlation(randomness.upper(a), randomness.upper(b))


def test_mix_is_lowbias32():
    inputs = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678]
    found = random.mix(jnp.asarray(np.array(inputs, np.uint32))).tolist()
    assert found == [lowbias32(x) for x in inputs]


def test_bits_are_those_of_the_formula():
    golden = 0x9E3779B9
    expected = []
    for index in range(5):
        first = (index ^ 123) * golden % 2**32
        first ^= first >> 15
        expected.append(lowbias32(((first ^ 456) + golden) % 2**32))
    assert draw(n=5).tolist() == expected


# Statistics: of 7,000 scores in a battery, 1 in 3,700 batteries exceeds this by chance.
LIMIT = 5.5


def generator(make_seed=random.fold_words, make_options=lambda seed, index: {}):
    """Gives a generator for the battery from the way in which its seeds are used."""

    @jax.jit
    def generate(seed, index):
        first, second = make_seed(seed)
        options = make_options(seed, index)
        return random.random_bits((first, second), [index], **options)

    return lambda seed, index: np.asarray(generate(np.array(seed, np.uint32), index))


def steps(seed):
    """The seeds of a run's steps: a key folded with the step."""
    key = jax.random.fold_in(jax.random.key(seed[0]), seed[1])
    return random.seed_from_key(key)


def values(seed, index):
    """One seed for all, as in the layers of a scan: only the values differ."""
    normal = jax.random.normal(jax.random.wrap_key_data(seed), index.shape) * 0.02
    return {"value_bits": jax.lax.bitcast_convert_type(normal, jnp.uint32)}


@pytest.mark.parametrize(
    "generate",
    [
        generator(),
        generator(steps),
        generator(lambda seed: random.fold_words(jnp.uint32([1, 2])), values),
    ],
    ids=["seeds", "steps", "values"],
)
def test_the_battery_finds_nothing(generate):
    scores = randomness.battery(generate, n=1 << 19, draws=10**7)
    assert max(scores.values()) < LIMIT, scores


def constant(seed, index):
    return np.full(index.shape, 0xABCD1234, np.uint32)


def lcg_low_half(seed, index):
    """The lower half of a linear congruential generator, where its upper should be."""
    state = index * np.uint32(1664525) + np.uint32(seed[0] ^ seed[1])
    return state << np.uint32(16)


def one_multiplication(seed, index):
    return (index ^ np.uint32(seed[0])) * np.uint32(0x9E3779B9) + np.uint32(seed[1])


def one_mixing(seed, index):
    words = random.fold_words(jnp.asarray(seed, jnp.uint32))
    return np.asarray(random.mix((index ^ words[0]) + words[1]))


def seed_ignored(seed, index):
    return generator()((1, 2), index)


@pytest.mark.parametrize(
    "bad", [constant, lcg_low_half, one_multiplication, one_mixing, seed_ignored]
)
def test_the_battery_finds_what_is_wrong_with_bad_generators(bad):
    with np.errstate(all="ignore"):
        scores = randomness.battery(bad, n=1 << 19, draws=10**5)
    assert max(scores.values()) > 2 * LIMIT, scores


def test_paths_are_not_correlated():
    seed = random.seed_from_key(0)
    streams = [
        randomness.upper(
            draw(tuple(random.fold_in_path(seed, f"layers/{path}/kernel")))
        )
        for path in ("query", "key", "value", "out", "up", "down")
    ]
    for first, second in itertools.combinations(streams, 2):
        assert abs(randomness.correlation(first, second)) < LIMIT


def test_values_tell_draws_apart():
    values = jnp.arange(N, dtype=jnp.uint32)
    first, second = draw(values=values), draw(values=values + jnp.uint32(1))
    assert abs(correlation(first, second)) < LIMIT
    assert abs(correlation(first, draw())) < LIMIT
    np.testing.assert_array_equal(first, draw(values=values))


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 1, 4, 5)])
def test_element_index_counts_in_row_major_order(shape):
    strides = random.row_major_strides(shape)
    assert not strides.has_high
    expected = np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(shape)
    found = np.asarray(random.element_index(shape, strides.low))
    np.testing.assert_array_equal(found, expected)


def test_element_index_follows_other_strides():
    found = np.asarray(random.element_index((2, 3), (0, 10)))
    np.testing.assert_array_equal(found, [[0, 10, 20], [0, 10, 20]])


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [
        ((1 << 16, 1 << 16), (1 << 16, 1), (0, 0)),  # 2^32 elements: one word
        ((1, 1 << 32), (0, 1), (0, 0)),
        (((1 << 16) + 1, 1 << 16), (0, 1), (1, 0)),
        ((80, 8192, 28672), (0, 28672, 1), (1, 0, 0)),
        ((8, 80, 8192, 28672), (0, 0, 28672, 1), (80, 1, 0, 0)),
        ((3, 1 << 17, 1 << 16), (0, 0, 1), (1 << 17, 1, 0)),
    ],
)
def test_more_than_2_to_32_elements_take_a_second_word(shape, low, high):
    strides = random.row_major_strides(shape)
    assert strides == (low, high)
    assert strides.has_high == any(high)
    # No two elements share both words: places at the corners.
    corners = np.array(np.meshgrid(*[(0, max(n - 1, 0)) for n in shape])).reshape(
        len(shape), -1
    )
    words = {(int(low @ c), int(high @ c)) for c in corners.T.astype(object)}
    assert len(words) == len({tuple(c) for c in corners.T.tolist()})
    assert all(0 <= word < 2**32 for pair in words for word in pair)


def test_a_dimension_beyond_2_to_32_is_refused():
    with pytest.raises(ValueError, match="no dimension longer than 2\\*\\*32, got"):
        random.row_major_strides((2**32 + 1, 2))


def test_a_symbolic_shape_cannot_be_counted():
    shape = jax.export.symbolic_shape("a, 4")
    with pytest.raises(ValueError, match=r"`x` must have a shape .*, got \(a, 4\)"):
        random.row_major_strides(shape)


def test_the_second_word_tells_draws_apart():
    draws = [draw(high=jnp.uint32(high)) for high in (0, 1, 2, 80)] + [draw()]
    for first, second in itertools.combinations(draws, 2):
        assert abs(correlation(first, second)) < LIMIT
    # Neither is it a shift of the first word.
    assert abs(correlation(draw(high=jnp.uint32(1)), draw(start=1))) < LIMIT


def test_batches_share_their_indices():
    assert random.Strides((5, 1), (0, 0)).batched() == ((0, 5, 1), (0, 0, 0))
    assert random.Strides((5, 1), (0, 7)).batched(1) == ((5, 0, 1), (0, 0, 7))


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: jax.random.key(seed),
        lambda seed: jax.random.PRNGKey(seed),
        lambda seed: jax.random.key(seed, impl="rbg"),
        lambda seed: seed,
        lambda seed: np.int64(seed),
    ],
)
def test_every_kind_of_key_gives_a_seed_of_its_own(make):
    seeds = [random.seed_from_key(make(seed)) for seed in (0, 1, 2, 2**31 - 1)]
    for seed in seeds:
        assert seed.shape == (2,)
        assert seed.dtype == jnp.uint32
    assert len({tuple(seed.tolist()) for seed in seeds}) == 4
    np.testing.assert_array_equal(seeds[1], random.seed_from_key(make(1)))


def test_every_word_of_a_key_counts():
    words = np.array([1, 2, 3, 4], np.uint32)
    seeds = set()
    for place in range(4):
        changed = words.copy()
        changed[place] += 1
        key = jax.random.wrap_key_data(jnp.asarray(changed), impl="rbg")
        seeds.add(tuple(random.seed_from_key(key).tolist()))
    assert len(seeds) == 4


def test_high_words_of_an_integer_seed_count():
    low, high = random.seed_from_key(5), random.seed_from_key(5 + 2**32)
    assert low.tolist() != high.tolist()


def test_a_traced_key_gives_the_same_seed():
    key = jax.random.key(3)
    np.testing.assert_array_equal(
        jax.jit(random.seed_from_key)(key), random.seed_from_key(key)
    )
    keys = jax.random.split(key, 3)
    np.testing.assert_array_equal(
        jax.vmap(random.seed_from_key)(keys)[1], random.seed_from_key(keys[1])
    )


@pytest.mark.parametrize(
    "key",
    [
        *(1.5, "a", True, np.True_, None, [1, 2], {}),
        *(np.float32(1), np.array(1), np.uint32([[1, 2]]), np.array(None)),
        *(jnp.float32([1, 2]), jnp.int32([1, 2]), jnp.uint32(1)),
        jnp.zeros(0, jnp.uint32),
        jax.ShapeDtypeStruct((2,), jnp.uint32),
    ],
)
def test_what_is_no_key_is_refused(key):
    with pytest.raises(TypeError, match="`key` must be one JAX key or a non-negative"):
        random.seed_from_key(key)


def test_a_traced_integer_is_refused():
    with pytest.raises(TypeError, match="`key` must be one JAX key or a non-negative"):
        jax.jit(random.seed_from_key)(3)


def test_several_keys_are_refused():
    with pytest.raises(TypeError, match="`key` must be one JAX key"):
        random.seed_from_key(jax.random.split(jax.random.key(0), 3))


@pytest.mark.parametrize("key", [-1, 2**64])
def test_integers_out_of_range_are_refused(key):
    with pytest.raises(ValueError, match=f"from 0 to .* if an integer, got {key}"):
        random.seed_from_key(key)


def test_paths_get_seeds_of_their_own():
    seed = random.seed_from_key(0)
    paths = [f"layers/{name}/kernel" for name in "abcdefgh"] + ["", "x", "xx"]
    folded = [tuple(random.fold_in_path(seed, path).tolist()) for path in paths]
    assert len(set(folded)) == len(paths)
    first, second = (tuple(random.fold_in_path(seed, path)) for path in "ab")
    assert abs(correlation(draw(first), draw(second))) < LIMIT
