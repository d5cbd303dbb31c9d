"""What is measured in training, and where it is written."""

import json
import pathlib
from typing import Any, Protocol

import flax
import jax
import tensorboardX
from clu import metrics

_FILE = "metrics.jsonl"


@flax.struct.dataclass
class StepMetrics(metrics.Collection):
    """Of one optimizer step; `loss` in nats a token, averaged over its microbatches."""

    loss: metrics.Average.from_output("loss")  # type: ignore[valid-type]
    gradient_norm: metrics.LastValue.from_output("gradient_norm")  # type: ignore[valid-type]
    learning_rate: metrics.LastValue.from_output("learning_rate")  # type: ignore[valid-type]


@flax.struct.dataclass
class ValidationMetrics(metrics.Collection):
    """Over all validation batches; `val_loss` in nats a token."""

    val_loss: metrics.Average.from_output("loss")  # type: ignore[valid-type]


def to_floats(*collections: metrics.Collection) -> dict[str, float]:
    """Computes the metrics of several steps on the host; waits for the device."""
    # Arrays of several processes cannot meet those of one, as `empty()` has them.
    total, *others = jax.device_get(collections)
    for other in others:
        total = total.merge(other)
    return {name: float(value) for name, value in total.compute().items()}


class Writer(Protocol):
    """Where metrics go."""

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Writes some scalars of a step."""

    def close(self) -> None:
        """Ends writing."""


def make_writer(workdir: pathlib.Path, *, resume_step: int) -> Writer:
    """Gives what writes metrics: in the first process `MetricsWriter`, else nothing."""
    if jax.process_index() == 0:
        return MetricsWriter(workdir, resume_step=resume_step)
    return _NoWriter()


class _NoWriter:
    def write(self, step: int, scalars: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class MetricsWriter:
    """Writes scalars to `metrics.jsonl` and to a TensorBoard event file.

    A resumed run writes the steps after its checkpoint a second time, so what an
    earlier run wrote after that step is dropped.

    Args:
      workdir: an existing folder.
      resume_step: the step of the checkpoint that the run goes on from; 0 for a new
        run.
    """

    def __init__(self, workdir: pathlib.Path, *, resume_step: int):
        path = workdir / _FILE
        kept = _lines_until(path, resume_step) if path.exists() else []
        rewritten = path.with_suffix(".tmp")  # or a kill meanwhile would lose them all
        rewritten.write_text("".join(kept))
        rewritten.replace(path)
        self._file = path.open("a")
        self._tensorboard = tensorboardX.SummaryWriter(
            str(workdir), purge_step=resume_step + 1 if resume_step else None
        )

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Writes one JSON object, `step` first, and one event for each scalar."""
        self._file.write(json.dumps({"step": step, **scalars}) + "\n")
        self._file.flush()
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes both files."""
        self._file.close()
        self._tensorboard.close()


def _lines_until(path: pathlib.Path, last_step: int) -> list[str]:
    """Gives the complete lines of steps up to `last_step`."""
    kept = []
    # A crash may leave any bytes where the last write was cut off.
    for line in path.read_text(errors="replace").split("\n"):
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            break
        if step <= last_step:
            kept.append(line + "\n")
    return kept


def is_finite(scalars: dict[str, Any]) -> bool:
    """Tells whether no scalar is NaN or infinite."""
    return all(abs(value) < float("inf") for value in scalars.values())
