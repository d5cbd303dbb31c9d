"""Hashes of large files by samples: to notice a change, not to prove equality."""

import hashlib
import pathlib

import numpy as np

_PAGE = 4096  # bytes
_PAGES = 64  # 256 KiB a file; a smaller file is hashed whole


def of_file(path: pathlib.Path) -> str:
    """Hashes a file's size and 64 pages of 4 KiB spread evenly over it.

    The first page (with any header) and the last are among them. A change that keeps
    the size and misses all pages goes unnoticed: terabytes cannot be read whole each
    time that a run starts.

    Returns:
      64 hexadecimal digits.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= _PAGE * _PAGES:
            digest.update(file.read())
        else:
            for start in np.linspace(0, size - _PAGE, _PAGES).astype(int).tolist():
                file.seek(start)
                digest.update(file.read(_PAGE))
    return digest.hexdigest()


def of_parts(parts: list[str]) -> str:
    """Hashes texts in their order; ("ab", "c") and ("a", "bc") differ.

    Returns:
      64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode(errors="surrogateescape")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()
