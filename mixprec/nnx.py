"""Rounding inside `flax.nnx` modules, which need not know of it.

What: a wrapped module is a copy whose class is a subclass of the original's. Its
methods do what the original's do, but read parameters rounded, and the inputs and
outputs of the modules that they call are rounded.

How:

1. A method of a wrapped module makes a stand-in, runs the original's method on that,
   and writes what it has changed to the wrapped module; see `mixprec.standins`.
2. The stand-in is the module without its wrap, copied as far as attributes go. Arrays
   and Variables are shared, but for the parameters that rules select.

Why not change the Params for good: outside of its methods a wrapped module is a plain
one. `nnx.state`, optimizers and checkpoints see raw Params of their own types, `update`
cannot lose the rounding, threads do not meet, and what the module's parts do when
called on their own is not cached for when it calls them. Why not round all Params
before the method runs: that holds a second copy of them, and under scan and remat all
layers' copies at once.

Stochastic draws: `wrap(..., rngs=nnx.Rngs(rounding=0))` gives the wrapped module a
stream of keys, `rounding_rngs`, of which each call takes one, as `nnx.Dropout` does. It
is part of the module's state, so that draws are fresh each step under `nnx.jit` and
`nnx.grad`, and go on in a run that is resumed. Without it every call draws from the
policy's seed.

Limits: what rounds is a method called on the instance, `model(x)`; not
`Model.__call__(model, x)`, a property, nor a part called from outside,
`model.layers[0](x)`. Inside a method, `Block.__call__(block, x)` reads parameters
rounded, but rounds no activations. Only Params and what is derived from them, such as
LoRAParams, are rounded.
A Param found at several paths has the first, as in `nnx.state`. What a method writes to
parameters, it has computed from rounded ones (`nnx.WeightNorm`). Inside a method the
Params of `nnx.state` read rounded, while the leaves of its tree are raw; gradients that
a method itself takes by parameters come as Params that read rounded: take them outside.
A bound method that a module keeps as an attribute stays that of the original.

What else to know: a module called twice in one pass draws the same random bits for its
activations both times, and modules without parameters draw the same in all layers of a
scan. With a stream, what a method traces itself, by `nnx.scan` or `nnx.jit`, is traced
anew for each call: put the step as a whole under `nnx.jit`.
"""

import contextlib
import copyreg
import functools
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from mixprec import coverage, scopes, standins, views
from mixprec.policy import Policy
from mixprec.rounding import random
from mixprec.rules import Site

RNGS = "rounding_rngs"  # the attribute of a wrapped module


def wrap(module: nnx.Module, policy: Policy, rngs: Any = None) -> nnx.Module:
    """Gives a copy of `module` that rounds as `policy` says.

    Args:
      module: a module; a wrapped one gets the new policy and stream for the old.
      policy: see `Policy`.
      rngs: an `nnx.Rngs` or `nnx.RngStream` for keys of stochastic draws, or None.

    Returns:
      A module of a subclass of `type(module)`, with Variables of its own, whose arrays
      are those of `module`.

    Raises:
      TypeError: `rngs` is something else.
      ValueError: `rngs` has neither a stream for rounding nor a default one, or the
        policy asks to gather.
    """
    if policy.gather:
        raise ValueError(
            "`gather` must be left out of the policy of an NNX module, whose Variables "
            f"are gathered as XLA chooses, got {'+'.join(policy.gather)!r}. Drop it."
        )
    if isinstance(rngs, nnx.Rngs) and not hasattr(rngs, scopes.RNG_STREAM):
        raise ValueError(
            f'`rngs` must have a stream "{scopes.RNG_STREAM}" or "default", got '
            f"{sorted(rngs)}. Write nnx.Rngs(rounding=0)."
        )
    stream = rngs[scopes.RNG_STREAM] if isinstance(rngs, nnx.Rngs) else rngs
    if not (stream is None or isinstance(stream, nnx.RngStream)):
        raise TypeError(
            f"`rngs` must be an nnx.Rngs or nnx.RngStream, got {type(rngs).__name__}. "
            "Write nnx.Rngs(rounding=0)."
        )
    wrapped = unwrap(module)
    if stream is not None:
        setattr(wrapped, RNGS, stream.fork())
    object.__setattr__(wrapped, "__class__", _wrap_class(type(wrapped), policy))
    return wrapped


def unwrap(module: nnx.Module) -> nnx.Module:
    """Gives a copy of a wrapped module that rounds nothing."""
    plain = nnx.clone(module, graph=True)
    if is_wrapped(plain):
        cls = getattr(type(plain), views.ORIGINAL)
        object.__setattr__(plain, "__class__", cls)
        if hasattr(plain, RNGS):
            delattr(plain, RNGS)
    return plain


def is_module(x: Any) -> bool:
    """Tells whether `x` is a module of NNX."""
    return isinstance(x, nnx.Module)


def is_wrapped(module: nnx.Module) -> bool:
    """Tells whether `wrap` gave this module."""
    return views.is_wrapped(module)


def policy_of(module: nnx.Module) -> Policy:
    """Gives the policy of a wrapped module."""
    return getattr(type(module), views.POLICY)


def params(module: nnx.Module) -> dict[str, Any]:
    """Gives path -> array of all parameters."""
    found: dict[str, Any] = {}
    for path, node in views.nodes(module):
        if isinstance(node, nnx.Param):
            found |= views.leaves(path, node.get_raw_value())
    return found


def record(
    wrapped: nnx.Module,
    inputs: tuple[Any, ...],
    abstract: dict[str, Any],
    kwargs: dict[str, Any],
) -> scopes.Record:
    """Notes what passes in a call of a wrapped module. Computes and changes nothing.

    Meanwhile rules that decide for nothing raise no error.

    Args:
      wrapped: the module.
      inputs: arrays or `jax.ShapeDtypeStruct`s.
      abstract: those of `kwargs` that are likewise.
      kwargs: all of them.
    """
    found: scopes.Record = {}
    call = views.Call(scopes.integer_seed(policy_of(wrapped).seed), record=found)
    for path, node in views.nodes(wrapped):
        if is_wrapped(node):
            seen = views.Mark(call, policy_of(node), root=path).seen
            assert seen is not None
            seen.passed |= dict.fromkeys(_sites(node), ())
    copy = nnx.clone(wrapped, graph=True)
    vars(copy)[views.MARK] = views.Mark(call, policy_of(wrapped))

    def run(module: Any, abstract: dict[str, Any], *inputs: Any) -> None:
        module(*inputs, **{**kwargs, **abstract})

    nnx.eval_shape(run, copy, abstract, *inputs)
    return found


@functools.cache
def _metaclass(base: type) -> type:
    """Gives a metaclass whose classes `pickle` makes anew, as `nnx.GraphDef`s want."""
    metaclass = type(base.__name__, (base,), {})
    copyreg.pickle(metaclass, _reduce_class)
    return metaclass


def _reduce_class(cls: Any) -> Any:
    if views.ORIGINAL not in vars(cls):
        return cls.__qualname__  # of a class that somebody derived
    return _wrap_class, (vars(cls)[views.ORIGINAL], vars(cls)[views.POLICY])


@functools.cache
def _wrap_class(cls: type[nnx.Module], policy: Policy) -> type[nnx.Module]:
    methods = views.methods(cls)
    overrides = {name: _rounding_method(name, f) for name, f in methods.items()}

    def reduce(self: nnx.Module) -> Any:
        return _empty, (cls, policy), self.__getstate__()

    attributes = {views.ORIGINAL: cls, views.POLICY: policy, "__reduce__": reduce}
    metaclass: Any = type(cls)
    return views.subclass(cls, overrides | attributes, _metaclass(metaclass))


def _empty(cls: type[nnx.Module], policy: Policy) -> nnx.Module:
    return object.__new__(_wrap_class(cls, policy))


def _rounding_method(name: str, function: Any) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def rounding_method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        with _stand_in(self) as stand_in:
            args, kwargs = stand_in.to_copies((args, kwargs))
            outputs = getattr(stand_in.module, name)(*args, **kwargs)
            return stand_in.to_originals(outputs)

    return rounding_method


@contextlib.contextmanager
def _stand_in(module: nnx.Module) -> Iterator[standins.StandIn]:
    policy, outer = policy_of(module), vars(module).get(views.MARK)
    call = _call(module, policy, outer)
    if call.record is None:
        _check(module, policy)
    root = "" if outer is None else outer.root
    stand_in = standins.StandIn(module, views.Mark(call, policy, root))
    try:
        yield stand_in
    finally:
        stand_in.write_back()
        if call.has_key and (outer is None or call is not outer.call):
            # What NNX has cached holds on to the call, and must not to its key.
            call.seed = None


def _call(module: nnx.Module, policy: Policy, outer: views.Mark | None) -> views.Call:
    """Gives the call for a method: of a key of its own, the outer one's, or neither."""
    all_rules = (*policy.params, *policy.activations, *policy.gradients)
    draws = any(rule.mode == "stochastic" for rule in all_rules)
    is_recorded = outer is not None and outer.call.record is not None
    stream = vars(module).get(RNGS)
    if stream is not None and draws and not is_recorded:
        return views.Call(random.seed_from_key(stream()), has_key=True)
    return _call_without_key(policy.seed) if outer is None else outer.call


@functools.cache
def _call_without_key(seed: int) -> views.Call:
    # Always the same one: what is traced for it is what any other call would trace.
    return views.Call(scopes.integer_seed(seed))


# Rules must decide for something


def _check(module: nnx.Module, policy: Policy) -> None:
    coverage.check_params(policy, tuple(params(module)))
    if any(coverage.rules_over(policy, "module")):
        coverage.check_sites(policy, "module", _sites(module))


def _sites(module: nnx.Module) -> tuple[Site, ...]:
    """Gives all sites at a wrapped module and those below."""
    return tuple(
        site
        for path, node in views.nodes(module)
        if isinstance(node, nnx.Module)
        for site in views.sites(getattr(type(node), views.ORIGINAL, type(node)), path)
    )
