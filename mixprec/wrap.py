"""`wrap` and `unwrap`: the way in for every kind of module."""

from typing import Any, TypeVar, cast

from mixprec import linen, nnx
from mixprec.policy import Policy

M = TypeVar("M")


def wrap(module: M, policy: Policy | str, *, rngs: Any = None) -> M:
    """Gives a copy of a Flax module whose tensors are rounded as `policy` says.

    Use it as you would the original. Parameters stay float32 masters, of which what is
    read is rounded, and gradients with respect to them are straight-through. Stochastic
    rounding draws from the random stream `rounding`, and without one every call rounds
    alike. With Linen, pass `rngs={"rounding": key}` to `apply`, a fresh key each step.
    With NNX, pass a stream here: it is part of the module's state, as `nnx.Dropout`'s
    is, and each call takes a key of it.

    Args:
      module: a `flax.linen` module, unbound, or a `flax.nnx` module. It is not changed:
        of an NNX module Variables are copied, their arrays are not.
      policy: which tensors are rounded, and how; or its text, or the name of one of
        `mixprec.PRESETS`.
      rngs: for NNX, an `nnx.Rngs` with a stream `rounding`, or an `nnx.RngStream`.

    Returns:
      A module of a subclass of `type(module)`, with the same fields.

    Raises:
      TypeError: `module` is no Flax module, `policy` no Policy, or `rngs` no streams.
      ValueError: `module` is bound or belongs to a parent, `policy` is a text that
        cannot be read, or `rngs` is given with a Linen module. Later, when the module
        is called, initialized or explained: a rule matches nothing (the message names
        the nearest paths).

    Example:
      >>> model = mixprec.wrap(nn.Dense(8), "params: kernel=stochastic")
    """
    check_module(module)
    if isinstance(policy, str):
        policy = Policy.from_text(policy)
    if not isinstance(policy, Policy):
        raise TypeError(
            f"`policy` must be a mixprec.Policy, got {type(policy).__name__}. "
            'Write one, or its text, such as "params: .*/kernel=stochastic".'
        )
    subject: Any = module
    if nnx.is_module(module):
        return cast(M, nnx.wrap(subject, policy, rngs))
    if rngs is not None:
        raise ValueError(
            f"`rngs` must be left out for a Linen module, got {rngs!r}. Pass "
            'rngs={"rounding": key} to `apply`.'
        )
    return cast(M, linen.wrap(subject, policy))


def unwrap(module: M) -> M:
    """Gives a copy of a wrapped module without its wrap; of others, a plain copy.

    Parts that are wrapped themselves stay so.

    Raises:
      TypeError: `module` is no Flax module.
    """
    check_module(module)
    subject: Any = module
    kind = nnx if nnx.is_module(module) else linen
    return cast(M, kind.unwrap(subject))


def check_module(module: Any) -> None:
    """Raises TypeError if `module` is no module of Flax."""
    if not (linen.is_module(module) or nnx.is_module(module)):
        raise TypeError(
            "`module` must be a flax.linen.Module or a flax.nnx.Module, got "
            f"{type(module).__name__}. Pass the module itself, not its class, function "
            "or variables."
        )
