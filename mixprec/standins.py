"""Stand-ins for `flax.nnx` modules: shallow copies that read their parameters rounded.

A stand-in is made for one method call of a wrapped module; see `mixprec.nnx`. It has
the attributes of the original, and so have its modules of theirs. It shares Variables
with the original, but for each Param that a rule selects it has a view, and modules
that a rule over activations names are of a subclass; see `mixprec.views`. After the
method, what it has changed is done to the original.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from mixprec import views


class StandIn:
    """A stand-in for a wrapped module, and what it stands in for.

    Args:
      module: that is wrapped.
      mark: of the call.

    Attributes:
      module: the stand-in.
    """

    def __init__(self, module: nnx.Module, mark: views.Mark) -> None:
        self._mark = mark
        found = dict(views.nodes(module))
        self._paths = {id(node): path for path, node in found.items()}
        # Parts that are wrapped on their own are left to their own methods.
        wrapped = [path for path, node in found.items() if views.is_wrapped(node)]
        self._theirs = {f"{path}/": found[path] for path in wrapped if path}
        bridges = [p for p, node in found.items() if isinstance(node, nnx.bridge.ToNNX)]
        self._linen = tuple(f"{path}/".lstrip("/") for path in bridges)
        # By id. Pairs keep both alive, or else ids would come again.
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._originals: dict[int, tuple[Any, Any]] = {}
        self._before: list[tuple[Any, Any, dict[str, Any]]] = []
        self.module = self._copy(module)

    def to_copies(self, tree: Any) -> Any:
        """Gives `tree` with parts of the stand-in for those of the original."""
        return _map_nodes(lambda node: self._copies.get(id(node), (0, node))[1], tree)

    def to_originals(self, tree: Any) -> Any:
        """Gives `tree` with parts of the original for those of the stand-in.

        Variables and modules that a method has made of parts of the stand-in become
        plain ones.
        """
        return _map_nodes(self._original, tree)

    def write_back(self) -> None:
        """Does to the original what has been done to the stand-in."""
        for original, copy, before in self._before:
            if isinstance(copy, nnx.Variable):
                changed = views.without_mark(copy)
                is_same = copy.get_raw_value() is before["value"]
                if not is_same or changed.get_metadata() != original.get_metadata():
                    original.update_from_state(changed)
                continue
            for name in before.keys() - vars(copy).keys():
                vars(original).pop(name, None)
            for name, value in vars(copy).items():
                is_same = name in before and value is before[name]
                if name == views.MARK or (is_same and views.is_node(value)):
                    continue
                value = self.to_originals(value)
                if not (is_same and _same_leaves(value, vars(original).get(name))):
                    vars(original)[name] = value

    def _copy(self, node: Any) -> Any:
        path = self._paths.get(id(node))
        if id(node) in self._copies:
            return self._copies[id(node)][1]
        is_theirs = path is not None and f"{path}/".startswith(tuple(self._theirs))
        if views.is_wrapped(node) and (is_theirs or path is None):
            return self._copy_wrapped(node, path)
        if is_theirs:
            self._check_not_tied(node)
        if is_theirs or path is None:
            return node
        mark = dataclasses.replace(self._mark, path=path)
        if isinstance(node, nnx.Variable):
            if not (isinstance(node, nnx.Param) and views.is_selected(node, mark)):
                return node
            if path.startswith(self._linen):
                raise TypeError(
                    f"`{path}` must be wrapped as a part of its Linen module to be "
                    "rounded, got an nnx.bridge.ToNNX that is wrapped. Write "
                    "ToNNX(mixprec.wrap(module, policy)), or leave it alone by a rule "
                    "with mode None."
                )
            view = views.view_of(node, mark)
            return self._pair(node, view, {"value": view.get_raw_value()})
        cls: Any = getattr(type(node), views.ORIGINAL, type(node))
        both = [views.site_rules(mark.policy, site) for site in views.sites(cls, path)]
        is_passing = isinstance(node, nnx.Module) and any(a or b for a, b in both)
        copy = object.__new__(views.passing_class(cls) if is_passing else cls)
        before: dict[str, Any] = {}
        self._pair(node, copy, before)
        for name, value in vars(node).items():
            vars(copy)[name] = before[name] = _map_nodes(self._copy, value)
        vars(copy).pop(views.MARK, None)
        if is_passing:
            vars(copy)[views.MARK] = mark
        return copy

    def _check_not_tied(self, node: Any) -> None:
        """Raises ValueError if a part that is wrapped on its own rounds `node`."""
        is_variable = isinstance(node, nnx.Variable)
        within = [node] if is_variable else [at for _, at in views.nodes(node)]
        for param in within:
            path = self._paths.get(id(param), "")
            theirs = max(filter(path.startswith, self._theirs), key=len, default=None)
            if theirs is None or not isinstance(param, nnx.Param):
                continue
            policy = getattr(type(self._theirs[theirs]), views.POLICY)
            below = path[len(theirs) :]
            mark = dataclasses.replace(self._mark, policy=policy, path=below)
            if views.is_selected(param, mark):
                raise ValueError(
                    f"`{path}` must be read by the wrapped part `{theirs[:-1]}` alone, "
                    "or else by others it would not be rounded, got a module in which "
                    "they are tied. Wrap the whole, and not that part."
                )

    def _copy_wrapped(self, node: nnx.Module, path: str | None) -> nnx.Module:
        copy = object.__new__(type(node))
        vars(copy).update(vars(node))
        root = views.join(self._mark.root, path or "")
        vars(copy)[views.MARK] = dataclasses.replace(self._mark, root=root, path="")
        return self._pair(node, copy, dict(vars(node)))

    def _pair(self, original: Any, copy: Any, before: dict[str, Any]) -> Any:
        self._copies[id(original)] = (original, copy)
        self._originals[id(copy)] = (copy, original)
        self._before.append((original, copy, before))
        return copy

    def _original(self, node: Any) -> Any:
        if id(node) in self._originals:
            return self._originals[id(node)][1]
        if id(node) in self._copies or not views.is_node(node):
            return node
        if isinstance(node, nnx.Variable):
            return views.without_mark(node) if isinstance(node, views.View) else node
        self._originals[id(node)] = (node, node)
        for name, value in vars(node).items():
            vars(node)[name] = self.to_originals(value)
        if vars(node).pop(views.MARK, None) and not views.is_wrapped(node):
            object.__setattr__(node, "__class__", getattr(type(node), views.BASE))
        return node


def _map_nodes(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to Variables and modules; gives `tree` itself if none change.

    The like of a dictionary whose keys cannot be sorted is no tree to JAX, nor to NNX.
    """
    try:
        flat, structure = jax.tree.flatten(tree, is_leaf=views.is_node)
    except (TypeError, ValueError):
        return tree
    mapped = [function(x) if views.is_node(x) else x for x in flat]
    if all(new is old for new, old in zip(mapped, flat, strict=True)):
        return tree
    return jax.tree.unflatten(structure, mapped)


def _same_leaves(a: Any, b: Any) -> bool:
    if a is b:
        return True
    trees: Any = [jax.tree.flatten(tree, is_leaf=views.is_node) for tree in (a, b)]
    (leaves_a, structure_a), (leaves_b, structure_b) = trees
    if structure_a != structure_b:
        return False
    return all(x is y for x, y in zip(leaves_a, leaves_b, strict=True))
