"""What `explain` gives: a row for each tensor, as a table, as data and as Markdown."""

import dataclasses
import io
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text

from mixprec import tensors
from mixprec.policy import Policy
from mixprec.rules import Rule

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
            _in_a_line(self.path + " (gradient)" * (self.kind == "gradient")),
            f"{self.dtype}[{','.join(map(str, self.shape))}]",
            mode,
            _in_a_line(pattern),
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
            return f"| {' | '.join(cells)} |"

        rule = ["---:" if name in _TO_THE_RIGHT else "---" for name in _COLUMNS]
        names, *rows = [map(_as_markdown, cells) for cells in self._cells()]
        table = map(line, (names, rule, *rows))
        notes = (f"- {_as_markdown(note)}" for note in self._notes())
        return "\n".join([*table, "", *notes, ""])

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.table.Table]:
        # As `Text`, in which nothing is markup.
        caption = rich.text.Text("\n".join(self._notes()))
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, caption=caption)
        shown = self._shown(options.max_width)
        for name in itertools.compress(_COLUMNS, shown):
            table.add_column(
                name,
                overflow="fold",
                no_wrap=name not in _FOLDED,
                justify="right" if name in _TO_THE_RIGHT else "left",
            )
        for row in self.rows:
            cells = itertools.compress(map(rich.text.Text, row.cells()), shown)
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
        return [_in_a_line(note) for note in (*notes, *self.unused)]


def _in_a_line(text: str) -> str:
    """Writes what does not print, such as a line's end, as Python's strings do."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _as_markdown(text: str) -> str:
    """Escapes what Markdown would take for its own."""
    # An underscore within a word is none of it, nor brackets that are no link.
    return re.sub(r"([\\`*<>|~&]|\](?=[(\[])|(?<!\w)_|_(?!\w))", r"\\\1", text)
