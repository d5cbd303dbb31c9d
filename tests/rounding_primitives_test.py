import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import primitives_of
from jax.interpreters import mlir

from mixprec.rounding import primitives

twice_p = primitives.make("twice", lambda x, *, by: [x, x])
mlir.register_lowering(twice_p, mlir.lower_fun(lambda x, *, by: [x + by, 2 * x]))


def run(x, by=1.5):
    return twice_p.bind(x, by=by)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_runs_in_a_program_and_without(transform):
    x = jnp.arange(6.0).reshape(2, 3)
    for given in (x, np.asarray(x)):
        added, doubled = transform(run)(given)
        np.testing.assert_array_equal(added, x + 1.5)
        np.testing.assert_array_equal(doubled, 2 * x)


def test_runs_without_jit():
    with jax.disable_jit():
        assert run(jnp.float32(3), by=2)[0] == 5


def test_is_one_equation():
    assert primitives_of(run, jnp.ones(3)) == ["twice"]
