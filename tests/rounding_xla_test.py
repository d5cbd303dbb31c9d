import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal, primitives_of, words
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mixprec
from mixprec.rounding import random

KEYS = jax.random.split(jax.random.key(0), 4)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def round_it(x, key=KEYS[0]):
    return mixprec.round_to(x, mode="stochastic", key=key)


def loss(x, key=KEYS[0]):
    return jnp.sum(round_it(x, key).astype(jnp.float32) ** 2)


def round_with_seed(x, seed=1):
    return mixprec.round_to(x, mode="stochastic", key=seed)


def mesh_of(*kinds):
    names = ("a", "b")[: len(kinds)]
    return jax.make_mesh((2,) * len(kinds), names, axis_types=kinds)


# One equation


def test_a_rounding_is_one_equation():
    names = primitives_of(lambda x: mixprec.round_to(x, mode="nearest_even"), normal(3))
    assert names == ["mixprec_round_by_xla"]
    names = primitives_of(jax.vmap(jax.grad(loss)), normal(4, 3))
    assert names.count("mixprec_round_by_xla") == 1
    seed = random.seed_from_key(0)
    names = primitives_of(lambda seed: random.fold_in_path(seed, "a/kernel"), seed)
    assert names == ["mixprec_fold_in"]


def test_xla_sees_operations_and_fuses_them():
    x = normal(64, 256)
    lowered = jax.jit(lambda x: round_with_seed(jnp.tanh(x)) * 2).lower(x)
    assert not re.search("call @.*mixprec", lowered.as_text())
    compiled = lowered.compile()
    entry = compiled.as_text().split("ENTRY")[1]
    assert len(re.findall(" fusion\\(", entry)) == 1
    # Each element is read and written once.
    assert compiled.cost_analysis()["bytes accessed"] <= x.size * (4 + 2) + 64


def test_equal_roundings_are_named_by_where_they_stand():
    def both(x, y):
        with jax.named_scope("first"):
            x = round_with_seed(x)
        with jax.named_scope("second"):
            return x, round_with_seed(y)

    text = jax.jit(both).lower(normal(8), normal(8, seed=1)).compile().as_text()
    for scope in ("first", "second"):
        for operation in ("bitcast_convert_type", "add", "shift_right_logical"):
            assert f'op_name="jit(both)/{scope}/{operation}"' in text


def test_what_was_traced_with_64_bits_is_lowered_without():
    x = np.array([1 + 2.0**-40, -1 - 2.0**-8 - 2.0**-40])
    with jax.enable_x64(True):
        expected = round_with_seed(x)
        traced = jax.jit(round_with_seed).trace(x)
    compiled = traced.lower().compile()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(words(compiled(x)), words(expected))


# Batches


@pytest.mark.parametrize(
    ("of_x", "of_key"), [(0, 0), (1, 0), (None, 0), (0, None), (2, None)]
)
def test_members_round_and_have_gradients_as_alone(of_x, of_key):
    x = normal(4, 4, 4)
    for function in (round_it, jax.grad(loss)):
        found = jax.vmap(function, (of_x, of_key))(x, KEYS if of_key == 0 else KEYS[0])
        for n in range(4):
            member = x if of_x is None else jnp.take(x, n, axis=of_x)
            expected = function(member, KEYS[n if of_key == 0 else 0])
            np.testing.assert_array_equal(words(found[n]), words(expected))


@pytest.mark.parametrize("of_x", [0, None])
def test_the_gradient_of_a_batch_is_that_of_its_members(of_x):
    x = normal(4, 5) if of_x == 0 else normal(5)

    def of_batch(x):
        return jax.vmap(loss, (of_x, 0))(x, KEYS).sum()

    each = jax.vmap(jax.grad(loss), (of_x, 0))(x, KEYS)
    expected = each if of_x == 0 else each.sum(axis=0)
    np.testing.assert_allclose(jax.grad(of_batch)(x), expected, rtol=0.02)
    _, tangent = jax.jvp(of_batch, (x,), (jnp.ones_like(x),))
    np.testing.assert_allclose(tangent, expected.sum(), rtol=0.02)


def test_batches_in_batches():
    x, keys = normal(3, 4, 5), jax.random.split(KEYS[0], (3, 4))
    found = jax.vmap(jax.vmap(round_it, (0, 0)), (0, 0))(x, keys)
    swapped = jax.vmap(jax.vmap(round_it, (0, 0)), (1, 1), 1)(x, keys)
    for i, j in np.ndindex(3, 4):
        np.testing.assert_array_equal(found[i, j], round_it(x[i, j], keys[i, j]))
    np.testing.assert_array_equal(found, swapped)


def test_seeds_of_a_batch_are_folded_as_alone():
    seeds = jax.vmap(random.seed_from_key)(KEYS)

    def fold(seed):
        return random.fold_in_path(seed, "a/kernel")

    for found in (jax.vmap(fold)(seeds), jax.vmap(fold, 1, 1)(seeds.T).T):
        np.testing.assert_array_equal(found, jnp.stack([fold(s) for s in seeds]))
    folded = jax.vmap(jax.vmap(fold))(seeds.reshape(2, 2, 2))
    np.testing.assert_array_equal(folded.reshape(4, 2), jax.vmap(fold)(seeds))


def test_a_batch_may_have_a_symbolic_size():
    (size,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((size, 6), jnp.float32)
    function = jax.vmap(round_with_seed)
    called = jax.export.export(jax.jit(function))(x).call
    np.testing.assert_array_equal(called(normal(3, 6)), function(normal(3, 6)))


@pytest.mark.parametrize("shape", [(0, 3), (0,)])
def test_what_has_no_elements(shape):
    x = jnp.zeros(shape)
    assert round_it(x).shape == jax.grad(loss)(x).shape == shape
    assert jax.vmap(round_it)(jnp.zeros((0, 3)), KEYS[:0]).shape == (0, 3)


# Devices


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("function", [round_with_seed, jax.grad(loss)])
def test_shards_round_as_alone(function, check_vma):
    x, split = normal(8, 6), PartitionSpec("a")
    run = jax.shard_map(
        function,
        mesh=mesh_of(AxisType.Auto),
        in_specs=split,
        out_specs=split,
        check_vma=check_vma,
    )
    expected = jnp.concatenate([function(x[:4]), function(x[4:])])
    np.testing.assert_array_equal(words(jax.jit(run)(x)), words(expected))
    assert not any(c in jax.jit(run).lower(x).compile().as_text() for c in COLLECTIVES)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_xla_splits_it_over_devices(kind):
    x, mesh = normal(8, 6), mesh_of(kind, kind)
    sharding = NamedSharding(mesh, PartitionSpec("a", "b"))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, sharding)
        for function in (round_with_seed, jax.grad(loss)):
            compiled = jax.jit(function).lower(placed).compile()
            assert not any(c in compiled.as_text() for c in COLLECTIVES)
            found = compiled(placed)
            assert found.sharding.is_equivalent_to(sharding, 2)
            np.testing.assert_array_equal(words(found), words(function(x)))


def test_types_of_a_batch_tell_how_it_is_split():
    mesh = mesh_of(AxisType.Explicit, AxisType.Explicit)
    x = normal(4, 6)
    with jax.set_mesh(mesh):
        keys = jax.device_put(KEYS, NamedSharding(mesh, PartitionSpec("a")))
        shared = jax.device_put(x[0], NamedSharding(mesh, PartitionSpec("b")))

        def of_batch(x, keys):
            return jax.vmap(loss, (None, 0))(x, keys).sum()

        rounded = jax.eval_shape(jax.vmap(round_it, (None, 0)), shared, keys)
        assert rounded.sharding.spec == PartitionSpec("a", "b")
        found = jax.jit(jax.grad(of_batch))(shared, keys)
        assert found.sharding.spec == PartitionSpec("b")
    np.testing.assert_allclose(found, jax.grad(of_batch)(x[0], KEYS), rtol=0.02)


def test_an_open_sum_is_refused():
    mesh = mesh_of(AxisType.Explicit)

    def run(x):
        spec = PartitionSpec(unreduced={"a"})
        return round_with_seed(jax.sharding.reshard(x, spec))

    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="`x` must leave no sum .* open, got"),
    ):
        jax.eval_shape(run, normal(4))
