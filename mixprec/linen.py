"""Rounding inside `flax.linen` modules, which need not know of it.

What: a wrapped module is a copy whose class is a subclass of the original's. Its methods
do what the original's do, inside a context in which parameters are read rounded and the
outputs of modules are rounded.

How:

1. Each method of the subclass opens a call (`_Call`: policy, place, seed) for its thread
   and installs one Flax method interceptor, which then sees every method call of every
   module below.
2. The interceptor turns the module's `Scope` into a `_RoundingScope` before the method
   runs. All ways to a parameter lead through its scope: `self.param`, `get_variable`
   and `variables`. The scope hands out the rounded value; the variables stay as they are.
3. After `__call__` the interceptor rounds the outputs, if a rule asks for it.

Why not round the whole tree before `apply`: that holds a second copy of all parameters,
and under scan and remat all layers' copies at once. Why not `nn.map_variables`: it needs
the module's cooperation and misses tied weights read as `.variables["params"]`. Read
lazily, a layer's weights are rounded inside the scan, one layer at a time, and once more
in the recomputation of a remat, with the same result.

Limits: during `init` nothing is rounded. Modules that are not below the wrapped module
(passed in from outside) are left alone. A module called twice in one pass draws the same
random bits for its activations both times, as do the layers of a scan.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from mixprec import policy as policy_lib
from mixprec.policy import Policy
from mixprec.rounding import api, random

# The name of the random stream: `module.apply(..., rngs={"rounding": key})`.
RNG_STREAM = "rounding"
_FLAG = "mixprec"
_Path = tuple[str, ...]


@dataclasses.dataclass
class _Call:
    """A call of a wrapped module from outside.

    Attributes:
      policy: of the wrapped module.
      root: the wrapped module's path.
      seed: [2] uint32, of stochastic draws.
      token: tells calls with different keys apart in Flax's caches.
      modules: path below the root -> shapes and dtypes of its outputs, as called.
    """

    policy: Policy
    root: _Path
    seed: jax.Array
    token: int
    modules: dict[str, Any] = dataclasses.field(default_factory=dict)

    def below_root(self, path: _Path) -> str | None:
        """Gives the rest of `path` below the root, or None if it is not below."""
        if path[: len(self.root)] != self.root:
            return None
        return "/".join(path[len(self.root) :])


class _Calls(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Call] = []
        self.recorded: dict[str, Any] | None = None


_calls = _Calls()
_tokens = itertools.count(1)


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
    object.__setattr__(wrapped, "__class__", wrap_class(_original(module), policy))
    return wrapped


def unwrap(module: nn.Module) -> nn.Module:
    """Gives a copy of a wrapped module that rounds nothing."""
    plain = module.clone()
    object.__setattr__(plain, "__class__", _original(module))
    return plain


def is_wrapped(module: nn.Module) -> bool:
    """Tells whether `wrap` or `wrap_class` made this module's class."""
    return hasattr(type(module), "mixprec_policy")


@functools.cache
def wrap_class(cls: type[nn.Module], policy: Policy) -> type[nn.Module]:
    """Gives the subclass of `cls` whose instances round as `policy` says.

    The same arguments give the same class, so that two wraps of equal modules are equal
    and share the caches of `jax.jit`.

    Args:
      cls: a subclass of `nn.Module`.
      policy: see `Policy`.

    Returns:
      A subclass with the same name and fields.
    """
    overrides: dict[str, Any] = {
        name: _rounding_method(getattr(cls, name), policy)
        for name in dir(cls)
        # Flax's mark on what it counts as a module's methods, `setup` included.
        if hasattr(getattr(cls, name, None), "method_handler_wrapped")
    }
    overrides |= {
        "mixprec_policy": policy,
        "mixprec_original": cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce__": lambda self: (wrap, (unwrap(self), policy)),
    }
    return type(cls)(cls.__name__, (cls,), overrides)


def record_modules(function: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Runs `function` and notes which modules of wrapped modules are called in it.

    Returns:
      The function's result; and module path below the wrapped module -> the
      ShapeDtypeStructs of what its `__call__` returned.
    """
    before, _calls.recorded = _calls.recorded, {}
    try:
        return function(), _calls.recorded
    finally:
        _calls.recorded = before


def param_paths(params: Any) -> dict[str, Any]:
    """Gives path -> leaf of a tree of parameters, partitioning boxes removed."""
    flat, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda leaf: isinstance(leaf, meta.AxisMetadata)
    )
    return {_join(keys): _unboxed(leaf) for keys, leaf in flat}


def _original(module: nn.Module) -> type[nn.Module]:
    return getattr(type(module), "mixprec_original", type(module))


def _rounding_method(method: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    def rounding_method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None:
            return method(self, *args, **kwargs)
        with _call(self, policy, method.__name__):
            return method(self, *args, **kwargs)

    rounding_method.__name__ = method.__name__
    rounding_method.__doc__ = method.__doc__
    # Flax is not to wrap it again: `method` is wrapped already. Its other marks, such as
    # `compact`, must not be copied: they belong to `method`.
    rounding_method.method_handler_wrapped = True  # type: ignore[attr-defined]
    return rounding_method


@contextlib.contextmanager
def _call(module: nn.Module, policy: Policy, method: str) -> Iterator[None]:
    """Makes `policy` that of the thread while a method of a wrapped module runs."""
    outer = _calls.stack[-1] if _calls.stack else None
    path = module.scope.path
    if outer is not None and (outer.policy, outer.root) == (policy, path):
        yield  # a method that calls another one of its own module
        return
    _check_params(policy, module.scope)
    seed, token = _seed_of(module, policy, outer)
    call = _Call(policy, path, seed, token)
    _calls.stack.append(call)
    try:
        with contextlib.ExitStack() as stack:
            if outer is None:
                stack.enter_context(nn.intercept_methods(_interceptor))
            yield
    finally:
        _calls.stack.pop()
    if module.scope.get_flag("initializing", False) and path == ():
        _check_params(policy, module.scope, now_complete=True)
    if method == "__call__":
        _check_activations(type(module), call)
    if _calls.recorded is not None:
        _calls.recorded.update(call.modules)


def _seed_of(
    module: nn.Module, policy: Policy, outer: _Call | None
) -> tuple[jax.Array, int]:
    """Gives the seed of a call and its token."""
    initializing = module.scope.get_flag("initializing", False)
    if not initializing and module.scope.has_rng(RNG_STREAM):
        key = module.make_rng(RNG_STREAM)
        # A function that Flax's own cache keeps holds on to the key it was traced with,
        # so calls with keys must not share it.
        return random.seed_from_key(key), next(_tokens)
    if outer is not None:
        return outer.seed, outer.token
    return random.seed_from_key(policy.seed), 0


def _interceptor(
    next_method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
) -> Any:
    call, scope = _calls.stack[-1], context.module.scope
    path = None if scope is None else call.below_root(scope.path)
    if path is None:
        return next_method(*args, **kwargs)
    _adopt(scope, call)
    outputs = next_method(*args, **kwargs)
    if context.method_name != "__call__":
        return outputs
    call.modules[path] = jax.tree.map(_struct, outputs)
    rule = call.policy.activation_rule(path)
    if rule is None or rule.mode is None or scope.get_flag("initializing", False):
        return outputs
    return jax.tree.map(lambda y: _round_activation(call, path, rule, y), outputs)


class _RoundingScope(flax.core.Scope):
    """A Flax scope that hands out parameters rounded while a call is open."""

    def get_variable(self, col: str, name: str, default: Any = None) -> Any:
        value = super().get_variable(col, name, default)
        if col != "params":
            return value
        return _round_params(self, self.path + (name,), value)

    def variables(self) -> Any:
        variables = super().variables()
        if "params" not in variables:
            return variables
        params = _round_params(self, self.path, variables["params"])
        return type(variables)({**variables, "params": params})

    def push(self, *args: Any, **kwargs: Any) -> flax.core.Scope:
        return _convert(super().push(*args, **kwargs))

    def rewound(self, *args: Any, **kwargs: Any) -> flax.core.Scope:
        return _convert(super().rewound(*args, **kwargs))


def _convert(scope: flax.core.Scope) -> flax.core.Scope:
    scope.__class__ = _RoundingScope
    return scope


def _adopt(scope: flax.core.Scope, call: _Call) -> None:
    """Makes the scope round, and known as one that rounds to Flax's own caches.

    Lifted transformations hand the flags on to the scopes that they make, and `nn.jit`
    counts them into the fingerprint under which it caches a traced function.
    """
    if not isinstance(scope, _RoundingScope):
        _convert(scope)
    flag = (call.policy, call.root, call.token)
    if scope.flags.get(_FLAG) != flag:
        scope.flags = flax.core.freeze({**scope.flags, _FLAG: flag})


def _round_params(scope: flax.core.Scope, path: _Path, tree: Any) -> Any:
    """Rounds what the call's policy selects in the tree of parameters at `path`."""
    if not _calls.stack or scope.get_flag("initializing", False):
        return tree
    call = _calls.stack[-1]

    def round_leaf(keys: Any, leaf: Any) -> Any:
        # Partitioning boxes are trees of their own: keep them, and their names.
        names = tuple(key.key for key in keys if hasattr(key, "key"))
        below = call.below_root(path + names)
        rule = None if below is None else call.policy.param_rule(below)
        if below is None or rule is None or rule.mode is None:
            return leaf
        if not _needs_rounding(leaf, below):
            return leaf
        # The layers of a scan share path and index: the values tell their draws apart.
        place = "/".join(path + names)
        return _round(call, place, rule.mode, leaf, hash_values=True)

    return jax.tree_util.tree_map_with_path(round_leaf, tree)


def _round_activation(call: _Call, path: str, rule: policy_lib.Rule, y: Any) -> Any:
    if getattr(y, "dtype", None) != jnp.float32:
        return y
    # Not the values: they may differ in the last bit between a forward pass and its
    # recomputation, and the draw must not.
    place = "/".join((*call.root, path)) + ":out"
    assert rule.mode is not None
    return _round(call, place, rule.mode, y, hash_values=False)


def _round(
    call: _Call, place: str, mode: str, x: jax.Array, *, hash_values: bool
) -> jax.Array:
    stochastic = mode == "stochastic"
    (rounded,) = api.round_seeded(
        x,
        jnp.bfloat16,
        (mode,),
        seed=random.fold_in_path(call.seed, place) if stochastic else None,
        out_dtype=call.policy.out_dtype,
        backend=call.policy.backend,
        hash_values=hash_values and stochastic,
    )
    return rounded


def _needs_rounding(leaf: Any, path: str) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype == jnp.float32:
        return True
    if dtype in (jnp.float16, jnp.float64):
        raise TypeError(
            f"`{path}` must be float32 to be rounded to bfloat16, got {dtype}. Keep "
            "float32 master weights, or leave it alone by a rule with mode None."
        )
    return False  # bfloat16 values already, or no numbers to round


def _check_params(
    policy: Policy, scope: flax.core.Scope, *, now_complete: bool = False
) -> None:
    """Raises ValueError if a rule over parameters decides for none of the module's."""
    if scope.get_flag("initializing", False) and not now_complete:
        return
    params = flax.core.Scope.variables(scope).get("params")
    if params is not None or now_complete:
        paths = tuple(param_paths({} if params is None else params))
        _check_params_cached(policy, paths)


@functools.lru_cache(maxsize=1024)
def _check_params_cached(policy: Policy, paths: tuple[str, ...]) -> None:
    in_use = policy_lib.rules_in_use(policy.params, paths)
    policy_lib.check_all_in_use(policy.params, in_use, paths, "parameter")


# Wrapped class -> rules over activations that have decided for a module. What Flax has
# cached is not called again, so one call need not see all modules.
_activation_rules_seen: dict[type, set[policy_lib.Rule]] = {}


def _check_activations(cls: type, call: _Call) -> None:
    rules = call.policy.activations
    seen = _activation_rules_seen.setdefault(cls, set())
    seen |= policy_lib.rules_in_use(rules, call.modules)
    policy_lib.check_all_in_use(rules, seen, tuple(call.modules), "module")


def _struct(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _unboxed(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, meta.AxisMetadata) else leaf


def _join(keys: Any) -> str:
    return "/".join(str(key.key) for key in keys if hasattr(key, "key"))
