"""How a run is split over devices: the mesh, and which axis of an array goes where.

    names of axes in models -> rules -> axes of the mesh -> devices

Modules name the axes of their parameters and activations (`flax.linen.spmd` calls these
names logical), the rules say which axes of the mesh split them, and XLA does the rest.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

AXES = ("data", "fsdp", "tensor", "sequence")
# Of what the trainer itself makes; all others are named by the model.
BATCH, LENGTH = "batch", "length"

Rules = tuple[tuple[str, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The mesh of devices, and the rules by which arrays are split over it.

    Attributes:
      data: devices among which batches are split, each with all parameters.
      fsdp: devices among which batches are split, and parameters and optimizer states
        too ("fully sharded data parallel", Rajbhandari et al. 2020, "ZeRO", stage 3).
      tensor: devices among which heads and the inside of MLPs are split (Shoeybi et al.
        2019, "Megatron-LM", section 3).
      sequence: devices among which the positions of a sequence are split.
      rules: "name=axis, ...": which axes of the mesh split a named axis of an array;
        several are joined by "+", none is "name=". Of two names on one array that ask
        for the same axis the one whose rule stands first gets it.

    One size may be -1: as many as there are devices left.

    Raises:
      ValueError: a size is neither positive nor -1, two are -1, or the rules cannot be
        read or name an axis that the mesh has not.
    """

    data: int
    fsdp: int
    tensor: int
    sequence: int
    rules: str

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1 and size != -1:
                raise ValueError(
                    f"`{axis}` must be positive, or -1 for all devices left, got "
                    f"{size}. Correct config.mesh.{axis}."
                )
        if list(self.sizes.values()).count(-1) > 1:
            raise ValueError(
                f"one size of the mesh may be -1, got {self.sizes}. Correct "
                "config.mesh."
            )
        parse_rules(self.rules)

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of the mesh, in order, with their sizes as given."""
        return {axis: getattr(self, axis) for axis in AXES}


def parse_rules(text: str) -> Rules:
    """Reads rules such as "batch=data+fsdp, embed=fsdp, head_dim=".

    Raises:
      ValueError: what it cannot read, a name with two rules, or an axis that is none of
        `AXES`.
    """
    rules: dict[str, tuple[str, ...]] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        axes = tuple(axis.strip() for axis in value.split("+")) if value else ()
        if not (name and equals):
            raise ValueError(
                f"`rules` must be parts such as 'embed=fsdp', got {part!r}. Correct "
                "config.mesh.rules."
            )
        if name in rules:
            raise ValueError(
                f"`rules` must have one rule for each name, got two for {name!r}. "
                "Join axes by +, as in 'batch=data+fsdp'."
            )
        for axis in axes:
            if axis not in AXES:
                raise ValueError(
                    f"`rules` must name axes of the mesh, {', '.join(AXES)}, got "
                    f"{axis!r} in {part!r}. Correct config.mesh.rules."
                )
        rules[name] = axes
    return tuple(rules.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh of devices with rules.

    Attributes:
      mesh: with all axes of `AXES`.
      rules: name of an array's axis -> axes of the mesh.
    """

    mesh: jax.sharding.Mesh
    rules: Rules

    @property
    def _flax_rules(self) -> Any:
        return tuple((name, axes or None) for name, axes in self.rules)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Within it, modules that are traced are split over the mesh."""
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(self._flax_rules):
            yield

    def sharding(self, *names: str | None) -> jax.sharding.NamedSharding:
        """Gives how an array whose axes have these names is split."""
        spec = nn.logical_to_mesh_axes(names, self._flax_rules)
        return jax.sharding.NamedSharding(
            self.mesh, spec or jax.sharding.PartitionSpec()
        )

    def shares(self, name: str) -> int:
        """Gives into how many parts an axis with this name is split."""
        axes = dict(self.rules).get(name, ())
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def params_shardings(self, boxes: Any) -> Any:
        """Gives how each parameter is split, as a tree without boxes.

        Args:
          boxes: parameters or their shapes, in the boxes that `init` puts them in.

        Raises:
          ValueError: a name without a rule, a rule whose name is nowhere, an axis that
            does not divide, or an axis of the mesh that should split parameters and
            splits none.
        """
        specs = nn.get_partition_spec(boxes)
        shardings = nn.logical_to_mesh_sharding(specs, self.mesh, self._flax_rules)
        self._check(boxes, shardings)
        return shardings

    def _check(self, boxes: Any, shardings: Any) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(boxes, is_leaf=_is_box)
        known = dict(self.rules)
        found = {BATCH, LENGTH}
        used = {axis for name in found for axis in known.get(name, ())}
        for (path, box), sharding in zip(
            leaves, jax.tree.leaves(shardings), strict=True
        ):
            place = jax.tree_util.keystr(path, simple=True, separator="/")
            names = box.names if _is_box(box) else ()
            found.update(name for name in names if name)
            for name in names:
                if name and name not in known:
                    raise ValueError(
                        f"`rules` must have one for {name!r}, an axis of `{place}`, "
                        f"got {', '.join(known)}. Add '{name}=' to config.mesh.rules "
                        "to split it by nothing."
                    )
            shape = nn.meta.unbox(box).shape
            for size, name, part in zip(shape, names, sharding.spec, strict=False):
                axes = (part,) if isinstance(part, str) else tuple(part or ())
                used.update(axes)
                share = math.prod(self.mesh.shape[axis] for axis in axes)
                if size % share:
                    raise ValueError(
                        f"config.mesh must divide `{place}` {list(shape)}, got "
                        f"{'+'.join(axes)}={share} for {name!r}, of size {size}. "
                        "Change the mesh, or the rule in config.mesh.rules."
                    )
        for name in (*known, BATCH):
            if name not in known or name not in found:
                raise ValueError(
                    f"`rules` must name {', '.join(sorted(found))}, and nothing else, "
                    f"got {', '.join(known)}: see {name!r}. Correct config.mesh.rules."
                )
        for axis, size in self.mesh.shape.items():
            if size > 1 and axis not in used:
                raise ValueError(
                    f"config.mesh.{axis} must be 1 where no rule makes use of it, got "
                    f"{size}. Add it to a rule in config.mesh.rules."
                )

    def check_divides(self, sizes: dict[str, tuple[str, int]]) -> None:
        """Checks that arrays of a run can be split evenly.

        Args:
          sizes: name of an axis -> what decides its size, and the size.

        Raises:
          ValueError: an axis that the mesh does not divide.
        """
        for name, (what, size) in sizes.items():
            share = self.shares(name)
            if size % share:
                raise ValueError(
                    f"config.mesh must divide {what} = {size}, got {share} parts for "
                    f"{name!r}. Change one of them."
                )

    def rows(self, batch_size: int) -> slice:
        """Gives the rows of a batch that the devices of this process hold."""
        sharding = self.sharding(BATCH, None)
        places = sharding.addressable_devices_indices_map((batch_size, 1)).values()
        bounds = [place[0].indices(batch_size) for place in places if place]
        return slice(min(b[0] for b in bounds), max(b[1] for b in bounds))

    def place(self, rows: np.ndarray, batch_size: int) -> jax.Array:
        """Makes the batch of all processes from the rows that this one holds.

        Args:
          rows: [n, ...], those that `rows` names.
          batch_size: of all processes.

        Returns:
          [batch_size, ...] in the dtype of `rows`.
        """
        start = self.rows(batch_size).start

        def shard(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(batch_size)
            return rows[first - start : last - start]

        shape = (batch_size, *rows.shape[1:])
        return jax.make_array_from_callback(shape, self.sharding(BATCH), shard)


def make_layout(
    config: MeshConfig, devices: Sequence[jax.Device] | None = None
) -> Layout:
    """Gives the mesh over all devices.

    Args:
      config: the sizes and the rules.
      devices: by default those of all processes.

    Raises:
      ValueError: the sizes do not make up the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    given = math.prod(size for size in config.sizes.values() if size != -1)
    left = len(devices) // given
    sizes = {a: left if size == -1 else size for a, size in config.sizes.items()}
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"config.mesh must make up the {len(devices)} devices that there are, got "
            f"{config.sizes}. Give one size -1, and the others what divides "
            f"{len(devices)}."
        )
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=devices
    )
    return Layout(mesh=mesh, rules=parse_rules(config.rules))


def optimizer_shardings(
    optimizer: optax.GradientTransformation,
    abstract: Any,
    params_shardings: Any,
    whole: jax.sharding.NamedSharding,
) -> Any:
    """Splits what the optimizer keeps for each parameter as the parameter is split.

    Args:
      optimizer: whose state it is.
      abstract: the state's shapes.
      params_shardings: of the parameters.
      whole: of all else.
    """
    return optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract,
        params_shardings,
        transform_non_params=lambda _: whole,
    )


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.Partitioned)
