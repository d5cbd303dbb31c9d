"""`wrap`, `unwrap` and `explain`: the way in for every kind of module."""

import dataclasses
import io
import math
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import rich.box
import rich.console
import rich.table

from mixprec import linen, scopes
from mixprec.policy import Policy, Rule
from mixprec.rounding import dispatch

# A rounded value needs this much memory, in whatever dtype it is carried.
_ROUNDED_BYTES = 2


def wrap(module: nn.Module, policy: Policy) -> nn.Module:
    """Gives a copy of a Flax module whose parameters and activations are rounded.

    Use it as you would the original: `init` gives the same tree, `apply` takes the
    float32 master weights and rounds what it reads of them. Gradients with respect to
    the masters are straight-through. Stochastic rounding draws from the random stream
    `rounding`: pass `rngs={"rounding": key}` with a fresh key each step; without it,
    every call rounds alike.

    Args:
      module: a `flax.linen` module, unbound. It is not changed.
      policy: which tensors are rounded, and how.

    Returns:
      A module of a subclass of `type(module)`, with the same fields.

    Raises:
      TypeError: `module` is no Linen module, or `policy` no Policy.
      ValueError: `module` is bound or belongs to a parent. Later, from `init`, `apply`
        or `explain`: a rule matches nothing (the message names the nearest paths).

    Example:
      >>> policy = mixprec.Policy(params=(mixprec.Rule(".*/kernel", "stochastic"),))
      >>> model = mixprec.wrap(nn.Sequential([nn.Dense(8)]), policy)
    """
    _check_linen(module)
    if not isinstance(policy, Policy):
        raise TypeError(
            f"`policy` must be a mixprec.Policy, got {type(policy).__name__}. "
            "Write mixprec.Policy(params=(mixprec.Rule(pattern, mode),))."
        )
    return linen.wrap(module, policy)


def unwrap(module: nn.Module) -> nn.Module:
    """Gives a copy of a wrapped module that rounds nothing; of others, a plain copy.

    Raises:
      TypeError: `module` is no Linen module.
    """
    _check_linen(module)
    return linen.unwrap(module)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What happens to one tensor.

    Attributes:
      kind: "parameter" or "activation".
      path: below the wrapped module.
      shape: in elements.
      dtype: of the tensor before rounding.
      rule: the rule that decides, or None.
      bytes_before: of the tensor.
      bytes_after: of its rounded values in the dtype they are rounded to; as before if
        it is left alone.
    """

    kind: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    rule: Rule | None
    bytes_before: int
    bytes_after: int

    @property
    def mode(self) -> str | None:
        """The rounding mode, or None for a tensor that is left alone."""
        # What is not float32 is left alone, whatever the rule says.
        return self.rule.mode if self.rule and self.dtype == "float32" else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a wrapped module rounds, how, and how many bytes: prints as a table.

    Attributes:
      rows: one for each parameter, then one for each activation that a rule decides.
      policy: of the module.
      backend: "pallas" or "xla": what the policy's choice comes to here.
    """

    rows: tuple[Row, ...]
    policy: Policy
    backend: str

    def __rich__(self) -> rich.table.Table:
        table = rich.table.Table(
            box=rich.box.SIMPLE_HEAD,
            caption=f"rounded to bfloat16, carried as {self.policy.out_dtype}; "
            f"backend {self.backend}",
        )
        for name in ("tensor", "type", "mode", "rule"):
            table.add_column(name, overflow="fold", no_wrap=name != "rule")
        for name in ("bytes", "rounded"):
            table.add_column(name, justify="right")
        for row in self.rows:
            kept = row.mode is None
            table.add_row(
                row.path + ("" if row.kind == "parameter" else " (output)"),
                f"{row.dtype}[{','.join(map(str, row.shape))}]",
                row.mode or "left alone",
                "" if row.rule is None else row.rule.pattern,
                f"{row.bytes_before:,}",
                "" if kept else f"{row.bytes_after:,}",
                style="dim" if kept else None,
            )
        table.add_section()
        parameters = [row for row in self.rows if row.kind == "parameter"]
        rounded = [row for row in parameters if row.mode is not None]
        table.add_row(
            f"{len(rounded)} of {len(parameters)} parameters rounded",
            *[""] * 3,
            f"{sum(row.bytes_before for row in parameters):,}",
            f"{sum(row.bytes_after for row in parameters):,}",
        )
        return table

    def __str__(self) -> str:
        buffer = io.StringIO()
        rich.console.Console(file=buffer, width=100).print(self)
        return buffer.getvalue()


def explain(
    wrapped: nn.Module, *inputs: Any, rngs: Any = None, **kwargs: Any
) -> Explanation:
    """Tells what a wrapped module rounds when called on `inputs`. Computes nothing.

    Args:
      wrapped: a module that `wrap` gave.
      *inputs: as for `wrapped.init`, arrays or `jax.ShapeDtypeStruct`s.
      rngs: as for `wrapped.init`; by default keys for "params" and "dropout".
      **kwargs: as for `wrapped.init`, or with `jax.ShapeDtypeStruct`s for arrays.

    Returns:
      An `Explanation`; print it.

    Raises:
      TypeError: `wrapped` is no wrapped module, or a rule asks to round a parameter
        that is float16 or float64.
      ValueError: a rule matches nothing.
    """
    _check_linen(wrapped)
    if not linen.is_wrapped(wrapped):
        raise TypeError(
            f"`wrapped` must be a module from mixprec.wrap, got a plain "
            f"{type(wrapped).__name__}. Wrap it first."
        )
    if rngs is None:
        rngs = {name: jax.random.key(0) for name in ("params", "dropout")}
    # Not the others: modules branch on flags such as `train=False`.
    abstract = {name: x for name, x in kwargs.items() if _is_abstract(x)}

    def init(abstract: dict[str, Any], *inputs: Any) -> Any:
        return wrapped.init(rngs, *inputs, **{**kwargs, **abstract})

    variables, record = linen.record_modules(
        lambda: jax.eval_shape(init, abstract, *inputs)
    )
    policies = {root: policy for policy, root in record}
    rows = []
    for path, leaf in scopes.param_paths(variables.get("params", {})).items():
        rule = _param_rule(policies, path)
        if rule is not None and rule.mode is not None:
            scopes.needs_rounding(leaf, path)  # or raises, as `apply` would
        rows.append(_row("parameter", path, leaf, rule))
    for (policy, root), outputs in record.items():
        for path, output in sorted(outputs.items()):
            rule = policy.activation_rule(path)
            if rule is not None:
                place = "/".join((*root, *filter(None, [path]))) or "(the module)"
                rows += [
                    _row("activation", place, leaf, rule)
                    for leaf in jax.tree.leaves(output)
                    if isinstance(leaf, jax.ShapeDtypeStruct)
                ]
    policy = linen.policy_of(wrapped)
    return Explanation(
        rows=tuple(rows), policy=policy, backend=dispatch.choose_backend(policy.backend)
    )


def _param_rule(policies: dict[tuple[str, ...], Policy], path: str) -> Rule | None:
    """Gives the rule for a parameter, of the innermost wrapped module around it."""
    names = path.split("/")
    for depth in range(len(names), -1, -1):
        policy = policies.get(tuple(names[:depth]))
        if policy is not None:
            return policy.param_rule("/".join(names[depth:]))
    return None


def _is_abstract(x: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(x))


def _row(kind: str, path: str, leaf: Any, rule: Rule | None) -> Row:
    size = math.prod(leaf.shape)
    before = size * leaf.dtype.itemsize
    rounded = rule is not None and rule.mode is not None and leaf.dtype == np.float32
    return Row(
        kind=kind,
        path=path,
        shape=tuple(leaf.shape),
        dtype=leaf.dtype.name,
        rule=rule,
        bytes_before=before,
        bytes_after=size * _ROUNDED_BYTES if rounded else before,
    )


def _check_linen(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"`module` must be a flax.linen.Module, got {type(module).__name__}. "
            "Pass the module itself, not its class, function or variables."
        )
