import itertools

import numpy as np
import pytest

from mixprec.training import tokens


def row(n, start=0, vocab_size=2**16, dtype=np.uint16):
    array = np.arange(start, start + n).astype(dtype)
    return tokens.ArrayTokens(name=f"file {start}", array=array, vocab_size=vocab_size)


@pytest.mark.parametrize("n", [0, 1, 4, 5, 8, 9, 10])
def test_windows_of_a_row_share_one_token_with_the_next(n):
    windows = tokens.Windows([row(n)], 4)
    expected = [list(range(i, i + 5)) for i in range(0, n - 4, 4)]
    assert [windows[i].tolist() for i in range(len(windows))] == expected
    if expected:
        assert windows[0].dtype == np.int32


def test_windows_stay_within_their_row():
    rows = [row(9), row(3, 100), row(0, 200), row(14, 300)]
    windows = tokens.Windows(rows, 4)
    starts = [windows[place][0] for place in range(len(windows))]
    assert starts == [0, 4, 300, 304, 308]
    for place in (-1, 5):
        with pytest.raises(IndexError):
            windows[place]
    assert windows.spread(3) == [0, 2, 4]
    assert len(tokens.Windows([], 4)) == 0


def test_a_split_keeps_places_in_the_file():
    train, validation = row(10, vocab_size=9).split(0.25)
    assert train.array.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert validation.array.tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match="got 9 at token 9"):
        validation.sample(100)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_token_above_the_vocabulary_is_named_with_its_place(dtype):
    tail = row(20, vocab_size=12, dtype=dtype)
    assert tail.window(1, 4).tolist() == [4, 5, 6, 7, 8]
    message = "'file 0' must hold tokens below `vocab_size` = 12, got 12 at token 12"
    with pytest.raises(ValueError, match=message):
        tail.window(2, 4)
    huge = np.asarray([1, 2**31 + 5], np.uint32)
    with pytest.raises(ValueError, match="got 2,147,483,653 at token 1"):
        tokens.check(huge, 2**20, "x", 0)


def test_samples_are_all_tokens_or_spread_evenly():
    rows = [row(10), row(5, 50)]
    assert tokens.sample(rows, 15).tolist() == [*range(10), *range(50, 55)]
    assert tokens.sample([], 15).tolist() == []
    large = row(60_000)
    sampled = tokens.sample([large], 20_000)
    assert 15_000 <= len(sampled) <= 20_000
    assert sampled[0] == 0
    assert sampled[-1] == 59_999
    steps = {int(b) - int(a) for a, b in itertools.pairwise(sampled)}
    assert len(steps - {1}) <= 2  # between blocks, equal but for rounding
    assert len(tokens.sample([row(100, i * 100) for i in range(10)], 500)) <= 1000
