"""The kernel as an operation of JAX: batches and shards.

find_sharding -> round_array -> a batch in one call -> each shard with the indices of
the whole array -> `platforms`, the kernel of the platform for which the program is
lowered
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from mixprec.rounding import batches, platforms, random, statistics
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


def round_array(
    x: jax.Array,
    words: jax.Array | None,
    *,
    rounding: Rounding,
    strides: random.Strides,
    options: Options,
) -> tuple[jax.Array, ...]:
    """Rounds `x` by the kernel, in a function that `jax.vmap` can batch.

    A batch may have words of its own for each member. It then stands before the
    dimensions of the member in both, and `strides` leave it out; where all members have
    one `x` in common, its dimension there is 1. So it is with statistics, of which each
    member always has its own.

    Args:
      x: [*batch, ...] float32 or narrower without a dimension of 0.
      words: [*batch, 4] uint32: the seed, and the two words of the first element's
        index; or, without draws, None, or [*batch, 0] for statistics of each member.
      rounding: what to make of each element.
      strides: of the element index along the dimensions of a member.
      options: how to run the kernel; the sharding is that of the result.

    Returns:
      One [*batch, ...] `rounding.out_dtype` a mode; then, if so chosen, [*batch] for
      each field of the statistics.
    """
    parameters = {
        "rounding": rounding,
        "strides": strides,
        "in_place": options.in_place,
    }
    primitive, sharding = platforms.round_p, options.sharding
    if sharding is not None:
        primitive, parameters["sharding"] = _on_shards_p, sharding
    return tuple(primitive.bind(*([x] if words is None else [x, words]), **parameters))


# Batches


def _batch(
    axis_data: Any,
    args: tuple[jax.Array, ...],
    dimensions: tuple[int | None, ...],
    *,
    rounding: Rounding,
    strides: random.Strides,
    in_place: bool,
    sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[int | None, ...]]:
    """Batches `round_array`: one call for all that draw with the same words."""
    random.check_sizes_known(args[0].shape)
    args, strides, place = batches.gather_batch(
        axis_data, args, dimensions, rounding, strides
    )
    x, words = args if len(args) > 1 else (args[0], None)
    sharding = _sharding_of_batch(axis_data, x, dimensions[0], place, sharding)
    rounded = round_array(
        x,
        words,
        rounding=rounding,
        strides=strides,
        options=Options(sharding=sharding, in_place=in_place),
    )
    return rounded, (place,) * len(rounded)


def _sharding_of_batch(
    axis_data: Any,
    x: jax.Array,
    of_x: int | None,
    place: int,
    sharding: jax.sharding.NamedSharding | None,
) -> jax.sharding.NamedSharding | None:
    """Gives the sharding of a batch, from that of its members.

    Args:
      axis_data: what `jax.vmap` knows of the batch.
      x: [...] the batch.
      of_x: the batch's dimension in `x`, if it has one.
      place: the same in the result.
      sharding: of a member.
    """
    # An array that is no tracer tells how it is split, as explicit axes do.
    known = None
    if of_x is not None and not isinstance(x, jax.core.Tracer):
        known = known_sharding(x)
    if sharding is None:
        return known
    axes = axis_data.explicit_mesh_axis or axis_data.spmd_name
    if axes is None and known is not None:
        axes = _parts(known, x.ndim)[place]
    elif axes is None and isinstance(x, jax.core.Tracer) and of_x is not None:
        named = {axis for part in _parts(sharding, 0) for axis in part}
        others = set(sharding.mesh.auto_axes) - named
        if any(sharding.mesh.shape[axis] > 1 for axis in others):
            # The batch may be split over these, and only XLA knows: taken for not split
            # it would be gathered on each device.
            return None
    axes = tuple(axes or ())
    parts = list(_parts(sharding, max(place, len(sharding.spec))))
    if set(axes) & {axis for part in parts for axis in part}:
        axes = ()
    spec = jax.sharding.PartitionSpec(*parts[:place], axes or None, *parts[place:])
    return jax.sharding.NamedSharding(sharding.mesh, spec)


# Shards


def _on_shards(
    x: jax.Array,
    words: jax.Array | None = None,
    *,
    rounding: Rounding,
    strides: random.Strides,
    in_place: bool,
    sharding: jax.sharding.NamedSharding,
) -> tuple[jax.Array, ...]:
    """Runs the kernel on each device's shard, with the indices of the whole array.

    Statistics are added up over the devices that share a member of the batch.
    """
    parts = [part or None for part in _parts(sharding, x.ndim)]
    members = 0 if words is None else words.ndim - 1

    def on_shard(x: jax.Array, words: jax.Array | None = None) -> tuple[jax.Array, ...]:
        if words is not None and words.size:
            first = jnp.zeros(2, jnp.uint32)
            for dimension, axes in enumerate(parts[members:]):
                if axes is not None:
                    place = jax.lax.axis_index(axes).astype(jnp.uint32)
                    start = place * np.uint32(x.shape[members + dimension])
                    by_word = [strides.low[dimension], strides.high[dimension]]
                    first = first + start * np.array(by_word, np.uint32)
            offset = jnp.concatenate([jnp.zeros(2, jnp.uint32), first])
            words = words + offset.reshape((1,) * members + (4,))
        local = Options(in_place=in_place)
        results = round_array(
            x, words, rounding=rounding, strides=strides, options=local
        )
        if not rounding.statistics:
            return results
        axes = tuple(jax.tree.leaves(parts[members:]))
        of_shard = statistics.Statistics(*results[1:])
        return results[0], *statistics.total_over_devices(of_shard, axes)

    spec = jax.sharding.PartitionSpec
    of_x, of_words = list(parts), [*parts[:members], None]
    arguments, in_specs = [x], [spec(*of_x)]
    if words is not None:
        for dimension in range(members):
            if x.shape[dimension] != words.shape[dimension]:  # in common
                of_x[dimension] = None
        arguments, in_specs = [x, words], [spec(*of_x), spec(*of_words)]
    out_specs = [spec(*parts)] * len(rounding.modes)
    if rounding.statistics:
        out_specs += [spec(*parts[:members])] * len(statistics.DTYPES)
    mesh = sharding.mesh
    run_on_shards = jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=tuple(out_specs),
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,  # the interpreter does not know of it
    )
    return run_on_shards(*arguments)


_on_shards_p = batches.primitive("mixprec_round_on_shards")
mlir.register_lowering(_on_shards_p, mlir.lower_fun(_on_shards, multiple_results=True))
for _primitive in (platforms.round_p, _on_shards_p):
    batching.fancy_primitive_batchers[_primitive] = _batch


def _parts(
    sharding: jax.sharding.NamedSharding, rank: int
) -> tuple[tuple[str, ...], ...]:
    """Gives the mesh axes that split each of `rank` dimensions or more."""
    parts = [
        (part,) if isinstance(part, str) else tuple(part or ())
        for part in sharding.spec
    ]
    return (*parts, *[()] * (rank - len(parts)))


def known_sharding(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """Gives the sharding of an array, if it is known and over several devices."""
    if isinstance(x, jax.core.Tracer):  # known if the mesh's axes are explicit
        sharding = jax.typeof(x).sharding
        mesh = sharding.mesh
        if any(mesh.shape[axis] > 1 for axis in mesh.auto_axes):
            return None
        sizes = [mesh.shape[axis] for axis in mesh.explicit_axes]
    else:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return None
        # Inside shard_map it is the same array on each device.
        is_local = bool(jax.sharding.get_abstract_mesh().manual_axes)
        sizes = [] if is_local else [sharding.mesh.size]
    return sharding if any(size > 1 for size in sizes) else None


def find_sharding(
    x: jax.Array, seed: jax.Array | None, given: jax.sharding.NamedSharding | None
) -> jax.sharding.NamedSharding | None:
    """Gives the sharding of `x`: the given one, checked, or the one that is known.

    Raises:
      ValueError: it does not divide `x` evenly, names axes that it can't, leaves sums
        over devices open, or differs from the type of `x`; or `x` has a symbolic shape.
    """
    random.check_sizes_known(x.shape)
    sharding = known_sharding(x) if given is None else given
    if sharding is None and isinstance(seed, jax.core.Tracer):
        # An `x` that is on no mesh is the same for all seeds, which may be on one.
        of_seed = known_sharding(seed)
        if of_seed is not None and jax.typeof(x).sharding.mesh.empty:
            spec = jax.sharding.PartitionSpec()
            sharding = jax.sharding.NamedSharding(of_seed.mesh, spec)
    if sharding is None:
        return None
    if sharding.spec.unreduced or sharding.spec.reduced:
        raise ValueError(
            "`sharding` must leave no sum over devices open, got "
            f"{sharding.spec}. Sum first: reshard `x` by `jax.sharding.reshard`."
        )
    if given is not None:
        sharding = _on_mesh_of(x, given)
    mesh, parts = sharding.mesh, _parts(sharding, x.ndim)
    shares = [math.prod(mesh.shape[axis] for axis in part) for part in parts]
    if len(parts) > x.ndim or any(map(int.__mod__, x.shape, shares)):
        raise ValueError(
            f"`sharding` must divide `x`, of shape {x.shape}, evenly, got "
            f"{sharding.spec} over {dict(mesh.shape)}. Choose another spec, "
            'or backend "xla", which splits unevenly.'
        )
    is_local = len(mesh.manual_axes) == len(mesh.axis_names)
    return None if is_local else sharding


def _on_mesh_of(
    x: jax.Array, given: jax.sharding.NamedSharding
) -> jax.sharding.NamedSharding:
    """Gives `given` over the mesh on which `x` is, checked against what is known."""
    of_type = jax.typeof(x).sharding
    context = jax.sharding.get_abstract_mesh()
    mesh = context if context.manual_axes else of_type.mesh
    if not (mesh.manual_axes or mesh.explicit_axes):
        return given
    if dict(mesh.shape) != dict(given.mesh.shape):
        raise ValueError(
            f"`sharding` must be over the mesh of `x`, {dict(mesh.shape)}, got one "
            f"over {dict(given.mesh.shape)}. Make it of that mesh, or drop it."
        )
    found = _parts(given, x.ndim)
    if any(axis in mesh.manual_axes for part in found for axis in part):
        raise ValueError(
            "`sharding` must leave out the mesh axes of the shard_map around it, "
            f"{mesh.manual_axes}, over which `x` is split already, got {given.spec}. "
            "Drop them."
        )
    expected = _parts(of_type, x.ndim)
    explicit = [
        [tuple(axis for axis in part if axis in mesh.explicit_axes) for part in parts]
        for parts in (found, expected)
    ]
    if explicit[0] != explicit[1]:
        raise ValueError(
            f"`sharding` must be that of the type of `x`, {of_type.spec}, got "
            f"{given.spec}. Drop it, or reshard `x` first."
        )
    return jax.sharding.NamedSharding(mesh, given.spec)


def place(x: jax.Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
    """Tells JAX, which does not look into batches, on which devices `x` is."""
    if sharding is None or not isinstance(sharding.mesh, jax.sharding.Mesh):
        return x
    if len(sharding.mesh.auto_axes) < len(sharding.mesh.axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, sharding)


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
