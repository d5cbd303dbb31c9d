import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest

from mixprec.training import state

OPTIONS = dict(
    learning_rate=0.1,
    warmup_steps=10,
    final_fraction=0.1,
    b1=0.9,
    b2=0.95,
    epsilon=1e-8,
    weight_decay=0.5,
    clip_norm=1.0,
)


class Model(nn.Module):
    """Tokens to logits, with a boxed kernel and a norm's scale."""

    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(8, 4, name="embed")(tokens)
        x = nn.LayerNorm(name="norm")(x)
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "out"))
        return nn.Dense(
            8, kernel_init=boxed, param_dtype=self.param_dtype, name="head"
        )(x)


def one_update(params, gradient, **changes):
    optimizer = state.make_optimizer(
        state.OptimizerConfig(**OPTIONS | {"warmup_steps": 0} | changes), steps=100
    )
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    return updates


def test_learning_rate_warms_up_linearly_then_decays_by_a_cosine():
    schedule = state.learning_rate_schedule(state.OptimizerConfig(**OPTIONS), steps=110)
    # Halfway down the cosine stands the mean of peak and end.
    expected = {0: 0.0, 5: 0.05, 10: 0.1, 60: 0.055, 110: 0.01, 500: 0.01}
    for step, rate in expected.items():
        assert math.isclose(schedule(step), rate, rel_tol=1e-6, abs_tol=1e-9)


def test_learning_rate_of_a_run_shorter_than_its_warmup_reaches_the_peak():
    schedule = state.learning_rate_schedule(state.OptimizerConfig(**OPTIONS), steps=4)
    assert math.isclose(schedule(4), 0.1, rel_tol=1e-6)


def test_first_update_is_adamw_by_hand():
    params = {"kernel": jnp.float32([[2.0, -3.0]])}
    gradient = {"kernel": jnp.float32([[0.3, -0.4]])}
    # Bias-corrected moments after one step are g and g^2, so Adam moves by sign(g).
    expected = -0.1 * (np.sign([[0.3, -0.4]]) + 0.5 * np.array([[2.0, -3.0]]))
    updates = one_update(params, gradient)
    np.testing.assert_allclose(updates["kernel"], expected, rtol=1e-6)


def test_scales_and_biases_are_not_decayed():
    zeros = {"a": {"scale": jnp.zeros(3), "bias": jnp.zeros(3), "kernel": jnp.zeros(3)}}
    ones = jax.tree.map(jnp.ones_like, zeros)
    updates = one_update(ones, zeros)["a"]
    assert updates["scale"].tolist() == [0, 0, 0]
    assert updates["bias"].tolist() == [0, 0, 0]
    np.testing.assert_allclose(updates["kernel"], [-0.05] * 3, rtol=1e-6)


def test_gradient_of_a_greater_norm_is_scaled_down():
    params = {"kernel": jnp.zeros(2)}
    optimizer = state.make_optimizer(state.OptimizerConfig(**OPTIONS), steps=100)
    gradient = {"kernel": jnp.float32([30.0, 40.0])}
    _, after = optimizer.update(gradient, optimizer.init(params), params)
    moments = [leaf for leaf in jax.tree.leaves(after) if leaf.shape == (2,)]
    np.testing.assert_allclose(moments[0], [0.06, 0.08], rtol=1e-5)  # (1 - b1) g / 50


def test_initial_state_holds_unboxed_float32_masters_at_step_0():
    model = Model()
    optimizer = state.make_optimizer(state.OptimizerConfig(**OPTIONS), steps=100)
    layout = layouts.one_device("out")
    first = state.init_state(model, optimizer, layout, seed=3, sequence_length=5)
    assert first.step == 0
    assert first.step.dtype == jnp.int32
    expected = nn.meta.unbox(
        model.init(jax.random.key(3), jnp.zeros((1, 5), jnp.int32))["params"]
    )
    assert jax.tree.structure(first.params) == jax.tree.structure(expected)
    for leaf, wanted in zip(
        jax.tree.leaves(first.params), jax.tree.leaves(expected), strict=True
    ):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, wanted)


def test_master_weights_that_are_not_float32_are_refused():
    optimizer = state.make_optimizer(state.OptimizerConfig(**OPTIONS), steps=100)
    with pytest.raises(TypeError, match=r"head.*must be float32, got bfloat16"):
        state.init_state(
            Model(param_dtype=jnp.bfloat16),
            optimizer,
            layouts.one_device("out"),
            seed=0,
            sequence_length=5,
        )


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("learning_rate", 0.0, "positive"),
        ("learning_rate", -1.0, "positive"),
        ("epsilon", 0.0, "positive"),
        ("clip_norm", 0.0, "positive"),
        ("warmup_steps", -1, "at least 0"),
        ("weight_decay", -0.1, "at least 0"),
        ("b1", 1.5, "at least 0 and at most 1"),
        ("b2", -0.5, "at least 0 and at most 1"),
        ("final_fraction", 2.0, "at least 0 and at most 1"),
    ],
)
def test_values_out_of_range_are_refused(name, value, rule):
    with pytest.raises(ValueError, match=f"`{name}` must be {rule}, got {value}"):
        state.OptimizerConfig(**OPTIONS | {name: value})
