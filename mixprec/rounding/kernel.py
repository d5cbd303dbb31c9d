"""The kernel as an operation of JAX: platforms, batches, shards.

batchable -> a batch in one call -> each shard with the indices of the whole array
          -> the kernel of the platform for which the program is lowered
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from mixprec.rounding import elements, pallas_gpu, pallas_tpu, random, tiling
from mixprec.rounding.bits import Rounding

# By the names of `jax.default_backend`.
PLATFORMS = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to run the kernel; hashable.

    Attributes:
      sharding: of the array, if it is over several devices.
      in_place: whether the first result, float32, takes the memory of the array.
    """

    sharding: jax.sharding.NamedSharding | None = None
    in_place: bool = False


# Platforms


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
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def result_types(x: Any, *others: Any, rounding: Rounding, **options: Any) -> Any:
        result_type = x.update(dtype=rounding.out_dtype, weak_type=False)
        return [result_type] * len(rounding.modes)

    @functools.cache
    def compiled(**options: Any) -> Any:
        return jax.jit(functools.partial(primitive.bind, **options))

    @primitive.def_impl
    def run(*args: Any, **options: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(**options)(*args)

    for platform, function in functions.items():
        rule = _lowering(function, over_devices)
        mlir.register_lowering(primitive, rule, platform=platform)
    return primitive


def _lowering(
    on_one_device: Callable[..., Any], over_devices: Callable[..., Any]
) -> Callable[..., Any]:
    rules = [
        mlir.lower_fun(function, multiple_results=True)
        for function in (on_one_device, over_devices)
    ]

    def lower(context: Any, *args: Any, **options: Any) -> Any:
        is_split = _is_split_by_xla(context.module_context.axis_context)
        with jax.enable_x64(False):  # kernels know no 64 bits
            return rules[is_split](context, *args, **options)

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
        "(pass `sharding`)",
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
    return elements.round_array(x, words, rounding, strides)


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
    return pallas_tpu.round_pallas(x, words, interpret=True, **options)


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
    itemsizes = (x.dtype.itemsize, rounding.out_dtype.itemsize)
    if rounding.random_source == "hash" and not tiling.have_one_order(
        x.shape, itemsizes
    ):
        reason = (
            f"a TPU stores {x.dtype} and {rounding.out_dtype} of shape {x.shape} in "
            "different orders, between which a kernel would need a copy"
        )
        return _in_xla(reason, x, words, **options)
    return pallas_tpu.round_pallas(x, words, **options)


def _on_nvidia(
    x: jax.Array, words: jax.Array | None = None, **options: Any
) -> tuple[jax.Array, ...]:
    _check_random_source(options["rounding"], "a GPU")
    return pallas_gpu.round_pallas(x, words, **options)


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


_kernel = _by_platform(
    "mixprec_round",
    _over_devices,
    cpu=_on_cpu,
    cuda=_on_nvidia,
    rocm=_on_amd,
    tpu=_on_tpu,
)
_bare_kernel = _by_platform(
    "mixprec_round_bare",
    _bare_over_devices,
    cpu=_bare_on_cpu,
    cuda=_bare_on_gpu,
    rocm=_bare_on_gpu,
    tpu=functools.partial(pallas_tpu.round_pallas_bare, interpret=False),
)


# Batches


@functools.cache
def batchable(rounding: Rounding, strides: random.Strides, options: Options) -> Any:
    """Gives the kernel as a function of (x, words) that `jax.vmap` can batch.

    Batching rounds the batched array in one call. Along the batch the index stands
    still, so that each member draws what it draws alone, as on the XLA path.

    Args:
      rounding: what to make of each element.
      strides: of the element index along the dimensions of `x`.
      options: how to run the kernel.

    Returns:
      A function of `x`, [...] float32 or narrower without a dimension of 0, and
      `words`, [4] uint32 (the seed, and the two words of the first element's index) or
      None; it gives one [...] `rounding.out_dtype` a mode.
    """
    run = _run if options.sharding is None else _on_shards
    function = functools.partial(
        run, rounding=rounding, strides=strides, options=options
    )
    batched = jax.custom_batching.custom_vmap(jax.jit(function))

    @batched.def_vmap
    def _(
        axis_size: int, is_batched: Any, x: jax.Array, words: jax.Array | None
    ) -> tuple[Any, Any]:
        x_is_batched, words_are_batched = is_batched
        if not x_is_batched:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        of_batch = dataclasses.replace(
            options, sharding=known_sharding(x) or _batched_sharding(options.sharding)
        )
        if axis_size == 0:
            rounded = (jnp.zeros(x.shape, rounding.out_dtype),) * len(rounding.modes)
        elif words is None or not words_are_batched:
            rounded = batchable(rounding, strides.batched(), of_batch)(x, words)
        elif of_batch.sharding is None:
            rounded = _each_by_words(batched, x, words)
        else:
            rounded = _on_shards(
                x, words, rounding=rounding, strides=strides, options=of_batch
            )
        return rounded, (True,) * len(rounding.modes)

    return batched


def _each_by_words(
    run: Callable[..., Any], x: jax.Array, words: jax.Array
) -> tuple[jax.Array, ...]:
    """Rounds each member of a batch with words of its own, one after the other."""

    # As integers, since loops on a CPU change the payloads of narrow NaNs.
    def one(member: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        patterns, words = member
        return [
            jax.lax.bitcast_convert_type(y, f"uint{8 * y.dtype.itemsize}")
            for y in run(jax.lax.bitcast_convert_type(patterns, x.dtype), words)
        ]

    patterns = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    dtypes = [y.dtype for y in jax.eval_shape(run, x[0], words[0])]
    rounded = jax.lax.map(one, (patterns, words))
    return tuple(map(jax.lax.bitcast_convert_type, rounded, dtypes))


def _run(
    x: jax.Array,
    words: jax.Array | None,
    *,
    rounding: Rounding,
    strides: random.Strides,
    options: Options,
) -> tuple[jax.Array, ...]:
    arguments = [x] if words is None else [x, words]
    return tuple(
        _kernel.bind(
            *arguments, rounding=rounding, strides=strides, in_place=options.in_place
        )
    )


# Shards


def _on_shards(
    x: jax.Array,
    words: jax.Array | None,
    *,
    rounding: Rounding,
    strides: random.Strides,
    options: Options,
) -> tuple[jax.Array, ...]:
    """Runs the kernel on each device's shard, with the indices of the whole array.

    With [n, 4] words, `x` is a batch of as many members, which `strides` leave out.
    """
    sharding = options.sharding
    assert sharding is not None
    local = dataclasses.replace(options, sharding=None)
    parts = tuple(sharding.spec) + (None,) * (x.ndim - len(sharding.spec))
    is_batch = words is not None and words.ndim == 2
    of_element = strides.batched() if is_batch else strides

    def on_shard(x: jax.Array, words: jax.Array | None) -> tuple[jax.Array, ...]:
        run = batchable(rounding, strides, local)
        if words is None:
            return run(x, words)
        first = jnp.zeros(2, jnp.uint32)
        for dimension, axes in enumerate(parts):
            if axes is not None:
                place = jax.lax.axis_index(axes).astype(jnp.uint32)
                start = place * np.uint32(x.shape[dimension])
                by_word = [of_element.low[dimension], of_element.high[dimension]]
                first = first + start * np.array(by_word, np.uint32)
        offset = jnp.concatenate([jnp.zeros(2, jnp.uint32), first])

        def run_at_offset(x: jax.Array, words: jax.Array) -> tuple[jax.Array, ...]:
            return run(x, words + offset)

        if is_batch:
            return _each_by_words(run_at_offset, x, words)
        return run_at_offset(x, words)

    spec = jax.sharding.PartitionSpec(*parts)
    of_words = jax.sharding.PartitionSpec(parts[0] if is_batch else None)
    mesh = sharding.mesh
    run_on_shards = jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(spec, of_words),
        out_specs=spec,
        # All by default, but for those over which `jax.vmap` maps.
        axis_names=set(mesh.axis_names).difference(mesh.manual_axes or mesh.axis_names),
        check_vma=False,  # the interpreter does not know of it
    )
    return run_on_shards(x, words)


def known_sharding(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """Gives the sharding of an array, if it is known and over several devices."""
    if isinstance(x, jax.core.Tracer):  # known if the mesh's axes are explicit
        sharding = jax.typeof(x).sharding
        mesh = sharding.mesh
        sizes = [mesh.shape[axis] for axis in mesh.explicit_axes]
    else:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return None
        # Inside shard_map it is the same array on each device.
        is_local = bool(jax.sharding.get_abstract_mesh().manual_axes)
        sizes = [] if is_local else [sharding.mesh.size]
    return sharding if any(size > 1 for size in sizes) else None


def _batched_sharding(
    sharding: jax.sharding.NamedSharding | None,
) -> jax.sharding.NamedSharding | None:
    if sharding is None:
        return None
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)
    return jax.sharding.NamedSharding(sharding.mesh, spec)


def check_sharding(
    x: jax.Array, sharding: jax.sharding.NamedSharding | None
) -> jax.sharding.NamedSharding | None:
    """Gives `sharding`, checked against the shape of `x`.

    Raises:
      ValueError: it does not divide `x` evenly, or `x` has a symbolic shape.
    """
    random.check_sizes_known(x.shape)
    if sharding is None:
        return None
    try:
        sharding.shard_shape(x.shape)
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"`sharding` must divide `x`, of shape {x.shape}, evenly, got "
            f"{sharding.spec} over {dict(sharding.mesh.shape)}. Choose another spec, "
            'or backend "xla", which splits unevenly.'
        ) from error
    return sharding


# The kernel alone


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_bare(x: jax.Array, rounding: Rounding) -> tuple[jax.Array, ...]:
    """Rounds by `pallas_tpu.round_pallas_bare`, with the straight-through gradient."""
    return tuple(_bare_kernel.bind(x, rounding=rounding))


def _batch_bare(
    args: tuple[jax.Array], dimensions: tuple[int], *, rounding: Rounding
) -> tuple[tuple[jax.Array, ...], tuple[int, ...]]:
    (x,) = args
    if x.size == 0:
        rounded = (jnp.zeros(x.shape, rounding.out_dtype),) * len(rounding.modes)
    else:
        rounded = tuple(_bare_kernel.bind(x, rounding=rounding))
    return rounded, dimensions * len(rounded)


batching.primitive_batchers[_bare_kernel] = _batch_bare


@round_bare.defjvp
def _round_bare_jvp(
    rounding: Rounding, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    rounded = round_bare(*primals, rounding)
    return rounded, tangents * len(rounded)
