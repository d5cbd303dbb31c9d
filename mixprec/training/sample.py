"""Text from a trained model."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixprec.training.tokenizer import ByteTokenizer, Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What to generate at the end of training.

    Attributes:
      prompt: text to go on from; at least one token.
      length: tokens to generate; 0 for none.
      temperature: divides the logits; 0 takes the likeliest token each time.

    Raises:
      ValueError: a value out of its range.
    """

    prompt: str
    length: int
    temperature: float

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("`prompt` must not be empty, got ''. Give it a newline.")
        for name in ("length", "temperature"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"`{name}` must be at least 0, got {getattr(self, name)}. "
                    f"Correct config.sample.{name}."
                )


def generate(
    model: nn.Module,
    params: Any,
    config: SampleConfig,
    *,
    seed: int,
    tokenizer: Tokenizer | None = None,
    whole: jax.sharding.Sharding | None = None,
) -> str:
    """Goes on from a prompt.

    Args:
      model: maps [batch, length] int32 tokens to [batch, length, vocabulary] logits,
        causally.
      params: its parameters.
      config: what to generate.
      seed: of the draws.
      tokenizer: of the tokens; that of bytes by default.
      whole: of what every device of all processes is to have; by default as JAX
        chooses.

    Returns:
      The prompt and what follows; bytes that are not UTF-8 replaced.

    Raises:
      ValueError: the tokenizer makes nothing of the prompt.
    """
    tokenizer = tokenizer or ByteTokenizer()
    (prompt,) = tokenizer.encode([config.prompt])
    if not len(prompt):
        raise ValueError(
            "`prompt` must give at least one token, got none from "
            f"{config.prompt!r}. Correct config.sample.prompt."
        )
    length = len(prompt) + config.length
    # In NumPy: arrays of one process cannot meet those of several.
    text = np.zeros((1, length), np.int32)
    text[0, : len(prompt)] = prompt
    fill = functools.partial(
        _fill, model, start=len(prompt), temperature=config.temperature
    )
    text = jax.jit(fill, out_shardings=whole)(params, text, np.uint32(seed))
    return tokenizer.decode(text[0].tolist())


def _fill(
    model: nn.Module,
    params: Any,
    text: jax.Array,
    seed: jax.Array,
    start: int,
    temperature: float,
) -> jax.Array:
    """Replaces the tokens from `start` on, one after the other."""
    key = jax.random.key(seed)

    def fill_one(place: jax.Array, text: jax.Array) -> jax.Array:
        # The whole text each time: what stands after `place` is invisible to it, and
        # no cache of keys and values asks anything of the model.
        all_logits: Any = model.apply({"params": params}, text)
        logits = all_logits[0, place - 1]
        if temperature == 0:
            token = jnp.argmax(logits)
        else:
            draw = jax.random.fold_in(key, place)
            token = jax.random.categorical(draw, logits / temperature)
        return text.at[0, place].set(token.astype(jnp.int32))

    return jax.lax.fori_loop(start, text.shape[1], fill_one, text)
