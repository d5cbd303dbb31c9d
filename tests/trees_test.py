import collections

import pytest

from mixprec import trees

Pair = collections.namedtuple("Pair", "first second")


def negated(tree):
    return trees.map_leaves(lambda _, x: -x, tree)


def test_mapped_dicts_keep_their_order_and_other_trees_their_types():
    tree = {"b": [1, {"z": 2, "a": None}], "a": Pair(3, ({"y": 4, "x": 5},))}
    found = negated(tree)
    assert found == {
        "b": [-1, {"z": -2, "a": None}],
        "a": Pair(-3, ({"y": -4, "x": -5},)),
    }
    assert list(found) == ["b", "a"]
    assert list(found["b"][1]) == ["z", "a"]
    assert type(found["a"]) is Pair
    assert list(trees.map_leaves(lambda _, x: x, [{"y": 1, "x": 2}])[0]) == ["y", "x"]


def test_leaves_are_called_with_their_places():
    seen = {}
    trees.map_leaves(
        lambda keys, x: seen.setdefault(x, [key.key for key in keys]),
        {"b": {"c": (1,)}, "a": (2,)},
        is_leaf=lambda x: isinstance(x, tuple),
    )
    assert seen == {(1,): ["b", "c"], (2,): ["a"]}


def write(given):
    given["new"] = 7
    given["replaced"] = 8
    del given["removed"]
    given["list"].append(9)
    given["list"][0] = 10
    given["pair"].second["inner"] = 11


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_what_is_written_is_handed_back_and_the_rest_is_as_it_was(kind):
    inner = {"kept": 5}
    items = [1, 2]
    given = kind(
        kept=1, replaced=2, removed=3, list=items, pair=Pair(4, inner), none=None
    )
    handed = negated((given,))
    with trees.handing_back((given,), handed):
        write(handed[0])
        assert given["replaced"] == 2
    assert given == kind(
        kept=1, replaced=8, list=items, pair=Pair(4, inner), none=None, new=7
    )
    assert list(given) == ["kept", "replaced", "list", "pair", "none", "new"]
    assert given["list"] is items
    assert items == [10, 2, 9]
    assert given["pair"].second is inner
    assert inner == {"kept": 5, "inner": 11}


def test_it_is_handed_back_after_an_exception_too():
    given = {"a": 1}

    def fail():
        handed = negated(given)
        with trees.handing_back(given, handed):
            handed["b"] = 2
            raise KeyError("as asked")

    with pytest.raises(KeyError, match="as asked"):
        fail()
    assert given == {"a": 1, "b": 2}


def test_the_same_tree_is_left_alone():
    given = ({"a": [1]}, 2)
    with trees.handing_back(given, given):
        given[0]["a"].append(3)
    assert given == ({"a": [1, 3]}, 2)
