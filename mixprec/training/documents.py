"""Documents: the texts of files, or of the lines of files, split in two sides."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator

from mixprec.training import fingerprint, text

SIDES = ("train", "validation")
_JSON_LINES = ".jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A text of one side.

    Attributes:
      text: all of it.
      file: number of its file in the input.
      offset: bytes before it in the file.
      size: bytes that it takes there.
    """

    text: str
    file: int
    offset: int
    size: int


class Documents:
    """The documents of the input, in an order that depends on nothing but their paths.

    Args:
      inputs: files, folders or globs, of UTF-8 text, a document each; or of JSON lines
        (`.jsonl`), a document in the "text" of each line.
      validation_fraction: of the documents, chosen by a hash of their files' paths (and
        of their places, in JSON lines); of a single text file, its end.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a folder without files.
    """

    def __init__(self, inputs: tuple[str, ...], validation_fraction: float):
        self._fraction = validation_fraction
        found = [text.find(path) for path in inputs]
        self._files = sorted({file.absolute() for _, files in found for file in files})
        roots = [str(root.absolute()) for root, _ in found]
        root = pathlib.Path(os.path.commonpath(roots))
        self._names = [file.relative_to(root).as_posix() for file in self._files]
        texts = [name for name in self._names if not name.endswith(_JSON_LINES)]
        self._is_cut = len(self._names) == len(texts) == 1
        self._validation: set[str] = set()
        if texts and not self._is_cut:
            self._validation = set(text.split_names(texts, validation_fraction)[1])

    @property
    def number_of_files(self) -> int:
        """On both sides."""
        return len(self._files)

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(file.stat().st_size for file in self._files)

    @property
    def fingerprint(self) -> str:
        """A hash of names and sizes, and of samples of what is in the files."""
        parts = [fingerprint.of_file(file) for file in self._files]
        return fingerprint.of_parts([*self._names, *parts])

    def of_side(self, side: str, file: int, offset: int) -> Iterator[Document]:
        """Gives the documents of one side, from a place on.

        Raises:
          ValueError: a file is not UTF-8, or a line not JSON with a "text".
        """
        for number in range(file, len(self._files)):
            begin = offset if number == file else 0
            if self._names[number].endswith(_JSON_LINES):
                yield from self._lines(side, number, begin)
            else:
                yield from self._text(side, number)

    def _text(self, side: str, number: int) -> Iterator[Document]:
        path, name = self._files[number], self._names[number]
        if not self._is_cut and (name in self._validation) != (side == "validation"):
            return
        content = text.read(path).decode()
        if self._is_cut:
            boundary = len(content) - math.ceil(len(content) * self._fraction)
            content = content[:boundary] if side == "train" else content[boundary:]
        size = len(content.encode())
        if size:
            yield Document(text=content, file=number, offset=0, size=size)

    def _lines(self, side: str, number: int, offset: int) -> Iterator[Document]:
        path, name = self._files[number], self._names[number]
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                is_validation = text.share(f"{name}:{offset}") < self._fraction
                if line.strip() and is_validation == (side == "validation"):
                    content = _parse_line(line, path, offset)
                    yield Document(
                        text=content, file=number, offset=offset, size=len(line)
                    )
                offset += len(line)


def _parse_line(line: bytes, path: pathlib.Path, offset: int) -> str:
    try:
        content = json.loads(line)["text"]
        # JSON can spell out halves of surrogate pairs, which no UTF-8 text holds.
        return content.encode(errors="replace").decode()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{str(path)!r} must hold a JSON object with a "text" in each line, got '
            f"another at byte {offset:,}. Correct the line."
        ) from error
