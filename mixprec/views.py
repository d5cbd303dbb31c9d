"""Views of Params, and modules, that round: what stand-ins for `flax.nnx` modules have.

A view is a Variable of a subclass of a Param's class, and its value is read rounded. A
module that a rule over activations names gets a subclass of its class, whose methods
round what passes.

Both carry a mark (`Mark`: call, policy and path), views among their metadata, modules
among their static attributes. The transformations of NNX carry it to where they make
modules anew, and look by it for what they have traced before: what one key has been
traced into is not used for another.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from flax import nnx

from mixprec import classes, scopes, tensors
from mixprec.policy import Policy
from mixprec.rules import CALL, Rule, Site

MARK = "_mixprec_mark"  # the name of that attribute, and in metadata
ORIGINAL = "_mixprec_original"  # of the attribute of a wrapped class
POLICY = "_mixprec_policy"  # and of its policy
BASE = "_mixprec_base"  # of the attribute of a class that rounds what passes, too
# Of the methods that Python calls by itself, those that compute.
_OPERATORS = (
    "matmul",
    "add",
    "sub",
    "mul",
    "truediv",
    "pow",
    "mod",
    "and",
    "or",
    "xor",
)
_CALLED = {
    CALL,
    "__getitem__",
    "__neg__",
    *(f"__{reflected}{name}__" for name in _OPERATORS for reflected in ("", "r")),
}


@dataclasses.dataclass(eq=False)
class Call:
    """A method of a wrapped module that runs. Equal to itself only.

    Attributes:
      seed: [2] uint32, of stochastic draws; None once the call has ended.
      has_key: whether `seed` comes from the module's stream of keys.
      record: what passes, if that is asked for.
    """

    seed: Any
    has_key: bool = False
    record: scopes.Record | None = None


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a part of a stand-in knows of the wrapped module that it is below.

    Attributes:
      call: that it is made for.
      policy: of the wrapped module.
      root: the path of the wrapped module in one that is wrapped too, else "".
      path: of the part, from the wrapped module on.
    """

    call: Call
    policy: Policy
    root: str = ""
    path: str = ""

    @property
    def seen(self) -> scopes.Seen | None:
        """The record of the wrapped module, if one is kept."""
        if self.call.record is None:
            return None
        names = tuple(self.root.split("/")) if self.root else ()
        return self.call.record.setdefault((self.policy, names), scopes.Seen())

    def round(
        self,
        x: Any,
        rules: tuple[Rule | None, Rule | None],
        place: str,
        *,
        hash_values: bool,
        salt: Iterable[Any] = (),
    ) -> Any:
        """Rounds an array, and what comes back for it, if a rule asks for it.

        Args:
          x: the array.
          rules: for the array and for its cotangent.
          place: that tells its draws from others' below the wrapped module.
          hash_values: whether its draws depend on its values too.
          salt: arrays that its draws depend on.
        """
        seed = self.call.seed
        if seed is None:
            raise ValueError(
                f"`{place}` must be read while a method of the wrapped module runs, or "
                "else it would not be rounded, got a read after its end. Add a method "
                "that does what follows too."
            )
        if any(rule and rule.mode == "stochastic" for rule in rules):
            seed = scopes.salted(seed, salt)
        return tensors.round_both_ways(
            x,
            *rules,
            self.policy,
            seed=seed,
            place=join(self.root, place),
            has_key=self.call.has_key,
            hash_values=hash_values,
        )


def join(*parts: str) -> str:
    """Joins paths, of which some may be ""."""
    return "/".join(filter(None, parts))


# What there is in a module


def nodes(module: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Gives path and object of each Variable and module, as `nnx.state` finds them."""
    for path, node in nnx.iter_graph(module, graph=True):
        if is_node(node):
            yield "/".join(map(str, path)), node


def is_node(x: Any) -> bool:
    """Tells whether `x` is a Variable, a module or the like."""
    return isinstance(x, (nnx.Variable, nnx.Pytree))


def is_wrapped(x: Any) -> bool:
    """Tells whether `x` is a wrapped module."""
    return hasattr(type(x), ORIGINAL)


def leaves(path: str, value: Any) -> dict[str, Any]:
    """Gives path -> array of the value of a Param, which may be a tree."""
    found = scopes.param_paths(value)
    return {join(path, name): leaf for name, leaf in found.items()}


@functools.cache
def methods(cls: type) -> dict[str, Any]:
    """Gives name -> function of the methods that `nnx.Module` does not have."""
    found = {}
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if name.startswith("__") and name not in _CALLED:
            continue
        if function is inspect.getattr_static(nnx.Module, name, None):
            continue
        # What binds to an instance: functions, also within `nnx.jit` and the like.
        kinds = (type, property, staticmethod, classmethod)
        binds = callable(function) and hasattr(function, "__get__")
        binds = binds or isinstance(function, functools.partialmethod)
        if binds and not isinstance(function, kinds):
            found[name] = function
    return found


def sites(cls: type, path: str) -> list[Site]:
    """Gives the sites at a module of that class and path."""
    names = methods(cls)
    return [Site(path, at, name) for name in names for at in ("in", "out")]


def param_rules(policy: Policy, path: str) -> tuple[Rule | None, Rule | None]:
    """Gives the rules for a parameter and for its cotangent, or Nones."""
    return policy.param_rule(path), policy.gradient_rule(Site(path))


def site_rules(policy: Policy, site: Site) -> tuple[Rule | None, Rule | None]:
    """Gives the rules for what passes at a site and for its cotangent, or Nones."""
    return policy.activation_rule(site), policy.gradient_rule(site)


# Views and modules that round


class View:
    """What a view has before the class of its Param."""

    __slots__ = ()

    def get_value(self: Any, **kwargs: Any) -> Any:
        """Reads the value, or a part of it, rounded."""
        value = _read(self._var_metadata[MARK], super().get_value())  # type: ignore[misc]
        # The index after rounding: draws depend on the place in the whole.
        index = kwargs.get("index", ...)
        return value if index is ... else value[index]

    def __getattr__(self: Any, name: str) -> Any:
        if name in self._var_metadata:
            return self._var_metadata[name]
        # Of the array, such as `T` and `at`.
        return getattr(self.get_value(), name)


@functools.cache
def _view_class(cls: type[nnx.Param]) -> type[nnx.Param]:
    names = ("__module__", "__qualname__", "__doc__")
    attributes = {name: getattr(cls, name) for name in names}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (View, cls), attributes)


def is_selected(param: nnx.Param, mark: Mark) -> bool:
    """Tells whether a rule rounds a Param or what comes back for it."""
    paths = leaves(mark.path, param.get_raw_value())
    both = [param_rules(mark.policy, path) for path in paths]
    return any(rule and rule.mode for pair in both for rule in pair)


def _read(mark: Mark, value: Any) -> Any:
    def round_leaf(keys: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        path = join(mark.path, name)
        forward, backward = param_rules(mark.policy, path)
        x = scopes.as_in_jit(x)
        if not scopes.is_array(x):
            return x
        if mark.seen is not None:
            mark.seen.reads[path] = scopes.struct(x)
        tensors.check_param(forward, x, path)
        # The layers of a scan have path and index in common: the values tell their
        # draws apart.
        return mark.round(x, (forward, backward), path, hash_values=True)

    return jax.tree_util.tree_map_with_path(round_leaf, value)


def view_of(param: nnx.Param, mark: Mark) -> nnx.Param:
    """Gives a view of a Param, which can be changed where the Param itself can."""
    if type(param).__name__ == "HijaxVariable":
        raise TypeError(
            f"`{mark.path}` must be no hijax Variable to be rounded, got one. Make it "
            "with hijax=False, or leave it alone by a rule with mode None."
        )
    metadata = {**param.get_metadata(), MARK: mark}
    view: Any = _view_class(type(param))._new(param.get_raw_value(), metadata)
    object.__setattr__(view, "_trace_state", param._trace_state)
    return view


def without_mark(view: nnx.Variable) -> nnx.Variable:
    """Gives the plain Param that a view has become."""
    metadata = view.get_metadata()
    del metadata[MARK]
    cls: Any = type(view).__bases__[1]
    return cls._new(view.get_raw_value(), metadata)


@functools.cache
def passing_class(cls: type[nnx.Module]) -> type[nnx.Module]:
    """Gives the subclass whose methods round what passes."""
    overrides = {name: _passing_method(name, f) for name, f in methods(cls).items()}
    return subclass(cls, overrides)


def subclass(
    cls: type, attributes: dict[str, Any], metaclass: Any = None
) -> type[nnx.Module]:
    """Gives a subclass of a class of NNX modules; see `classes.subclass`."""
    attributes = attributes | {BASE: cls}
    pytree: Any = cls._pytree__is_pytree  # type: ignore[attr-defined]
    return classes.subclass(
        cls, attributes, flax_base=nnx.Module, metaclass=metaclass, pytree=pytree
    )


def _passing_method(name: str, function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def passing_method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _round_passing(self, "in", name, (args, kwargs))
        outputs = function.__get__(self, type(self))(*args, **kwargs)
        return _round_passing(self, "out", name, outputs)

    return passing_method


def _round_passing(module: nnx.Module, at: str, method: str, tree: Any) -> Any:
    mark: Mark = vars(module)[MARK]
    site = Site(mark.path, at, method)
    both = site_rules(mark.policy, site)
    if mark.seen is not None:
        shapes = any(both) and jax.tree.map(scopes.struct, tree, is_leaf=is_node)
        mark.seen.passed[site] = shapes or ()
    if not any(rule and rule.mode for rule in both):
        return tree
    # Layers of a scan and members of a vmap have place and index in common; what
    # differs are their parameters.
    params = [node for _, node in nodes(module) if isinstance(node, nnx.Param)]
    salt = [x for param in params for x in jax.tree.leaves(param.get_raw_value())]

    def round_leaf(keys: Any, x: Any) -> Any:
        if not scopes.is_array(x):
            scopes.warn_if_hidden(site, x)
            return x
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        # Not the values: they may differ in the last bit between a forward pass and its
        # recomputation, and the draw must not.
        place = join(str(site), name)
        return mark.round(x, both, place, hash_values=False, salt=salt)

    return jax.tree_util.tree_map_with_path(round_leaf, tree, is_leaf=is_node)
