"""A small tokenizer, made here: byte-level BPE that knows a few English words."""

import pytest

WORDS = "it is the first of many small steps to take on the way"


def save(path, *, special=("<|endoftext|>",), vocab_size=300):
    """Writes it as JSON; skips the test if `tokenizers` is not installed."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    tokenizer.enable_truncation(5)  # as some files ask for; it must not matter
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path
