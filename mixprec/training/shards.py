"""Files of tokens in the `.bin` forms of nanoGPT and llm.c, and what describes them.

nanoGPT's `data/*/prepare.py` writes bare uint16. llm.c's `dev/data/data_common.py`
(`write_datafile`) puts 256 int32 before: a magic number, a version, the number of
tokens, zeros. All is little-endian. `mixprec.training.prepare` writes llm.c's form and
a JSON file beside.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import numpy as np

SUFFIX = ".bin"
META_FILE = "shards.json"
PROGRESS_FILE = "progress.json"  # in place of the former until all shards are written
MOST_TOKENS = 2**31 - 1  # the header's int32 counts them
_META_FORMAT = "mixprec shards 1"
_HEADER = 1024  # bytes
_COUNTED = 12  # bytes of the header that are not zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One of llm.c's forms: the header's first two numbers, and the tokens' dtype."""

    magic: int
    version: int
    dtype: str


FORMS = (
    Form(magic=20240520, version=1, dtype="uint16"),  # GPT-2
    Form(magic=20240801, version=7, dtype="uint32"),  # Llama 3
)
# Files of llm.c that are not text: model, activations, tokenizer, evaluation.
_OTHER_MAGICS = (20240326, 20240327, 20240328, 20240522)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """What the tokens of a folder are.

    Attributes:
      tokenizer: the SHA-256 of its file, or "bytes".
      vocab_size: above every token.
      separator: the token that ends each document.
      tokens: of each shard, by its name.
    """

    tokenizer: str
    vocab_size: int
    separator: int
    tokens: dict[str, int]


def dtype_for(vocab_size: int) -> str:
    """Gives the smallest dtype of a form that holds every token."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def read(path: pathlib.Path, *, bare_dtype: str = "uint16") -> np.ndarray:
    """Maps a file into memory; its tokens are read when they are used.

    Args:
      path: a `.bin` file.
      bare_dtype: "uint16" or "uint32": of the tokens in a file without a header.

    Returns:
      [n] uint16 or uint32, read-only.

    Raises:
      ValueError: the header is unknown, or does not fit the size of the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER)
    magic, version, claimed = _numbers(head)
    forms = [form for form in FORMS if form.magic == magic]
    if not forms:
        _check_bare(path, head, size, magic, bare_dtype)
        return np.memmap(path, np.dtype(bare_dtype).newbyteorder("<"), "r")
    (form,) = forms
    if len(head) < _HEADER:
        raise ValueError(
            f"{str(path)!r} must begin with a header of {_HEADER:,} bytes, got "
            f"{len(head):,}: it was cut off. Write it anew."
        )
    if version != form.version:
        raise ValueError(
            f"{str(path)!r} must have version {form.version}, which llm.c writes with "
            f"magic number {magic}, got {version}. Write it anew."
        )
    dtype = np.dtype(form.dtype).newbyteorder("<")
    expected = _HEADER + claimed * dtype.itemsize
    if size != expected or claimed < 0:
        raise ValueError(
            f"{str(path)!r} must have {expected:,} bytes for the {claimed:,} tokens of "
            f"its header, got {size:,}. It was cut off or changed: write it anew."
        )
    if not claimed:
        return np.zeros(0, dtype)  # nothing that could be mapped
    return np.memmap(path, dtype, "r", offset=_HEADER, shape=(claimed,))


def write(path: pathlib.Path, tokens: np.ndarray) -> None:
    """Writes a file in llm.c's form; whole or not at all, whenever it is interrupted.

    Args:
      path: of the file; replaced if it exists.
      tokens: [n] uint16 or uint32, n below 2^31.
    """
    (form,) = [form for form in FORMS if form.dtype == str(tokens.dtype)]
    assert len(tokens) <= MOST_TOKENS
    header = np.zeros(_HEADER // 4, "<i4")
    header[:3] = form.magic, form.version, len(tokens)
    little = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
    replace(path, header.tobytes(), little.data)


def replace(path: pathlib.Path, *parts: bytes | memoryview) -> None:
    """Writes a file beside and renames it, so that nobody sees a part of it."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def to_json(fields: dict[str, Any]) -> bytes:
    """Gives the text of a meta file, which `read_meta` knows again."""
    return (json.dumps({"format": _META_FORMAT, **fields}, indent=1) + "\n").encode()


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """Gives what `to_json` was given; None if the file is absent or another's."""
    try:
        fields = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(fields, dict) or fields.pop("format", None) != _META_FORMAT:
        return None
    return fields


def read_meta(folder: pathlib.Path) -> Meta | None:
    """Gives what `mixprec.training.prepare` wrote beside its shards, if it did.

    Raises:
      ValueError: it has not finished.
    """
    fields = read_json(folder / META_FILE)
    if fields is None:
        if read_json(folder / PROGRESS_FILE) is not None:
            raise ValueError(
                f"{str(folder)!r} must hold all shards, but they are not finished. "
                "Run the command of mixprec.training.prepare again: it goes on."
            )
        return None
    return Meta(
        tokenizer=fields["tokenizer"],
        vocab_size=fields["vocab_size"],
        separator=fields["separator"],
        tokens={
            shard["file"]: shard["tokens"]
            for part in ("train", "validation")
            for shard in fields[part]["shards"]
        },
    )


def check_listed(path: pathlib.Path, number: int, meta: Meta) -> None:
    """Compares a shard with what is written about it.

    Args:
      path: of the shard.
      number: of its tokens.
      meta: of its folder.

    Raises:
      ValueError: it is not listed, or with another number of tokens.
    """
    listed = meta.tokens.get(path.name)
    if listed != number:
        what = "not listed" if listed is None else f"listed with {listed:,} tokens"
        raise ValueError(
            f"{str(path)!r} must be as {META_FILE} beside it tells, but has {number:,} "
            f"tokens and is {what}. Restore it, or move it to another folder."
        )


def check_width(tokens: np.ndarray, name: str) -> None:
    """Finds uint32 that is read as uint16: every other token would be 0.

    Args:
      tokens: [n] of unsigned integers: the first of a file.
      name: of the file.

    Raises:
      ValueError: it looks like that.
    """
    if tokens.dtype.itemsize != 2 or len(tokens) < 16:
        return
    if tokens[::2].any() and not tokens[1::2].any():
        raise ValueError(
            f"{name!r} must hold uint16, got 0 for every other token at its beginning: "
            "it seems to hold uint32. Set config.data.token_dtype."
        )


def _numbers(head: bytes) -> tuple[int, int, int]:
    padded = head[:_COUNTED].ljust(_COUNTED, b"\0")
    magic, version, claimed = np.frombuffer(padded, "<i4").tolist()
    return magic, version, claimed


def _check_bare(
    path: pathlib.Path, head: bytes, size: int, magic: int, dtype: str
) -> None:
    """Refuses what is no bare row of tokens; nothing in such a file says what it is."""
    known = " or ".join(str(form.magic) for form in FORMS)
    has_zeros = len(head) == _HEADER and not any(head[_COUNTED:])
    if magic in _OTHER_MAGICS or (has_zeros and any(head)):
        raise ValueError(
            f"{str(path)!r} must have magic number {known}, little-endian, or no "
            f"header, got a header with {magic}. Choose files of tokens in "
            "config.data.path."
        )
    width = np.dtype(dtype).itemsize
    if not size or size % width:
        raise ValueError(
            f"{str(path)!r} must hold tokens of {width} bytes ({dtype}, as it has no "
            f"header), got {size:,} bytes. Write it anew, or set "
            "config.data.token_dtype."
        )
    check_width(np.frombuffer(head[: len(head) // width * width], dtype), str(path))
