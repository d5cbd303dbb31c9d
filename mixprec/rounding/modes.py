"""The rounding modes: their names, their definitions and where these come from.

Rounding moves a number to one of the two representable numbers around it: `down`,
the nearer to zero, or `up`, the farther from zero. A number that is representable is
its own `down` and `up`, and no mode moves it. A mode says which of the two to take.
"""

import difflib
from typing import Any, Literal, TypeAlias, get_args

Mode: TypeAlias = Literal[
    "nearest_even",
    "nearest_away",
    "toward_zero",
    "away_from_zero",
    "toward_positive",
    "toward_negative",
    "to_odd",
    "stochastic",
]

MODES: tuple[str, ...] = get_args(Mode)
# No mode, since it moves what is representable: always the number after `down`.
NEXT = "next_away_from_zero"

DEFINITIONS: dict[str, str] = {
    # IEEE 754-2019, section 4.3.1: roundTiesToEven.
    "nearest_even": "the nearer; at a tie, the one whose last bit is 0",
    # IEEE 754-2019, section 4.3.1: roundTiesToAway.
    "nearest_away": "the nearer; at a tie, up",
    # IEEE 754-2019, section 4.3.2: roundTowardZero.
    "toward_zero": "down",
    # Not in IEEE 754, where only ties round away; the "RA" of decimal libraries.
    "away_from_zero": "up",
    # IEEE 754-2019, section 4.3.2: roundTowardPositive.
    "toward_positive": "the greater",
    # IEEE 754-2019, section 4.3.2: roundTowardNegative.
    "toward_negative": "the lesser",
    # Boldo & Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
    # using rounding to odd", IEEE Trans. Computers 57 (2008), section 3.
    "to_odd": "the one whose last bit is 1; never beyond the largest finite number",
    # Croci et al., "Stochastic rounding: implementation, error analysis and
    # applications", R. Soc. Open Sci. 9 (2022), section 2: mode 1.
    "stochastic": "up with probability (x - down) / (up - down), else down",
}


def check_mode(mode: str) -> None:
    """Raises ValueError, naming the allowed modes, if `mode` is not one of them."""
    check_choice("mode", mode, MODES)


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises ValueError, with the nearest name, if `value` is none of `allowed`."""
    # Equality alone would not do: an array gives one answer for each of its elements.
    if isinstance(value, str) and value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else "Choose one of them."
    raise ValueError(
        f"`{name}` must be one of {', '.join(allowed)}, got {value!r}. {hint}"
    )
