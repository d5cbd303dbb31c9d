"""What rounding to bfloat16 is, told by exact arithmetic on whole numbers.

A finite float32 is a whole multiple of 2^-149, and so is a bfloat16. The neighbours of
a value are found by searching the sorted list of all bfloat16 magnitudes, and the mode
picks one by comparing distances as whole numbers. Nothing here shares a formula with
the code under test.
"""

import numpy as np

DETERMINISTIC = (
    "nearest_even",
    "toward_zero",
    "away_from_zero",
    "toward_positive",
    "toward_negative",
)


def _scaled(bits):
    """Gives |value| * 2^149 of finite float32 patterns, as Python integers."""
    bits = bits.astype(object) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    normal = exponent > 0
    return np.where(
        normal, (mantissa + 0x800000) << np.maximum(exponent - 1, 0), mantissa
    )


# All bfloat16 magnitudes up to infinity, which stands where the next value would be.
_GRID = _scaled(np.arange(0x7F81, dtype=np.int64) << 16)


def neighbours(bits):
    """Gives the bfloat16 patterns (16 bits, without sign) around finite magnitudes."""
    values = _scaled(bits)
    down = np.searchsorted(_GRID, values, side="right") - 1
    up = np.where(_GRID[down] == values, down, down + 1)
    return down, up


def round_bfloat16(bits, mode):
    """Rounds float32 patterns.

    Args:
      bits: [n] uint32.
      mode: one of `DETERMINISTIC`.

    Returns:
      [n] uint16 bfloat16 patterns; 0x7FC0 with the sign for NaN.
    """
    bits = np.asarray(bits, np.uint32).astype(np.int64)
    sign, magnitude = bits >> 31, bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    safe = np.where(finite, magnitude, 0)
    down, up = neighbours(safe)
    values = _scaled(safe)
    if mode == "nearest_even":
        below, above = values - _GRID[down], _GRID[up] - values
        odd = (down & 1) == 1
        take_up = (above < below) | ((above == below) & odd)
    else:
        take_up = {
            "toward_zero": np.zeros_like(sign, bool),
            "away_from_zero": np.ones_like(sign, bool),
            "toward_positive": sign == 0,
            "toward_negative": sign == 1,
        }[mode]
    result = np.where(take_up.astype(bool), up, down)
    result = np.where(magnitude == 0x7F800000, 0x7F80, result)
    result = np.where(magnitude > 0x7F800000, 0x7FC0, result)
    return (result | (sign << 15)).astype(np.uint16)


def telling_inputs():
    """Gives float32 patterns: the lower halves that matter, over many upper halves.

    All 2^16 upper halves with the two halves at a tie, and every 37th of them, with the
    borders of exponents, with the others.
    """
    every = np.arange(1 << 16, dtype=np.uint32)
    some = np.unique(
        np.concatenate(
            [every[::37], every[(every & 0x7F) == 0], every[(every & 0x7F) == 0x7F]]
        )
    )
    parts = [(every << 16) | lower for lower in (0x0000, 0x8000)]
    parts += [(some << 16) | lower for lower in (1, 0x1234, 0x7FFF, 0x8001, 0xFFFF)]
    return np.concatenate(parts).astype(np.uint32)
