import dataclasses
import pickle
import re

import numpy as np
import pytest

from mixprec import policy as policy_lib
from mixprec.policy import Policy, Rule
from mixprec.rounding import dispatch

PATHS = (
    "embed/embedding",
    "layers/attention/query/kernel",
    "layers/attention/query/bias",
    "layers/norm/scale",
)


def check(*rules, paths=PATHS):
    policy_lib.check_params(Policy(params=rules), paths)


def test_the_first_rule_that_matches_decides():
    first, second = Rule(".*/kernel", "toward_zero"), Rule(".*", "stochastic")
    policy = Policy(params=(first, second), activations=(second, first))
    assert policy.param_rule("layers/kernel") is first
    assert policy.param_rule("layers/bias") is second
    assert policy.activation_rule("layers/kernel") is second


def test_a_rule_with_mode_none_decides_like_any_other():
    leave = Rule(".*/scale", None)
    policy = Policy(params=(leave, Rule(".*", "stochastic")))
    assert policy.param_rule("norm/scale") is leave
    assert policy.param_rule("norm/bias").mode == "stochastic"


def test_what_no_rule_matches_has_no_rule():
    policy = Policy(params=(Rule("a", "stochastic"),))
    assert policy.param_rule("b") is None
    assert policy.activation_rule("a") is None


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("kernel", "layers/kernel", False),
        ("layers", "layers/kernel", False),
        (".*/kernel", "layers/kernel", True),
        (".*/kernel", "kernel", False),
        ("(.*/)?kernel", "kernel", True),
        ("a|ab", "ab", True),
        ("", "", True),
        ("", "a", False),
        ("layers/[01]/.*", "layers/1/kernel", True),
        ("(?i)KERNEL", "kernel", True),
        (".*", "with\nnewline", False),
        ("kernel$", "kernel\n", False),
    ],
)
def test_a_pattern_must_match_the_whole_path(pattern, path, matches):
    assert Rule(pattern, None).matches(path) is matches


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
        {"out_dtype": "bfloat16"},
        {"seed": 4},
        {"backend": "xla"},
    ],
)
def test_policies_that_differ_in_one_field_are_not_equal(change):
    policy = Policy(params=(Rule("a", "stochastic"),), seed=3)
    assert dataclasses.replace(policy, **change) != policy


def test_rules_may_be_given_by_any_iterable():
    rules = (Rule("a", None), Rule("b", "stochastic"))
    assert Policy(activations=iter(rules)).activations == rules
    assert Policy(params=list(rules)).params == rules


def test_policies_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().seed = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rule("a", None).mode = "stochastic"


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_ends_of_the_range_of_seeds_are_in_it(seed):
    assert Policy(seed=seed).seed == seed


@pytest.mark.parametrize("pattern", ["(", "[", "*a", "a{9999999999}"])
def test_a_pattern_that_is_no_regular_expression_is_refused(pattern):
    message = f"`pattern` must be a regular expression, got '{re.escape(pattern)}'"
    with pytest.raises(ValueError, match=message):
        Rule(pattern, None)


@pytest.mark.parametrize("pattern", [None, 3, b"a", re.compile("a")])
def test_a_pattern_that_is_no_string_is_refused(pattern):
    with pytest.raises(ValueError, match=r"`pattern` must be.*not a string"):
        Rule(pattern, None)


@pytest.mark.parametrize(
    ("mode", "hint"),
    [
        ("to_zero", "Did you mean 'toward_zero'?"),
        ("nearest", "Did you mean 'nearest_even'?"),
        ("Stochastic", "Did you mean 'stochastic'?"),
        ("xyz", "Choose one of them."),
        (3, "Choose one of them."),
    ],
)
def test_an_unknown_mode_is_refused_with_the_near_one(mode, hint):
    message = f"`mode` must be one of nearest_even, .*, got {mode!r}.*{re.escape(hint)}"
    with pytest.raises(ValueError, match=message):
        Rule("a", mode)


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
@pytest.mark.parametrize("field", ["params", "activations"])
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
        ("seed", -1, "an integer from 0 to .*, got -1"),
        ("seed", 2**64, "an integer from 0 to .*, got 18446744073709551616"),
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


def test_rules_that_all_decide_for_something_pass():
    check(Rule(".*/scale", None), Rule("layers/.*", "stochastic"), Rule(".*", None))
    policy_lib.check_params(Policy(), ())
    in_use = policy_lib.rules_in_use((Rule("a", None), Rule("b", None)), ("b", "c"))
    assert in_use == {Rule("b", None)}


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layers/attention/qurey/kernel", "layers/attention/query/kernel"),
        ("embedding", "embed/embedding"),
        ("embed/.*/embedding", "embed/embedding"),
        (".*/kernal", "layers/attention/query/kernel"),
        (".*/norm/scal", "layers/norm/scale"),
        (r"^layers/norm/scale\.$", "layers/norm/scale"),
    ],
)
def test_a_rule_that_matches_nothing_is_named_with_the_nearest_paths(pattern, near):
    message = (
        f"the whole of some parameter path, got {re.escape(repr(pattern))}, "
        f"which matches none of 4. The nearest: .*'{near}'"
    )
    with pytest.raises(ValueError, match=message):
        check(Rule(".*/bias", None), Rule(pattern, "stochastic"))


def test_a_pattern_near_nothing_is_answered_with_some_paths():
    with pytest.raises(ValueError, match="The nearest: 'embed/embedding', 'layers"):
        check(Rule("0", "stochastic"))


def test_a_rule_where_there_is_nothing_to_match_is_refused():
    with pytest.raises(ValueError, match=r"none of 0\. There is no parameter: remove"):
        check(Rule(".*", "stochastic"), paths=())


def test_a_rule_hidden_by_an_earlier_one_is_named_with_it():
    broad, narrow = Rule("layers/.*", "stochastic"), Rule(".*/kernel", None)
    message = (
        "but all that '.*/kernel' matches, such as 'layers/attention/query/kernel', "
        "are decided by the earlier Rule(pattern='layers/.*', mode='stochastic'). "
        "Put the narrower rule first."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check(broad, narrow)
    check(narrow, broad)


def test_the_message_says_what_kind_of_path_is_meant():
    rules = (Rule("layer", None),)
    with pytest.raises(ValueError, match=r"some module path.*nearest: 'layers'"):
        policy_lib.check_all_in_use(rules, set(), ("layers", "norm"), "module")


def test_rules_known_to_decide_elsewhere_are_not_asked_for():
    rules = (Rule("a", None), Rule("b", None))
    policy_lib.check_all_in_use(rules, set(rules), ("c",), "module")
    with pytest.raises(ValueError, match="got 'b'"):
        policy_lib.check_all_in_use(rules, {rules[0]}, ("c",), "module")


def test_backends_are_those_of_the_operation():
    assert policy_lib.BACKENDS == dispatch.BACKENDS
