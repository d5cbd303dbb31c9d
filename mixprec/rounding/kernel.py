"""The kernel as an operation of JAX: platforms, batches, shards.

batchable -> a batch in one call -> each shard with the indices of the whole array
          -> the kernel of the platform for which the program is lowered
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from mixprec.rounding import elements, pallas_gpu, pallas_tpu, random
from mixprec.rounding.bits import Rounding

# By the names of `jax.default_backend`.
PLATFORMS = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to run the kernel; hashable.

    Attributes:
      sharding: of the array, if it is over several devices.
      in_place: whether the first result, float32, takes the memory of the array.
    """

    sharding: jax.sharding.NamedSharding | None = None
    in_place: bool = False


# Platforms


def _by_platform(
    name: str, **functions: Callable[..., Any]
) -> jax.extend.core.Primitive:
    """Makes a primitive that is lowered to one function or another.

    A primitive is told the platform when it is lowered. `lax.platform_dependent` would
    leave a conditional around the kernel.

    Args:
      name: of the primitive.
      **functions: for each platform one; they take arrays, the first of which has the
        shape of the results, and `rounding` among their keywords.
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

    for platform, function in functions.items():
        rule = mlir.lower_fun(function, multiple_results=True)
        mlir.register_lowering(primitive, rule, platform=platform)
    return primitive


def _interpret(
    x: jax.Array, words: jax.Array | None = None, **options: Any
) -> tuple[jax.Array, ...]:
    _check_random_source(options["rounding"], "a CPU")
    if jax.typeof(x).manual_axis_type.varying:
        _log_fallback()
        return elements.round_array(x, words, options["rounding"], options["strides"])
    return pallas_tpu.round_pallas(x, words, interpret=True, **options)


def _on_nvidia(
    x: jax.Array, words: jax.Array | None = None, **options: Any
) -> tuple[jax.Array, ...]:
    _check_random_source(options["rounding"], "a GPU")
    return pallas_gpu.round_pallas(x, words, **options)


def _on_amd(x: jax.Array, *words: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    raise ValueError(
        '`backend` must be "xla" or "auto" on an AMD GPU, for which the kernel has '
        'never been compiled, got "pallas". The results of "xla" are the same bits.'
    )


def _bare_on_gpu(x: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    raise ValueError(
        "round_down_and_up is for TPUs and, interpreted, for CPUs; this program is for "
        "a GPU. Use round_bracket(x, out_dtype=jnp.float32): its results are the same."
    )


def _check_random_source(rounding: Rounding, platform: str) -> None:
    if rounding.random_source != "hash":
        raise ValueError(
            f'`random_source` must be "hash" for {platform}, got '
            f'"{rounding.random_source}": only a TPU draws bits in the kernel. Leave '
            "it out; the bits are then the same on every platform."
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
    cuda=_on_nvidia,
    rocm=_on_amd,
    tpu=pallas_tpu.round_pallas,
)
_bare_kernel = _by_platform(
    "mixprec_round_bare",
    cpu=functools.partial(pallas_tpu.round_pallas_bare, interpret=True),
    cuda=_bare_on_gpu,
    rocm=_bare_on_gpu,
    tpu=functools.partial(pallas_tpu.round_pallas_bare, interpret=False),
)


# Batches


@functools.cache
def batchable(rounding: Rounding, strides: random.Strides, options: Options) -> Any:
    """Gives the kernel as a function of (x, words) that `jax.vmap` can batch.

    Batching rounds the batched array in one call. Along the batch the index stands
    still, so that each member draws what it draws alone, as on the XLA path.

    Args:
      rounding: what to make of each element.
      strides: of the element index along the dimensions of `x`.
      options: how to run the kernel.

    Returns:
      A function of `x`, [...] float32 without a dimension of 0, and `words`, [4] uint32
      (the seed, and the two words of the first element's index) or None; it gives one
      [...] `rounding.out_dtype` a mode.
    """
    run = _run if options.sharding is None else _on_shards
    function = functools.partial(
        run, rounding=rounding, strides=strides, options=options
    )
    batched = jax.custom_batching.custom_vmap(jax.jit(function))

    @batched.def_vmap
    def _(
        axis_size: int, is_batched: Any, x: jax.Array, words: jax.Array | None
    ) -> tuple[Any, Any]:
        x_is_batched, words_are_batched = is_batched
        if not x_is_batched:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        if words_are_batched:
            rounded = jax.lax.map(lambda member: batched(*member), (x, words))
        elif axis_size == 0:
            rounded = (jnp.zeros(x.shape, rounding.out_dtype),) * len(rounding.modes)
        else:
            of_batch = dataclasses.replace(
                options, sharding=_batched_sharding(options.sharding)
            )
            rounded = batchable(rounding, strides.batched(), of_batch)(x, words)
        return rounded, (True,) * len(rounding.modes)

    return batched


def _run(
    x: jax.Array,
    words: jax.Array | None,
    *,
    rounding: Rounding,
    strides: random.Strides,
    options: Options,
) -> tuple[jax.Array, ...]:
    arguments = [x] if words is None else [x, words]
    return tuple(
        _kernel.bind(
            *arguments, rounding=rounding, strides=strides, in_place=options.in_place
        )
    )


# Shards


def _on_shards(
    x: jax.Array,
    words: jax.Array | None,
    *,
    rounding: Rounding,
    strides: random.Strides,
    options: Options,
) -> tuple[jax.Array, ...]:
    """Runs the kernel on each device's shard, with the indices of the whole array."""
    sharding = options.sharding
    assert sharding is not None
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
        return _run(x, words, rounding=rounding, strides=strides, options=options)

    spec = jax.sharding.PartitionSpec(*parts)
    return jax.shard_map(
        on_shard,
        mesh=sharding.mesh,
        in_specs=(spec, jax.sharding.PartitionSpec()),
        out_specs=spec,
        check_vma=False,  # the interpreter does not know of it
    )(x, words)


def known_sharding(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """Gives the sharding of an array, if it is known and over several devices."""
    sharding = getattr(x, "sharding", None)
    if isinstance(x, jax.core.Tracer):  # known if the mesh's axes are explicit
        sharding = jax.typeof(x).sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return sharding if any(part is not None for part in sharding.spec) else None


def _batched_sharding(
    sharding: jax.sharding.NamedSharding | None,
) -> jax.sharding.NamedSharding | None:
    if sharding is None:
        return None
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)
    return jax.sharding.NamedSharding(sharding.mesh, spec)


def check_sharding(
    x: jax.Array, sharding: jax.sharding.NamedSharding | None
) -> jax.sharding.NamedSharding | None:
    """Gives `sharding`, checked against the shape of `x`.

    Raises:
      ValueError: it does not divide `x` evenly, or `x` has a symbolic shape.
    """
    random.check_sizes_known(x.shape)
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


# The kernel alone


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_bare(x: jax.Array, rounding: Rounding) -> tuple[jax.Array, ...]:
    """Rounds by `pallas_tpu.round_pallas_bare`, with the straight-through gradient."""
    return tuple(_bare_kernel.bind(x, rounding=rounding))


@round_bare.defjvp
def _round_bare_jvp(
    rounding: Rounding, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    rounded = round_bare(*primals, rounding)
    return rounded, tangents * len(rounded)
