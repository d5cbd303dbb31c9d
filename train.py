"""Trains a transformer whose weights are rounded: `python train.py --config FILE`.

The config file becomes typed values here, and is unknown further down:

    configs/*.py -> models.build -> Policy -> mixprec.wrap -> training.loop.train
"""

import json
import pathlib
import sys

import flax.linen as nn
import rich.console
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

import mixprec
import models
from mixprec.training import checkpoint, data, loop, sample, state

HERE = pathlib.Path(__file__).resolve().parent

_FILE_WIDTH = 110  # characters

_CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="A file in configs/; override with --config.train.steps=100."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for the results; by default runs/NAME beside train.py."
)
flags.mark_flag_as_required("config")


def build_model(config: ConfigDict) -> nn.Module:
    """Gives the model that `config` describes, wrapped in its policy."""
    policy = mixprec.Policy(
        params=tuple(mixprec.Rule(*pair) for pair in config.policy.params),
        activations=tuple(mixprec.Rule(*pair) for pair in config.policy.activations),
        out_dtype=config.policy.out_dtype,
        seed=config.policy.seed,
        backend=config.policy.backend,
    )
    return mixprec.wrap(models.build(models.TransformerConfig(**config.model)), policy)


def build_run(config: ConfigDict) -> loop.RunConfig:
    """Gives all else that `config` describes."""
    return loop.RunConfig(
        seed=config.seed,
        data=data.DataConfig(**config.data),
        optimizer=state.OptimizerConfig(**config.optimizer),
        train=loop.LoopConfig(**config.train),
        checkpoint=checkpoint.CheckpointConfig(**config.checkpoint),
        sample=sample.SampleConfig(**config.sample),
        resolved=json.loads(config.to_json()),
    )


def make_console() -> rich.console.Console:
    """Gives a console as wide as the terminal; into a file, wide enough for tables."""
    return rich.console.Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the command line; a relative config is looked for beside train.py too."""
    try:
        return flags.FLAGS([_find_config(argument) for argument in argv])
    except (AttributeError, KeyError, TypeError, OSError, flags.Error) as error:
        # ml_collections reports an unknown key, and the nearest one, by AttributeError.
        sys.exit(f"train.py: {error}")


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
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # the libraries tell of every file
    name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    workdir = pathlib.Path(_WORKDIR.value or HERE / "runs" / name)
    config = _CONFIG.value
    try:
        loop.train(build_model(config), build_run(config), workdir, make_console())
    except KeyboardInterrupt:
        sys.exit("train.py: interrupted. The same command goes on from the checkpoint.")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
