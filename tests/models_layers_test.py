import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal

from models import layers


def test_rms_norm_by_hand():
    x = normal(2, 3, 8)
    scale = normal(8, seed=1)
    module = layers.RMSNorm(epsilon=0.5, dtype=jnp.float32)
    found = module.apply({"params": {"scale": scale}}, x)
    wide = np.asarray(x, np.float64)
    mean_square = (wide**2).mean(-1, keepdims=True)
    expected = wide / np.sqrt(mean_square + 0.5) * np.asarray(scale)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_computes_in_float32():
    x = (normal(1, 2, 512) * 1e3).astype(jnp.bfloat16)
    module = layers.RMSNorm(epsilon=1e-6, dtype=jnp.bfloat16)
    params = {"scale": jnp.ones(512)}
    found = module.apply({"params": params}, x)
    assert found.dtype == jnp.bfloat16
    wide = np.asarray(x.astype(jnp.float32), np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True))
    # One rounding to bfloat16 at the end: half of 2^-7.
    np.testing.assert_allclose(
        np.asarray(found.astype(jnp.float32)), expected, rtol=2**-8
    )


def rotate_by_complex_numbers(x, theta):
    """Turns feature pairs as complex numbers, in float64."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    frequencies = theta ** (-np.arange(half) / half)
    turns = np.exp(1j * np.arange(x.shape[1])[:, None] * frequencies)
    pairs = pairs * turns[None, :, None, :]
    return np.concatenate([pairs.real, pairs.imag], -1)


def test_rotary_positions_are_complex_turns():
    x = normal(2, 300, 3, 8)
    found = layers.rotate(x, 10_000.0)
    # Angles up to 300 radians in float32: 300 * 2^-24 = 1.8e-5, times values up to 4.
    np.testing.assert_allclose(
        found, rotate_by_complex_numbers(x, 10_000.0), rtol=0, atol=1e-4
    )


def test_angles_are_float32_for_bfloat16_features():
    # Of 1, turned far: a bfloat16 angle at position 4000 is off by up to 8 radians.
    x = jnp.ones((1, 4001, 1, 2), jnp.bfloat16)
    found = layers.rotate(x, 10_000.0)
    assert found.dtype == jnp.bfloat16
    expected = rotate_by_complex_numbers(np.ones((1, 4001, 1, 2)), 10_000.0)
    error = np.abs(np.asarray(found.astype(jnp.float32)) - expected).max()
    assert error < 2**-7  # the rounding of the result, up to 1.41, to bfloat16


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_weights_each_earlier_position(num_kv_heads):
    module = layers.Attention(
        num_heads=4,
        num_kv_heads=num_kv_heads,
        rope_theta=100.0,
        out_scale=1.0,
        dtype=jnp.float32,
    )
    x = normal(2, 5, 16)
    params = nn.meta.unbox(module.init(jax.random.key(0), x))["params"]
    assert params["key"]["kernel"].shape == (16, num_kv_heads * 4)
    p = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in params.items()}
    wide = np.asarray(x, np.float64)

    def heads(name):
        return (wide @ p[name]).reshape(2, 5, -1, 4)

    query = rotate_by_complex_numbers(heads("query"), 100.0)
    key = rotate_by_complex_numbers(heads("key"), 100.0)
    value = heads("value")
    mixed = np.zeros_like(query)
    for b in range(2):
        for n in range(4):
            shared = n // (4 // num_kv_heads)
            for t in range(5):
                scores = key[b, : t + 1, shared] @ query[b, t, n] / np.sqrt(4)
                weights = np.exp(scores - scores.max())
                mixed[b, t, n] = weights / weights.sum() @ value[b, : t + 1, shared]
    expected = mixed.reshape(2, 5, 16) @ p["out"]
    np.testing.assert_allclose(
        module.apply({"params": params}, x), expected, rtol=0, atol=1e-5
    )


def test_mlp_is_swiglu():
    module = layers.MLP(hidden_width=12, out_scale=1.0, dtype=jnp.float32)
    x = normal(2, 3, 8)
    params = nn.meta.unbox(module.init(jax.random.key(0), x))["params"]
    p = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in params.items()}
    wide = np.asarray(x, np.float64)
    gate = wide @ p["gate"]
    expected = (gate / (1 + np.exp(-gate)) * (wide @ p["up"])) @ p["down"]
    np.testing.assert_allclose(
        module.apply({"params": params}, x), expected, rtol=0, atol=1e-5
    )


def test_output_kernels_start_smaller():
    x = normal(1, 2, 256)
    for module, name, fan_in in (
        (layers.MLP(hidden_width=256, out_scale=0.25, dtype=jnp.float32), "down", 256),
        (
            layers.Attention(
                num_heads=4,
                num_kv_heads=4,
                rope_theta=100.0,
                out_scale=0.25,
                dtype=jnp.float32,
            ),
            "out",
            256,
        ),
    ):
        params = nn.meta.unbox(module.init(jax.random.key(0), x))["params"]
        deviation = float(params[name]["kernel"].std())
        # 65,536 draws: their deviation is known to 0.3% (one sigma).
        np.testing.assert_allclose(deviation, 0.25 * fan_in**-0.5, rtol=0.015)
