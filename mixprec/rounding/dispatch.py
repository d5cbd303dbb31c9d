"""From checked arguments to a backend: gradients, batches, shards, platforms.

round_seeded -> gradient -> XLA operations, or the kernel
                             (a batch in one call -> shards -> platform)
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from mixprec.rounding import bits as bits_lib
from mixprec.rounding import formats, pallas, random
from mixprec.rounding.bits import Rounding

Backend = Literal["auto", "pallas", "xla"]
BACKENDS: tuple[str, ...] = ("auto", "pallas", "xla")
Gradient = Literal["straight_through", "clipped", "zero"]
GRADIENTS: tuple[str, ...] = ("straight_through", "clipped", "zero")


def round_seeded(
    x: jax.Array,
    rounding: Rounding,
    *,
    seed: jax.Array | None,
    backend: str,
    gradient: str = "straight_through",
    sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[jax.Array, ...]:
    """Rounds in several modes at once, from seed words that are already made.

    Args:
      x: [...] float32, or of another dtype that `as_float32` takes.
      rounding: what to make of each element.
      seed: [2] uint32, or None if no mode is stochastic.
      backend: one of `BACKENDS`.
      gradient: one of `GRADIENTS`.
      sharding: of `x`, for the kernel; None to take what is known of `x`.

    Returns:
      One [...] `rounding.out_dtype` a mode.

    Raises:
      ValueError: unknown or unavailable backend, or a sharding that does not fit `x`.
    """
    backend = choose_backend(backend)
    if backend == "pallas":
        sharding = _check_sharding(x, sharding or _known_sharding(x))
    else:
        sharding = None  # XLA partitions its own operations
    return _round(x, seed, rounding, backend, gradient, sharding)


def choose_backend(backend: str) -> str:
    """Gives the backend to use: "pallas" or "xla".

    "auto" is "xla" on every platform. XLA fuses the bit operations into whatever
    produces or reads the value and partitions them over a mesh. Compiled for TPUs, both
    read and write the least bytes possible for a rounding alone; in front of a product
    the operations cost nothing on v4, v5e and v5p, where a separate kernel writes its
    copy to memory and reads it back (figures, also for v6e, in docs/rounding.md). The
    kernel is for those who want the rounded copy to be a separate array made in one
    pass.

    Raises:
      ValueError: unknown name, or "pallas" on a platform without a lowering.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"`backend` must be one of {', '.join(BACKENDS)}, got {backend!r}. "
            'Leave it out for "auto".'
        )
    if backend == "pallas" and jax.default_backend() not in ("cpu", "tpu"):
        raise ValueError(
            '`backend` must be "xla" or "auto" on this platform '
            f'({jax.default_backend()}), got "pallas", which needs a TPU or, '
            'interpreted, a CPU. Use "xla": its results are the same bits.'
        )
    return "xla" if backend == "auto" else backend


def as_float32(x: jax.Array) -> jax.Array:
    """Converts to float32: narrower formats exactly, float64 rounded to odd.

    By integers, since a float conversion may flush subnormals or change the payload of
    a NaN.

    Args:
      x: [...] of a dtype in `formats.FORMATS`, float32 or float64.

    Returns:
      [...] float32.
    """
    if x.dtype == jnp.float32:
        return x
    if x.dtype == jnp.float64:
        patterns = bits_lib.from_float64(x)
    else:
        format_ = formats.find_format(x.dtype)
        narrow = jax.lax.bitcast_convert_type(x, format_.pattern_dtype)
        patterns = bits_lib.widen(narrow.astype(jnp.uint32), format_)
    return jax.lax.bitcast_convert_type(patterns, jnp.float32)


# Gradient


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4, 5))
def _round(
    x: jax.Array,
    seed: jax.Array | None,
    rounding: Rounding,
    backend: str,
    gradient: str,
    sharding: jax.sharding.NamedSharding | None,
) -> tuple[jax.Array, ...]:
    strides = random.row_major_strides(x.shape)
    if backend == "pallas" and x.size > 0:
        words = None
        if seed is not None:
            words = jnp.concatenate([seed, jnp.zeros(2, jnp.uint32)])
        return _in_kernel(rounding, strides, sharding)(as_float32(x), words)
    return _in_xla(x, seed, rounding, strides)


@_round.defjvp
def _round_jvp(
    rounding: Rounding,
    backend: str,
    gradient: str,
    sharding: jax.sharding.NamedSharding | None,
    primals: tuple[jax.Array, jax.Array | None],
    tangents: tuple[jax.Array, Any],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    x, tangent = primals[0], tangents[0]
    if gradient == "zero":
        tangent = jnp.zeros_like(tangent)
    if gradient == "clipped":
        largest = jnp.asarray(rounding.to.largest_value, jnp.float32)
        kept = abs(x.astype(jnp.float32)) <= largest
        tangent = jnp.where(kept, tangent, jnp.zeros_like(tangent))
    rounded = _round(*primals, rounding, backend, gradient, sharding)
    return rounded, (tangent.astype(rounding.out_dtype),) * len(rounded)


# XLA operations


@functools.partial(jax.jit, static_argnames=("rounding", "strides"), inline=True)
def _in_xla(
    x: jax.Array,
    seed: jax.Array | None,
    rounding: Rounding,
    strides: random.Strides,
) -> tuple[jax.Array, ...]:
    bits = bits_lib.from_float32(as_float32(x))
    random_bits = None
    if seed is not None:
        random_bits = random.random_bits(
            (seed[0], seed[1]),
            random.index_words(x.shape, strides),
            bits if rounding.hash_values else None,
        )
    return tuple(
        bits_lib.to_float(patterns, rounding.to, rounding.out_dtype)
        for patterns in bits_lib.round_patterns(bits, rounding, random_bits)
    )


# The kernel


def _by_platform(
    name: str, *, cpu: Callable[..., Any], tpu: Callable[..., Any]
) -> jax.extend.core.Primitive:
    """Makes a primitive that is lowered to one function or another.

    A primitive is told the platform when it is lowered. `lax.platform_dependent` would
    leave a conditional around the kernel.

    Args:
      name: of the primitive.
      cpu: takes arrays, the first of which has the shape of the results, and `rounding`
        among its keywords.
      tpu: the same.
    """
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def result_types(x: Any, *others: Any, rounding: Rounding, **options: Any) -> Any:
        result_type = x.update(dtype=rounding.out_dtype, weak_type=False)
        return [result_type] * len(rounding.modes)

    @primitive.def_impl
    def run(*args: Any, **options: Any) -> Any:
        return jax.jit(functools.partial(primitive.bind, **options))(*args)

    for platform, function in (("cpu", cpu), ("tpu", tpu)):
        rule = mlir.lower_fun(function, multiple_results=True)
        mlir.register_lowering(primitive, rule, platform=platform)
    return primitive


def _interpret(
    x: jax.Array,
    words: jax.Array | None = None,
    *,
    rounding: Rounding,
    strides: random.Strides,
) -> tuple[jax.Array, ...]:
    if jax.typeof(x).manual_axis_type.varying:
        _log_fallback()
        seed = None if words is None else words[:2]
        return _in_xla(x, seed, rounding, strides)
    return pallas.round_pallas(
        x, words, rounding=rounding, strides=strides, interpret=True
    )


@functools.cache
def _log_fallback() -> None:
    logging.getLogger(__name__).warning(
        'backend "pallas" on a CPU, inside shard_map with check_vma=True: Pallas\'s '
        "interpreter does not know of it, so XLA operations are taken. Their results "
        "are the same bits."
    )


_kernel = _by_platform(
    "mixprec_round",
    cpu=_interpret,
    tpu=functools.partial(pallas.round_pallas, interpret=False),
)
_bare_kernel = _by_platform(
    "mixprec_round_bare",
    cpu=functools.partial(pallas.round_pallas_bare, interpret=True),
    tpu=functools.partial(pallas.round_pallas_bare, interpret=False),
)


@functools.cache
def _in_kernel(
    rounding: Rounding,
    strides: random.Strides,
    sharding: jax.sharding.NamedSharding | None,
) -> Any:
    """Gives the kernel as a function of (x, words) that `jax.vmap` can batch.

    Batching rounds the batched array in one call. Along the batch the index stands
    still, so that each member draws what it draws alone, as on the XLA path.
    """
    if sharding is None:
        function = functools.partial(_run, rounding=rounding, strides=strides)
    else:
        function = functools.partial(
            _on_shards, rounding=rounding, strides=strides, sharding=sharding
        )
    batchable = jax.custom_batching.custom_vmap(jax.jit(function))

    @batchable.def_vmap
    def _(
        axis_size: int, is_batched: Any, x: jax.Array, words: jax.Array | None
    ) -> tuple[Any, Any]:
        x_is_batched, words_are_batched = is_batched
        if not x_is_batched:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        if words_are_batched:
            rounded = jax.lax.map(lambda member: batchable(*member), (x, words))
        elif axis_size == 0:
            rounded = (jnp.zeros(x.shape, rounding.out_dtype),) * len(rounding.modes)
        else:
            batched = None if sharding is None else _batched_sharding(sharding)
            rounded = _in_kernel(rounding, strides.batched(), batched)(x, words)
        return rounded, (True,) * len(rounding.modes)

    return batchable


def _run(
    x: jax.Array,
    words: jax.Array | None,
    *,
    rounding: Rounding,
    strides: random.Strides,
) -> tuple[jax.Array, ...]:
    arguments = [x] if words is None else [x, words]
    return tuple(_kernel.bind(*arguments, rounding=rounding, strides=strides))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_bare(x: jax.Array, rounding: Rounding) -> tuple[jax.Array, ...]:
    """Rounds by `pallas.round_pallas_bare`, with the straight-through gradient."""
    return tuple(_bare_kernel.bind(x, rounding=rounding))


@round_bare.defjvp
def _round_bare_jvp(
    rounding: Rounding, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    rounded = round_bare(*primals, rounding)
    return rounded, tangents * len(rounded)


# Shards


def _on_shards(
    x: jax.Array,
    words: jax.Array | None,
    *,
    rounding: Rounding,
    strides: random.Strides,
    sharding: jax.sharding.NamedSharding,
) -> tuple[jax.Array, ...]:
    """Runs the kernel on each device's shard, with the indices of the whole array."""
    parts = tuple(sharding.spec) + (None,) * (x.ndim - len(sharding.spec))

    def on_shard(x: jax.Array, words: jax.Array | None) -> tuple[jax.Array, ...]:
        if words is not None:
            first = jnp.zeros(2, jnp.uint32)
            for dimension, axes in enumerate(parts):
                if axes is not None:
                    place = jax.lax.axis_index(axes).astype(jnp.uint32)
                    start = place * np.uint32(x.shape[dimension])
                    by_word = [strides.low[dimension], strides.high[dimension]]
                    first = first + start * np.array(by_word, np.uint32)
            words = words + jnp.concatenate([jnp.zeros(2, jnp.uint32), first])
        return _run(x, words, rounding=rounding, strides=strides)

    spec = jax.sharding.PartitionSpec(*parts)
    return jax.shard_map(
        on_shard,
        mesh=sharding.mesh,
        in_specs=(spec, jax.sharding.PartitionSpec()),
        out_specs=spec,
        check_vma=False,  # the interpreter does not know of it
    )(x, words)


def _known_sharding(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """Gives the sharding of an array, if it is known and over several devices."""
    sharding = getattr(x, "sharding", None)
    if isinstance(x, jax.core.Tracer):  # known if the mesh's axes are explicit
        sharding = jax.typeof(x).sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return sharding if any(part is not None for part in sharding.spec) else None


def _batched_sharding(
    sharding: jax.sharding.NamedSharding,
) -> jax.sharding.NamedSharding:
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)
    return jax.sharding.NamedSharding(sharding.mesh, spec)


def _check_sharding(
    x: jax.Array, sharding: jax.sharding.NamedSharding | None
) -> jax.sharding.NamedSharding | None:
    if sharding is None:
        return None
    try:
        sharding.shard_shape(x.shape)
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"`sharding` must divide `x`, of shape {x.shape}, evenly, got "
            f"{sharding.spec} over {dict(sharding.mesh.shape)}. Choose another spec, "
            'or backend "xla", which splits unevenly.'
        ) from error
    return sharding
