"""What rounding to a narrower format is, told by tables of exact whole numbers.

Every number of a format, and the middle between any two, is a whole multiple of 2^-150.
From these whole numbers come the float32 patterns of both, and since patterns of
positive floats are ordered as their values are, finding the neighbours of a float32 is
a search in a sorted table, and choosing between them a comparison of integers. Nothing
here shares a formula with the code under test.
"""

import dataclasses
import functools
import itertools

import numpy as np

DETERMINISTIC = (
    "nearest_even",
    "nearest_away",
    "toward_zero",
    "away_from_zero",
    "toward_positive",
    "toward_negative",
    "to_odd",
)
# Exponent bits, mantissa bits, largest finite pattern, as published (see
# mixprec/rounding/formats.py for the sources).
FORMATS = {
    "bfloat16": (8, 7, 0x7F7F),
    "float16": (5, 10, 0x7BFF),
    "float8_e4m3fn": (4, 3, 0x7E),
    "float8_e5m2": (5, 2, 0x7B),
}
_INFINITY = 0x7F800000


@dataclasses.dataclass(frozen=True)
class Table:
    """Of one format.

    Attributes:
      numbers: [largest + 2] int32, float32 patterns of the format's magnitudes in
        order, and of the one that would follow the largest if there were one.
      middles: [largest + 1] int32, of the middles between neighbours.
      bits: width of the format.
      mantissa_bits: of the format.
    """

    numbers: np.ndarray
    middles: np.ndarray
    bits: int
    mantissa_bits: int

    @property
    def largest(self):
        return len(self.numbers) - 2


@functools.cache
def table(name):
    exponent_bits, mantissa_bits, largest = FORMATS[name]
    bias = 2 ** (exponent_bits - 1) - 1

    def times_2_to_150(pattern):
        exponent, mantissa = pattern >> mantissa_bits, pattern % 2**mantissa_bits
        if exponent > 0:
            mantissa += 2**mantissa_bits
        return mantissa << (max(exponent, 1) - bias - mantissa_bits + 150)

    values = [times_2_to_150(pattern) for pattern in range(largest + 2)]
    middles = [(a + b) // 2 for a, b in itertools.pairwise(values)]
    return Table(
        numbers=np.array([_float32_pattern(v) for v in values], np.int32),
        middles=np.array([_float32_pattern(v) for v in middles], np.int32),
        bits=1 + exponent_bits + mantissa_bits,
        mantissa_bits=mantissa_bits,
    )


def _float32_pattern(times_2_to_150):
    """Gives the float32 pattern of a whole number of 2^-150 that float32 holds."""
    assert times_2_to_150 % 2 == 0
    value = times_2_to_150 // 2  # in units of float32's subnormals
    exponent = max(value.bit_length() - 24, 0)
    assert value % 2**exponent == 0
    # The implied bit of a normal number adds 1 to its exponent.
    return (exponent << 23) + (value >> exponent)


def neighbours(magnitudes, name):
    """Gives the patterns (without sign) around finite float32 magnitudes, [n] int32."""
    place = locate(magnitudes, name)
    return place.down, place.down + (place.number != magnitudes)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where float32 magnitudes lie among those of a format.

    Attributes:
      down: [n], the pattern of the largest number that is not larger.
      number: [n], the float32 pattern of that number.
      middle: [n], the float32 pattern of the middle between it and the next.
    """

    down: np.ndarray
    number: np.ndarray
    middle: np.ndarray


def locate(magnitudes, name):
    """Searches for float32 magnitudes; what is not finite counts as the largest."""
    numbers, middles = table(name).numbers, table(name).middles
    finite = np.minimum(magnitudes, _INFINITY - 1)
    down = np.searchsorted(numbers[:-1], finite, side="right").astype(np.int32) - 1
    return Place(down, numbers[down], middles[down])


def round_patterns(bits, name, mode, *, saturate=False, place=None):
    """Rounds float32 patterns.

    Args:
      bits: [n] uint32.
      name: of the format.
      mode: one of `DETERMINISTIC`.
      saturate: whether finite numbers beyond the largest become that one.
      place: of the magnitudes, if it is known already.

    Returns:
      [n] int32, patterns; for NaN the quiet one of the same sign without payload.
    """
    bits = np.asarray(bits, np.uint32)
    negative = bits >> 31 == 1
    magnitudes = (bits & 0x7FFFFFFF).astype(np.int32)
    if place is None:
        place = locate(magnitudes, name)
    odd = place.down % 2 == 1
    take_up = {
        "nearest_even": lambda: (
            (magnitudes > place.middle) | ((magnitudes == place.middle) & odd)
        ),
        "nearest_away": lambda: magnitudes >= place.middle,
        "toward_zero": lambda: np.zeros_like(odd),
        "away_from_zero": lambda: np.ones_like(odd),
        "toward_positive": lambda: ~negative,
        "toward_negative": lambda: negative,
        "to_odd": lambda: ~odd,
    }[mode]()
    result = place.down + (take_up & (magnitudes != place.number))
    if saturate or mode == "to_odd":
        result = np.minimum(result, table(name).largest)
    result = np.where(magnitudes == _INFINITY, table(name).largest + 1, result)
    quiet = (table(name).largest + 1) | (1 << (table(name).mantissa_bits - 1))
    result = np.where(magnitudes > _INFINITY, quiet, result)
    return result | (negative.astype(np.int32) << (table(name).bits - 1))


def is_nan(patterns, name):
    """Tells which patterns are NaN."""
    magnitudes = np.asarray(patterns, np.int32) & ((1 << (table(name).bits - 1)) - 1)
    first = table(name).largest + 1
    return magnitudes > first if name != "float8_e4m3fn" else magnitudes == first


def telling_inputs():
    """Gives float32 patterns: the lower halves that matter, over all upper halves.

    All 2^16 upper halves with the halves around a tie and around an exact value, and
    every 37th of them, with the borders of exponents, with others.
    """
    every = np.arange(1 << 16, dtype=np.uint32)
    some = np.unique(
        np.concatenate(
            [every[::37], every[(every & 0x7F) == 0], every[(every & 0x7F) == 0x7F]]
        )
    )
    parts = [(every << 16) | lower for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    parts += [(some << 16) | lower for lower in (0x1234, 0x1000, 0x2000, 0xEFFF)]
    return np.concatenate(parts).astype(np.uint32)
