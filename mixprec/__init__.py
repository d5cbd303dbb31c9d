"""Mixed-precision training of Flax models with rounding you can choose."""

from mixprec.linen import wrap_class
from mixprec.policy import Policy, Rule
from mixprec.rounding.api import round_bracket, round_down_and_up, round_to
from mixprec.wrap import Explanation, explain, unwrap, wrap

__all__ = [
    "Explanation",
    "Policy",
    "Rule",
    "explain",
    "round_bracket",
    "round_down_and_up",
    "round_to",
    "unwrap",
    "wrap",
    "wrap_class",
]
