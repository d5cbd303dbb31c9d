"""The kernel as an operation of JAX: batches and shards.

batchable -> a batch in one call -> each shard with the indices of the whole array
          -> `platforms`, the kernel of the platform for which the program is lowered
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixprec.rounding import platforms, random
from mixprec.rounding.bits import Rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to run the kernel; hashable.

    Attributes:
      sharding: of the array, if it is over several devices.
      in_place: whether the first result, float32, takes the memory of the array.
    """

    sharding: jax.sharding.NamedSharding | None = None
    in_place: bool = False


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
      A function of `x`, [...] float32 or narrower without a dimension of 0, and
      `words`, [4] uint32 (the seed, and the two words of the first element's index) or
      None; it gives one [...] `rounding.out_dtype` a mode.
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
        of_batch = dataclasses.replace(
            options, sharding=known_sharding(x) or _batched_sharding(options.sharding)
        )
        if axis_size == 0:
            rounded = (jnp.zeros(x.shape, rounding.out_dtype),) * len(rounding.modes)
        elif words is None or not words_are_batched:
            rounded = batchable(rounding, strides.batched(), of_batch)(x, words)
        elif of_batch.sharding is None:
            rounded = _each_by_words(batched, x, words)
        else:
            rounded = _on_shards(
                x, words, rounding=rounding, strides=strides, options=of_batch
            )
        return rounded, (True,) * len(rounding.modes)

    return batched


def _each_by_words(
    run: Callable[..., Any], x: jax.Array, words: jax.Array
) -> tuple[jax.Array, ...]:
    """Rounds each member of a batch with words of its own, one after the other."""

    # As integers, since loops on a CPU change the payloads of narrow NaNs.
    def one(member: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        patterns, words = member
        return [
            jax.lax.bitcast_convert_type(y, f"uint{8 * y.dtype.itemsize}")
            for y in run(jax.lax.bitcast_convert_type(patterns, x.dtype), words)
        ]

    patterns = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    dtypes = [y.dtype for y in jax.eval_shape(run, x[0], words[0])]
    rounded = jax.lax.map(one, (patterns, words))
    return tuple(map(jax.lax.bitcast_convert_type, rounded, dtypes))


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
        platforms.round_p.bind(
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
    """Runs the kernel on each device's shard, with the indices of the whole array.

    With [n, 4] words, `x` is a batch of as many members, which `strides` leave out.
    """
    sharding = options.sharding
    assert sharding is not None
    local = dataclasses.replace(options, sharding=None)
    parts = tuple(sharding.spec) + (None,) * (x.ndim - len(sharding.spec))
    is_batch = words is not None and words.ndim == 2
    of_element = strides.batched() if is_batch else strides

    def on_shard(x: jax.Array, words: jax.Array | None) -> tuple[jax.Array, ...]:
        run = batchable(rounding, strides, local)
        if words is None:
            return run(x, words)
        first = jnp.zeros(2, jnp.uint32)
        for dimension, axes in enumerate(parts):
            if axes is not None:
                place = jax.lax.axis_index(axes).astype(jnp.uint32)
                start = place * np.uint32(x.shape[dimension])
                by_word = [of_element.low[dimension], of_element.high[dimension]]
                first = first + start * np.array(by_word, np.uint32)
        offset = jnp.concatenate([jnp.zeros(2, jnp.uint32), first])

        def run_at_offset(x: jax.Array, words: jax.Array) -> tuple[jax.Array, ...]:
            return run(x, words + offset)

        if is_batch:
            return _each_by_words(run_at_offset, x, words)
        return run_at_offset(x, words)

    spec = jax.sharding.PartitionSpec(*parts)
    of_words = jax.sharding.PartitionSpec(parts[0] if is_batch else None)
    mesh = sharding.mesh
    run_on_shards = jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(spec, of_words),
        out_specs=spec,
        # All by default, but for those over which `jax.vmap` maps.
        axis_names=set(mesh.axis_names).difference(mesh.manual_axes or mesh.axis_names),
        check_vma=False,  # the interpreter does not know of it
    )
    return run_on_shards(x, words)


def known_sharding(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """Gives the sharding of an array, if it is known and over several devices."""
    if isinstance(x, jax.core.Tracer):  # known if the mesh's axes are explicit
        sharding = jax.typeof(x).sharding
        mesh = sharding.mesh
        sizes = [mesh.shape[axis] for axis in mesh.explicit_axes]
    else:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return None
        # Inside shard_map it is the same array on each device.
        is_local = bool(jax.sharding.get_abstract_mesh().manual_axes)
        sizes = [] if is_local else [sharding.mesh.size]
    return sharding if any(size > 1 for size in sizes) else None


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
    return tuple(platforms.round_bare_p.bind(x, rounding=rounding))


@round_bare.defjvp
def _round_bare_jvp(
    rounding: Rounding, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    rounded = round_bare(*primals, rounding)
    return rounded, tangents * len(rounded)
