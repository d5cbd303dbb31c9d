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
from collections.abc import Hashable
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from mixprec.policy import Policy
from mixprec.rounding import api, dispatch, random

Path = tuple[str, ...]
# Policy and path of a wrapped module -> path below it of a module that was called ->
# shapes and dtypes of its outputs (None if the policy has no rules over activations).
Record = dict[tuple[Policy, Path], dict[str, Any]]
_FLAG = "mixprec"


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
      token: the same for a call from outside and those inside it.
      record: see `Record`; shared likewise.
      running: modules whose `__call__` has begun and not ended; shared likewise.
    """

    policy: Policy
    root: Path
    seed: jax.Array | np.ndarray
    token: Hashable
    record: Record = dataclasses.field(default_factory=dict)
    running: list[nn.Module] = dataclasses.field(default_factory=list)


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


def round_outputs(scope: flax.core.Scope, call: Call, outputs: Any) -> Any:
    """Notes the outputs of a module's `__call__`; rounds them if a rule asks for it."""
    mark: Mark = scope.flags[_FLAG]
    policy, path = mark.policy, mark.below_root
    called = call.record.setdefault((policy, mark.root), {})
    called[path] = jax.tree.map(_struct, outputs) if policy.activations else None
    rule = policy.activation_rule(path)
    if rule is None or rule.mode is None or is_initializing(scope):
        return outputs
    mode = rule.mode

    def round_leaf(keys: Any, y: Any) -> Any:
        if not _is_array(y) or y.dtype != jnp.float32:
            return y
        # Not the values: they may differ in the last bit between a forward pass and its
        # recomputation, and the draw must not.
        place = "/".join((*mark.path, ":out", *map(_key_name, keys)))
        return _round(policy, call.seed, place, mode, y, hash_values=False)

    return jax.tree_util.tree_map_with_path(round_leaf, outputs)


def _round_params(scope: flax.core.Scope, names: Path, tree: Any) -> Any:
    """Rounds what the policy selects in the tree of parameters at `names`."""
    mark: Mark = scope.flags[_FLAG]
    call = open_call(mark)
    if call is None or is_initializing(scope):
        return tree
    seed, prefix = call.seed, (*path_of(scope), *names)

    def round_leaf(keys: Any, leaf: Any) -> Any:
        path = (*prefix, *map(_key_name, keys))
        below_root = "/".join(path[len(mark.root) :])
        rule = mark.policy.param_rule(below_root)
        if rule is None or rule.mode is None:
            return leaf
        # The layers of a scan share path and index: the values tell their draws apart.
        round_value = functools.partial(
            _round, mark.policy, seed, "/".join(path), rule.mode, hash_values=True
        )
        return jax.tree.map(
            lambda x: round_value(x) if needs_rounding(x, below_root) else x,
            leaf,  # if it is a partitioning box, the box stays
        )

    return jax.tree_util.tree_map_with_path(round_leaf, tree, is_leaf=_is_box)


def _round(
    policy: Policy, seed: Any, place: str, mode: str, x: jax.Array, *, hash_values: bool
) -> jax.Array:
    stochastic = mode == "stochastic"
    (rounded,) = dispatch.round_seeded(
        x,
        api.make_rounding(
            jnp.bfloat16,
            (mode,),
            out_dtype=policy.out_dtype,
            hash_values=hash_values and stochastic,
        ),
        seed=random.fold_in_path(seed, place) if stochastic else None,
        backend=policy.backend,
    )
    return rounded


def needs_rounding(leaf: Any, path: str) -> bool:
    """Tells whether a parameter is to be rounded; raises TypeError if it cannot be."""
    dtype = getattr(leaf, "dtype", None)
    if dtype == jnp.float32:
        return True
    if dtype in (jnp.float16, jnp.float64):
        raise TypeError(
            f"`{path}` must be float32 to be rounded to bfloat16, got {dtype}. Keep "
            "float32 master weights, or leave it alone by a rule with mode None."
        )
    return False  # bfloat16 values already, or no numbers to round


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, meta.AxisMetadata)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _struct(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_array(leaf) else leaf


def _key_name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
