"""`explain`: what a wrapped module rounds, where and how; nothing is computed."""

import dataclasses
import io
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import flax
import jax
import rich.box
import rich.console
import rich.table

from mixprec import coverage, linen, nnx, rules, scopes, tensors
from mixprec.policy import Policy
from mixprec.rounding import dispatch, formats, platforms
from mixprec.rules import Rule, Site
from mixprec.wrap import check_module

_COLUMNS = ("tensor", "type", "mode", "rule", "bytes", "rounded", "inexact", "by")
_TO_THE_RIGHT = ("bytes", "rounded", "inexact")
_FOLDED = ("rule", "by")
# In characters.
_TEXT_WIDTH = 110
_LEAST_FOLDED_WIDTH = 10
_COLUMN_PADDING = 3
_MOST_NAMED = 8  # parameters without a rule, under the table; `unmatched` has all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What happens to one tensor.

    Attributes:
      kind: "parameter", "activation" or "gradient" (of either).
      path: below the wrapped module; of an activation with what passes there, such as
        "layers/mlp:out".
      shape: in elements.
      dtype: of the tensor before rounding.
      rule: the rule that decides, or None.
      kept: why it is left alone, or None.
      by: what rounds it, such as "xla" or "pallas 256x1024" (the kernel's block), with
        the reason if it is not what the policy asks for; "" if it is left alone.
      bytes_before: of the tensor.
      bytes_after: of its rounded values in the dtype they are rounded to; as before if
        it is left alone.
      inexact: the share of values that rounding changes, if all mantissas are equally
        likely; 0 if it is left alone.
    """

    kind: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    rule: Rule | None
    kept: str | None
    by: str
    bytes_before: int
    bytes_after: int
    inexact: float

    @property
    def mode(self) -> str | None:
        """The rounding mode, or None for a tensor that is left alone."""
        return None if self.rule is None or self.kept else self.rule.mode

    def cells(self) -> tuple[str, ...]:
        """Gives the texts for the columns of a table."""
        mode = self.mode or "left alone"
        if self.mode and self.rule and self.rule.dtype != "bfloat16":
            mode += f" to {self.rule.dtype}"
        pattern = "" if self.rule is None else self.rule.pattern
        if self.kept not in (None, tensors.NO_RULE, tensors.KEEP):
            pattern += f" ({self.kept})"
        return (
            f"{self.path} (gradient)" if self.kind == "gradient" else self.path,
            f"{self.dtype}[{','.join(map(str, self.shape))}]",
            mode,
            pattern,
            f"{self.bytes_before:,}",
            "" if self.kept else f"{self.bytes_after:,}",
            "" if self.kept else f"{math.floor(self.inexact * 1e5) / 1e3}%",
            self.by,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a wrapped module rounds, how, and how many bytes: prints as a table.

    Attributes:
      rows: one for each parameter, then one for each activation and gradient that a
        rule decides.
      policy: of the module.
      unused: for each rule that decides for nothing, why not; with `strict=False`.
    """

    rows: tuple[Row, ...]
    policy: Policy
    unused: tuple[str, ...] = ()

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The parameters that no rule matches."""
        return tuple(
            row.path for row in self.rows if row.kind == "parameter" and not row.rule
        )

    def to_dict(self) -> dict[str, Any]:
        """Gives everything as data for JSON."""
        rows = [
            {**dataclasses.asdict(row), "rule": row.rule and str(row.rule)}
            for row in self.rows
        ]
        return {
            "policy": str(self.policy),
            "rows": [{**row, "shape": list(row["shape"])} for row in rows],
            "unused": list(self.unused),
            "unmatched": list(self.unmatched),
        }

    def to_markdown(self) -> str:
        """Gives the table in Markdown."""

        def line(cells: Any) -> str:
            escaped = [cell.replace("|", r"\|") for cell in cells]
            return f"| {' | '.join(escaped)} |"

        rule = ["---:" if name in _TO_THE_RIGHT else "---" for name in _COLUMNS]
        names, *cells = self._cells()
        table = map(line, (names, rule, *cells))
        return "\n".join([*table, "", *(f"- {note}" for note in self._notes()), ""])

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.table.Table]:
        table = rich.table.Table(
            box=rich.box.SIMPLE_HEAD, caption="\n".join(self._notes())
        )
        shown = self._shown(options.max_width)
        for name in itertools.compress(_COLUMNS, shown):
            table.add_column(
                name,
                overflow="fold",
                no_wrap=name not in _FOLDED,
                justify="right" if name in _TO_THE_RIGHT else "left",
            )
        for row in self.rows:
            cells = itertools.compress(row.cells(), shown)
            table.add_row(*cells, style="dim" if row.kept else None)
        table.add_section()
        table.add_row(*itertools.compress(self._totals(), shown))
        yield table

    def _shown(self, width: int) -> list[bool]:
        """Tells which columns a table of this width, in characters, has room for."""
        texts = zip(*self._cells(), strict=True)
        widths = dict(zip(_COLUMNS, (max(map(len, t)) for t in texts), strict=True))
        widths |= dict.fromkeys(_FOLDED, _LEAST_FOLDED_WIDTH)
        # What is the same in all rows stands below the table.
        names = [name for name in _COLUMNS if name not in self._common()]
        for name in ("rule", "type", "inexact", "by"):
            needed = sum(widths[name] + _COLUMN_PADDING for name in names)
            if needed > width and name in names:
                names.remove(name)
        return [name in names for name in _COLUMNS]

    def __str__(self) -> str:
        buffer = io.StringIO()
        rich.console.Console(file=buffer, width=_TEXT_WIDTH).print(self)
        return buffer.getvalue()

    def _cells(self) -> list[tuple[str, ...]]:
        return [_COLUMNS, *(row.cells() for row in self.rows), self._totals()]

    def _totals(self) -> tuple[str, ...]:
        parameters = [row for row in self.rows if row.kind == "parameter"]
        rounded = [row for row in parameters if row.kept is None]
        before = sum(row.bytes_before for row in parameters)
        after = sum(row.bytes_after for row in parameters)
        title = f"{len(rounded)} of {len(parameters)} parameters rounded"
        return (title, "", "", "", f"{before:,}", f"{after:,}", "", "")

    def _common(self) -> dict[str, str]:
        """Gives how all tensors are rounded, as far as it is the same for all."""
        columns = zip(*(row.cells() for row in self.rows if row.mode), strict=True)
        distinct = dict(zip(_COLUMNS, map(set, columns), strict=False))
        return {
            name: next(iter(distinct[name]))
            for name in ("inexact", "by")
            if len(distinct.get(name, ())) == 1
        }

    def _notes(self) -> list[str]:
        dtypes = sorted({row.rule.dtype for row in self.rows if row.rule and row.mode})
        common = self._common()
        notes = [
            f"rounded to {', '.join(dtypes) or 'nothing'}"
            + (f" by {common['by']}" if "by" in common else "")
            + f", carried as {self.policy.out_dtype}"
        ]
        if "inexact" in common:
            notes.append(f"{common['inexact']} of random values would change")
        if self.policy.backend == "auto":
            notes.append('backend "auto": XLA fuses rounding into what reads the value')
        if self.unmatched and self.policy.params:
            first = ", ".join(self.unmatched[:_MOST_NAMED])
            more = len(self.unmatched) - _MOST_NAMED
            notes.append(
                f"no rule for {first}" + (f" and {more} more" if more > 0 else "")
            )
        return [*notes, *self.unused]


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
