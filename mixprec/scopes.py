"""Flax scopes that hand out parameters rounded, and the marks that make them do so.

A Flax module reads its variables through its `Scope`. The scopes of a wrapped module
and of all below it carry a mark (`Mark`: policy and place) among their flags. Scan,
remat, jit and the like give the flags of the outer scopes to those that they make
inside, so what is below is known there too; modules from outside, called meanwhile, do
not have it. All ways to a parameter lead through the scope: `self.param`,
`get_variable` and `variables`. A `RoundingScope` hands out the rounded value while a
call (`Call`: the seed) is open in the thread; the variables stay as they are.
"""

import dataclasses
import functools
import threading
import warnings
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from mixprec import shards, tensors, trees
from mixprec.policy import Policy
from mixprec.rounding import random
from mixprec.rules import Site

# The name of the random stream that draws come from.
RNG_STREAM = "rounding"
Path = tuple[str, ...]
_FLAG = "mixprec"
_SALTS = (jnp.float32, jnp.bfloat16)
_SALT_WORDS = 8  # of a parameter, enough to tell it from another layer's


@dataclasses.dataclass
class Seen:
    """What has passed in a call of a wrapped module; paths begin below it.

    Attributes:
      modules: path -> class, of those of which a method has run.
      reads: path of a parameter -> its shape and dtype where it was read.
      passed: site at a module -> tree of shapes and dtypes; empty without rules there.
      is_whole: whether the wrapped module's own `__call__` has run.
    """

    modules: dict[str, type[nn.Module]] = dataclasses.field(default_factory=dict)
    reads: dict[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    passed: dict[Site, Any] = dataclasses.field(default_factory=dict)
    is_whole: bool = False


# Policy and path of a wrapped module -> what passed in it.
Record = dict[tuple[Policy, Path], Seen]


class Mark(NamedTuple):
    """What a scope knows of the wrapped module that it is below.

    `nn.jit` counts a scope's flags, but not its path, into the fingerprint under which
    it caches what it has traced. Rules depend on the path: hence it is in the mark.

    Attributes:
      policy: of the wrapped module.
      root: the wrapped module's path.
      path: the scope's own path.
      token: of the call that is or was open, or None; tells calls apart in that cache.
    """

    policy: Policy
    root: Path
    path: Path
    token: Hashable

    @property
    def below_root(self) -> str:
        """The scope's path from the root on."""
        return "/".join(self.path[len(self.root) :])


@dataclasses.dataclass
class Call:
    """A call of a wrapped module from outside, or inside it of one wrapped on its own.

    Attributes:
      policy: of the wrapped module.
      root: the wrapped module's path.
      seed: [2] uint32, of stochastic draws.
      has_key: whether `seed` comes from a key of the caller's.
      token: the same for a call from outside and those inside it.
      record: see `Record`; shared likewise.
      running: modules and names of their methods that have begun and not ended; shared
        likewise.
    """

    policy: Policy
    root: Path
    seed: jax.Array | np.ndarray
    has_key: bool
    token: Hashable
    record: Record = dataclasses.field(default_factory=dict)
    running: list[tuple[nn.Module, str]] = dataclasses.field(default_factory=list)

    def seen(self, mark: Mark) -> Seen:
        """Gives the record of the wrapped module that a mark belongs to."""
        return self.record.setdefault((mark.policy, mark.root), Seen())


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[Call] = []
        self.record: Record | None = None


calls = _Calls()


class RoundingScope(flax.core.Scope):
    """A scope that hands out parameters rounded while a call is open."""

    def get_variable(self, col: str, name: str, default: Any = None) -> Any:
        """Reads a variable."""
        value = super().get_variable(col, name, default)
        if col != "params" or not self.has_variable(col, name):
            return value
        return _round_params(self, (name,), value)

    def variables(self) -> Any:
        """Reads all variables."""
        variables: Any = super().variables()
        if "params" not in variables:
            return variables
        params = _round_params(self, (), variables["params"])
        return type(variables)({**variables, "params": params})

    def param(self, *args: Any, **kwargs: Any) -> Any:
        """Reads a parameter, or makes it during `init`."""
        self._check_in_call()
        return super().param(*args, **kwargs)

    def push(self, *args: Any, **kwargs: Any) -> flax.core.Scope:
        """Makes the scope of a module below."""
        scope = super().push(*args, **kwargs)
        return set_mark(scope, self.flags[_FLAG]._replace(path=path_of(scope)))

    def rewound(self, *args: Any, **kwargs: Any) -> flax.core.Scope:
        """Makes the scope for a module's next method call."""
        return set_mark(super().rewound(*args, **kwargs), self.flags[_FLAG])

    def _validate_trace_level(self) -> None:
        # Flax calls it before it makes other scopes from this one.
        self._check_in_call()
        super()._validate_trace_level()

    def _check_in_call(self) -> None:
        mark: Mark = self.flags[_FLAG]
        if mark.path == mark.root or is_initializing(self):
            return
        if open_call(mark) is None:
            raise ValueError(
                f"`{mark.below_root}` must be called by a method of the wrapped "
                "module, or else it would not be rounded, got a call from outside. Add "
                "a method that calls it, or wrap it alone."
            )


def open_call(mark: Mark | None) -> Call | None:
    """Gives the innermost open call that a mark belongs to, or None."""
    if mark is None:
        return None
    return next(
        (call for call in reversed(calls.open) if call.token == mark.token), None
    )


def mark_of(scope: flax.core.Scope | None) -> Mark | None:
    """Gives the mark of a scope that is below a wrapped module, else None."""
    return None if scope is None else scope.flags.get(_FLAG)


def set_mark(scope: flax.core.Scope, mark: Mark) -> flax.core.Scope:
    """Marks a scope and makes it one that rounds; gives the same scope."""
    if type(scope) is flax.core.Scope:
        scope.__class__ = RoundingScope
    if mark_of(scope) != mark:
        scope.flags = flax.core.freeze({**scope.flags, _FLAG: mark})
    return scope


def path_of(scope: flax.core.Scope) -> Path:
    """Gives the path of a scope's variables, also after `nn.share_scope` moved it."""
    if scope.parent is not None:
        return (*path_of(scope.parent), str(scope.name))
    mark = mark_of(scope)
    return scope.path if mark is None else mark.path


@functools.lru_cache
def integer_seed(seed: int) -> np.ndarray:
    """Gives the [2] uint32 words of a policy's own seed."""
    # A constant, no value of the trace that is under way: what Flax caches keeps it.
    with jax.ensure_compile_time_eval():
        return np.asarray(random.seed_from_key(seed))


def is_initializing(scope: flax.core.Scope) -> bool:
    """Tells whether the scope belongs to an `init`, in which nothing is rounded."""
    return scope.get_flag("initializing", False)


def param_paths(params: Any) -> dict[str, Any]:
    """Gives path -> leaf of a tree of parameters, partitioning boxes removed."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_box)
    return {
        "/".join(map(_key_name, keys)): leaf.value if _is_box(leaf) else leaf
        for keys, leaf in flat
    }


def round_passing(
    scope: flax.core.Scope, call: Call, at: str, method: str, tree: Any
) -> Any:
    """Notes what a module's method is given or returns; rounds what rules ask for.

    Args:
      scope: of the module.
      call: that is open.
      at: "in" or "out".
      method: its name.
      tree: of anything; the arrays of floats in it are rounded.

    Returns:
      The same tree, rounded.
    """
    mark: Mark = scope.flags[_FLAG]
    policy, site = mark.policy, Site(mark.below_root, at, method)
    forward = policy.activation_rule(site)
    backward = policy.gradient_rule(site)
    if policy.activations or policy.gradients:
        shapes = (forward or backward) and jax.tree.map(struct, tree)
        call.seen(mark).passed[site] = shapes or ()
    if is_initializing(scope) or not any(r and r.mode for r in (forward, backward)):
        return tree
    is_stochastic = any(r and r.mode == "stochastic" for r in (forward, backward))
    how: dict[str, Any] = {"has_key": call.has_key}
    how["seed"] = _salted(scope, call.seed) if is_stochastic else call.seed

    def round_leaf(keys: Any, y: Any) -> Any:
        if not is_array(y):
            warn_if_hidden(site, y)
            return y
        here = Site("/".join(mark.path), at, method)
        place = "/".join((str(here), *map(_key_name, keys)))
        # Not the values: they may differ in the last bit between a forward pass and its
        # recomputation, and the draw must not.
        return tensors.round_both_ways(
            y, forward, backward, policy, place=place, hash_values=False, **how
        )

    return trees.map_leaves(round_leaf, tree)


def _salted(scope: flax.core.Scope, seed: Any) -> Any:
    """Gives a seed that differs between layers of a scan and members of a vmap.

    They have place and index in common; what differs are their parameters.
    """
    at: flax.core.Scope | None = scope
    while at is not None:
        params = flax.core.Scope.variables(at).get("params")
        salted_seed = salted(seed, param_paths(params or {}).values())
        if salted_seed is not seed:
            return salted_seed
        at = at.parent
    return seed


def salted(seed: Any, params: Iterable[Any]) -> Any:
    """Folds the first words of the largest of some arrays of floats into a seed."""
    floats = [x for x in params if is_array(x) and x.size and x.dtype in _SALTS]
    if not floats:
        return seed
    largest = max(floats, key=lambda x: x.size)
    return random.fold_words(jnp.concatenate([seed, _first_words(largest)]))


def _first_words(x: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    first = (0,) * (x.ndim - 1) + (slice(0, _SALT_WORDS),) * (x.ndim > 0)
    # On a mesh with explicit axes a few elements cannot be split as the whole is.
    mesh, nothing = jax.typeof(x).sharding.mesh, jax.sharding.PartitionSpec()
    is_explicit = bool(mesh.explicit_axes)
    whole = jax.sharding.NamedSharding(mesh, nothing) if is_explicit else None
    words = x.at[first].get(out_sharding=whole).view(f"uint{8 * x.dtype.itemsize}")
    return jnp.ravel(words).astype(jnp.uint32)


def _round_params(scope: flax.core.Scope, names: Path, tree: Any) -> Any:
    """Rounds what the policy selects in the tree of parameters at `names`."""
    mark: Mark = scope.flags[_FLAG]
    call = open_call(mark)
    if call is None or is_initializing(scope):
        return tree
    policy, prefix = mark.policy, (*path_of(scope), *names)
    how: dict[str, Any] = {"seed": call.seed, "has_key": call.has_key}

    def round_leaf(keys: Any, leaf: Any) -> Any:
        path = (*prefix, *map(_key_name, keys))
        below_root, place = "/".join(path[len(mark.root) :]), "/".join(path)
        forward = policy.param_rule(below_root)
        backward = policy.gradient_rule(Site(below_root))
        if forward is None and backward is None:
            return leaf
        sharding = shards.sharding_of(leaf)

        def round_array(x: Any) -> Any:
            x = as_in_jit(x)
            if not is_array(x):
                return x
            call.seen(mark).reads[below_root] = struct(x)
            tensors.check_param(forward, x, below_root)
            # The layers of a scan have path and index in common: the values tell their
            # draws apart.
            return tensors.round_both_ways(
                x,
                forward,
                backward,
                policy,
                place=place,
                hash_values=True,
                sharding=sharding,
                **how,
            )

        # If the leaf is a partitioning box, the box stays.
        rounded = jax.tree.map(round_array, leaf)
        gathered = shards.without_axes(sharding, policy.gather)
        is_left = (
            tensors.why_left_alone(forward, leaf.value.dtype, leaf.value.size)
            if gathered
            else None
        )
        if gathered and not is_left:
            return shards.rebox(rounded, gathered)
        return rounded

    return trees.map_leaves(round_leaf, tree, is_leaf=_is_box)


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, meta.AxisMetadata)


def is_array(leaf: Any) -> bool:
    """Tells whether a leaf of a tree is an array, and no Python number."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def warn_if_hidden(site: Site, leaf: Any) -> None:
    """Warns once if what passes at a site, and is no array, holds some."""
    if any(map(is_array, getattr(leaf, "__dict__", {}).values())):
        _warn_of_hidden(str(site), type(leaf).__qualname__)


@functools.cache
def _warn_of_hidden(site: str, name: str) -> None:
    warnings.warn(
        f"`{site}` passes an object of class {name}, and the arrays in it are not "
        "rounded. Make it a tree that JAX knows, such as a flax.struct.dataclass, or "
        "name another site in the rule.",
        stacklevel=2,
    )


def as_in_jit(leaf: Any) -> Any:
    """Gives a Python float as the array that `jit` makes of it, and all else as is."""
    return jnp.asarray(leaf) if type(leaf) is float else leaf


def struct(leaf: Any) -> Any:
    """Gives shape and dtype of an array, and all else as it is."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf


def _key_name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
