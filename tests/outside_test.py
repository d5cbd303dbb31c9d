"""`wrap` on models that were written elsewhere and know nothing of it.

Each is compared with itself, unwrapped, on a tree that NumPy rounded beforehand.
"""

import contextlib
import functools
import io
import pathlib
import re

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import outside
import pytest
from oracle import STOCHASTIC, TOWARD_ZERO, same_bits

import mixprec
from mixprec import Policy, Rule

KEYS = list(jax.random.split(outside.KEY, 4))

pytestmark = pytest.mark.outside
each_model = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in outside.NAMES]
)


@each_model
def test_results_are_those_of_rounded_parameters(name):
    model = outside.model(name)
    wrapped = mixprec.wrap(model.module, TOWARD_ZERO)
    plain = outside.jit(functools.partial(model.apply, model.module))
    found = outside.jit(functools.partial(model.apply, wrapped))(model.variables)
    assert same_bits(found, plain(model.rounded))
    assert not same_bits(found, plain(model.variables))


@each_model
def test_gradients_are_straight_through(name):
    model = outside.model(name)
    wrapped = mixprec.wrap(model.module, TOWARD_ZERO)

    def gradients(module, variables):
        loss = functools.partial(model.loss, module, rngs={"dropout": KEYS[0]})
        return outside.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

    (found_loss, found_updates), found = gradients(wrapped, model.variables)
    (loss, updates), expected = gradients(model.module, model.rounded)
    assert same_bits(found_loss, loss)
    assert same_bits(found_updates, updates)
    assert same_bits(found, expected)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(found))
    assert any(jnp.any(x != 0) for x in jax.tree.leaves(found))


@each_model
def test_three_steps_of_stochastic_rounding_lower_the_loss(name):
    model = outside.model(name)
    # Adam's first steps move every weight by the rate, which is to be small beside it.
    wrapped, optimizer = mixprec.wrap(model.module, STOCHASTIC), optax.adam(3e-4)

    @outside.jit
    def step(params, state, key):
        rngs = {"rounding": key, "dropout": KEYS[0]}
        loss = functools.partial(model.loss, wrapped, rngs=rngs)
        (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state)
        return value, optax.apply_updates(params, updates), state

    start = model.initial["params"]
    params, state, losses = start, optimizer.init(start), []
    for key in KEYS:
        loss, params, state = step(params, state, key)
        losses.append(float(loss))
    assert losses[3] < losses[0]
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    first, other = (
        float(step(start, optimizer.init(start), key)[0]) for key in KEYS[:2]
    )
    assert first == losses[0] != other


@each_model
def test_the_tree_that_init_gives_is_unchanged(name):
    model = outside.model(name)
    wrapped = mixprec.wrap(model.module, TOWARD_ZERO)
    rngs = {"params": outside.KEY, "rounding": KEYS[1]}
    assert same_bits(model.init(wrapped, rngs), model.initial)


@each_model
def test_the_explanation_names_every_parameter(name):
    model = outside.model(name)
    wrapped = mixprec.wrap(model.module, TOWARD_ZERO)
    explanation = mixprec.explain(wrapped, *model.inputs, **model.options)
    params = flax.traverse_util.flatten_dict(model.variables["params"], sep="/")
    assert outside.explained(explanation) == {
        path: [outside.type_of(x), "toward_zero"] for path, x in params.items()
    }


@each_model
def test_an_activation_is_rounded(name):
    model = outside.model(name)
    policy = Policy(activations=(Rule(model.site, "toward_zero"),))
    wrapped = mixprec.wrap(model.module, policy)

    def cut_at_the_site(method, args, kwargs, context):
        outputs = method(*args, **kwargs)
        is_there = "/".join(context.module.path) == model.site
        if is_there and context.method_name == "__call__":
            return jax.tree.map(outside.cut, outputs)
        return outputs

    @outside.jit
    def expected(variables):
        with nn.intercept_methods(cut_at_the_site):
            return model.apply(model.module, variables)

    found = outside.jit(functools.partial(model.apply, wrapped))(model.variables)
    assert same_bits(found, expected(model.variables))
    raw = outside.jit(functools.partial(model.apply, model.module))(model.variables)
    assert not same_bits(found, raw)


# What single packages do besides.


@pytest.mark.xdist_group("transformers_gpt2")
def test_transformers_own_classes_take_a_wrapped_module_and_generate_with_it():
    import transformers

    plain = transformers.FlaxGPT2LMHeadModel

    class Wrapped(plain):
        module_class = mixprec.wrap_class(plain.module_class, TOWARD_ZERO)

    model, (prompts, *_) = outside.model("transformers_gpt2"), outside.gpt2().inputs
    wrapped, plain = (
        cls(outside.gpt2_config(), _do_init=False) for cls in (Wrapped, plain)
    )

    def run(outer, params):
        logits = outer(prompts, params=params).logits
        options = {"max_length": 12, "do_sample": False, "pad_token_id": 1}
        found = outer.generate(prompts[:, :4], params=params, **options)
        return logits, found.sequences

    logits, sequences = run(wrapped, model.variables["params"])
    expected_logits, expected_sequences = run(plain, model.rounded["params"])
    np.testing.assert_allclose(logits, expected_logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(sequences, expected_sequences)
    raw_logits = plain(prompts, params=model.variables["params"]).logits
    assert not np.allclose(logits, raw_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.xdist_group("transformers_gpt2")
def test_a_rule_for_a_head_that_transformers_calls_detached_is_refused():
    # With tied weights GPT-2 calls `self.lm_head.apply({"params": ...}, x)`: a module
    # of its own, with no place below the wrapped one.
    model = outside.model("transformers_gpt2")
    policy = Policy(activations=(Rule("lm_head", "toward_zero"),))
    wrapped = mixprec.wrap(model.module, policy)
    with pytest.raises(ValueError, match="'lm_head', which matches none of"):
        jax.eval_shape(functools.partial(model.apply, wrapped), model.variables)


@pytest.mark.xdist_group("netket_autoregressive")
@pytest.mark.parametrize("method", ["conditionals", "conditionals_log_psi"])
def test_netkets_other_methods_round(method):
    model = outside.model("netket_autoregressive")

    def run(module, variables):
        apply = functools.partial(model.apply, module, method=method)
        return outside.jit(apply)(variables)

    found = run(mixprec.wrap(model.module, TOWARD_ZERO), model.variables)
    assert same_bits(found, run(model.module, model.rounded))
    assert not same_bits(found, run(model.module, model.variables))


@pytest.mark.xdist_group("flaxmodels_resnet18")
def test_what_a_block_of_flaxmodels_writes_into_its_arguments_is_kept():
    import flaxmodels

    model, policy = outside.model("flaxmodels_resnet18"), "activations: BasicBlock_2:in"
    module = flaxmodels.ResNet18(output="activations", pretrained=None, num_classes=5)
    wrapped = mixprec.wrap(module, f"{policy}=toward_zero")

    def shapes(module):
        return jax.eval_shape(functools.partial(model.apply, module), model.variables)

    assert shapes(wrapped) == shapes(module)
    assert "block2_0" in shapes(module)


def test_the_example_in_the_docs_runs():
    text = (pathlib.Path(__file__).parents[1] / "docs/wrapping.md").read_text()
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert "10 of 28 parameters rounded" in printed.getvalue()
    gradients = names["gradients"]["transformer"]["h"]["0"]["mlp"]["c_fc"]
    # Of its 24 bits of mantissa a float32 keeps 3, as float8_e5m2 has them.
    words = jax.tree.map(lambda g: (g.view("uint32") & 0x1FFFFF).any(), gradients)
    assert words == {"bias": True, "kernel": False}
