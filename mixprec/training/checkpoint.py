"""Checkpoints by Orbax: all that a run needs to go on as if never interrupted."""

import dataclasses
import json
import pathlib
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp

from mixprec.training.state import TrainState

_FOLDER = "checkpoints"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often to save, and what to keep.

    Attributes:
      every: optimizer steps between checkpoints; the last step is always saved.
      keep_last: how many of the newest to keep.
      keep_best: how many of those with the lowest validation loss to keep besides.

    Raises:
      ValueError: a value out of its range.
    """

    every: int
    keep_last: int
    keep_best: int

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"`{name}` must be at least {least}, got {getattr(self, name)}. "
                    f"Correct config.checkpoint.{name}."
                )


class Checkpointer:
    """Saves and restores training state, data position and the run's description.

    Args:
      workdir: an existing folder; checkpoints go to `checkpoints/` in it.
      config: what to keep.
    """

    def __init__(self, workdir: pathlib.Path, config: CheckpointConfig):
        policies = ocp.checkpoint_managers
        self._manager = ocp.CheckpointManager(
            (workdir / _FOLDER).resolve(),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "data": ocp.JsonCheckpointHandler(),
                "run": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(config.keep_last),
                        policies.BestN(
                            get_metric_fn=lambda metrics: metrics["val_loss"],
                            reverse=True,
                            n=config.keep_best,
                            keep_checkpoints_without_metrics=False,
                        ),
                    ]
                ),
                # Left behind by a run that was killed while it saved.
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
            ),
        )

    def latest_step(self) -> int | None:
        """Gives the step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(
        self,
        state: TrainState,
        data: grain.DatasetIterator,
        run: dict[str, Any],
        *,
        val_loss: float | None,
    ) -> None:
        """Starts to save; goes on in the background once the state has been copied.

        Args:
          state: at the step that the checkpoint is named after.
          data: the iterator, at the batch that comes next.
          run: what `compare_runs` compares on resuming; JSON values.
          val_loss: ranks the checkpoint; None if not measured at this step.
        """
        self._manager.save(
            int(state.step),
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                # The same in every process, so written once: see `data.Dataset`.
                data=ocp.args.JsonSave(data.get_state()),
                run=ocp.args.JsonSave(run),
            ),
            metrics=None if val_loss is None else {"val_loss": val_loss},
        )

    def restore_run(self, step: int) -> dict[str, Any]:
        """Gives the run's description as it was saved."""
        restored = self._manager.restore(
            step, args=ocp.args.Composite(run=ocp.args.JsonRestore())
        )
        return restored["run"]

    def restore(
        self, step: int, state: TrainState, data: grain.DatasetIterator
    ) -> TrainState:
        """Restores a checkpoint.

        Args:
          step: of the checkpoint.
          state: a state of the same structure, shapes, dtypes and shardings.
          data: an iterator over the same data; it is moved to the saved position.

        Returns:
          The state as saved.

        Raises:
          ValueError: structure, shapes or dtypes differ. Orbax would cast silently.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        self._check_types(step, abstract)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract),
                data=ocp.args.JsonRestore(),
            ),
        )
        data.set_state(restored["data"])
        return restored["state"]

    def close(self) -> None:
        """Waits for saves under way."""
        self._manager.close()

    def _check_types(self, step: int, expected: TrainState) -> None:
        saved = self._manager.item_metadata(step)["state"]
        saved_types = _types(saved)
        for path, (shape, dtype) in _types(expected).items():
            found = saved_types.pop(path, None)
            if found != (shape, dtype):
                described = (
                    "nothing" if found is None else f"{found[1]}{list(found[0])}"
                )
                raise ValueError(
                    f"checkpoint {step}: `{path}` must be {dtype}{list(shape)}, got "
                    f"{described}. Resume with the config of the run that saved it, or "
                    "choose another --workdir."
                )
        if saved_types:
            raise ValueError(
                f"checkpoint {step} must hold what the model has, got "
                f"{', '.join(sorted(saved_types))} besides. Resume with the config of "
                "the run that saved it, or choose another --workdir."
            )


def compare_runs(
    saved: dict[str, Any],
    current: dict[str, Any],
    step: int,
    *,
    fixed: tuple[str, ...],
) -> list[str]:
    """Tells what a run that resumes has changed.

    Args:
      saved: the description in the checkpoint: nested dicts of JSON values.
      current: that of the run which resumes.
      step: of the checkpoint, for the message.
      fixed: keys, and beginnings of dotted keys, that must not change.

    Returns:
      One line for each change: the key and both values.

    Raises:
      ValueError: a fixed key has changed.
    """
    before, now = _flatten(saved), _flatten(json.loads(json.dumps(current)))
    changes = {
        key: f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }
    forbidden = [
        change
        for key, change in changes.items()
        if any(f"{key}.".startswith(f"{beginning}.") for beginning in fixed)
    ]
    if forbidden:
        raise ValueError(
            f"a resumed run must be the one that saved checkpoint {step}, but "
            f"{'; '.join(forbidden)}. Change it back, or choose another --workdir."
        )
    return list(changes.values())


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat


def _types(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        "/".join(_name(key) for key in path): (tuple(leaf.shape), str(leaf.dtype))
        for path, leaf in flat
    }


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise AssertionError(f"unknown kind of key {key!r}")
