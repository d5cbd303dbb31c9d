"""Mixtures of data as text: "books.bin=0.7, web/*.bin=0.3"."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One of the corpora that are mixed.

    Attributes:
      path: as `config.data.path` takes it alone.
      weight: its share of the sequences in training and validation; all shares add up
        to 1.
    """

    path: str
    weight: float


def parse(text: str) -> tuple[Part, ...]:
    """Reads a path, or "path=weight, path=weight, ...".

    It is a mixture if any of its parts ends in "=" and a number: the name of a file may
    contain commas and equals signs. Weights need not add up to 1.

    Raises:
      ValueError: a part of a mixture has no path, no weight or one that is not positive
        and finite, or two have the same path.
    """
    pieces = [piece.strip() for piece in text.split(",")]
    if all(_weight(piece) is None for piece in pieces):
        return (Part(path=text, weight=1.0),)
    weights: dict[str, float] = {}
    for piece in pieces:
        path, _, written = piece.rpartition("=")
        path, weight = path.strip(), _weight(piece)
        if weight is None or not path:
            raise ValueError(
                "`path` must give each part of a mixture as path=weight, got "
                f"{piece!r} in {text!r}. Correct config.data.path."
            )
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(
                f"`path` must give each part a positive, finite weight, got {written} "
                f"for {path!r}. Leave the part out, or correct config.data.path."
            )
        if path in weights:
            raise ValueError(
                f"`path` must name each part of a mixture once, got {path!r} twice. "
                "Add up its weights in config.data.path."
            )
        weights[path] = weight
    total = sum(weights.values())
    return tuple(
        Part(path=path, weight=weight / total) for path, weight in weights.items()
    )


def _weight(piece: str) -> float | None:
    """Gives the number behind the last equals sign, or None."""
    _, equals, written = piece.rpartition("=")
    try:
        return float(written) if equals else None
    except ValueError:
        return None
