"""The bit algebra of rounding float32 to bfloat16: written once, for every backend.

A bfloat16 is the upper half of a float32. So a float32 read as an integer lies between
two bfloat16 values, its own upper half (`down`) and the next one (`up`), and rounding
is one addition and one mask:

    rounded = (bits + increment) & 0xFFFF0000

A mode is nothing but its increment, from 0 (always `down`) to 0xFFFF (`up`, unless the
lower half is 0). The carry runs into the exponent by itself: from the top of one binade
to the bottom of the next, from the largest finite value to infinity, from the subnormal
numbers to the normal ones. Exact values, zeros of either sign and infinities have a
lower half of 0, and nothing can carry out of it: no mode moves them. Only NaN needs
care.

Everything stays in unsigned integers: float arithmetic flushes subnormals to zero on
some backends and may change the payload of a NaN. The functions are plain `jax.numpy`
on uint32 arrays of any shape, so the Pallas kernel calls them on its blocks and the XLA
path on whole arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np

_UPPER_HALF = np.uint32(0xFFFF0000)
_LOWER_HALF = np.uint32(0x0000FFFF)
_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_QUIET_NAN = np.uint32(0x00400000)
_HALF_MINUS_ONE = np.uint32(0x00007FFF)
_HALF_WIDTH = np.uint32(16)


def increment(
    bits: jax.Array, mode: str, random_bits: jax.Array | None = None
) -> jax.Array:
    """Gives what `mode` adds to each float32 before its lower half is cut off.

    Args:
      bits: [...] uint32, float32 bit patterns.
      mode: one of `modes.MODES`.
      random_bits: [...] uint32, uniform; for "stochastic", which uses the upper 16.

    Returns:
      [...] uint32, at most 0xFFFF.
    """
    zero = jnp.zeros_like(bits)
    if mode == "toward_zero":
        return zero
    if mode == "away_from_zero":
        return zero + _LOWER_HALF
    if mode == "toward_positive":
        return jnp.where((bits & _SIGN) == 0, _LOWER_HALF, zero)
    if mode == "toward_negative":
        return jnp.where((bits & _SIGN) == 0, zero, _LOWER_HALF)
    if mode == "nearest_even":
        last_kept_bit = (bits >> _HALF_WIDTH) & np.uint32(1)
        return last_kept_bit + _HALF_MINUS_ONE
    if mode == "stochastic":
        # A carry comes from `lower half` of the 65536 equally likely increments.
        assert random_bits is not None
        return random_bits >> _HALF_WIDTH
    raise AssertionError(f"mode {mode!r} has no increment")


def round_bits(
    bits: jax.Array, mode: str, random_bits: jax.Array | None = None
) -> jax.Array:
    """Rounds float32 bit patterns to those that are also bfloat16 values.

    NaN stays NaN of the same sign and becomes quiet, whatever its payload (IEEE
    754-2019, section 6.2). A finite value beyond the largest bfloat16 becomes infinite
    if its mode takes `up`.

    Args:
      bits: [...] uint32, float32 bit patterns.
      mode: one of `modes.MODES`.
      random_bits: [...] uint32, uniform; for "stochastic" only.

    Returns:
      [...] uint32, float32 bit patterns whose lower half is 0.
    """
    rounded = (bits + increment(bits, mode, random_bits)) & _UPPER_HALF
    is_nan = (bits & _MAGNITUDE) > _INFINITY
    return jnp.where(is_nan, (bits & _UPPER_HALF) | _QUIET_NAN, rounded)


def from_float32(x: jax.Array) -> jax.Array:
    """Reads [...] float32 as [...] uint32 bit patterns."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def to_float(bits: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Reads rounded bit patterns as numbers.

    Args:
      bits: [...] uint32, float32 bit patterns whose lower half is 0.
      dtype: bfloat16 or float32.

    Returns:
      [...] `dtype`, the same values (for NaN: the same sign and upper payload) in both.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jax.lax.bitcast_convert_type(to_halves(bits), jnp.bfloat16)


def to_halves(bits: jax.Array) -> jax.Array:
    """Gives [...] uint16 bfloat16 patterns of [...] uint32 rounded float32 patterns.

    By integers, since a float conversion may change the payload of a NaN.
    """
    return (bits >> _HALF_WIDTH).astype(jnp.uint16)
