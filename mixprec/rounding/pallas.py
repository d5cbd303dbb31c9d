"""The tiled Pallas kernel: every rounding of an array in one pass over memory.

How it works:

1. `tiling` chooses a view of the array whose row-major order is its order in memory,
   and blocks of the view that fit VMEM. Taking the view moves no data.
2. The grid walks the blocks. Each is read once; each requested mode writes one output.
   Only requested outputs exist: Pallas does not drop an output that nobody reads.
3. Inside a block a loop walks strips of a few rows, so that the compiler keeps its
   temporaries in registers. Each strip calls the bit algebra of `bits` and, for
   stochastic rounding, the hash of `random` on the strip's element indices in the
   original array. The XLA path calls the same functions, so both agree bit for bit.

Why not one block, the whole array: two float32 outputs of f32[2048,4096] need 96 MiB of
VMEM where a TPU v5e grants a kernel 16. Why not flatten first: in memory an array on
the TPU is a grid of (8, 128) tiles of two of its dimensions, and flattening copies it.

Limits: edge blocks reach beyond the array and compute on unspecified values there,
which is harmless for an elementwise kernel whose excess writes are dropped. The kernel
is compiled for TPUs and interpreted on CPUs. It cannot be partitioned by XLA; on
several devices call it on local shards, inside `shard_map`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mixprec.rounding import bits as bits_lib
from mixprec.rounding import random, tiling

# Rows of a strip: four vector registers of float32 a column of 128 lanes.
_STRIP_ROWS = 32
# Integer operations an element: about 6 a mode, and 16 for a hash of its index.
_FLOPS_PER_MODE = 6
_FLOPS_PER_HASH = 16


def round_pallas(
    x: jax.Array,
    seed: jax.Array | None,
    *,
    modes: tuple[str, ...],
    out_dtype: jax.typing.DTypeLike,
    strides: tuple[int, ...],
    hash_values: bool,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """Rounds `x` to bfloat16 values in each of several modes.

    Args:
      x: [...] float32 of any shape, without a dimension of 0.
      seed: [2] uint32; None if no mode is stochastic.
      modes: one output each.
      out_dtype: bfloat16 or float32, of the outputs.
      strides: the distance in the element index along each dimension of `x`.
      hash_values: whether stochastic draws depend on the values too.
      interpret: as for `pallas_call`.

    Returns:
      One [...] `out_dtype` a mode.
    """
    shape = x.shape
    if not shape:  # the TPU compiler refuses blocks of rank 0
        x, strides = x.reshape(1), (1,)
    dtype = jnp.dtype(out_dtype)
    bytes_per_element = x.dtype.itemsize + len(modes) * dtype.itemsize
    tiles = tiling.tile(x.shape, bytes_per_element)
    view = jnp.transpose(x, tiles.order).reshape(tiles.view_shape)
    kernel = functools.partial(
        _kernel,
        modes=modes,
        index=_BlockIndex(x.shape, strides, tiles),
        hash_values=hash_values,
        has_seed=seed is not None,
    )
    block = pl.BlockSpec(tiles.block_shape, lambda *step: step)
    # Interpreted, bfloat16 is written as patterns: on the CPU, XLA moves bfloat16
    # arrays by way of float32, which changes the payload of a NaN.
    as_patterns = interpret and dtype == jnp.bfloat16
    stored_dtype = np.dtype(np.uint16) if as_patterns else dtype
    out_type = _like(view, stored_dtype)
    outputs = pl.pallas_call(
        kernel,
        out_shape=(out_type,) * len(modes),
        grid=tiles.grid,
        in_specs=[block] if seed is None else [_SCALARS, block],
        out_specs=(block,) * len(modes),
        compiler_params=pltpu.CompilerParams(
            # Steps are independent: the two cores of a v4 or v5p chip share them.
            dimension_semantics=(pltpu.PARALLEL,) * len(tiles.grid)
        ),
        cost_estimate=pl.CostEstimate(
            flops=x.size * _flops_per_element(modes),
            transcendentals=0,
            bytes_accessed=x.size * bytes_per_element,
        ),
        interpret=interpret,
        name="mixprec_round",
    )(*([view] if seed is None else [seed, view]))
    ordered_shape = tuple(x.shape[d] for d in tiles.order)
    back = tuple(int(d) for d in np.argsort(tiles.order))
    rounded = [y.reshape(ordered_shape).transpose(back).reshape(shape) for y in outputs]
    if as_patterns:
        rounded = [jax.lax.bitcast_convert_type(y, dtype) for y in rounded]
    return tuple(rounded)


_SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)


def _like(x: jax.Array, dtype: np.dtype) -> jax.ShapeDtypeStruct:
    """Gives the type of an output that varies over the same manual mesh axes as `x`."""
    return jax.ShapeDtypeStruct(
        x.shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type
    )


def _flops_per_element(modes: tuple[str, ...]) -> int:
    return len(modes) * _FLOPS_PER_MODE + ("stochastic" in modes) * _FLOPS_PER_HASH


class _BlockIndex:
    """The element index, in the original array, of what a block holds."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], tiles: tiling.Tiling
    ):
        ordered = [(shape[d], strides[d]) for d in tiles.order]
        # The view's last two dimensions are single ones; the first is merged of the
        # rest.
        self.leading = ordered[:-2]
        self.inner_strides = tuple(stride for _, stride in ordered[-2:])

    def leading_offset(self, place: jax.Array) -> jax.Array:
        """Gives the index at which the slice at `place` of the first axis begins."""
        offset = jnp.uint32(0)
        for size, stride in reversed(self.leading):
            within = (place % size).astype(jnp.uint32)
            offset = offset + within * np.uint32(stride & 0xFFFFFFFF)
            place = place // size
        return offset

    def strip(
        self, shape: tuple[int, ...], starts: tuple[jax.Array, ...], offset: jax.Array
    ) -> jax.Array:
        """Gives [*shape] uint32 indices of the strip that begins at `starts`."""
        for start, stride in zip(starts, self.inner_strides, strict=True):
            offset = offset + start.astype(jnp.uint32) * np.uint32(stride & 0xFFFFFFFF)
        return random.element_index(shape, self.inner_strides) + offset


def _kernel(
    *refs: Any,
    modes: tuple[str, ...],
    index: _BlockIndex,
    hash_values: bool,
    has_seed: bool,
) -> None:
    """Rounds one block: reads `x_ref`, writes a ref for each mode."""
    seed_ref, (x_ref, *out_refs) = (refs[0], refs[1:]) if has_seed else (None, refs)

    def round_strip(window: tuple[Any, ...], index_of_strip: Any) -> None:
        bits = bits_lib.from_float32(x_ref[window])
        random_bits = None
        if seed_ref is not None:
            random_bits = random.random_bits(
                (seed_ref[0], seed_ref[1]),
                index_of_strip(bits.shape),
                bits if hash_values else None,
            )
        for out_ref, mode in zip(out_refs, modes, strict=True):
            rounded = bits_lib.round_bits(bits, mode, random_bits)
            if out_ref.dtype == jnp.uint16:
                out_ref[window] = bits_lib.to_halves(rounded)
            else:
                out_ref[window] = bits_lib.to_float(rounded, out_ref.dtype)

    starts = tuple(pl.program_id(d) * length for d, length in enumerate(x_ref.shape))
    if x_ref.ndim == 1:
        round_strip((...,), lambda shape: index.strip(shape, starts, jnp.uint32(0)))
        return

    depth, rows = x_ref.shape[:2]
    first_slice, first_row, first_column = starts
    strip_rows = _STRIP_ROWS if rows % _STRIP_ROWS == 0 else rows

    @pl.loop(0, depth * (rows // strip_rows))
    def _(step: jax.Array) -> None:
        slice_in_block, strip = (
            step // (rows // strip_rows),
            step % (rows // strip_rows),
        )
        row = pl.multiple_of(strip * strip_rows, math.gcd(strip_rows, _STRIP_ROWS))
        offset = index.leading_offset(first_slice + slice_in_block)
        round_strip(
            (slice_in_block, pl.ds(row, strip_rows), slice(None)),
            lambda shape: index.strip(shape, (first_row + row, first_column), offset),
        )
