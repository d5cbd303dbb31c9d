"""Turns text into shards of tokens: `python -m mixprec.training.prepare --help`.

    files -> documents -> tokens, a separator behind each document -> shards of one side
    (training, then validation) -> shards.json

A shard appears whole or not at all, and `progress.json` tells where in the input the
next one begins. So a run that was interrupted, however it was, goes on when its command
is given again, and ends with the same bytes as one that was not.
"""

import argparse
import dataclasses
import hashlib
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import rich.console
import rich.progress

from mixprec.training import shards
from mixprec.training import tokenizer as tokenizer_lib
from mixprec.training.documents import SIDES, Document, Documents

_ENCODED_AT_ONCE = 2**20  # characters, so that threads have enough to do


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to make of what.

    Attributes:
      inputs: files, folders or globs, of UTF-8 text, a document each; or of JSON lines
        (`.jsonl`), a document in the "text" of each line.
      output: a folder; made if absent.
      tokenizer: path of a JSON file of `tokenizers`; "" for bytes.
      separator: the token that ends a document, as text; "" for the usual one.
      shard_tokens: in each shard but the last.
      validation_fraction: of the documents, chosen by a hash of their files' paths (and
        of their places, in JSON lines); of a single text file, its end.

    Raises:
      ValueError: a value out of its range.
    """

    inputs: tuple[str, ...]
    output: pathlib.Path
    tokenizer: str = ""
    separator: str = ""
    shard_tokens: int = 100_000_000
    validation_fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.shard_tokens <= shards.MOST_TOKENS:
            raise ValueError(
                f"`shard_tokens` must be from 1 to {shards.MOST_TOKENS:,}, got "
                f"{self.shard_tokens:,}. Correct --shard_tokens."
            )
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                "`validation_fraction` must lie between 0 and 1, got "
                f"{self.validation_fraction}. Correct --validation_fraction."
            )


class _Preparation:
    """One run: what it was told, and what is written of it."""

    def __init__(self, config: PrepareConfig):
        self._config = config
        self._tokenizer = tokenizer_lib.load(config.tokenizer)
        self._separator = self._tokenizer.find_separator(config.separator)
        self._dtype = shards.dtype_for(self._tokenizer.vocab_size)
        self._documents = Documents(config.inputs, config.validation_fraction)
        self._job: dict[str, Any] = {
            "input": self._documents.fingerprint,
            "tokenizer": self._tokenizer.identity,
            "vocab_size": self._tokenizer.vocab_size,
            "separator": self._separator,
            "dtype": self._dtype,
            "shard_tokens": config.shard_tokens,
            "validation_fraction": config.validation_fraction,
        }
        # What is known of each shard, in their order.
        self._written: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        # Documents and bytes of input of each side.
        self._read: dict[str, tuple[int, int]] = {}

    def run(self, console: rich.console.Console) -> None:
        """Writes what is missing."""
        output = self._config.output
        output.mkdir(parents=True, exist_ok=True)
        if self._resume():
            console.print(f"{output} is complete", markup=False)
            return
        self._save_progress()
        (output / shards.META_FILE).unlink(missing_ok=True)
        with _progress(console) as bar:
            task = bar.add_task(output.name, total=self._documents.size)
            for side in SIDES:
                for done in self._write_side(side):
                    bar.update(task, completed=done)
        sides = {side: self._describe_side(side) for side in SIDES}
        shards.replace(output / shards.META_FILE, shards.to_json(self._job | sides))
        (output / shards.PROGRESS_FILE).unlink()
        for side, described in sides.items():
            console.print(
                f"{side}: {described['documents']:,} documents, "
                f"{described['tokens']:,} tokens, {len(described['shards']):,} shards"
            )

    def _resume(self) -> bool:
        """Takes up what an earlier run wrote; tells whether that is everything."""
        output = self._config.output
        progress = shards.read_json(output / shards.PROGRESS_FILE)
        earlier = progress or shards.read_json(output / shards.META_FILE)
        if earlier is None:
            others = sorted(f.name for f in output.iterdir() if f.suffix != ".tmp")
            if others:
                raise ValueError(
                    "`output` must be empty, or begun by an earlier run, got "
                    f"{str(output)!r} with {', '.join(others[:3])} in it. Choose "
                    "another --output."
                )
            return False
        self._check_same(earlier)
        if progress is None:
            listed = [shard for side in SIDES for shard in earlier[side]["shards"]]
            return all(_is_intact(output, shard) for shard in listed)
        for side in SIDES:
            for shard in progress[side]:
                if not _is_intact(output, shard):
                    return False
                self._written[side].append(shard)
        return False

    def _check_same(self, earlier: dict[str, Any]) -> None:
        changed = [key for key in self._job if earlier.get(key) != self._job[key]]
        if changed:
            raise ValueError(
                "`output` must have been begun with the same input, tokenizer and "
                f"options, but {str(self._config.output)!r} has another "
                f"{', another '.join(changed)}. Choose another --output."
            )

    def _write_side(self, side: str) -> Iterator[int]:
        """Writes the shards that are missing; yields the bytes of input done so far."""
        before = sum(size for _, size in self._read.values())
        written, most = self._written[side], self._config.shard_tokens
        (file, offset, skip), documents, done = (0, 0, 0), 0, 0
        if written:
            (file, offset, skip), documents, done = (
                written[-1][key] for key in ("next", "documents", "bytes")
            )
        pieces: list[np.ndarray] = []
        filled = 0
        stream = self._documents.of_side(side, file, offset)
        for document, tokens in self._encode(stream):
            taken, skip = skip, 0  # the first may be in the last shard already
            while len(tokens) - taken >= most - filled:
                pieces.append(tokens[taken : taken + most - filled])
                taken += len(pieces[-1])
                place = [document.file, document.offset, taken]
                self._write_shard(side, pieces, place, documents, done)
                pieces, filled = [], 0
            pieces.append(tokens[taken:])
            filled += len(pieces[-1])
            documents += 1
            done += document.size
            yield before + done
        self._read[side] = (documents, done)
        if filled:
            end = [self._documents.number_of_files, 0, 0]
            self._write_shard(side, pieces, end, documents, done)

    def _encode(
        self, documents: Iterable[Document]
    ) -> Iterator[tuple[Document, np.ndarray]]:
        """Gives each document's tokens and its separator, in the shards' dtype."""
        for group in _groups(documents):
            encoded = self._tokenizer.encode([document.text for document in group])
            for document, tokens in zip(group, encoded, strict=True):
                ended = np.append(tokens.astype(self._dtype), [self._separator])
                yield document, ended.astype(self._dtype)

    def _write_shard(
        self,
        side: str,
        pieces: list[np.ndarray],
        place: list[int],
        documents: int,
        done: int,
    ) -> None:
        """Writes a shard, and then where the next one begins."""
        path = self._config.output / f"{side}_{len(self._written[side]):06d}.bin"
        tokens = np.concatenate(pieces)
        shards.write(path, tokens)
        self._written[side].append(
            {
                "file": path.name,
                "tokens": len(tokens),
                "sha256": _hash(path),
                "next": place,
                "documents": documents,
                "bytes": done,
            }
        )
        self._save_progress()

    def _save_progress(self) -> None:
        path = self._config.output / shards.PROGRESS_FILE
        shards.replace(path, shards.to_json(self._job | self._written))

    def _describe_side(self, side: str) -> dict[str, Any]:
        documents, _ = self._read[side]
        if not documents:
            raise ValueError(
                f"the input must give {side} at least one document, got none. Give "
                "more documents, or another --validation_fraction."
            )
        kept = ("file", "tokens", "sha256")
        written = self._written[side]
        return {
            "documents": documents,
            "tokens": sum(shard["tokens"] for shard in written),
            "shards": [{key: shard[key] for key in kept} for shard in written],
        }


def prepare(config: PrepareConfig, console: rich.console.Console) -> None:
    """Writes shards, or goes on where an earlier run was interrupted.

    Shards that are there already are hashed and kept. Two runs must not write to one
    folder at a time.

    Args:
      config: what to make of what.
      console: for the progress.

    Raises:
      FileNotFoundError: an input or the tokenizer does not exist.
      ImportError: a tokenizer is named and `tokenizers` is not installed.
      ValueError: an input is not what its name promises, gives no document for one of
        the sides, or `output` holds something else.
      OSError: a file cannot be read or written.
    """
    output = config.output.resolve()
    for path in config.inputs:
        if output.is_relative_to(pathlib.Path(path).expanduser().resolve()):
            raise ValueError(
                f"`output` must lie outside the input, got {str(config.output)!r} in "
                f"{path!r}. Choose another --output."
            )
    _Preparation(config).run(console)


def parse_arguments(arguments: list[str]) -> PrepareConfig:
    """Reads the command line; exits if it is not as described."""
    parser = argparse.ArgumentParser(
        prog="python -m mixprec.training.prepare",
        description=(
            "Turns text into shards of tokens for config.data.path. Can be interrupted "
            "and run again."
        ),
    )
    defaults = {f.name: f.default for f in dataclasses.fields(PrepareConfig)}

    def add(name: str, **options: Any) -> None:
        parser.add_argument(f"--{name}", default=defaults.get(name), **options)

    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        dest="inputs",
        help="files, folders or globs: UTF-8 text, or .jsonl with a text in each line",
    )
    parser.add_argument("--output", type=pathlib.Path, required=True, help="a folder")
    add("tokenizer", help="JSON file of the package tokenizers; without it, bytes")
    add("separator", help="token that ends a document; found for known tokenizers")
    add("shard_tokens", type=int, help="tokens in a shard (default: %(default)s)")
    add(
        "validation_fraction",
        type=float,
        help="of the documents, for validation (default: %(default)s)",
    )
    parsed = vars(parser.parse_args(arguments))
    return PrepareConfig(**parsed | {"inputs": tuple(parsed["inputs"])})


def main(arguments: list[str]) -> None:
    """Prepares as the command line says."""
    try:
        prepare(parse_arguments(arguments), rich.console.Console())
    except KeyboardInterrupt:
        sys.exit("prepare: interrupted. The same command goes on from there.")
    except (ImportError, ValueError, OSError) as error:
        sys.exit(f"prepare: {error}")


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Puts documents together that are encoded at once."""
    group: list[Document] = []
    length = 0
    for document in documents:
        group.append(document)
        length += len(document.text)
        if length >= _ENCODED_AT_ONCE:
            yield group
            group, length = [], 0
    if group:
        yield group


def _is_intact(folder: pathlib.Path, shard: dict[str, Any]) -> bool:
    path = folder / shard["file"]
    return path.is_file() and _hash(path) == shard["sha256"]


def _hash(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _progress(console: rich.console.Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
