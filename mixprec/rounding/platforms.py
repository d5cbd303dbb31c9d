"""The kernel as two batches of JAX, and what each platform makes of them.

Lowered, each becomes a TPU's or a GPU's kernel, the kernel interpreted, the XLA path
(the log says why), or an error.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from mixprec.rounding import (
    batches,
    pallas_gpu,
    pallas_tpu,
    random,
    statistics,
    tiling,
)
from mixprec.rounding.bits import Rounding

# By the names of `jax.default_backend`.
PLATFORMS = ("cpu", "gpu", "tpu")


def _by_platform(
    name: str, over_devices: Callable[..., Any], **functions: Callable[..., Any]
) -> jax.extend.core.Primitive:
    """Makes a primitive that is lowered to one function or another.

    A primitive is told the platform when it is lowered. `lax.platform_dependent` would
    leave a conditional around the kernel.

    Args:
      name: of the primitive.
      over_devices: for a program that XLA splits over devices, which it cannot do with
        a kernel.
      **functions: for each platform one; all take arrays, the first of which has the
        shape of the results, and `rounding` among their keywords.
    """
    made = batches.primitive(name)
    for platform, function in functions.items():
        rule = _lowering(function, over_devices)
        mlir.register_lowering(made, rule, platform=platform)
    return made


def _lowering(
    on_one_device: Callable[..., Any], over_devices: Callable[..., Any]
) -> Callable[..., Any]:
    def lower(context: Any, *args: Any, **options: Any) -> Any:
        is_split = _is_split_by_xla(context.module_context.axis_context)
        function = over_devices if is_split else on_one_device
        if not context.avals_out[0].size:  # a batch without members

            def function(*args: Any, **options: Any) -> Any:
                return [jnp.zeros(y.shape, y.dtype) for y in context.avals_out]

        with jax.enable_x64(False):  # kernels know no 64 bits
            rule = mlir.lower_fun(function, multiple_results=True)
            return rule(context, *args, **options)

    return lower


def _is_split_by_xla(axis_context: Any) -> bool:
    """Tells whether XLA splits the operation that is being lowered over devices."""
    mesh = getattr(axis_context, "mesh", None)
    if mesh is None:
        return (getattr(axis_context, "num_devices", None) or 1) > 1
    by_hand = axis_context.manual_axes | set(mesh.manual_axes)
    return any(size > 1 for axis, size in mesh.shape.items() if axis not in by_hand)


def _over_devices(
    x: jax.Array, words: jax.Array | None = None, **options: Any
) -> tuple[jax.Array, ...]:
    if options["rounding"].random_source != "hash":
        raise ValueError(
            '`sharding` must be given for `random_source` "hardware" in a program over '
            "several devices, where the sharding of `x` is not known. Pass it, or call "
            "inside shard_map."
        )
    return _in_xla(
        "the sharding of `x` is not known, and only XLA splits what it does not know "
        "(pass `sharding`, and for a batch `spmd_axis_name` to `jax.vmap`)",
        x,
        words,
        **options,
    )


def _in_xla(
    reason: str,
    x: jax.Array,
    words: jax.Array | None = None,
    *,
    rounding: Rounding,
    strides: random.Strides | None = None,
    in_place: bool = False,
) -> tuple[jax.Array, ...]:
    _log_fallback(reason)

    return batches.round_members(x, words, rounding, strides)


def _each_member(
    kernel: Callable[..., Any],
    x: jax.Array,
    words: jax.Array | None,
    *,
    integers_up_to: int,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Rounds the members of a batch, of which words tell, one after the other.

    Args:
      kernel: rounds one member, with one set of words or None.
      x: as for `kernel.round_array`.
      words: as for `kernel.round_array`.
      integers_up_to: how many bytes a float may have that the loop must see as an
        integer.
      **options: for the kernel.
    """
    if words is None or words.ndim == 1:
        return kernel(x, batches.none_if_empty(words), **options)

    def stored(y: jax.Array) -> jax.Array:
        if y.dtype.itemsize > integers_up_to:
            return y
        return jax.lax.bitcast_convert_type(y, f"uint{8 * y.dtype.itemsize}")

    def one(member: jax.Array, words: jax.Array) -> list[jax.Array]:
        member = jax.lax.bitcast_convert_type(member, x.dtype)
        rounded = _each_member(
            kernel, member, words, integers_up_to=integers_up_to, **options
        )
        return [stored(y) for y in rounded]

    if x.shape[0] == words.shape[0]:
        rounded = jax.lax.map(lambda both: one(*both), (stored(x), words))
    else:
        rounded = jax.lax.map(functools.partial(one, x[0]), words)
    rounding = options["rounding"]
    dtypes = [rounding.out_dtype] * len(rounding.modes)
    if rounding.statistics:
        dtypes += map(np.dtype, statistics.DTYPES)
    return tuple(map(jax.lax.bitcast_convert_type, rounded, dtypes))


@functools.cache
def _log_fallback(reason: str) -> None:
    logging.getLogger(__name__).warning(
        'XLA operations are taken for backend "pallas", with the same bits as result: '
        "%s.",
        reason,
    )


def _on_cpu(
    x: jax.Array, words: jax.Array | None = None, **options: Any
) -> tuple[jax.Array, ...]:
    _check_random_source(options["rounding"], "a CPU")
    if jax.typeof(x).manual_axis_type.varying:
        return _in_xla(_NOT_INTERPRETED, x, words, **options)
    # As integers, since loops on a CPU change the payloads of narrow NaNs.
    interpreted = functools.partial(pallas_tpu.round_pallas, interpret=True)
    return _each_member(interpreted, x, words, integers_up_to=2, **options)


def _bare_on_cpu(x: jax.Array, *, rounding: Rounding) -> tuple[jax.Array, ...]:
    if jax.typeof(x).manual_axis_type.varying:
        return _in_xla(_NOT_INTERPRETED, x, rounding=rounding)
    return pallas_tpu.round_pallas_bare(x, rounding=rounding, interpret=True)


_NOT_INTERPRETED = (
    "inside shard_map with check_vma=True, of which Pallas's interpreter for CPUs "
    "does not know"
)


def _on_tpu(
    x: jax.Array, words: jax.Array | None = None, **options: Any
) -> tuple[jax.Array, ...]:
    rounding = options["rounding"]
    members = 0 if words is None else words.ndim - 1
    reason = _why_not_on_tpu(x.shape[members:], x.dtype, rounding)
    if rounding.random_source == "hash" and reason is not None:
        return _in_xla(reason, x, words, **options)
    # The TPU's compiler fails on loops that write floats of 8 bits.
    kernel = pallas_tpu.round_pallas
    return _each_member(kernel, x, words, integers_up_to=1, **options)


def _why_not_on_tpu(
    shape: tuple[int, ...], dtype: np.dtype, rounding: Rounding
) -> str | None:
    itemsizes = (dtype.itemsize, rounding.out_dtype.itemsize)
    if tiling.have_one_order(shape, itemsizes):
        return None
    return (
        f"a TPU stores {dtype} and {rounding.out_dtype} of shape {shape} in different "
        "orders, between which a kernel would need a copy"
    )


def _on_nvidia(
    x: jax.Array, words: jax.Array | None = None, **options: Any
) -> tuple[jax.Array, ...]:
    _check_random_source(options["rounding"], "a GPU")
    if options["rounding"].statistics:
        reason = "the kernel for GPUs gives no statistics"
        return _in_xla(reason, x, words, **options)
    kernel = pallas_gpu.round_pallas
    return _each_member(kernel, x, words, integers_up_to=2, **options)


def _on_amd(x: jax.Array, *words: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    raise ValueError(
        '`backend` must be "xla" or "auto" on an AMD GPU, for which the kernel has '
        'never been compiled, got "pallas". The results of "xla" are the same bits.'
    )


def _bare_on_gpu(x: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    raise ValueError(
        "round_down_and_up is for TPUs and, interpreted, for CPUs; this program is for "
        f"a GPU. {_INSTEAD_OF_BARE}"
    )


def _bare_over_devices(x: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    raise ValueError(
        "`x` must be on one device, as round_down_and_up is one kernel and nothing "
        f"else; this program is over several. {_INSTEAD_OF_BARE}"
    )


_INSTEAD_OF_BARE = (
    "Use round_bracket(x, out_dtype=jnp.float32): its results are the same."
)


def _check_random_source(rounding: Rounding, platform: str) -> None:
    if rounding.random_source != "hash":
        raise ValueError(
            f'`random_source` must be "hash" for {platform}, got '
            f'"{rounding.random_source}": only a TPU draws bits in the kernel. Leave '
            "it out; the bits are then the same on every platform."
        )


round_p = _by_platform(
    "mixprec_round",
    _over_devices,
    cpu=_on_cpu,
    cuda=_on_nvidia,
    rocm=_on_amd,
    tpu=_on_tpu,
)
round_bare_p = _by_platform(
    "mixprec_round_bare",
    _bare_over_devices,
    cpu=_bare_on_cpu,
    cuda=_bare_on_gpu,
    rocm=_bare_on_gpu,
    tpu=functools.partial(pallas_tpu.round_pallas_bare, interpret=False),
)


def _batch_bare(
    args: tuple[jax.Array], dimensions: tuple[int], *, rounding: Rounding
) -> tuple[tuple[jax.Array, ...], tuple[int, ...]]:
    (x,) = args
    random.check_sizes_known(x.shape)
    rounded = tuple(round_bare_p.bind(x, rounding=rounding))
    return rounded, dimensions * len(rounded)


batching.primitive_batchers[round_bare_p] = _batch_bare


def describe(shape: tuple[int, ...], dtype: np.dtype, rounding: Rounding) -> str:
    """Tells what backend "pallas" comes to for an array on one device of this platform.

    Args:
      shape: of the array.
      dtype: of the array.
      rounding: what to make of each element.

    Returns:
      "pallas" with the block, in elements, or "xla" with the reason.
    """
    platform = jax.default_backend()
    if 0 in shape:
        return "xla: no elements"
    if platform == "gpu":
        return f"pallas {pallas_gpu.BLOCK}"
    reason = _why_not_on_tpu(shape, dtype, rounding) if platform == "tpu" else None
    if reason is not None:
        return f"xla: {reason}"
    block = "x".join(map(str, pallas_tpu.tile(shape, dtype, rounding).block_shape))
    return f"pallas {block}" + (" (interpreted)" if platform == "cpu" else "")
