"""Rounding inside `flax.linen` modules, which need not know of it.

What: a wrapped module is a copy whose class is a subclass of the original's. Its
methods do what the original's do, inside a context in which parameters are read rounded
and the outputs of modules are rounded.

How:

1. When Flax binds a wrapped module, its scope and those of its parts are marked; see
   `mixprec.scopes`.
2. Each method of the subclass opens a call (policy, place, seed) for its thread and
   installs one Flax method interceptor, which then sees every method call of every
   module below. It makes each marked scope a `RoundingScope` before the method runs.
3. Around each method the interceptor rounds what it is given and what it returns, if a
   rule asks for it.

Why not round the whole tree before `apply`: that holds a second copy of all parameters,
and under scan and remat all layers' copies at once. Why not `nn.map_variables`: it
needs the module's cooperation and misses tied weights read as `.variables["params"]`.
Read lazily, a layer's weights are rounded inside the scan, one layer at a time, and
once more in the recomputation of a remat, with the same result.

Limits: during `init` nothing is rounded. Modules that are not below the wrapped module
(passed in from outside) are left alone. A module called twice in one pass draws the
same random bits for its activations both times.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import flax
import flax.linen as nn
import jax
import numpy as np

from mixprec import classes, coverage, scopes, trees
from mixprec.policy import Policy
from mixprec.rounding import random
from mixprec.rules import CALL

_tokens = itertools.count(1)
# Wrapped class -> original class, policy.
_wrapped: dict[type[nn.Module], tuple[type[nn.Module], Policy]] = {}


def wrap(module: nn.Module, policy: Policy) -> nn.Module:
    """Gives a copy of `module` that rounds as `policy` says.

    Args:
      module: an unbound module, not a part of another one yet.
      policy: see `Policy`.

    Returns:
      A module of a subclass of `type(module)`, with the same fields.

    Raises:
      ValueError: `module` is bound, or already belongs to a parent.
    """
    if module.scope is not None or isinstance(module.parent, nn.Module):
        raise ValueError(
            "`module` must be unbound and without a parent, got "
            f"{type(module).__name__} made inside another module. Wrap it outside, or "
            "write mixprec.wrap_class(type, policy)(...) in its place."
        )
    wrapped = module.clone()
    object.__setattr__(wrapped, "__class__", wrap_class(type(module), policy))
    return wrapped


def is_module(x: Any) -> bool:
    """Tells whether `x` is a Linen module."""
    return isinstance(x, nn.Module)


def unwrap(module: nn.Module) -> nn.Module:
    """Gives a copy of a wrapped module that rounds nothing."""
    plain = module.clone()
    object.__setattr__(plain, "__class__", _original(type(module)))
    return plain


def is_wrapped(module: nn.Module) -> bool:
    """Tells whether `wrap` or `wrap_class` made this module's class."""
    return type(module) in _wrapped


def policy_of(module: nn.Module) -> Policy:
    """Gives the policy of a wrapped module."""
    return _wrapped[type(module)][1]


def wrap_class(cls: type[nn.Module], policy: Policy) -> type[nn.Module]:
    """Gives the subclass of `cls` whose instances round as `policy` says.

    The same arguments give the same class, so that two wraps of equal modules are equal
    and share the caches of `jax.jit`.

    Args:
      cls: a subclass of `nn.Module`; a wrapped one gets the new policy for the old.
      policy: see `Policy`.

    Returns:
      A subclass with the same name and fields.

    Raises:
      TypeError: `cls` is no subclass of `nn.Module`, or `policy` is no `Policy`.
    """
    if not isinstance(policy, Policy):
        raise TypeError(
            f"`policy` must be a mixprec.Policy, got {policy!r}. Read text by "
            "Policy.from_text."
        )
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(
            f"`cls` must be a subclass of flax.linen.Module, got {cls!r}. "
            "Wrap a module that is made already by mixprec.wrap(module, policy)."
        )
    # mypy: Flax declares `__hash__` of modules, not of their classes.
    return _wrap_original(_original(cls), policy)  # type: ignore[arg-type]


def record_modules(function: Callable[[], Any]) -> tuple[Any, scopes.Record]:
    """Runs `function` and notes what passes in wrapped modules called in it.

    Meanwhile rules that decide for nothing raise no error.
    """
    before, scopes.calls.record = scopes.calls.record, {}
    try:
        return function(), scopes.calls.record
    finally:
        scopes.calls.record = before


def _original(cls: type[nn.Module]) -> type[nn.Module]:
    return _wrapped[cls][0] if cls in _wrapped else cls


@functools.cache
def _wrap_original(cls: type[nn.Module], policy: Policy) -> type[nn.Module]:
    overrides: dict[str, Any] = {
        name: _rounding_method(function, policy)
        for name in dir(cls)
        if inspect.isfunction(function := inspect.getattr_static(cls, name, None))
        # Flax's marks on what it counts as a module's methods, `setup` included, and on
        # what it would count if the author had not asked it to leave it alone.
        and (hasattr(function, "method_handler_wrapped") or hasattr(function, "nowrap"))
    }
    # Or else Flax would make new ones in place of the author's.
    overrides |= {
        name: getattr(cls, name) for name in ("__init__", "__eq__", "__hash__")
    }
    overrides |= {
        "__post_init__": _marking_post_init(cls, policy),
        "__reduce__": nn.nowrap(lambda self: (wrap, (unwrap(self), policy))),
        "apply": _rounding_apply(cls, policy),
    }
    wrapped = classes.subclass(cls, overrides, flax_base=nn.Module)
    _wrapped[wrapped] = (cls, policy)
    return wrapped


def _rounding_method(method: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    # On what Flax has wrapped, marks such as `compact` are not to be copied: they are
    # those of `method`, which is called. On what it has left alone they are needed.
    copied = () if hasattr(method, "method_handler_wrapped") else ("__dict__",)

    @functools.wraps(method, updated=copied)
    def rounding_method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None:
            return method(self, *args, **kwargs)
        with _call(self, policy):
            return method(self, *args, **kwargs)

    # Flax is not to wrap it again.
    rounding_method.method_handler_wrapped = True  # type: ignore[attr-defined]
    return rounding_method


def _rounding_apply(cls: type[nn.Module], policy: Policy) -> Callable[..., Any]:
    """Makes `apply`, whose `method` may call the module's parts by itself."""

    @nn.nowrap
    @functools.wraps(cls.apply)
    def apply(self: nn.Module, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        function = getattr(method, "__func__", method)

        def in_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with _call(module, policy):
                if not isinstance(function, str):
                    return function(module, *args, **kwargs)
                bound = getattr(module, function)
                if not callable(bound):
                    raise TypeError(
                        f"`method` must name what can be called, got {function!r}, "
                        f"which is {bound!r}. Name a method of {cls.__name__}."
                    )
                return bound(*args, **kwargs)

        if isinstance(function, str) or callable(function):
            method = in_call
        return cls.apply(self, *args, method=method, **kwargs)

    return apply


def _marking_post_init(cls: type[nn.Module], policy: Policy) -> Callable[..., None]:
    """Makes `__post_init__`, in which Flax binds a module to its scope."""

    @functools.wraps(cls.__post_init__)
    def post_init(self: nn.Module, *args: Any) -> None:
        cls.__post_init__(self, *args)
        if self.scope is not None:
            outer = scopes.mark_of(self.scope)
            token = None if outer is None else outer.token
            _mark_tree(self, policy, scopes.path_of(self.scope), token)

    return post_init


def _scope(module: nn.Module) -> flax.core.Scope:
    assert module.scope is not None
    return module.scope


def _mark_tree(
    module: nn.Module, policy: Policy, root: scopes.Path, token: Hashable
) -> None:
    """Marks the scopes of a module and of those of its parts that are bound already."""
    path = scopes.path_of(_scope(module))
    if is_wrapped(module):  # a part with a policy of its own
        policy, root = policy_of(module), path
    scopes.set_mark(_scope(module), scopes.Mark(policy, root, path, token))
    for part in module._state.children.values():
        if isinstance(part, nn.Module) and part.scope is not None:
            _mark_tree(part, policy, root, token)


def _mark_lifted(tree: Any) -> None:
    """Gives the scopes of modules in `tree` marks with their own paths.

    A lifted transformation has given them copies of the mark of a module further up.
    """
    if isinstance(tree, (list, tuple)):
        for value in tree:
            _mark_lifted(value)
    elif isinstance(tree, Mapping):
        _mark_lifted([*tree.values()])
    elif isinstance(tree, nn.Module):
        mark = scopes.mark_of(tree.scope)
        if mark is not None:
            path = scopes.path_of(_scope(tree))
            scopes.set_mark(_scope(tree), mark._replace(path=path))
            fields = (field for field in dataclasses.fields(tree) if field.init)
            parts = [getattr(tree, f.name) for f in fields if f.name != "parent"]
            _mark_lifted(parts)


@contextlib.contextmanager
def _call(module: nn.Module, policy: Policy) -> Iterator[None]:
    """Opens a call while a method of a wrapped module runs."""
    root = scopes.path_of(_scope(module))
    outer = scopes.open_call(scopes.mark_of(module.scope))
    if outer is not None and (outer.policy, outer.root) == (policy, root):
        yield  # a method that calls another one of its own module
        return
    initializing = scopes.is_initializing(_scope(module))
    if not initializing and scopes.calls.record is None:
        _check_params(module, policy)
    if outer is None:
        call = scopes.Call(policy, root, *_seed_of(module, policy))
    else:
        call = dataclasses.replace(outer, policy=policy, root=root)
    seen = call.record.setdefault((policy, root), scopes.Seen())
    kind = _kind(module) if policy.activations or policy.gradients else ()
    _mark_tree(module, policy, root, call.token)
    scopes.calls.open.append(call)
    try:
        with contextlib.ExitStack() as stack:
            if len(scopes.calls.open) == 1:
                stack.enter_context(nn.intercept_methods(_interceptor))
            yield
    finally:
        scopes.calls.open.pop()
    if scopes.calls.record is not None:
        scopes.calls.record.update(call.record)
    elif seen.is_whole:  # all there is has been seen
        # Which modules are called may depend on flags such as `train`: one that has
        # parameters exists, called or not.
        existing = [] if initializing else _module_paths(module)
        coverage.check_modules(kind, policy, seen, existing)
        if initializing:
            _check_params(module, policy)


def _seed_of(
    module: nn.Module, policy: Policy
) -> tuple[jax.Array | np.ndarray, bool, Hashable]:
    """Gives the seed of a call from outside, whether by a key, and the call's token."""
    initializing = scopes.is_initializing(_scope(module))
    if not initializing and _scope(module).has_rng(scopes.RNG_STREAM):
        # What `nn.jit` caches holds on to the key it was traced with, so calls with
        # keys must not share it.
        key = module.make_rng(scopes.RNG_STREAM)
        return random.seed_from_key(key), True, next(_tokens)
    if scopes.calls.record is not None:
        # What is cached is not called, and so not recorded.
        return scopes.integer_seed(policy.seed), False, next(_tokens)
    return scopes.integer_seed(policy.seed), False, ("seed", policy.seed)


def _interceptor(
    next_method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
) -> Any:
    module, scope = context.module, context.module.scope
    mark = scopes.mark_of(scope)
    call = scopes.open_call(mark)
    if scope is None or mark is None or call is None:
        return next_method(*args, **kwargs)
    mark = mark._replace(path=scopes.path_of(scope))
    scopes.set_mark(scope, mark)
    if scope.parent is None:  # a root, or made by a lifted transformation
        _mark_lifted((module, args, kwargs))
    method, seen = context.method_name, call.seen(mark)
    seen.modules[mark.below_root] = type(module)
    seen.is_whole |= (mark.below_root, method) == ("", CALL)
    # What `super().__call__()` takes and returns is not the module's own yet.
    is_inner = any(m is module and name == method for m, name in call.running)
    if method == "setup" or is_inner:
        return next_method(*args, **kwargs)
    call.running.append((module, method))
    try:
        given = (args, kwargs)
        args, kwargs = scopes.round_passing(scope, call, "in", method, given)
        with trees.handing_back(given, (args, kwargs)):
            outputs = next_method(*args, **kwargs)
    finally:
        call.running.pop()
    return scopes.round_passing(scope, call, "out", method, outputs)


# Rules must decide for something


def _check_params(module: nn.Module, policy: Policy) -> None:
    """Raises ValueError if a rule over parameters decides for none of the module's."""
    params = _params(module)
    # Where parameters can be made, as in `init`, there may be none yet.
    can_be_made = _scope(module).is_mutable_collection("params")
    if params is not None or scopes.is_initializing(_scope(module)) or not can_be_made:
        coverage.check_params(policy, tuple(scopes.param_paths(params or {})))


def _params(module: nn.Module) -> Any:
    # Not `scope.variables()`, which would round them.
    return flax.core.Scope.variables(_scope(module)).get("params")


def _module_paths(module: nn.Module) -> list[str]:
    """Gives the paths of modules that have parameters."""
    names = [path.split("/") for path in scopes.param_paths(_params(module) or {})]
    return list({"/".join(n[:d]): None for n in names for d in range(1, len(n))})


def _kind(module: nn.Module) -> Hashable:
    """Gives what equal modules have in common before they are called."""
    fields = (field.name for field in dataclasses.fields(module))
    values = [repr(getattr(module, f)) for f in fields if f not in ("parent", "name")]
    return (type(module), *values)
