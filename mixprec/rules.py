"""Rules: what at which path is rounded how, as plain, frozen, printable data.

The text of a rule:

    rule    = site "=" mode ["(" option "=" value {"," option "=" value} ")"]
    site    = pattern [":" method] [":in" | ":out"]
    pattern = a regular expression, in double quotes (as JSON) if it holds a space or
              one of , ; = "
    mode    = "keep" or a name from `mixprec.rounding.modes.MODES`
    option  = "dtype" | "overflow" | "random_bits" | "min_size"
"""

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from mixprec.rounding import modes

# As `mixprec.round_to` takes them; written again so that a rule needs no JAX.
DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
OVERFLOWS = ("inf", "saturate")
CALL = "__call__"
_KEEP = "keep"  # in text, of mode None


class Site(NamedTuple):
    """Where a tensor passes.

    Attributes:
      path: of the parameter or module, names joined by "/".
      at: "in" for what a module's method is given, "out" for what it returns; None for
        parameters.
      method: of the module.
    """

    path: str
    at: str | None = None
    method: str = CALL

    def __str__(self) -> str:
        if self.at is None:
            return self.path
        method = "" if self.method == CALL else f":{self.method}"
        return f"{self.path}{method}:{self.at}"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Sends what passes at the sites that match to a rounding mode.

    Attributes:
      pattern: a regular expression (`re`) that must match the whole path, names joined
        by "/", such as ".*/kernel".
      mode: a name from `mixprec.rounding.modes.MODES`, or None to leave alone.
      dtype: whose values to round to, such as "float8_e4m3fn"; see `DTYPES`.
      overflow: "inf" or "saturate", as for `mixprec.round_to`.
      random_bits: 1 to 32 or None, as for `mixprec.round_to`.
      min_size: smaller tensors, in elements, are left alone.
      at: for modules, "in" (the arrays that a method is given) or "out" (that it
        returns); None for parameters.
      method: for modules, the name of the method.

    Raises:
      ValueError: a field is not as described, or tells how to round in a rule whose
        `mode` is None.

    Example:
      >>> Rule(".*/kernel", "stochastic", dtype="float8_e4m3fn", overflow="saturate")
    """

    pattern: str
    mode: modes.Mode | None
    _: dataclasses.KW_ONLY
    dtype: str = "bfloat16"
    overflow: str = "inf"
    random_bits: int | None = None
    min_size: int = 0
    at: Literal["in", "out"] | None = None
    method: str = CALL

    def __post_init__(self) -> None:
        try:
            if not isinstance(self.pattern, str):
                raise TypeError("not a string")
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError, TypeError) as error:
            raise ValueError(
                f"`pattern` must be a regular expression, got {self.pattern!r}: "
                f"{error}. Escape what is meant literally."
            ) from error
        if self.mode is not None:
            modes.check_mode(self.mode)
        modes.check_choice("dtype", self.dtype, DTYPES)
        modes.check_choice("overflow", self.overflow, OVERFLOWS)
        if self.at is not None:
            modes.check_choice("at", self.at, ("in", "out"))
        self._check_numbers()
        self._check_method()
        if self.mode is None and self.options:
            raise ValueError(
                f"`{next(iter(self.options))}` must be left out for a rule that leaves "
                f"alone, got {self}. Drop it, or give a mode."
            )

    def _check_numbers(self) -> None:
        for name, least, most in (("random_bits", 1, 32), ("min_size", 0, 2**63)):
            number = getattr(self, name)
            if name == "random_bits" and number is None:
                continue
            is_integer = isinstance(number, int) and not isinstance(number, bool)
            if not is_integer or not least <= number <= most:
                raise ValueError(
                    f"`{name}` must be an integer from {least} to {most}, got "
                    f"{number!r}. Leave it out for the default."
                )
        if self.random_bits is not None and self.mode != "stochastic":
            raise ValueError(
                f'`random_bits` must be left out for mode "{self.mode}", which draws '
                f'nothing, got {self.random_bits}. Drop it, or choose "stochastic".'
            )

    def _check_method(self) -> None:
        is_name = isinstance(self.method, str) and self.method.isidentifier()
        if not is_name or self.method in ("in", "out", "setup"):
            raise ValueError(
                f"`method` must be the name of a module's method, got {self.method!r}. "
                f"Leave it out for {CALL}."
            )
        if self.method != CALL and self.at is None:
            raise ValueError(
                f'`at` must be "in" or "out" for method "{self.method}", got None. '
                "Say whether what it is given or what it returns is meant."
            )

    @property
    def options(self) -> dict[str, Any]:
        """What says how to round and is not the default."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in _OPTIONS and getattr(self, field.name) != field.default
        }

    def matches(self, site: Site) -> bool:
        """Tells whether the rule is for such a site and matches its whole path."""
        return (self.at, self.method) == site[1:] and self.matches_path(site.path)

    def matches_path(self, path: str) -> bool:
        """Tells whether the pattern matches the whole of `path`."""
        return re.fullmatch(self.pattern, path) is not None

    def __str__(self) -> str:
        pattern = self.pattern
        is_hidden = not pattern and self.at is None
        if is_hidden or re.search(r'[\s,;="]|:\w*$', pattern):
            pattern = json.dumps(pattern)
        site = Site(pattern, self.at, self.method)
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        how = f"({options})" if options else ""
        return f"{site}={self.mode or _KEEP}{how}"


_OPTIONS = ("dtype", "overflow", "random_bits", "min_size")


# Reading


_RULE = re.compile(
    r"""\s*
    (?: (?P<quoted> "(?:[^"\\]|\\.)*" ) | (?P<bare> [^\s,;="]*? ) )
    (?: (?: :(?P<method>\w+) )? :(?P<at>in|out) )?
    \s* = \s* (?P<mode>\w+) \s*
    (?: \( (?P<options>[^()]*) \) \s* )?
    (?P<next> , | \Z )""",
    re.VERBOSE | re.DOTALL,
)


def parse_rules(text: str, section: str = "rules") -> tuple[Rule, ...]:
    """Reads rules as `str` writes them, with commas between.

    Args:
      text: such as ".*/scale=keep, .*=stochastic(min_size=1024)".
      section: what the rules are for, for messages.

    Raises:
      ValueError: what it cannot read, and where.
    """
    rules, position = [], 0
    while text[position:].strip():
        found = _RULE.match(text, position)
        is_hidden = found and not (found["quoted"] or found["bare"] or found["at"])
        ends_in_comma = found and found["next"] and not text[found.end() :].strip()
        if found is None or is_hidden or ends_in_comma:
            raise ValueError(
                f"`{section}` must be rules such as '.*/kernel=stochastic, "
                f".*/scale=keep', got {text!r}, which cannot be read from character "
                f"{position + 1} on: {text[position:].strip()!r}. Put a pattern that "
                'holds a space or one of , ; = " in double quotes.'
            )
        rules.append(_rule_of(found, section))
        position = found.end()
    return tuple(rules)


def _rule_of(found: re.Match[str], section: str) -> Rule:
    try:
        pattern = json.loads(found["quoted"]) if found["quoted"] else found["bare"]
    except ValueError as error:
        raise ValueError(
            f"`{section}` must have patterns in double quotes as JSON has them, got "
            f"{found['quoted']}: {error}. Write \\\\ for one backslash."
        ) from error
    options: dict[str, Any] = {}
    for item in filter(None, map(str.strip, (found["options"] or "").split(","))):
        name, _, value = map(str.strip, item.partition("="))
        modes.check_choice("option", name, _OPTIONS)
        if name in options:
            raise ValueError(
                f"`{name}` must be given once, got {found['options']!r}. Drop one."
            )
        is_number = name in ("random_bits", "min_size") and value.isascii()
        options[name] = int(value) if is_number and value.isdigit() else value
    mode: Any = None if found["mode"] == _KEEP else found["mode"]
    at: Any = found["at"]
    return Rule(pattern, mode, at=at, method=found["method"] or CALL, **options)


# Deciding


@functools.lru_cache(maxsize=65536)
def first_match(rules: tuple[Rule, ...], site: Site) -> Rule | None:
    """Gives the first of `rules` that matches `site`, or None."""
    return next((rule for rule in rules if rule.matches(site)), None)


def rules_in_use(rules: tuple[Rule, ...], sites: Iterable[Site]) -> set[Rule]:
    """Gives the rules that decide for at least one of `sites`."""
    found = (first_match(rules, site) for site in sites)
    return {rule for rule in found if rule is not None}


def check_all_in_use(
    rules: tuple[Rule, ...], in_use: set[Rule], sites: Sequence[Site], kind: str
) -> None:
    """Raises if a rule decides for nothing.

    Args:
      rules: all rules.
      in_use: those known to decide for something.
      sites: all sites there are.
      kind: what the sites are, for the message: "parameter", "module" or "gradient".

    Raises:
      ValueError: names the rule and the paths nearest to its pattern.
    """
    for rule in rules:
        if rule not in in_use:
            raise ValueError(why_unused(rule, rules, sites, kind))


def why_unused(
    rule: Rule, rules: tuple[Rule, ...], sites: Sequence[Site], kind: str
) -> str:
    """Tells why a rule decides for none of `sites`, and what is near; see above."""
    hidden = [site for site in sites if rule.matches(site)]
    if hidden:
        return (
            f"`pattern` must decide for some {kind} path, but all that "
            f"{rule.pattern!r} matches, such as {hidden[0].path!r}, are decided by the "
            f"earlier rule {str(first_match(rules, hidden[0]))!r}. Put the narrower "
            "rule first."
        )
    elsewhere = [str(site) for site in sites if rule.matches_path(site.path)]
    if elsewhere:
        return (
            f"`{rule}` must name a site where something passes, got a pattern that "
            f"matches only {', '.join(map(repr, elsewhere[:4]))}. Write one of these."
        )
    paths = list(dict.fromkeys(site.path for site in sites))
    return (
        f"`pattern` must match the whole of some {kind} path, got {rule.pattern!r}, "
        f"which matches none of {len(paths)}. {_nearest(rule.pattern, paths, kind)}"
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
