"""A decoder-only transformer, scanned over its layers.

Shape suffixes: B batch, T positions, D width, V vocabulary.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import layers

REMAT_CHOICES = ("none", "dots", "full")
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a transformer.

    Attributes:
      vocab_size: number of tokens.
      num_layers: of attention and MLP each.
      width: of the residual stream.
      num_heads: of queries; divides `width` into an even head size.
      num_kv_heads: of keys and values; divides `num_heads`.
      mlp_width: inside the MLP.
      rope_theta: base of the rotary wavelengths, in positions.
      norm_epsilon: added to the mean square before its root.
      tie_embeddings: whether the logits use the embedding's weights.
      remat: what the backward pass computes again: "none", "dots" (all but products of
        activations with weights) or "full" (each layer from its input).
      dtype: of products and activations; parameters and logits are float32.

    Raises:
      ValueError: a value is not as described.
    """

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = True
    remat: str = "none"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads")
        for name in (*sizes, "mlp_width", "rope_theta", "norm_epsilon"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"`{name}` must be positive, got {getattr(self, name)}. "
                    f"Correct config.model.{name}."
                )
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"`width` must be a multiple of 2 * num_heads = {2 * self.num_heads} "
                "(rotary positions turn pairs of features of a head), got "
                f"{self.width}. Change one of the two."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_kv_heads` must divide num_heads = {self.num_heads}, got "
                f"{self.num_kv_heads}. Change one of the two."
            )
        for name, allowed in (("remat", REMAT_CHOICES), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(allowed)}, got "
                    f"{getattr(self, name)!r}. Correct config.model.{name}."
                )


class Layer(nn.Module):
    """Attention and MLP, each added to the residual stream behind a norm."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, segments_BT: jax.Array | None
    ) -> tuple[jax.Array, None]:
        """Gives the residual stream after this layer, as `nn.scan` wants it."""
        config = self.config
        dtype = jnp.dtype(config.dtype)
        # Each layer adds to the stream twice; its variance is to stay that of one
        # addition (Radford et al. 2019, section 2.3).
        out_scale = (2 * config.num_layers) ** -0.5
        attention = layers.Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            rope_theta=config.rope_theta,
            out_scale=out_scale,
            dtype=dtype,
            name="attention",
        )
        mlp = layers.MLP(
            hidden_width=config.mlp_width, out_scale=out_scale, dtype=dtype, name="mlp"
        )

        def norm(name: str) -> layers.RMSNorm:
            return layers.RMSNorm(config.norm_epsilon, dtype, name=name)

        x_BTD = _split(x_BTD + attention(norm("attention_norm")(x_BTD), segments_BT))
        return _split(x_BTD + mlp(norm("mlp_norm")(x_BTD))), None


class Transformer(nn.Module):
    """Maps tokens to the logits of each next token."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None
    ) -> jax.Array:
        """Computes logits.

        Args:
          tokens_BT: [B, T] int32, each below `vocab_size`.
          segments_BT: [B, T] int32; a position sees only those before it that have its
            number. None lets it see all.

        Returns:
          [B, T, V] float32; those at a position depend on no later token.
        """
        config = self.config
        dtype = jnp.dtype(config.dtype)
        embed = nn.Embed(
            config.vocab_size,
            config.width,
            embedding_init=nn.with_logical_partitioning(
                nn.initializers.normal(0.02), ("vocab", "embed")
            ),
            dtype=dtype,
            name="embed",
        )
        x_BTD = _split(embed(tokens_BT))
        x_BTD, _ = _scanned_layers(config)(config, name="layers")(x_BTD, segments_BT)
        x_BTD = layers.RMSNorm(config.norm_epsilon, dtype, name="final_norm")(x_BTD)
        if config.tie_embeddings:
            logits_BTV = embed.attend(x_BTD)
        else:
            logits_BTV = nn.Dense(
                config.vocab_size,
                use_bias=False,
                kernel_init=nn.with_logical_partitioning(
                    nn.initializers.normal(0.02), ("embed", "vocab")
                ),
                dtype=dtype,
                name="head",
            )(x_BTD)
        logits_BTV = nn.with_logical_constraint(
            logits_BTV, ("batch", "length", "vocab")
        )
        return logits_BTV.astype(jnp.float32)


def _split(x_BTD: jax.Array) -> jax.Array:
    # Not by "embed", as parameters are: the devices that share a width's parameters are
    # those that share the batch.
    return nn.with_logical_constraint(x_BTD, ("batch", "length", None))


def _scanned_layers(config: TransformerConfig) -> type[nn.Module]:
    layer: type[nn.Module] = Layer
    if config.remat != "none":
        policy = None
        if config.remat == "dots":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        # A scan keeps its body in one piece by itself: common subexpressions of the
        # forward and backward passes cannot meet.
        layer = nn.remat(layer, policy=policy, prevent_cse=False)
    return nn.scan(
        layer,
        variable_axes={"params": 0},
        in_axes=nn.broadcast,
        split_rngs={"params": True},
        length=config.num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
