"""Dicts and lists that pass into and out of modules, as Python has them.

JAX maps over trees by building them anew, dicts in the order of their keys. A module
may look at the order of a dict, and write into a dict or list that it is given.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax


def map_leaves(
    function: Callable[[Any, Any], Any],
    tree: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Does what `jax.tree_util.tree_map_with_path` does; dicts keep their order."""
    mapped = jax.tree_util.tree_map_with_path(function, tree, is_leaf=is_leaf)
    return _in_order_of(tree, mapped)


def _in_order_of(like: Any, tree: Any) -> Any:
    if type(like) is dict and type(tree) is dict:
        return {key: _in_order_of(value, tree[key]) for key, value in like.items()}
    if type(like) is type(tree) and type(tree) in (list, tuple):
        return type(tree)(map(_in_order_of, like, tree))
    return tree


@contextlib.contextmanager
def handing_back(given: Any, handed: Any) -> Iterator[None]:
    """Hands back what is written into dicts and lists meanwhile.

    Args:
      given: by the caller.
      handed: on, in its place: the same, or what `map_leaves` has made of it.
    """
    copies = list(_copies(given, handed))
    try:
        yield
    finally:
        for original, copy, before in copies:
            now = dict(_items(copy))
            if _identities(now) != _identities(before):
                _hand_back(original, before, now)


def _copies(given: Any, handed: Any) -> Iterator[tuple[Any, Any, dict[Any, Any]]]:
    """Gives each dict and list, its copy, and what the copy holds."""
    if given is handed or not isinstance(given, (dict, list, tuple)):
        return
    if not isinstance(given, tuple):
        yield given, handed, dict(_items(handed))
    for key, value in _items(given):
        yield from _copies(value, handed[key])


def _hand_back(original: Any, before: dict[Any, Any], now: dict[Any, Any]) -> None:
    # What has been mapped and not replaced goes back as it was.
    was = {id(before[key]): value for key, value in _items(original)}
    values = {key: was.get(id(value), value) for key, value in now.items()}
    original.clear()
    if isinstance(original, dict):
        original.update(values)
    else:
        original.extend(values.values())


def _items(tree: Any) -> list[tuple[Any, Any]]:
    return list(tree.items() if isinstance(tree, dict) else enumerate(tree))


def _identities(items: dict[Any, Any]) -> list[tuple[Any, int]]:
    return [(key, id(value)) for key, value in items.items()]
