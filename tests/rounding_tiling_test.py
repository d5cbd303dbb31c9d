import itertools
import math
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu
from hypothesis import strategies

from mixprec.rounding import tiling

SHAPES = [
    (1,), (7,), (1000,), (1024,), (5000,), (1_000_003,), (2**31,),
    (1, 1), (8, 128), (2048, 4096), (8000, 4097), (50257, 768), (768, 50257),
    (49152, 8192), (1024, 3), (3, 1024), (1, 4096), (4096, 1), (1_000_000, 2),
    (3, 5, 7), (12, 768, 3072), (3, 3, 256, 512), (7, 7, 3, 64), (12, 768, 12, 64),
    (36, 1280, 20, 64), (32, 12, 128, 64), (8, 4096, 14336), (80, 8192, 8, 128),
    (2, 3, 1, 5, 7), (1, 1, 1, 1, 1), (2, 2, 2, 2, 2, 2), (5, 1, 3, 1, 129, 9),
]  # fmt: skip


def check(shape, bytes_per_element):
    tiles = tiling.tile(shape, bytes_per_element)
    assert sorted(tiles.order) == list(range(len(shape)))
    ordered = [shape[d] for d in tiles.order]
    # The view merges leading dimensions only.
    assert math.prod(tiles.view_shape) == math.prod(shape)
    assert tiles.view_shape[-min(2, len(shape)) :] == tuple(ordered[-2:])
    # The blocks cover the view, and none lies outside.
    for size, block, steps in zip(
        tiles.view_shape, tiles.block_shape, tiles.grid, strict=True
    ):
        assert 1 <= block <= (size if len(shape) > 1 else max(size, 8192))
        assert (steps - 1) * block < size <= steps * block
    # What the TPU compiler accepts.
    if len(shape) == 1:
        # And not every TPU stores a part of 4096 elements of one byte.
        assert tiles.block_shape[0] % 4096 == 0
    else:
        _, rows, columns = tiles.view_shape
        _, block_rows, block_columns = tiles.block_shape
        # What the TPU demands of one-byte elements.
        assert block_rows == rows or block_rows % 32 == 0
        assert block_columns == columns or block_columns % 128 == 0
    # A block of the smallest legal shape may be all that fits.
    assert tiles.vmem_bytes(bytes_per_element) <= tiling.VMEM_BUDGET_BYTES


@pytest.mark.parametrize("bytes_per_element", [5, 6, 8, 12])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_cover_the_array_and_fit(shape, bytes_per_element):
    check(shape, bytes_per_element)


@hypothesis.given(
    shape=strategies.lists(strategies.integers(1, 5000), min_size=1, max_size=6)
)
@hypothesis.settings(deadline=None, derandomize=True, max_examples=300)
def test_blocks_cover_any_array_and_fit(shape):
    check(tuple(shape), 8)


def padded_bytes(shape, order):
    """Bytes of float32 in tiles of up to 8 rows and 128 columns, by definition."""
    *outer, rows, columns = (shape[d] for d in order)
    height = min((tile for tile in (1, 2, 4, 8) if rows <= tile), default=8)
    return (
        4
        * math.prod(outer)
        * math.ceil(rows / height)
        * height
        * math.ceil(columns / 128)
        * 128
    )


@pytest.mark.parametrize("shape", [s for s in SHAPES if 2 <= len(s) <= 5], ids=str)
def test_memory_order_pads_least(shape):
    order = tiling.memory_order(shape)
    least = min(
        padded_bytes(shape, other)
        for other in itertools.permutations(range(len(shape)))
    )
    assert padded_bytes(shape, order) == least


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        # As seen in programs compiled for TPUs: the layout {0,1} is the order (1, 0).
        ((2048, 4096), (0, 1)),
        ((8000, 4097), (1, 0)),
        ((32, 12, 128, 64), (0, 1, 3, 2)),
        ((12, 768, 12, 64), (0, 2, 3, 1)),
        ((5000,), (0,)),
        ((), ()),
    ],
)
def test_memory_order_is_that_of_the_compiler(shape, order):
    assert tiling.memory_order(shape) == order


@pytest.mark.parametrize("generation", tpu.GENERATIONS)
@pytest.mark.tpu_compile
def test_memory_order_is_that_of_the_compiler_for_every_width(generation):
    sizes = [1, 2, 3, 4, 5, 8, 9, 17, 33, 40, 64, 100, 127, 128, 129, 200, 300]
    rng = np.random.default_rng(0)
    shapes = [tuple(rng.choice(sizes, rng.integers(2, 6))) for _ in range(60)]
    shapes = [tuple(map(int, s)) for s in shapes if math.prod(s) < 10**6]
    assert len(shapes) > 30

    @jax.jit
    def convert(arrays):
        dtypes = ("bfloat16", "float8_e4m3fn")
        return [x.astype(dtype) for dtype in dtypes for x in arrays]

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = tpu.compile_for(generation, convert, arguments).as_text()
    (layouts,) = re.findall(r"entry_computation_layout=(.*)", text)
    found = re.findall(r"(\w+)\[([\d,]*)\]\{([\d,]*)", layouts)
    assert len(found) == 3 * len(shapes)
    itemsizes = {"f32": 4, "bf16": 2, "f8e4m3fn": 1}
    for dtype, *numbers in found:
        shape, innermost_first = (tuple(map(int, n.split(","))) for n in numbers)
        order = tiling.memory_order(shape, itemsizes[dtype])
        assert order == innermost_first[::-1], (dtype, shape)


@pytest.mark.parametrize(
    ("shape", "itemsizes", "expected"),
    [
        ((), (4, 1), True),
        ((5000,), (4, 2), True),
        ((1, 4096), (4, 2), True),
        ((2048, 4096), (4, 2, 1), True),
        ((4096, 1, 4096), (4, 4), True),
        ((4096, 1, 4096), (4, 2), False),
        ((64, 4096, 2), (4, 2), True),
        ((64, 4096, 2), (4, 1), False),
    ],
)
def test_widths_share_an_order_or_not(shape, itemsizes, expected):
    assert tiling.have_one_order(shape, itemsizes) == expected


@pytest.mark.parametrize("columns", [1, 128, 500, 1024, 4097, 100_000])
def test_strips_are_whole_tiles_of_about_the_same_size(columns):
    rows = tiling.strip_rows(columns)
    assert rows % 32 == 0
    vectors = rows // 8 * math.ceil(columns / 128)
    assert vectors <= 32 or rows == 32
    assert vectors > 16 or columns > 1024


def test_large_arrays_have_steps_to_overlap():
    tiles = tiling.tile((2048, 4096), 12)
    assert math.prod(tiles.grid) >= 8
