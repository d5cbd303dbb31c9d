import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from oracle import TOWARD_ZERO, noisy, same_bits, toward_zero

from mixprec import views, wrap

A = noisy(jnp.zeros(3))
B = noisy(jnp.ones(3))


class Part(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(A)

    def __call__(self):
        return self.a[...]


class Tied(nnx.Module):
    """Reads a parameter of a wrapped part, by another part too."""

    def __init__(self, part, holder):
        self.inner = part
        self.other = holder(part)

    def __call__(self):
        return self.inner(), self.other()


def held_again(part):
    other = Part()
    other.a = part.a
    return other


def test_parameters_of_a_wrapped_part_are_refused_elsewhere():
    part = wrap(Part(), TOWARD_ZERO)
    model = wrap(Tied(part, held_again), "params: .*=nearest_even")
    with pytest.raises(ValueError, match="`inner/a` must be read by .* `inner` alone"):
        model()
    kept = wrap(Tied(wrap(Part(), "activations: .*=to_odd"), held_again), TOWARD_ZERO)
    assert same_bits(kept()[1], A)


class Whole(nnx.Module):
    """Runs what a test asks for, as one of its methods."""

    def __init__(self):
        self.part = Part()
        self.parts = nnx.data([Part()])
        self.count = nnx.BatchStat(jnp.zeros(()))
        self.steps = 0
        self.options = {"x": 1}

    def __call__(self, function, *args):
        return function(self, *args)


def wrapped(text="params: .*=toward_zero"):
    return wrap(Whole(), text)


# What a method changes.


def test_parameters_that_a_method_writes_are_written_as_they_are():
    model = wrapped()
    param = model.part.a

    def write(self):
        before = self.part.a[...]
        self.part.a[...] = B
        self.parts[0].a.set_metadata(sharding_hint="x")
        return before, self.part.a[...]

    results = model(write)
    assert same_bits(results, (toward_zero(A), toward_zero(B)))
    assert model.part.a is param
    assert same_bits(param[...], B)
    assert param.get_metadata("sharding_hint", None) is None
    assert model.parts[0].a.get_metadata("sharding_hint") == "x"
    assert model(lambda self: self.parts[0].a.sharding_hint) == "x"


def test_attributes_that_a_method_sets_changes_and_deletes_are_the_models():
    model = wrapped()

    def change(self):
        self.steps += 1
        self.count[...] += 2.0
        self.new = nnx.Param(B)
        self.alias = self.part
        self.parts.append(Part())
        self.made = nnx.clone(self.part)
        del self.options

    model(change)
    assert (model.steps, model.count[...]) == (1, 2.0)
    assert not hasattr(model, "options")
    assert model.alias is model.part
    assert same_bits(model.new[...], B)
    assert len(model.parts) == 2
    assert same_bits(model.made(), A)
    kinds = {type(x) for x in jax.tree.leaves(nnx.state(model), is_leaf=views.is_node)}
    assert kinds == {nnx.Param, nnx.BatchStat}
    assert same_bits(model(lambda self: self.made()), toward_zero(A))
    assert same_bits(model(lambda self: self.new[...]), toward_zero(B))
    assert isinstance(nnx.split(model), tuple)


def test_what_a_method_has_changed_before_it_fails_stays_changed():
    model = wrapped()

    def fail(self):
        self.steps = 7
        raise KeyError("as asked")

    with pytest.raises(KeyError, match="as asked"):
        model(fail)
    assert model.steps == 7
    assert same_bits(model.part(), A)


def test_lists_and_dictionaries_stay_the_same_objects():
    model = wrapped()
    parts, options = model.parts, model.options
    model(lambda self: self.options.update(z=3))
    assert model.parts is parts
    assert model.options is options
    assert options["z"] == 3


# What a method returns.


def test_what_a_method_returns_is_of_the_model_itself():
    model = wrapped()
    assert model(lambda self: self) is model
    assert model(lambda self: {"x": [self.part]})["x"][0] is model.part
    assert model(lambda self: self.part.a) is model.part.a
    state = model(lambda self: nnx.state(self, nnx.Param))
    assert same_bits(
        nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )
    assert type(state["part"]["a"]) is nnx.Param
    copy = model(nnx.clone)
    assert type(copy) is Whole
    assert same_bits(copy.part(), A)
    nnx.state(copy)


def test_what_runs_after_the_end_of_a_call_with_a_key_is_refused():
    model = wrap(Whole(), "params: .*=stochastic", rngs=nnx.Rngs(0))
    late = model(lambda self: lambda: self.part())
    with pytest.raises(ValueError, match="`part/a` must be read while a method"):
        late()
    # Without a key there is nothing that ends.
    assert same_bits(wrapped()(lambda self: lambda: self.part())(), toward_zero(A))


def test_arguments_and_results_may_be_no_trees_to_jax():
    given = {"x": 1, 2: "y"}  # keys that it cannot sort
    assert wrapped()(lambda self, x: x, given) is given
    model = wrapped()
    assert model(lambda self, part: part is self.part, model.part)


# What it is made of.


def test_sharing_and_cycles_stay():
    class Cyclic(nnx.Module):
        def __init__(self):
            self.part = Part()
            self.again = self.part
            self.itself = self

        def __call__(self):
            assert self.again is self.part
            assert self.itself is self
            return self.again()

    model = wrap(Cyclic(), TOWARD_ZERO)
    assert same_bits(model(), toward_zero(A))
    assert model.itself is model


def test_only_selected_params_have_views():
    model = wrapped("params: part/a=toward_zero, .*=keep")

    def look(self):
        assert self.part.a is not model.part.a
        assert isinstance(self.part.a, nnx.Param)
        assert type(self.part.a).__name__ == "Param"
        assert type(self) is Whole
        return self.parts[0].a, self.count

    assert model(look)[0] is model.parts[0].a
    assert model(lambda self: self.count is model.count)


def test_modules_that_are_no_pytrees_round():
    class Plain(nnx.Module, pytree=False):
        def __init__(self):
            self.part = Part()
            self.list = [Part()]

        def __call__(self):
            return self.part(), self.list[0]()

    policy = "params: .*=toward_zero; activations: part=nearest_even"
    for transform in (lambda f: f, nnx.jit):
        results = transform(lambda model: model())(wrap(Plain(), policy))
        assert same_bits(results, (toward_zero(A), toward_zero(A)))
