"""The bit algebra of rounding: written once, for every mode, format and backend.

Without its sign, a float32 lies between two neighbours in the narrower format, `down`
and `up`, whose patterns are consecutive integers. So its place between them can be
written as one integer, the *position*: the pattern of `down`, followed by the fraction
of the way to `up`. Rounding is one addition and one shift:

    pattern = (position + increment) >> fraction bits

A mode is nothing but its increment, from 0 (always `down`) to all ones (`up`, unless
the fraction is 0). The carry runs into the exponent by itself: from the top of one
binade to the bottom of the next, from the subnormal numbers to the normal ones, from
the largest finite number to infinity. Numbers of the format have fraction 0, and so no
mode moves them. Only NaN, and infinities where the format has none, need care.

For bfloat16 the position is the float32 pattern itself: its upper half is `down`, its
lower half the fraction. For other formats the exponent is rebased, and numbers below
the smallest normal one are shifted to the spacing of the subnormals.

Everything stays in unsigned integers: float arithmetic flushes subnormals to zero on
some backends and may change the payload of a NaN. The functions are plain `jax.numpy`
on uint32 arrays of any shape, so the Pallas kernel calls them on its blocks and the XLA
path on whole arrays.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixprec.rounding import formats, modes
from mixprec.rounding.formats import Format

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_MANTISSA = np.uint32(0x007FFFFF)
_IMPLIED_BIT = np.uint32(0x00800000)
_ZERO = np.uint32(0)
_ONE = np.uint32(1)
_LARGEST_SHIFT = np.uint32(31)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """What to make of each float32: all that the backends need to know, and hashable.

    Attributes:
      to: the format whose numbers to round to.
      modes: names from `modes.MODES` or `modes.NEXT`; one result each.
      out_dtype: of the results: that of the format, or float32.
      saturate: whether finite numbers beyond the largest become that one.
      random_width: how many random bits a stochastic draw uses; None for all that
        count.
      hash_values: whether a draw depends on the element's value too, besides its place.
      random_source: "hash", or "hardware" for the chip's own generator.
      statistics: whether, of a single mode, the fields of `statistics.Statistics` are
        results too.
    """

    to: Format
    modes: tuple[str, ...]
    out_dtype: np.dtype
    saturate: bool = False
    random_width: int | None = None
    hash_values: bool = False
    random_source: str = "hash"
    statistics: bool = False


class Position(NamedTuple):
    """Where a magnitude lies among those of a format.

    Attributes:
      bits: [...] uint32, pattern of `down` and `Format.dropped_bits` of fraction.
      rest: [...] uint32 or None: what the fraction continues with, up to its 32nd bit;
        None if nothing does.
      is_longer: [...] bool or None: whether the fraction continues at all.
    """

    bits: jax.Array
    rest: jax.Array | None = None
    is_longer: jax.Array | None = None


def position(magnitude: jax.Array, to: Format) -> Position:
    """Places finite float32 magnitudes among those of a format.

    Args:
      magnitude: [...] uint32, float32 patterns without sign.
      to: the format.

    Returns:
      Their positions; those beyond the format's range have patterns beyond
      `Format.largest`.
    """
    if to.has_float32_exponents:
        return Position(magnitude)
    exponent = magnitude >> np.uint32(formats.MANTISSA_BITS)
    mantissa = magnitude & _MANTISSA
    significand = jnp.where(exponent == _ZERO, mantissa, mantissa | _IMPLIED_BIT)
    # Below the smallest normal number: the significand, in units of the subnormals.
    smallest_normal = np.uint32(formats.EXPONENT_BIAS - to.bias + 1)
    is_normal = exponent >= smallest_normal
    shift = smallest_normal - jnp.where(exponent == _ZERO, _ONE, exponent)
    shift = jnp.where(is_normal, _ZERO, shift)
    # A significand has 24 bits: nothing is left of it after 31 places, as after more.
    places = _lesser(shift, _LARGEST_SHIFT)
    subnormal = significand >> places
    lost = significand - (subnormal << places)
    width = np.uint32(32 - to.dropped_bits)
    to_left = lost << (width - _lesser(shift, width))
    right = _lesser(shift - _lesser(shift, width), _LARGEST_SHIFT)
    rest = jnp.where(shift <= width, to_left, lost >> right)
    return Position(
        jnp.where(is_normal, magnitude - np.uint32(to.rebase), subnormal),
        rest & np.uint32((1 << int(width)) - 1),
        lost != _ZERO,
    )


def _lesser(a: jax.Array, b: np.uint32) -> jax.Array:
    """Gives the lesser of integers below 2^31."""
    # The TPU's kernels know no minimum of unsigned integers.
    least = jnp.minimum(a.astype(jnp.int32), np.int32(b))
    return least.astype(jnp.uint32)


def increment(
    place: Position,
    sign: jax.Array,
    mode: str,
    fraction_bits: int,
    random_bits: jax.Array | None = None,
    random_width: int | None = None,
) -> jax.Array | np.uint32:
    """Gives what `mode` adds to each position before its fraction is cut off.

    Args:
      place: of the magnitudes.
      sign: [...] uint32, not 0 where the number is negative.
      mode: one of `modes.MODES`, or `modes.NEXT`.
      fraction_bits: how many of a position's bits are fraction.
      random_bits: [...] uint32, uniform; for "stochastic".
      random_width: how many of them "stochastic" uses; None for all that count.

    Returns:
      [...] uint32, at most 2**fraction_bits.
    """
    all_ones = np.uint32((1 << fraction_bits) - 1)
    half = np.uint32(1 << (fraction_bits - 1))
    down_is_odd = (place.bits >> np.uint32(fraction_bits)) & _ONE
    if mode == "toward_zero":
        return _ZERO
    if mode == "away_from_zero":
        return all_ones
    if mode == "toward_positive":
        return jnp.where(sign == _ZERO, all_ones, _ZERO)
    if mode == "toward_negative":
        return jnp.where(sign == _ZERO, _ZERO, all_ones)
    if mode == "nearest_even":
        return half - _ONE + down_is_odd
    if mode == "nearest_away":
        return half
    if mode == "to_odd":
        return jnp.where(down_is_odd == _ZERO, all_ones, _ZERO)
    if mode == modes.NEXT:
        return np.uint32(1 << fraction_bits)
    if mode == "stochastic":
        assert random_bits is not None
        if random_width is not None and random_width < fraction_bits:
            # In the middle of what the missing bits could add, so that the probability
            # is that of the fraction rounded to `random_width` bits.
            missing = fraction_bits - random_width
            drawn = random_bits >> np.uint32(32 - random_width)
            return (drawn << np.uint32(missing)) + np.uint32(1 << (missing - 1))
        # A carry comes from as many of the equally likely draws as the fraction counts.
        unused = np.uint32(32 - fraction_bits)
        drawn = random_bits >> unused
        if place.rest is None:
            return drawn
        low, rest = random_bits & np.uint32((1 << int(unused)) - 1), place.rest
        if random_width is not None and random_width < 32:
            missing = 32 - random_width
            kept = np.uint32(-1 << missing & 0xFFFFFFFF)
            low, rest = low & kept, (rest + np.uint32(1 << (missing - 1))) & kept
        return drawn + ((low + rest) >> unused)
    raise AssertionError(f"mode {mode!r} has no increment")


def round_bits(
    bits: jax.Array,
    to: Format,
    mode: str,
    *,
    saturate: bool = False,
    random_bits: jax.Array | None = None,
    random_width: int | None = None,
) -> jax.Array:
    """Rounds float32 patterns to those of a narrower format.

    NaN stays NaN of the same sign, with the upper part of its payload, and becomes
    quiet (IEEE 754-2019, section 6.2). Infinity stays, or becomes NaN where the format
    has none. A number beyond the largest finite one by a whole step or more becomes
    what follows that one, infinity or NaN, in every mode that may take `up`.

    Args:
      bits: [...] uint32, float32 patterns.
      to: the format.
      mode: one of `modes.MODES`, or `modes.NEXT`.
      saturate: whether finite numbers beyond the largest become that one.
      random_bits: as for `increment`.
      random_width: as for `increment`.

    Returns:
      [...] uint32, patterns of the format in the lower bits.
    """
    fraction_bits = to.dropped_bits
    overflowed = np.uint32(to.largest + 1)
    sign, magnitude = bits & _SIGN, bits & _MAGNITUDE
    place = position(magnitude, to)
    if not to.has_float32_exponents:
        # The last position before what follows the largest number, or that itself.
        last = (to.largest + 1 << fraction_bits) - (mode != "stochastic")
        place = place._replace(bits=_lesser(place.bits, np.uint32(last)))
    added = increment(place, sign, mode, fraction_bits, random_bits, random_width)
    placed = place.bits
    if place.is_longer is not None and mode != "stochastic":
        placed = placed | place.is_longer.astype(jnp.uint32)
    pattern = (placed + added) >> np.uint32(fraction_bits)
    is_bounded = saturate or mode == "to_odd"
    if is_bounded:
        pattern = _lesser(pattern, np.uint32(to.largest))
    quiet = np.uint32(1 << (to.mantissa_bits - 1))
    payload = (magnitude & _MANTISSA) >> np.uint32(fraction_bits)
    if is_bounded or mode == modes.NEXT or not to.has_float32_exponents:
        pattern = jnp.where(magnitude == _INFINITY, overflowed, pattern)
    pattern = jnp.where(magnitude > _INFINITY, overflowed | quiet | payload, pattern)
    return pattern | (sign >> np.uint32(32 - to.bits))


def round_patterns(
    bits: jax.Array, rounding: Rounding, random_bits: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Rounds in each of several modes.

    Args:
      bits: [...] uint32, float32 patterns.
      rounding: what to make of them.
      random_bits: as for `increment`.

    Returns:
      For each mode [...] uint32, patterns of the format in the lower bits.
    """
    return tuple(
        round_bits(
            bits,
            rounding.to,
            mode,
            saturate=rounding.saturate,
            random_bits=random_bits,
            random_width=rounding.random_width,
        )
        for mode in rounding.modes
    )


def from_float(x: jax.Array) -> jax.Array:
    """Reads floats as float32 patterns, whatever their width.

    By integers, since a float conversion may flush subnormals or change the payload of
    a NaN.

    Args:
      x: [...] of a dtype in `formats.FORMATS`, float32 or float64.

    Returns:
      [...] uint32: narrower formats exactly, float64 rounded to odd.
    """
    if x.dtype == jnp.float32:
        return from_float32(x)
    if x.dtype == jnp.float64:
        return from_float64(x)
    format_ = formats.find_format(x.dtype)
    narrow = jax.lax.bitcast_convert_type(x, format_.pattern_dtype)
    return widen(narrow.astype(jnp.uint32), format_)


def from_float32(x: jax.Array) -> jax.Array:
    """Reads [...] float32 as [...] uint32 patterns."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def from_float64(x: jax.Array) -> jax.Array:
    """Rounds [...] float64 to odd, to [...] uint32 float32 patterns.

    Rounding these gives what rounding the float64 at once would give: a number that
    float32 does not hold gets a last bit of 1, which stands for all that was cut off
    (Boldo & Melquiond 2008, "Emulation of FMA and correctly rounded sums", theorem 2).
    """
    words = jax.lax.bitcast_convert_type(x, jnp.uint64)
    magnitude = words & np.uint64(2**63 - 1)
    sign = (words >> np.uint64(32)).astype(jnp.uint32) & _SIGN
    exponent = magnitude >> np.uint64(52)
    mantissa = magnitude & np.uint64(2**52 - 1)
    # Float32 numbers: those below 2^-126 in units of its subnormals.
    smallest_normal = 1023 - 126
    rebased = magnitude - np.uint64((1023 - 127) << 52)
    shift = smallest_normal - jnp.maximum(exponent, np.uint64(1)).astype(jnp.int64)
    is_normal = shift <= 0
    significand = mantissa | jnp.where(exponent == 0, 0, 2**52).astype(jnp.uint64)
    places = jnp.clip(shift, 0, 63).astype(jnp.uint64)
    subnormal = significand >> places
    lost = (subnormal << places) != significand
    wide = jnp.where(is_normal, rebased, subnormal | lost.astype(jnp.uint64))
    narrow = wide >> np.uint64(29)
    narrow = narrow | ((narrow << np.uint64(29)) != wide).astype(jnp.uint64)
    # Beyond float32: its largest number, whose last bit is 1.
    narrow = jnp.minimum(narrow, np.uint64(0x7F7FFFFF)).astype(jnp.uint32)
    infinity = np.uint64(0x7FF << 52)
    narrow = jnp.where(magnitude == infinity, _INFINITY, narrow)
    payload = (mantissa >> np.uint64(29)).astype(jnp.uint32) | np.uint32(0x00400000)
    return sign | jnp.where(magnitude > infinity, _INFINITY | payload, narrow)


def to_float(patterns: jax.Array, to: Format, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Reads patterns of a format as numbers.

    Args:
      patterns: [...] uint32, of the format, in the lower bits.
      to: the format.
      dtype: that of the format, or float32.

    Returns:
      [...] `dtype`, the same values (for NaN: the same sign and payload) in both.
    """
    if jnp.dtype(dtype) != jnp.float32:
        narrow = patterns.astype(to.pattern_dtype)
        return jax.lax.bitcast_convert_type(narrow, dtype)
    return jax.lax.bitcast_convert_type(widen(patterns, to), jnp.float32)


def widen(patterns: jax.Array, to: Format) -> jax.Array:
    """Gives [...] uint32 float32 patterns of the numbers with patterns in a format."""
    dropped = np.uint32(to.dropped_bits)
    if to.has_float32_exponents:
        return patterns << dropped
    sign = (patterns >> np.uint32(to.bits - 1)) << np.uint32(31)
    magnitude = patterns & np.uint32((1 << (to.bits - 1)) - 1)
    normal = (magnitude << dropped) + np.uint32(to.rebase)
    # A subnormal is a whole number of the smallest one; float32 holds it as a normal.
    count = magnitude.astype(jnp.int32).astype(jnp.float32)
    scale = np.uint32((to.bias + to.mantissa_bits - 1) << formats.MANTISSA_BITS)
    subnormal = from_float32(count) - scale
    is_normal = magnitude >= np.uint32(1 << to.mantissa_bits)
    wide = jnp.where(is_normal, normal, subnormal)
    wide = jnp.where(magnitude == _ZERO, _ZERO, wide)
    special = _INFINITY | ((magnitude << dropped) & _MANTISSA)
    return sign | jnp.where(magnitude > np.uint32(to.largest), special, wide)
