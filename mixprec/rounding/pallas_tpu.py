"""The tiled Pallas kernel for TPUs: every rounding of an array in one pass over memory.

How it works:

1. `tiling` chooses a view of the array whose row-major order is its order in memory,
   and blocks of the view that fit VMEM. Taking the view moves no data.
2. The grid walks the blocks. Each is read once; each requested mode writes one output.
   Only requested outputs exist: Pallas does not drop an output that nobody reads.
3. Inside a block a loop walks strips of a few rows, so that the compiler keeps its
   temporaries in registers. Each strip is rounded by `elements`, for stochastic
   rounding with the indices that its elements have in the whole array. The XLA path
   calls the same functions, so both agree bit for bit.

Why not one block, the whole array: two float32 outputs of f32[2048,4096] need 96 MiB of
VMEM where a TPU v5e grants a kernel 16. Why not flatten first: in memory an array on
the TPU is a grid of (8, 128) tiles of two of its dimensions, and flattening copies it.

Limits: edge blocks reach beyond the array and compute on unspecified values there,
which is harmless for an elementwise kernel whose excess writes are dropped. The kernel
is compiled for TPUs and interpreted on CPUs. XLA cannot partition it; on several
devices `dispatch` runs it on each shard, where the sharding is known.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mixprec.rounding import elements, formats, random, tiling
from mixprec.rounding.bits import Rounding
from mixprec.rounding.tally import Tally

_LANES = 128


def round_pallas(
    x: jax.Array,
    words: jax.Array | None = None,
    *,
    rounding: Rounding,
    strides: random.Strides,
    in_place: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Rounds `x` in each of several modes.

    Args:
      x: [...] float32 or narrower, of any shape without a dimension of 0.
      words: [4] uint32: the seed, and the two words of the first element's index; None
        if no mode is stochastic.
      rounding: what to make of each element.
      strides: of the element index along the dimensions of `x`.
      in_place: whether the first result, float32, takes the memory of `x`.
      interpret: as for `pallas_call`.

    Returns:
      One [...] `rounding.out_dtype` a mode; then, if so chosen, the statistics' fields.
    """
    shape = x.shape
    if not shape:  # the TPU compiler refuses blocks of rank 0
        x, strides = x.reshape(1), random.Strides((1,), (0,))
    dtype = rounding.out_dtype
    tiles = tile(x.shape, x.dtype, rounding)
    tally = Tally(tiles) if rounding.statistics else None
    draws: _Draws | None = None
    if words is not None:
        is_hashed = rounding.random_source == "hash"
        draws = _Hashed(x.shape, strides, tiles) if is_hashed else _FromHardware()
    source = None
    if _must_be_patterns(x.dtype, interpret):
        source = formats.find_format(x.dtype)
        x = jax.lax.bitcast_convert_type(x, source.pattern_dtype)
    view = jnp.transpose(x, tiles.order).reshape(tiles.view_shape)
    as_patterns = _must_be_patterns(dtype, interpret)
    outputs = _call(
        view,
        words,
        pl.BlockSpec(tiles.block_shape, lambda *step: step),
        tiles.grid,
        functools.partial(
            _kernel,
            rounding=rounding,
            draws=draws,
            source=source,
            as_patterns=as_patterns,
            tally=tally,
        ),
        rounding=rounding,
        tally=tally,
        stored_dtype=rounding.to.pattern_dtype if as_patterns else dtype,
        in_place=in_place,
        interpret=interpret,
    )
    ordered_shape = tuple(x.shape[d] for d in tiles.order)
    back = tuple(int(d) for d in np.argsort(tiles.order))
    rounded = [
        y.reshape(ordered_shape).transpose(back).reshape(shape)
        for y in outputs[: len(rounding.modes)]
    ]
    if as_patterns:
        rounded = [jax.lax.bitcast_convert_type(y, dtype) for y in rounded]
    fields = tally.total(outputs[len(rounded) :]) if tally else ()
    return *rounded, *fields


def tile(shape: tuple[int, ...], dtype: np.dtype, rounding: Rounding) -> tiling.Tiling:
    """Gives the blocks for an array; for a scalar, those for one element."""
    written = len(rounding.modes) * rounding.out_dtype.itemsize
    bytes_per_element = dtype.itemsize + written
    order = tiling.memory_order(shape or (1,), dtype.itemsize)
    tiles = tiling.tile(shape or (1,), bytes_per_element, order=order)
    return tiles.in_whole_vectors() if rounding.statistics else tiles


def round_pallas_bare(
    x: jax.Array, *, rounding: Rounding, interpret: Any
) -> tuple[jax.Array, ...]:
    """Rounds `x` by a `pallas_call` alone, on its own shape, with nothing around it.

    Where the shape's order in memory is another (see `tiling`), the compiler adds
    copies, which `round_pallas` avoids.

    Args:
      x: [...] float32 of rank 1 or more, without a dimension of 0.
      rounding: what to make of each element; not stochastic, and to float32.
      interpret: as for `pallas_call`.

    Returns:
      One [...] float32 a mode.
    """
    assert rounding.out_dtype == jnp.float32
    bytes_per_element = x.dtype.itemsize * (1 + len(rounding.modes))
    order = tuple(range(x.ndim))
    block_shape = tiling.tile(x.shape, bytes_per_element, order=order).block_shape
    if x.ndim > 1:  # of the merged leading dimensions, a block takes only the last
        block_shape = tuple(map(min, block_shape[-x.ndim :], x.shape[-3:]))
    outer, inner = x.shape[:-3], x.shape[-3:]
    steps = tuple(-(-n // b) for n, b in zip(inner, block_shape, strict=True))
    return _call(
        x,
        None,
        pl.BlockSpec((pl.squeezed,) * len(outer) + block_shape, lambda *step: step),
        outer + steps,
        functools.partial(
            _kernel, rounding=rounding, draws=None, source=None, as_patterns=False
        ),
        rounding=rounding,
        stored_dtype=rounding.out_dtype,
        interpret=interpret,
    )


def _must_be_patterns(dtype: np.dtype, interpret: Any) -> bool:
    """Tells whether the kernel must see integers, which are floats outside it."""
    if dtype == jnp.float32:
        return False
    # Interpreted, because XLA on the CPU moves narrow floats by way of float32, which
    # changes the payload of a NaN. Compiled, because the TPU's kernels know no float16;
    # between it and the integers is one more pass over memory.
    return bool(interpret) or dtype == jnp.float16


def _call(
    view: jax.Array,
    words: jax.Array | None,
    block: pl.BlockSpec,
    grid: tuple[int, ...],
    kernel: Callable[..., None],
    *,
    rounding: Rounding,
    stored_dtype: np.dtype,
    tally: Tally | None = None,
    in_place: bool = False,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """Runs a kernel over the blocks of an array; one output a mode, two for a tally."""
    outputs = len(rounding.modes)
    # An output varies over the same manual mesh axes as the input.
    out_type = jax.ShapeDtypeStruct(
        view.shape, stored_dtype, manual_axis_type=jax.typeof(view).manual_axis_type
    )
    sums = tally.out_types(view) if tally else ()
    is_hashed = words is not None and rounding.random_source == "hash"
    flops = elements.flops(rounding, is_hashed=is_hashed)
    accessed = view.dtype.itemsize + outputs * stored_dtype.itemsize
    return pl.pallas_call(
        kernel,
        out_shape=(out_type,) * outputs + sums,
        grid=grid,
        in_specs=[block] if words is None else [_SCALARS, block],
        out_specs=(block,) * outputs + (tally.out_specs() if tally else ()),
        scratch_shapes=tally.scratch_shapes() if tally else (),
        input_output_aliases={0 if words is None else 1: 0} if in_place else {},
        compiler_params=pltpu.CompilerParams(
            # Steps are independent: the two cores of a v4 or v5p chip share them.
            dimension_semantics=(pltpu.PARALLEL,) * len(grid)
        ),
        cost_estimate=pl.CostEstimate(
            flops=view.size * flops,
            transcendentals=0,
            bytes_accessed=view.size * accessed + sum(4 * y.size for y in sums),
        ),
        interpret=interpret,
        name="mixprec_round",
    )(*([view] if words is None else [words, view]))


_SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)


class _Draws(Protocol):
    """Where the random bits of a kernel come from."""

    def in_block(
        self, words_ref: Any, block_shape: tuple[int, ...], rounding: Rounding
    ) -> Callable[..., Callable[[jax.Array], jax.Array]]:
        """Prepares the draws of one block.

        Args:
          words_ref: of seed and first index.
          block_shape: of the block.
          rounding: what to make of each element.

        Returns:
          Gives, for the place in the block where a strip begins, the draw that
          `elements.round_elements` takes.
        """
        ...


class _Hashed:
    """From a hash of seed and index in the whole array."""

    def __init__(
        self, shape: tuple[int, ...], strides: random.Strides, tiles: tiling.Tiling
    ):
        self._words = [_IndexWord(shape, strides.low, tiles)]
        if strides.has_high:
            self._words.append(_IndexWord(shape, strides.high, tiles))

    def in_block(
        self, words_ref: Any, block_shape: tuple[int, ...], rounding: Rounding
    ) -> Callable[..., Callable[[jax.Array], jax.Array]]:
        block = [pl.program_id(d) * n for d, n in enumerate(block_shape)]

        def in_strip(*place_in_block: Any) -> Callable[[jax.Array], jax.Array]:
            starts = [a + b for a, b in zip(block, place_in_block, strict=True)]

            def draw(patterns: jax.Array) -> jax.Array:
                index = [
                    word.strip(patterns.shape, starts) + words_ref[2 + which]
                    for which, word in enumerate(self._words)
                ]
                seed = (words_ref[0], words_ref[1])
                return elements.hashed(seed, index, rounding)(patterns)

            return draw

        return in_strip


class _IndexWord:
    """One word of the element index."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], tiles: tiling.Tiling
    ):
        ordered = [(shape[d], strides[d]) for d in tiles.order]
        # The view's last two dimensions are single ones; the first is merged of the
        # rest.
        self._leading = ordered[:-2]
        self._inner_strides = tuple(stride for _, stride in ordered[-2:])

    def strip(self, shape: tuple[int, ...], starts: list[jax.Array]) -> jax.Array:
        """Gives [*shape] uint32, counted from the array's first element."""
        offset, place = jnp.uint32(0), starts[0]
        for size, stride in reversed(self._leading):
            offset = offset + (place % size).astype(jnp.uint32) * np.uint32(stride)
            place = place // size
        inner = starts[-len(self._inner_strides) :]
        for start, stride in zip(inner, self._inner_strides, strict=True):
            offset = offset + start.astype(jnp.uint32) * np.uint32(stride)
        return random.element_index(shape, self._inner_strides) + offset


class _FromHardware:
    """From the chip's generator, seeded for each block by a hash.

    Nothing is known of streams from neighbouring seeds, so that the seeds are two words
    hashed of the seed, the block's number and the index where the array begins.
    """

    def in_block(
        self, words_ref: Any, block_shape: tuple[int, ...], rounding: Rounding
    ) -> Callable[..., Callable[[jax.Array], jax.Array]]:
        number = jnp.int32(0)
        for d in range(len(block_shape)):
            number = number * pl.num_programs(d) + pl.program_id(d)
        index = [number.astype(jnp.uint32), words_ref[2], words_ref[3]]
        seed = (words_ref[0], words_ref[1])
        pltpu.prng_seed(
            *(
                random.random_bits(words, index).astype(jnp.int32)
                for words in (seed, seed[::-1])
            )
        )

        def draw(patterns: jax.Array) -> jax.Array:
            shape = patterns.shape
            if len(shape) > 1:
                return pltpu.prng_random_bits(shape).astype(jnp.uint32)
            # The generator gives no line of words, but whole tiles.
            tiles = pltpu.prng_random_bits((patterns.size // _LANES, _LANES))
            return tiles.astype(jnp.uint32).reshape(shape)

        return lambda *place_in_block: draw


def _kernel(
    *refs: Any,
    rounding: Rounding,
    draws: _Draws | None,
    source: formats.Format | None,
    as_patterns: bool,
    tally: Tally | None = None,
) -> None:
    """Rounds one block, of rank 1 to 3: reads `x_ref`, writes a ref for each mode.

    Before `x_ref` stand the words of seed and index, if there are draws; after those to
    write, if there is a tally, its two outputs and its two accumulators.
    """
    words_ref, (x_ref, *out_refs) = (refs[0], refs[1:]) if draws else (None, refs)
    tally_refs = [out_refs.pop(len(rounding.modes)) for _ in range(4 if tally else 0)]
    # Not inside the loop, where the interpreter does not know the step of the grid.
    sums = None if tally is None else tally.in_block(tally_refs)
    in_strip = None
    if draws is not None:
        in_strip = draws.in_block(words_ref, x_ref.shape, rounding)

    def round_strip(window: tuple[Any, ...], *place_in_block: Any) -> None:
        x = x_ref[window]
        rounded = elements.round_elements(
            x,
            rounding,
            None if in_strip is None else in_strip(*place_in_block),
            source=source,
            as_patterns=as_patterns,
            is_within=sums.is_within(x.shape, place_in_block) if sums else None,
        )
        for out_ref, y in zip(out_refs, rounded, strict=False):
            out_ref[window] = y
        if sums is not None:
            sums.add(rounded[len(out_refs) :])

    _walk(x_ref.shape, round_strip)
    if sums is not None:
        sums.end()


def _walk(block_shape: tuple[int, ...], round_strip: Callable[..., None]) -> None:
    """Takes a block strip by strip: each by a window of a ref, and where it begins."""
    if len(block_shape) == 1:
        (length,) = block_shape
        strip = tiling.STRIP_ELEMENTS

        @pl.loop(0, length // strip)
        def round_line(step: jax.Array) -> None:
            start = pl.multiple_of(step * strip, strip)
            round_strip((pl.ds(start, strip),), start)

        return

    *depth, rows, columns = block_shape  # no depth where the whole array has rank 2
    strip_rows = tiling.strip_rows(columns)
    strips, rest = divmod(rows, strip_rows)

    def round_rows(place: jax.Array, row: Any, number: int) -> None:
        leading = [place] if depth else []
        round_strip((*leading, pl.ds(row, number), slice(None)), *leading, row, 0)

    if strips:

        @pl.loop(0, math.prod(depth) * strips)
        def round_strips(step: jax.Array) -> None:
            row = pl.multiple_of(step % strips * strip_rows, strip_rows)
            round_rows(step // strips, row, strip_rows)

    if rest:

        @pl.loop(0, math.prod(depth))
        def round_last_rows(place: jax.Array) -> None:
            round_rows(place, rows - rest, rest)
