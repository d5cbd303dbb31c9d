"""The statistics in the TPU's kernel: partial sums of each block of the array.

What the elements of a block add to each statistic is first added up as whole vectors of
(8, 128) elements, in VMEM; then the eight rows of each vector are. XLA adds up the
rest, two vectors a block, beside some hundred that were read. So the steps of the grid
stay independent of each other: the two cores of a v4 or v5p chip can share them.

Blocks are of whole vectors and may reach beyond the array. Elements there are taken for
zeros, which add nothing.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mixprec.rounding import statistics, tiling
from mixprec.rounding.statistics import COUNTS, SUMS, Statistics

_VECTOR = (8, 128)


@dataclasses.dataclass(frozen=True)
class Tally:
    """How to add up the statistics over the blocks of a view.

    Attributes:
      tiles: through the array, in blocks of whole vectors.
    """

    tiles: tiling.Tiling

    def out_types(self, like: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Gives the types of the kernel's outputs: partial counts, and sums."""
        # An output varies over the same manual mesh axes as the input.
        varying = jax.typeof(like).manual_axis_type
        shape = (*self.tiles.grid, *_VECTOR)
        return tuple(
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
            for dtype in (jnp.int32, jnp.float32)
        )

    def out_specs(self) -> tuple[pl.BlockSpec, ...]:
        """Gives the parts of these that a step writes."""
        squeezed = (pl.squeezed,) * len(self.tiles.grid)
        return (pl.BlockSpec((*squeezed, *_VECTOR), lambda *step: (*step, 0, 0)),) * 2

    def scratch_shapes(self) -> tuple[Any, ...]:
        """Gives what a step adds up in: a vector for each statistic."""
        return (
            pltpu.VMEM((COUNTS, *_VECTOR), jnp.int32),
            pltpu.VMEM((SUMS, *_VECTOR), jnp.float32),
        )

    def in_block(self, refs: Sequence[Any]) -> "InBlock":
        """Begins the block of this step; takes the refs of outputs and of scratch."""
        return InBlock(self.tiles, refs[:2], refs[2:])

    def total(self, outputs: Sequence[jax.Array]) -> Statistics:
        """Adds up what all steps have written."""
        counts, sums = outputs
        fields = [counts[..., row, :] for row in range(COUNTS)]
        fields += [sums[..., row, :] for row in range(SUMS)]
        return statistics.total(Statistics(*fields))


class InBlock:
    """Adds up the statistics of one block, inside the kernel."""

    def __init__(self, tiles: tiling.Tiling, outputs: Any, scratch: Any):
        self._outputs, self._scratch = outputs, scratch
        self._sizes, self._block_shape = tiles.view_shape, tiles.block_shape
        self._starts = [pl.program_id(d) * n for d, n in enumerate(self._block_shape)]
        for ref in scratch:
            ref[...] = jnp.zeros_like(ref)

    def is_within(
        self, shape: tuple[int, ...], place_in_block: Sequence[Any]
    ) -> jax.Array | None:
        """Tells which elements of a strip are of the array.

        Args:
          shape: of the strip, along the view's last dimensions.
          place_in_block: where the strip begins.

        Returns:
          [*shape] bool, or None if all are.
        """
        within = None
        for dimension, size in enumerate(self._sizes):
            if size % self._block_shape[dimension] == 0:
                continue
            start = self._starts[dimension] + place_in_block[dimension]
            along = dimension - len(self._sizes) + len(shape)
            if along < 0:  # along the first of three a strip has one place
                is_before_end = jnp.full(shape, start, jnp.int32) < size
            else:
                place = jax.lax.broadcasted_iota(jnp.int32, shape, along)
                is_before_end = place < size - start
            within = is_before_end if within is None else within & is_before_end
        return within

    def add(self, added: Sequence[jax.Array]) -> None:
        """Adds up a strip, of what `statistics.of_elements` gives of it."""
        parts = Statistics(*added)
        if parts.error.ndim == 1:
            parts = jax.tree.map(lambda part: part.reshape(-1, _VECTOR[1]), parts)
        for axis, size in enumerate(_VECTOR):
            parts = functools.reduce(statistics.merge, _split(parts, axis, size))
        _store(self._scratch, statistics.merge(self._so_far(), parts))

    def end(self) -> None:
        """Writes what has been added up."""
        _store(self._outputs, statistics.reduce(self._so_far(), axis=0))

    def _so_far(self) -> Statistics:
        rows = [ref[row] for ref in self._scratch for row in range(ref.shape[0])]
        return Statistics(*rows)


def _split(parts: Statistics, axis: int, size: int) -> list[Statistics]:
    """Cuts [rows, columns] parts into pieces of `size` along an axis."""
    pieces = parts.error.shape[axis] // size
    split = [jnp.split(part, pieces, axis) for part in parts]
    return [Statistics(*piece) for piece in zip(*split, strict=True)]


def _store(refs: Any, fields: Statistics) -> None:
    """Writes one field a row: counts into the first ref, sums into the second."""
    counts_ref, sums_ref = refs
    for row, count in enumerate(fields[:COUNTS]):
        counts_ref[row] = count
    for row, of_floats in enumerate(fields[COUNTS:]):
        sums_ref[row] = of_floats
