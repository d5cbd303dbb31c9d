"""What training carries from step to step: float32 master weights, optimizer, step."""

import dataclasses
import functools
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from mixprec.training import sharding

# Parameters that only scale or shift: decaying them pulls the normalised activations
# to 0 without regularising anything.
_NOT_DECAYED = ("scale", "bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) with warm-up, cosine decay and clipping.

    Attributes:
      learning_rate: at its peak.
      warmup_steps: of linear growth from 0 to the peak.
      final_fraction: of the peak, reached at the last step.
      b1: decay of the first moment a step.
      b2: decay of the second moment a step.
      epsilon: added to the root of the second moment.
      weight_decay: a step, times the learning rate; not of scales and biases.
      clip_norm: the largest global norm of a gradient; larger ones are scaled down.

    Raises:
      ValueError: a value out of its range.
    """

    learning_rate: float
    warmup_steps: int
    final_fraction: float
    b1: float
    b2: float
    epsilon: float
    weight_decay: float
    clip_norm: float

    def __post_init__(self) -> None:
        positive = ("learning_rate", "epsilon", "clip_norm")
        fractions = ("final_fraction", "b1", "b2")
        for name in positive + fractions + ("warmup_steps", "weight_decay"):
            value = getattr(self, name)
            allowed = value > 0 if name in positive else value >= 0
            if not allowed or (name in fractions and value > 1):
                rule = "positive" if name in positive else "at least 0"
                most = " and at most 1" if name in fractions else ""
                raise ValueError(
                    f"`{name}` must be {rule}{most}, got {value}. "
                    f"Correct config.optimizer.{name}."
                )


class TrainState(flax.struct.PyTreeNode):
    """All that an optimizer step reads and replaces.

    Attributes:
      step: [] int32, optimizer steps done.
      params: the master weights, float32.
      optimizer_state: of the optax transformation, float32 moments.
    """

    step: jax.Array
    params: Any
    optimizer_state: optax.OptState


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Gives the learning rate as a function of the step, for a run of `steps` steps."""
    warmup_steps = min(config.warmup_steps, steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, config.learning_rate, max(1, warmup_steps)),
            optax.cosine_decay_schedule(
                config.learning_rate,
                max(1, steps - warmup_steps),
                alpha=config.final_fraction,
            ),
        ],
        boundaries=[warmup_steps],
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Gives clipping, then AdamW on a schedule over `steps` steps."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=_is_decayed,
        ),
    )


def make_boxes(model: nn.Module, sequence_length: int) -> Any:
    """Gives the parameters' shapes in the boxes that name their axes; computes nothing.

    Args:
      model: maps [batch, length] int32 tokens to logits.
      sequence_length: of the tokens that the model is initialised with.
    """
    init = functools.partial(_init_params, model, 0, sequence_length)
    return jax.eval_shape(init)


def abstract_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    layout: sharding.Layout,
    *,
    sequence_length: int,
) -> TrainState:
    """Gives shapes, dtypes and shardings of the state; computes nothing.

    Args:
      model: as for `init_state`.
      optimizer: likewise.
      layout: likewise.
      sequence_length: likewise.

    Raises:
      TypeError: a parameter is not float32.
      ValueError: the layout does not fit the parameters.
    """
    boxes = make_boxes(model, sequence_length)
    params = nn.meta.unbox(boxes)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.dtype != jnp.float32:
            raise TypeError(
                f"master weight {jax.tree_util.keystr(path)} must be float32, got "
                f"{leaf.dtype}. Set the module's param_dtype to float32: the policy "
                "decides what is rounded."
            )
    whole = layout.sharding()
    of_params = layout.params_shardings(boxes)
    optimizer_state = jax.eval_shape(optimizer.init, params)
    of_optimizer = sharding.optimizer_shardings(
        optimizer, optimizer_state, of_params, whole
    )

    def split(leaf: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return TrainState(
        step=step,
        params=jax.tree.map(split, params, of_params),
        optimizer_state=jax.tree.map(split, optimizer_state, of_optimizer),
    )


def init_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    layout: sharding.Layout,
    *,
    seed: int,
    sequence_length: int,
) -> TrainState:
    """Makes the state at step 0, on each device its shards.

    Args:
      model: maps [batch, length] int32 tokens to logits.
      optimizer: of the master weights.
      layout: how the state is split.
      seed: of the initial weights: the same draws however they are split, to the last
        bits, which depend on how the compiler evaluates a shard.
      sequence_length: of the tokens that the model is initialised with.

    Returns:
      The state; parameters without partitioning boxes.

    Raises:
      TypeError: a parameter is not float32.
      ValueError: the layout does not fit the parameters.
    """

    def init() -> TrainState:
        params = nn.meta.unbox(_init_params(model, seed, sequence_length))
        return TrainState(
            step=jnp.int32(0), params=params, optimizer_state=optimizer.init(params)
        )

    abstract = abstract_state(model, optimizer, layout, sequence_length=sequence_length)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(init, out_shardings=shardings)()


def _init_params(model: nn.Module, seed: int, sequence_length: int) -> Any:
    tokens = jnp.zeros((1, sequence_length), jnp.int32)
    return model.init(jax.random.key(seed), tokens)["params"]


def _is_decayed(params: Any) -> Any:
    def decide(path: Any, _: Any) -> bool:
        return path[-1].key not in _NOT_DECAYED

    return jax.tree_util.tree_map_with_path(decide, params)
