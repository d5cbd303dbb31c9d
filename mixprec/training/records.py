"""Tokens in ArrayRecord files, read through grain.

Each record is a row of tokens, little-endian, all rows of a file equally long: then the
place of every window is known without reading the records before it. Windows stay
within a record.
"""

import dataclasses
import pathlib

import grain
import numpy as np

from mixprec.training import shards
from mixprec.training.tokens import check

SUFFIX = ".array_record"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordTokens:
    """Consecutive records of a file, as `mixprec.training.tokens.Tokens`.

    Attributes:
      name: of the file.
      source: gives each record's bytes.
      dtype: of the tokens, as NumPy writes it.
      per_record: tokens in each record.
      first: number of the first record.
      records: how many.
      vocab_size: above every token; checked in each record that is read.
    """

    name: str
    source: grain.sources.RandomAccessDataSource
    dtype: str
    per_record: int
    first: int
    records: int
    vocab_size: int

    def __len__(self) -> int:
        """Gives the number of tokens."""
        return self.records * self.per_record

    def count_windows(self, length: int) -> int:
        """Gives the number of windows; neighbours in a record share one token."""
        return self.records * max(0, (self.per_record - 1) // length)

    def window(self, place: int, length: int) -> np.ndarray:
        """Reads one window: [length + 1] int32."""
        record, part = divmod(place, (self.per_record - 1) // length)
        start = part * length
        return self._read(record)[start : start + length + 1].astype(np.int32)

    def sample(self, number: int) -> np.ndarray:
        """Reads about `number` tokens: whole records, spread evenly."""
        wanted = min(self.records, -(-number // self.per_record))
        places = np.linspace(0, self.records - 1, wanted).astype(int).tolist()
        return np.concatenate([self._read(place) for place in places])

    def split(self, fraction: float) -> tuple["RecordTokens", "RecordTokens"]:
        """Gives the first records and the last `fraction` of them."""
        last = int(np.ceil(self.records * fraction))
        kept = self.records - last
        return (
            dataclasses.replace(self, records=kept),
            dataclasses.replace(self, first=self.first + kept, records=last),
        )

    def _read(self, record: int) -> np.ndarray:
        number = self.first + record
        content = _record(self.source, number, self.name)
        expected = self.per_record * np.dtype(self.dtype).itemsize
        if len(content) != expected:
            raise ValueError(
                f"{self.name!r} must have records of equal length, {expected:,} bytes "
                f"as the first, got {len(content):,} in record {number:,}. Write rows "
                "of equal length."
            )
        tokens = np.frombuffer(content, self.dtype)
        check(tokens, self.vocab_size, self.name, number * self.per_record)
        return tokens


def read(path: pathlib.Path, *, dtype: str, vocab_size: int) -> RecordTokens:
    """Opens a file and reads its first record.

    Args:
      path: an ArrayRecord file.
      dtype: "uint16" or "uint32".
      vocab_size: above every token.

    Returns:
      All of its records.

    Raises:
      ValueError: it is no ArrayRecord file, has no records, or the first does not hold
        tokens of this dtype.
    """
    name = str(path)
    try:
        source = grain.sources.ArrayRecordDataSource(name)
        records = len(source)
    except RuntimeError as error:
        raise ValueError(
            f"{name!r} must be an ArrayRecord file, got something else: "
            f"{str(error) or 'it was cut off'}. Correct config.data.path."
        ) from error
    first = _record(source, 0, name) if records else b""
    width = np.dtype(dtype).itemsize
    if not first or len(first) % width:
        raise ValueError(
            f"{name!r} must hold records of tokens of {width} bytes ({dtype}), got "
            f"{records:,} records, {len(first):,} bytes in the first. Set "
            "config.data.token_dtype, or correct config.data.path."
        )
    shards.check_width(np.frombuffer(first, dtype), name)
    return RecordTokens(
        name=name,
        source=source,
        dtype=np.dtype(dtype).newbyteorder("<").str,
        per_record=len(first) // width,
        first=0,
        records=records,
        vocab_size=vocab_size,
    )


def _record(
    source: grain.sources.RandomAccessDataSource, number: int, name: str
) -> bytes:
    try:
        return source[number]
    except RuntimeError as error:
        raise ValueError(
            f"{name!r} must be a whole ArrayRecord file, but record {number:,} cannot "
            f"be read: {error}. Write it anew."
        ) from error
