"""The XLA path as one operation of JAX: a primitive, lowered to many that XLA fuses.

Traced, differentiated and batched it is one equation a tensor in place of dozens, of
which a model with many tensors would be slow to trace. JAX lowers those that are alike
only once, and puts the operations where each stands, so that XLA sees no call.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from mixprec.rounding import batches, random
from mixprec.rounding.bits import Rounding


def round_array(
    x: jax.Array,
    seed: jax.Array | None,
    *,
    rounding: Rounding,
    strides: random.Strides,
    gradient: str,
) -> tuple[jax.Array, ...]:
    """Rounds `x` by operations that XLA fuses and splits over devices.

    Args:
      x: [...] of a float dtype that `bits.from_float` reads.
      seed: [2] uint32, or None if no mode is stochastic.
      rounding: what to make of each element.
      strides: of the element index along the dimensions of `x`.
      gradient: one of `dispatch.GRADIENTS`.

    Returns:
      One [...] `rounding.out_dtype` a mode; then, if so chosen, the statistics' fields,
      which have no gradient.

    Raises:
      ValueError: `x` is the open sum of arrays on several devices.
    """
    spec = jax.typeof(x).sharding.spec
    if spec.unreduced or spec.reduced:
        raise ValueError(
            f"`x` must leave no sum over devices open, got {spec}. Sum first: reshard "
            "`x` by `jax.sharding.reshard`."
        )
    args = [x] if seed is None else [x, seed]
    return tuple(
        _round_p.bind(*args, rounding=rounding, strides=strides, gradient=gradient)
    )


def tangent_of(
    x: jax.Array, tangent: jax.Array, rounding: Rounding, gradient: str
) -> jax.Array:
    """Gives the tangent of a rounded `x`, whose own is `tangent`."""
    if gradient == "zero":
        tangent = jnp.zeros_like(tangent)
    if gradient == "clipped":
        wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
        kept = abs(wide) <= jnp.asarray(rounding.to.largest_value, wide.dtype)
        tangent = jnp.where(kept, tangent, jnp.zeros_like(tangent))
    return tangent.astype(rounding.out_dtype)


_round_p = batches.primitive("mixprec_round_by_xla")


def _operations(
    x: jax.Array, words: jax.Array | None = None, *, gradient: str, **options: Any
) -> tuple[jax.Array, ...]:
    return batches.round_members(x, words, **options)


def _lower(context: Any, *args: Any, **options: Any) -> Any:
    # What was traced with 64 bits may be lowered where they are off.
    is_wide = context.avals_in[0].dtype == jnp.float64
    with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
        rule = mlir.lower_fun(_operations, multiple_results=True)
        return rule(context, *args, **options)


mlir.register_lowering(_round_p, _lower)


def _jvp(
    primals: tuple[jax.Array, ...],
    tangents: tuple[Any, ...],
    *,
    rounding: Rounding,
    gradient: str,
    strides: random.Strides,
) -> tuple[list[jax.Array], list[Any]]:
    results = _round_p.bind(
        *primals, rounding=rounding, strides=strides, gradient=gradient
    )
    of_results: list[Any] = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results]
    if not isinstance(tangents[0], ad.Zero):
        tangent = tangent_of(primals[0], tangents[0], rounding, gradient)
        of_results[: len(rounding.modes)] = [
            _like(y, tangent) for y in results[: len(rounding.modes)]
        ]
    return results, of_results


def _like(y: jax.Array, tangent: jax.Array) -> jax.Array:
    """Gives the tangent of a batch whose members had one array in common."""
    if y.shape == tangent.shape:
        return tangent
    sharding = jax.typeof(y).sharding
    return jax.lax.broadcast_in_dim(
        tangent,
        y.shape,
        range(y.ndim),
        out_sharding=None if sharding.mesh.empty else sharding,
    )


ad.primitive_jvps[_round_p] = _jvp


def _batch(
    axis_data: Any,
    args: tuple[jax.Array, ...],
    dimensions: tuple[int | None, ...],
    *,
    rounding: Rounding,
    strides: random.Strides,
    gradient: str,
) -> tuple[list[jax.Array], list[int]]:
    args, strides, place = batches.gather_batch(
        axis_data, args, dimensions, rounding, strides
    )
    rounded = _round_p.bind(
        *args, rounding=rounding, strides=strides, gradient=gradient
    )
    return rounded, [place] * len(rounded)


batching.fancy_primitive_batchers[_round_p] = _batch
