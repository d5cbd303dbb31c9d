"""The parts of a transformer layer: norm, attention with rotary positions, MLP.

Shape suffixes: B batch, T positions, D width, N query heads, K key-value heads,
H head size, M all heads, F width inside the MLP.

Every parameter is float32 and carries the logical names of its axes, as activations do
where several devices may share them. Products and activations are in the layer's
`dtype`.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

_kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


class RMSNorm(nn.Module):
    """Divides by the root mean square (Zhang & Sennrich 2019, equation 4), in float32.

    Attributes:
      epsilon: added to the mean square before its root.
      dtype: of the result.
    """

    epsilon: float
    dtype: Any

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Gives [B, T, D] `dtype`."""
        ones = nn.with_logical_partitioning(nn.initializers.ones_init(), ("embed",))
        scale_D: Any = self.param("scale", ones, (x_BTD.shape[-1],), jnp.float32)
        x_BTD = x_BTD.astype(jnp.float32)
        mean_square_BT1 = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
        x_BTD = x_BTD * jax.lax.rsqrt(mean_square_BT1 + self.epsilon)
        scale_11D = scale_D.astype(jnp.float32)[None, None, :]
        return (x_BTD * scale_11D).astype(self.dtype)


def rotate(x_BTNH: jax.Array, theta: float) -> jax.Array:
    """Rotates pairs of features by angles that grow with the position.

    Feature i and feature i + H/2 at position t turn by t / theta^(2i/H) (Su et al.
    2021, "RoFormer", section 3.2.2). Angles are float32 whatever the dtype of `x`:
    bfloat16 cannot tell positions above 256 apart.

    Args:
      x_BTNH: [B, T, N, H]; H even.
      theta: base of the wavelengths.

    Returns:
      [B, T, N, H] in the dtype of `x_BTNH`.
    """
    length, head_size = x_BTNH.shape[1], x_BTNH.shape[3]
    exponents = jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size
    positions = jnp.arange(length, dtype=jnp.float32)
    angles = positions[:, None] * (jnp.float32(theta) ** -exponents)[None, :]
    cosine, sine = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)


class Attention(nn.Module):
    """Causal attention whose query heads share keys and values in groups.

    Grouped-query attention (Ainslie et al. 2023).

    Attributes:
      num_heads: of queries.
      num_kv_heads: of keys and values.
      rope_theta: base of the rotary wavelengths.
      out_scale: of the output kernel's initial standard deviation.
      dtype: of products and activations.
    """

    num_heads: int
    num_kv_heads: int
    rope_theta: float
    out_scale: float
    dtype: Any

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, segments_BT: jax.Array | None = None
    ) -> jax.Array:
        """Gives [B, T, D] `dtype`; each position looks back in its own segment only."""
        width = x_BTD.shape[-1]
        head_size = width // self.num_heads
        dense = functools.partial(_dense, self.dtype)

        def project(name: str, heads: int, axis: str, length: str | None) -> jax.Array:
            projected = dense(name, heads * head_size, _kernel_init, ("embed", axis))(
                x_BTD
            )
            return nn.with_logical_constraint(
                projected.reshape(*x_BTD.shape[:2], heads, head_size),
                ("batch", length, axis, None),
            )

        query_BTNH = project("query", self.num_heads, "heads", "length")
        # Queries look at keys of all positions.
        key_BTKH = project("key", self.num_kv_heads, "kv_heads", None)
        value_BTKH = project("value", self.num_kv_heads, "kv_heads", None)
        mixed_BTNH = jax.nn.dot_product_attention(
            rotate(query_BTNH, self.rope_theta),
            rotate(key_BTKH, self.rope_theta),
            value_BTKH,
            mask=None if segments_BT is None else _same_segment(segments_BT),
            is_causal=True,
        )
        mixed_BTM = mixed_BTNH.reshape(*x_BTD.shape[:2], width)
        out = dense("out", width, _scaled(self.out_scale), ("heads", "embed"))
        return out(mixed_BTM)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, equation 6).

    Attributes:
      hidden_width: inside.
      out_scale: of the output kernel's initial standard deviation.
      dtype: of products and activations.
    """

    hidden_width: int
    out_scale: float
    dtype: Any

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Gives [B, T, D] `dtype`."""
        dense = functools.partial(_dense, self.dtype)
        inward, outward = ("embed", "mlp"), ("mlp", "embed")
        gate_BTF = dense("gate", self.hidden_width, _kernel_init, inward)(x_BTD)
        up_BTF = dense("up", self.hidden_width, _kernel_init, inward)(x_BTD)
        hidden_BTF = nn.with_logical_constraint(
            nn.silu(gate_BTF) * up_BTF, ("batch", "length", "mlp")
        )
        down = dense("down", x_BTD.shape[-1], _scaled(self.out_scale), outward)
        return down(hidden_BTF)


def _dense(
    dtype: Any, name: str, width: int, init: Any, axes: tuple[str, str]
) -> nn.Dense:
    return nn.Dense(
        width,
        use_bias=False,
        kernel_init=nn.with_logical_partitioning(init, axes),
        dtype=dtype,
        name=name,
    )


def _same_segment(segments_BT: jax.Array) -> jax.Array:
    """Gives [B, 1, T, T] bool: which keys are in the query's segment.

    Rotary positions need not start anew with a segment: what a query sees of a key
    depends on their distance alone.
    """
    return (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None, :, :]


def _scaled(scale: float) -> Any:
    return nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
