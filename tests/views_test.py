import functools
import inspect

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from canary import moved
from flax import nnx
from oracle import TOWARD_ZERO, noisy, same_bits, toward_zero

from mixprec import nnx as wrapping
from mixprec import views, wrap

A = noisy(jnp.zeros(3))
B = noisy(jnp.ones(3))


class Pair(nnx.Module):
    """Reads the same values at two paths, some of them by place."""

    def __init__(self, values):
        self.a = nnx.Param(values)
        self.b = nnx.data([nnx.Param(values)])

    def __call__(self):
        return self.a[...], self.a.get_value(), self.b[0][...], self.a[3:7]


# Views.


def test_subclasses_of_params_stay_what_they_are():
    class Doubled(nnx.Param):
        def get_value(self, **kwargs):
            return 2.0 * super().get_value(**kwargs)

    class Holding(nnx.Module):
        def __init__(self):
            self.a = Doubled(A)
            self.b = nnx.Cache(A)

        def __call__(self):
            assert isinstance(self.a, Doubled)
            return self.a[...], self.b[...]

    results = wrap(Holding(), TOWARD_ZERO)()
    assert same_bits(results, (toward_zero(2.0 * A), A))


def test_python_numbers_and_keys_are_read_as_under_jit():
    class Holding(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(0.1), nnx.Param(jax.random.key(0))

        def __call__(self, key):
            return self.a.get_value(), self.b.get_value(), key

    policy = (
        "params: .*=toward_zero; activations: :in=toward_zero, :out=toward_zero; "
        "gradients: :in=to_odd, b=to_odd"
    )
    model, key = wrap(Holding(), policy), jax.random.key(1)
    for call in (model, nnx.jit(lambda key: model(key))):
        a, b, passed = call(key)
        assert same_bits(a, toward_zero(jnp.float32(0.1)))
        assert (b, passed) == (jax.random.key(0), key)
    assert model.a.get_value() == 0.1


def test_operators_and_partial_methods_read_rounded():
    class Holding(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(A)

        def __matmul__(self, x):
            return self.a * x

        def __rmul__(self, x):
            return self.a + x

        def __getitem__(self, place):
            return self.a[place]

        def scaled(self, by):
            return self.a * by

        doubled = functools.partialmethod(scaled, 2.0)

    model, a = wrap(Holding(), TOWARD_ZERO), toward_zero(A)
    results = model @ B, 3.0 * model, model[1], model.doubled()
    assert same_bits(results, (a * B, a + 3.0, a[1], a * 2.0))
    by_rule = wrap(Holding(), "activations: :__matmul__:out=toward_zero")
    assert same_bits(by_rule @ B, toward_zero(A * B))


def test_arrays_that_jax_does_not_know_of_are_told():
    class Out:
        def __init__(self, y):
            self.y = y

    class Holding(nnx.Module):
        def __call__(self, x):
            return Out(x), None, 3, "text"

    model = wrap(Holding(), "activations: :out=toward_zero")
    with pytest.warns(UserWarning, match="`:out` passes an object of class .*Out"):
        assert same_bits(model(A)[0].y, A)


def test_params_held_by_reference_are_read_rounded():
    class Holding(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(A, ref=True)

        def __call__(self):
            before = self.a[...]
            self.a[...] = B
            return before

    model = wrap(Holding(), TOWARD_ZERO)
    assert same_bits(model(), toward_zero(A))
    assert same_bits(model.a[...], B)


def test_hijax_params_are_refused():
    class Holding(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(A, hijax=True)

        def __call__(self):
            return self.a[...]

    with pytest.raises(TypeError, match="`a` must be no hijax Variable to be rounded"):
        wrap(Holding(), TOWARD_ZERO)()


# Methods.


def test_methods_are_what_binds_and_is_not_of_every_module():
    class Odd(nnx.Module):
        kind = int
        double = staticmethod(lambda x: 2 * x)

        def __init__(self):
            self.a = nnx.Param(A)

        def __call__(self):
            return self.a[...]

        def __len__(self):
            return 3

        @property
        def value(self):
            return self.a[...]

        @classmethod
        def make(cls):
            return cls()

        @nnx.jit
        def traced(self):
            return self.a[...]

        @jax.jit
        def traced_by_jax(self):
            return self.a[...]

        @nnx.remat
        def rematerialized(self):
            return self.a[...]

        def train(self, **attributes):
            return self.a[...]

    names = {"__call__", "traced", "traced_by_jax", "rematerialized", "train"}
    assert views.methods(Odd).keys() == names
    model = wrap(Odd(), TOWARD_ZERO)
    for name in names:
        assert same_bits(getattr(model, name)(), jnp.asarray(toward_zero(A)))
    assert same_bits(model.value, A)
    assert (len(model), model.double(2), model.kind) == (3, 4, int)
    assert wrapping.is_wrapped(model.make())
    assert same_bits(model.make()(), toward_zero(A))


def test_sites_are_those_of_methods():
    sites = {str(site) for site in views.sites(Pair, "x/part")}
    assert sites == {"x/part:in", "x/part:out"}


# Draws.


def test_paths_tell_draws_apart_and_reads_of_one_call_agree():
    model = wrap(
        Pair(noisy(jnp.zeros(1000))), "params: .*=stochastic", rngs=nnx.Rngs(0)
    )
    first, again, other, some = model()
    assert same_bits(first, again)
    assert same_bits(first[3:7], some)
    assert 0 < np.mean(np.asarray(first) == np.asarray(other)) < 1


# What is leaned on in Flax without a promise.


USERS = "mixprec.views and mixprec.standins"


def test_canary_variables_keep_value_and_metadata_apart():
    param = nnx.Param(A, tag="t")
    assert hasattr(param, "_var_metadata"), moved("`Variable._var_metadata`", USERS)
    assert param._var_metadata["tag"] == "t", moved("`Variable._var_metadata`", USERS)
    assert hasattr(param, "_trace_state"), moved("`Variable._trace_state`", USERS)
    assert hasattr(nnx.Param, "_new"), moved("`Variable._new`", USERS)
    made = nnx.Param._new(B, {"tag": "u"})
    found = type(made), made.get_metadata()
    assert found == (nnx.Param, {"tag": "u"}), moved("arguments of `_new`", USERS)
    assert made.get_raw_value() is B, moved("arguments of `_new`", USERS)


def test_canary_a_variable_can_be_changed_only_where_it_was_made():
    param = nnx.Param(A)

    @jax.jit
    def change(x):
        made = nnx.Param._new(x, param.get_metadata())
        object.__setattr__(made, "_trace_state", param._trace_state)
        with pytest.raises(flax.errors.TraceContextError):
            made[...] = 2 * x
        return x

    change(A)
    assert same_bits(param[...], A)


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p[...],
        lambda p: p[1:2],
        lambda p: p.get_value(),
        lambda p: p + 1,
        lambda p: p.T,
        lambda p: jnp.sin(p),
        lambda p: np.asarray(p),
        lambda p: p.astype(jnp.float16),
    ],
    ids=["all", "part", "get_value", "operator", "T", "jnp", "numpy", "method"],
)
def test_canary_variables_are_read_by_get_value(read):
    asked = []

    class Telling(nnx.Param):
        def get_value(self, **kwargs):
            asked.append(kwargs)
            return super().get_value(**kwargs)

        def __getattr__(self, name):
            return getattr(self.get_value(), name)

    read(Telling(A))
    assert asked, moved("reads of Variables, which are not by `get_value`", USERS)
    assert {name for kwargs in asked for name in kwargs} <= {"index"}, moved(
        "arguments of `get_value`", USERS
    )


def test_canary_modules_are_pytrees_with_attributes_in_their_dict():
    model = Pair(A)
    assert nnx.Module._pytree__is_pytree is True, moved("`_pytree__is_pytree`", USERS)
    names = inspect.signature(nnx.Module.__init_subclass__).parameters
    assert "pytree" in names, moved('the class keyword "pytree"', USERS)
    assert vars(model)["a"] is model.a, moved("attributes out of `vars`", USERS)
    copy = object.__new__(Pair)
    vars(copy).update(vars(model))
    same = nnx.graphdef(copy) == nnx.graphdef(model)
    assert same, moved("what makes a copied `vars` a module", USERS)


def test_canary_hijax_variables_are_told_by_name():
    param = nnx.Param(A, hijax=True)
    name = type(param).__name__
    assert name == "HijaxVariable", moved("`HijaxVariable`", USERS)
