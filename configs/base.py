"""GPT-2's size: 12 layers, width 768 (Radford et al. 2019, table 2), 85M parameters.

Memory: 5.5 GB, as compiled for a TPU v5e (not run there): 1.0 GB of master weights and
both moments (12 bytes a parameter), 4.4 GB of gradients, their sum over microbatches,
and activations. On two CPU cores a step takes minutes.
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    config = default.get_config()
    config.data.sequence_length = 1024
    config.data.batch_size = 32
    config.model.num_layers = 12
    config.model.width = 768
    config.model.num_heads = 12
    config.model.num_kv_heads = 12
    config.model.mlp_width = 2048
    config.model.remat = "dots"  # attention weights of 12 layers take 9 GB more
    # Rounded weights are bfloat16 values, so products in bfloat16 lose nothing of them.
    config.model.dtype = "bfloat16"
    config.optimizer.learning_rate = 6e-4  # as GPT-3's model of this size
    config.optimizer.warmup_steps = 500
    config.train.steps = 10_000
    config.train.microbatches = 4
    config.train.validate_every = 500
    config.checkpoint.every = 500
    return config
