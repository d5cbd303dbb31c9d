"""How a parameter is split over a mesh, and how it is gathered once it is rounded.

The shard is rounded first and gathered in the narrow format, so that half the bytes (a
quarter, in 8 bits) cross the network. Left alone, XLA gathers what the module computes
with: float32, if the module computes in float32.
"""

import functools
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta

Sharding = jax.sharding.NamedSharding


def sharding_of(leaf: Any) -> Sharding | None:
    """Gives how a parameter is split, if its partitioning box and the mesh tell.

    Args:
      leaf: an array or a box.
    """
    if not isinstance(leaf, meta.Partitioned):
        return None
    mesh = leaf.mesh or jax.sharding.get_abstract_mesh()
    # Inside shard_map it is a shard already.
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return None
    spec = jax.sharding.PartitionSpec(*leaf.names)
    if isinstance(leaf, nn.LogicallyPartitioned):
        spec = nn.logical_to_mesh_axes(leaf.names, leaf.rules) or spec
    return Sharding(mesh, spec)


def without_axes(sharding: Sharding | None, axes: Iterable[str]) -> Sharding | None:
    """Gives the sharding once gathered over `axes`; None if these split nothing."""
    if sharding is None:
        return None
    dropped = {axis for axis in axes if sharding.mesh.shape.get(axis, 1) > 1}
    parts = [
        (part,) if isinstance(part, str) else tuple(part or ())
        for part in sharding.spec
    ]
    if not dropped.intersection(axis for part in parts for axis in part):
        return None
    kept = [tuple(axis for axis in part if axis not in dropped) for part in parts]
    spec = jax.sharding.PartitionSpec(*(part or None for part in kept))
    return Sharding(sharding.mesh, spec)


def rebox(leaf: Any, sharding: Sharding) -> Any:
    """Gives the value of a box in a box that says `sharding`.

    Flax puts a parameter back to what its box says when it takes it out.
    """
    return meta.Partitioned(leaf.value, names=tuple(sharding.spec), mesh=leaf.mesh)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def gather(
    x: jax.Array, narrow: jax.Array, dtype: Any, split: Sharding, gathered: Sharding
) -> jax.Array:
    """Gathers what a parameter was rounded to, and widens it on each device.

    The gradient with respect to `x` is straight-through, and is summed and scattered in
    `dtype`.

    Args:
      x: [...] the parameter, split as `split` says.
      narrow: [...] `x` rounded; likewise.
      dtype: of the result; it has all values of `narrow`.
      split: how both are split.
      gathered: how the result is split.

    Returns:
      [...] `dtype`.
    """
    narrow = jax.lax.with_sharding_constraint(narrow, split)
    narrow = jax.lax.with_sharding_constraint(narrow, gathered)
    return narrow.astype(dtype)


@gather.defjvp
def _gather_jvp(
    dtype: Any,
    split: Sharding,
    gathered: Sharding,
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, Any],
) -> tuple[jax.Array, jax.Array]:
    tangent = jax.lax.with_sharding_constraint(tangents[0].astype(dtype), split)
    return gather(*primals, dtype, split, gathered), tangent
