"""The Pallas kernel for GPUs, through Triton: every rounding in one pass over memory.

An array on a GPU is row-major, so it is taken as one line of elements: a program of the
grid loads a block of them, rounds them by the same functions as the TPU's kernel and
the XLA path, and stores them. Triton knows only blocks of a power of two and does not
stop at the end of an array: the last block is masked.

Limits: compiled for NVIDIA GPUs (`make gpu-compile`), never run on one. One call takes
fewer than 2^31 elements, as Triton counts blocks by int32. JAX 0.12 announces, by a
DeprecationWarning, that a later release drops Triton for kernels that only Hopper and
later chips run.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from mixprec.rounding import elements, formats, random
from mixprec.rounding.bits import Rounding

# Eight elements for each of a program's 128 threads: two loads of 16 bytes.
BLOCK = 1024
_WARPS = 4


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
      One [...] `rounding.out_dtype` a mode.

    Raises:
      ValueError: `x` has 2^31 elements or more.
    """
    if x.size >= 2**31:
        raise ValueError(
            "`x` must have fewer than 2**31 elements for the kernel on a GPU, got "
            f'shape {x.shape}. Use backend "xla", or split it over devices.'
        )
    dtype = rounding.out_dtype
    # Integers, read as floats outside: that moves nothing on a GPU, Triton knows few
    # floats of 8 bits, and XLA's interpreter changes the payloads of narrow NaNs.
    as_patterns = dtype != jnp.float32
    stored_dtype = rounding.to.pattern_dtype if as_patterns else dtype
    flat, source = x.reshape(-1), None
    if x.dtype != jnp.float32:
        source = formats.find_format(x.dtype)
        flat = jax.lax.bitcast_convert_type(flat, source.pattern_dtype)
    out_type = jax.ShapeDtypeStruct(
        flat.shape, stored_dtype, manual_axis_type=jax.typeof(flat).manual_axis_type
    )
    block = pl.BlockSpec((BLOCK,), lambda step: (step,))
    outputs = len(rounding.modes)
    rounded = pl.pallas_call(
        functools.partial(
            _kernel,
            rounding=rounding,
            shape=x.shape,
            strides=None if words is None else strides,
            source=source,
            as_patterns=as_patterns,
        ),
        out_shape=(out_type,) * outputs,
        grid=(-(-x.size // BLOCK),),
        in_specs=[block] if words is None else [pl.BlockSpec(), block],
        out_specs=(block,) * outputs,
        input_output_aliases={0 if words is None else 1: 0} if in_place else {},
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="mixprec_round",
    )(*([flat] if words is None else [words, flat]))
    if as_patterns:
        rounded = [jax.lax.bitcast_convert_type(y, dtype) for y in rounded]
    return tuple(y.reshape(x.shape) for y in rounded)


def _kernel(
    *refs: Any,
    rounding: Rounding,
    shape: tuple[int, ...],
    strides: random.Strides | None,
    source: formats.Format | None,
    as_patterns: bool,
) -> None:
    """Rounds one block of the line of elements.

    Before `x_ref` stand the words of seed and index, if there are `strides`.
    """
    words_ref, (x_ref, *out_refs) = (refs[0], refs[1:]) if strides else (None, refs)
    first = pl.program_id(0).astype(jnp.uint32) * np.uint32(BLOCK)
    place = first + jax.lax.iota(jnp.uint32, BLOCK)
    size = math.prod(shape)
    mask = None if size % BLOCK == 0 else place < np.uint32(size)
    draw = None
    if strides is not None and words_ref is not None:
        index = [
            word + words_ref[2 + which]
            for which, word in enumerate(_index_words(place, shape, strides))
        ]
        draw = elements.hashed((words_ref[0], words_ref[1]), index, rounding)
    rounded = elements.round_elements(
        triton.load(x_ref, mask=mask),
        rounding,
        draw,
        source=source,
        as_patterns=as_patterns,
    )
    for out_ref, y in zip(out_refs, rounded, strict=True):
        triton.store(out_ref, y, mask=mask)


def _index_words(
    place: jax.Array, shape: tuple[int, ...], strides: random.Strides
) -> list[jax.Array]:
    """Gives the index words of elements at places in row-major order.

    Args:
      place: [...] uint32.
      shape: of the array.
      strides: of the element index along the dimensions of the array.

    Returns:
      One or two [...] uint32.
    """
    merged = _merge(shape, strides)
    words = [jnp.zeros_like(place) for _ in range(1 + strides.has_high)]
    for position, (size, *steps) in enumerate(reversed(merged)):
        is_first = position == len(merged) - 1
        along = place if is_first else jax.lax.rem(place, np.uint32(size))
        place = place if is_first else jax.lax.div(place, np.uint32(size))
        words = [
            word + along * np.uint32(step)
            for word, step in zip(words, steps, strict=False)
        ]
    return words


def _merge(
    shape: tuple[int, ...], strides: random.Strides
) -> list[tuple[int, int, int]]:
    """Gives (size, low stride, high stride), with as few dimensions as tell the same.

    Neighbouring dimensions are one where a step along the outer is as many along the
    inner as that has elements.
    """
    merged: list[tuple[int, int, int]] = []
    for size, low, high in zip(shape, strides.low, strides.high, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (low * size, high * size):
            merged[-1] = (merged[-1][0] * size, low, high)
        else:
            merged.append((size, low, high))
    return merged
