"""What rounding did to an array, in a few numbers: defined once, for every backend.

`of_elements` says what each element adds; XLA's operations sum it over the array, and
the TPU's kernel over each of its blocks. What is counted is told by comparing patterns
as integers, since float comparisons take subnormals for zero on some backends.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixprec.rounding import bits as bits_lib
from mixprec.rounding.formats import Format

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)


class Statistics(NamedTuple):
    """What rounding did to an array `x`.

    Counts, scalar uint32, are exact and the same on every backend, chip and mesh. Sums,
    scalar float32, differ between these by the order of summation, and by errors below
    2**-126, which some platforms take for zero; they are over the elements whose result
    is finite.

    Attributes:
      inexact: how many finite elements became another number, infinity or NaN.
      up: of those, how many took the neighbour away from zero (or what stands for one
        beyond the largest number).
      underflowed: how many elements other than zero became zero.
      overflowed: how many finite elements were beyond the largest number of the format:
        they became infinity, NaN or, as mode and `overflow` say, the largest.
      nan: how many elements became NaN without being NaN.
      not_finite: how many elements were NaN or infinity: of all counts, only this one
        and, where an infinity became NaN, `nan` take note of them.
      error: sum of result - x, the bias, in the unit of `x`.
      squared_error: sum of (result - x)**2.
      squared_value: sum of x**2; with `squared_error` it gives the ratio of signal to
        noise.
      largest_error: greatest |result - x|, in the unit of `x`.
    """

    inexact: jax.Array
    up: jax.Array
    underflowed: jax.Array
    overflowed: jax.Array
    nan: jax.Array
    not_finite: jax.Array
    error: jax.Array
    squared_error: jax.Array
    squared_value: jax.Array
    largest_error: jax.Array


COUNTS = Statistics._fields.index("error")
SUMS = len(Statistics._fields) - COUNTS
DTYPES = ("uint32",) * COUNTS + ("float32",) * SUMS
# All others are added up.
IS_LARGEST = tuple(name == "largest_error" for name in Statistics._fields)


def of_elements(bits: jax.Array, rounded: jax.Array, to: Format) -> Statistics:
    """Gives what each element adds to the statistics; zero adds nothing.

    Args:
      bits: [...] uint32, float32 patterns.
      rounded: [...] uint32, what `bits.round_bits` made of them.
      to: the format of `rounded`.

    Returns:
      [...] int32 (0 or 1) in place of each count, [...] float32 of each sum.
    """
    wide = bits_lib.widen(rounded, to)
    # Without sign, so that the TPU's kernels can compare them, as signed integers.
    before = (bits & _MAGNITUDE).astype(jnp.int32)
    after = (wide & _MAGNITUDE).astype(jnp.int32)
    largest = np.int32((to.largest << to.dropped_bits) + to.rebase)
    is_finite = before < _INFINITY
    x, y = (jax.lax.bitcast_convert_type(p, jnp.float32) for p in (bits, wide))
    # No rounding makes a finite number of what is not finite.
    is_pair = after < _INFINITY
    zero = np.float32(0)
    error = jnp.where(is_pair, y - x, zero)
    value = jnp.where(is_pair, x, zero)
    counted = (
        is_finite & (after != before),
        is_finite & (after > before),
        (after == 0) & (before != 0),
        is_finite & (before > largest),
        (after > _INFINITY) & (before <= _INFINITY),
        before >= _INFINITY,
    )
    counts = [condition.astype(jnp.int32) for condition in counted]
    sums = [error, error * error, value * value, abs(error)]
    return Statistics(*counts, *sums)


def merge(first: Statistics, second: Statistics) -> Statistics:
    """Gives the statistics of two parts together, element by element."""
    return Statistics(
        *(
            jnp.maximum(a, b) if is_largest else a + b
            for a, b, is_largest in zip(first, second, IS_LARGEST, strict=True)
        )
    )


def reduce(parts: Statistics, **options: Any) -> Statistics:
    """Sums up each field of the parts by itself; options as for `jnp.sum`."""
    return Statistics(
        *(
            # The zero is for arrays without elements.
            jnp.max(part, initial=np.float32(0), **options)
            if is_largest
            else jnp.sum(part, dtype=part.dtype, **options)
            for part, is_largest in zip(parts, IS_LARGEST, strict=True)
        )
    )


def total(parts: Statistics) -> Statistics:
    """Sums up parts of any number of dimensions, as `of_elements` gives them."""
    return _with_dtypes(reduce(parts))


def total_by_platform(parts: Statistics) -> Statistics:
    """Sums up in the way in which the platform's compiler reads an array least."""
    # XLA:TPU makes a pass over the array of each few sums, but a single one of a
    # reduction of all fields together. Of that XLA:CPU makes running sums, whose
    # rounding errors grow with the array (3% of 2^24 squares), where it splits a sum
    # by itself; and XLA:GPU is at its best with these.
    return jax.lax.platform_dependent(parts, tpu=_total_at_once, default=total)


def _total_at_once(parts: Statistics) -> Statistics:
    def merge_tuples(first: Any, second: Any) -> Any:
        return tuple(merge(Statistics(*first), Statistics(*second)))

    zeros = tuple(np.zeros((), part.dtype) for part in parts)
    dimensions = range(parts.error.ndim)
    sums = jax.lax.reduce(tuple(parts), zeros, merge_tuples, dimensions)
    return _with_dtypes(Statistics(*sums))


def total_over_devices(parts: Statistics, axes: Any) -> Statistics:
    """Sums up the statistics of shards over mesh axes, inside `jax.shard_map`."""
    if not axes:
        return parts
    return Statistics(
        *(
            jax.lax.pmax(part, axes) if is_largest else jax.lax.psum(part, axes)
            for part, is_largest in zip(parts, IS_LARGEST, strict=True)
        )
    )


def _with_dtypes(sums: Statistics) -> Statistics:
    # A count beyond 2^31 has become negative as int32, but its bits are right.
    counts = (jax.lax.bitcast_convert_type(n, jnp.uint32) for n in sums[:COUNTS])
    return Statistics(*counts, *sums[COUNTS:])
