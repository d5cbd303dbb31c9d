import dataclasses
import re
import warnings

import hypothesis
import pytest
from hypothesis import strategies

from mixprec import rules
from mixprec.rounding import api, formats, modes
from mixprec.rules import Rule, Site

PATHS = (
    "embed/embedding",
    "layers/attention/query/kernel",
    "layers/attention/query/bias",
    "layers/norm/scale",
)


def check(*given, paths=PATHS):
    sites = [Site(path) for path in paths]
    rules.check_all_in_use(given, rules.rules_in_use(given, sites), sites, "parameter")


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
    assert Rule(pattern, None).matches_path(path) is matches


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


def test_rules_that_all_decide_for_something_pass():
    check(Rule(".*/scale", None), Rule("layers/.*", "stochastic"), Rule(".*", None))
    check(paths=())
    given = (Rule("a", None), Rule("b", None))
    assert rules.rules_in_use(given, [Site("b"), Site("c")]) == {Rule("b", None)}


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
        "are decided by the earlier rule 'layers/.*=stochastic'. "
        "Put the narrower rule first."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check(broad, narrow)
    check(narrow, broad)


def test_the_message_says_what_kind_of_path_is_meant():
    given = (Rule("layer", None, at="out"),)
    sites = [Site("layers", "out"), Site("norm", "out")]
    with pytest.raises(ValueError, match=r"some module path.*nearest: 'layers'"):
        rules.check_all_in_use(given, set(), sites, "module")


def test_a_rule_for_another_kind_of_site_is_told_which_there_are():
    given = (Rule("layers", None, at="in", method="encode"),)
    sites = [Site("layers", "in"), Site("layers", "out"), Site("norm", "out")]
    message = "matches only 'layers:in', 'layers:out'. Write one of these"
    with pytest.raises(ValueError, match=message):
        rules.check_all_in_use(given, set(), sites, "module")


def test_rules_known_to_decide_elsewhere_are_not_asked_for():
    given = (Rule("a", None), Rule("b", None))
    rules.check_all_in_use(given, set(given), [Site("c")], "module")
    with pytest.raises(ValueError, match="got 'b'"):
        rules.check_all_in_use(given, {given[0]}, [Site("c")], "module")


@pytest.mark.parametrize(
    ("rule", "site", "matches"),
    [
        (Rule("a", None), Site("a"), True),
        (Rule("a", None), Site("a", "out"), False),
        (Rule("a", None, at="out"), Site("a", "out"), True),
        (Rule("a", None, at="out"), Site("a", "in"), False),
        (Rule("a", None, at="out"), Site("a", "out", "encode"), False),
        (Rule("a", None, at="in", method="encode"), Site("a", "in", "encode"), True),
        (Rule("a", None, at="in", method="encode"), Site("ab", "in", "encode"), False),
    ],
)
def test_a_rule_is_for_one_kind_of_site(rule, site, matches):
    assert rule.matches(site) is matches
    assert rules.first_match((rule,), site) == (rule if matches else None)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf16"}, "`dtype` must be one of bfloat16.*Did you mean 'bfloat16'"),
        ({"dtype": "float32"}, "`dtype` must be one of bfloat16"),
        ({"overflow": "clip"}, "`overflow` must be one of inf, saturate, got 'clip'"),
        ({"at": "output"}, "`at` must be one of in, out, got 'output'"),
        ({"random_bits": 0}, "`random_bits` must be an integer from 1 to 32, got 0"),
        ({"random_bits": True}, "`random_bits` must be an integer .*, got True"),
        ({"min_size": -1}, "`min_size` must be an integer from 0 to .*, got -1"),
        ({"min_size": 1.0}, "`min_size` must be an integer .*, got 1.0"),
        ({"method": "a.b", "at": "in"}, "`method` must be the name .*, got 'a.b'"),
        ({"method": "setup", "at": "in"}, "`method` must be the name .*, got 'setup'"),
        ({"method": "encode"}, '`at` must be "in" or "out" for method "encode"'),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Rule("a", "stochastic", **options)


def test_options_that_do_nothing_are_refused():
    with pytest.raises(ValueError, match="`random_bits` must be left out for mode"):
        Rule("a", "toward_zero", random_bits=8)
    with pytest.raises(ValueError, match="`dtype` must be left out for a rule that"):
        Rule("a", None, dtype="float16")


def test_rules_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rule("a", None).mode = "stochastic"


def test_choices_are_those_of_the_operation():
    assert tuple(format_.dtype for format_ in formats.FORMATS) == rules.DTYPES
    assert rules.OVERFLOWS == api.OVERFLOWS


# Text


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (".*/kernel=stochastic", Rule(".*/kernel", "stochastic")),
        (".*/scale=keep", Rule(".*/scale", None)),
        ("mlp:out=to_odd", Rule("mlp", "to_odd", at="out")),
        (":in=to_odd", Rule("", "to_odd", at="in")),
        ("mlp:encode:in=keep", Rule("mlp", None, at="in", method="encode")),
        ('"a{1,2}"=keep', Rule("a{1,2}", None)),
        ('"a b":out=keep', Rule("a b", None, at="out")),
        (r'"\\d,"=keep', Rule(r"\d,", None)),
        ("(?:a|b)=keep", Rule("(?:a|b)", None)),
        (
            "a=stochastic(dtype=float8_e5m2, overflow=saturate, random_bits=8, "
            "min_size=1024)",
            Rule(
                "a",
                "stochastic",
                dtype="float8_e5m2",
                overflow="saturate",
                random_bits=8,
                min_size=1024,
            ),
        ),
    ],
)
def test_rules_read_and_print_as_text(text, rule):
    assert rules.parse_rules(text) == (rule,)
    assert rules.parse_rules(str(rule)) == (rule,)


def test_spaces_and_line_ends_do_not_count():
    text = " .*/scale = keep ,\n  .*=stochastic ( min_size = 8 ,dtype=float16 ) "
    assert rules.parse_rules(text) == (
        Rule(".*/scale", None),
        Rule(".*", "stochastic", min_size=8, dtype="float16"),
    )
    assert rules.parse_rules("  ") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "cannot be read from character 1 on: 'a'"),
        ("=keep", "cannot be read from character 1 on: '=keep'"),
        ("a=keep,", "cannot be read from character 1 on"),
        ("a=keep b=keep", "cannot be read from character 1 on"),
        ("a=keep, b c=keep", "cannot be read from character 8 on: 'b c=keep'"),
        ("a=keep;", "cannot be read from character 1 on"),
        ('"a=keep', "cannot be read from character 1 on"),
        (r'"\d"=keep', r"patterns in double quotes as JSON"),
        ("a=kep", "`mode` must be one of"),
        ("a=stochastic(bits=8)", "`option` must be one of dtype, overflow"),
        ("a=stochastic(8)", "`option` must be one of .*, got '8'"),
        ("a=stochastic(min_size=x)", "`min_size` must be an integer .*, got 'x'"),
        ("a=stochastic(min_size=1, min_size=2)", "`min_size` must be given once"),
        ("a=stochastic(dtype=float16)x", "cannot be read"),
        ("[=keep", "`pattern` must be a regular expression"),
    ],
)
def test_text_that_cannot_be_read_is_shown(text, message):
    with pytest.raises(ValueError, match=message):
        rules.parse_rules(text)


def random_rules(at):
    """Gives a strategy that makes rules of every kind."""

    def is_pattern(text):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of syntax that may change
                re.compile(text)
        except (re.error, OverflowError, RecursionError, FutureWarning):
            return False
        return True

    def make(pattern, mode, dtype, overflow, bits, min_size, at, method):
        options = {"dtype": dtype, "overflow": overflow, "min_size": min_size}
        if mode == "stochastic":
            options["random_bits"] = bits
        if at is not None:
            options |= {"at": at, "method": method}
        if mode is None:
            options = {n: v for n, v in options.items() if n in ("at", "method")}
        return Rule(pattern, mode, **options)

    return strategies.builds(
        make,
        strategies.text().filter(is_pattern)
        | strategies.text(':;,="\\ \n()[]a.*/inout').filter(is_pattern),
        strategies.sampled_from((None, *modes.MODES)),
        strategies.sampled_from(rules.DTYPES),
        strategies.sampled_from(rules.OVERFLOWS),
        strategies.none() | strategies.integers(1, 32),
        strategies.integers(0, 2**63),
        strategies.sampled_from(at),
        strategies.sampled_from(("__call__", "encode", "_x1")),
    )


@hypothesis.given(strategies.lists(random_rules((None, "in", "out"))))
def test_any_rules_come_back_from_their_text(given):
    assert rules.parse_rules(", ".join(map(str, given))) == tuple(given)


@hypothesis.given(strategies.text() | strategies.text(':;,="\\ ()keepinout.*'))
def test_any_text_is_read_or_refused(text):
    found, message = None, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            found = rules.parse_rules(text)
    except ValueError as error:
        message = str(error)
    if found is None:
        assert " must " in message
    else:
        assert rules.parse_rules(", ".join(map(str, found))) == found
