"""Batches of tokens: from which corpora, in which portions, in which order.

    files -> corpora (training, validation) -> windows -> order by grain -> batches

A batch is chosen as numbers of windows, and only then read: so several processes can
each read their own rows of it.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence

import grain
import numpy as np

from mixprec.training import corpus as corpus_lib
from mixprec.training import fingerprint as fingerprint_lib
from mixprec.training import mixture, text, tokens
from mixprec.training import tokenizer as tokenizer_lib

STANDARD_LIBRARY = text.STANDARD_LIBRARY
VOCAB_SIZE = tokenizer_lib.ByteTokenizer.vocab_size
TOKEN_DTYPES = ("uint16", "uint32")

_AS_THE_DATA_SAY = -1
_ALL = slice(None)
_COUNTED = 2**25  # tokens at most whose frequencies are counted
# Batches read ahead, and the threads that read them.
_READ_OPTIONS = grain.ReadOptions(num_threads=8, prefetch_buffer_size=16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on, and in what portions.

    Attributes:
      path: "stdlib", or a file, a folder (all files below it) or a glob; of UTF-8 text
        or of tokens (`.bin`, `.array_record`). Or a mixture: "path=weight, ...".
      sequence_length: tokens that a prediction may look back on.
      batch_size: sequences in one optimizer step.
      validation_fraction: of the files, chosen by a hash of their paths; of the tokens,
        the last ones, if there is one file only.
      tokenizer: the JSON file of the tokenizer that made the tokens; "" for bytes, or
        if it is not at hand.
      token_dtype: of tokens in files that do not say: `.bin` without a header and
        `.array_record`.
      separator: the token between documents; -1 for the one that the data name.
      document_mask: whether a prediction may look back on its own document only.

    Raises:
      ValueError: a value out of its range.
    """

    path: str
    sequence_length: int
    batch_size: int
    validation_fraction: float
    tokenizer: str = ""
    token_dtype: str = "uint16"
    separator: int = _AS_THE_DATA_SAY
    document_mask: bool = False

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(
                "`path` must be 'stdlib', a file, a folder or a glob, got ''. "
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
        if self.token_dtype not in TOKEN_DTYPES:
            raise ValueError(
                f"`token_dtype` must be one of {', '.join(TOKEN_DTYPES)}, got "
                f"{self.token_dtype!r}. Correct config.data.token_dtype."
            )
        if self.separator < _AS_THE_DATA_SAY:
            raise ValueError(
                f"`separator` must be a token, or {_AS_THE_DATA_SAY} for the one that "
                f"the data name, got {self.separator}. Correct config.data.separator."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Corpora, split and ready to be read.

    Attributes:
      config: what it was made from.
      seed: of the order of training windows.
      corpora: one, or those of the mixture.
      weights: share of each in every batch; they add up to 1.
      vocab_size: above every token.
      tokenizer: that of the tokens; None if it is not at hand.
      mask_separator: the token at which a prediction stops to look back; None if it
        looks on.
    """

    config: DataConfig
    seed: int
    corpora: tuple[corpus_lib.Corpus, ...]
    weights: tuple[float, ...]
    vocab_size: int
    tokenizer: tokenizer_lib.Tokenizer | None
    mask_separator: int | None

    @property
    def description(self) -> str:
        """For people: where from, how many files and tokens."""
        if len(self.corpora) == 1:
            return f"data: {self.corpora[0].description}"
        shares = zip(self.corpora, self.weights, strict=True)
        return "\n".join(
            f"data, {weight:.1%}: {corpus.description}" for corpus, weight in shares
        )

    @property
    def unit(self) -> str:
        """What a token is, for people: "byte" or "token"."""
        return "byte" if {c.unit for c in self.corpora} == {"byte"} else "token"

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the data and of the split between training and validation.

        Of all text, and of samples from files of tokens: see `corpus.load`.
        """
        if len(self.corpora) == 1:
            return self.corpora[0].fingerprint
        return fingerprint_lib.of_parts([corpus.fingerprint for corpus in self.corpora])

    @functools.cached_property
    def baseline_loss(self) -> float:
        """What predicting by the frequency of tokens in training costs, in nats each.

        The cross-entropy of the validation tokens; one is added to each count. Of more
        than 2^25 tokens in training or validation, of so many spread over all.
        """
        frequencies = np.zeros(self.vocab_size)
        for corpus, weight in zip(self.corpora, self.weights, strict=True):
            counted = tokens.sample(corpus.train, _COUNTED)
            counts = np.bincount(counted, minlength=self.vocab_size) + 1
            frequencies += weight * (counts / counts.sum())
        log_frequencies = np.log(frequencies)
        losses = (
            -log_frequencies[tokens.sample(corpus.validation, _COUNTED)].mean()
            for corpus in self.corpora
        )
        return float(sum(map(operator.mul, self.weights, losses)))

    def train_iterator(self, rows: slice = _ALL) -> grain.DatasetIterator:
        """Gives endless batches; each pass over the windows is shuffled anew.

        Args:
          rows: of each batch, to be read here. The batches, and the iterator's state,
            are the same whatever rows are read.

        Returns:
          An iterator of [rows, sequence_length + 1] int32, whose state
          `grain.checkpoint.CheckpointSave` and `CheckpointRestore` take.
        """
        length = self.config.sequence_length
        every = tokens.Windows([r for c in self.corpora for r in c.train], length)
        parts, first = [], 0
        for place, corpus in enumerate(self.corpora):
            number = len(tokens.Windows(corpus.train, length))
            # Equally long corpora are not to be walked through alike.
            order = grain.MapDataset.range(first, first + number)
            order = order.seed((self.seed + place) % 2**32)
            parts.append(order.shuffle().repeat())
            first += number
        order = parts[0]
        if len(parts) > 1:
            order = grain.MapDataset.mix(parts, list(self.weights))
        batches = order.batch(self.config.batch_size, drop_remainder=True)
        read = batches.map(lambda batch: _stack(every, batch[rows]))
        return iter(read.to_iter_dataset(_READ_OPTIONS))

    def validation_batches(self, number: int, rows: slice = _ALL) -> list[np.ndarray]:
        """Gives the same batches each time, spread evenly over the validation tokens.

        Args:
          number: how many at most; fewer if there are not enough windows.
          rows: of each batch, to be read here.

        Returns:
          [rows, sequence_length + 1] int32 arrays.
        """
        size = self.config.batch_size
        parts = [
            tokens.Windows(corpus.validation, self.config.sequence_length)
            for corpus in self.corpora
        ]
        for windows, weight in zip(parts, self.weights, strict=True):
            number = min(number, max(1, int(len(windows) / weight) // size))
        boundaries = np.rint(np.cumsum([0.0, *self.weights]) * number * size)
        chosen = [
            (windows, place)
            for windows, share in zip(parts, np.diff(boundaries), strict=True)
            for place in windows.spread(int(share))
        ]
        return [
            np.stack([windows[place] for windows, place in chosen[start:][:size][rows]])
            for start in range(0, number * size, size)
        ]


def load(config: DataConfig, *, seed: int, vocab_size: int = VOCAB_SIZE) -> Dataset:
    """Finds and splits the corpora; reads text, and opens files of tokens.

    Args:
      config: what to read.
      seed: of the order of training windows.
      vocab_size: of the model; above every token.

    Returns:
      The corpora.

    Raises:
      FileNotFoundError: a path, or anything that its glob matches, does not exist.
      ImportError: a tokenizer's file is named and `tokenizers` is not installed.
      ValueError: a file does not hold what its name promises, or a token that the
        vocabulary has not; corpora, tokenizer and model do not fit together; or too
        little data for one batch of training or of validation.
      OSError: a file cannot be read.
    """
    parts = mixture.parse(config.path)
    corpora = tuple(
        corpus_lib.load(
            part.path,
            validation_fraction=config.validation_fraction,
            vocab_size=vocab_size,
            token_dtype=config.token_dtype,
        )
        for part in parts
    )
    tokenizer = _find_tokenizer(config, corpora)
    sizes = {corpus.path: corpus.vocab_size for corpus in corpora}
    if config.tokenizer and tokenizer is not None:
        sizes[config.tokenizer] = tokenizer.vocab_size
    for name, size in sizes.items():
        if size is not None and size > vocab_size:
            raise ValueError(
                f"`vocab_size` must be at least {size:,}, that of {name!r}, got "
                f"{vocab_size:,}. Correct config.model.vocab_size."
            )
    for corpus, part in zip(corpora, parts, strict=True):
        _check_size(config, corpus, part.weight)
        for rows in (corpus.train, corpus.validation):
            corpus_lib.probe(rows, config.sequence_length)
    known = [size for size in sizes.values() if size is not None]
    is_known = all(corpus.vocab_size is not None for corpus in corpora)
    return Dataset(
        config=config,
        seed=seed,
        corpora=corpora,
        weights=tuple(part.weight for part in parts),
        vocab_size=max(known) if is_known else vocab_size,
        tokenizer=tokenizer,
        mask_separator=_find_separator(config, corpora, vocab_size),
    )


def _stack(windows: tokens.Windows, places: Sequence[int]) -> np.ndarray:
    return np.stack([windows[int(place)] for place in places])


def _find_tokenizer(
    config: DataConfig, corpora: Sequence[corpus_lib.Corpus]
) -> tokenizer_lib.Tokenizer | None:
    """Gives the tokenizer that all corpora were made with, if it is at hand."""
    known = {c.tokenizer: c.path for c in corpora if c.tokenizer is not None}
    if len(known) > 1:
        raise ValueError(
            "`path` must mix what one tokenizer made, got different ones for "
            f"{' and '.join(map(repr, known.values()))}. Prepare both with the same."
        )
    tokenizer = tokenizer_lib.load(config.tokenizer)
    for identity, path in known.items():
        if config.tokenizer and identity != tokenizer.identity:
            what = "bytes" if identity == "bytes" else "another tokenizer's tokens"
            raise ValueError(
                f"`tokenizer` must be the one that made {path!r}, which is {what}, got "
                f"{config.tokenizer!r}. Correct config.data.tokenizer, or make tokens "
                "of the text: python -m mixprec.training.prepare --help."
            )
    if config.tokenizer or tokenizer.identity in known:
        return tokenizer
    return None


def _find_separator(
    config: DataConfig, corpora: Sequence[corpus_lib.Corpus], vocab_size: int
) -> int | None:
    if not config.document_mask:
        return None
    if config.separator != _AS_THE_DATA_SAY:
        if config.separator >= vocab_size:
            raise ValueError(
                f"`separator` must be below `vocab_size` = {vocab_size:,}, got "
                f"{config.separator:,}. Correct config.data.separator."
            )
        return config.separator
    found = {corpus.separator for corpus in corpora}
    if len(found) > 1 or None in found:
        raise ValueError(
            "`separator` must be given for `document_mask`, as the data name "
            f"{' and '.join(sorted(map(str, found)))}, got {config.separator}. Set "
            "config.data.separator, or config.data.document_mask=False."
        )
    (separator,) = found
    return separator


def _check_size(config: DataConfig, corpus: corpus_lib.Corpus, weight: float) -> None:
    """Refuses a corpus that cannot fill its share of one batch."""
    length = config.sequence_length
    share = max(1, round(config.batch_size * weight))
    for name, rows in (("training", corpus.train), ("validation", corpus.validation)):
        if len(tokens.Windows(rows, length)) < share:
            raise ValueError(
                f"{corpus.path!r} must give {name} at least {share * length + 1:,} "
                f"{corpus.unit}s, one batch of {share} sequences of {length}, got "
                f"{sum(len(row) for row in rows):,}. Take more data or lower "
                "config.data.batch_size or config.data.sequence_length."
            )
