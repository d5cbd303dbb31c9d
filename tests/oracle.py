"""What the tests of wrapped modules compare with: trees rounded beforehand by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from mixprec import Policy, Rule

TOWARD_ZERO = Policy(params=(Rule(".*", "toward_zero"),))
STOCHASTIC = Policy(params=(Rule(".*", "stochastic"),))


def _map_float32(function, tree):
    def map_leaf(x):
        x = np.asarray(x)
        if x.dtype != np.float32:
            return x
        return function(x.view(np.uint32)).astype(np.uint32).view(np.float32)

    return jax.tree.map(map_leaf, tree)


def toward_zero(tree):
    """Rounds every float32 leaf to the bfloat16 value next to it toward zero."""
    return _map_float32(lambda bits: bits & np.uint32(0xFFFF0000), tree)


def away_from_zero(tree):
    """Rounds every float32 leaf to the bfloat16 value next to it away from zero."""
    upper = np.uint32(0xFFFF0000)
    return _map_float32(lambda bits: (bits + np.uint32(0xFFFF)) & upper, tree)


def noisy(tree, seed=0):
    """Adds noise to every float32 leaf, so that no value is one of bfloat16's."""
    generator = np.random.default_rng(seed)

    def add(x):
        if x.dtype != jnp.float32:
            return x
        noise = generator.normal(scale=0.1, size=x.shape).astype(np.float32)
        values = np.array(x) + noise
        # The lower half is bfloat16's error: never 0.
        return jnp.asarray((values.view(np.uint32) | np.uint32(1)).view(np.float32))

    return jax.tree.map(add, tree)


def same_bits(a, b):
    """Tells whether two trees agree in structure, dtypes, shapes and every bit."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    arrays = [(np.asarray(x), np.asarray(y)) for x, y in pairs]
    return all(
        (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        for x, y in arrays
    )
