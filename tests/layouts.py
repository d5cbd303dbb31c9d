"""Layouts over the devices of the tests, of which there are eight."""

import jax

from configs import default
from mixprec.training import sharding

RULES = default.get_config().mesh.rules


def make(rules=RULES, devices=None, **sizes):
    """Splits over as many devices as the sizes make up."""
    sizes = {axis: sizes.get(axis, 1) for axis in sharding.AXES}
    config = sharding.MeshConfig(**sizes, rules=rules)
    if devices is None:
        number = 1
        for size in sizes.values():
            number *= size
        devices = jax.devices()[:number]
    return sharding.make_layout(config, devices)


def one_device(*names):
    """For a model whose parameters name these axes."""
    return make(", ".join(["batch=data", *(f"{name}=" for name in names)]))
