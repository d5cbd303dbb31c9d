"""GPT-2's size: 12 layers, width 768 (Radford et al. 2019, table 2), 85M parameters.

Memory: master weights and both moments take 12 bytes a parameter, 1.0 GB; gradients
0.3 GB; activations of a microbatch about 3 GB without remat. For one accelerator of
8 GB or more; on two CPU cores a step takes minutes.
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    config = default.get_config()
    config.data.sequence_length = 1024
    config.data.batch_size = 64
    config.model.num_layers = 12
    config.model.width = 768
    config.model.num_heads = 12
    config.model.num_kv_heads = 12
    config.model.mlp_width = 2048
    # Rounded weights are bfloat16 values, so products in bfloat16 lose nothing of them.
    config.model.dtype = "bfloat16"
    config.optimizer.learning_rate = 6e-4  # as GPT-3's model of this size
    config.optimizer.warmup_steps = 500
    config.train.steps = 10_000
    config.train.microbatches = 8
    config.train.validate_every = 500
    config.checkpoint.every = 500
    return config
