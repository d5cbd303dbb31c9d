"""Rows of tokens, in memory or on disk, and windows over them.

Windows neither cross from one row to the next nor begin anywhere but at a multiple of
their length, so that each has a number and is found without reading what is before it.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

_BLOCK = 4096  # tokens read in one piece, where a row is sampled


class Tokens(Protocol):
    """One row of tokens, or several of equal length.

    The file that they are in has the name `name`, for people.
    """

    @property
    def name(self) -> str:
        """Gives the name of the file."""

    def __len__(self) -> int:
        """Gives the number of tokens."""

    def count_windows(self, length: int) -> int:
        """Gives the number of windows of `length` + 1 tokens."""

    def window(self, place: int, length: int) -> np.ndarray:
        """Reads one window: [length + 1] int32."""

    def sample(self, number: int) -> np.ndarray:
        """Reads about `number` tokens, spread evenly; all, if there are fewer."""

    def split(self, fraction: float) -> tuple["Tokens", "Tokens"]:
        """Gives the first tokens and the last `fraction` of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ArrayTokens:
    """A row of tokens in an array, which may be mapped from a file.

    Attributes:
      name: of the file.
      array: [n] of unsigned integers.
      vocab_size: above every token; checked in each window that is read.
      start: place of the first token in the file.
    """

    name: str
    array: np.ndarray
    vocab_size: int
    start: int = 0

    def __len__(self) -> int:
        """Gives the number of tokens."""
        return len(self.array)

    def count_windows(self, length: int) -> int:
        """Gives the number of windows; neighbours share one token.

        So each token but the first is predicted once.
        """
        return max(0, (len(self.array) - 1) // length)

    def window(self, place: int, length: int) -> np.ndarray:
        """Reads one window: [length + 1] int32."""
        return self._read(place * length, length + 1).astype(np.int32)

    def sample(self, number: int) -> np.ndarray:
        """Reads at most `number` tokens, in blocks spread evenly over the row."""
        if len(self.array) <= number:
            return self._read(0, len(self.array))
        block = min(_BLOCK, len(self.array))
        places = np.linspace(0, len(self.array) - block, max(1, number // block))
        return np.concatenate([self._read(int(place), block) for place in places])

    def split(self, fraction: float) -> tuple["ArrayTokens", "ArrayTokens"]:
        """Gives the first tokens and the last `fraction` of them."""
        boundary = len(self) - math.ceil(len(self) * fraction)
        return (
            dataclasses.replace(self, array=self.array[:boundary]),
            dataclasses.replace(
                self, array=self.array[boundary:], start=self.start + boundary
            ),
        )

    def _read(self, start: int, length: int) -> np.ndarray:
        tokens = np.asarray(self.array[start : start + length])
        check(tokens, self.vocab_size, self.name, self.start + start)
        return tokens


class Windows(Sequence):
    """All windows of several rows, under one number each.

    Args:
      rows: of tokens.
      length: of a sequence; a window has one token more, as inputs and targets.
    """

    def __init__(self, rows: Sequence[Tokens], length: int):
        self._rows, self._length = tuple(rows), length
        counts = [row.count_windows(length) for row in self._rows]
        self._ends = list(itertools.accumulate(counts))

    def __len__(self) -> int:
        """Gives the number of windows."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: int) -> np.ndarray:  # type: ignore[override]
        """Reads one window: [length + 1] int32.

        Raises:
          IndexError: there is no such window.
          ValueError: it holds a token that the vocabulary has not.
        """
        if not 0 <= place < len(self):
            raise IndexError(f"window {place} of {len(self)}")
        row = bisect.bisect_right(self._ends, place)
        before = self._ends[row - 1] if row else 0
        return self._rows[row].window(int(place) - before, self._length)

    def spread(self, number: int) -> list[int]:
        """Gives `number` places spread evenly, first and last among them."""
        return np.linspace(0, len(self) - 1, number).astype(int).tolist()


def sample(rows: Sequence[Tokens], number: int) -> np.ndarray:
    """Reads about `number` tokens of all rows; every one, if there are fewer."""
    total = sum(len(row) for row in rows)
    share = min(1.0, number / max(1, total))
    sampled = [row.sample(math.ceil(len(row) * share)) for row in rows if len(row)]
    return np.concatenate(sampled) if sampled else np.zeros(0, np.uint8)


def check(tokens: np.ndarray, vocab_size: int, name: str, start: int) -> None:
    """Finds tokens that the vocabulary has not.

    Args:
      tokens: [n] of unsigned integers.
      vocab_size: above every one of them.
      name: of the file.
      start: place of the first one in it.

    Raises:
      ValueError: there is one.
    """
    # A lookup in the embedding would take the last row for any of them, silently.
    if np.iinfo(tokens.dtype).max < vocab_size or not len(tokens):
        return
    if tokens.max() >= vocab_size:
        place = int(np.argmax(tokens >= vocab_size))
        raise ValueError(
            f"{name!r} must hold tokens below `vocab_size` = {vocab_size:,}, got "
            f"{tokens[place]:,} at token {start + place:,}. Set "
            "config.model.vocab_size to that of the tokenizer which made the file, or "
            "correct the file."
        )
