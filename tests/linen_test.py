import copy
import functools
import inspect
import pickle
import threading
from typing import Any

import cloudpickle
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import tpu
from canary import moved
from oracle import (
    STOCHASTIC,
    TOWARD_ZERO,
    away_from_zero,
    noisy,
    same_bits,
    toward_zero,
)
from zoo import CASES, WIDTH, Block, Case, Compact, Jit, Odd, Scan, Setup, X, scanned

import models
from mixprec import linen
from mixprec.policy import Policy, Rule

KEYS = [jax.random.key(seed) for seed in range(3)]
UNMATCHED = Policy(params=(Rule("nothing/kernel", "toward_zero"),))


def rounding(pattern, mode="toward_zero", **options):
    return Policy(params=(Rule(pattern, mode),), **options)


# Values, against the unwrapped module applied to a tree rounded beforehand.


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_rounded_parameters(name, transform):
    case = CASES[name]
    variables = case.variables()
    plain = transform(case.module.apply)
    wrapped = transform(linen.wrap(case.module, TOWARD_ZERO).apply)
    results = wrapped(variables, *case.inputs)
    assert same_bits(results, plain(toward_zero(variables), *case.inputs))
    assert not same_bits(results, plain(variables, *case.inputs))


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_backends_give_the_same_bits_under_scan_and_remat(backend):
    case = CASES["scan_remat"]
    variables = case.variables()
    policy = Policy(
        params=(Rule(".*/bias", "toward_zero"), Rule(".*", "stochastic")),
        backend=backend,
    )
    rngs = {"rounding": KEYS[0]}
    results = linen.wrap(case.module, policy).apply(variables, X, rngs=rngs)
    auto = linen.wrap(case.module, Policy(params=policy.params))
    assert same_bits(results, auto.apply(variables, X, rngs=rngs))


def test_bfloat16_can_be_handed_out():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(WIDTH, dtype=jnp.bfloat16)
            y = layer(x)
            return y, layer.variables["params"]

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                lambda module, x, _: module(x),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return layers(Mixed(), x.astype(jnp.bfloat16), None)

    case = Case(Layers())
    variables = case.variables()
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), toward_zero(variables))
    policy = rounding(".*", out_dtype="bfloat16")
    results = linen.wrap(case.module, policy).apply(variables, X)
    assert same_bits(results, case.module.apply(rounded, X))
    dtypes = {x.dtype for x in jax.tree.leaves(results)}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}


def test_only_what_a_rule_selects_is_rounded():
    module, variables = Setup(), CASES["setup"].variables()
    policy = Policy(
        params=(
            Rule("blocks_0/.*", None),
            Rule(".*/kernel", "toward_zero"),
            Rule("norms_.*/scale", "away_from_zero"),
        )
    )
    params, down = variables["params"], toward_zero(variables)["params"]
    expected = params | {
        "blocks_1": {"Dense_0": params["blocks_1"]["Dense_0"]},
        "head": params["head"] | {"kernel": down["head"]["kernel"]},
    }
    expected["blocks_1"] = {
        "Dense_0": {
            "kernel": down["blocks_1"]["Dense_0"]["kernel"],
            "bias": params["blocks_1"]["Dense_0"]["bias"],
        }
    }
    for norm in ("norms_before", "norms_after"):
        scale = away_from_zero(params[norm]["scale"])
        expected[norm] = params[norm] | {"scale": scale}
    results = linen.wrap(module, policy).apply(variables, X)
    assert same_bits(results, module.apply({"params": expected}, X))


def test_batch_statistics_are_updated_and_not_rounded():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(WIDTH)(x))

    module = Normed()
    variables = noisy(module.init(KEYS[0], X, train=False))
    rounded = variables | {"params": toward_zero(variables["params"])}
    wrapped = linen.wrap(module, TOWARD_ZERO)
    options = {"train": True, "mutable": ["batch_stats"]}
    results = wrapped.apply(variables, X, **options)
    assert same_bits(results, module.apply(rounded, X, **options))
    assert same_bits(
        wrapped.apply(variables, X, train=False),
        module.apply(rounded, X, train=False),
    )


# Gradients.


@pytest.mark.parametrize(
    "name", ["compact", "scan_remat", "vmap", "tied_by_variables", "jit", "reads"]
)
def test_gradients_are_straight_through(name):
    case = CASES[name]
    variables = case.variables()

    def gradients(module, variables):
        def loss(variables):
            return jnp.sum(jnp.sin(module.apply(variables, *case.inputs)))

        return jax.jit(jax.grad(loss))(variables)

    results = gradients(linen.wrap(case.module, TOWARD_ZERO), variables)
    assert same_bits(results, gradients(case.module, toward_zero(variables)))
    assert not same_bits(results, gradients(case.module, variables))


def test_gradients_are_float32_where_bfloat16_is_handed_out():
    module = nn.Dense(3, dtype=jnp.bfloat16)
    wrapped = linen.wrap(module, rounding(".*", out_dtype="bfloat16"))
    variables = noisy(module.init(KEYS[0], X))
    loss = lambda variables, module: jnp.sum(module.apply(variables, X))  # noqa: E731
    results = jax.grad(loss)(variables, wrapped)
    assert same_bits(results, jax.grad(loss)(toward_zero(variables), module))
    assert {x.dtype for x in jax.tree.leaves(results)} == {jnp.dtype(jnp.float32)}


def test_a_rematerialized_pass_draws_what_the_first_one_drew():
    class Drawing(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            dense = nn.Dense(WIDTH)
            return jnp.tanh(dense(x)), {"Dense_0": dense.variables["params"]}

    module = scanned(nn.remat(Drawing, prevent_cse=False))()
    variables = Case(module, (X, None)).variables()

    def gradients(module, variables, rngs):
        def loss(variables):
            y, drawn = module.apply(variables, X, None, rngs=rngs)
            return jnp.sum(jnp.sin(y)), drawn

        return jax.jit(jax.grad(loss, has_aux=True))(variables)

    wrapped = linen.wrap(module, STOCHASTIC)
    results, drawn = gradients(wrapped, variables, {"rounding": KEYS[0]})
    # Another draw in the recomputation would give other gradients than those of the
    # unwrapped module at what the first pass drew.
    expected, _ = gradients(module, {"params": drawn}, {})
    assert same_bits(results, expected)
    assert not same_bits(drawn, variables["params"])


# `init`.


@pytest.mark.parametrize("rngs", [{}, {"rounding": KEYS[1]}], ids=["plain", "stream"])
@pytest.mark.parametrize("name", ["setup", "scan_remat", "tied_by_variables"])
def test_init_gives_the_tree_of_the_unwrapped_module(name, rngs):
    case = CASES[name]
    rngs = {"params": KEYS[0]} | rngs
    wrapped = linen.wrap(case.module, STOCHASTIC)
    results = wrapped.init_with_output(rngs, *case.inputs)
    assert same_bits(results, case.module.init_with_output(rngs, *case.inputs))
    assert same_bits(wrapped.init(rngs, *case.inputs), results[1])


@pytest.mark.parametrize("name", CASES)
def test_init_gives_the_shapes_of_the_unwrapped_module(name):
    case = CASES[name]
    wrapped = linen.wrap(case.module, TOWARD_ZERO)
    results = jax.eval_shape(wrapped.init, KEYS[0], *case.inputs)
    assert results == jax.eval_shape(case.module.init, KEYS[0], *case.inputs)


def test_init_of_a_part_or_without_computing_is_as_before():
    module, wrapped = Setup(), linen.wrap(Setup(), TOWARD_ZERO)
    for method in ("encode", Setup.encode, lambda m, x: m.head(x)):
        results = wrapped.init(KEYS[0], X, method=method)
        assert same_bits(results, module.init(KEYS[0], X, method=method))
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    lazy = wrapped.lazy_init(KEYS[0], struct)
    assert same_bits(lazy, module.lazy_init(KEYS[0], struct))


# What a module is to its users.


def test_a_wrapped_module_is_an_instance_with_the_same_fields():
    module = nn.Dense(3, use_bias=False, name="head")
    wrapped = linen.wrap(module, TOWARD_ZERO)
    assert isinstance(wrapped, nn.Dense)
    assert type(wrapped).__name__ == "Dense"
    assert type(wrapped).__qualname__ == "Dense"
    assert type(wrapped).__module__ == nn.Dense.__module__
    assert type(wrapped).__doc__ == nn.Dense.__doc__
    assert (wrapped.features, wrapped.use_bias, wrapped.name) == (3, False, "head")
    assert repr(wrapped) == repr(module)
    assert (linen.is_wrapped(wrapped), linen.is_wrapped(module)) == (True, False)
    assert linen.policy_of(wrapped) == TOWARD_ZERO
    assert inspect.signature(wrapped.__call__) == inspect.signature(module.__call__)
    assert inspect.signature(type(wrapped)) == inspect.signature(nn.Dense)


def test_wraps_of_equal_modules_are_equal():
    one, other = (linen.wrap(Compact(), rounding(".*")) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != linen.wrap(Compact(), STOCHASTIC)
    assert one != Compact()


def test_wraps_of_equal_modules_share_the_cache_of_jax_jit():
    traces = []
    variables = CASES["compact"].variables()

    @functools.partial(jax.jit, static_argnums=0)
    def apply(module, variables):
        traces.append(module)
        return module.apply(variables, X)

    for policy in (TOWARD_ZERO, rounding(".*"), TOWARD_ZERO, STOCHASTIC):
        apply(linen.wrap(Compact(), policy), variables)
    assert len(traces) == 2


def test_wraps_of_equal_modules_compile_to_the_same_text():
    variables = CASES["scan_remat"].variables()
    texts = [
        jax.jit(linen.wrap(CASES["scan_remat"].module, STOCHASTIC).apply)
        .lower(variables, X)
        .as_text()
        for _ in range(2)
    ]
    assert texts[0] == texts[1]


def test_the_authors_own_equality_hash_and_helpers_stay():
    module = Odd(options={"features": WIDTH})
    wrapped = linen.wrap(module, TOWARD_ZERO)
    assert hash(wrapped) == hash(module) == 17
    # Its equality looks at nothing but the options.
    assert wrapped == linen.wrap(module.clone(default=4), TOWARD_ZERO)
    assert wrapped != linen.wrap(module.clone(options={"features": 9}), TOWARD_ZERO)
    assert type(wrapped).double(2) == 4
    assert (wrapped.two, wrapped.default, wrapped.mixprec_policy) == (2, 3, 5)
    assert type(type(wrapped).make()) is type(wrapped)
    assert not linen.is_wrapped(module)


def test_the_authors_own_constructor_stays():
    class Doubling(nn.Module):
        features: int

        def __init__(self, features, parent=None, name=None):
            self.features = features
            self.doubled = 2 * features
            self.parent, self.name = parent, name
            self.__post_init__()

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.doubled)(x)

    module = Doubling(2)
    variables = noisy(module.init(KEYS[0], X))
    results = linen.wrap(module, TOWARD_ZERO).apply(variables, X)
    assert same_bits(results, module.apply(toward_zero(variables), X))
    assert results.shape == (4, 4)


@pytest.mark.parametrize(
    "method",
    [
        "encode",
        Setup.encode,
        lambda m, x: m.encode(x),
        lambda m, x: m.blocks[0](m.norms["before"](x)),
        Setup().encode,
        "__call__",
    ],
)
def test_any_method_rounds(method):
    module, variables = Setup(), CASES["setup"].variables()
    results = linen.wrap(module, TOWARD_ZERO).apply(variables, X, method=method)
    expected = module.apply(toward_zero(variables), X, method=method)
    assert same_bits(results, expected)


def test_methods_of_a_name_scope_unmanaged_methods_and_fields_round():
    for name, method in (("name_scopes", "up"), ("odd", "helper"), ("fields", "first")):
        module, variables = CASES[name].module, CASES[name].variables()
        wrapped = linen.wrap(module, TOWARD_ZERO)
        rounded = module.bind(toward_zero(variables))
        expected = getattr(rounded, method)(X)
        assert same_bits(wrapped.apply(variables, X, method=method), expected)
        if name != "fields":
            assert same_bits(getattr(wrapped.bind(variables), method)(X), expected)


@pytest.mark.parametrize("method", [3, "nothing"])
def test_what_is_no_method_is_refused_as_before(method):
    variables = CASES["setup"].variables()
    errors = []
    for module in (Setup(), linen.wrap(Setup(), TOWARD_ZERO)):
        with pytest.raises(Exception, match=r"nothing|3") as raised:
            module.apply(variables, X, method=method)
        errors.append(raised.type)
    assert errors[0] is errors[1]


def test_bound_modules_round_and_give_their_variables_as_they_are():
    module, variables = Setup(), CASES["setup"].variables()
    bound = linen.wrap(module, TOWARD_ZERO).bind(variables)
    expected = module.bind(toward_zero(variables))
    for _ in range(2):
        assert same_bits(bound(X), expected(X))
        assert same_bits(bound.encode(X), expected.encode(X))
        assert same_bits(bound.variables, variables)
    unbound, given = bound.unbind()
    assert same_bits(given, variables)
    assert unbound == linen.wrap(module, TOWARD_ZERO)
    assert same_bits(unbound.apply(given, X), expected(X))


def test_clones_and_copies_round():
    module, variables = Compact(), CASES["compact"].variables()
    wrapped = linen.wrap(module, TOWARD_ZERO)
    expected = module.apply(toward_zero(variables), X)
    for other in (
        wrapped.clone(),
        wrapped.copy(),
        copy.copy(wrapped),
        copy.deepcopy(wrapped),
        pickle.loads(pickle.dumps(wrapped)),
        cloudpickle.loads(cloudpickle.dumps(wrapped)),
    ):
        assert type(other) is type(wrapped)
        assert other == wrapped
        assert same_bits(other.apply(variables, X), expected)


def test_modules_of_local_classes_survive_cloudpickle():
    class Local(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    wrapped = linen.wrap(Local(), TOWARD_ZERO)
    variables = noisy(wrapped.init(KEYS[0], X))
    other = cloudpickle.loads(cloudpickle.dumps(wrapped))
    assert same_bits(other.apply(variables, X), wrapped.apply(variables, X))


def test_tables_and_paths_are_those_of_the_unwrapped_module():
    module, wrapped = Setup(), linen.wrap(Setup(), TOWARD_ZERO)
    table = wrapped.tabulate(KEYS[0], X, console_kwargs={"width": 120})
    assert table == module.tabulate(KEYS[0], X, console_kwargs={"width": 120})
    assert "head" in table
    paths = wrapped.module_paths(KEYS[0], X)
    assert list(paths) == list(module.module_paths(KEYS[0], X))


def test_captured_intermediates_have_the_same_structure():
    module, variables = Setup(), CASES["setup"].variables()
    policy = Policy(activations=(Rule("head", "toward_zero"),))
    options = {"capture_intermediates": True, "mutable": ["intermediates"]}
    y, results = linen.wrap(module, policy).apply(variables, X, **options)
    _, expected = module.apply(variables, X, **options)
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    assert same_bits(results["intermediates"]["head"]["__call__"][0], y)


def test_unwrap_gives_the_original_back():
    module, variables = CASES["scan"].module, CASES["scan"].variables()
    plain = linen.unwrap(linen.wrap(module, TOWARD_ZERO))
    assert type(plain) is Scan
    assert plain == module
    assert same_bits(plain.apply(variables, X), module.apply(variables, X))
    assert linen.unwrap(module) == module


def test_wrapping_again_replaces_the_policy():
    twice = linen.wrap(linen.wrap(Compact(), STOCHASTIC), TOWARD_ZERO)
    assert type(twice) is type(linen.wrap(Compact(), TOWARD_ZERO))
    cls = linen.wrap_class(linen.wrap_class(Compact, STOCHASTIC), TOWARD_ZERO)
    assert cls is type(twice)
    assert type(linen.unwrap(twice)) is Compact


def test_modules_with_a_parent_or_bound_are_refused():
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return linen.wrap(nn.Dense(3), TOWARD_ZERO)(x)

    with pytest.raises(ValueError, match=r"`module` must be unbound.*got Dense made"):
        Parent().init(KEYS[0], X)
    bound = nn.Dense(3).bind({"params": {}})
    with pytest.raises(ValueError, match=r"wrap_class\(type, policy\)"):
        linen.wrap(bound, TOWARD_ZERO)


@pytest.mark.parametrize("cls", [nn.Dense(3), int, None, nn.relu])
def test_what_is_no_class_of_modules_is_refused(cls):
    with pytest.raises(TypeError, match="`cls` must be a subclass of flax"):
        linen.wrap_class(cls, TOWARD_ZERO)
    with pytest.raises(
        TypeError, match="`policy` must be a mixprec.Policy, got 'params"
    ):
        linen.wrap_class(nn.Dense, "params: .*=toward_zero")


# Wrapped modules in others.


class Pair(nn.Module):
    """Calls two modules, the first one twice, and a Dense of its own in between."""

    first: nn.Module
    second: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.second(self.first(nn.Dense(WIDTH)(self.first(x))))


def pair_variables():
    return Case(Pair(Block(), Block())).variables()


def test_wrapped_parts_of_a_plain_module_round_alone():
    variables = pair_variables()
    params = variables["params"]
    module = Pair(linen.wrap(Block(), TOWARD_ZERO), Block())
    expected = {"params": params | {"first": toward_zero(params["first"])}}
    assert same_bits(
        module.apply(variables, X), Pair(Block(), Block()).apply(expected, X)
    )
    shapes = jax.eval_shape(module.init, KEYS[0], X)
    assert jax.tree.structure(shapes) == jax.tree.structure(variables)


def test_the_policy_of_an_inner_wrap_wins():
    variables = pair_variables()
    params = variables["params"]
    up = rounding("Dense_0/kernel", "away_from_zero")
    module = linen.wrap(Pair(Block(), linen.wrap(Block(), up)), rounding(".*"))
    dense = params["second"]["Dense_0"]
    expected = toward_zero(params) | {
        "second": {"Dense_0": dense | {"kernel": away_from_zero(dense["kernel"])}}
    }
    expected = Pair(Block(), Block()).apply({"params": expected}, X)
    assert same_bits(module.apply(variables, X), expected)
    assert same_bits(jax.jit(module.apply)(variables, X), jax.jit(lambda: expected)())


def test_an_inner_policy_also_holds_for_what_the_outer_module_reads():
    class Reading(nn.Module):
        part: nn.Module

        def __call__(self, x):
            before = self.part.variables["params"]
            self.part(x)
            return before, self.part.variables["params"]

    part = nn.Dense(WIDTH)
    module = linen.wrap(
        Reading(linen.wrap(part, rounding("kernel", "away_from_zero"))),
        rounding(".*"),
    )
    params = noisy(part.init(KEYS[0], X)["params"])
    for _ in range(2):
        results = module.apply({"params": {"part": params}}, X)
        expected = params | {"kernel": away_from_zero(params["kernel"])}
        assert same_bits(results, (expected, expected))


def test_wrapped_classes_are_used_in_compact_parents_and_scans():
    WrappedBlock = linen.wrap_class(Block, TOWARD_ZERO)

    class Parent(nn.Module):
        cls: Any

        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                lambda module, x, _: (module(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = layers(self.cls(name="layers"), x, None)
            return nn.remat(self.cls)(name="last")(nn.Dense(WIDTH)(x))

    module, wrapped = Parent(Block), Parent(WrappedBlock)
    variables = Case(module).variables()
    params = variables["params"]
    rounded = toward_zero(params) | {"Dense_0": params["Dense_0"]}
    results = wrapped.apply(variables, X)
    assert same_bits(results, module.apply({"params": rounded}, X))
    assert same_bits(wrapped.init(KEYS[0], X), module.init(KEYS[0], X))


# Rules that match nothing.


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_rules_over_parameters_must_match_at_init_and_apply(transform):
    wrapped = linen.wrap(Compact(), UNMATCHED)
    message = "'nothing/kernel', which matches none of 6. The nearest: '.*kernel'"
    with pytest.raises(ValueError, match=message):
        transform(wrapped.init)(KEYS[0], X)
    with pytest.raises(ValueError, match=message):
        transform(wrapped.apply)(CASES["compact"].variables(), X)


def test_rules_over_parameters_of_a_module_without_are_refused():
    class Without(nn.Module):
        def __call__(self, x):
            return 2 * x

    module = linen.wrap(Without(), TOWARD_ZERO)
    for call in (module.init, module.apply):
        with pytest.raises(ValueError, match=r"'\.\*', which matches none of 0"):
            call({}, X)


def test_parameters_can_be_made_by_apply():
    module = linen.wrap(nn.Dense(3), TOWARD_ZERO)
    y, made = module.apply({}, X, rngs={"params": KEYS[0]}, mutable=["params"])
    kernel = module.init(KEYS[0], X)["params"]["kernel"]
    assert same_bits(made["params"]["kernel"], kernel)
    assert y.shape == (*X.shape[:-1], 3)


def test_rules_over_activations_must_match_at_init_and_apply():
    policy = Policy(activations=(Rule("Blokc_0", "toward_zero"),))
    wrapped = linen.wrap(Compact(), policy)
    with pytest.raises(ValueError, match=r"some module path.*The nearest: 'Block_0'"):
        wrapped.init(KEYS[0], X)
    with pytest.raises(ValueError, match=r"some module path.*The nearest: 'Block_0'"):
        wrapped.apply(CASES["compact"].variables(), X)


def test_rules_of_wrapped_parts_must_match_too():
    module = Pair(Block(), linen.wrap(Block(), UNMATCHED))
    for subject in (module, linen.wrap(module, TOWARD_ZERO)):
        with pytest.raises(ValueError, match="'nothing/kernel'"):
            subject.init(KEYS[0], X)
        with pytest.raises(ValueError, match="'nothing/kernel'"):
            subject.apply(pair_variables(), X)


def test_rules_over_activations_may_match_what_nn_jit_has_cached():
    policy = Policy(activations=(Rule("first/Dense_0", "toward_zero"),))
    variables = CASES["jit"].variables()
    results = [linen.wrap(Jit(), policy).apply(variables, X) for _ in range(2)]
    assert same_bits(*results)


# Threads and exceptions.


def test_threads_do_not_see_each_others_policies():
    module, variables = Scan(), CASES["scan"].variables()
    subjects = {
        "raw": (module, variables),
        "down": (linen.wrap(module, TOWARD_ZERO), toward_zero(variables)),
        "up": (
            linen.wrap(module, rounding(".*", "away_from_zero")),
            away_from_zero(variables),
        ),
    }
    expected = {
        name: module.apply(rounded, X) for name, (_, rounded) in subjects.items()
    }
    barrier = threading.Barrier(len(subjects))
    agree = {}

    def run(name):
        subject, _ = subjects[name]
        barrier.wait()
        results = [subject.apply(variables, X) for _ in range(3)]
        agree[name] = [same_bits(y, expected[name]) for y in results]

    threads = [threading.Thread(target=run, args=(name,)) for name in subjects]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agree == {name: [True] * 3 for name in subjects}


def test_an_exception_in_the_module_leaves_nothing_behind():
    class Failing(nn.Module):
        @nn.compact
        def __call__(self, x, fail):
            y = nn.Dense(3)(x)
            if fail:
                raise KeyError("as asked")
            return y

    module = Failing()
    variables = noisy(module.init(KEYS[0], X, fail=False))
    wrapped = linen.wrap(module, TOWARD_ZERO)
    bound = wrapped.bind(variables)
    for subject in (functools.partial(wrapped.apply, variables), bound):
        with pytest.raises(KeyError, match="as asked"):
            subject(X, fail=True)
        raw = module.apply(variables, X, fail=False)
        assert same_bits(raw, module.bind(variables)(X, fail=False))
        expected = module.apply(toward_zero(variables), X, fail=False)
        assert same_bits(subject(X, fail=False), expected)
    seen = []
    with nn.intercept_methods(
        lambda f, a, k, c: (seen.append(c.module), f(*a, **k))[1]
    ):
        module.apply(variables, X, fail=False)
    assert len(seen) == 2


def test_a_rule_over_activations_must_match_in_each_module_though_classes_are_equal():
    policy = Policy(activations=(Rule("layers_1", "nearest_even"),))
    two = nn.Sequential([nn.Dense(3), nn.Dense(3)])
    linen.wrap(two, policy).init(KEYS[0], X)
    with pytest.raises(ValueError, match="'layers_1', which matches none"):
        linen.wrap(nn.Sequential([nn.Dense(3)]), policy).init(KEYS[0], X)


def test_a_rule_over_a_module_that_only_training_calls_holds_in_evaluation():
    class Auxiliary(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            y = nn.Dense(3, name="main")(x)
            if train or self.is_initializing():
                nn.Dense(3, name="auxiliary")(y)
            return y

    variables = Auxiliary().init(KEYS[0], X, train=True)
    policy = Policy(activations=(Rule("auxiliary", "nearest_even"),))
    found = linen.wrap(Auxiliary(), policy).apply(variables, X, train=False)
    assert same_bits(found, Auxiliary().apply(variables, X, train=False))


def test_a_method_that_is_none_is_named():
    wrapped = linen.wrap(nn.Dense(3), rounding(".*"))
    variables = wrapped.init(KEYS[0], X)
    with pytest.raises(TypeError, match="`method` must name .* got 'features', .* 3"):
        wrapped.apply(variables, X, method="features")


def test_dicts_that_pass_rounded_keep_their_order_and_what_is_written_into_them():
    class Noting(nn.Module):
        @nn.compact
        def __call__(self, x, seen):
            seen["x"] = x
            return {"second": x, "first": 2 * x, "seen": jnp.stack([*seen.values()])}

    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen = {"b": x, "a": 3 * x}
            outputs = Noting(name="noting")(x, seen)
            return [*outputs.values()], [*seen.values()], list(seen)

    policy = Policy(
        activations=(
            Rule("noting", "toward_zero", at="in"),
            Rule("noting", "toward_zero"),
        )
    )
    x = noisy(X)
    down, triple = toward_zero(x), toward_zero(3 * x)
    outputs, seen, names = linen.wrap(Parent(), policy).apply({}, x)
    stacked = jnp.stack([down, triple, down])
    assert same_bits(outputs, [down, 2 * down, stacked])
    # Those it was given are the caller's own; the one it wrote, it had rounded.
    assert same_bits(seen, [x, 3 * x, down])
    assert names == ["b", "a", "x"]


# What it costs.


@pytest.mark.parametrize(
    "generation",
    [None, pytest.param("v5e:2x2", marks=pytest.mark.tpu_compile)],
    ids=str,
)
def test_no_second_copy_of_the_parameters_is_held(generation):
    plain = models.build(
        models.TransformerConfig(
            vocab_size=256,
            num_layers=12,
            width=256,
            num_heads=4,
            num_kv_heads=4,
            mlp_width=1024,
            remat="full",
        )
    )
    tokens = jax.ShapeDtypeStruct(
        (4, 128) if generation is None else (16, 256), "int32"
    )
    variables = jax.eval_shape(plain.init, KEYS[0], tokens)
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))

    def temporary_bytes(module):
        def loss(variables, tokens, key):
            rngs = {"rounding": key}
            return jnp.mean(module.apply(variables, tokens, rngs=rngs) ** 2)

        gradient, args = jax.jit(jax.grad(loss)), (variables, tokens, key)
        if generation is None:
            compiled = gradient.lower(*args).compile()
        else:
            compiled = tpu.compile_for(generation, gradient, *args)
        return compiled.memory_analysis().temp_size_in_bytes

    of_plain = temporary_bytes(plain)
    assert of_plain > 2**20
    rounded = temporary_bytes(linen.wrap(plain, rounding(".*", "nearest_even")))
    assert rounded <= 1.05 * of_plain
    rounded = temporary_bytes(linen.wrap(plain, STOCHASTIC))
    assert rounded <= 1.15 * of_plain


# What is leaned on in Flax without being promised.


def test_flax_marks_the_methods_of_modules():
    method = inspect.getattr_static(Setup, "encode")
    assert hasattr(method, "method_handler_wrapped"), moved("`method_handler_wrapped`")
    assert hasattr(Setup.setup, "method_handler_wrapped"), moved("the mark on `setup`")

    @nn.nowrap
    def helper(self):
        return 3

    assert hasattr(helper, "nowrap"), moved("the mark of `nn.nowrap`")


def test_flax_leaves_marked_methods_as_they_are():
    def method(self):
        return 3

    method.method_handler_wrapped = True
    subclass = type("Subclass", (nn.Dense,), {"method": method})
    found = inspect.getattr_static(subclass, "method")
    assert found is method, moved("`method_handler_wrapped`, which it wraps again")


def test_flax_binds_modules_in_post_init_and_lists_their_parts():
    seen = []

    class Part(nn.Module):
        def __post_init__(self, *args):
            super().__post_init__(*args)
            seen.append(self.scope is not None)

        def __call__(self, x):
            return x

    class Whole(nn.Module):
        def setup(self):
            self.part = Part()

        def __call__(self, x):
            found = self._state.children["part"]
            assert found is self.part, moved("`Module._state.children`")
            return self.part(x)

    Whole().apply({}, X)
    assert seen[-1], moved("the binding of scopes in `__post_init__`")


def test_flax_asks_interceptors_for_every_method():
    asked = []

    def interceptor(next_method, args, kwargs, context):
        asked.append((type(context.module), context.method_name))
        return next_method(*args, **kwargs)

    variables = CASES["setup"].variables()
    with nn.intercept_methods(interceptor):
        Setup().apply(variables, X)
    for method in ((Setup, "setup"), (Setup, "encode"), (Setup, "__call__")):
        assert method in asked, moved(f"the interception of {method[1]}")
    assert "context" in inspect.signature(interceptor).parameters
    assert hasattr(nn.module, "InterceptorContext"), moved("`InterceptorContext`")
