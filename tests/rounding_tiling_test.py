import itertools
import math

import hypothesis
import pytest
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
