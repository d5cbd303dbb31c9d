import inspect
import re

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu
from arrays import normal
from canary import moved
from flax.core import meta
from oracle import (
    STOCHASTIC,
    TOWARD_ZERO,
    away_from_zero,
    noisy,
    same_bits,
    toward_zero,
)
from zoo import CASES, WIDTH, Block, Case, Compact, Jit, Scan, Setup, X

from mixprec import linen, scopes
from mixprec.policy import Policy, Rule
from mixprec.rounding import platforms

KEYS = [jax.random.key(seed) for seed in range(3)]


def rounding(pattern, mode="toward_zero", **options):
    return Policy(params=(Rule(pattern, mode),), **options)


def rounding_outputs(pattern, mode="toward_zero", **options):
    return Policy(activations=(Rule(pattern, mode),), **options)


class Values(nn.Module):
    """Returns its parameters as it reads them."""

    shape: tuple[int, ...] = (WIDTH, WIDTH)

    @nn.compact
    def __call__(self, *_):
        return [
            self.param(name, nn.initializers.normal(), self.shape)
            for name in ("a", "b")
        ]


JitValues = nn.jit(Values)


def read(params, policy, *, key=None, module=None):
    """Gives the parameters of `Values` as a wrapped one reads them."""
    module = Values(params["a"].shape) if module is None else module
    rngs = {} if key is None else {"rounding": key}
    return linen.wrap(module, policy).apply({"params": params}, rngs=rngs)


def pair(*shape, seed=0):
    return {"a": normal(*shape, seed=seed), "b": normal(*shape, seed=seed + 1)}


def ups(rounded, x):
    """Tells which elements went up, having checked that each is a neighbour."""
    down, up = toward_zero(x), away_from_zero(x)
    rounded = np.asarray(rounded)
    assert np.all((rounded == down) | (rounded == up))
    assert np.all(down != up)
    return rounded == up


def assert_independent(went_up, other_went_up, x):
    """Asserts that two draws agree as often as independent ones would."""
    bits = np.asarray(x).view(np.uint32) & np.uint32(0xFFFF)
    up = bits.astype(np.float64) / 65536
    agree = up**2 + (1 - up) ** 2
    sigma = np.sqrt(np.mean(agree * (1 - agree)) / bits.size)
    assert abs((went_up == other_went_up).mean() - agree.mean()) < 5 * sigma
    assert agree.mean() + 5 * sigma < 1


# Ways to a parameter.


def test_every_way_of_reading_gives_the_same_rounded_value():
    class Ways(nn.Module):
        @nn.compact
        def __call__(self):
            return [
                self.param("kernel", nn.initializers.normal(), (3,)),
                self.get_variable("params", "kernel"),
                self.variables["params"]["kernel"],
                self.scope.parent.get_variable("params", "ways")["kernel"],
                self.scope.parent.variables()["params"]["ways"]["kernel"],
            ]

    class Parent(nn.Module):
        @nn.compact
        def __call__(self):
            ways = Ways(name="ways")
            return [*ways(), ways.variables["params"]["kernel"]]

    kernel = noisy(jnp.zeros(3))
    variables = {"params": {"ways": {"kernel": kernel}}}
    reads = linen.wrap(Parent(), TOWARD_ZERO).apply(variables)
    assert same_bits(reads, [toward_zero(kernel)] * 6)
    reads = linen.wrap(Parent(), STOCHASTIC).apply(variables)
    ups(reads[0], kernel)
    assert same_bits(reads, [reads[0]] * 6)


def test_defaults_other_collections_and_missing_values_are_left_alone():
    default = normal(3)

    class Defaults(nn.Module):
        @nn.compact
        def __call__(self):
            return [
                self.get_variable("params", "missing", default),
                self.get_variable("params", "missing"),
                self.get_variable("cache", "kernel"),
                self.variables["cache"]["kernel"],
            ]

    variables = {"params": {"kernel": default}, "cache": {"kernel": default}}
    results = linen.wrap(Defaults(), TOWARD_ZERO).apply(variables)
    assert same_bits(results, [default, None, default, default])


def test_partitioning_boxes_and_their_specs_stay():
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.normal(), ("in", "out"))
            dense = nn.Dense(3, kernel_init=init, name="dense")
            return dense(x), self.variables, dense.get_variable("params", "kernel")

    module, wrapped = Boxed(), linen.wrap(Boxed(), rounding("dense/kernel"))
    variables = wrapped.init(KEYS[0], X)
    assert same_bits(variables, module.init(KEYS[0], X))
    y, inside, kernel = wrapped.apply(variables, X)
    assert isinstance(kernel, nn.LogicallyPartitioned)
    assert nn.get_partition_spec(inside) == nn.get_partition_spec(variables)
    params = variables["params"]["dense"]
    rounded = toward_zero(params["kernel"])
    assert same_bits(kernel, rounded)
    assert same_bits(meta.unbox(inside)["params"]["dense"]["kernel"], rounded.value)
    assert same_bits(y, X @ rounded.value + params["bias"][None])


def test_paths_name_the_leaves_of_trees_and_no_boxes():
    params = {
        "tree": {0: jnp.zeros(1), 1: (jnp.zeros(2), [jnp.zeros(3)])},
        "box": nn.Partitioned(jnp.zeros(4), names=("in",)),
    }
    paths = scopes.param_paths(params)
    shapes = {path: leaf.shape for path, leaf in paths.items()}
    assert shapes == {
        "box": (4,),
        "tree/0": (1,),
        "tree/1/0": (2,),
        "tree/1/1/0": (3,),
    }


def test_python_numbers_are_rounded_as_under_jit():
    class Scalar(nn.Module):
        @nn.compact
        def __call__(self):
            return self.param("a", lambda _: 0.1), self.param("b", lambda _: 3)

    module = linen.wrap(Scalar(), TOWARD_ZERO)
    variables = module.init(KEYS[0])
    assert variables == {"params": {"a": 0.1, "b": 3}}
    expected = toward_zero(jnp.float32(0.1)), 3
    assert same_bits(module.apply(variables)[0], expected[0])
    assert module.apply(variables)[1] == 3
    compiled = jax.jit(module.apply)(variables)
    assert same_bits(compiled[0], expected[0])
    assert compiled[1] == 3


def test_arrays_that_jax_does_not_know_of_are_told():
    class Result:
        def __init__(self, y):
            self.y = y

    class Hiding(nn.Module):
        def __call__(self, x):
            return Result(x), None, 3, "text"

    module = linen.wrap(Hiding(), Policy.from_text("activations: :out=toward_zero"))
    with pytest.warns(UserWarning, match="`:out` passes an object of class .*Result"):
        assert same_bits(module.apply({}, X)[0].y, X)


def test_what_no_rule_rounds_need_be_no_tree():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(3)(x)
            return {1: y, "a": y}

    module = linen.wrap(Mixed(), Policy.from_text("activations: Dense_0=toward_zero"))
    variables = module.init(KEYS[0], X)
    expected = toward_zero(Mixed().apply(variables, X)[1])
    found = module.apply(variables, X)
    assert list(found) == [1, "a"]
    assert same_bits(list(found.values()), [expected, expected])


def test_keys_pass_as_they_are():
    class Drawing(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            stored = self.param("key", lambda key: key)
            return x + jax.random.normal(stored, x.shape), key

    policy = Policy.from_text(
        "params: .*=toward_zero; activations: :in=toward_zero, :out=toward_zero; "
        "gradients: :out=to_odd, .*=to_odd"
    )
    module = linen.wrap(Drawing(), policy)
    variables = module.init(KEYS[0], X, KEYS[1])
    y, key = module.apply(variables, X, KEYS[1])
    assert key is KEYS[1]
    noise = jax.random.normal(variables["params"]["key"], X.shape)
    assert same_bits(y, toward_zero(toward_zero(X) + noise))
    jax.grad(lambda x: jnp.sum(module.apply(variables, x, KEYS[1])[0]))(X)


def test_rules_reach_into_trees_and_moved_scopes():
    variables = CASES["trees"].variables()
    tree = variables["params"]["tree"]
    expected = {0: tree[0], 1: (tree[1][0], toward_zero(tree[1][1]))}
    wrapped = linen.wrap(CASES["trees"].module, rounding("tree/1/1"))
    results = wrapped.apply(variables, X)
    plain = CASES["trees"].module.apply({"params": {"tree": expected}}, X)
    assert same_bits(results, plain)

    case = CASES["share_scope"]
    params = case.variables()["params"]
    down = toward_zero(params)
    # What would be at `inside/base/layers_0` is at `inside/layers_0`.
    wrapped = linen.wrap(case.module, rounding("(inside/layers_0|outside)/.*"))
    expected = params | {
        "inside": params["inside"] | {"layers_0": down["inside"]["layers_0"]},
        "outside": params["outside"]
        | {name: down["outside"][name] for name in ("kernel", "bias", "a", "b")},
    }
    results = wrapped.apply({"params": params}, X)
    assert same_bits(results, case.module.apply({"params": expected}, X))

    wrapped = linen.wrap(case.module, rounding_outputs("inside/layers_0"))
    options = {"capture_intermediates": True, "mutable": ["intermediates"]}
    outputs = [
        module.apply({"params": params}, X, **options)[1]["intermediates"]
        for module in (wrapped, case.module)
    ]
    rounded, raw = (tree["inside"]["layers_0"]["__call__"][0] for tree in outputs)
    assert same_bits(rounded, toward_zero(raw))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_masters_of_other_float_types_are_refused(dtype):
    params = {"a": np.ones(3, dtype), "b": np.ones(3, np.float32)}
    message = f"`a` must be float32 to be rounded to bfloat16, got {np.dtype(dtype)}"
    with pytest.raises(TypeError, match=message):
        read(params, TOWARD_ZERO)
    results = read(params, rounding("b"))
    assert np.asarray(results[0]).dtype == dtype


def test_integers_and_bfloat16_are_left_alone():
    params = {"a": jnp.arange(3), "b": jnp.full((3,), 1.0078125, jnp.bfloat16)}
    assert same_bits(read(params, rounding(".*", "away_from_zero")), [*params.values()])


def test_parameters_may_be_numpy_arrays_scalars_or_empty():
    for shape in ((), (0,), (2, 0), (3,)):
        params = {name: np.asarray(x) for name, x in noisy(pair(*shape)).items()}
        for policy in (TOWARD_ZERO, rounding(".*", backend="pallas")):
            results = read(params, policy)
            assert same_bits(results, [*toward_zero(params).values()])


def test_weights_made_from_parameters_are_rounded_once_made():
    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.WeightNorm(nn.Dense(3, use_bias=False))(x)

    module = Normalized()
    variables = noisy(module.init(KEYS[0], X))
    kernel = variables["params"]["Dense_0"]["kernel"]
    scale = variables["params"]["WeightNorm_0"]["Dense_0/kernel/scale"]
    squares = jnp.sum(kernel**2, axis=0, keepdims=True)
    made = kernel * jax.lax.rsqrt(squares + 1e-12) * toward_zero(scale)[None]
    results = linen.wrap(module, TOWARD_ZERO).apply(variables, X)
    assert same_bits(results, X @ toward_zero(made))


def test_parameters_that_may_change_are_returned_as_they_were():
    module, variables = Compact(), CASES["compact"].variables()
    wrapped = linen.wrap(module, TOWARD_ZERO)
    results, changed = wrapped.apply(variables, X, mutable=["params"])
    assert same_bits(changed, variables)
    assert same_bits(results, module.apply(toward_zero(variables), X))


# What is below the wrapped module, and what is not.


def test_modules_from_outside_are_left_alone():
    class Outside(nn.Module):
        part: nn.Module

        @nn.compact
        def __call__(self, x, other_variables):
            y = nn.Dense(WIDTH, parent=None).apply(other_variables, x)
            # Wrapped with the same policy, it still has a key of its own.
            other = linen.wrap(nn.Dense(WIDTH, parent=None), STOCHASTIC)
            z = other.apply(other_variables, x, rngs={"rounding": KEYS[2]})
            return nn.Dense(WIDTH)(x), self.part(x), y, z

    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x, other_variables):
            part = nn.Dense(WIDTH, name="part")
            wrapped = linen.wrap_class(Outside, rounding(".*", "stochastic"))
            return wrapped(part, name="wrapped")(x, other_variables)

    dense = nn.Dense(WIDTH)
    theirs = noisy(dense.init(KEYS[1], X))
    params = noisy(Parent().init(KEYS[0], X, theirs)["params"])
    _, part, y, z = Parent().apply({"params": params}, X, theirs)
    assert same_bits(part, dense.apply({"params": params["part"]}, X))
    assert same_bits(y, dense.apply(theirs, X))
    rngs = {"rounding": KEYS[2]}
    assert same_bits(z, linen.wrap(dense, STOCHASTIC).apply(theirs, X, rngs=rngs))


def test_a_part_called_by_an_unrelated_module_is_still_below():
    class Caller(nn.Module):
        @nn.compact
        def __call__(self, function, x):
            return function(nn.Dense(WIDTH)(x))

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, theirs):
            part = nn.Dense(WIDTH)
            return Caller(parent=None).apply(theirs, part, x)

    theirs = noisy(Caller().init(KEYS[0], lambda x: x, X))
    variables = noisy(Outer().init(KEYS[1], X, theirs))
    results = linen.wrap(Outer(), TOWARD_ZERO).apply(variables, X, theirs)
    assert same_bits(results, Outer().apply(toward_zero(variables), X, theirs))


def test_parts_of_bound_modules_do_not_silently_skip_rounding():
    wrapped = linen.wrap(CASES["setup"].module, TOWARD_ZERO)
    bound = wrapped.bind(CASES["setup"].variables())
    message = "`head` must be called by a method of the wrapped module"
    with pytest.raises(ValueError, match=message):
        bound.head(X)
    with pytest.raises(ValueError, match=message):
        nn.apply(lambda module, x: module.head(x), wrapped)(bound.variables, X)
    scans = linen.wrap(CASES["setup_scan"].module, TOWARD_ZERO)
    with pytest.raises(ValueError, match="`layers` must be called"):
        scans.bind(CASES["setup_scan"].variables()).layers(X, None)
    recurrent = CASES["recurrent"]
    bound = linen.wrap(recurrent.module, TOWARD_ZERO).bind(recurrent.variables())
    with pytest.raises(ValueError, match="`rnn/cell` must be called"):
        bound.rnn(X[None])
    fields = CASES["fields"]
    bound = linen.wrap(fields.module, TOWARD_ZERO).bind(fields.variables())
    with pytest.raises(ValueError, match=r"`first.*` must be called"):
        bound.first(X)
    assert same_bits(bound(X), fields.module.apply(toward_zero(fields.variables()), X))


# Flax's own cache of traced functions, `nn.jit`.


def test_nn_jit_gives_each_policy_its_own_results():
    params = noisy(pair(WIDTH, WIDTH))
    up = rounding(".*", "away_from_zero")
    rounded = {TOWARD_ZERO: toward_zero(params), up: away_from_zero(params)}
    for _ in range(2):
        assert same_bits(JitValues().apply({"params": params}), [*params.values()])
        for policy, expected in rounded.items():
            results = read(params, policy, module=JitValues())
            assert same_bits(results, [*expected.values()])


@pytest.mark.parametrize("name", ["jit", "decorated", "jit_fields", "jit_arguments"])
def test_nn_jit_tells_modules_apart_by_their_paths(name):
    module, variables = CASES[name].module, CASES[name].variables()
    params = variables["params"]
    wrapped = linen.wrap(module, rounding("first/.*"))
    expected = {"params": params | {"first": toward_zero(params["first"])}}
    for transform in (lambda f: f, jax.jit):
        results = transform(wrapped.apply)(variables, X)
        assert same_bits(results, transform(module.apply)(expected, X))


def test_nn_jit_keeps_no_key_and_no_trace():
    variables = CASES["jit"].variables()
    wrapped = linen.wrap(Jit(), STOCHASTIC)
    draw = lambda key: wrapped.apply(variables, X, rngs={"rounding": key})  # noqa: E731
    eager = [draw(key) for key in KEYS]
    assert len({np.asarray(y).tobytes() for y in eager}) == 3
    assert same_bits(draw(KEYS[0]), eager[0])
    for _ in range(2):
        jitted = jax.jit(lambda key: draw(key))  # another outer trace each time
        assert same_bits([jitted(key) for key in KEYS], eager)
    wrapped = linen.wrap(Jit(), rounding(".*", "stochastic", seed=2024))
    without_key = [
        jax.jit(lambda v: wrapped.apply(v, X))(variables),
        jax.jit(lambda v: wrapped.apply(v, X))(variables),
        wrapped.apply(variables, X),
    ]
    assert same_bits(without_key[0], without_key[1])
    assert same_bits(without_key[0], without_key[2])


def test_nn_jit_below_equal_inner_policies_sees_the_outer_seed():
    class Outer(nn.Module):
        inner: nn.Module

        def __call__(self, x):
            return self.inner(x)

    variables = {"params": {"inner": CASES["jit"].variables()["params"]}}
    results = [
        linen.wrap(Outer(linen.wrap(Jit(), STOCHASTIC)), Policy(seed=seed)).apply(
            variables, X
        )
        for seed in (0, 1, 0)
    ]
    assert not same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


# Stochastic draws.


def test_each_value_goes_to_a_neighbour_with_the_right_probability():
    # The lower half is 0.3 of the way up, on elements of any size and sign.
    upper = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    bits = (upper.view(np.uint32) & np.uint32(0xFFFF0000)) | np.uint32(19661)
    params = {"a": bits.view(np.float32), "b": bits.view(np.float32)}
    probability = 19661 / 65536
    sigma = np.sqrt(probability * (1 - probability) / bits.size)
    went_up = [ups(y, params["a"]) for y in read(params, STOCHASTIC, key=KEYS[0])]
    for went in went_up:
        assert abs(went.mean() - probability) < 5 * sigma
    # Two tensors of equal values at two paths draw independently of each other.
    assert_independent(*went_up, params["a"])


def test_each_element_is_right_on_average_over_keys():
    params = noisy(pair(8, 8))
    keys = jax.random.split(KEYS[0], 1024)
    draws = jax.jit(jax.vmap(lambda key: read(params, STOCHASTIC, key=key)[0]))(keys)
    went_up = np.stack([ups(draw, params["a"]) for draw in draws])
    bits = np.asarray(params["a"]).view(np.uint32) & np.uint32(0xFFFF)
    probability = bits.astype(np.float64) / 65536
    sigma = np.sqrt(probability * (1 - probability) / len(keys))
    # 5 sigma for each of 64 elements; the rarest ones have a Poisson's tail.
    assert np.all(np.abs(went_up.mean(0) - probability) < 5 * sigma + 2 / len(keys))


def test_the_key_decides_and_nothing_else_does():
    params = noisy(pair(16, 16))
    first, second = (read(params, STOCHASTIC, key=key) for key in KEYS[:2])
    assert same_bits(read(params, STOCHASTIC, key=KEYS[0]), first)
    seeded = rounding(".*", "stochastic", seed=9)
    assert same_bits(read(params, seeded, key=KEYS[0]), first)
    assert not same_bits(first, second)
    jitted = jax.jit(lambda params, key: read(params, STOCHASTIC, key=key))
    assert same_bits(jitted(params, KEYS[0]), first)
    raw = jax.random.key_data(KEYS[0])
    assert same_bits(read(params, STOCHASTIC, key=raw), first)
    mapped = jax.vmap(lambda key: read(params, STOCHASTIC, key=key))(jnp.stack(KEYS))
    for place, key in enumerate(KEYS):
        alone = read(params, STOCHASTIC, key=key)
        assert same_bits([y[place] for y in mapped], alone)


def test_without_a_key_the_policys_seed_decides():
    params = noisy(pair(16, 16))
    first = read(params, STOCHASTIC)
    assert same_bits(read(params, STOCHASTIC), first)
    assert same_bits(jax.jit(lambda p: read(p, STOCHASTIC))(params), first)
    others = [read(params, rounding(".*", "stochastic", seed=s)) for s in (1, 2**32)]
    assert not same_bits(others[0], first)
    assert not same_bits(others[1], first)
    assert not same_bits(others[0], others[1])
    # A lone key is that of the stream `params`.
    module = linen.wrap(Values((16, 16)), STOCHASTIC)
    assert same_bits(module.apply({"params": params}, rngs=KEYS[0]), first)


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_draw_what_the_whole_draws(axis):
    params = noisy(pair(16, 16))
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("x",))
    spec = [None, None]
    spec[axis] = "x"
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    jitted = jax.jit(
        lambda params: read(params, STOCHASTIC, key=KEYS[0]), out_shardings=sharding
    )
    results = jitted(jax.device_put(params, sharding))
    assert results[0].sharding.is_equivalent_to(sharding, 2)
    assert same_bits(results, read(params, STOCHASTIC, key=KEYS[0]))


def test_layers_of_a_scan_draw_by_their_values():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self):
            layers = nn.scan(
                lambda module, carry, _: (carry, module()[0]),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            return layers(Values((64, 64), name="layers"), 0, None)[1]

    value = noisy(pair(64, 64))["a"]
    # The second layer's values have the lower halves of the first one's, so each goes
    # up with the same probability in both.
    zeros = jnp.zeros((2, 64, 64))
    params = {"layers": {"a": jnp.stack([value, value * 2]), "b": zeros}}
    results = read(params, STOCHASTIC, key=KEYS[0], module=Layers())
    assert_independent(*map(ups, results, params["layers"]["a"]), value)
    # Where layers hold the same values they draw the same.
    params["layers"]["a"] = jnp.stack([value, value])
    results = read(params, STOCHASTIC, key=KEYS[0], module=Layers())
    assert same_bits(results[0], results[1])


def test_tied_weights_draw_the_same_at_every_read():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self):
            embed = nn.Embed(10, 10)
            rows = embed(jnp.arange(10))
            return rows, embed.attend(jnp.eye(10)).T, embed.variables["params"]

    module = linen.wrap(Tied(), STOCHASTIC)
    variables = Case(Tied(), ()).variables()
    rows, columns, params = module.apply(variables, rngs={"rounding": KEYS[0]})
    assert np.any(ups(rows, variables["params"]["Embed_0"]["embedding"]))
    assert same_bits(rows, columns)
    assert same_bits(rows, params["embedding"])


def test_other_streams_are_not_moved_by_the_key():
    class Dropping(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.Dropout(0.5, deterministic=False)(nn.Dense(64)(x))
            return x != 0

    module = Dropping()
    rngs = {"params": KEYS[0], "dropout": KEYS[1]}
    variables = module.init(rngs, X)
    wrapped = linen.wrap(module, rounding(".*/kernel", "stochastic"))
    masks = [
        wrapped.apply(variables, X, rngs=rngs),
        wrapped.apply(variables, X, rngs=rngs | {"rounding": KEYS[2]}),
        module.apply(variables, X, rngs=rngs),
    ]
    assert 0.3 < masks[0].mean() < 0.7
    assert same_bits(masks[0], masks[1])
    assert same_bits(masks[0], masks[2])


# Outputs of modules.


class Outputs(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"pair": (x, -x), "int": jnp.arange(3), "half": x.astype(jnp.bfloat16)}


class Odd(nn.Module):
    """Returns what is no array, too."""

    @nn.compact
    def __call__(self, x):
        outputs = Outputs(name="outputs")(x)
        return outputs, None, "text", jnp.float32, np.float32, 1.1, np.float32(1.1)


@pytest.mark.parametrize("pattern", ["blocks_[01]", "blocks_0", "norms_after", "head"])
def test_outputs_of_selected_modules_are_rounded(pattern):
    module, variables = Setup(), CASES["setup"].variables()
    options = {"capture_intermediates": True, "mutable": ["intermediates"]}
    wrapped = linen.wrap(module, rounding_outputs(pattern))
    _, results = wrapped.apply(variables, X, **options)
    _, raw = module.apply(variables, X, **options)
    results, raw = results["intermediates"], raw["intermediates"]
    order = ["norms_before", "blocks_0", "blocks_1", "norms_after", "head"]
    first = {"blocks_[01]": "blocks_0"}.get(pattern, pattern)
    for name in order[: order.index(first)]:
        assert same_bits(results[name], raw[name])
    outputs = results[first]["__call__"][0]
    assert same_bits(outputs, toward_zero(raw[first]["__call__"][0]))
    if pattern == "blocks_[01]":
        second = results["blocks_1"]["__call__"][0]
        block = {"params": variables["params"]["blocks_1"]}
        assert same_bits(second, toward_zero(Block().apply(block, outputs)))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_the_empty_path_is_the_wrapped_module(transform):
    variables = CASES["scan_remat"].variables()
    module = CASES["scan_remat"].module
    results = transform(linen.wrap(module, rounding_outputs("")).apply)(variables, X)
    assert same_bits(results, toward_zero(transform(module.apply)(variables, X)))


@pytest.mark.parametrize("name", ["scan", "jit", "vmap", "decorated", "recurrent"])
def test_outputs_are_rounded_inside_transformations(name):
    case = CASES[name]
    variables = case.variables()
    policy = Policy(activations=(Rule(".+", "toward_zero"), Rule("", "toward_zero")))
    results = linen.wrap(case.module, policy).apply(variables, *case.inputs)
    assert same_bits(results, toward_zero(results))
    assert not same_bits(results, toward_zero(case.module.apply(variables, X)))


def test_outputs_in_trees_are_rounded_and_other_dtypes_left_alone():
    policy = Policy(activations=(Rule(".*", "toward_zero"),))
    results = linen.wrap(Odd(), policy).apply({}, X)
    outputs, *others = Odd().apply({}, X)
    expected = toward_zero(outputs) | {"half": outputs["half"]}
    assert same_bits(results[0], expected)
    assert results[1:6] == tuple(others[:5])
    assert same_bits(results[6], toward_zero(np.float32(1.1)))


def test_the_dtype_of_outputs_can_be_bfloat16():
    policy = rounding_outputs("outputs", out_dtype="bfloat16")
    results = linen.wrap(Odd(), policy).apply({}, X)[0]
    assert results["pair"][0].dtype == jnp.bfloat16
    values = jax.tree.map(lambda y: y.astype(jnp.float32), results["pair"])
    assert same_bits(values, jax.tree.map(jnp.asarray, toward_zero((X, -X))))


def test_what_super_returns_is_not_rounded_yet():
    class Sub(Block):
        def __call__(self, x):
            return super().__call__(x) * 1.001

    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Sub(name="sub")(x)

    variables = Case(Parent()).variables()
    for policy in (rounding_outputs("sub"), rounding_outputs("")):
        results = linen.wrap(Parent(), policy).apply(variables, X)
        assert same_bits(results, toward_zero(Parent().apply(variables, X)))
    variables = {"params": variables["params"]["sub"]}
    results = linen.wrap(Sub(), rounding_outputs("")).apply(variables, X)
    assert same_bits(results, toward_zero(Sub().apply(variables, X)))


def test_rules_with_mode_none_and_other_methods_leave_outputs_alone():
    module, variables = Setup(), CASES["setup"].variables()
    policy = Policy(activations=(Rule("head", None), Rule("", "toward_zero")))
    wrapped = linen.wrap(module, policy)
    encoded = module.apply(variables, X, method="encode")
    assert same_bits(wrapped.apply(variables, X, method="encode"), encoded)
    wrapped = linen.wrap(module, rounding_outputs("head", None))
    assert same_bits(wrapped.apply(variables, X), module.apply(variables, X))


def test_outputs_of_init_are_not_rounded():
    wrapped = linen.wrap(Compact(), rounding_outputs(".*"))
    results = wrapped.init_with_output(KEYS[0], X)
    assert same_bits(results, Compact().init_with_output(KEYS[0], X))


def test_gradients_pass_rounded_outputs_straight_through():
    module = nn.Dense(3)
    variables = noisy(module.init(KEYS[0], X))
    weights = normal(4, 3)
    wrapped = linen.wrap(module, rounding_outputs("", "away_from_zero"))

    def gradients(module):
        return jax.grad(lambda v, x: jnp.sum(module.apply(v, x) * weights), (0, 1))

    assert same_bits(gradients(wrapped)(variables, X), gradients(module)(variables, X))


def test_outputs_are_drawn_by_key_path_and_place_in_the_tree():
    x = noisy(jnp.zeros((64, 64)))
    policy = rounding_outputs("outputs", "stochastic")

    def draw(key, x=x):
        rngs = {"rounding": key}
        return [*linen.wrap(Odd(), policy).apply({}, x, rngs=rngs)[0]["pair"]]

    first = draw(KEYS[0])
    assert_independent(*map(ups, first, (x, -x)), x)
    assert same_bits(draw(KEYS[0]), first)
    assert not same_bits(draw(KEYS[1]), first)
    # The values do not count, but for their lower halves, which these have in common.
    assert same_bits(draw(KEYS[0], 2 * x), [2 * y for y in first])


def test_rematerialized_outputs_are_drawn_as_at_first():
    class Identity(nn.Module):
        def __call__(self, x):
            return x

    class Square(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = Identity(name="identity")(x)
            return y * y * 0.5, y

    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(Square)(name="square")(x)

    policy = rounding_outputs("square/identity", "stochastic")
    wrapped = linen.wrap(Parent(), policy)

    def loss(x):
        half_square, drawn = wrapped.apply({}, x, rngs={"rounding": KEYS[0]})
        return jnp.sum(half_square), drawn

    x = noisy(jnp.zeros((64, 64)))
    gradient, drawn = jax.jit(jax.grad(loss, has_aux=True))(x)
    ups(drawn, x)
    # The derivative of y^2 / 2 is the y of the recomputation.
    assert same_bits(gradient, drawn)


def test_layers_of_a_scan_and_members_of_a_vmap_draw_their_outputs_apart():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            self.param("own", nn.initializers.normal(), (16,))
            return carry, Identity(name="identity")(x)

    class Identity(nn.Module):
        def __call__(self, x):
            return x

    class Stacked(nn.Module):
        transform: str

        @nn.compact
        def __call__(self, x):
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            if self.transform == "scan":
                return nn.scan(Layer, **options)(name="layers")(0, x)[1]
            layer = nn.remat(Layer) if self.transform == "remat" else Layer
            members = nn.vmap(layer, in_axes=(None, 0), **options)
            return members(name="layers")(0, x)[1]

    value = noisy(jnp.zeros((64, 64)))
    x = jnp.stack([value, value])
    policy = rounding_outputs("layers/identity", "stochastic")
    variables = Stacked("scan").init(KEYS[0], x)
    drawn = {}
    for transform in ("scan", "vmap", "remat"):
        wrapped = linen.wrap(Stacked(transform), policy)
        drawn[transform] = wrapped.apply(variables, x, rngs={"rounding": KEYS[0]})
        assert_independent(*map(ups, drawn[transform], x), value)
        # It is the parameters that tell them apart.
        same = jax.tree.map(lambda p: jnp.stack([p[0], p[0]]), variables)
        first, second = wrapped.apply(same, x, rngs={"rounding": KEYS[0]})
        assert same_bits(first, second)
    assert same_bits(drawn["scan"], drawn["vmap"])
    assert same_bits(drawn["scan"], drawn["remat"])


@pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2], ids=str)
def test_draws_of_outputs_are_the_same_where_parameters_are_split(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    module = nn.Dense(64)
    variables = noisy(module.init(KEYS[0], normal(8, 64)))
    wrapped = linen.wrap(module, rounding_outputs("", "stochastic"))

    @jax.jit
    def run(variables, x):
        return wrapped.apply(variables, x, rngs={"rounding": KEYS[1]})

    x = jnp.zeros((8, 64))  # the output is the bias, on all devices alike
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, split.spec))
    variables_placed = {
        "params": {
            "kernel": jax.device_put(
                variables["params"]["kernel"],
                jax.sharding.NamedSharding(
                    mesh, jax.sharding.PartitionSpec(None, None)
                ),
            ),
            "bias": variables["params"]["bias"],
        }
    }
    assert same_bits(run(variables_placed, placed), run(variables, x))
    own = scopes._first_words(jax.device_put(normal(8, 64), split))
    assert same_bits(own, np.asarray(normal(8, 64)).view(np.uint32)[0, :8])


# Inputs and other methods.


def passing(text):
    return Policy.from_text(f"activations: {text}")


def test_inputs_of_selected_modules_are_rounded():
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x, *, scale):
            return Child(name="child")({"x": x, "n": 3}, scale=scale), x

    class Child(nn.Module):
        def __call__(self, inputs, scale, train=False):
            assert inputs["n"] == 3
            assert train is False
            return inputs["x"] * scale

    scale = normal(4, WIDTH)
    results = linen.wrap(Parent(), passing("child:in=toward_zero")).apply(
        {}, X, scale=scale
    )
    assert same_bits(results, (toward_zero(X) * toward_zero(scale), X))
    both = passing("child:in=toward_zero, child:out=toward_zero")
    results = linen.wrap(Parent(), both).apply({}, X, scale=scale)
    assert same_bits(results, (toward_zero(toward_zero(X) * toward_zero(scale)), X))


@pytest.mark.parametrize("way", ["apply", "bound", "inside"])
def test_other_methods_than_call_are_rounded_where_a_rule_names_them(way):
    module, variables = Setup(), CASES["setup"].variables()
    wrapped = linen.wrap(module, passing(":encode:out=toward_zero"))
    encoded = toward_zero(module.apply(variables, X, method="encode"))
    if way == "apply":
        found = wrapped.apply(variables, X, method="encode")
    elif way == "bound":
        found = wrapped.bind(variables).encode(X)
    else:
        found = wrapped.apply(variables, X)
        encoded = module.apply(variables, encoded, method=lambda m, x: m.head(x))
    assert same_bits(found, encoded)


def test_attend_of_an_embedding_is_a_method_like_others():
    module, variables = CASES["embedding"].module, CASES["embedding"].variables()
    inputs = CASES["embedding"].inputs
    wrapped = linen.wrap(module, passing("Embed_0:attend:out=toward_zero"))
    expected = toward_zero(module.apply(variables, *inputs))
    assert same_bits(wrapped.apply(variables, *inputs), expected)


def test_narrow_activations_are_rounded_to_still_narrower_ones():
    x = X.astype(jnp.bfloat16)
    wrapped = linen.wrap(
        nn.Sequential([lambda x: x]),
        passing(":out=toward_zero(dtype=float8_e5m2, overflow=saturate)"),
    )
    found = wrapped.apply({}, x)
    assert found.dtype == jnp.bfloat16
    # float8_e5m2 has 5 mantissa bits less than bfloat16, and here no subnormals.
    words = np.asarray(x).view(np.uint16) & np.uint16(0xFFE0)
    assert same_bits(found, words.view(jnp.bfloat16))


# Gradients.


def test_gradients_of_parameters_and_of_outputs_are_rounded_apart():
    module, variables = Block(), CASES["compact"].variables()
    variables = {"params": variables["params"]["Block_0"]}
    weights = normal(4, WIDTH)

    def gradients(module):
        def loss(v, x):
            return jnp.sum(module.apply(v, x) * weights)

        return jax.grad(loss, (0, 1))(variables, X)

    raw = gradients(module)
    text = "gradients: Dense_0/kernel=toward_zero"
    found = gradients(linen.wrap(module, Policy.from_text(text)))
    kernel = raw[0]["params"]["Dense_0"]["kernel"]
    assert same_bits(found[0]["params"]["Dense_0"]["kernel"], toward_zero(kernel))
    assert same_bits(
        found[0]["params"]["Dense_0"]["bias"], raw[0]["params"]["Dense_0"]["bias"]
    )
    assert same_bits(found[1], raw[1])

    # What comes back to the output is the weights; from there on all is as computed.
    weights = toward_zero(weights)
    expected = gradients(module)
    weights = normal(4, WIDTH)
    text = "gradients: :out=toward_zero"
    assert same_bits(gradients(linen.wrap(module, Policy.from_text(text))), expected)


def test_a_rule_over_gradients_alone_leaves_values_as_they_are():
    module, variables = Scan(), CASES["scan"].variables()
    policy = Policy.from_text("gradients: .*=stochastic, layers:out=toward_zero")
    wrapped = linen.wrap(module, policy)
    assert same_bits(wrapped.apply(variables, X), module.apply(variables, X))

    @jax.jit
    def gradient(key):
        def loss(v):
            return jnp.sum(wrapped.apply(v, X, rngs={"rounding": key}))

        return jax.grad(loss)(variables)

    found = gradient(KEYS[0])
    kernel = found["params"]["layers"]["Block_0"]["Dense_0"]["kernel"]
    assert not (np.asarray(kernel).view(np.uint32) & 0xFFFF).any()
    assert same_bits(gradient(KEYS[0]), found)
    assert not same_bits(gradient(KEYS[1]), found)


# Parameters that are split.


class Split(nn.Module):
    """Layers whose kernels say how they are split over a mesh."""

    logical: bool = False

    @nn.compact
    def __call__(self, x):
        make = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        names = ("in", "out") if self.logical else (None, "x")

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, carry, _):
                init = make(nn.initializers.lecun_normal(), names)
                dense = nn.remat(nn.Dense)(64, kernel_init=init, name="dense")
                return dense(carry), None

        layers = nn.scan(
            Layer,
            length=2,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: None},
        )
        return layers(name="layers")(x, None)[0]


KERNELS = "params: .*/kernel=stochastic; backend="


@pytest.mark.parametrize("logical", [False, True])
def test_the_kernel_runs_on_the_shards_of_boxed_parameters(logical, caplog):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    module, x = Split(logical), normal(16, 64)
    variables = jax.tree.map(jnp.asarray, module.init(KEYS[0], x))
    expected = linen.wrap(module, Policy.from_text(KERNELS + "xla")).apply(
        meta.unbox(variables), x, rngs={"rounding": KEYS[0]}
    )
    wrapped = linen.wrap(module, Policy.from_text(KERNELS + "pallas"))
    spec = jax.sharding.PartitionSpec(None, None, "x")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    kernel = variables["params"]["layers"]["dense"]["kernel"]
    placed = jax.device_put(kernel.value, sharding)
    variables["params"]["layers"]["dense"]["kernel"] = kernel.replace_boxed(placed)

    @jax.jit
    def run(variables, x):
        return wrapped.apply(variables, x, rngs={"rounding": KEYS[0]})

    platforms._log_fallback.cache_clear()
    with jax.set_mesh(mesh), nn.logical_axis_rules((("out", "x"),)):
        with caplog.at_level("WARNING"):
            found = run(variables, x)
        text = run.lower(variables, x).as_text()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert not [r for r in caplog.records if "XLA operations" in r.getMessage()]
    assert "manual_computation" in text


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", ["v5e:2x2", "v5p:2x2x1"])
def test_the_kernel_compiles_for_shards_of_boxed_parameters(generation):
    devices = np.array(tpu.topology(generation).devices).reshape(4)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(devices, ("x",), axis_types=auto)
    module = linen.wrap(Split(), Policy.from_text(KERNELS + "pallas"))
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    boxed = jax.eval_shape(Split().init, KEYS[0], x)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(leaf):
        sharding = whole
        if isinstance(leaf, nn.Partitioned):
            sharding = jax.sharding.NamedSharding(mesh, leaf.get_partition_spec())
        place_value = lambda v: jax.ShapeDtypeStruct(  # noqa: E731
            v.shape, v.dtype, sharding=sharding
        )
        return jax.tree.map(place_value, leaf)

    is_box = lambda leaf: isinstance(leaf, nn.Partitioned)  # noqa: E731
    variables = jax.tree.map(place, boxed, is_leaf=is_box)

    def loss(variables, x):
        rngs = {"rounding": jax.random.key(0)}
        return jnp.sum(module.apply(variables, x, rngs=rngs) ** 2)

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss)).lower(variables, place(x)).compile().as_text()
    kernels = re.findall(r"tpu_custom_call.*", text)
    # In the layer, and in its recomputation.
    assert len(kernels) == 2
    assert all("mixprec.round(layers/dense/kernel)" in kernel for kernel in kernels)
    assert "f32[64,64]{1,0:T(8,128)} all-gather" not in text


# What is leaned on in Flax without being promised.


SCOPE_METHODS = {
    "get_variable": ["col", "name", "default"],
    "variables": [],
    "param": ["name", "init_fn"],
    "push": ["name"],
    "rewound": ["rewind_rngs"],
    "has_variable": ["col", "name"],
    "has_rng": ["name"],
    "get_flag": ["key", "default"],
    "_validate_trace_level": [],
}


@pytest.mark.parametrize("name", SCOPE_METHODS)
def test_flax_scopes_have_the_methods(name):
    method = getattr(flax.core.Scope, name, None)
    assert method is not None, moved(f"`Scope.{name}`")
    parameters = list(inspect.signature(method).parameters)[1:]
    expected = SCOPE_METHODS[name]
    assert parameters[: len(expected)] == expected, moved(f"arguments of `{name}`")


def test_flax_modules_read_through_the_methods_of_their_scope():
    read = []

    class Noting(flax.core.Scope):
        def get_variable(self, col, name, default=None):
            read.append(name)
            return super().get_variable(col, name, default)

        def variables(self):
            read.append("all")
            return super().variables()

        def push(self, *args, **kwargs):
            scope = super().push(*args, **kwargs)
            scope.__class__ = Noting
            return scope

        def rewound(self, *args, **kwargs):
            scope = super().rewound(*args, **kwargs)
            scope.__class__ = Noting
            return scope

        def _validate_trace_level(self):
            read.append("level")
            super()._validate_trace_level()

    module, variables = CASES["tied_by_variables"].module, None
    variables = CASES["tied_by_variables"].variables()

    def run(module, *inputs):
        module.scope.__class__ = Noting
        nn.remat(lambda m, x: x)(module, X)
        return module(*inputs)

    nn.apply(run, module)(variables, *CASES["tied_by_variables"].inputs)
    for name in ("embedding", "kernel", "all", "level"):
        assert name in read, moved(f"the way that reads {name!r}")


def test_flax_flags_reach_the_scopes_of_lifted_transformations():
    flags = []

    class Asking(nn.Module):
        def __call__(self, x):
            flags.append(self.scope.get_flag("told", None))
            assert isinstance(self.scope.path, tuple), moved("`Scope.path`")
            return x

    class Lifting(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.remat(Asking)()(nn.jit(Asking)()(x))
            scanned = nn.scan(lambda m, c, _: (m(c), None), length=2)
            return scanned(Asking(), x, None)[0]

    def run(module, x):
        told = flax.core.freeze({**module.scope.flags, "told": 3})
        module.scope.flags = told
        return module(x)

    nn.apply(run, Lifting())({}, X)
    assert len(flags) >= 3
    assert set(flags) == {3}, moved("`Scope.flags` in lifted transformations")


def test_flax_marks_initialization_by_a_flag():
    seen = []

    class Asking(nn.Module):
        def __call__(self, x):
            seen.append(self.scope.get_flag("initializing", False))
            return x

    Asking().init(KEYS[0], X)
    Asking().apply({}, X)
    assert seen == [True, False], moved('the flag "initializing"')
