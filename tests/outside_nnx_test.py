"""`wrap` on an NNX model that was written elsewhere: Mamba-2, of mamba2-jax.

It is compared with itself, unwrapped, whose Params NumPy rounded beforehand.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import outside
import pytest
from flax import nnx
from nnx_zoo import map_params, noised, params
from oracle import STOCHASTIC, TOWARD_ZERO, same_bits, toward_zero

import mixprec
from mixprec import Policy, Rule

TOKENS = outside.tokens()

pytestmark = [pytest.mark.outside, pytest.mark.xdist_group("mamba2")]


@pytest.fixture(autouse=True)
def _without_optimizations():
    """What `outside.jit` asks for; `nnx.jit` takes no options of the compiler."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def initial():
    """A language model that reads its embedding twice: by row, and whole as its head.

    A sequence has two chunks, between which states are handed on.
    """
    import mamba2_jax

    config = mamba2_jax.Mamba2Config(
        vocab_size=outside.VOCABULARY,
        hidden_size=32,
        state_size=8,
        head_dim=8,
        chunk_size=outside.LENGTH // 2,
        num_hidden_layers=2,
    )
    return mamba2_jax.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))


@functools.cache
def noisy_model():
    """The same with noise: no parameter is one of bfloat16's values."""
    return noised(initial())


@functools.cache
def rounded():
    """The noisy one, its parameters rounded beforehand."""
    return map_params(toward_zero, noisy_model())


def call(model):
    return model(TOKENS, labels=TOKENS)


def loss(model):
    return call(model)["loss"]


@nnx.jit
def loss_and_gradients(model):
    return nnx.value_and_grad(loss)(model)


def adam(model):
    # Its first steps move every weight by the rate, which is to be small beside it.
    return nnx.Optimizer(model, optax.adam(3e-4), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer):
    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def test_results_are_those_of_rounded_parameters():
    wrapped = mixprec.wrap(noisy_model(), TOWARD_ZERO)
    found = nnx.jit(call)(wrapped)
    assert same_bits(found, nnx.jit(call)(rounded()))
    assert not same_bits(found, nnx.jit(call)(noisy_model()))
    assert same_bits(params(wrapped), params(noisy_model()))


def test_gradients_are_straight_through():
    found = loss_and_gradients(mixprec.wrap(noisy_model(), TOWARD_ZERO))
    assert same_bits(found, loss_and_gradients(rounded()))
    assert not same_bits(found, loss_and_gradients(noisy_model()))
    leaves = jax.tree.leaves(found)
    assert {x.dtype for x in leaves} == {jnp.dtype("float32")}
    assert all(jnp.isfinite(x).all() for x in leaves)
    assert all(jnp.any(x != 0) for x in leaves)


def test_gradients_of_parameters_are_rounded():
    # Of those that are used once.
    policy = Policy(gradients=(Rule("backbone/layers/.*", "toward_zero"),))
    value, raw = loss_and_gradients(noisy_model())
    found = loss_and_gradients(mixprec.wrap(noisy_model(), policy))
    raw = nnx.to_pure_dict(raw)
    layers = toward_zero(raw["backbone"]["layers"])
    assert not same_bits(layers, raw["backbone"]["layers"])
    expected = {"backbone": raw["backbone"] | {"layers": layers}}
    assert same_bits((found[0], nnx.to_pure_dict(found[1])), (value, expected))


def test_an_optimizer_updates_the_raw_masters():
    wrapped = mixprec.wrap(noisy_model(), TOWARD_ZERO)
    expected = nnx.clone(noisy_model())
    optimizers = adam(wrapped), adam(expected)

    @nnx.jit
    def update(model, optimizer, gradients):
        optimizer.update(model, gradients)

    update(wrapped, optimizers[0], loss_and_gradients(wrapped)[1])
    update(expected, optimizers[1], loss_and_gradients(rounded())[1])
    assert same_bits(params(wrapped), params(expected))
    states = [nnx.to_pure_dict(nnx.state(optimizer)) for optimizer in optimizers]
    assert same_bits(*states)
    assert not same_bits(params(wrapped), params(noisy_model()))


def test_three_steps_of_stochastic_rounding_lower_the_loss():
    def train(seed):
        stream = nnx.Rngs(rounding=seed)
        model = mixprec.wrap(initial(), STOCHASTIC, rngs=stream)
        optimizer = adam(model)
        return model, [float(step(model, optimizer)) for _ in range(4)]

    model, losses = train(0)
    assert losses[3] < losses[0]
    assert model.rounding_rngs.count[...] == 4
    assert {x.dtype for x in jax.tree.leaves(params(model))} == {jnp.dtype("float32")}
    assert not same_bits(params(model), toward_zero(params(model)))
    assert train(0)[1] == losses
    assert train(1)[1][0] != losses[0]


def test_each_call_draws_anew():
    def four(model):
        jitted = nnx.jit(loss)
        return [float(jitted(model)) for _ in range(4)]

    stream = nnx.Rngs(rounding=0)
    found = four(mixprec.wrap(initial(), STOCHASTIC, rngs=stream))
    assert len({*found, float(nnx.jit(loss)(initial()))}) == 5
    without_stream = four(mixprec.wrap(initial(), STOCHASTIC))
    assert len(set(without_stream)) == 1


def test_the_explanation_names_every_parameter():
    wrapped = mixprec.wrap(initial(), TOWARD_ZERO)
    found = outside.explained(mixprec.explain(wrapped, TOKENS))
    assert found == {
        "/".join(map(str, path)): [outside.type_of(param), "toward_zero"]
        for path, param in nnx.to_flat_state(nnx.state(initial(), nnx.Param))
    }


def test_an_activation_is_rounded():
    import mamba2_jax

    class Cut(mamba2_jax.Mamba2Mixer):
        def __call__(self, *args, **kwargs):
            return jax.tree.map(outside.cut, super().__call__(*args, **kwargs))

    expected = nnx.clone(noisy_model())
    object.__setattr__(expected.backbone.layers[1].mixer, "__class__", Cut)
    policy = Policy(activations=(Rule("backbone/layers/1/mixer", "toward_zero"),))
    found = nnx.jit(call)(mixprec.wrap(noisy_model(), policy))
    assert same_bits(found, nnx.jit(call)(expected))
    assert not same_bits(found, nnx.jit(call)(noisy_model()))


def test_the_packages_own_jitted_function_decodes_with_a_wrapped_model():
    import mamba2_jax

    def decode(model):
        outputs = [mamba2_jax.forward(model, TOKENS)]
        for token in jnp.split(TOKENS[:, :2], 2, axis=1):
            cache = outputs[-1]["cache"]
            outputs.append(mamba2_jax.forward(model, token, cache=cache))
        return outputs

    found = decode(mixprec.wrap(noisy_model(), TOWARD_ZERO))
    assert same_bits(found, decode(rounded()))
    assert not same_bits(found, decode(noisy_model()))
