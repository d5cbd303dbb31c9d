import collections
import dataclasses
import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
import tpu

import mixprec
import models
from mixprec.training import state, step

TOKENS = jax.random.randint(jax.random.key(0), (8, 7), 0, 16)
STOCHASTIC = mixprec.Policy(params=(mixprec.Rule(".*", "stochastic"),))


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 12, name="embed")(tokens)
        return nn.Dense(16, name="head")(jnp.tanh(nn.Dense(12, name="hidden")(x)))


def first_state(model, optimizer):
    is_plain = isinstance(model, Model)
    layout = layouts.one_device() if is_plain else layouts.make()
    return state.init_state(model, optimizer, layout, seed=0, sequence_length=6)


def take_step(model, tokens=TOKENS, *, microbatches=1, seed=0, at_step=0):
    optimizer = optax.sgd(1.0)
    train_step = step.make_train_step(
        model,
        optimizer,
        optax.constant_schedule(1.0),
        seed=seed,
        microbatches=microbatches,
    )
    start = first_state(model, optimizer).replace(step=jnp.int32(at_step))
    return train_step(start, tokens)


def numpy_loss(params, tokens):
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = p["embed"]["embedding"][tokens[:, :-1]]
    x = np.tanh(x @ p["hidden"]["kernel"] + p["hidden"]["bias"])
    logits = x @ p["head"]["kernel"] + p["head"]["bias"]
    log_sums = np.log(np.exp(logits).sum(-1))
    targets = tokens[:, 1:]
    right = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (log_sums - right).mean()


def test_loss_is_the_cross_entropy_of_the_next_token():
    params = first_state(Model(), optax.sgd(1.0)).params
    loss = step.token_loss(Model(), params, TOKENS, rngs=None)
    np.testing.assert_allclose(loss, numpy_loss(params, np.asarray(TOKENS)), rtol=1e-6)


def test_a_step_moves_the_masters_by_the_gradient():
    before = first_state(Model(), optax.sgd(1.0)).params
    after, measured = take_step(Model())
    assert after.step == 1
    nudge = 1e-5
    for path in (("hidden", "kernel"), ("head", "bias"), ("embed", "embedding")):
        moved = np.asarray(
            before[path[0]][path[1]] - after.params[path[0]][path[1]], np.float64
        )
        place = np.unravel_index(np.abs(moved).argmax(), moved.shape)
        losses = []
        for sign in (1, -1):
            shifted = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), before)
            shifted[path[0]][path[1]] = shifted[path[0]][path[1]].copy()
            shifted[path[0]][path[1]][place] += sign * nudge
            losses.append(numpy_loss(shifted, np.asarray(TOKENS)))
        slope = (losses[0] - losses[1]) / (2 * nudge)
        # Float32 against a central difference in float64: 1e-4 relative.
        np.testing.assert_allclose(moved[place], slope, rtol=1e-4)
    assert measured.compute()["learning_rate"] == 1.0


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_microbatches_give_the_step_of_the_whole_batch(microbatches):
    whole, whole_metrics = take_step(Model())
    split, split_metrics = take_step(Model(), microbatches=microbatches)
    # Sums in another order: a few units in the last place of float32.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        whole.params,
        split.params,
    )
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(
            whole_metrics.compute()[name], split_metrics.compute()[name], rtol=1e-5
        )


def params_equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def test_draws_are_a_function_of_seed_and_step():
    model = mixprec.wrap(Model(), STOCHASTIC)
    first, _ = take_step(model, seed=5, at_step=3)
    again, _ = take_step(mixprec.wrap(Model(), STOCHASTIC), seed=5, at_step=3)
    other_seed, _ = take_step(model, seed=6, at_step=3)
    other_step, _ = take_step(model, seed=5, at_step=4)
    assert params_equal(first.params, again.params)
    assert not params_equal(first.params, other_seed.params)
    assert not params_equal(first.params, other_step.params)


def test_microbatches_draw_differently():
    model = mixprec.wrap(Model(), STOCHASTIC)
    twice = jnp.concatenate([TOKENS, TOKENS])
    once, _ = take_step(model, TOKENS)
    both, _ = take_step(model, twice, microbatches=2)
    plain, _ = take_step(Model(), TOKENS)
    plain_both, _ = take_step(Model(), twice, microbatches=2)
    # Were both microbatches rounded alike, their mean would be that of one, but for
    # sums in another order.
    order = greatest_difference(plain.params, plain_both.params)
    assert greatest_difference(once.params, both.params) > 100 * order


def greatest_difference(a, b):
    differences = jax.tree.map(lambda x, y: float(abs(x - y).max()), a, b)
    return max(jax.tree.leaves(differences))


def test_masters_and_moments_stay_float32_though_the_model_is_rounded():
    policy = mixprec.Policy(
        params=(mixprec.Rule(".*", "toward_zero"),), out_dtype="bfloat16"
    )
    model = mixprec.wrap(Model(), policy)
    optimizer = optax.adamw(1e-3)
    train_step = step.make_train_step(
        model, optimizer, optax.constant_schedule(1e-3), seed=0, microbatches=2
    )
    after, _ = train_step(first_state(model, optimizer), TOKENS)
    leaves = jax.tree.leaves((after.params, after.optimizer_state))
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert len(floats) == 15  # 5 parameters, and two moments of each
    assert {leaf.dtype for leaf in floats} == {jnp.dtype(jnp.float32)}
    # An update far below bfloat16's resolution reaches the masters.
    kernel = after.params["hidden"]["kernel"]
    assert (np.asarray(kernel).view(np.uint32) & 0xFFFF).any()


def test_validation_is_deterministic_and_rounds():
    model = mixprec.wrap(Model(), STOCHASTIC)
    params = first_state(Model(), optax.sgd(1.0)).params
    losses = [
        step.make_validation_step(wrapped)(params, TOKENS).compute()["val_loss"]
        for wrapped in (model, mixprec.wrap(Model(), STOCHASTIC), Model())
    ]
    assert losses[0] == losses[1] != losses[2]


CONFIG = models.TransformerConfig(
    vocab_size=256,
    num_layers=3,
    width=256,
    num_heads=2,
    num_kv_heads=1,
    mlp_width=512,
    remat="full",
)
POLICY = (
    "params: .*/scale=keep, .*=stochastic; activations: layers/mlp:out=nearest_even"
)


def compile_step(generation, policy, *, dtype="float32", mesh_shape=()):
    """Compiles the train step for a TPU; parameters split over chips, if several."""
    config = dataclasses.replace(CONFIG, dtype=dtype)
    model = mixprec.wrap(models.build(config), policy)
    optimizer = optax.adamw(1e-3)
    train_step = step.make_train_step(
        model, optimizer, optax.constant_schedule(1e-3), seed=0, microbatches=2
    )
    start = jax.eval_shape(lambda: first_state(model, optimizer))
    tokens = jax.ShapeDtypeStruct((4, 129), jnp.int32)
    explanation = mixprec.explain(model, jax.ShapeDtypeStruct((2, 128), jnp.int32))
    if not mesh_shape:
        return tpu.compile_for(generation, train_step, start, tokens), explanation
    devices = np.array(tpu.topology(generation).devices).reshape(mesh_shape)
    auto = (jax.sharding.AxisType.Auto,) * len(mesh_shape)
    mesh = jax.sharding.Mesh(devices, ("fsdp",), axis_types=auto)

    def place(x):
        axes = [
            a for a, n in enumerate(x.shape) if n % mesh.size == 0 and n > mesh.size
        ]
        spec = [None] * x.ndim
        if axes:
            spec[axes[-1]] = "fsdp"
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    lowered = train_step.lower(*jax.tree.map(place, (start, tokens)))
    return lowered.compile(), explanation


def rounded_by_kernels(compiled):
    """Gives the places of tensors that kernels of the program round, how often each."""
    kernels = re.findall(r"tpu_custom_call.*?op_name=\"(.*?)\"", compiled.as_text())
    places = [re.findall(r"mixprec\.round\((.*?)\)", name) for name in kernels]
    return collections.Counter(place for (place,) in places)


def rounded(explanation):
    return {row.path for row in explanation.rows if row.mode}


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", ["v5e:2x2", "v5p:2x2x1"])
def test_every_tensor_that_is_rounded_has_its_kernel_on_a_tpu(generation):
    compiled, explanation = compile_step(generation, f"{POLICY}; backend=pallas")
    found = rounded_by_kernels(compiled)
    assert set(found) == rounded(explanation)
    # Those of the layers once more in the recomputation, unless it needs them not.
    in_layers = {place for place in found if place.startswith("layers/")}
    assert len(in_layers) == 8
    assert {found[place] for place in in_layers - {"layers/mlp:out"}} <= {1, 2}
    assert sum(found[place] for place in in_layers) >= 8 + 7
    assert all(row.by.startswith("pallas ") for row in explanation.rows if row.mode)
    # The state is updated in place.
    sizes = compiled.memory_analysis()
    parameters = sum(r.bytes_before for r in explanation.rows if r.kind == "parameter")
    assert sizes.alias_size_in_bytes >= 3 * parameters  # and two moments


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", ["v5e:2x2", "v5p:2x2x1"])
def test_xla_rounds_on_a_tpu_without_kernels(generation):
    compiled, explanation = compile_step(generation, POLICY)
    assert tpu.kernels(compiled) == 0
    assert {row.by for row in explanation.rows if row.mode} == {"xla"}
    for place in rounded(explanation):
        assert f"mixprec.round({place})" in compiled.as_text()


@pytest.mark.tpu_compile
def test_on_several_chips_xla_rounds_what_it_splits():
    compiled, _ = compile_step("v5e:2x2", f"{POLICY}; backend=pallas", mesh_shape=(4,))
    # Nothing tells the module how its parameters are split.
    assert tpu.kernels(compiled) == 0
    assert "mixprec.round(layers/mlp/up/kernel)" in compiled.as_text()


# Documents

SEPARATOR = 15
TINY = dict(
    vocab_size=16, num_layers=2, width=16, num_heads=2, num_kv_heads=1, mlp_width=24
)


def documents(rows=4):
    """Rows of 13 tokens that begin and end inside documents of 0 to 4 tokens."""
    generator = np.random.default_rng(0)
    text = []
    while len(text) < rows * 13:
        text += [*generator.integers(0, 15, generator.integers(0, 5)), SEPARATOR]
    return jnp.asarray(text[: rows * 13], jnp.int32).reshape(rows, 13)


def test_documents_are_numbered_from_their_separators():
    tokens = jnp.asarray([[4, 9, 5, 9, 9, 1], [9, 1, 2, 3, 4, 5]], jnp.int32)
    numbers = step.number_documents(tokens, 9)
    assert numbers.tolist() == [[0, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1]]
    assert numbers.dtype == jnp.int32


def test_the_loss_of_packed_documents_is_that_of_the_documents_by_themselves():
    model = models.build(models.TransformerConfig(**TINY))
    params = first_state(model, optax.sgd(1.0)).params
    packed = documents()
    losses = []
    for row in packed.tolist():
        starts = [0, *(i for i, token in enumerate(row) if i and token == SEPARATOR)]
        for start, end in itertools.pairwise([*starts, len(row) - 1]):
            if start == end:
                continue
            # From what opens the document to the separator that ends it.
            alone = jnp.asarray([row[start : end + 1]], jnp.int32)
            losses += [step.token_loss(model, params, alone, None)] * (end - start)
    assert len(losses) == 4 * 12  # every token but the first of a row is predicted
    loss = step.token_loss(model, params, packed, None, SEPARATOR)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    unmasked = step.token_loss(model, params, packed, None)
    assert abs(unmasked - loss) > 1e-5


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_rounded_model_takes_a_step_over_documents(remat):
    config = models.TransformerConfig(**TINY, remat=remat)
    policy = "params: .*=stochastic; activations: layers/attention:in=nearest_even"
    model = mixprec.wrap(models.build(config), policy)
    optimizer = optax.sgd(1.0)
    results = []
    for microbatches in (1, 2):
        train_step = step.make_train_step(
            model,
            optimizer,
            optax.constant_schedule(1e-3),
            seed=0,
            microbatches=microbatches,
            separator=SEPARATOR,
        )
        _, measured = train_step(first_state(model, optimizer), documents())
        results.append(measured.compute()["loss"])
    assert abs(results[0] - results[1]) < 0.05 < results[0]
    validate = step.make_validation_step(model, SEPARATOR)
    params = first_state(model, optimizer).params
    assert validate(params, documents()).compute()["val_loss"] > 0.05
