import copy
import itertools
import pickle
import threading

import cloudpickle
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from nnx_zoo import CLASSES, WIDTH, Block, Scanned, Stack, X, make, map_params, params
from oracle import (
    STOCHASTIC,
    TOWARD_ZERO,
    away_from_zero,
    noisy,
    same_bits,
    toward_zero,
)

from mixprec import Policy, Rule, explain, unwrap, wrap

Y = jnp.ones((4, 3))


def rngs(seed=0):
    return nnx.Rngs(rounding=seed)


def call(model, x):
    return model(x)


def loss(model, x):
    return jnp.mean(jnp.sin(model(x)))


def rounded(model):
    return map_params(toward_zero, model)


def paths_rounded(model, *prefixes):
    """Gives a copy whose parameters below some prefixes are rounded toward zero."""
    copied = nnx.clone(model)
    for path, param in nnx.to_flat_state(nnx.state(copied, nnx.Param)):
        if "/".join(map(str, path)).startswith(prefixes):
            down = jnp.asarray(toward_zero(param.get_raw_value()))
            nnx.update(copied, nnx.from_flat_state([(path, param.replace(down))]))
    return copied


def ups(drawn, x):
    """Tells which elements went up, having checked that each is a neighbour."""
    down, up = toward_zero(x), away_from_zero(x)
    drawn = np.asarray(drawn)
    assert np.all((drawn == down) | (drawn == up))
    assert np.all(down != up)
    return drawn == up


def assert_independent(went_up, other_went_up, x, other=None):
    """Asserts that two draws agree as often as independent ones would."""
    up, other_up = (
        (np.asarray(x).view(np.uint32) & np.uint32(0xFFFF)) / 65536
        for x in (x, x if other is None else other)
    )
    agree = up * other_up + (1 - up) * (1 - other_up)
    sigma = np.sqrt(np.mean(agree * (1 - agree)) / agree.size)
    assert abs((went_up == other_went_up).mean() - agree.mean()) < 5 * sigma
    assert agree.mean() + 5 * sigma < 1


class Values(nnx.Module):
    """Gives its parameter as it reads it, and its sum."""

    def __init__(self, *shape, seed=0):
        self.a = nnx.Param(noisy(jnp.zeros(shape), seed))

    def __call__(self, *_):
        return self.a[...]


# Values, against the unwrapped model whose Params were rounded beforehand.


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        *((name, nnx.jit) for name in CLASSES),
        *((name, lambda f: f) for name in ("stack", "jit", "scan", "reads")),
    ],
)
def test_results_are_those_of_rounded_parameters(name, transform):
    model = make(name)
    before = params(model)
    wrapped = wrap(model, TOWARD_ZERO)
    results = transform(call)(wrapped, X)
    assert same_bits(results, transform(call)(rounded(model), X))
    assert not same_bits(results, transform(call)(model, X))
    assert same_bits(params(wrapped), before)
    assert same_bits(params(model), before)


@pytest.mark.parametrize("name", ["stack", "jit", "scan"])
def test_only_what_a_rule_selects_is_rounded(name):
    policy = Policy(
        params=(
            Rule("layers/(0/)?norm/.*", None),
            Rule("layers/.*", "toward_zero"),
        )
    )
    model = make(name)
    prefixes = (*(f"layers/{i}" for i in "12"), "layers/0/linear", "layers/linear")
    expected = paths_rounded(model, *prefixes)
    assert same_bits(wrap(model, policy)(X), expected(X))
    assert not same_bits(expected(X), rounded(model)(X))


def test_bfloat16_can_be_handed_out():
    class Reading(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(noisy(jnp.zeros((WIDTH, WIDTH))))

        def __call__(self):
            return self.kernel[...], self.kernel.dtype, jnp.asarray(self.kernel)

    model = Reading()
    kernel = model.kernel[...]
    wrapped = wrap(model, Policy(params=TOWARD_ZERO.params, out_dtype="bfloat16"))
    down = jnp.asarray(toward_zero(kernel)).astype(jnp.bfloat16)
    assert same_bits(wrapped()[0], down)
    assert same_bits(wrapped()[2], down)
    assert wrapped()[1] == jnp.bfloat16
    assert wrapped.kernel.dtype == jnp.float32


def test_any_method_of_the_instance_rounds():
    model = make("stack")
    wrapped, expected = wrap(model, TOWARD_ZERO), rounded(model)
    assert same_bits(wrapped.encode(X), expected.encode(X))
    # It takes a part of the wrapped module, which it rounds as if it had found it.
    found = wrapped.run(wrapped.layers[1], X)
    assert same_bits(found, expected.layers[1](X))


def test_outside_of_methods_parameters_are_read_raw():
    model = make("stack")
    wrapped = wrap(model, TOWARD_ZERO)
    wrapped(X)
    assert same_bits(wrapped.head.kernel[...], model.head.kernel[...])
    assert type(wrapped.head.kernel) is nnx.Param
    assert same_bits(wrapped.layers[0](X), model.layers[0](X))
    graphdef, state = nnx.split(wrapped.layers[0])
    assert same_bits(nnx.merge(graphdef, state)(X), model.layers[0](X))


def test_what_a_part_has_traced_when_called_from_outside_is_not_used_inside():
    @nnx.jit
    def traced(layer, x):
        return layer(x)

    class Calling(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return traced(self.layer, x)

    model = map_params(noisy, Calling(nnx.Rngs(0)))
    wrapped = wrap(model, TOWARD_ZERO)
    up = wrap(model, Policy(params=(Rule(".*", "away_from_zero"),)))
    for _ in range(2):
        assert same_bits(traced(wrapped.layer, X), traced(model.layer, X))
        assert same_bits(wrapped(X), rounded(model)(X))
        assert same_bits(up(X), map_params(away_from_zero, model)(X))


def test_statistics_are_updated_and_not_rounded_and_dropout_is_as_before():
    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    model = map_params(noisy, Normed(nnx.Rngs(0)))
    expected, wrapped = rounded(model), wrap(model, TOWARD_ZERO)
    for transform in (lambda f: f, nnx.jit):
        assert same_bits(transform(call)(wrapped, X), transform(call)(expected, X))
        others = nnx.Not(nnx.Param)
        states = [
            jax.tree.map(
                lambda x: (
                    jax.random.key_data(x)
                    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
                    else x
                ),
                nnx.to_pure_dict(nnx.state(module, others)),
            )
            for module in (wrapped, expected)
        ]
        assert same_bits(*states)
    assert wrapped.dropout.rngs.count[...] == 2
    for module in (expected, wrapped):
        module.eval()
    assert same_bits(wrapped(X), expected(X))


# Gradients.


@pytest.mark.parametrize(
    "name", ["stack", "remat", "jit", "scan", "scan_remat", "vmap"]
)
def test_gradients_are_straight_through(name):
    model = make(name)
    gradients = nnx.jit(nnx.value_and_grad(loss))
    results = gradients(wrap(model, TOWARD_ZERO), X)
    assert same_bits(results, gradients(rounded(model), X))
    assert not same_bits(results, gradients(model, X))
    assert {x.dtype for x in jax.tree.leaves(results)} == {jnp.dtype("float32")}


def test_gradients_of_tied_parameters_add_up():
    model = make("tied")
    results = nnx.grad(loss)(wrap(model, TOWARD_ZERO), X)
    assert same_bits(results, nnx.grad(loss)(rounded(model), X))


def test_gradients_are_float32_where_bfloat16_is_handed_out():
    model = nnx.Linear(WIDTH, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model = map_params(noisy, model)
    wrapped = wrap(model, Policy(params=TOWARD_ZERO.params, out_dtype="bfloat16"))
    results = nnx.grad(lambda model: jnp.sum(model(X)))(wrapped)
    expected = nnx.grad(lambda model: jnp.sum(model(X)))(rounded(model))
    assert same_bits(results, expected)
    assert {x.dtype for x in jax.tree.leaves(results)} == {jnp.dtype("float32")}


def test_gradients_are_those_of_jax_over_a_split_model():
    model = make("scan_remat")
    expected = nnx.grad(loss)(rounded(model), X)
    graphdef, state = nnx.split(wrap(model, TOWARD_ZERO))
    results = jax.grad(lambda state: loss(nnx.merge(graphdef, state), X))(state)
    assert same_bits(nnx.to_pure_dict(results), nnx.to_pure_dict(expected))


@pytest.mark.parametrize("name", ["stack", "scan_remat"])
def test_gradients_of_parameters_and_activations_can_be_rounded(name):
    model = make(name)
    policy = Policy(gradients=(Rule(".*/(kernel|bias|scale)", "toward_zero"),))
    # The blocks use each parameter once.
    raw = nnx.jit(nnx.grad(loss))(model, X)
    results = nnx.jit(nnx.grad(loss))(wrap(model, policy), X)
    assert same_bits(nnx.to_pure_dict(results), toward_zero(nnx.to_pure_dict(raw)))

    policy = Policy(gradients=(Rule("", "toward_zero", at="out"),))
    cotangent = jax.grad(lambda y: jnp.mean(jnp.sin(y)))(model(X))
    down = jnp.asarray(toward_zero(cotangent))
    gradient = nnx.grad(lambda x, model, at: jnp.sum(model(x) * at))
    results = nnx.grad(lambda x, model: loss(model, x))(X, wrap(model, policy))
    np.testing.assert_allclose(results, gradient(X, model, down), rtol=1e-5, atol=1e-8)
    far = gradient(X, model, cotangent)
    assert not np.allclose(results, far, rtol=1e-5, atol=1e-8)


# Activations.


def test_outputs_and_inputs_of_modules_are_rounded():
    class Chain(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.second = Block(rngs)

        def __call__(self, x):
            y = self.first(x)
            return y, self.second(y)

    class Rounded(Chain):
        def __call__(self, x):
            y = jnp.asarray(toward_zero(self.first(x)))
            z = self.second(jnp.asarray(away_from_zero(y)))
            return y, jnp.asarray(toward_zero(z))

    policy = Policy.from_text(
        "activations: first=toward_zero, second:in=away_from_zero, second=toward_zero"
    )
    model, expected = Chain(nnx.Rngs(0)), Rounded(nnx.Rngs(0))
    assert same_bits(wrap(model, policy)(X), expected(X))
    assert not same_bits(wrap(model, policy)(X), model(X))


def test_other_methods_and_the_whole_are_sites():
    model = make("stack")
    encoded = jnp.asarray(toward_zero(model.encode(X)))
    expected = away_from_zero(model.head(encoded))
    text = 'activations: "":encode:out=toward_zero, "":out=away_from_zero'
    wrapped = wrap(model, Policy.from_text(text))
    assert same_bits(wrapped(X), jnp.asarray(expected))
    assert same_bits(wrapped.encode(X), encoded)


@pytest.mark.parametrize("name", ["scan", "scan_remat", "jit", "vmap"])
def test_activations_are_rounded_inside_of_transformations(name):
    class Traced(nnx.Module):
        def __init__(self, rngs):
            self.block = Block(rngs)

        def __call__(self, x):
            return self.block(x)

    class Down(Block):
        def __call__(self, x):
            bits = jax.lax.bitcast_convert_type(super().__call__(x), jnp.uint32)
            down = bits & jnp.uint32(0xFFFF0000)
            return jax.lax.bitcast_convert_type(down, jnp.float32)

    if name == "jit":
        model, expected = make("jit"), make("jit")
        for layer in expected.layers:
            object.__setattr__(layer, "__class__", Down)
        pattern = "layers/."
    else:
        model = make(name)
        expected = CLASSES[name](nnx.Rngs(0), block=Down)
        nnx.update(expected, nnx.state(model, nnx.Param))
        pattern = "layers"
    policy = Policy(activations=(Rule(pattern, "toward_zero"),))
    results = nnx.jit(call)(wrap(model, policy), X)
    assert same_bits(results, nnx.jit(call)(expected, X))
    assert not same_bits(results, nnx.jit(call)(model, X))


def test_what_is_no_array_passes_as_it_is():
    class Mixed(nnx.Module):
        def __init__(self):
            self.part = nnx.Param(jnp.ones(3))

        def __call__(self, x, other, flag=None):
            return {
                "x": x,
                "part": self.part,
                "n": 3,
                "s": "text",
                "other": other,
            }, flag

    wrapped = wrap(Mixed(), Policy.from_text('activations: "":in=toward_zero'))
    other = make("stack")
    results, flag = wrapped(X, other, flag=True)
    assert same_bits(results["x"], jnp.asarray(toward_zero(X)))
    assert results["part"] is wrapped.part
    assert results["other"] is other
    assert (results["n"], results["s"], flag) == (3, "text", True)


# Training.


@pytest.mark.parametrize("name", ["scan_remat", "jit"])
def test_an_optimizer_updates_float32_masters(name):
    def train(model):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            def mean_square(model):
                return jnp.mean((model(X) - Y) ** 2)

            value, gradients = nnx.value_and_grad(mean_square)(model)
            optimizer.update(model, gradients)
            return value

        return [float(step(model, optimizer)) for _ in range(20)]

    model = make(name)
    wrapped = wrap(model, STOCHASTIC, rngs=rngs())
    before = params(wrapped)
    values = train(wrapped)
    assert values[-1] < values[0] / 4
    after = params(wrapped)
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype("float32")}
    assert not same_bits(after, toward_zero(after))
    assert same_bits(params(model), before)
    assert wrapped.rounding_rngs.count[...] == 20


# Stochastic draws.


def test_each_call_draws_anew_and_unbiased():
    model = Values(200, 100)
    a = model.a[...]
    wrapped = wrap(model, STOCHASTIC, rngs=rngs())
    first, second = (ups(wrapped(), a) for _ in range(2))
    assert_independent(first, second, a)
    up = (np.asarray(a).view(np.uint32) & np.uint32(0xFFFF)) / 65536
    sigma = np.sqrt(np.sum(up * (1 - up)))
    assert abs(first.sum() - up.sum()) < 5 * sigma
    # The same key, the same draws.
    again = wrap(model, STOCHASTIC, rngs=rngs())
    assert np.array_equal(ups(again(), a), first)
    other = wrap(model, STOCHASTIC, rngs=rngs(1))
    assert_independent(ups(other(), a), first, a)


@pytest.mark.parametrize("name", ["jit", "remat", "scan_remat", "vmap"])
def test_each_call_draws_anew_inside_of_transformations(name):
    wrapped = wrap(make(name), STOCHASTIC, rngs=rngs())
    twin = wrap(make(name), STOCHASTIC, rngs=rngs())
    eager = [wrapped(X) for _ in range(2)]
    jitted = nnx.jit(call)
    for y in eager:
        np.testing.assert_allclose(jitted(twin, X), y, rtol=1e-5, atol=1e-6)
    assert not np.allclose(eager[0], eager[1], rtol=1e-5)


@pytest.mark.parametrize(
    "transform", [nnx.jit, nnx.scan(in_axes=0, out_axes=0), nnx.remat]
)
def test_what_has_been_traced_for_a_key_is_not_used_for_another(transform):
    traces = []

    @transform
    def traced(part):
        traces.append(part)
        return part.a[...]

    class Outer(nnx.Module):
        def __init__(self):
            self.part = Values(2, 500)

        def __call__(self, _=None):
            return traced(self.part)

    model = Outer()
    a = model.part.a[...]
    wrapped = wrap(model, STOCHASTIC, rngs=rngs())
    jitted = nnx.jit(lambda model, x: model())
    drawn = [
        wrapped(),
        wrapped(),
        jitted(wrapped, jnp.zeros(1)),
        jitted(wrapped, jnp.zeros(2)),  # traced again
    ]
    for first, second in itertools.combinations(drawn, 2):
        assert_independent(ups(first, a), ups(second, a), a)
    # Without a key there is one for all calls, and nothing to trace anew.
    wrapped = wrap(model, STOCHASTIC)
    first = wrapped()
    before = len(traces)
    assert same_bits(wrapped(), first)
    assert len(traces) == before or transform is nnx.remat


def test_traces_leave_no_key_behind():
    model = wrap(make("stack"), STOCHASTIC, rngs=rngs())
    with jax.checking_leaks():
        nnx.jit(nnx.grad(loss))(model, X)


@pytest.mark.parametrize("name", ["jit", "scan_remat"])
def test_no_trace_meets_the_key_of_another(name):
    model = wrap(make(name), STOCHASTIC, rngs=rngs())
    jitted = nnx.jit(nnx.value_and_grad(loss))
    values = [jitted(model, x)[0] for x in (X, X[:2], X, X[:2])]
    assert len({float(value) for value in values}) == 4


def test_without_a_stream_every_call_draws_alike():
    model = Values(40, 30)
    wrapped = wrap(model, STOCHASTIC)
    first = wrapped()
    ups(first, model.a[...])
    assert same_bits(nnx.jit(lambda model: model())(wrapped), first)
    other = wrap(model, Policy(params=STOCHASTIC.params, seed=1))
    assert_independent(
        ups(other(), model.a[...]), ups(first, model.a[...]), model.a[...]
    )
    assert not hasattr(wrapped, "rounding_rngs")


def test_training_without_a_stream_is_warned_of_once():
    wrapped = wrap(make("stack"), Policy(params=STOCHASTIC.params, seed=90217))
    with pytest.warns(UserWarning, match=r"seed 90217.*rngs=nnx\.Rngs\(rounding=0\)"):
        nnx.grad(loss)(wrapped, X)
    nnx.grad(loss)(wrapped, X)  # a second warning would be an error


@pytest.mark.parametrize("in_scan", [True, False], ids=["scan", "vmap"])
def test_layers_of_a_scan_and_members_of_a_vmap_draw_differently(in_scan):
    class Member(nnx.Module):
        def __init__(self, key):
            self.a = nnx.Param(jax.random.normal(key, (50, 40)))

        def __call__(self, x):
            return self.a[...], x

    class Members(nnx.Module):
        def __init__(self):
            keys = jax.random.split(jax.random.key(0), 2)
            self.members = nnx.vmap(Member)(keys)

        def __call__(self, x):
            if not in_scan:
                return nnx.vmap(lambda member: member(x))(self.members)
            return nnx.scan(lambda member: member(x), in_axes=0, out_axes=0)(
                self.members
            )

    model = map_params(noisy, Members())
    a, x = model.members.a[...], noisy(jnp.zeros((50, 40)))
    text = "params: .*=stochastic; activations: members=stochastic"
    drawn, passed = wrap(model, text, rngs=rngs())(x)
    # Rounded when read, parameters pass as they are.
    assert_independent(ups(drawn[0], a[0]), ups(drawn[1], a[1]), a[0], a[1])
    # The same values at the same path and places.
    assert_independent(ups(passed[0], x), ups(passed[1], x), x)


def test_a_rematerialized_pass_draws_what_the_first_one_drew():
    class Drawing(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.linear(x)), self.linear.kernel[...]

    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.layer = Drawing(rngs)

        def __call__(self, x):
            return nnx.remat(lambda layer, x: layer(x))(self.layer, x)

    def gradients(model):
        def loss(model):
            y, kernel = model(X)
            return jnp.sum(jnp.sin(y)), kernel

        return nnx.jit(nnx.grad(loss, has_aux=True))(model)

    model = map_params(noisy, Outer(nnx.Rngs(0)))
    policy = Policy(params=(Rule(".*/kernel", "stochastic"),))
    results, kernel = gradients(wrap(model, policy, rngs=rngs()))
    ups(kernel, model.layer.linear.kernel[...])
    model.layer.linear.kernel[...] = kernel
    # Another draw in the recomputation would give other gradients than these.
    assert same_bits(results, gradients(model)[0])


def test_streams_may_be_given_in_each_form_and_split():
    model = Values(30, 20)
    a = model.a[...]
    for given in (nnx.Rngs(3), nnx.Rngs(rounding=3), nnx.Rngs(3).dropout):
        ups(wrap(model, STOCHASTIC, rngs=given)(), a)

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(0, None))
    def make_two(rngs, a):
        made = Values(30, 20)
        made.a[...] = a
        return wrap(made, STOCHASTIC, rngs=rngs)

    pair = make_two(rngs(), a)
    drawn = nnx.vmap(lambda model: model())(pair)
    assert_independent(ups(drawn[0], a), ups(drawn[1], a), a)
    assert same_bits(pair.rounding_rngs.count[...], jnp.ones(2, jnp.uint32))


@pytest.mark.parametrize("given", [3, jax.random.key(0), {"rounding": 0}])
def test_other_streams_are_refused(given):
    with pytest.raises(
        TypeError, match=r"`rngs` must be an nnx\.Rngs or nnx\.RngStream"
    ):
        wrap(make("stack"), STOCHASTIC, rngs=given)
    with pytest.raises(
        ValueError, match=r'"rounding" or "default", got \[\'params\'\]'
    ):
        wrap(make("stack"), STOCHASTIC, rngs=nnx.Rngs(params=0))
    with pytest.raises(ValueError, match="`rngs` must be left out for a Linen module"):
        wrap(nn.Dense(3), STOCHASTIC, rngs=given)


def test_policies_that_draw_nothing_take_no_key():
    wrapped = wrap(make("stack"), TOWARD_ZERO, rngs=rngs())
    wrapped(X)
    assert wrapped.rounding_rngs.count[...] == 0


# What a model is to its users.


def test_a_wrapped_model_is_an_instance_with_the_same_attributes():
    model = make("stack")
    wrapped = wrap(model, TOWARD_ZERO)
    assert isinstance(wrapped, Stack)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(wrapped), name) == getattr(Stack, name)
    assert repr(wrapped) == repr(model)
    structures = [jax.tree.structure(nnx.state(m)) for m in (wrapped, model)]
    assert structures[0] == structures[1]
    assert type(model) is Stack


def test_wraps_of_equal_models_share_one_trace():
    traces = []

    @nnx.jit
    def traced(model, x):
        traces.append(model)
        return model(x)

    for policy in (
        TOWARD_ZERO,
        Policy(params=(Rule(".*", "toward_zero"),)),
        STOCHASTIC,
    ):
        traced(wrap(make("stack"), policy), X)
    assert len(traces) == 2
    assert nnx.graphdef(wrap(make("stack"), TOWARD_ZERO)) == nnx.graphdef(
        wrap(make("stack", seed=1), TOWARD_ZERO)
    )


@pytest.mark.parametrize("name", ["scan", "tied"])
def test_copies_round(name):
    wrapped = wrap(make(name), STOCHASTIC, rngs=rngs())
    copies = (
        nnx.clone(wrapped),
        copy.copy(wrapped),
        copy.deepcopy(wrapped),
        nnx.merge(*nnx.split(wrapped)),
        nnx.merge(*nnx.split(wrapped, nnx.Param, ...)),
        pickle.loads(pickle.dumps(wrapped)),
        cloudpickle.loads(cloudpickle.dumps(wrapped)),
    )
    expected = wrapped(X)
    assert not same_bits(expected, unwrap(wrapped)(X))
    for other in copies:
        assert type(other) is type(wrapped)
        other.rounding_rngs.count[...] = jnp.uint32(0)
        assert same_bits(other(X), expected)


def test_graph_definitions_survive_pickling():
    wrapped = wrap(make("stack"), TOWARD_ZERO)
    graphdef, state = nnx.split(wrapped)
    for library in (pickle, cloudpickle):
        other = library.loads(library.dumps(graphdef))
        assert other == graphdef
        assert same_bits(nnx.merge(other, state)(X), wrapped(X))


def test_models_of_local_classes_survive_cloudpickle():
    class Local(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(noisy(jnp.zeros(3)))

        def __call__(self):
            return self.a[...]

    wrapped = wrap(Local(), TOWARD_ZERO)
    other = cloudpickle.loads(cloudpickle.dumps(wrapped))
    assert same_bits(other(), toward_zero(wrapped.a[...]))


def test_updates_from_a_raw_model_keep_the_rounding():
    model, other = make("scan_remat"), make("scan_remat", seed=1)
    wrapped = wrap(model, TOWARD_ZERO)
    nnx.update(wrapped, nnx.state(other))
    assert same_bits(wrapped(X), rounded(other)(X))
    nnx.update(model, nnx.state(wrapped))
    assert same_bits(model(X), other(X))


def test_unwrap_gives_the_original_back():
    model = make("stack")
    plain = unwrap(wrap(model, STOCHASTIC, rngs=rngs()))
    assert type(plain) is Stack
    assert same_bits(plain(X), model(X))
    assert nnx.graphdef(plain) == nnx.graphdef(model)
    assert nnx.graphdef(unwrap(model)) == nnx.graphdef(model)
    plain.head.bias[...] += 1.0
    assert not same_bits(plain(X), model(X))


def test_wrapping_again_replaces_the_policy_and_the_stream():
    model = make("stack")
    twice = wrap(wrap(model, STOCHASTIC, rngs=rngs()), TOWARD_ZERO)
    assert type(twice) is type(wrap(model, TOWARD_ZERO))
    assert not hasattr(twice, "rounding_rngs")
    assert same_bits(twice(X), rounded(model)(X))


def test_a_model_in_a_closure_rounds():
    model = make("stack")
    wrapped = wrap(model, TOWARD_ZERO)
    expected = rounded(model)
    results = jax.jit(lambda x: wrapped(x))(X)
    assert same_bits(results, jax.jit(lambda x: expected(x))(X))
    drawing = wrap(model, STOCHASTIC, rngs=rngs())
    with pytest.raises(Exception, match="different trace level"):
        jax.jit(lambda x: drawing(x))(X)


def test_threads_do_not_meet():
    model = make("scan")
    subjects = {
        "raw": (model, model(X)),
        "down": (wrap(model, TOWARD_ZERO), rounded(model)(X)),
    }
    wrapped = subjects["down"][0]
    tasks = [
        lambda: same_bits(wrapped(X), subjects["down"][1]),
        lambda: same_bits(wrapped(X), subjects["down"][1]),
        lambda: same_bits(model(X), subjects["raw"][1]),
        lambda: same_bits(wrapped.head.kernel[...], model.head.kernel[...]),
    ]
    barrier, agree = threading.Barrier(len(tasks)), [None] * len(tasks)

    def run(place):
        barrier.wait()
        agree[place] = [tasks[place]() for _ in range(3)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agree == [[True] * 3] * len(tasks)


# Wrapped parts.


def test_wrapped_parts_of_a_plain_model_round_alone():
    model = make("stack")
    expected = paths_rounded(model, "layers/1")(X)
    model.layers[1] = wrap(model.layers[1], TOWARD_ZERO)
    assert same_bits(model(X), expected)


def test_the_policy_of_an_inner_wrap_wins_and_the_outer_key_holds_inside():
    model = make("stack")
    expected = paths_rounded(model, "layers/0", "layers/2", "head")
    for param in (expected.layers[1].linear.kernel,):
        param[...] = jnp.asarray(away_from_zero(param[...]))
    up = Policy(params=(Rule("linear/kernel", "away_from_zero"),))
    model.layers[1] = wrap(model.layers[1], up)
    outer = wrap(model, TOWARD_ZERO)
    assert same_bits(outer(X), expected(X))
    assert same_bits(nnx.jit(call)(outer, X), nnx.jit(call)(expected, X))

    class Outer(nnx.Module):
        def __init__(self):
            self.part = wrap(Values(30, 20), STOCHASTIC)
            self.b = nnx.Param(jnp.ones(3))

        def __call__(self):
            return self.part(), self.b[...]

    drawing = wrap(Outer(), STOCHASTIC, rngs=rngs())
    a = drawing.part.a[...]
    assert_independent(ups(drawing()[0], a), ups(drawing()[0], a), a)
    before = drawing.part()
    assert same_bits(drawing.part(), before)  # called alone, from its policy's seed


# Rules that match nothing, and what cannot be rounded.


@pytest.mark.parametrize("name", ["stack", "scan"])
def test_rules_must_match(name):
    texts = {
        "params: head/kernle=toward_zero": "'head/kernle'.*nearest: 'head/kernel'",
        "gradients: haed/bias=toward_zero": "'haed/bias'.*The nearest: 'head/bias'",
        "activations: haed=toward_zero": "some module path, got 'haed'.*'head'",
        "gradients: haed:out=toward_zero": "some module path, got 'haed'.*'head'",
        "activations: head:encode:out=toward_zero": "only 'head:__?call__:|only 'head",
        "params: .*=keep, head/.*=toward_zero": "decided by the earlier rule '.*=keep'",
    }
    for text, message in texts.items():
        wrapped = wrap(make(name), text)
        with pytest.raises(ValueError, match=message):
            wrapped(X)
        with pytest.raises(ValueError, match=message):
            nnx.jit(call)(wrapped, X)
        with pytest.raises(ValueError, match=message):
            explain(wrapped, X)
        (unused,) = explain(wrapped, X, strict=False).unused
        with pytest.raises(ValueError, match=message):
            raise ValueError(unused)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_masters_of_other_float_types_are_refused(dtype):
    class Masters(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(np.ones(3, dtype))
            self.b = nnx.Param(noisy(jnp.zeros(3)))
            self.c = nnx.Param(jnp.arange(3))
            self.d = nnx.Param(jnp.full(3, 1.0078125, jnp.bfloat16))

        def __call__(self):
            return self.a[...], self.b[...], self.c[...], self.d[...]

    model = Masters()
    message = f"`a` must be float32 to be rounded to bfloat16, got {np.dtype(dtype)}"
    with pytest.raises(TypeError, match=message):
        wrap(model, TOWARD_ZERO)()
    with pytest.raises(TypeError, match=message):
        explain(wrap(model, TOWARD_ZERO))
    expected = (model.a[...], toward_zero(model.b[...]), model.c[...], model.d[...])
    results = wrap(model, "params: a=keep, .*=toward_zero")()
    assert same_bits(results, expected)


@pytest.mark.parametrize("subject", [nnx.Linear, jnp.tanh, {}, None, nnx.Rngs(0)])
def test_what_is_no_module_is_refused(subject):
    message = r"a flax\.linen\.Module or a flax\.nnx\.Module, got"
    for function in (lambda x: wrap(x, TOWARD_ZERO), unwrap, explain):
        with pytest.raises(TypeError, match=message):
            function(subject)


# The bridges between Linen and NNX.


def test_a_wrapped_linen_module_rounds_in_nnx():
    dense = nn.Dense(3)
    plain = nnx.bridge.ToNNX(dense, rngs=nnx.Rngs(0)).lazy_init(X)
    bridged = nnx.bridge.ToNNX(wrap(dense, TOWARD_ZERO), rngs=nnx.Rngs(0)).lazy_init(X)
    plain = map_params(noisy, plain)
    nnx.update(bridged, nnx.state(plain))
    assert same_bits(bridged(X), rounded(plain)(X))


def test_a_plain_linen_module_in_nnx_is_refused():
    bridged = nnx.bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0)).lazy_init(X)
    message = r"`(part/)?(bias|kernel)` must be wrapped as a part of its Linen module"
    with pytest.raises(TypeError, match=message):
        wrap(bridged, TOWARD_ZERO)(X)

    class Holding(nnx.Module):
        def __init__(self):
            self.part = bridged
            self.partial = nnx.Param(noisy(jnp.zeros(3)))

        def __call__(self, x):
            return self.part(x), self.partial[...]

    with pytest.raises(TypeError, match=message):
        wrap(Holding(), TOWARD_ZERO)(X)
    model = Holding()
    y, partial = wrap(model, "params: part/.*=keep, .*=toward_zero")(X)
    assert same_bits(y, bridged(X))
    assert same_bits(partial, toward_zero(model.partial[...]))


def test_an_nnx_module_in_linen_rounds_when_wrapped():
    bridged = nnx.bridge.to_linen(nnx.Linear, WIDTH, 3)
    variables = noisy(bridged.init(jax.random.key(0), X))
    results = wrap(bridged, TOWARD_ZERO).apply(variables, X)
    assert same_bits(results, bridged.apply(toward_zero(variables), X))
    assert not same_bits(results, bridged.apply(variables, X))


# `explain`.


@pytest.mark.parametrize("jitted", [False, True])
def test_explain_tells_what_is_rounded(jitted):
    text = "params: head/bias=keep, .*/kernel=stochastic(min_size=30)"
    policy = f"{text}; activations: layers=nearest_even; gradients: head:out=to_odd"
    wrapped = wrap(Scanned(nnx.Rngs(0)), policy, rngs=rngs())
    inputs = jax.ShapeDtypeStruct(X.shape, X.dtype) if jitted else X
    explanation = explain(wrapped, inputs)
    described = [
        (row.kind, row.path, row.shape, row.mode, row.kept) for row in explanation.rows
    ]
    assert described == [
        ("parameter", "head/bias", (3,), None, "keep"),
        ("parameter", "head/kernel", (8, 3), None, "below min_size=30"),
        ("parameter", "layers/linear/bias", (3, 8), None, "no rule"),
        ("parameter", "layers/linear/kernel", (3, 8, 8), "stochastic", None),
        ("parameter", "layers/norm/bias", (3, 8), None, "no rule"),
        ("parameter", "layers/norm/scale", (3, 8), None, "no rule"),
        ("activation", "layers:out", (4, 8), "nearest_even", None),
        ("gradient", "head:out", (4, 3), "to_odd", None),
    ]
    assert explanation.policy == Policy.from_text(policy)
    assert wrapped.rounding_rngs.count[...] == 0
    assert "1 of 6 parameters rounded" in str(explanation)


def test_explain_tells_wrapped_parts_by_their_own_policy():
    model = make("stack")
    model.layers[1] = wrap(
        model.layers[1], "params: .*/scale=to_odd; activations: norm=to_odd"
    )
    rows = explain(wrap(model, "params: .*/kernel=toward_zero"), X).rows
    modes = {row.path: row.mode for row in rows if row.mode}
    assert modes == {
        "head/kernel": "toward_zero",
        "layers/0/linear/kernel": "toward_zero",
        "layers/2/linear/kernel": "toward_zero",
        "layers/1/norm/scale": "to_odd",
        "layers/1/norm:out": "to_odd",
    }


def test_explain_takes_arguments_by_name_and_wants_a_wrapped_module():
    class Options(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, 3, rngs=rngs)

        def __call__(self, x, mask=None, *, train=True):
            y = self.linear(x)
            return y if train else y * mask

    model = Options(nnx.Rngs(0))
    wrapped = wrap(model, "activations: linear=to_odd")
    mask = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    rows = explain(wrapped, X, mask=mask, train=False).rows
    assert [row.path for row in rows if row.mode] == ["linear:out"]
    with pytest.raises(TypeError, match="from mixprec.wrap, got a plain Options"):
        explain(model, X)


def test_gathering_is_for_linen():
    policy = Policy.from_text("params: .*=nearest_even; gather=fsdp")
    with pytest.raises(ValueError, match="`gather` must be left out .*, got 'fsdp'"):
        wrap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), policy)
