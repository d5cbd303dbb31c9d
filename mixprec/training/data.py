"""Real text as batches of bytes: which files, how they are split, in which order.

The default corpus is on every machine: the source of Python's own standard library. The
same Python gives the same bytes, so the same batches.

    files -> split by a hash of each path -> one array of bytes -> windows -> grain
"""

import dataclasses
import functools
import glob
import hashlib
import math
import pathlib
import platform
import sysconfig
from collections.abc import Sequence

import grain
import numpy as np

STANDARD_LIBRARY = "stdlib"
VOCAB_SIZE = 256  # tokens are bytes

# Half of the standard library is tests, which are much alike.
_LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
# How this Python was compiled: differs between machines with the same version.
_LEFT_OUT_FILES = {"_sysconfigdata*.py", "config-*/*.py"}
# Between files. No text file contains it, so a model can tell where one ends.
_SEPARATOR = b"\0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on, and in what portions.

    Attributes:
      path: "stdlib", or a text file, a folder (all files below it) or a glob; UTF-8.
      sequence_length: bytes that a prediction may look back on.
      batch_size: sequences in one optimizer step.
      validation_fraction: of the files, chosen by a hash of their paths; of the bytes,
        the last ones, if there is one file only.

    Raises:
      ValueError: a value out of its range.
    """

    path: str
    sequence_length: int
    batch_size: int
    validation_fraction: float

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(
                "`path` must be 'stdlib', a text file, a folder or a glob, got ''. "
                "Correct config.data.path."
            )
        for name in ("sequence_length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be positive, got {getattr(self, name)}. "
                    f"Correct config.data.{name}."
                )
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                "`validation_fraction` must lie between 0 and 1, got "
                f"{self.validation_fraction}. Correct config.data.validation_fraction."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """A corpus, split and ready to be read.

    Attributes:
      config: what it was made from.
      seed: of the order of training windows.
      train: [n] uint8.
      validation: [m] uint8.
      description: for people: where from, how many files and bytes.
    """

    config: DataConfig
    seed: int
    train: np.ndarray
    validation: np.ndarray
    description: str

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all bytes and of the split between training and validation."""
        digest = hashlib.sha256(len(self.train).to_bytes(8, "little"))
        digest.update(self.train.data)
        digest.update(self.validation.data)
        return digest.hexdigest()

    @functools.cached_property
    def baseline_loss(self) -> float:
        """What predicting by the frequency of bytes in training costs, in nats a byte.

        The cross-entropy of the validation bytes; one is added to each count.
        """
        counts = np.bincount(self.train, minlength=VOCAB_SIZE) + 1
        log_frequencies = np.log(counts / counts.sum())
        return float(-log_frequencies[self.validation].mean())

    def train_iterator(self) -> grain.DatasetIterator:
        """Gives endless batches; each pass over the windows is shuffled anew.

        Returns:
          An iterator of [batch_size, sequence_length + 1] int32, whose state
          `grain.checkpoint.CheckpointSave` and `CheckpointRestore` take.
        """
        windows = _Windows(self.train, self.config.sequence_length)
        dataset = grain.MapDataset.source(windows).seed(self.seed).shuffle().repeat()
        return iter(dataset.batch(self.config.batch_size, drop_remainder=True))

    def validation_batches(self, number: int) -> list[np.ndarray]:
        """Gives the same batches each time, spread evenly over the validation bytes.

        Args:
          number: how many at most; fewer if there are not enough windows.

        Returns:
          [batch_size, sequence_length + 1] int32 arrays.
        """
        windows = _Windows(self.validation, self.config.sequence_length)
        size = self.config.batch_size
        number = min(number, len(windows) // size)
        chosen = np.linspace(0, len(windows) - 1, number * size).astype(int)
        return [
            np.stack([windows[place] for place in part])
            for part in chosen.reshape(number, size)
        ]


def load(config: DataConfig, *, seed: int) -> Dataset:
    """Reads and splits the corpus.

    Args:
      config: what to read.
      seed: of the order of training windows.

    Returns:
      The corpus.

    Raises:
      FileNotFoundError: the path, or anything that its glob matches, does not exist.
      ValueError: a folder without files, a file that is not UTF-8 text, or too little
        text for one batch of training or of validation.
      OSError: a file cannot be read.
    """
    root, files = _find_files(config.path)
    texts = {path.relative_to(root).as_posix(): _read(path) for path in files}
    if len(texts) == 1:
        (text,) = texts.values()
        train, validation = _split_bytes(text, config.validation_fraction)
        split = "the last bytes are for validation"
    else:
        train_files, validation_files = _split_files(texts, config.validation_fraction)
        train, validation = _join(texts, train_files), _join(texts, validation_files)
        split = f"{len(validation_files)} files are for validation"
    for name, part in (("training", train), ("validation", validation)):
        windows = len(_Windows(part, config.sequence_length))
        if windows < config.batch_size:
            needed = config.batch_size * config.sequence_length + 1
            raise ValueError(
                f"{config.path!r} must give {name} at least {needed:,} bytes, one "
                f"batch of {config.batch_size} sequences of "
                f"{config.sequence_length}, got {len(part):,}. Take more text or lower "
                "config.data.batch_size or config.data.sequence_length."
            )
    return Dataset(
        config=config,
        seed=seed,
        train=train,
        validation=validation,
        description=(
            f"data: {_describe(config.path)}, {len(files):,} files, "
            f"{len(train):,} bytes for training, {len(validation):,} for validation "
            f"({split})"
        ),
    )


class _Windows(Sequence):
    """Windows over bytes, each one byte longer than a sequence, as inputs and targets.

    Neighbours share one byte, so that each byte but the first is predicted once.
    """

    def __init__(self, data: np.ndarray, sequence_length: int):
        self._data = data
        self._length = sequence_length

    def __len__(self) -> int:
        return max(0, (len(self._data) - 1) // self._length)

    def __getitem__(self, place: int) -> np.ndarray:  # type: ignore[override]
        start = place * self._length
        return self._data[start : start + self._length + 1].astype(np.int32)


def _find_files(path: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """Gives the folder that relative paths begin at, and the files in a fixed order."""
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
                "Correct config.data.path."
            )
        return expanded, _in_order(files, expanded)
    matches = [pathlib.Path(m) for m in glob.glob(str(expanded), recursive=True)]
    files = [match for match in matches if match.is_file()]
    if not files:
        what = "match" if glob.has_magic(path) else "be"
        raise FileNotFoundError(
            f"{path!r} must {what} a text file (or be 'stdlib' or a folder), got "
            f"{'something else' if matches else 'nothing'} there, as seen from "
            f"{pathlib.Path.cwd()}. Correct config.data.path."
        )
    # The part of the glob before its first wildcard.
    root = next(
        folder for folder in expanded.parents if not glob.has_magic(str(folder))
    )
    return root, _in_order(files, root)


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


def _read(path: pathlib.Path) -> bytes:
    text = path.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} must be UTF-8 text, got byte {text[error.start]:#04x} at "
            f"{error.start}. Convert it, or choose the text files by a glob in "
            "config.data.path."
        ) from error
    return text


def _split_bytes(text: bytes, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    data = np.frombuffer(text, np.uint8)
    boundary = len(data) - math.ceil(len(data) * fraction)
    return data[:boundary], data[boundary:]


def _split_files(
    names: Sequence[str] | dict[str, bytes], fraction: float
) -> tuple[list[str], list[str]]:
    """Splits by a hash, so that a file stays on its side when others come and go.

    Of few files chance may leave all on one side: then the one with the least hash is
    for validation.
    """

    def share(name: str) -> float:
        digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    least = min(names, key=share)
    validation = [name for name in names if share(name) < fraction or name == least]
    chosen = set(validation)
    return [name for name in names if name not in chosen], validation


def _join(texts: dict[str, bytes], names: list[str]) -> np.ndarray:
    return np.frombuffer(_SEPARATOR.join(texts[name] for name in names), np.uint8)


def _describe(path: str) -> str:
    if path == STANDARD_LIBRARY:
        return f"standard library of Python {platform.python_version()}"
    return path
