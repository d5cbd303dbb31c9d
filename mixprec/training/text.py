"""Text: which files a path means, what is in them, which of them are for validation.

The default corpus is on every machine: the source of Python's own standard library. The
same Python gives the same bytes.
"""

import glob
import hashlib
import pathlib
import platform
import sysconfig
from collections.abc import Sequence

STANDARD_LIBRARY = "stdlib"
# Between documents. No text file contains it, so a model can tell where one ends.
SEPARATOR = 0

# Half of the standard library is tests, which are much alike.
_LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
# How this Python was compiled: differs between machines with the same version.
_LEFT_OUT_FILES = {"_sysconfigdata*.py", "config-*/*.py"}


def find(path: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """Finds the files that a path means.

    Args:
      path: "stdlib", or a file, a folder (all files below it) or a glob.

    Returns:
      The folder that relative paths begin at, and the files in a fixed order.

    Raises:
      FileNotFoundError: the path, or anything that its glob matches, does not exist.
      ValueError: a folder without files.
    """
    if path == STANDARD_LIBRARY:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in root.rglob("*.py") if _belongs(file, root)]
        return root, _in_order(files, root)
    expanded = pathlib.Path(path).expanduser()
    if expanded.is_file():
        return expanded.parent, [expanded]
    if expanded.is_dir():
        files = [
            file
            for file in expanded.rglob("*")
            if file.is_file() and not _is_hidden(file.relative_to(expanded))
        ]
        if not files:
            raise ValueError(
                f"{path!r} must hold text files, but the folder is empty. "
                "Correct the path."
            )
        return expanded, _in_order(files, expanded)
    matches = [pathlib.Path(m) for m in glob.glob(str(expanded), recursive=True)]
    files = [match for match in matches if match.is_file()]
    if not files:
        what = "match" if glob.has_magic(path) else "be"
        raise FileNotFoundError(
            f"{path!r} must {what} a text file (or be 'stdlib' or a folder), got "
            f"{'something else' if matches else 'nothing'} there, as seen from "
            f"{pathlib.Path.cwd()}. Correct the path."
        )
    # The part of the glob before its first wildcard.
    root = next(
        folder for folder in expanded.parents if not glob.has_magic(str(folder))
    )
    return root, _in_order(files, root)


def read(path: pathlib.Path) -> bytes:
    """Gives the bytes of a text file.

    Raises:
      ValueError: they are not UTF-8.
    """
    text = path.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} must be UTF-8 text, got byte {text[error.start]:#04x} at "
            f"{error.start}. Convert it, or choose the text files by a glob."
        ) from error
    return text


def share(name: str) -> float:
    """Hashes a name to a number from 0 to 1; those below a fraction are for validation.

    So a file stays on its side when others come and go.
    """
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_names(names: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """Gives the names for training and those for validation, by `share`.

    Of few files chance may leave all on one side: then the one with the least hash is
    for validation.
    """
    least = min(names, key=share)
    validation = [name for name in names if share(name) < fraction or name == least]
    chosen = set(validation)
    return [name for name in names if name not in chosen], validation


def describe(path: str) -> str:
    """Names the text for people."""
    if path == STANDARD_LIBRARY:
        return f"standard library of Python {platform.python_version()}"
    return path


def _in_order(files: list[pathlib.Path], root: pathlib.Path) -> list[pathlib.Path]:
    """Sorts by relative path, by code points: folders list differently on machines."""
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _belongs(file: pathlib.Path, root: pathlib.Path) -> bool:
    relative = file.relative_to(root)
    return not (
        _LEFT_OUT_FOLDERS.intersection(relative.parts[:-1])
        or any(relative.match(pattern) for pattern in _LEFT_OUT_FILES)
        or _is_hidden(relative)
        or not file.is_file()
    )


def _is_hidden(relative: pathlib.Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)
