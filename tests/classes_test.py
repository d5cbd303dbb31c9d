from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from oracle import TOWARD_ZERO, noisy, same_bits, toward_zero

from mixprec import classes, unwrap, wrap

X = noisy(jnp.ones((2, 4)))
KEY = jax.random.key(0)


class Registered(nn.Module):
    """Keeps a register of its subclasses, which must say what they are."""

    known: ClassVar = {}

    def __init_subclass__(cls, *, kind, **options):
        super().__init_subclass__(**options)
        cls.scale = {"double": 2.0, "half": 0.5}[kind]
        Registered.known[cls.__name__] = cls


class Double(Registered, kind="double"):
    @nn.compact
    def __call__(self, x):
        return self.scale * x @ self.param("kernel", nn.initializers.normal(), (4, 4))


class RegisteredNNX(nnx.Module):
    """The same for NNX."""

    known: ClassVar = {}

    def __init_subclass__(cls, *, kind, **options):
        super().__init_subclass__(**options)
        cls.scale = {"double": 2.0, "half": 0.5}[kind]
        RegisteredNNX.known[cls.__name__] = cls


class DoubleNNX(RegisteredNNX, kind="double"):
    def __init__(self):
        self.kernel = nnx.Param(noisy(jnp.ones((4, 4))))

    def __call__(self, x):
        return self.scale * x @ self.kernel


def test_a_linen_class_is_not_registered_again():
    module = Double()
    variables = noisy(module.init(KEY, X))
    wrapped = wrap(module, TOWARD_ZERO)
    expected = module.apply(toward_zero(variables), X)
    assert same_bits(wrapped.apply(variables, X), expected)
    assert Registered.known == {"Double": Double}
    assert type(unwrap(wrapped)) is Double


@pytest.mark.parametrize(
    "rules", ["params: .*=toward_zero", "activations: :in=toward_zero"]
)
def test_an_nnx_class_is_not_registered_again(rules):
    model = DoubleNNX()
    wrapped = wrap(model, rules)
    rounds_params = rules.startswith("params")
    kernel = model.kernel[...]
    x, kernel = (X, toward_zero(kernel)) if rounds_params else (toward_zero(X), kernel)
    assert same_bits(wrapped(x if rounds_params else X), 2.0 * x @ kernel)
    assert RegisteredNNX.known == {"DoubleNNX": DoubleNNX}
    assert type(unwrap(wrapped)) is DoubleNNX


def test_what_is_derived_from_a_wrapped_class_is_registered():
    wrapped = type(wrap(Double(), TOWARD_ZERO))

    class Half(wrapped, kind="half"):
        pass

    assert Registered.known.pop("Half") is Half
    assert Half.scale == 0.5


def test_subclasses_look_like_the_class():
    made = classes.subclass(Double, {"more": 3}, flax_base=nn.Module)
    assert issubclass(made, Double)
    assert made.more == 3
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(made, name) == getattr(Double, name)
    plain = classes.subclass(nn.Dense, {}, flax_base=nn.Module)
    assert plain.__bases__ == (nn.Dense,)
