"""One optimizer step: through the rounded model and back, then the update."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from mixprec.scopes import RNG_STREAM
from mixprec.training.metrics import StepMetrics, ValidationMetrics
from mixprec.training.state import TrainState

TrainStep = Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]
ValidationStep = Callable[[Any, jax.Array], ValidationMetrics]


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    *,
    seed: int,
    microbatches: int,
    boxes: Any = None,
    separator: int | None = None,
) -> TrainStep:
    """Gives the compiled step, which consumes the state that it is given.

    The random bits of stochastic rounding depend on (seed, step, microbatch, parameter
    path, element) alone, so a resumed run draws what the uninterrupted one draws.

    Args:
      model: maps [batch, length] int32 tokens to [batch, length, vocabulary] logits;
        wrapped, if it is to round.
      optimizer: of the master weights.
      learning_rate: for the metrics.
      seed: of stochastic rounding.
      microbatches: parts that a batch is split into, one after the other, to save
        memory.
      boxes: that tell the model how its parameters are split, as `state.make_boxes`
        gives them; None to tell it nothing.
      separator: see `token_loss`.

    Returns:
      A function of (state, [batch, length + 1] int32 tokens); batch must divide by
      `microbatches`.
    """

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, StepMetrics]:
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)

        def accumulate(
            total: Any, part: tuple[jax.Array, jax.Array]
        ) -> tuple[Any, Any]:
            number, tokens_of_part = part
            rngs = {RNG_STREAM: jax.random.fold_in(step_key, number)}
            loss, gradient = jax.value_and_grad(
                lambda params: token_loss(
                    model, in_boxes(params, boxes), tokens_of_part, rngs, separator
                )
            )(state.params)
            return jax.tree.map(jnp.add, total, gradient), loss

        parts = nn.with_logical_constraint(
            tokens.reshape(microbatches, -1, tokens.shape[-1]), (None, "batch", None)
        )
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        total, losses = jax.lax.scan(
            accumulate, zeros, (jnp.arange(microbatches), parts)
        )
        gradient = jax.tree.map(lambda g: g / microbatches, total)

        updates, optimizer_state = optimizer.update(
            gradient, state.optimizer_state, state.params
        )
        measured = StepMetrics.single_from_model_output(
            loss=losses,
            gradient_norm=optax.tree.norm(gradient),
            learning_rate=jnp.asarray(learning_rate(state.step), jnp.float32),
        )
        new_state = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            optimizer_state=optimizer_state,
        )
        return new_state, measured

    return jax.jit(step, donate_argnums=0)


def make_validation_step(
    model: nn.Module, boxes: Any = None, separator: int | None = None
) -> ValidationStep:
    """Gives the compiled measurement of (params, [batch, length + 1] int32 tokens).

    `boxes` is as for `make_train_step`. It passes no random stream, so stochastic
    rounding draws from the policy's own seed and every validation draws alike.
    """

    def step(params: Any, tokens: jax.Array) -> ValidationMetrics:
        loss = token_loss(model, in_boxes(params, boxes), tokens, None, separator)
        return ValidationMetrics.single_from_model_output(loss=loss)

    return jax.jit(step)


def in_boxes(params: Any, boxes: Any) -> Any:
    """Puts parameters into boxes, of which None means none."""
    if boxes is None:
        return params

    def in_box(box: Any, param: Any) -> Any:
        is_box = isinstance(box, nn.meta.AxisMetadata)
        return box.replace_boxed(param) if is_box else param

    return jax.tree.map(
        in_box,
        boxes,
        params,
        is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata),
    )


def token_loss(
    model: nn.Module,
    params: Any,
    tokens: jax.Array,
    rngs: dict[str, jax.Array] | None,
    separator: int | None = None,
) -> jax.Array:
    """Gives the mean cross-entropy of each next token.

    Args:
      model: as for `make_train_step`.
      params: its parameters.
      tokens: [batch, length + 1] int32.
      rngs: random streams for the model.
      separator: the token between documents, if the model is to look back on one
        document only; it then takes the documents' numbers as its second argument.

    Returns:
      [] float32, in nats a token.
    """
    inputs = tokens[:, :-1]
    segments = () if separator is None else (number_documents(inputs, separator),)
    logits = model.apply({"params": params}, inputs, *segments, rngs=rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses)


def number_documents(tokens: jax.Array, separator: int) -> jax.Array:
    """Gives the number of the document that each token belongs to in its row.

    A separator is predicted from the document that it ends, as every token is; as input
    it opens the next. So the first token of a document is predicted from the separator
    alone, as it is where a document stands by itself, and no loss has to be left out.

    Args:
      tokens: [batch, length] int32.
      separator: the token between documents.

    Returns:
      [batch, length] int32, from 0.
    """
    return jnp.cumsum(tokens == separator, axis=1, dtype=jnp.int32)
