"""`round_to` and `round_bracket`: checks, backend, straight-through gradient."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mixprec.rounding import bits as bits_lib
from mixprec.rounding import modes as modes_lib
from mixprec.rounding import pallas, random

Backend = Literal["auto", "pallas", "xla"]
BACKENDS: tuple[str, ...] = ("auto", "pallas", "xla")


def round_to(
    x: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    mode: modes_lib.Mode,
    key: jax.Array | int | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: Backend = "auto",
) -> jax.Array:
    """Rounds to the values of `dtype` in a mode of choice.

    NaN stays NaN of the same sign, infinities and exact values stay, zeros keep their
    sign, subnormals are rounded like any number. A finite value beyond the largest of
    `dtype` becomes infinite where the mode takes the neighbour away from zero. The
    gradient is straight-through: that of the identity (Bengio et al. 2013, section 4).

    Args:
      x: [...] float32; float16 and bfloat16 are converted to float32 first, exactly.
      dtype: whose values to round to; bfloat16.
      mode: "nearest_even", "toward_zero", "away_from_zero", "toward_positive",
        "toward_negative" or "stochastic"; see `mixprec.rounding.modes`.
      key: for "stochastic" only, and required there: a JAX key or an integer seed. An
        element's draw depends on the key and on its place in the array, nothing else.
      out_dtype: of the result: `dtype` (the default) or float32, which holds the same
        values.
      backend: "xla" (plain operations that XLA fuses and partitions), "pallas" (one
        kernel over blocks; on CPUs in Pallas's interpreter) or "auto". The results are
        equal bit for bit.

    Returns:
      [...] `out_dtype`.

    Raises:
      TypeError: `x`, `dtype`, `out_dtype` or `key` is of a type not listed above.
      ValueError: unknown `mode` or `backend`; "stochastic" without a key or another
        mode with one; "pallas" where there is neither a TPU nor a CPU.

    Example:
      >>> x = jnp.float32([1.0, 1.001, -1.001])
      >>> mixprec.round_to(x, mode="toward_zero")
      Array([1, 1, -1], dtype=bfloat16)
      >>> mixprec.round_to(x, mode="away_from_zero")
      Array([1, 1.00781, -1.00781], dtype=bfloat16)
    """
    modes_lib.check_mode(mode)
    if mode == "stochastic" and key is None:
        raise ValueError(
            '`key` must be given for mode "stochastic", got None. '
            "Pass a fresh `jax.random.key` each time."
        )
    if mode != "stochastic" and key is not None:
        raise ValueError(
            f'`key` must be None for mode "{mode}", which draws nothing, got a key. '
            'Drop it, or choose mode "stochastic".'
        )
    seed = None if key is None else random.seed_from_key(key)
    (rounded,) = round_seeded(
        x, dtype, (mode,), seed=seed, out_dtype=out_dtype, backend=backend
    )
    return rounded


def round_bracket(
    x: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: Backend = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Gives both neighbours of each element among the values of `dtype`, in one pass.

    Args:
      x: as for `round_to`.
      dtype: as for `round_to`.
      out_dtype: as for `round_to`.
      backend: as for `round_to`.

    Returns:
      (down, up), each [...] `out_dtype`: the neighbour toward zero and that away from
      zero. Both are `x` itself where that is a value of `dtype`.

    Raises:
      TypeError, ValueError: as for `round_to`.
    """
    down, up = round_seeded(
        x,
        dtype,
        ("toward_zero", "away_from_zero"),
        seed=None,
        out_dtype=out_dtype,
        backend=backend,
    )
    return down, up


def round_seeded(
    x: jax.Array,
    dtype: jax.typing.DTypeLike,
    modes: tuple[str, ...],
    *,
    seed: jax.Array | None,
    out_dtype: jax.typing.DTypeLike | None,
    backend: str,
    hash_values: bool = False,
) -> tuple[jax.Array, ...]:
    """Rounds in several modes at once, from seed words that are already made.

    Args:
      x: as for `round_to`.
      dtype: as for `round_to`.
      modes: one result each.
      seed: [2] uint32, or None if no mode is stochastic.
      out_dtype: as for `round_to`.
      backend: as for `round_to`.
      hash_values: whether a draw depends on the element's value too, besides its place.

    Returns:
      One [...] `out_dtype` a mode.

    Raises:
      TypeError, ValueError: as for `round_to`.
    """
    out_dtype = check_dtypes(dtype, out_dtype)
    backend = choose_backend(backend)
    x = _as_float32(x)
    return _round(x, seed, modes, out_dtype, backend, hash_values)


def check_dtypes(
    dtype: jax.typing.DTypeLike, out_dtype: jax.typing.DTypeLike | None
) -> np.dtype:
    """Gives the dtype of results; raises TypeError if either dtype is not allowed."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        raise TypeError(
            f"`dtype` must be bfloat16, got {jnp.dtype(dtype).name}. "
            "No other target is supported."
        )
    chosen = jnp.dtype(dtype if out_dtype is None else out_dtype)
    if chosen not in (jnp.bfloat16, jnp.float32):
        raise TypeError(
            f"`out_dtype` must be bfloat16 or float32, got {chosen.name}. "
            "Convert the result afterwards."
        )
    return chosen


def choose_backend(backend: str) -> str:
    """Gives the backend to use: "pallas" or "xla".

    "auto" is "xla" on every platform. XLA fuses the bit operations into whatever
    produces or reads the value and partitions them over a mesh; compiled for TPU v5e
    and v6e it reads and writes the least bytes possible for a rounding alone (6 an
    element), and none for one that feeds a product, where a separate kernel writes its
    copy to memory and reads it back. The kernel is for those who want the rounded copy
    to be a separate array made in one pass.

    Raises:
      ValueError: unknown name, or "pallas" on a platform without a lowering.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"`backend` must be one of {', '.join(BACKENDS)}, got {backend!r}. "
            'Leave it out for "auto".'
        )
    if backend == "pallas" and jax.default_backend() not in ("cpu", "tpu"):
        raise ValueError(
            '`backend` must be "xla" or "auto" on this platform '
            f'({jax.default_backend()}), got "pallas", which needs a TPU or, '
            'interpreted, a CPU. Use "xla": its results are the same bits.'
        )
    return "xla" if backend == "auto" else backend


def _as_float32(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype == jnp.float32:
        return x
    if x.dtype in (jnp.bfloat16, jnp.float16):
        return x.astype(jnp.float32)
    raise TypeError(
        f"`x` must be float32, bfloat16 or float16, got {x.dtype.name}. "
        "Convert it to float32 first, knowing that this may round."
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4, 5))
def _round(
    x: jax.Array,
    seed: jax.Array | None,
    modes: tuple[str, ...],
    out_dtype: np.dtype,
    backend: str,
    hash_values: bool,
) -> tuple[jax.Array, ...]:
    if backend == "pallas" and x.size > 0:
        strides = random.row_major_strides(x.shape)
        return _pallas_round(modes, out_dtype, hash_values, strides)(x, seed)
    return _round_xla(x, seed, modes, out_dtype, hash_values)


@_round.defjvp
def _round_jvp(
    modes: tuple[str, ...],
    out_dtype: np.dtype,
    backend: str,
    hash_values: bool,
    primals: tuple[jax.Array, jax.Array | None],
    tangents: tuple[jax.Array, Any],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    tangent = tangents[0].astype(out_dtype)
    rounded = _round(*primals, modes, out_dtype, backend, hash_values)
    return rounded, (tangent,) * len(modes)


@functools.partial(
    jax.jit, static_argnames=("modes", "out_dtype", "hash_values"), inline=True
)
def _round_xla(
    x: jax.Array,
    seed: jax.Array | None,
    modes: tuple[str, ...],
    out_dtype: np.dtype,
    hash_values: bool,
) -> tuple[jax.Array, ...]:
    bits = bits_lib.from_float32(x)
    random_bits = None
    if seed is not None:
        index = random.element_index(x.shape, random.row_major_strides(x.shape))
        values = bits if hash_values else None
        random_bits = random.random_bits((seed[0], seed[1]), index, values)
    return tuple(
        bits_lib.to_float(bits_lib.round_bits(bits, mode, random_bits), out_dtype)
        for mode in modes
    )


@functools.cache
def _pallas_round(
    modes: tuple[str, ...],
    out_dtype: np.dtype,
    hash_values: bool,
    strides: tuple[int, ...],
) -> Any:
    """Gives the kernel as a function of (x, seed) that `jax.vmap` can batch.

    Batching rounds the batched array in one call. Along the batch the index stands
    still, so that each member draws what it draws alone, as on the XLA path.
    """
    call = functools.partial(
        pallas.round_pallas,
        modes=modes,
        out_dtype=out_dtype,
        strides=strides,
        hash_values=hash_values,
    )

    @jax.jit
    def by_platform(x: jax.Array, seed: jax.Array | None) -> tuple[jax.Array, ...]:
        return jax.lax.platform_dependent(
            x,
            seed,
            cpu=functools.partial(call, interpret=True),
            tpu=functools.partial(call, interpret=False),
        )

    batchable = jax.custom_batching.custom_vmap(by_platform)

    @batchable.def_vmap
    def _(
        axis_size: int, is_batched: Any, x: jax.Array, seed: jax.Array | None
    ) -> tuple[Any, Any]:
        x_is_batched, seed_is_batched = is_batched
        if not x_is_batched:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        if seed_is_batched:
            rounded = jax.lax.map(lambda member: batchable(*member), (x, seed))
        else:
            batched = _pallas_round(modes, out_dtype, hash_values, (0, *strides))
            rounded = batched(x, seed)
        return rounded, (True,) * len(modes)

    return batchable
