"""`explain`: what a wrapped module rounds, where and how; nothing is computed."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import flax
import jax

from mixprec import coverage, linen, nnx, rules, scopes, tensors
from mixprec.explanation import Explanation, Row
from mixprec.policy import Policy
from mixprec.rounding import dispatch, formats, platforms
from mixprec.rules import Rule, Site
from mixprec.wrap import check_module


def explain(
    wrapped: Any,
    *inputs: Any,
    rngs: Any = None,
    strict: bool = True,
    **kwargs: Any,
) -> Explanation:
    """Tells what a wrapped module rounds when called on `inputs`. Computes nothing.

    Args:
      wrapped: a module that `wrap` gave.
      *inputs: as it is called with, arrays or `jax.ShapeDtypeStruct`s.
      rngs: for Linen, as for `wrapped.init`; by default keys for "params" and
        "dropout".
      strict: whether a rule that decides for nothing is an error; if not, the
        explanation names it.
      **kwargs: as it is called with, or with `jax.ShapeDtypeStruct`s for arrays.

    Returns:
      An `Explanation`; print it, or take its `to_dict()` or `to_markdown()`.

    Raises:
      TypeError: `wrapped` is no wrapped module, or a rule asks to round a parameter
        that is float16 or float64.
      ValueError: a rule matches nothing.
    """
    check_module(wrapped)
    kind = nnx if nnx.is_module(wrapped) else linen
    if not kind.is_wrapped(wrapped):
        raise TypeError(
            f"`wrapped` must be a module from mixprec.wrap, got a plain "
            f"{type(wrapped).__name__}. Wrap it first."
        )
    # Not the others: modules branch on flags such as `train=False`.
    abstract = {name: x for name, x in kwargs.items() if _is_abstract(x)}
    if kind is nnx:
        params = nnx.params(wrapped)
        record = nnx.record(wrapped, inputs, abstract, kwargs)
    else:
        variables, record = _record(wrapped, inputs, rngs, abstract, kwargs)
        params = scopes.param_paths(variables.get("params", {}))
    unused = tuple(_unused(record, params))
    if strict and unused:
        raise ValueError(unused[0])
    return Explanation(
        rows=tuple(_rows(record, params)),
        policy=kind.policy_of(wrapped),
        unused=unused,
    )


def _record(
    wrapped: Any,
    inputs: Any,
    rngs: Any,
    abstract: dict[str, Any],
    kwargs: dict[str, Any],
) -> tuple[Any, scopes.Record]:
    """Gives the shapes of the variables, and what passes in `init` and in `apply`."""
    if rngs is None:
        rngs = {name: jax.random.key(0) for name in ("params", "dropout")}

    def init(abstract: dict[str, Any], *inputs: Any) -> Any:
        return wrapped.init(rngs, *inputs, **{**kwargs, **abstract})

    def apply(variables: Any, abstract: dict[str, Any], *inputs: Any) -> None:
        wrapped.apply(
            variables,
            *inputs,
            rngs=dict(rngs) if isinstance(rngs, Mapping) else {"params": rngs},
            mutable=flax.core.DenyList("params"),
            **{**kwargs, **abstract},
        )

    def run() -> Any:
        variables = jax.eval_shape(init, abstract, *inputs)
        jax.eval_shape(apply, variables, abstract, *inputs)
        return variables

    return linen.record_modules(run)


def _unused(record: scopes.Record, params: dict[str, Any]) -> Iterator[str]:
    for (policy, root), seen in record.items():
        prefix = "".join(f"{name}/" for name in root)
        below = [path[len(prefix) :] for path in params if path.startswith(prefix)]
        sites = {
            "parameter": [Site(path) for path in below],
            "module": coverage.module_sites(seen),
        }
        for kind, found in sites.items():
            for checked in coverage.rules_over(policy, kind):
                in_use = rules.rules_in_use(checked, found)
                for rule in checked:
                    if rule not in in_use:
                        yield rules.why_unused(rule, checked, found, kind)


def _rows(record: scopes.Record, params: dict[str, Any]) -> Iterator[Row]:
    gradients = []
    for path, leaf in params.items():
        root = _root_of(record, path)
        if root is None:
            yield _row("parameter", path, leaf, None, None)
            continue
        policy, names = root
        below = path[len("".join(f"{name}/" for name in names)) :]
        rule, read = policy.param_rule(below), record[root].reads.get(below, leaf)
        tensors.check_param(rule, leaf, path)  # as `apply` would
        yield _row("parameter", path, leaf, rule, policy, read)
        backward = policy.gradient_rule(Site(below))
        if backward is not None:
            carried = tensors.carrier(rule, policy, leaf.dtype, math.prod(read.shape))
            leaf, read = (scopes.struct(x).update(dtype=carried) for x in (leaf, read))
            gradients.append(_row("gradient", path, leaf, backward, policy, read))
    for (policy, names), seen in record.items():
        for site, tree in sorted(seen.passed.items()):
            path = "/".join((*names, site.path)) if names and site.path else site.path
            place = str(site._replace(path=path or "/".join(names)))
            for leaf in jax.tree.leaves(tree):
                if not isinstance(leaf, jax.ShapeDtypeStruct):
                    continue
                rule = policy.activation_rule(site)
                if rule is not None:
                    yield _row("activation", place, leaf, rule, policy)
                backward = policy.gradient_rule(site)
                if backward is not None:
                    carried = tensors.carrier(rule, policy, leaf.dtype, leaf.size)
                    leaf = leaf.update(dtype=carried)
                    gradients.append(_row("gradient", place, leaf, backward, policy))
    yield from gradients


def _root_of(record: scopes.Record, path: str) -> tuple[Policy, tuple[str, ...]] | None:
    """Gives the innermost wrapped module around a parameter."""
    names = path.split("/")
    around = [key for key in record if tuple(names[: len(key[1])]) == key[1]]
    return max(around, key=lambda key: len(key[1]), default=None)


def _is_abstract(x: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(x))


def _row(
    kind: str,
    path: str,
    leaf: Any,
    rule: Rule | None,
    policy: Policy | None,
    read: Any = None,
) -> Row:
    """Makes a row for a tensor; `read`: as it is where it is rounded, in a scan."""
    size, read = math.prod(leaf.shape), leaf if read is None else read
    before = size * leaf.dtype.itemsize
    kept = tensors.why_left_alone(rule, leaf.dtype, math.prod(read.shape))
    after, by, inexact = before, "", 0.0
    if rule is not None and policy is not None and rule.mode and kept is None:
        after = size * formats.find_format(rule.dtype).bits // 8
        inexact = tensors.inexact_share(rule, leaf.dtype)
        by = _backend(read, rule, policy)
    return Row(
        kind=kind,
        path=path,
        shape=tuple(leaf.shape),
        dtype=leaf.dtype.name,
        rule=rule,
        kept=kept,
        by=by,
        bytes_before=before,
        bytes_after=after,
        inexact=inexact,
    )


def _backend(x: Any, rule: Rule, policy: Policy) -> str:
    """Tells what rounds a tensor."""
    if dispatch.choose_backend(policy.backend) == "xla":
        return "xla"
    rounding, _ = tensors.rounding_of(rule, policy, x.dtype)
    return platforms.describe(x.shape, x.dtype, rounding)
