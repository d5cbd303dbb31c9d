import flax.linen as nn
import jax
import pytest

from mixprec import coverage
from mixprec.policy import Policy
from mixprec.rules import Site
from mixprec.scopes import Seen


class Encoder(nn.Module):
    def encode(self, x):
        return x

    def __call__(self, x):
        return self.encode(x)


STRUCT = jax.ShapeDtypeStruct((3,), "float32")


def test_rules_over_parameters_are_those_forward_and_backward():
    policy = Policy.from_text("params: a=keep; gradients: b=to_odd, c:out=to_odd")
    parameters = coverage.rules_over(policy, "parameter")
    modules = coverage.rules_over(policy, "module")
    assert [[rule.pattern for rule in rules] for rules in parameters] == [["a"], ["b"]]
    assert [[rule.pattern for rule in rules] for rules in modules] == [[], ["c"]]


@pytest.mark.parametrize("text", ["params: a=keep", "gradients: a=to_odd"])
def test_parameters_must_be_there(text):
    coverage.check_params(Policy.from_text(text), ("a", "b"))
    with pytest.raises(ValueError, match="some parameter path, got 'a', .* none of 1"):
        coverage.check_params(Policy.from_text(text), ("b",))


def test_sites_are_those_where_something_passed_and_all_methods_of_modules():
    passed = Site("part", "in", "helper")
    seen = Seen(modules={"": Encoder}, passed={passed: STRUCT})
    found = set(coverage.module_sites(seen, ["uncalled"]))
    methods = ("encode", "__call__")
    assert found == {
        passed,
        *(Site("", at, name) for at in ("in", "out") for name in methods),
        *(Site("uncalled", at) for at in ("in", "out")),
    }


@pytest.mark.parametrize("section", ["activations", "gradients"])
def test_a_method_may_be_left_uncalled_but_must_be_there(section):
    seen = Seen(modules={"": Encoder})
    good = Policy.from_text(f"{section}: :encode:in=to_odd, uncalled:out=to_odd")
    coverage.check_modules((section, "good"), good, seen, ["uncalled"])
    bad = Policy.from_text(f"{section}: :encoed:in=to_odd")
    with pytest.raises(ValueError, match="matches only .*':encode:in'"):
        coverage.check_modules((section, "bad"), bad, seen, [])
    # What one call has seen holds for later ones of its kind.
    other = Seen(modules={"": nn.Dense})
    coverage.check_modules((section, "good"), good, other, [])
