"""What a compiled program does, read from the text that XLA gives of it.

    computations -> how often each runs -> operations that talk over the network

XLA's own counts (`cost_analysis`) take the body of a loop once; here it counts as often
as the loop runs.
"""

import collections
import dataclasses
import math
import re

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_BITS = re.compile(r"\d+")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|branch_computations)=\{?([^,}]*(?:, %[^,}]*)*)"
)
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a program.

    Attributes:
      kind: "fusion", "all-gather" and so on; of what is started and awaited apart, the
        kind without "-start".
      result: what it gives: (dtype as XLA writes it, shape) of each array.
      times: how often it runs in one run of the program.
      name: of the operation in JAX that it comes from, with its scopes; may be "".
      text: all that XLA says of it.
    """

    kind: str
    result: tuple[tuple[str, tuple[int, ...]], ...]
    times: int
    name: str
    text: str

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of what it gives, for each dtype, in one run of it."""
        found: collections.Counter[str] = collections.Counter()
        for dtype, shape in self.result:
            found[dtype] += math.prod(shape) * size_of(dtype)
        return dict(found)


def size_of(dtype: str) -> int:
    """Gives the bytes of one element of a dtype as XLA writes it, such as "bf16"."""
    bits = _BITS.search(dtype)
    return math.ceil(int(bits[0]) / 8) if bits else 1


def operations(text: str) -> list[Operation]:
    """Gives the operations of a program, those inside loops and fusions too.

    Args:
      text: as `jax.stages.Compiled.as_text` gives it.
    """
    computations, entry = _computations(text)
    times = _times(computations, entry)
    found = []
    for computation, lines in computations.items():
        for name, result, kind, rest in lines:
            if kind.endswith(("-done", "-update")) or not times[computation]:
                continue
            arrays = _ARRAY.findall(result)
            if kind.endswith("-start") and kind != "all-reduce-start":
                arrays = arrays[len(arrays) // 2 :]  # the first half is what it takes
            shapes = tuple(
                (dtype, tuple(int(n) for n in shape.split(",") if n))
                for dtype, shape in arrays
            )
            scope = re.search(r'op_name="([^"]*)"', rest)
            found.append(
                Operation(
                    kind=kind.removesuffix("-start"),
                    result=shapes,
                    times=times[computation],
                    name=scope[1] if scope else "",
                    text=f"{name} = {result} {kind}({rest}",
                )
            )
    return found


def collectives(found: list[Operation]) -> list[Operation]:
    """Gives those that talk over the network."""
    return [operation for operation in found if operation.kind in COLLECTIVES]


_Lines = list[tuple[str, str, str, str]]


def _computations(text: str) -> tuple[dict[str, _Lines], str]:
    """Gives (name, result, kind, rest) of each operation, and the entry's name."""
    computations: dict[str, _Lines] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (operation := _OPERATION.match(line)):
            current.append(operation.groups())  # type: ignore[arg-type]
    return computations, entry


def _times(computations: dict[str, _Lines], entry: str) -> collections.Counter[str]:
    """Counts how often each computation runs; callers stand below what they call."""
    times: collections.Counter[str] = collections.Counter({entry: 1})
    for caller in reversed(list(computations)):
        for _, _, kind, rest in computations[caller]:
            if kind in ("all-reduce", "reduce", "reduce-scatter", "scatter", "sort"):
                continue  # what they call combines two elements
            repeated = 1
            if kind == "while":
                repeated = _trips(computations, rest)
            for names in _CALLED.findall(rest):
                for name in re.findall(r"[\w.\-]+", names):
                    times[name] += times[caller] * repeated
    return times


def _trips(computations: dict[str, _Lines], rest: str) -> int:
    """Gives how often a loop runs: the bound that its counter is compared with."""
    known = re.search(r"known_trip_count[^\d]*(\d+)", rest)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", rest)
    lines = computations[condition[1]] if condition else []
    bounds = [
        int(found[1])
        for _, _, kind, rest_of_line in lines
        if kind == "constant" and (found := re.match(r"(\d+)\)", rest_of_line))
    ]
    # Counted once, if it is no loop with one fixed bound.
    return bounds[0] if len(bounds) == 1 else 1
