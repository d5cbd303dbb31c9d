"""How to lay a kernel over an array: memory order and block shape, from its shape.

Two facts about the TPU decide (both seen by compiling for v4 to tpu7x):

- A kernel takes its operands in row-major order, but XLA stores an array in whichever
  order of dimensions pads the fewest bytes: the last dimension fills lanes of 128, the
  one before it sublanes of up to 8. Where the two differ, XLA puts a transposing copy
  of the whole array before the kernel and another after it. So the kernel is handed the
  transposed view whose row-major order is XLA's own: such a transposition moves
  nothing.
- VMEM is small (16 MiB for one kernel by default on v4, v5e and v5p), and holds every
  block twice, one being computed and one in flight.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

_LANES = 128
# Of a block with one-byte elements; those of two bytes need 16, those of four 8.
_SUBLANES = 32
_VECTOR = 8 * _LANES
# What a kernel works on at once, of a block of rank 1: eight vectors. A smaller array
# has a block that reaches beyond it, since not every TPU can store a part of a vector.
STRIP_ELEMENTS = 8 * _VECTOR
# And of a block with rows: enough to hide what starting on a strip costs.
_STRIP_OF_ROWS_ELEMENTS = 32 * _VECTOR
# Of a block: more would make a strip of the fewest rows overflow the registers, and
# what lies together in memory is long enough for a transfer.
_MOST_COLUMNS = 2048

# Half of the smallest default limit among the generations (16 MiB), for all blocks in
# both buffers; the other half is for the compiler's temporaries.
VMEM_BUDGET_BYTES = 8 * 2**20
# Enough steps to overlap transfers with computation and to split between two cores.
_MIN_STEPS = 8
# A block smaller than this spends its time on starting transfers.
_MIN_BLOCK_ELEMENTS = 16 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """A way through an array.

    Attributes:
      order: the permutation of dimensions to apply first.
      view_shape: the shape to reshape to then, of rank 1 or 3; always free of copies.
      block_shape: the part of the view that one step of the grid reads and writes.
      grid: the number of steps along each dimension of the view.
    """

    order: tuple[int, ...]
    view_shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    grid: tuple[int, ...]

    def vmem_bytes(self, bytes_per_element: int) -> int:
        """Gives the VMEM that the blocks take, padded and double-buffered."""
        *leading, last = self.block_shape
        if leading:
            leading[-1] = _round_up(leading[-1], _SUBLANES)
        padded = math.prod(leading) * _round_up(last, _LANES)
        return 2 * padded * bytes_per_element

    def in_whole_vectors(self) -> "Tiling":
        """Gives the same steps with blocks of whole vectors of (8, 128) elements."""
        if len(self.block_shape) == 1:
            return self  # of such it is made
        depth, rows, columns = self.block_shape
        whole = (depth, _round_up(rows, 8), _round_up(columns, _LANES))
        return dataclasses.replace(self, block_shape=whole)


def tile(
    shape: tuple[int, ...],
    bytes_per_element: int,
    vmem_budget_bytes: int = VMEM_BUDGET_BYTES,
    order: tuple[int, ...] | None = None,
) -> Tiling:
    """Chooses memory order and blocks for an elementwise kernel.

    Args:
      shape: of the array; no dimension may be 0.
      bytes_per_element: of all inputs and outputs together, for one element.
      vmem_budget_bytes: what the blocks may take, both buffers counted.
      order: of dimensions; None for that in memory of elements of four bytes.

    Returns:
      A `Tiling` whose blocks cover the array; edge blocks may reach beyond it.
    """
    order = memory_order(shape) if order is None else order
    view_shape = _merge_leading(tuple(shape[d] for d in order))
    elements = max(1, vmem_budget_bytes // (2 * bytes_per_element))
    share = math.prod(_pad(view_shape)) // _MIN_STEPS
    elements = min(elements, max(share, _MIN_BLOCK_ELEMENTS))
    block_shape = _block_shape(view_shape, elements)
    grid = tuple(-(-n // b) for n, b in zip(view_shape, block_shape, strict=True))
    return Tiling(
        order=order, view_shape=view_shape, block_shape=block_shape, grid=grid
    )


def strip_rows(columns: int) -> int:
    """Gives how many rows of a block a kernel works on at once: whole tiles."""
    rows = _STRIP_OF_ROWS_ELEMENTS // _round_up(columns, _LANES)
    return max(_SUBLANES, rows // _SUBLANES * _SUBLANES)


def memory_order(shape: tuple[int, ...], itemsize: int = 4) -> tuple[int, ...]:
    """Gives the order of dimensions, outermost first, in which XLA:TPU stores an array.

    It is the order with the fewest padded bytes, and among equals the one that keeps
    the last dimensions last. Agrees with the compiler on 340 random shapes of rank 2 to
    6, for elements of four, two and one bytes, over v4, v5e, v5p, v6e and tpu7x.

    Args:
      shape: of the array.
      itemsize: of an element, in bytes.
    """
    dimensions = range(len(shape))
    if len(shape) < 2:
        return tuple(dimensions)

    def padded(pair: tuple[int, int]) -> int:
        lane, sublane = pair
        rest = math.prod(n for d, n in enumerate(shape) if d not in pair)
        rows = _round_up(shape[sublane], _sublane_tile(shape[sublane], itemsize))
        return rest * rows * _round_up(shape[lane], _LANES)

    # `min` keeps the first of equals, so the candidates come from the last dimension
    # on.
    lane, sublane = min(itertools.permutations(reversed(dimensions), 2), key=padded)
    outer = tuple(d for d in dimensions if d not in (lane, sublane))
    return (*outer, sublane, lane)


def have_one_order(shape: tuple[int, ...], itemsizes: Iterable[int]) -> bool:
    """Tells whether arrays of elements of these sizes, in bytes, lie in one order."""

    def order(itemsize: int) -> tuple[Any, ...]:
        outermost_first = memory_order(shape, itemsize)
        # Moving a dimension of 1 moves nothing, unless its place is that of the rows.
        has_rows = len(shape) < 2 or shape[outermost_first[-2]] > 1
        return has_rows, *(d for d in outermost_first if shape[d] > 1)

    return len({order(itemsize) for itemsize in itemsizes}) == 1


def _merge_leading(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2:
        return (math.prod(shape),)
    *leading, rows, columns = shape
    return (math.prod(leading), rows, columns)


def _block_shape(view_shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """Gives the largest block of whole vectors with about `elements` elements."""
    if len(view_shape) == 1:
        (length,) = view_shape
        most = max(elements // STRIP_ELEMENTS, 1) * STRIP_ELEMENTS
        return (min(_round_up(length, STRIP_ELEMENTS), most),)
    depth, rows, columns = view_shape
    _, padded_rows, padded_columns = _pad(view_shape)
    fewest_rows = min(_SUBLANES, padded_rows)
    most_columns = min(_MOST_COLUMNS, elements // fewest_rows // _LANES * _LANES)
    if padded_columns <= most_columns:
        block_columns = columns
    else:
        parts = -(-columns // max(_LANES, most_columns))
        block_columns = _round_up(-(-columns // parts), _LANES)
    most_rows = elements // _round_up(block_columns, _LANES)
    if padded_rows <= most_rows:
        block_rows = rows
    else:
        strip = strip_rows(block_columns)
        unit = strip if most_rows >= strip else _SUBLANES
        block_rows = max(unit, most_rows // unit * unit)
    block_depth = 1
    if (block_rows, block_columns) == (rows, columns):
        block_depth = max(1, min(depth, elements // (padded_rows * padded_columns)))
    return (block_depth, block_rows, block_columns)


def _pad(view_shape: tuple[int, ...]) -> tuple[int, ...]:
    *leading, last = view_shape
    if leading:
        leading[-1] = _round_up(leading[-1], _SUBLANES)
    return (*leading, _round_up(last, _LANES))


def _sublane_tile(rows: int, itemsize: int) -> int:
    """Gives the height of the tile for which XLA:TPU pads this many rows."""
    # Narrow elements share a word with those of the rows below.
    return next(
        tile for tile in (1, 2, 4, 8) if tile == 8 or tile >= max(rows, 4 // itemsize)
    )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
