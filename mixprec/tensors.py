"""One tensor of a module, rounded as a rule says: its values, or its cotangent."""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from mixprec import shards
from mixprec.policy import Policy
from mixprec.rounding import api, dispatch, formats, random
from mixprec.rounding.bits import Rounding
from mixprec.rules import Rule

# In the names of operations, before the place of the tensor that they round.
SCOPE = "mixprec.round"
# Reasons to leave a tensor alone that the policy itself gives.
NO_RULE = "no rule"
KEEP = "keep"
# Narrow dtype -> those of `rules.DTYPES` that have all of its values.
_HAVE_ALL_VALUES = {
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
    "float8_e4m3fn": ("float8_e4m3fn", "bfloat16", "float16"),
    "float8_e5m2": ("float8_e5m2", "bfloat16", "float16"),
}


def why_left_alone(rule: Rule | None, dtype: Any, size: int) -> str | None:
    """Gives the reason why a tensor is not rounded, or None if it is.

    Args:
      rule: that decides for it.
      dtype: of the tensor.
      size: of the tensor, in elements.
    """
    if rule is None:
        return NO_RULE
    if rule.mode is None:
        return KEEP
    # The dtypes of keys are no NumPy dtypes.
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    name = str(dtype) if is_key else jnp.dtype(dtype).name
    if name not in ("float32", "float64", *_HAVE_ALL_VALUES):
        return f"{name} is not rounded"
    if rule.dtype in _HAVE_ALL_VALUES.get(name, ()):
        return f"all its values are {rule.dtype} values"
    if size < rule.min_size:
        return f"below min_size={rule.min_size}"
    return None


def carrier(rule: Rule | None, policy: Policy, dtype: Any, size: int) -> Any:
    """Gives the dtype that a tensor has when its rule has been at it.

    Args:
      rule: that decides for it.
      policy: that the rule is of.
      dtype: of the tensor.
      size: of the tensor, in elements.
    """
    is_kept = why_left_alone(rule, dtype, size) is not None
    return dtype if is_kept else _carried(policy, dtype)


def _carried(policy: Policy, dtype: Any) -> Any:
    return jnp.dtype(policy.out_dtype if dtype == jnp.float32 else dtype)


def rounding_of(
    rule: Rule, policy: Policy, dtype: Any, *, hash_values: bool = False
) -> tuple[Rounding, Any]:
    """Gives what a rule makes of each element, and the dtype that carries the result.

    Args:
      rule: with a mode.
      policy: that the rule is of.
      dtype: of the tensor.
      hash_values: whether draws depend on the values too.
    """
    assert rule.mode is not None
    carried = _carried(policy, dtype)
    rounding = api.make_rounding(
        rule.dtype,
        (rule.mode,),
        overflow=rule.overflow,
        out_dtype=rule.dtype if carried == rule.dtype else "float32",
        random_bits=rule.random_bits,
        hash_values=hash_values and rule.mode == "stochastic",
    )
    return rounding, carried


def round_value(
    x: jax.Array,
    rule: Rule,
    policy: Policy,
    *,
    seed: Any,
    place: str,
    has_key: bool,
    hash_values: bool,
    sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Rounds a tensor for which `why_left_alone` gives no reason.

    Args:
      x: [...] float32, float64 or narrower.
      rule: with a mode.
      policy: that the rule is of.
      seed: [2] uint32, of stochastic draws.
      place: that tells this tensor's draws from others'.
      has_key: whether `seed` comes from the caller's key.
      hash_values: whether draws depend on the values too.
      sharding: of `x`, as for `mixprec.round_to`.

    Returns:
      [...] `policy.out_dtype` if `x` is float32, else its dtype.
    """
    rounding, carried = rounding_of(rule, policy, x.dtype, hash_values=hash_values)
    gathered = shards.without_axes(sharding, policy.gather)
    if gathered is not None:
        rounding = dataclasses.replace(rounding, out_dtype=jnp.dtype(rule.dtype))
    stochastic = rule.mode == "stochastic"
    if stochastic and not has_key:
        x = _warn_if_differentiated(x, policy)
    # So that a profile, and the compiled program, tell which tensor it is.
    with jax.named_scope(f"{SCOPE}({place})"):
        (rounded,) = dispatch.round_seeded(
            x if gathered is None else jax.lax.stop_gradient(x),
            rounding,
            seed=random.fold_in_path(seed, place) if stochastic else None,
            backend=policy.backend,
            sharding=sharding,
        )
    if gathered is not None:
        assert sharding is not None
        return shards.gather(x, rounded, carried, sharding, gathered)
    # What is rounded to 8 bits is a value of every wider dtype, so this is exact.
    return rounded.astype(carried)


def round_cotangent(
    x: jax.Array,
    rule: Rule,
    policy: Policy,
    *,
    seed: Any,
    place: str,
    has_key: bool,
) -> jax.Array:
    """Gives `x` unchanged; rounds what comes back for it. Arguments as above."""
    if why_left_alone(rule, x.dtype, x.size) is not None:
        return x
    seed = jnp.asarray(seed)
    return _with_rounded_cotangent(x, seed, rule, policy, place, has_key)


def round_both_ways(
    x: jax.Array,
    forward: Rule | None,
    backward: Rule | None,
    policy: Policy,
    *,
    seed: Any,
    place: str,
    has_key: bool,
    hash_values: bool,
    sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Rounds a tensor, and what comes back for it, where the rules ask for it.

    Args:
      x: [...] of any dtype.
      forward: the rule for its values, or None.
      backward: the rule for its cotangent, or None.
      policy: that both are of.
      seed: and all else: as for `round_value`.
      place: as above.
      has_key: as above.
      hash_values: as above; a cotangent's draws always depend on its values.
      sharding: as above.

    Returns:
      What `round_value` gives, or `x`.
    """
    if why_left_alone(forward, x.dtype, x.size) is None:
        assert forward is not None
        x = round_value(
            x,
            forward,
            policy,
            seed=seed,
            place=place,
            has_key=has_key,
            hash_values=hash_values,
            sharding=sharding,
        )
    if backward is None:
        return x
    # Other draws than those forward.
    place = f"{place}:cotangent"
    return round_cotangent(x, backward, policy, seed=seed, place=place, has_key=has_key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _with_rounded_cotangent(
    x: jax.Array,
    seed: jax.Array,
    rule: Rule,
    policy: Policy,
    place: str,
    has_key: bool,
) -> jax.Array:
    return x


def _forward(x: jax.Array, seed: jax.Array, *_: Any) -> tuple[jax.Array, jax.Array]:
    return x, seed


def _backward(
    rule: Rule,
    policy: Policy,
    place: str,
    has_key: bool,
    seed: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, None]:
    if rule.mode == "stochastic" and not has_key:
        _warn_of_equal_draws(policy)
    rounded = round_value(
        cotangent,
        rule,
        policy,
        seed=seed,
        place=place,
        has_key=has_key,
        # Under a scan the cotangents of all layers have place and index in common.
        hash_values=True,
    )
    return rounded.astype(cotangent.dtype), None


_with_rounded_cotangent.defvjp(_forward, _backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _warn_if_differentiated(x: jax.Array, policy: Policy) -> jax.Array:
    return x


@_warn_if_differentiated.defjvp
def _warn_if_differentiated_jvp(
    policy: Policy, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    _warn_of_equal_draws(policy)
    return primals[0], tangents[0]


@functools.cache
def _warn_of_equal_draws(policy: Policy) -> None:
    warnings.warn(
        "stochastic rounding is differentiated without a key, so every step draws "
        f"from seed {policy.seed} of the policy and rounds alike. Pass a fresh key "
        'each step, rngs={"rounding": key}, or with NNX give `wrap` a stream, '
        "rngs=nnx.Rngs(rounding=0).",
        stacklevel=2,
    )


def check_param(rule: Rule | None, leaf: Any, path: str) -> None:
    """Raises TypeError if a rule asks to round a parameter that is no fit master."""
    dtype = getattr(leaf, "dtype", None)
    if rule and rule.mode and dtype in (jnp.float16, jnp.float64):
        raise TypeError(
            f"`{path}` must be float32 to be rounded to {rule.dtype}, got {dtype}. "
            "Keep float32 master weights, or leave it alone by a rule with mode None."
        )


def inexact_share(rule: Rule, dtype: Any) -> float:
    """Gives the share of values that rounding changes, if all mantissas are as likely.

    Args:
      rule: with a mode.
      dtype: of the tensor.

    Returns:
      1 - 2^-(mantissa bits that `rule.dtype` lacks); 0 if it lacks none.
    """
    lost = jnp.finfo(dtype).nmant - formats.find_format(rule.dtype).mantissa_bits
    return 1 - 2.0 ** -max(lost, 0)
