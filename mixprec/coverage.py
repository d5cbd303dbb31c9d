"""Whether each rule decides for something: a rule that does not is an error."""

import functools
import inspect
from collections.abc import Hashable, Iterable

import flax.linen as nn

from mixprec import rules
from mixprec.policy import Policy
from mixprec.rules import Rule, Site
from mixprec.scopes import Seen


@functools.lru_cache(maxsize=1024)
def check_params(policy: Policy, paths: tuple[str, ...]) -> None:
    """Raises ValueError if a rule over parameters decides for none of `paths`."""
    check_sites(policy, "parameter", tuple(map(Site, paths)))


@functools.lru_cache(maxsize=1024)
def check_sites(policy: Policy, kind: str, sites: tuple[Site, ...]) -> None:
    """Raises ValueError if a rule of `rules_over` that kind decides for no site."""
    for checked in rules_over(policy, kind):
        in_use = rules.rules_in_use(checked, sites)
        rules.check_all_in_use(checked, in_use, sites, kind)


def rules_over(policy: Policy, kind: str) -> list[tuple[Rule, ...]]:
    """Gives the rules over parameters, or over modules, forward and backward."""
    over_params = tuple(rule for rule in policy.gradients if rule.at is None)
    over_modules = tuple(rule for rule in policy.gradients if rule.at is not None)
    if kind == "parameter":
        return [policy.params, over_params]
    return [policy.activations, over_modules]


def module_sites(seen: Seen, existing: Iterable[str] = ()) -> tuple[Site, ...]:
    """Gives all sites at modules, whether a tensor has passed there or not.

    Args:
      seen: of a call.
      existing: paths of modules that exist, called or not.
    """
    found = dict.fromkeys(seen.passed)
    for path in (*seen.modules, *existing):
        cls = seen.modules.get(path)
        # mypy: Flax declares `__hash__` of modules, not of their classes.
        methods = [rules.CALL] if cls is None else _methods(cls)  # type: ignore[arg-type]
        sites = [Site(path, at, name) for name in methods for at in ("in", "out")]
        found |= dict.fromkeys(sites)
    return tuple(found)


@functools.cache
def _methods(cls: type[nn.Module]) -> list[str]:
    names = [n for n in dir(cls) if n == rules.CALL or not hasattr(nn.Module, n)]
    return [n for n in names if callable(inspect.getattr_static(cls, n, None))]


# Kind of module -> rules over modules that have decided for one of its parts. What Flax
# has cached is not called again, so one call need not see all parts.
_module_rules_seen: dict[Hashable, set[Rule]] = {}


def check_modules(
    kind: Hashable, policy: Policy, seen: Seen, existing: Iterable[str]
) -> None:
    """Raises ValueError if a rule over modules decides for none of them.

    Args:
      kind: what calls have in common in which the same modules can be called.
      policy: of the wrapped module.
      seen: of a call.
      existing: paths of modules that exist, called or not.
    """
    sites = module_sites(seen, existing)
    in_use = _module_rules_seen.setdefault(kind, set())
    for checked in rules_over(policy, "module"):
        in_use |= rules.rules_in_use(checked, sites)
        rules.check_all_in_use(checked, in_use, sites, "module")
