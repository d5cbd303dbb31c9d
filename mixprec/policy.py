"""Which tensor is rounded how: rules for all of a module, as plain data and as text.

The text of a policy, each part of which may be left out:

    params: RULES; activations: RULES; gradients: RULES;
    out_dtype=DTYPE; seed=NUMBER; backend=BACKEND; gather=AXIS+AXIS

`mixprec.rules` has the text of rules.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mixprec import rules as rules_lib
from mixprec.rounding import modes
from mixprec.rules import Rule, Site

OUT_DTYPES = ("float32", "bfloat16")
# As `mixprec.round_to` takes them; written again so that a policy needs no JAX.
BACKENDS = ("auto", "pallas", "xla")
SECTIONS = ("params", "activations", "gradients")

# Whole policies by what they do, as texts; `Policy.from_text` takes their names too.
PRESETS: dict[str, str] = {
    "params_nearest_even": "params: .*=nearest_even",
    "params_stochastic": "params: .*=stochastic",
    "params_stochastic_activations_nearest_even": (
        "params: .*=stochastic; activations: .*:out=nearest_even"
    ),
    "all_nearest_even": (
        "params: .*=nearest_even; activations: .*:out=nearest_even; "
        "gradients: .*=nearest_even, .*:out=nearest_even"
    ),
    # The two formats as Micikevicius et al., "FP8 formats for deep learning" (2022),
    # section 3, assign them: more precision forward, more range backward.
    "large_params_float8_gradients_float8": (
        "params: .*=stochastic(dtype=float8_e4m3fn, overflow=saturate, min_size=4096); "
        "gradients: .*=stochastic(dtype=float8_e5m2, overflow=saturate, min_size=4096)"
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Says which parameters, activations and gradients are rounded, and how.

    In each tuple the first rule that matches decides; what no rule matches is left
    alone. Paths begin below the wrapped module, which has the path "".

    Attributes:
      params: rules over parameter paths, such as "layers/attention/query/kernel".
      activations: rules over module paths, such as "layers/mlp": what a method of the
        module is given or returns. A rule without `at` gets "out".
      gradients: rules over both, for the cotangents on their way back: without `at`,
        of a parameter, at each of its uses; with it, of an activation.
      out_dtype: what carries the rounded values of float32 tensors: "float32" (the
        default, so that a float32 model stays one) or "bfloat16". Tensors of another
        dtype keep it.
      seed: an integer from 0 to 2**64 - 1; of stochastic draws in calls that are given
        no `rounding` random stream.
      backend: "auto", "pallas" or "xla", as for `mixprec.round_to`.
      gather: axes of the mesh over which a parameter is gathered in the format that its
        shard has been rounded to, where its partitioning box says that they split it;
        as text joined by "+".

    Raises:
      TypeError: `params`, `activations` or `gradients` holds no Rules.
      ValueError: any other field is not as described.

    Example:
      >>> policy = Policy(params=(Rule(".*/scale", None), Rule(".*", "stochastic")))
      >>> str(policy)
      'params: .*/scale=keep, .*=stochastic'
      >>> Policy.from_text(str(policy)) == policy
      True
    """

    params: tuple[Rule, ...] = ()
    activations: tuple[Rule, ...] = ()
    gradients: tuple[Rule, ...] = ()
    out_dtype: str = "float32"
    seed: int = 0
    backend: str = "auto"
    gather: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in SECTIONS:
            object.__setattr__(self, name, _rules(name, getattr(self, name)))
        object.__setattr__(self, "gather", _axes(self.gather))
        for name, allowed in (("out_dtype", OUT_DTYPES), ("backend", BACKENDS)):
            value = getattr(self, name)
            # A NumPy dtype equals its name, but has another hash.
            if not isinstance(value, str) or value not in allowed:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(allowed)}, got {value!r}. "
                    f"Leave it out for {allowed[0]!r}."
                )
        is_integer = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not is_integer or not 0 <= self.seed < 2**64:
            raise ValueError(
                f"`seed` must be an integer from 0 to 2**64 - 1, got {self.seed!r}. "
                "Pass a smaller one."
            )
        for rule in (*self.params, *self.activations):
            if rule.dtype == "float16" and self.out_dtype == "bfloat16":
                raise ValueError(
                    "`out_dtype` must be float32 for rules to float16, whose values "
                    f"bfloat16 does not have, got bfloat16 and {str(rule)!r}. Leave it "
                    "out."
                )

    def param_rule(self, path: str) -> Rule | None:
        """Gives the rule that decides for the parameter at `path`, or None."""
        return rules_lib.first_match(self.params, Site(path))

    def activation_rule(self, site: Site) -> Rule | None:
        """Gives the rule for what a module is given or returns, or None."""
        return rules_lib.first_match(self.activations, site)

    def gradient_rule(self, site: Site) -> Rule | None:
        """Gives the rule that decides for the cotangent at `site`, or None."""
        return rules_lib.first_match(self.gradients, site)

    def __str__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            sign = ": " if field.name in SECTIONS else "="
            parts.append(f"{field.name}{sign}{_as_text(field.name, value)}")
        return "; ".join(parts)

    @classmethod
    def from_text(cls, text: str) -> "Policy":
        """Reads what `str(policy)` writes, or the name of one of `PRESETS`.

        Raises:
          TypeError: `text` is no string.
          ValueError: what it cannot read, and where.
        """
        if not isinstance(text, str):
            raise TypeError(f"`text` must be a string, got {text!r}. Write a policy.")
        if re.fullmatch(r"\s*\w+\s*", text):
            modes.check_choice("preset", text.strip(), tuple(PRESETS))
        text = PRESETS.get(text.strip(), text)
        fields: dict[str, Any] = {}
        for part in _split(text):
            found = re.match(r"\s*(\w+)\s*([:=])", part)
            name = found[1] if found else part.strip()
            if found is None or (found[2] == ":") != (name in SECTIONS):
                raise ValueError(
                    "`text` must be parts such as 'params: .*=stochastic; seed=1', got "
                    f"{part.strip()!r}. A part begins with {_names(':', '=')}."
                )
            if name in fields:
                raise ValueError(
                    f"`{name}` must be given once, got {text!r}. Drop one."
                )
            fields[name] = part[found.end() :].strip()
        return cls.from_dict(fields)

    def to_dict(self) -> dict[str, Any]:
        """Gives all fields for JSON or `ml_collections`, sections of rules as texts."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: _as_text(name, getattr(self, name)) for name in names}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Policy":
        """Reads what `to_dict` gives; fields may be missing.

        Args:
          fields: a mapping, such as a `ConfigDict`.

        Raises:
          TypeError: `fields` is no mapping.
          ValueError: an unknown field, or a value that cannot be read.
        """
        if not hasattr(fields, "items"):
            raise TypeError(
                f"`fields` must be a mapping, as `to_dict` gives, got {fields!r}. "
                "Read text by Policy.from_text."
            )
        read: dict[str, Any] = {}
        for name, value in fields.items():
            modes.check_choice(
                "field", name, tuple(field.name for field in dataclasses.fields(cls))
            )
            if name in SECTIONS:
                if not isinstance(value, str):
                    raise ValueError(
                        f"`{name}` must be rules as text, such as '.*/kernel="
                        f"stochastic', got {value!r}. Write them so."
                    )
                value = rules_lib.parse_rules(value, name)
            elif name == "seed" and isinstance(value, str) and value.isdecimal():
                value = int(value)
            read[name] = value
        return cls(**read)


def _axes(given: Any) -> tuple[str, ...]:
    split = given.split("+") if isinstance(given, str) and given else given
    axes = tuple(split) if isinstance(split, Iterable) else (split,)
    names = [axis.strip() for axis in axes if isinstance(axis, str)]
    if len(names) < len(axes) or not all(map(str.isidentifier, names)):
        raise ValueError(
            f"`gather` must be names of mesh axes joined by '+', got {given!r}. Leave "
            "it out to gather what the module computes with."
        )
    return tuple(names)


def _as_text(name: str, value: Any) -> Any:
    """Gives a field as it stands in a text; numbers and names as they are."""
    if name in SECTIONS:
        return ", ".join(map(str, value))
    return "+".join(value) if name == "gather" else value


def _rules(name: str, given: Any) -> tuple[Rule, ...]:
    rules = tuple(given) if isinstance(given, Iterable) else (given,)
    if isinstance(given, Rule) or not all(isinstance(r, Rule) for r in rules):
        raise TypeError(
            f"`{name}` must be a tuple of Rules, got {given!r}. "
            "Write (mixprec.Rule(pattern, mode),), with the comma."
        )
    if name == "activations":
        return tuple(r if r.at else dataclasses.replace(r, at="out") for r in rules)
    for rule in rules if name == "params" else ():
        if rule.at is not None:
            raise ValueError(
                f"`params` must be rules over parameters, got {str(rule)!r}, which is "
                "over a module. Move it to `activations`."
            )
    return rules


def _split(text: str) -> list[str]:
    """Gives the parts between semicolons that are not in double quotes."""
    found = re.finditer(r'(?:"(?:[^"\\]|\\.)*"|[^;"]|")+', text, re.DOTALL)
    return [part[0] for part in found if part[0].strip()]


def _names(*endings: str) -> str:
    sections = [f"{name}{endings[0]}" for name in SECTIONS]
    others = [f.name for f in dataclasses.fields(Policy) if f.name not in SECTIONS]
    return ", ".join(sections + [f"{name}{endings[1]}" for name in others])
