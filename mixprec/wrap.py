"""`wrap` and `unwrap`: the way in for every kind of module."""

import flax.linen as nn

from mixprec import linen
from mixprec.policy import Policy


def wrap(module: nn.Module, policy: Policy | str) -> nn.Module:
    """Gives a copy of a Flax module whose tensors are rounded as `policy` says.

    Use it as you would the original: `init` gives the same tree, `apply` takes the
    float32 master weights and rounds what it reads of them. Gradients with respect to
    the masters are straight-through. Stochastic rounding draws from the random stream
    `rounding`: pass `rngs={"rounding": key}` with a fresh key each step; without it,
    every call rounds alike.

    Args:
      module: a `flax.linen` module, unbound. It is not changed.
      policy: which tensors are rounded, and how; or its text, or the name of one of
        `mixprec.PRESETS`.

    Returns:
      A module of a subclass of `type(module)`, with the same fields.

    Raises:
      TypeError: `module` is no Linen module, or `policy` no Policy.
      ValueError: `module` is bound or belongs to a parent, or `policy` is a text that
        cannot be read. Later, from `init`, `apply` or `explain`: a rule matches nothing
        (the message names the nearest paths).

    Example:
      >>> model = mixprec.wrap(nn.Dense(8), "params: kernel=stochastic")
    """
    linen.check_module(module)
    if isinstance(policy, str):
        policy = Policy.from_text(policy)
    if not isinstance(policy, Policy):
        raise TypeError(
            f"`policy` must be a mixprec.Policy, got {type(policy).__name__}. "
            'Write one, or its text, such as "params: .*/kernel=stochastic".'
        )
    return linen.wrap(module, policy)


def unwrap(module: nn.Module) -> nn.Module:
    """Gives a copy of a wrapped module that rounds nothing; of others, a plain copy.

    Raises:
      TypeError: `module` is no Linen module.
    """
    linen.check_module(module)
    return linen.unwrap(module)
