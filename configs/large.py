"""GPT-2-large's size: 36 layers, width 1280 (Radford et al. 2019), 714M parameters.

Memory: 19.4 GB, as compiled for a TPU v6e and v5p (not run there): 8.6 GB of master
weights and both moments (12 bytes a parameter), 10.8 GB of gradients, their sum over
microbatches, and what remat keeps of 4 sequences. To try it on two CPU cores, in 3
minutes and 5.5 GB:

    python train.py --config configs/large.py --config.train.steps=2
        --config.model.num_layers=2
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    config = default.get_config()
    config.data.sequence_length = 1024
    config.data.batch_size = 16
    config.model.num_layers = 36
    config.model.width = 1280
    config.model.num_heads = 20
    config.model.num_kv_heads = 20
    config.model.mlp_width = 3456
    config.model.remat = "full"  # activations of 36 layers would not fit
    # Rounded weights are bfloat16 values, so products in bfloat16 lose nothing of them.
    config.model.dtype = "bfloat16"
    config.optimizer.learning_rate = 2.5e-4  # as GPT-3's model of this size
    config.optimizer.warmup_steps = 1000
    config.train.steps = 20_000
    config.train.microbatches = 4
    config.train.validate_every = 1000
    config.train.validation_batches = 5
    config.checkpoint.every = 1000
    return config
