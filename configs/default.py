"""Every key of a training run, once. The other configs override only what differs.

Change any of them on the command line: `--config.train.steps=100`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Gives the defaults: the small model, rounded stochastically."""
    config = ml_collections.ConfigDict()

    # Of initial weights, order of data, stochastic rounding and sample.
    config.seed = 0

    config.data = ml_collections.ConfigDict()
    # "stdlib" (the Python standard library's own source), or a file, a folder or a
    # glob: of text, or of tokens (.bin as nanoGPT, llm.c and mixprec.training.prepare
    # write it, .array_record). Or a mixture: "path=weight, path=weight".
    config.data.path = "stdlib"
    config.data.sequence_length = 128  # tokens (bytes, if of text)
    config.data.batch_size = 16  # sequences in one optimizer step
    config.data.validation_fraction = 0.05  # of the files (of the tokens, if one file)
    # The tokenizer's JSON file, if the data are tokens; it decodes the sample.
    config.data.tokenizer = ""
    # "uint16" or "uint32": of tokens in files that do not say, which are .bin without a
    # header and .array_record.
    config.data.token_dtype = "uint16"
    # The token between documents; -1 for the one that the data name (text: byte 0).
    config.data.separator = -1
    # Whether a prediction looks back on its own document only.
    config.data.document_mask = False

    config.model = ml_collections.ConfigDict()
    config.model.vocab_size = 256  # at least the number of tokens; 256 for bytes
    config.model.num_layers = 4
    config.model.width = 128  # of the residual stream; num_heads must divide it
    config.model.num_heads = 4  # of queries
    config.model.num_kv_heads = 2  # of keys and values; must divide num_heads
    config.model.mlp_width = 352  # 8/3 of width makes an MLP of 8 width^2 weights
    config.model.rope_theta = 10_000.0  # base of the rotary wavelengths, in tokens
    config.model.norm_epsilon = 1e-6  # added to the mean square before its root
    config.model.tie_embeddings = True  # whether logits use the embedding's weights
    # What the backward pass computes again to save memory: "none", "dots" (all but
    # products of activations with weights) or "full" (every layer from its input).
    config.model.remat = "none"
    # Of products and activations. Parameters are always float32.
    config.model.dtype = "float32"

    config.policy = ml_collections.ConfigDict()
    # "pattern=mode, ...": a pattern is a regular expression that matches a whole path,
    # the first match decides, mode "keep" leaves alone. See docs/wrapping.md.
    config.policy.params = ".*/scale=keep, .*=stochastic"
    # Likewise, over module paths: ":out" is what the module returns, ":in" what it is
    # given.
    config.policy.activations = "layers/(attention|mlp):out=nearest_even"
    # Likewise, over both, for what comes back for them.
    config.policy.gradients = ""
    # What carries rounded values: "float32" or "bfloat16".
    config.policy.out_dtype = "float32"
    # Of draws outside training, where no key is passed: validation and sample.
    config.policy.seed = 0
    config.policy.backend = "auto"  # "auto", "xla" or "pallas"
    # Axes of the mesh over which a parameter is gathered once its shard is rounded.
    config.policy.gather = "fsdp"

    config.mesh = ml_collections.ConfigDict()
    # Devices along each axis; together they are all devices; -1 for what is left.
    config.mesh.data = -1  # copies of the parameters, each with a part of the batch
    config.mesh.fsdp = 1  # parts of parameters and optimizer state, and of the batch
    config.mesh.tensor = 1  # parts of heads, MLPs and vocabulary
    config.mesh.sequence = 1  # parts of each sequence
    # Name of an array's axis = axes of the mesh that split it, joined by "+".
    config.mesh.rules = (
        "batch=data+fsdp, length=sequence, embed=fsdp, heads=tensor, kv_heads=tensor, "
        "mlp=tensor, vocab=tensor, layers="
    )

    config.optimizer = ml_collections.ConfigDict()
    config.optimizer.learning_rate = 3e-3  # at its peak
    config.optimizer.warmup_steps = 40  # of linear growth to the peak
    config.optimizer.final_fraction = 0.1  # of the peak, at the last step
    config.optimizer.b1 = 0.9  # decay of the first moment a step
    config.optimizer.b2 = 0.95  # decay of the second moment a step
    config.optimizer.epsilon = 1e-8  # added to the root of the second moment
    config.optimizer.weight_decay = 0.1  # a step, times the learning rate
    config.optimizer.clip_norm = 1.0  # largest global norm of a gradient

    config.train = ml_collections.ConfigDict()
    config.train.steps = 400  # optimizer steps in all
    config.train.microbatches = 1  # parts of a batch, one after the other, for memory
    config.train.log_every = 10  # steps
    config.train.validate_every = 100  # steps
    config.train.validation_batches = 20

    config.checkpoint = ml_collections.ConfigDict()
    config.checkpoint.every = 100  # steps
    config.checkpoint.keep_last = 2  # checkpoints
    config.checkpoint.keep_best = 1  # checkpoints besides, by validation loss

    config.sample = ml_collections.ConfigDict()
    config.sample.prompt = "def "
    config.sample.length = 200  # tokens to generate; 0 for none
    config.sample.temperature = 0.7  # divides the logits; 0 takes the likeliest token

    return config
