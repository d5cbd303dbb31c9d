"""What the primitives of JAX that round have in common: types, batches, members.

Each takes an array and, or not, words, as `kernel.round_array` has them.
"""

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from mixprec.rounding import elements, primitives, random, statistics
from mixprec.rounding.bits import Rounding


def primitive(name: str) -> jax.extend.core.Primitive:
    """Makes a primitive that rounds, in the way of `primitives.make`."""

    def result_types(
        x: Any, words: Any = None, *, rounding: Rounding, **options: Any
    ) -> Any:
        types = {"dtype": rounding.out_dtype, "weak_type": False}
        batch: tuple[int, ...] = ()
        mesh, spec = x.sharding.mesh, tuple[str | None, ...]()
        if words is not None:
            batch = words.shape[:-1]
            types["shape"] = (*batch, *x.shape[len(batch) :])
            of_member, of_words = x.sharding, words.sharding
            spec = tuple(of_words.spec[: len(batch)])
            mesh = of_words.mesh if of_member.mesh.empty else of_member.mesh
            types["sharding"] = jax.sharding.NamedSharding(
                mesh, jax.sharding.PartitionSpec(*spec, *of_member.spec[len(batch) :])
            )
        rounded = [x.update(**types)] * len(rounding.modes)
        if not rounding.statistics:
            return rounded
        of_batch = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        types |= {"shape": batch, "sharding": of_batch}
        dtypes = map(np.dtype, statistics.DTYPES)
        return rounded + [x.update(**types | {"dtype": dtype}) for dtype in dtypes]

    return primitives.make(name, result_types)


# Batches


def gather_batch(
    axis_data: Any,
    args: tuple[jax.Array, ...],
    dimensions: tuple[int | None, ...],
    rounding: Rounding,
    strides: random.Strides,
) -> tuple[tuple[jax.Array, ...], random.Strides, int]:
    """Gives what rounds a whole batch at once, with one call of the same primitive.

    Along a batch that draws with the same words the index stands still, so that each
    member draws what it draws alone. It stays where it lies among the dimensions, since
    moving it may move the array in memory. For statistics, which each member has of its
    own, it has words of its own too, if need be empty.

    Args:
      axis_data: what `jax.vmap` knows of the batch.
      args: the array and, or not, words.
      dimensions: of the batch in each; None where it has none.
      rounding: what to make of each element.
      strides: of the element index along the dimensions of a member; of no account
        without draws.

    Returns:
      The arguments and the strides of the batch, and its dimension in the results.
    """
    x, words = args if len(args) > 1 else (args[0], None)
    of_x, of_words = dimensions if len(args) > 1 else (dimensions[0], None)
    if rounding.statistics and of_words is None:
        if words is None:
            words = jnp.zeros(0, jnp.uint32)
        words, of_words = repeat(axis_data, words, x), 0
    place = 0
    if words is not None and of_words is not None:
        words = jnp.moveaxis(words, of_words, place)
        x = jnp.expand_dims(x, 0) if of_x is None else jnp.moveaxis(x, of_x, place)
    elif of_x is not None:
        members = 0 if words is None else words.ndim - 1
        place = max(of_x, members)
        x = jnp.moveaxis(x, of_x, place)
        strides = strides.batched(place - members)
    return (x,) if words is None else (x, words), strides, place


def repeat(axis_data: Any, y: jax.Array, like: jax.Array) -> jax.Array:
    """Gives each member of a batch the same `y`, on the mesh of `like`."""
    repeated = jax.lax.broadcast(y, (axis_data.size,))
    if not axis_data.explicit_mesh_axis:
        return repeated
    typed: Any = jax.typeof(like) if isinstance(like, jax.core.Tracer) else like
    of_y = jax.typeof(y).sharding.spec
    spec = jax.sharding.PartitionSpec(axis_data.explicit_mesh_axis, *of_y)
    sharding = jax.sharding.NamedSharding(typed.sharding.mesh, spec)
    return jax.sharding.reshard(repeated, sharding)


def round_members(
    x: jax.Array,
    words: jax.Array | None,
    rounding: Rounding,
    strides: random.Strides | None,
) -> tuple[jax.Array, ...]:
    """Rounds an array, or the members of a batch of which words tell, by operations.

    Args:
      x: as for `kernel.round_array`.
      words: [*batch, 2 or 4] uint32, as for `elements.round_array`; or as for
        `kernel.round_array`.
      rounding: what to make of each element.
      strides: of the element index along the dimensions of a member.
    """

    def run(x: jax.Array, words: jax.Array | None) -> tuple[jax.Array, ...]:
        return elements.round_array(x, none_if_empty(words), rounding, strides)

    if words is None:
        return run(x, words)
    batch = words.shape[:-1]
    shared = [d for d, size in enumerate(batch) if x.shape[d] != size]
    for dimension in reversed(range(len(batch))):
        run = jax.vmap(run, (None if dimension in shared else 0, 0))
    return run(jax.lax.squeeze(x, shared), words)


def none_if_empty(words: jax.Array | None) -> jax.Array | None:
    """Gives the words, or None if they only tell of a batch."""
    return words if words is not None and words.size else None
