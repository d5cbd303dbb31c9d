"""Trains a transformer whose weights are rounded: `python train.py --config FILE`.

The config file becomes typed values here, and is unknown further down:

    configs/*.py -> models.build -> Policy -> mixprec.wrap -> training.loop.train
"""

import json
import pathlib
import sys
import traceback

import flax.linen as nn
import jax
import rich.console
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

import mixprec
import models
from mixprec.training import (
    checkpoint,
    data,
    loop,
    processes,
    sample,
    sharding,
    state,
)

HERE = pathlib.Path(__file__).resolve().parent

_FILE_WIDTH = 110  # characters

_CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="A file in configs/; override with --config.train.steps=100."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for the results; by default runs/NAME beside train.py."
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Join the processes of the cluster, which JAX finds."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0, where no cluster tells."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "With --coordinator.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "With --coordinator; from 0.")
flags.mark_flag_as_required("config")


def build_model(config: ConfigDict) -> nn.Module:
    """Gives the model that `config` describes, wrapped in its policy."""
    policy = mixprec.Policy.from_dict(config.policy)
    return mixprec.wrap(models.build(models.TransformerConfig(**config.model)), policy)


def build_run(config: ConfigDict) -> loop.RunConfig:
    """Finds the data, and gives all else that `config` describes."""
    dataset = data.load(
        data.DataConfig(**config.data),
        seed=config.seed,
        vocab_size=config.model.vocab_size,
    )
    return loop.RunConfig(
        seed=config.seed,
        dataset=dataset,
        optimizer=state.OptimizerConfig(**config.optimizer),
        train=loop.LoopConfig(**config.train),
        layout=build_layout(config),
        checkpoint=checkpoint.CheckpointConfig(**config.checkpoint),
        sample=sample.SampleConfig(**config.sample),
        resolved=json.loads(config.to_json()),
    )


def build_layout(config: ConfigDict) -> sharding.Layout:
    """Gives how the run that `config` describes is split over all devices."""
    layout = sharding.make_layout(sharding.MeshConfig(**config.mesh))
    layout.check_divides(
        {
            "heads": ("config.model.num_heads", config.model.num_heads),
            "kv_heads": ("config.model.num_kv_heads", config.model.num_kv_heads),
        }
    )
    return layout


def explain(model: nn.Module, run: loop.RunConfig) -> mixprec.Explanation:
    """Gives the table of what is rounded in one microbatch; computes nothing."""
    return mixprec.explain(model, run.microbatch)


def connect() -> None:
    """Joins the other processes of the run, if the flags speak of any."""
    given = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    if _DISTRIBUTED.value or any(value is not None for value in given):
        processes.connect(*given)


def make_console() -> rich.console.Console:
    """Gives a console as wide as the terminal; into a file, wide enough for tables.

    Of several processes the first one speaks.
    """
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    return rich.console.Console(width=width, quiet=jax.process_index() > 0)


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the command line; a relative config is looked for beside train.py too."""
    try:
        rest = flags.FLAGS([_find_config(argument) for argument in argv])
        _ = _CONFIG.value.policy  # a file that is missing shows on access
        return rest
    except OSError as error:
        sys.exit(f"train.py: {error}\nThose here: {', '.join(_configs())}.")
    except (AttributeError, KeyError) as error:
        # ml_collections wraps a KeyError, which proposes the nearest key.
        inner = error.args[0]
        if not isinstance(inner, KeyError):
            sys.exit(f"train.py: {error}")
        unknown = " ".join(str(inner.args[0]).split())
        sys.exit(f"train.py: the config has no {unknown} See configs/default.py.")
    except (TypeError, flags.Error) as error:
        sys.exit(f"train.py: {error}")


def _configs() -> list[str]:
    return sorted(f"configs/{path.name}" for path in HERE.glob("configs/*.py"))


def _find_config(argument: str) -> str:
    flag, equals, value = argument.rpartition("=")
    beside = HERE / value
    is_config = flag in ("", "--config", "-config") and value.endswith(".py")
    if is_config and not pathlib.Path(value).exists() and beside.exists():
        return f"{flag}{equals}{beside}"
    return argument


def main(argv: list[str]) -> None:
    """Trains as the flags say."""
    if len(argv) > 1:
        sys.exit(f"train.py: unexpected {' '.join(argv[1:])}. Write --config FILE.")
    is_verbose = flags.FLAGS["verbosity"].present
    if not is_verbose:
        logging.set_verbosity(logging.WARNING)  # the libraries tell of every file
    name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    workdir = pathlib.Path(_WORKDIR.value or HERE / "runs" / name)
    try:
        connect()
        console = make_console()
        model, run = build_model(_CONFIG.value), build_run(_CONFIG.value)
        table = explain(model, run)
        console.print(run.dataset.description)
        console.print(table)
        loop.train(model, run, workdir, console)
    except KeyboardInterrupt:
        sys.exit("train.py: interrupted. The same command goes on from the checkpoint.")
    except (TypeError, ValueError, OSError, FloatingPointError) as error:
        if is_verbose or not _is_raised_here(error):
            raise
        sys.exit(f"train.py: {error}\n(--verbosity=0 shows where this was found.)")


def _is_raised_here(error: BaseException) -> bool:
    """Tells whether this project's own code found fault, and so says what to do."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    place = pathlib.Path(frame.f_code.co_filename).resolve()
    return (
        place == HERE / "train.py"
        or place.is_relative_to(pathlib.Path(mixprec.__file__).parent)
        or place.is_relative_to(HERE / "models")
    )


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
