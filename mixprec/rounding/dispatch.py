"""From checked arguments to a backend, XLA operations or the kernel, and gradients."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mixprec.rounding import bits as bits_lib
from mixprec.rounding import kernel, modes, platforms, random, xla
from mixprec.rounding.bits import Rounding

Backend = Literal["auto", "pallas", "xla"]
BACKENDS: tuple[str, ...] = ("auto", "pallas", "xla")
Gradient = Literal["straight_through", "clipped", "zero"]
GRADIENTS: tuple[str, ...] = ("straight_through", "clipped", "zero")


def round_seeded(
    x: jax.Array,
    rounding: Rounding,
    *,
    seed: jax.Array | None,
    backend: str,
    gradient: str = "straight_through",
    sharding: jax.sharding.NamedSharding | None = None,
    in_place: bool = False,
) -> tuple[jax.Array, ...]:
    """Rounds in several modes at once, from seed words that are already made.

    Args:
      x: [...] of a float dtype that `bits.from_float` reads.
      rounding: what to make of each element.
      seed: [2] uint32, or None if no mode is stochastic.
      backend: one of `BACKENDS`.
      gradient: one of `GRADIENTS`.
      sharding: of `x`, for the kernel; None to take what is known of `x`.
      in_place: whether the kernel's first result, float32, takes the memory of `x`.

    Returns:
      One [...] `rounding.out_dtype` a mode; then, if `rounding` says so, the fields of
      `statistics.Statistics`.

    Raises:
      ValueError: unknown or unavailable backend, a sharding that does not fit `x`,
        bits from the hardware for anything but the kernel, or a symbolic shape for the
        kernel or for draws.
    """
    x, seed = _vary_alike(x, seed)
    options = None
    if choose_backend(backend) == "pallas":
        sharding = kernel.find_sharding(x, seed, sharding)
        x = kernel.place(x, sharding)
        options = kernel.Options(sharding=sharding, in_place=in_place)
    elif rounding.random_source != "hash":
        raise ValueError(
            f'`random_source` must be "hash" for backend {backend!r}, got '
            f'"{rounding.random_source}", which only the kernel on a TPU has. Choose '
            'backend "pallas", or leave `random_source` out.'
        )
    if options is None or x.size == 0:
        # Without draws XLA's operations need no strides, and take symbolic shapes.
        strides = random.row_major_strides(() if seed is None else x.shape)
        return xla.round_array(
            x, seed, rounding=rounding, strides=strides, gradient=gradient
        )
    if not rounding.statistics:
        return _round(x, seed, rounding, gradient, options)
    # Statistics have no gradient at all, not even the zeros of a custom rule.
    fixed = jax.lax.stop_gradient(x)
    rounded, *fields = _round(fixed, seed, rounding, gradient, options)
    return _with_gradient(x, rounded, rounding, gradient), *fields


def choose_backend(backend: str) -> str:
    """Gives the backend to use: "pallas" or "xla".

    "auto" is "xla" on every platform. XLA fuses the bit operations into whatever
    produces or reads the value and partitions them over a mesh. Compiled for TPUs, both
    read and write the least bytes possible for a rounding alone; between the layers of
    a model the operations cost next to nothing, where a separate kernel writes its copy
    to memory and reads it back (figures in docs/rounding.md). The kernel is for those
    who want the rounded copy to be a separate array made in one pass.

    Raises:
      ValueError: unknown name, or "pallas" on a platform without the kernel.
    """
    modes.check_choice("backend", backend, BACKENDS)
    if backend == "pallas" and jax.default_backend() not in platforms.PLATFORMS:
        raise ValueError(
            '`backend` must be "xla" or "auto" on this platform '
            f'({jax.default_backend()}), got "pallas", which needs a TPU, an NVIDIA '
            'GPU or, interpreted, a CPU. Use "xla": its results are the same bits.'
        )
    return "xla" if backend == "auto" else backend


def _vary_alike(
    x: jax.Array, seed: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Makes both vary over the manual mesh axes over which either does.

    Otherwise the result of an `x` that is the same on all devices would vary more than
    its gradient.
    """
    if seed is None:
        return x, None

    def axes(y: Any) -> frozenset[str]:
        return jax.typeof(y).manual_axis_type.varying

    def vary(y: jax.Array) -> jax.Array:
        missing = tuple(sorted((axes(x) | axes(seed)) - axes(y)))
        return jax.lax.pcast(y, missing, to="varying") if missing else y

    return vary(x), vary(seed)


# Gradient


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _round(
    x: jax.Array,
    seed: jax.Array | None,
    rounding: Rounding,
    gradient: str,
    options: kernel.Options,
) -> tuple[jax.Array, ...]:
    """Rounds in the kernel."""
    strides = random.row_major_strides(x.shape)
    words = None
    if seed is not None:
        words = jnp.pad(seed, (0, 2))  # the first element has index 0
    if x.dtype == jnp.float64:  # of which kernels know nothing
        x = jax.lax.bitcast_convert_type(bits_lib.from_float64(x), jnp.float32)
    return kernel.round_array(
        x, words, rounding=rounding, strides=strides, options=options
    )


@_round.defjvp
def _round_jvp(
    rounding: Rounding,
    gradient: str,
    options: kernel.Options,
    primals: tuple[jax.Array, jax.Array | None],
    tangents: tuple[jax.Array, Any],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    tangent = xla.tangent_of(primals[0], tangents[0], rounding, gradient)
    rounded = _round(*primals, rounding, gradient, options)
    return rounded, (tangent,) * len(rounded)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _with_gradient(
    x: jax.Array, rounded: jax.Array, rounding: Rounding, gradient: str
) -> jax.Array:
    """Gives `rounded` as a function of `x`, from which it was made."""
    return rounded


@_with_gradient.defjvp
def _with_gradient_jvp(
    rounding: Rounding,
    gradient: str,
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, Any],
) -> tuple[jax.Array, jax.Array]:
    return primals[1], xla.tangent_of(primals[0], tangents[0], rounding, gradient)
