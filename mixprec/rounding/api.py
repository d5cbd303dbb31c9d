"""`round_to`, `round_bracket` and `round_down_and_up`: what users call, and checks."""

import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mixprec.rounding import dispatch, formats, kernel, random
from mixprec.rounding import modes as modes_lib
from mixprec.rounding.bits import Rounding
from mixprec.rounding.statistics import Statistics

Overflow = Literal["inf", "saturate"]
OVERFLOWS: tuple[str, ...] = ("inf", "saturate")
RandomSource = Literal["hash", "hardware"]
RANDOM_SOURCES: tuple[str, ...] = ("hash", "hardware")
Exact = Literal["keep", "next"]
EXACTS: tuple[str, ...] = ("keep", "next")


def round_to(
    x: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    mode: modes_lib.Mode,
    key: jax.Array | int | None = None,
    random_bits: int | None = None,
    random_source: RandomSource = "hash",
    overflow: Overflow = "inf",
    out_dtype: jax.typing.DTypeLike | None = None,
    gradient: dispatch.Gradient = "straight_through",
    backend: dispatch.Backend = "auto",
    sharding: jax.sharding.NamedSharding | None = None,
    in_place: bool = False,
) -> jax.Array:
    """Rounds to the numbers of `dtype` in a mode of choice.

    NaN stays NaN of the same sign, infinities and exact values stay, zeros keep their
    sign, subnormals are rounded like any number. float8_e4m3fn has no infinities: they,
    and what would become one, become NaN.

    Args:
      x: [...] float32; of a narrower float dtype that `dtype` lists, converted to
        float32 first, exactly; or, where x64 is enabled, float64, which is rounded
        once, not by way of float32.
      dtype: whose numbers to round to: bfloat16, float16, float8_e4m3fn, float8_e5m2.
      mode: "nearest_even", "nearest_away", "toward_zero", "away_from_zero",
        "toward_positive", "toward_negative", "to_odd" or "stochastic"; see
        `mixprec.rounding.modes`.
      key: for "stochastic" only, and required there: a JAX key or an integer seed. An
        element's draw depends on the key and on its place in the array, nothing else.
      random_bits: for "stochastic" only: how many random bits a draw uses, from 1 to
        32. The probability of `up` is the fraction of the way there, rounded to so
        many bits (half up), so it is wrong by up to 2**-(random_bits + 1), and right on
        average over fractions (Fitzgibbon & Felix 2025, "On stochastic rounding with
        few random bits"). None, the default: 32, of which as many count as the fraction
        has.
      random_source: for "stochastic" only: "hash", whose bits are the same for any
        backend, chip and split over devices; or "hardware", the TPU's own generator,
        with `backend="pallas"` only, which saves the hash but gives other bits for
        other blocks, splits and chips.
      overflow: what becomes of a finite number beyond the largest of `dtype` where the
        mode takes `up`: "inf", infinity (IEEE 754-2019, section 7.4), or "saturate",
        the largest.
      out_dtype: of the result: `dtype` (the default) or float32, which holds the same
        values.
      gradient: "straight_through", that of the identity (Bengio et al. 2013, section
        4); "clipped", the same but 0 for numbers beyond the largest of `dtype`; "zero",
        the derivative almost everywhere.
      backend: "xla" (plain operations that XLA fuses and partitions), "pallas" (one
        kernel over blocks, for TPUs and NVIDIA GPUs; on CPUs in Pallas's interpreter)
        or "auto". The results are equal bit for bit.
      sharding: for "pallas": how `x` is split over devices, so that the kernel runs on
        each shard. Need not be given where it is known: of an array that is no tracer,
        and in a mesh with explicit axes alone. In a batch, how a member is split; the
        `spmd_axis_name` of `jax.vmap` says how the batch is. Where it is not known,
        XLA's operations are taken and the log says so. "xla" leaves it aside.
      in_place: for float32 to float32: whether the kernel writes over `x`, where the
        program needs it no more (where it does, `x` is copied first). XLA's operations
        do so by themselves.

    Returns:
      [...] `out_dtype`.

    Raises:
      TypeError: `x`, `dtype`, `out_dtype`, `key`, `random_bits`, `sharding` or
        `in_place` is of a type not listed above.
      ValueError: an argument is none of its allowed values; "stochastic" without a key,
        or another mode with `key` or `random_bits`; "pallas" or "hardware" where it
        cannot be had; a `sharding` that does not divide `x`, or is not that of its
        type; `in_place` for other dtypes than float32; "stochastic" or "pallas" for an
        `x` of symbolic shape.

    Example:
      >>> x = jnp.float32([1.0, 1.001, -1.001])
      >>> mixprec.round_to(x, mode="toward_zero")
      Array([1, 1, -1], dtype=bfloat16)
      >>> mixprec.round_to(x, mode="away_from_zero")
      Array([1, 1.00781, -1.00781], dtype=bfloat16)
    """
    modes_lib.check_mode(mode)
    rounding = make_rounding(
        dtype,
        (mode,),
        overflow=overflow,
        out_dtype=out_dtype,
        random_bits=random_bits,
        random_source=random_source,
    )
    _check_draw(mode, key, random_bits, random_source)
    modes_lib.check_choice("gradient", gradient, dispatch.GRADIENTS)
    _check_sharding(sharding)
    if not isinstance(in_place, (bool, np.bool_)):
        raise TypeError(
            f"`in_place` must be True or False, got {in_place!r}. Pass one of them."
        )
    x = as_rounding_input(x)
    if in_place and not x.dtype == rounding.out_dtype == jnp.float32:
        raise ValueError(
            "`in_place` must be False unless `x` and the result are float32, got "
            f"{x.dtype} and {rounding.out_dtype}. Drop it, or pass "
            "out_dtype=jnp.float32."
        )
    (rounded,) = dispatch.round_seeded(
        x,
        rounding,
        seed=None if key is None else random.seed_from_key(key),
        backend=backend,
        gradient=gradient,
        sharding=sharding,
        in_place=bool(in_place),
    )
    return rounded


def round_bracket(
    x: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    exact: Exact = "keep",
    overflow: Overflow = "inf",
    out_dtype: jax.typing.DTypeLike | None = None,
    gradient: dispatch.Gradient = "straight_through",
    backend: dispatch.Backend = "auto",
    sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gives both neighbours of each element among the numbers of `dtype`, in one pass.

    Args:
      x: as for `round_to`.
      dtype: as for `round_to`.
      exact: what `up` is where `x` is a number of `dtype`: "keep", `x` itself, like
        `down`; or "next", the next number away from zero, so that `x` can always be
        placed between two different ones.
      overflow: as for `round_to`; with "saturate", also of "next" to the largest.
      out_dtype: as for `round_to`.
      gradient: as for `round_to`; of both results.
      backend: as for `round_to`.
      sharding: as for `round_to`.

    Returns:
      (down, up), each [...] `out_dtype`: the neighbour toward zero and that away from
      zero.

    Raises:
      TypeError, ValueError: as for `round_to`.
    """
    modes_lib.check_choice("exact", exact, EXACTS)
    modes_lib.check_choice("gradient", gradient, dispatch.GRADIENTS)
    _check_sharding(sharding)
    up_mode = modes_lib.NEXT if exact == "next" else "away_from_zero"
    rounding = make_rounding(
        dtype, ("toward_zero", up_mode), overflow=overflow, out_dtype=out_dtype
    )
    down, up = dispatch.round_seeded(
        as_rounding_input(x),
        rounding,
        seed=None,
        backend=backend,
        gradient=gradient,
        sharding=sharding,
    )
    return down, up


def round_with_statistics(
    x: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    mode: modes_lib.Mode,
    key: jax.Array | int | None = None,
    random_bits: int | None = None,
    overflow: Overflow = "inf",
    out_dtype: jax.typing.DTypeLike | None = None,
    gradient: dispatch.Gradient = "straight_through",
    backend: dispatch.Backend = "auto",
    sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[jax.Array, Statistics]:
    """Rounds like `round_to`, and tells what that did to the array.

    Args:
      x: as for `round_to`, with fewer than 2**32 elements, and none but known sizes.
      dtype: as for `round_to`; so are all others.
      mode: which of the two neighbours to take.
      key: for "stochastic".
      random_bits: for "stochastic".
      overflow: "inf" or "saturate".
      out_dtype: of the rounded array.
      gradient: of the rounded array.
      backend: on a TPU, "pallas" reads `x` once, "xla", which is "auto", twice.
      sharding: for "pallas".

    Returns:
      (rounded, statistics): [...] `out_dtype`, what `round_to` gives; and scalars
      without gradient, of the whole array over all devices. Under `jax.vmap` they are
      of each member, inside `jax.shard_map` of each shard.

    Raises:
      TypeError, ValueError: as for `round_to`, or `x` has too many elements.
    """
    modes_lib.check_mode(mode)
    options: Any = dict(overflow=overflow, out_dtype=out_dtype, random_bits=random_bits)
    rounding = make_rounding(dtype, (mode,), **options, statistics=True)
    _check_draw(mode, key, random_bits, "hash")
    modes_lib.check_choice("gradient", gradient, dispatch.GRADIENTS)
    _check_sharding(sharding)
    x = as_rounding_input(x)
    random.check_sizes_known(x.shape)
    if x.size >= 2**32:
        raise ValueError(
            "`x` must have fewer than 2**32 elements, as far as uint32 counts, got "
            f"shape {x.shape}. Round it in parts, or by round_to."
        )
    rounded, *fields = dispatch.round_seeded(
        x,
        rounding,
        seed=None if key is None else random.seed_from_key(key),
        backend=backend,
        gradient=gradient,
        sharding=sharding,
    )
    return rounded, Statistics(*fields)


def round_down_and_up(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gives both bfloat16 neighbours as float32, by one `pallas_call` and nothing else.

    For programs that take the kernel out of the lowered module and call it on their own
    arrays, as torch_xla's `make_kernel_from_pallas` does: there is no reshaping around
    it that would be lost. Elsewhere `round_bracket` is better: where the compiler's
    order of an array in memory is not row-major, this call makes it copy the array.

    Args:
      x: [...] float32, of rank 1 or more, without a dimension of 0.

    Returns:
      (down, up), each [...] float32: the neighbour toward zero and that away from zero,
      both `x` itself where that is a bfloat16 number. Gradients are straight-through.

    Raises:
      TypeError: `x` is not float32.
      ValueError: `x` has no element, no dimension or a symbolic one, or the platform is
        neither TPU nor CPU.
    """
    dispatch.choose_backend("pallas")
    x = as_rounding_input(x)
    if x.dtype != jnp.float32:
        raise TypeError(
            f"`x` must be float32, got {x.dtype}. Convert it, or use round_bracket."
        )
    random.check_sizes_known(x.shape)
    if x.ndim == 0 or x.size == 0:
        raise ValueError(
            "`x` must have a dimension, and none of 0, got shape "
            f"{x.shape}. Use round_bracket, which takes any shape."
        )
    modes = ("toward_zero", "away_from_zero")
    rounding = make_rounding(jnp.bfloat16, modes, out_dtype=jnp.float32)
    down, up = kernel.round_bare(x, rounding)
    return down, up


def make_rounding(
    dtype: jax.typing.DTypeLike,
    modes: tuple[str, ...],
    *,
    overflow: str = "inf",
    out_dtype: jax.typing.DTypeLike | None = None,
    random_bits: int | None = None,
    random_source: str = "hash",
    hash_values: bool = False,
    statistics: bool = False,
) -> Rounding:
    """Checks arguments as `round_to` documents them, and gives what they describe."""
    to = formats.find_format(dtype)
    modes_lib.check_choice("overflow", overflow, OVERFLOWS)
    modes_lib.check_choice("random_source", random_source, RANDOM_SOURCES)
    chosen = to.dtype if out_dtype is None else formats.dtype_name(out_dtype)
    if chosen not in (to.dtype, "float32"):
        raise TypeError(
            f"`out_dtype` must be {to.dtype} or float32, got "
            f"{chosen or repr(out_dtype)}. Convert the result afterwards."
        )
    return Rounding(
        to=to,
        modes=modes,
        out_dtype=jnp.dtype(chosen),
        saturate=overflow == "saturate",
        random_width=_random_width(random_bits),
        hash_values=hash_values,
        random_source=random_source,
        statistics=statistics,
    )


def _random_width(random_bits: Any) -> int | None:
    if random_bits is None:
        return None
    try:
        # Arrays, tracers among them, hold numbers but are none.
        if isinstance(random_bits, (bool, np.ndarray, jax.Array)):
            raise TypeError
        width = operator.index(random_bits)
    except TypeError:
        raise TypeError(
            "`random_bits` must be an integer from 1 to 32 or None, got "
            f"{random_bits!r}. Leave it out for all that count."
        ) from None
    if width not in range(1, 33):
        raise ValueError(
            f"`random_bits` must be from 1 to 32, got {width}. "
            "Leave it out for all that count."
        )
    return width


def _check_draw(
    mode: str, key: Any, random_bits: int | None, random_source: str
) -> None:
    if mode == "stochastic" and key is None:
        raise ValueError(
            '`key` must be given for mode "stochastic", got None. '
            "Pass a fresh `jax.random.key` each time."
        )
    source = None if random_source == "hash" else random_source
    for name, value in (
        ("key", key),
        ("random_bits", random_bits),
        ("random_source", source),
    ):
        if mode != "stochastic" and value is not None:
            raise ValueError(
                f'`{name}` must be left out for mode "{mode}", which draws nothing, '
                f'got {value!r}. Drop it, or choose mode "stochastic".'
            )


def _check_sharding(sharding: Any) -> None:
    if sharding is None:
        return
    mesh = getattr(sharding, "mesh", None)
    is_named = isinstance(sharding, jax.sharding.NamedSharding)
    if not is_named or not isinstance(mesh, jax.sharding.Mesh) or mesh.empty:
        raise TypeError(
            "`sharding` must be a jax.sharding.NamedSharding over a mesh of devices, "
            f"got {sharding!r}. Make one of a mesh and a PartitionSpec, or drop it."
        )
    if jax.sharding.PartitionSpec.UNCONSTRAINED in sharding.spec.partitions:
        raise ValueError(
            "`sharding` must say how each dimension is split, got "
            f"{sharding.spec}. Write a mesh axis or None in place of UNCONSTRAINED."
        )


def as_rounding_input(x: Any) -> jax.Array:
    """Gives `x` as an array; raises TypeError if it cannot be rounded."""
    narrow = [format_.dtype for format_ in formats.FORMATS]
    rule = f"float32, {', '.join(narrow)} or, with jax_enable_x64, float64"
    given = getattr(x, "dtype", None)
    if given != np.float64 or jax.config.read("jax_enable_x64"):
        try:
            x = jnp.asarray(x)
        except jax.errors.JAXTypeError:  # about tracers
            raise
        except (TypeError, ValueError, OverflowError) as error:
            dtype = f" of {given}" if isinstance(x, np.ndarray) else ""
            raise TypeError(
                f"`x` must be {rule}, got {type(x).__name__}{dtype}. Pass one array "
                "of numbers; those of a tree one by one, as by `jax.tree.map`."
            ) from error
        given = x.dtype
        if given.name in ("float32", "float64", *narrow):
            return x
    raise TypeError(
        f"`x` must be {rule}, got {given}. Convert it to float32 first, knowing that "
        "this may round."
    )
