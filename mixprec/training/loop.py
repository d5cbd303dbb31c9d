"""The training loop: from configs and a model to a trained one in a folder."""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import rich.console
import rich.progress
from clu import parameter_overview

from mixprec.training import checkpoint as checkpoint_lib
from mixprec.training import data as data_lib
from mixprec.training import metrics, sample, sharding, state, step

_CONFIG_FILE = "config.json"
# A resumed run must agree on these with the run that saved the checkpoint; on the rest
# of the config it may differ, and says so.
_FIXED = ("config.model", "config.data", "config.seed", "data_fingerprint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long to train, and how often to look.

    Attributes:
      steps: optimizer steps in all, those before a resumption included.
      microbatches: parts that a batch is split into, to save memory.
      log_every: steps between entries in the metrics.
      validate_every: steps between validations; one follows the last step too.
      validation_batches: in each validation.

    Raises:
      ValueError: a value is not positive.
    """

    steps: int
    microbatches: int
    log_every: int
    validate_every: int
    validation_batches: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"`{field.name}` must be positive, got "
                    f"{getattr(self, field.name)}. Correct config.train.{field.name}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that a run is made of besides the model.

    Attributes:
      seed: of initial weights, order of data, stochastic rounding and sample; from 0
        to 2**32 - 1.
      dataset: what to train on.
      optimizer: how to update the weights.
      train: how long.
      layout: over which devices.
      checkpoint: what to save.
      sample: what to generate at the end.
      resolved: the whole config as JSON values, as it is written to `config.json`.

    Raises:
      ValueError: the batch cannot be split into the microbatches, or these over the
        devices, or the seed is out of its range.
    """

    seed: int
    dataset: data_lib.Dataset
    optimizer: state.OptimizerConfig
    train: LoopConfig
    layout: sharding.Layout
    checkpoint: checkpoint_lib.CheckpointConfig
    sample: sample.SampleConfig
    resolved: dict[str, Any]

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(
                f"`seed` must be from 0 to 2**32 - 1, got {self.seed}. "
                "Correct config.seed."
            )
        batch_size = self.dataset.config.batch_size
        if batch_size % self.train.microbatches:
            raise ValueError(
                "`microbatches` must divide the batch, got "
                f"{self.train.microbatches} for a batch of {batch_size}. "
                "Correct config.train.microbatches or config.data.batch_size."
            )
        size, length = self.microbatch.shape
        what = "config.data.batch_size / config.train.microbatches"
        self.layout.check_divides(
            {
                sharding.BATCH: (what, size),
                sharding.LENGTH: ("config.data.sequence_length", length),
            }
        )

    @property
    def microbatch(self) -> jax.ShapeDtypeStruct:
        """The shape of the tokens that pass through the model at once."""
        data = self.dataset.config
        size = data.batch_size // self.train.microbatches
        return jax.ShapeDtypeStruct((size, data.sequence_length), jnp.int32)


def train(
    model: nn.Module,
    config: RunConfig,
    workdir: pathlib.Path,
    console: rich.console.Console,
) -> dict[str, float]:
    """Trains, or goes on training from the newest checkpoint in `workdir`.

    Args:
      model: maps [batch, length] int32 tokens to logits; wrapped, if it is to round.
        See `step.token_loss` for what it takes besides with masked documents.
      config: see `RunConfig`.
      workdir: receives `checkpoints/`, `metrics.jsonl`, a TensorBoard event file and
        `config.json`; made if absent.
      console: for tables, progress and the sample.

    Returns:
      `val_loss` at the end and `baseline_loss`, that of the tokens' frequencies.

    Raises:
      FloatingPointError: the loss is not finite.
      ValueError, OSError: from the policy, a checkpoint or `workdir`; the message says
        what was expected and what to do.
    """
    dataset, steps = config.dataset, config.train.steps
    _make_workdir(workdir)
    optimizer = state.make_optimizer(config.optimizer, steps)
    boxes = state.make_boxes(model, dataset.config.sequence_length)
    train_state = state.init_state(
        model,
        optimizer,
        config.layout,
        seed=config.seed,
        sequence_length=dataset.config.sequence_length,
    )
    overview = parameter_overview.get_parameter_overview(
        train_state.params, include_stats=False
    )
    console.print(overview, markup=False, highlight=False)

    run = {"config": config.resolved, "data_fingerprint": dataset.fingerprint}
    with contextlib.closing(
        checkpoint_lib.Checkpointer(workdir, config.checkpoint)
    ) as checkpointer:
        rows = config.layout.rows(dataset.config.batch_size)
        batches = dataset.train_iterator(rows)
        train_state = _resume(checkpointer, train_state, batches, run, steps, console)
        if jax.process_index() == 0:
            text = json.dumps(config.resolved, indent=2) + "\n"
            (workdir / _CONFIG_FILE).write_text(text)
        with contextlib.closing(
            metrics.make_writer(workdir, resume_step=int(train_state.step))
        ) as writer:
            trainer = _Trainer(model, boxes, optimizer, config, writer, console)
            train_state, val_loss = trainer.run(train_state, batches, checkpointer, run)

    console.print(
        f"validation loss {val_loss:.4f} nats a {dataset.unit}; "
        f"{dataset.unit} frequencies alone {dataset.baseline_loss:.4f}"
    )
    if config.sample.length:
        _print_sample(model, train_state.params, config, console)
    console.print(f"in {workdir}: checkpoints/, {_CONFIG_FILE}, metrics.jsonl, events")
    return {"val_loss": val_loss, "baseline_loss": dataset.baseline_loss}


def _print_sample(
    model: nn.Module, params: Any, config: RunConfig, console: rich.console.Console
) -> None:
    tokenizer = config.dataset.tokenizer
    if tokenizer is None:
        console.print("no sample: config.data.tokenizer is not set")
        return
    text = sample.generate(
        model,
        params,
        config.sample,
        seed=config.seed,
        tokenizer=tokenizer,
        whole=config.layout.sharding(),
    )
    console.rule("sample")
    console.print(text, markup=False, highlight=False)
    console.rule()


class _Trainer:
    """The compiled steps and where their measurements go."""

    def __init__(
        self,
        model: nn.Module,
        boxes: Any,
        optimizer: optax.GradientTransformation,
        config: RunConfig,
        writer: metrics.Writer,
        console: rich.console.Console,
    ):
        self._config = config.train
        self._layout = config.layout
        self._checkpoint_every = config.checkpoint.every
        data = config.dataset.config
        self._tokens_per_step = data.batch_size * data.sequence_length
        self._validation = config.dataset.validation_batches(
            config.train.validation_batches, config.layout.rows(data.batch_size)
        )
        self._writer = writer
        self._console = console
        self._batch_size = data.batch_size
        self._train_step = step.make_train_step(
            model,
            optimizer,
            state.learning_rate_schedule(config.optimizer, config.train.steps),
            seed=config.seed,
            microbatches=config.train.microbatches,
            boxes=boxes,
            separator=config.dataset.mask_separator,
        )
        self._validation_step = step.make_validation_step(
            model, boxes, config.dataset.mask_separator
        )

    def run(
        self,
        train_state: state.TrainState,
        batches: Iterator[Any],
        checkpointer: checkpoint_lib.Checkpointer,
        run: dict[str, Any],
    ) -> tuple[state.TrainState, float]:
        """Trains up to the last step; gives the state and its validation loss."""
        first, last = int(train_state.step), self._config.steps
        val_loss = None
        with _progress(self._console) as progress:
            task = progress.add_task(
                "", total=last, completed=first, loss="-", tokens_per_second="-"
            )
            clock = _Clock(first)
            for done in range(first + 1, last + 1):
                tokens = self._place(next(batches))
                with self._layout.context():
                    train_state, measured = self._train_step(train_state, tokens)
                if done % self._config.log_every == 0 or done == last:
                    scalars = self._log(done, measured, clock)
                    progress.update(
                        task,
                        loss=f"{scalars['loss']:.4f}",
                        tokens_per_second=f"{scalars['tokens_per_second']:,.0f}",
                    )
                progress.update(task, completed=done)
                val_loss = None
                if done % self._config.validate_every == 0 or done == last:
                    with clock.stopped():
                        val_loss = self._validate(done, train_state)
                if done % self._checkpoint_every == 0 or done == last:
                    with clock.stopped():
                        _check_finite(done, metrics.to_floats(measured))
                        checkpointer.save(train_state, batches, run, val_loss=val_loss)
        if val_loss is None:
            val_loss = self._measure(train_state)
        return train_state, val_loss

    def _log(
        self, done: int, measured: metrics.StepMetrics, clock: "_Clock"
    ) -> dict[str, float]:
        scalars = metrics.to_floats(measured)
        _check_finite(done, scalars)
        scalars["tokens_per_second"] = self._tokens_per_step * clock.steps_per_second(
            done
        )
        self._writer.write(done, scalars)
        if not self._console.is_terminal:
            self._console.print(
                f"step {done}  loss {scalars['loss']:.4f}  "
                f"{scalars['tokens_per_second']:,.0f} tokens/s"
            )
        return scalars

    def _validate(self, done: int, train_state: state.TrainState) -> float:
        val_loss = self._measure(train_state)
        self._writer.write(done, {"val_loss": val_loss})
        self._console.print(f"step {done}  validation loss {val_loss:.4f}")
        return val_loss

    def _measure(self, train_state: state.TrainState) -> float:
        measured = []
        for batch in self._validation:
            tokens = self._place(batch)
            with self._layout.context():
                measured.append(self._validation_step(train_state.params, tokens))
        return metrics.to_floats(*measured)["val_loss"]

    def _place(self, batch: Any) -> jax.Array:
        return self._layout.place(batch, self._batch_size)


class _Clock:
    """Measures the speed of steps.

    Args:
      step: steps done when the clock starts.
    """

    def __init__(self, step: int):
        self._step = step
        self._since = time.perf_counter()

    def steps_per_second(self, step: int) -> float:
        """Gives the speed since the last call; call it when `step` has finished."""
        now = time.perf_counter()
        speed = (step - self._step) / max(now - self._since, 1e-9)
        self._step, self._since = step, now
        return speed

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leaves out the time that the block takes."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before


def _make_workdir(workdir: pathlib.Path) -> None:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"`workdir` must be a folder or a free name, got {str(workdir)!r}: "
            f"{error.strerror}. Choose another --workdir."
        ) from error


def _check_finite(done: int, scalars: dict[str, float]) -> None:
    if not metrics.is_finite(scalars):
        raise FloatingPointError(
            f"loss and gradient must be finite, got {scalars} at step {done}. "
            "Lower config.optimizer.learning_rate, or look in the rounding table for a "
            "tensor whose values overflow."
        )


def _resume(
    checkpointer: checkpoint_lib.Checkpointer,
    train_state: state.TrainState,
    batches: Any,
    run: dict[str, Any],
    steps: int,
    console: rich.console.Console,
) -> state.TrainState:
    """Gives the newest checkpoint's state and moves the data there, if there is one."""
    saved_step = checkpointer.latest_step()
    if saved_step is None:
        return train_state
    changes = checkpoint_lib.compare_runs(
        checkpointer.restore_run(saved_step), run, saved_step, fixed=_FIXED
    )
    if saved_step > steps:
        raise ValueError(
            f"`steps` must be at least {saved_step}, that of the newest checkpoint, "
            f"got {steps}. Raise config.train.steps, or choose another --workdir."
        )
    restored = checkpointer.restore(saved_step, train_state, batches)
    console.print(f"resuming after step {saved_step} of {steps}")
    for change in changes:
        console.print(f"changed since then: {change}", markup=False)
    return restored


def _progress(console: rich.console.Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("step {task.completed}/{task.total}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("loss {task.fields[loss]}"),
        rich.progress.TextColumn("{task.fields[tokens_per_second]} tokens/s"),
        rich.progress.TextColumn("ETA"),
        rich.progress.TimeRemainingColumn(),
        console=console,
    )
