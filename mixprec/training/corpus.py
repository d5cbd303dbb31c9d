"""One corpus: the files that a path means, split into training and validation.

What the files are is seen from their names: `.bin` and `.array_record` hold tokens, all
others text, whose tokens are bytes.
"""

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from mixprec.training import fingerprint, records, shards, text
from mixprec.training.tokenizer import ByteTokenizer
from mixprec.training.tokens import ArrayTokens, Tokens, Windows

_NAMED_VALIDATION = re.compile("(^|[^a-z])(val|valid|validation)([^a-z]|$)")
_PROBED = 64  # windows that are read and checked at once


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Tokens for training and for validation, and what is known of them.

    Attributes:
      path: as it was asked for.
      train: rows of tokens.
      validation: rows of tokens.
      unit: for people: "byte" or "token".
      tokenizer: identity of the one that made them; None if unknown.
      vocab_size: above every token; None if unknown.
      separator: the token between documents; None if unknown.
      files: how many.
      split: for people: what is for validation.
      fingerprint: a hash; see `load`.
    """

    path: str
    train: tuple[Tokens, ...]
    validation: tuple[Tokens, ...]
    unit: str
    tokenizer: str | None
    vocab_size: int | None
    separator: int | None
    files: int
    split: str
    fingerprint: str

    @property
    def description(self) -> str:
        """For people: where from, how many files and tokens."""
        train, validation = (
            f"{sum(len(row) for row in rows):,}"
            for rows in (self.train, self.validation)
        )
        return (
            f"{text.describe(self.path)}, {self.files:,} files, {train} {self.unit}s "
            f"for training, {validation} for validation ({self.split})"
        )


def load(
    path: str, *, validation_fraction: float, vocab_size: int, token_dtype: str
) -> Corpus:
    """Reads text; opens files of tokens, and reads a few windows of them.

    Text is hashed whole for the fingerprint. Of files of tokens the names, the sizes
    and 64 pages each are hashed: see `mixprec.training.fingerprint.of_file`.

    Args:
      path: "stdlib", or a file, a folder or a glob. A folder that holds files of tokens
        is taken for these alone.
      validation_fraction: of the files, chosen by a hash of their paths; of a single
        file, its end. Files of tokens whose names hold "val", "valid" or "validation"
        as a word are for validation, and the others not.
      vocab_size: of the model; above every token.
      token_dtype: of tokens in files that do not say.

    Returns:
      The corpus.

    Raises:
      FileNotFoundError: the path, or anything that its glob matches, does not exist.
      ValueError: the files are not what their names promise, hold tokens that the
        vocabulary has not, or are of several kinds.
      OSError: a file cannot be read.
    """
    root, files = text.find(path)
    kinds = {file.suffix for file in files} & {shards.SUFFIX, records.SUFFIX}
    if not kinds:
        return _load_text(path, root, files, validation_fraction, vocab_size)
    if len(kinds) > 1:
        raise ValueError(
            f"{path!r} must mean files of one kind, got {' and '.join(sorted(kinds))}. "
            "Choose one by a glob in config.data.path."
        )
    files = [file for file in files if file.suffix in kinds]
    meta = _read_meta(path, files) if kinds == {shards.SUFFIX} else None
    rows: dict[str, Tokens] = {}
    for file in files:
        name = file.relative_to(root).as_posix()
        rows[name] = _open(file, meta, vocab_size, token_dtype)
    train: tuple[Tokens, ...]
    validation: tuple[Tokens, ...]
    if len(rows) == 1:
        (row,) = rows.values()
        first, last = row.split(validation_fraction)
        train, validation = (first,), (last,)
        split = "the last tokens are for validation"
    else:
        train, validation, split = _split_rows(rows, validation_fraction)
    return Corpus(
        path=path,
        train=train,
        validation=validation,
        unit="token",
        tokenizer=meta.tokenizer if meta else None,
        vocab_size=meta.vocab_size if meta else None,
        separator=meta.separator if meta else None,
        files=len(rows),
        split=split,
        fingerprint=fingerprint.of_parts(
            [
                f"{meta} {validation_fraction} {token_dtype}",
                *(
                    part
                    for n, f in zip(rows, files, strict=True)
                    for part in (n, fingerprint.of_file(f))
                ),
            ]
        ),
    )


def probe(rows: Sequence[Tokens], length: int) -> None:
    """Reads windows spread over the rows, so that what is wrong shows before training.

    Raises:
      ValueError: a token is not below the vocabulary's size, or a file is corrupt.
    """
    windows = Windows(rows, length)
    for place in sorted(set(windows.spread(min(_PROBED, len(windows))))):
        windows[place]


def _load_text(
    path: str,
    root: pathlib.Path,
    files: list[pathlib.Path],
    fraction: float,
    vocab_size: int,
) -> Corpus:
    size = ByteTokenizer.vocab_size
    if vocab_size < size:
        raise ValueError(
            f"`vocab_size` must be at least {size}, one for each byte, got "
            f"{vocab_size}. Correct config.model.vocab_size."
        )
    texts = {file.relative_to(root).as_posix(): text.read(file) for file in files}

    def row(name: str, content: bytes) -> ArrayTokens:
        tokens = np.frombuffer(content, np.uint8)
        return ArrayTokens(name=name, array=tokens, vocab_size=size)

    if len(texts) == 1:
        ((name, content),) = texts.items()
        train, validation = row(name, content).split(fraction)
        split = "the last bytes are for validation"
    else:
        names = text.split_names(list(texts), fraction)
        separator = bytes([text.SEPARATOR])
        train, validation = (
            row(path, separator.join(texts[name] for name in part)) for part in names
        )
        split = f"{len(names[1])} files are for validation"
    digest = hashlib.sha256(len(train).to_bytes(8, "little"))
    digest.update(train.array.data)
    digest.update(validation.array.data)
    return Corpus(
        path=path,
        train=(train,),
        validation=(validation,),
        unit="byte",
        tokenizer=ByteTokenizer.identity,
        vocab_size=size,
        separator=text.SEPARATOR,
        files=len(texts),
        split=split,
        fingerprint=digest.hexdigest(),
    )


def _read_meta(path: str, files: list[pathlib.Path]) -> shards.Meta | None:
    """Gives the meta file of the folder in which all files are, if there is one."""
    folders = {file.parent for file in files}
    metas = {folder: shards.read_meta(folder) for folder in sorted(folders)}
    found = [meta for meta in metas.values() if meta is not None]
    if not found:
        return None
    if len(metas) > 1:
        raise ValueError(
            f"{path!r} must mean shards of one folder, as {shards.META_FILE} is beside "
            f"some of them, got {len(metas)} folders. Mix them: "
            '--config.data.path="A=0.5, B=0.5".'
        )
    (meta,) = found
    absent = sorted(meta.tokens.keys() - {file.name for file in files})
    if absent and pathlib.Path(path).expanduser().is_dir():
        raise ValueError(
            f"{path!r} must hold all shards that its {shards.META_FILE} lists, but "
            f"{', '.join(absent)} is absent. Copy it too, or choose by a glob."
        )
    return meta


def _open(
    file: pathlib.Path, meta: shards.Meta | None, vocab_size: int, dtype: str
) -> Tokens:
    if file.suffix == records.SUFFIX:
        return records.read(file, dtype=dtype, vocab_size=vocab_size)
    tokens = shards.read(file, bare_dtype=dtype)
    if meta is not None:
        shards.check_listed(file, len(tokens), meta)
    return ArrayTokens(name=str(file), array=tokens, vocab_size=vocab_size)


def _split_rows(
    rows: dict[str, Tokens], fraction: float
) -> tuple[tuple[Tokens, ...], tuple[Tokens, ...], str]:
    names = list(rows)
    named = [n for n in names if _NAMED_VALIDATION.search(n.rpartition("/")[2].lower())]
    if 0 < len(named) < len(names):
        train, validation = [name for name in names if name not in set(named)], named
        split = f"{len(named)} files are named for validation"
    else:
        train, validation = text.split_names(names, fraction)
        split = f"{len(validation)} files are for validation"
    return (
        tuple(rows[name] for name in train),
        tuple(rows[name] for name in validation),
        split,
    )
