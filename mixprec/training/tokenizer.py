"""From text to tokens and back: bytes, or a tokenizer in a file of Hugging Face's."""

import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

# What known tokenizers put between documents: GPT-2, Llama 3, Llama 2, Gemma.
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """Encodes and decodes.

    Attributes:
      vocab_size: above every token.
      identity: tells whether two are the same.
    """

    vocab_size: int
    identity: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Gives the tokens of each text: [n] unsigned integers, no token added."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Gives the text; what is not UTF-8 is replaced."""

    def find_separator(self, name: str) -> int:
        """Gives the token that ends a document; `name` is "" for the usual one."""


class ByteTokenizer:
    """Each byte of UTF-8 is a token; byte 0, which no text file contains, separates."""

    vocab_size = 256
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Gives the bytes of each text, as uint8."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Gives the text; tokens above 255 are replaced too."""
        known = b"".join(bytes([t]) if t < 256 else b"\xff" for t in tokens)
        return known.decode(errors="replace")

    def find_separator(self, name: str) -> int:
        """Gives 0.

        Raises:
          ValueError: a name is given.
        """
        if name:
            raise ValueError(
                f"`separator` must be empty without a tokenizer, got {name!r}. "
                "Bytes are separated by byte 0."
            )
        return 0


class FileTokenizer:
    """A tokenizer in a JSON file of the package `tokenizers`.

    Args:
      path: of the file.

    Raises:
      ImportError: `tokenizers` is not installed.
      FileNotFoundError: there is no such file.
      ValueError: it is not one of `tokenizers`.
    """

    def __init__(self, path: pathlib.Path):
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                f"`tokenizers` must be installed to read {str(path)!r}, got {error}. "
                'Run: pip install "mixprec[train]".'
            ) from error
        if not path.is_file():
            raise FileNotFoundError(
                f"`tokenizer` must be a tokenizer's JSON file, got {str(path)!r}, "
                f"which is none, as seen from {pathlib.Path.cwd()}. Correct the path."
            )
        content = path.read_bytes()
        self._name = str(path)
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ValueError(
                f"`tokenizer` must be a JSON file of `tokenizers`, got {self._name!r}: "
                f"{error}. Save one with Tokenizer.save."
            ) from error
        # The file may ask for what suits single sentences.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A text that spells a special token out must not end a document.
        self._tokenizer.encode_special_tokens = True
        self._ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values()) + 1  # ids may have gaps
        self.identity = hashlib.sha256(content).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Gives the tokens of each text, as uint32; texts in parallel threads."""
        encoded = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [np.asarray(each.ids, np.uint32) for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """Gives the text, special tokens included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def find_separator(self, name: str) -> int:
        """Gives the token of this name, or of the first of SEPARATORS that it knows.

        Raises:
          ValueError: it knows none of them.
        """
        for each in [name] if name else SEPARATORS:
            if each in self._ids:
                return self._ids[each]
        raise ValueError(
            f"`separator` must be a token of {self._name!r}, got "
            f"{repr(name) if name else 'none of ' + ', '.join(SEPARATORS)}. "
            "Name the one that ends a document by --separator."
        )


def load(path: str) -> Tokenizer:
    """Gives the tokenizer in a file; that of bytes for ""."""
    if not path:
        return ByteTokenizer()
    return FileTokenizer(pathlib.Path(path).expanduser())
