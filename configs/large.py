"""GPT-2-large's size: 36 layers, width 1280 (Radford et al. 2019, table 2).

Memory: 709M parameters. Master weights and both moments take 12 bytes a parameter,
8.5 GB; gradients and their sum over microbatches 5.7 GB; with remat="full" a microbatch
of 4 sequences keeps 36 layer inputs of 10 MB in bfloat16 and recomputes one layer at a
time, about 1 GB. For one accelerator of 24 GB or more. To try it on a CPU:

    python train.py --config configs/large.py --config.train.steps=2 \
        --config.model.num_layers=2
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    config = default.get_config()
    config.data.sequence_length = 1024
    config.data.batch_size = 64
    config.model.num_layers = 36
    config.model.width = 1280
    config.model.num_heads = 20
    config.model.num_kv_heads = 20
    config.model.mlp_width = 3456
    config.model.remat = "full"  # 36 layers of activations would not fit
    # Rounded weights are bfloat16 values, so products in bfloat16 lose nothing of them.
    config.model.dtype = "bfloat16"
    config.optimizer.learning_rate = 2.5e-4  # as GPT-3's model of this size
    config.optimizer.warmup_steps = 1000
    config.train.steps = 20_000
    config.train.microbatches = 16
    config.train.validate_every = 1000
    config.checkpoint.every = 1000
    return config
