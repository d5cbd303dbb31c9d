"""Which tensor is rounded how: rules over paths, as plain, frozen, printable data."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Sequence

from mixprec.rounding import modes

OUT_DTYPES = ("float32", "bfloat16")
# As `mixprec.round_to` takes them; written again so that a policy needs no JAX.
BACKENDS = ("auto", "pallas", "xla")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Sends the paths that match a pattern to a rounding mode.

    Attributes:
      pattern: a regular expression (`re`) that must match the whole path, names joined
        by "/", such as ".*/kernel".
      mode: a name from `mixprec.rounding.modes.MODES`, or None to leave alone.

    Raises:
      ValueError: `pattern` is no regular expression, or `mode` is unknown.
    """

    pattern: str
    mode: modes.Mode | None

    def __post_init__(self) -> None:
        try:
            if not isinstance(self.pattern, str):
                raise TypeError("not a string")
            re.compile(self.pattern)
        except (re.error, OverflowError, TypeError) as error:
            raise ValueError(
                f"`pattern` must be a regular expression, got {self.pattern!r}: "
                f"{error}. Escape what is meant literally."
            ) from error
        if self.mode is not None:
            modes.check_mode(self.mode)

    def matches(self, path: str) -> bool:
        """Tells whether the pattern matches the whole of `path`."""
        return re.fullmatch(self.pattern, path) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Says which parameters and activations of a module are rounded, and how.

    In each tuple the first rule whose pattern matches a path decides; what no rule
    matches is left alone. Paths begin below the wrapped module.

    Attributes:
      params: rules over parameter paths, such as "layers/attention/query/kernel".
      activations: rules over module paths, such as "layers/mlp" ("" is the wrapped
        module itself): what the module's `__call__` returns is rounded.
      out_dtype: "float32" (the default; rounded values carried in float32, so that a
        float32 model stays one) or "bfloat16".
      seed: an integer from 0 to 2**64 - 1; of stochastic draws in calls that are given
        no `rounding` random stream.
      backend: "auto", "pallas" or "xla", as for `mixprec.round_to`.

    Raises:
      TypeError: `params` or `activations` holds no Rules.
      ValueError: any other field is not as described.

    Example:
      >>> Policy(params=(Rule(".*/scale", None), Rule(".*", "stochastic")))
    """

    params: tuple[Rule, ...] = ()
    activations: tuple[Rule, ...] = ()
    out_dtype: str = "float32"
    seed: int = 0
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("params", "activations"):
            given = getattr(self, name)
            rules = tuple(given) if isinstance(given, Iterable) else (given,)
            if isinstance(given, Rule) or not all(isinstance(r, Rule) for r in rules):
                raise TypeError(
                    f"`{name}` must be a tuple of Rules, got {given!r}. "
                    "Write (mixprec.Rule(pattern, mode),), with the comma."
                )
            object.__setattr__(self, name, rules)
        for name, allowed in (("out_dtype", OUT_DTYPES), ("backend", BACKENDS)):
            value = getattr(self, name)
            # A NumPy dtype equals its name, but has another hash.
            if not isinstance(value, str) or value not in allowed:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(allowed)}, got {value!r}. "
                    f"Leave it out for {allowed[0]!r}."
                )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ValueError(
                f"`seed` must be an integer from 0 to 2**64 - 1, got {self.seed!r}. "
                "Pass a smaller one."
            )

    def param_rule(self, path: str) -> Rule | None:
        """Gives the rule that decides for the parameter at `path`, or None."""
        return first_match(self.params, path)

    def activation_rule(self, path: str) -> Rule | None:
        """Gives the rule that decides for the module at `path`, or None."""
        return first_match(self.activations, path)


@functools.lru_cache(maxsize=65536)
def first_match(rules: tuple[Rule, ...], path: str) -> Rule | None:
    """Gives the first of `rules` that matches `path`, or None."""
    return next((rule for rule in rules if rule.matches(path)), None)


def rules_in_use(rules: tuple[Rule, ...], paths: Iterable[str]) -> set[Rule]:
    """Gives the rules that decide for at least one of `paths`."""
    found = (first_match(rules, path) for path in paths)
    return {rule for rule in found if rule is not None}


@functools.lru_cache(maxsize=1024)
def check_params(policy: Policy, paths: tuple[str, ...]) -> None:
    """Raises ValueError if a rule over parameters decides for none of `paths`."""
    in_use = rules_in_use(policy.params, paths)
    check_all_in_use(policy.params, in_use, paths, "parameter")


def check_all_in_use(
    rules: tuple[Rule, ...], in_use: set[Rule], paths: Sequence[str], kind: str
) -> None:
    """Raises if a rule decides for nothing.

    Args:
      rules: all rules.
      in_use: those known to decide for something.
      paths: all paths there are.
      kind: what the paths name, for the message: "parameter" or "module".

    Raises:
      ValueError: names the rule and the paths nearest to its pattern.
    """
    for rule in rules:
        if rule in in_use:
            continue
        hidden = [path for path in paths if rule.matches(path)]
        if hidden:
            earlier = first_match(rules, hidden[0])
            raise ValueError(
                f"`pattern` must decide for some {kind} path, but all that "
                f"{rule.pattern!r} matches, such as {hidden[0]!r}, are decided by the "
                f"earlier {earlier}. Put the narrower rule first."
            )
        raise ValueError(
            f"`pattern` must match the whole of some {kind} path, got "
            f"{rule.pattern!r}, which matches none of {len(paths)}. "
            f"{_nearest(rule.pattern, paths, kind)}"
        )


def _nearest(pattern: str, paths: Sequence[str], kind: str) -> str:
    if not paths:
        return f"There is no {kind}: remove the rule."
    literal = re.sub(r"[\\^$*+?{}()|\[\]]|(?<!\w)\.(?!\w)", "", pattern)
    near = difflib.get_close_matches(literal, paths, n=3, cutoff=0.3)
    # A pattern that spells one part of a path wrongly is near it in its last name.
    by_ending = {path.rsplit("/", 1)[-1]: path for path in reversed(paths)}
    ending = literal.rsplit("/", 1)[-1]
    near += [
        by_ending[name] for name in difflib.get_close_matches(ending, by_ending, n=2)
    ]
    nearest = list(dict.fromkeys(near)) or list(paths[:3])
    return f"The nearest: {', '.join(map(repr, nearest[:4]))}."
