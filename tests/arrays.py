"""Arrays for the tests: inputs, and results as whole numbers to compare."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0):
    """Gives float32 inputs."""
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, jnp.float32)


def words(x):
    """Gives the bit patterns of floats."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def primitives_of(function, *args):
    """Gives the names of all equations of a function, traced."""
    return [eqn.primitive.name for eqn in jax.make_jaxpr(function)(*args).eqns]
