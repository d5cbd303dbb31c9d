"""From elements to rounded ones: the body of the XLA path and of each kernel.

It works on whole arrays and on the blocks of a kernel alike; what differs between
backends is only how elements are fetched and stored, and how their indices are known.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mixprec.rounding import bits as bits_lib
from mixprec.rounding import random, statistics
from mixprec.rounding.bits import Rounding
from mixprec.rounding.formats import Format

# Operations an element, for cost estimates: about 10 a mode, 16 for a hash, and 35 for
# statistics.
_FLOPS_PER_MODE = 10
_FLOPS_PER_HASH = 16
_FLOPS_OF_STATISTICS = 35


def round_elements(
    x: jax.Array,
    rounding: Rounding,
    draw: Callable[[jax.Array], jax.Array] | None = None,
    *,
    source: Format | None = None,
    as_patterns: bool = False,
    is_within: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Rounds elements in each of several modes.

    Args:
      x: [...] of a float dtype that `bits.from_float` reads, or unsigned integers.
      rounding: what to make of them.
      draw: gives [...] uint32 random bits for the [...] uint32 float32 patterns of `x`;
        None if no mode is stochastic.
      source: the format whose patterns the integers in `x` are; None for floats.
      as_patterns: whether to give integers for the caller to read as floats.
      is_within: [...] bool or None: which elements are of the array. Others are taken
        for zeros, of which no statistic takes note; None if all are.

    Returns:
      For each mode [...] `rounding.out_dtype`, or `rounding.to.pattern_dtype`; then, if
      so chosen, what each element adds to each of the statistics.
    """
    if source is None:
        patterns = bits_lib.from_float(x)
    else:
        patterns = bits_lib.widen(x.astype(jnp.uint32), source)
    if is_within is not None:
        patterns = jnp.where(is_within, patterns, np.uint32(0))
    random_bits = None if draw is None else draw(patterns)
    rounded = bits_lib.round_patterns(patterns, rounding, random_bits)
    added: tuple[jax.Array, ...] = ()
    if rounding.statistics:
        (of_mode,) = rounded
        added = statistics.of_elements(patterns, of_mode, rounding.to)
    if as_patterns:
        return *(y.astype(rounding.to.pattern_dtype) for y in rounded), *added
    to, dtype = rounding.to, rounding.out_dtype
    return *(bits_lib.to_float(y, to, dtype) for y in rounded), *added


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
      One [...] `rounding.out_dtype` a mode; then, if so chosen, the statistics' fields.
    """
    draw = None
    if words is not None and strides is not None:
        index = random.index_words(x.shape, strides)
        if words.size > 2:
            index = tuple(word + words[2 + which] for which, word in enumerate(index))
        draw = hashed((words[0], words[1]), index, rounding)
    if not rounding.statistics:
        return round_elements(x, rounding, draw)
    rounded, *added = round_elements(x, rounding, draw)
    return rounded, *statistics.total_by_platform(statistics.Statistics(*added))


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
    """Gives the number of operations an element."""
    return (
        len(rounding.modes) * _FLOPS_PER_MODE
        + is_hashed * _FLOPS_PER_HASH
        + rounding.statistics * _FLOPS_OF_STATISTICS
    )
