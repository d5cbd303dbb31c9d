import types

import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal, words

from mixprec.rounding import api, batches, random, statistics

AXIS = types.SimpleNamespace(size=4, explicit_mesh_axis=None, spmd_name=None)
SEEDS = jnp.stack([random.seed_from_key(n) for n in range(4)])
STRIDES = random.row_major_strides((3, 5))


def make_rounding(**options):
    return api.make_rounding(jnp.bfloat16, ("stochastic",), **options)


def alone(x, seed, rounding):
    return batches.round_members(x, seed, rounding, STRIDES)


def equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(words(one), words(other))


@pytest.mark.parametrize("of_x", [0, 1, 2])
def test_a_batch_with_one_seed_stays_where_it_lies(of_x):
    members, rounding = normal(4, 3, 5), make_rounding()
    x = jnp.moveaxis(members, 0, of_x)
    args, strides, place = batches.gather_batch(
        AXIS, (x, SEEDS[0]), (of_x, None), rounding, STRIDES
    )
    assert place == of_x
    assert args[0].shape == x.shape
    (found,) = batches.round_members(*args, rounding, strides)
    for n, member in enumerate(members):
        equal([jnp.moveaxis(found, of_x, 0)[n]], alone(member, SEEDS[0], rounding))


@pytest.mark.parametrize("of_x", [None, 0, 2])
@pytest.mark.parametrize("of_words", [None, 0, 1])
@pytest.mark.parametrize("with_statistics", [False, True])
def test_members_get_what_they_get_alone(of_x, of_words, with_statistics):
    if of_words is None and (of_x is None or not with_statistics):
        return  # no batch, or the test above
    members, seeds = normal(4, 3, 5), SEEDS
    x, given = members[0], SEEDS[0]
    if of_x is None:
        members = jnp.stack([x] * 4)
    else:
        x = jnp.moveaxis(members, 0, of_x)
    if of_words is None:
        seeds = jnp.stack([given] * 4)
    else:
        given = jnp.moveaxis(SEEDS, 0, of_words)
    rounding = make_rounding(statistics=with_statistics)
    args, strides, place = batches.gather_batch(
        AXIS, (x, given), (of_x, of_words), rounding, STRIDES
    )
    assert place == 0
    found = batches.round_members(*args, rounding, strides)
    assert len(found) == 1 + with_statistics * len(statistics.DTYPES)
    for n in range(4):
        expected = alone(members[n], seeds[n], rounding)
        equal(found[:1] and [found[0][n]], expected[:1])
        for one, other in zip(found[1:], expected[1:], strict=True):
            np.testing.assert_allclose(one[n], other, rtol=1e-6)


def test_without_draws_words_tell_of_a_batch_alone():
    rounding = api.make_rounding(jnp.bfloat16, ("nearest_even",), statistics=True)
    x, none = normal(4, 3, 5), random.row_major_strides(())
    args, strides, _ = batches.gather_batch(AXIS, (x,), (0,), rounding, none)
    assert args[1].shape == (4, 0)
    assert batches.none_if_empty(args[1]) is None
    found = batches.round_members(*args, rounding, strides)
    assert [y.shape for y in found[1:]] == [(4,)] * len(statistics.DTYPES)
