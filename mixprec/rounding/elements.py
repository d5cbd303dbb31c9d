"""From float32 elements to rounded ones: the body of the XLA path and of each kernel.

It works on whole arrays and on the blocks of a kernel alike; what differs between
backends is only how elements are fetched and stored, and how their indices are known.
"""

from collections.abc import Callable, Sequence

import jax

from mixprec.rounding import bits as bits_lib
from mixprec.rounding import random
from mixprec.rounding.bits import Rounding

# Integer operations an element, for cost estimates: about 10 a mode, 16 for a hash.
_FLOPS_PER_MODE = 10
_FLOPS_PER_HASH = 16


def round_elements(
    x: jax.Array,
    rounding: Rounding,
    draw: Callable[[jax.Array], jax.Array] | None = None,
    *,
    as_patterns: bool = False,
) -> tuple[jax.Array, ...]:
    """Rounds elements in each of several modes.

    Args:
      x: [...] float32.
      rounding: what to make of them.
      draw: gives [...] uint32 random bits for the [...] uint32 patterns of `x`; None if
        no mode is stochastic.
      as_patterns: whether to give integers for the caller to read as floats.

    Returns:
      For each mode [...] `rounding.out_dtype`, or `rounding.to.pattern_dtype`.
    """
    patterns = bits_lib.from_float32(x)
    random_bits = None if draw is None else draw(patterns)
    rounded = bits_lib.round_patterns(patterns, rounding, random_bits)
    if as_patterns:
        return tuple(y.astype(rounding.to.pattern_dtype) for y in rounded)
    return tuple(bits_lib.to_float(y, rounding.to, rounding.out_dtype) for y in rounded)


def round_array(
    x: jax.Array,
    seed: jax.Array | None,
    rounding: Rounding,
    strides: random.Strides,
) -> tuple[jax.Array, ...]:
    """Rounds a whole array by operations that XLA fuses.

    Args:
      x: [...] float32.
      seed: [2] uint32 or more, of which two count; None if no mode is stochastic.
      rounding: what to make of each element.
      strides: of the element index along the dimensions of `x`.

    Returns:
      One [...] `rounding.out_dtype` a mode.
    """
    draw = None
    if seed is not None:
        index = random.index_words(x.shape, strides)
        draw = hashed((seed[0], seed[1]), index, rounding)
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
