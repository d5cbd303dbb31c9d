"""Mixed-precision training of Flax models with rounding you can choose."""

from mixprec.explain import explain
from mixprec.explanation import Explanation
from mixprec.linen import wrap_class
from mixprec.policy import PRESETS, Policy
from mixprec.rounding.api import (
    round_bracket,
    round_down_and_up,
    round_to,
    round_with_statistics,
)
from mixprec.rounding.statistics import Statistics
from mixprec.rules import Rule
from mixprec.wrap import unwrap, wrap

__all__ = [
    "PRESETS",
    "Explanation",
    "Policy",
    "Rule",
    "Statistics",
    "explain",
    "round_bracket",
    "round_down_and_up",
    "round_to",
    "round_with_statistics",
    "unwrap",
    "wrap",
    "wrap_class",
]
