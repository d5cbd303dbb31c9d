"""From elements to rounded ones: the body of the XLA path and of each kernel.

It works on whole arrays and on the blocks of a kernel alike; what differs between
backends is only how elements are fetched and stored, and how their indices are known.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from mixprec.rounding import bits as bits_lib
from mixprec.rounding import random
from mixprec.rounding.bits import Rounding
from mixprec.rounding.formats import Format

# Integer operations an element, for cost estimates: about 10 a mode, 16 for a hash.
_FLOPS_PER_MODE = 10
_FLOPS_PER_HASH = 16


def round_elements(
    x: jax.Array,
    rounding: Rounding,
    draw: Callable[[jax.Array], jax.Array] | None = None,
    *,
    source: Format | None = None,
    as_patterns: bool = False,
) -> tuple[jax.Array, ...]:
    """Rounds elements in each of several modes.

    Args:
      x: [...] of a float dtype that `bits.from_float` reads, or unsigned integers.
      rounding: what to make of them.
      draw: gives [...] uint32 random bits for the [...] uint32 float32 patterns of `x`;
        None if no mode is stochastic.
      source: the format whose patterns the integers in `x` are; None for floats.
      as_patterns: whether to give integers for the caller to read as floats.

    Returns:
      For each mode [...] `rounding.out_dtype`, or `rounding.to.pattern_dtype`.
    """
    if source is None:
        patterns = bits_lib.from_float(x)
    else:
        patterns = bits_lib.widen(x.astype(jnp.uint32), source)
    random_bits = None if draw is None else draw(patterns)
    rounded = bits_lib.round_patterns(patterns, rounding, random_bits)
    if as_patterns:
        return tuple(y.astype(rounding.to.pattern_dtype) for y in rounded)
    return tuple(bits_lib.to_float(y, rounding.to, rounding.out_dtype) for y in rounded)


def round_array(
    x: jax.Array,
    words: jax.Array | None,
    rounding: Rounding,
    strides: random.Strides | None,
) -> tuple[jax.Array, ...]:
    """Rounds a whole array by operations that XLA fuses.

    Args:
      x: [...] of a float dtype that `bits.from_float` reads.
      words: [2] or [4] uint32: the seed, and the two words of the first element's index
        if that is not 0; None if no mode is stochastic.
      rounding: what to make of each element.
      strides: of the element index along the dimensions of `x`; None without `words`.

    Returns:
      One [...] `rounding.out_dtype` a mode.
    """
    draw = None
    if words is not None and strides is not None:
        index = random.index_words(x.shape, strides)
        if words.size > 2:
            index = tuple(word + words[2 + which] for which, word in enumerate(index))
        draw = hashed((words[0], words[1]), index, rounding)
    return round_elements(x, rounding, draw)


def hashed(
    seed: Sequence[jax.Array],
    index: Sequence[jax.Array],
    rounding: Rounding,
) -> Callable[[jax.Array], jax.Array]:
    """Gives the draw from a hash of seed, index and, if so chosen, value.

    Args:
      seed: two uint32 scalars.
      index: one or two [...] uint32 words, as `random.index_words` gives them.
      rounding: says whether values count.
    """

    def draw(patterns: jax.Array) -> jax.Array:
        values = patterns if rounding.hash_values else None
        return random.random_bits(seed, index, values)

    return draw


def flops(rounding: Rounding, *, is_hashed: bool) -> int:
    """Gives the number of integer operations an element."""
    return len(rounding.modes) * _FLOPS_PER_MODE + is_hashed * _FLOPS_PER_HASH
