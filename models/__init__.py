"""Plain Flax modules that know nothing of precision."""

import flax.linen as nn

from models.transformer import Transformer, TransformerConfig

__all__ = ["TransformerConfig", "build"]


def build(config: TransformerConfig) -> nn.Module:
    """Gives the model that `config` describes."""
    return Transformer(config)
