import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import STOCHASTIC, TOWARD_ZERO, same_bits, toward_zero
from zoo import CASES, Compact, Scan, X

import mixprec
from mixprec import Policy, Rule, unwrap, wrap

KEY = jax.random.key(0)


def test_a_wrapped_module_rounds_and_the_original_is_not_changed():
    module, variables = Compact(), CASES["compact"].variables()
    wrapped = wrap(module, TOWARD_ZERO)
    raw = module.apply(variables, X)
    rounded = module.apply(toward_zero(variables), X)
    assert same_bits(wrapped.apply(variables, X), rounded)
    assert type(module) is Compact
    assert same_bits(module.apply(variables, X), raw)
    assert same_bits(unwrap(wrapped).apply(variables, X), raw)
    assert type(unwrap(wrapped)) is Compact
    assert unwrap(module) == module


def test_a_wrapped_module_trains():
    wrapped = wrap(Scan(), STOCHASTIC)
    params = wrapped.init(KEY, X)
    target = jnp.ones((4, 3))

    @jax.jit
    def step(params, key):
        def loss(params):
            y = wrapped.apply(params, X, rngs={"rounding": key})
            return jnp.mean((y - target) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        update = lambda p, g: p - 0.1 * g  # noqa: E731
        return jax.tree.map(update, params, gradients), value

    losses = []
    for key in jax.random.split(KEY, 20):
        params, value = step(params, key)
        losses.append(float(value))
    assert losses[-1] < losses[0] / 4
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("subject", [nn.Dense, jnp.tanh, lambda x: x, {}, None, 3])
@pytest.mark.parametrize("function", ["wrap", "unwrap", "explain"])
def test_what_is_no_module_is_refused(function, subject):
    arguments = {"wrap": (TOWARD_ZERO,), "unwrap": (), "explain": (X,)}[function]
    kinds = r"a flax\.linen\.Module or a flax\.nnx\.Module"
    message = rf"`module` must be {kinds}, got {type(subject).__name__}"
    with pytest.raises(TypeError, match=message):
        getattr(mixprec, function)(subject, *arguments)


@pytest.mark.parametrize("policy", [None, {}, Rule(".*", "stochastic"), Policy])
def test_what_is_no_policy_is_refused(policy):
    message = rf"`policy` must be a mixprec\.Policy, got {type(policy).__name__}"
    with pytest.raises(TypeError, match=message):
        wrap(nn.Dense(3), policy)


def test_bound_modules_are_refused():
    with pytest.raises(ValueError, match="`module` must be unbound"):
        wrap(nn.Dense(3).bind({}), TOWARD_ZERO)


def test_a_policy_may_be_a_text_or_the_name_of_a_preset():
    module, variables = Compact(), CASES["compact"].variables()
    expected = module.apply(toward_zero(variables), X)
    wrapped = wrap(module, "params: .*=toward_zero")
    assert wrapped == wrap(module, TOWARD_ZERO)
    assert same_bits(wrapped.apply(variables, X), expected)
    rounded = jax.tree.map(
        lambda x: np.asarray(x).astype(jnp.bfloat16).astype(np.float32), variables
    )
    found = wrap(module, "params_nearest_even").apply(variables, X)
    assert same_bits(found, module.apply(rounded, X))
    with pytest.raises(ValueError, match="`params` must be rules such as"):
        wrap(module, "params: .*")
