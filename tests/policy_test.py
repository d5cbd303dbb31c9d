import dataclasses
import json
import pickle

import ml_collections
import numpy as np
import pytest

from mixprec import policy as policy_lib
from mixprec.policy import PRESETS, Policy
from mixprec.rounding import dispatch
from mixprec.rules import Rule, Site


def test_the_first_rule_that_matches_decides():
    first, second = Rule(".*/kernel", "toward_zero"), Rule(".*", "stochastic")
    policy = Policy(params=(first, second), gradients=(second, first))
    assert policy.param_rule("layers/kernel") == first
    assert policy.param_rule("layers/bias") == second
    assert policy.gradient_rule(Site("layers/kernel")) == second


def test_a_rule_with_mode_none_decides_like_any_other():
    leave = Rule(".*/scale", None)
    policy = Policy(params=(leave, Rule(".*", "stochastic")))
    assert policy.param_rule("norm/scale") == leave
    assert policy.param_rule("norm/bias").mode == "stochastic"


def test_what_no_rule_matches_has_no_rule():
    policy = Policy(params=(Rule("a", "stochastic"),))
    assert policy.param_rule("b") is None
    assert policy.activation_rule(Site("a", "out")) is None
    assert policy.gradient_rule(Site("a")) is None


def test_policies_are_equal_and_hash_by_value():
    one = Policy(params=[Rule("a", "stochastic")], seed=3)
    other = Policy(params=(Rule("a", "stochastic"),), seed=3)
    assert one == other
    assert hash(one) == hash(other)
    assert one.params == (Rule("a", "stochastic"),)
    assert pickle.loads(pickle.dumps(one)) == one
    assert len({one, other}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"params": ()},
        {"params": (Rule("a", "toward_zero"),)},
        {"activations": (Rule("a", "stochastic"),)},
        {"gradients": (Rule("a", "stochastic"),)},
        {"out_dtype": "bfloat16"},
        {"seed": 4},
        {"backend": "xla"},
        {"gather": ("fsdp",)},
    ],
)
def test_policies_that_differ_in_one_field_are_not_equal(change):
    policy = Policy(params=(Rule("a", "stochastic"),), seed=3)
    assert dataclasses.replace(policy, **change) != policy


def test_rules_may_be_given_by_any_iterable():
    rules = (Rule("a", None), Rule("b", "stochastic"))
    assert Policy(gradients=iter(rules)).gradients == rules
    assert Policy(params=list(rules)).params == rules


def test_policies_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().seed = 1


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_ends_of_the_range_of_seeds_are_in_it(seed):
    assert Policy(seed=seed).seed == seed


@pytest.mark.parametrize(
    "rules",
    [
        Rule("a", "stochastic"),  # a forgotten comma
        ("a", "stochastic"),
        [("a", "stochastic")],
        (Rule("a", None), None),
        "a",
        None,
        3,
    ],
)
@pytest.mark.parametrize("field", ["params", "activations", "gradients"])
def test_what_is_no_tuple_of_rules_is_refused(field, rules):
    with pytest.raises(TypeError, match=f"`{field}` must be a tuple of Rules, got"):
        Policy(**{field: rules})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("out_dtype", "float16", "of float32, bfloat16, got 'float16'"),
        ("out_dtype", np.dtype("float32"), r"of float32, bfloat16, got dtype"),
        (
            "backend",
            "cuda",
            "of auto, pallas, xla, got 'cuda'. Leave it out for 'auto'",
        ),
        ("backend", None, "of auto, pallas, xla, got None"),
        ("gather", "fsdp+", r"names of mesh axes joined by '\+', got 'fsdp\+'"),
        ("gather", ("a b",), r"names of mesh axes .*, got \('a b',\)"),
        ("gather", None, "names of mesh axes .*, got None"),
        ("gather", (1,), r"names of mesh axes .*, got \(1,\)"),
        ("seed", -1, "an integer from 0 to .*, got -1"),
        ("seed", 2**64, "an integer from 0 to .*, got 18446744073709551616"),
        ("seed", True, "an integer from 0 to .*, got True"),
        ("seed", 1.0, "an integer from 0 to .*, got 1.0"),
        ("seed", None, "an integer from 0 to .*, got None"),
    ],
)
def test_other_values_of_fields_are_refused(field, value, message):
    with pytest.raises(ValueError, match=f"`{field}` must be (one )?{message}"):
        Policy(**{field: value})


def test_fields_must_be_named():
    with pytest.raises(TypeError, match="positional"):
        Policy((Rule("a", None),))


def test_backends_are_those_of_the_operation():
    assert policy_lib.BACKENDS == dispatch.BACKENDS


def test_what_passes_at_modules_is_by_default_what_they_return():
    policy = Policy(activations=(Rule("a", None), Rule("b", None, at="in")))
    assert [rule.at for rule in policy.activations] == ["out", "in"]
    assert policy.activation_rule(Site("a", "out")) == policy.activations[0]
    assert policy.activation_rule(Site("a", "in")) is None


def test_rules_over_modules_are_refused_among_those_over_parameters():
    with pytest.raises(ValueError, match="`params` must be rules over parameters, got"):
        Policy(params=(Rule("a", None, at="out"),))


def test_float16_is_not_carried_in_bfloat16():
    rules = (Rule("a", "stochastic", dtype="float16"),)
    assert Policy(gradients=rules, out_dtype="bfloat16").out_dtype == "bfloat16"
    for field in ("params", "activations"):
        with pytest.raises(
            ValueError, match="`out_dtype` must be float32 for rules to"
        ):
            Policy(**{field: rules}, out_dtype="bfloat16")


# Text


POLICY = Policy(
    params=(Rule(".*/scale", None), Rule(".*", "stochastic", dtype="float8_e4m3fn")),
    activations=(Rule("a;b", "to_odd", at="in"), Rule("mlp", "nearest_even")),
    gradients=(Rule(".*", "stochastic"), Rule("mlp", "nearest_even", at="out")),
    out_dtype="bfloat16",
    seed=2**64 - 1,
    backend="xla",
    gather=("fsdp", "data"),
)


def test_a_policy_reads_and_prints_as_text():
    text = (
        "params: .*/scale=keep, .*=stochastic(dtype=float8_e4m3fn); "
        'activations: "a;b":in=to_odd, mlp:out=nearest_even; '
        "gradients: .*=stochastic, mlp:out=nearest_even; "
        "out_dtype=bfloat16; seed=18446744073709551615; backend=xla; "
        "gather=fsdp+data"
    )
    assert str(POLICY) == text
    assert Policy.from_text(text) == POLICY
    assert Policy.from_text("  " + text.replace("; ", " ;\n")) == POLICY
    assert Policy.from_text(str(Policy())) == Policy()


def test_a_policy_goes_through_json_and_config_dicts():
    assert Policy.from_dict(json.loads(json.dumps(POLICY.to_dict()))) == POLICY
    config = ml_collections.ConfigDict(POLICY.to_dict())
    assert Policy.from_dict(config) == POLICY
    assert Policy.from_dict(
        ml_collections.ConfigDict(json.loads(config.to_json()))
    ) == (POLICY)
    assert Policy.from_dict({"params": "a=keep"}) == Policy(params=(Rule("a", None),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params .*=keep", "must be parts such as .*, got 'params"),
        ("params=a", "must be parts such as"),
        ("seed: 3", "must be parts such as"),
        ("seed=x", "`seed` must be an integer .*, got 'x'"),
        ("seed=1; seed=1", "`seed` must be given once"),
        ("dtype=bfloat16", "`field` must be one of .*Did you mean 'out_dtype'"),
        ("params: a=kep", "`mode` must be one of"),
        ("params: a:out=keep", "`params` must be rules over parameters"),
        ("params_stochastik", "`preset` must be .*Did you mean 'params_stochastic'"),
    ],
)
def test_text_that_cannot_be_read_is_shown(text, message):
    with pytest.raises(ValueError, match=message):
        Policy.from_text(text)


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError, match="`text` must be a string, got None"):
        Policy.from_text(None)
    with pytest.raises(
        ValueError, match="`params` must be rules as text, .*, got \\(\\)"
    ):
        Policy.from_dict({"params": ()})
    for given in (None, [], "params: a=keep"):
        with pytest.raises(TypeError, match="`fields` must be a mapping"):
            Policy.from_dict(given)
    with pytest.raises(ValueError, match="`field` must be one of .*, got 'prams'"):
        Policy.from_dict({"prams": "a=keep"})


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_named(name):
    policy = Policy.from_text(name)
    assert policy == Policy.from_text(PRESETS[name])
    assert policy != Policy()
    assert Policy.from_text(str(policy)) == policy
