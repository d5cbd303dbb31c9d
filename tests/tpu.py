"""Compiles for a TPU that is not there, by the TPU's own compiler. Nothing is run."""

import functools
import re

import jax
import numpy as np
from jax.experimental import topologies

# One small topology of each generation.
GENERATIONS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


@functools.cache
def topology(name):
    return topologies.get_topology_desc(platform="tpu", topology_name=name)


def abstract(tree, name):
    """Places arrays, or their shapes, on one device of the topology."""
    sharding = jax.sharding.SingleDeviceSharding(topology(name).devices[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def on_device(name):
    """Gives a context in which kernels are lowered for one device of the topology."""
    # A private class, since JAX has no public way to say for which device a kernel is
    # lowered when that device is not present.
    from jax._src.mesh import AbstractDevice

    device = topology(name).devices[0]
    kind = AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    return jax.sharding.use_abstract_mesh(mesh)


def compile_for(name, function, *arguments):
    """Compiles a jitted `function` for one device of the topology."""
    with on_device(name):
        lowered = function.lower(*abstract(arguments, name))
    return lowered.compile()


def kernels(compiled):
    """Counts the Pallas kernels in the program."""
    return compiled.as_text().count('custom_call_target="tpu_custom_call"')


def moves(compiled, shape):
    """Gives the operations that move an array of this many elements without need."""
    size = max(int(np.prod(shape)), 8)
    found = []
    pattern = r"= (\w+)\[([\d,]*)\]\S* (copy|transpose|pad|reshape)\("
    for dtype, dimensions, operation in re.findall(pattern, compiled.as_text()):
        elements = int(np.prod([int(n) for n in dimensions.split(",") if n]))
        if elements >= size:
            found.append(f"{operation} {dtype}[{dimensions}]")
    return found
