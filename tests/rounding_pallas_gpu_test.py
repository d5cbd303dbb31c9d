import functools
import re

import gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
from arrays import words

from mixprec.rounding import api, elements, formats, modes, pallas_gpu, random

SHAPES = [
    (),
    (1,),
    (7,),
    (1024,),
    (5000,),
    (32, 64),
    (37, 300),
    (3, 5, 7),
    (2, 1, 2, 9),
]
SEED = random.seed_from_key(11)


def inputs(shape):
    """Random patterns: every exponent, NaN and infinities among them."""
    words = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    return jnp.asarray(np.asarray(words).view(np.float32).reshape(shape))


def check_equal(x, rounding, strides=None, first=(0, 0)):
    """Compares the interpreted kernel with the operations of the XLA path."""
    if strides is None:
        strides = random.row_major_strides(x.shape)
    scalars = None
    if "stochastic" in rounding.modes:
        scalars = jnp.concatenate([SEED, jnp.array(first, jnp.uint32)])
    found = pallas_gpu.round_pallas(
        x, scalars, rounding=rounding, strides=strides, interpret=True
    )
    draw = None
    if scalars is not None:
        index = [
            word + np.uint32(start)
            for word, start in zip(
                random.index_words(x.shape, strides), first, strict=False
            )
        ]
        draw = elements.hashed(SEED, index, rounding)
    expected = elements.round_elements(x, rounding, draw)
    for name, y, z in zip(rounding.modes, found, expected, strict=True):
        assert y.dtype == z.dtype == rounding.out_dtype
        np.testing.assert_array_equal(words(y), words(z), err_msg=name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interpreted_kernel_equals_xla_everywhere(shape):
    for names in (modes.MODES, ("toward_zero", modes.NEXT), ("stochastic",)):
        check_equal(inputs(shape), api.make_rounding("bfloat16", names))


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("to_float32", [False, True])
@pytest.mark.parametrize("dtype", [f.dtype for f in formats.FORMATS])
def test_every_format_and_result(dtype, to_float32, overflow):
    out_dtype = jnp.float32 if to_float32 else None
    options = dict(out_dtype=out_dtype, overflow=overflow)
    check_equal(inputs((70, 200)), api.make_rounding(dtype, modes.MODES, **options))


@pytest.mark.parametrize(
    ("low", "high", "first"),
    [
        ((0, 1000, 10, 1), (0, 0, 0, 0), (0, 0)),  # a batch
        ((10**6, 1000, 20, 2), (0, 0, 0, 0), (5, 0)),  # a shard of the last dimension
        ((0, 0, 10, 1), (100, 1, 0, 0), (0, 7)),  # of more than 2^32 elements
    ],
)
def test_indices_follow_any_strides(low, high, first):
    x = jnp.full((4, 3, 100, 10), 1.001, jnp.float32)
    rounding = api.make_rounding("bfloat16", ("stochastic",))
    check_equal(x, rounding, random.Strides(low, high), first)


def test_dimensions_that_tell_nothing_are_merged():
    shape = (4, 1, 3, 100)
    whole = random.row_major_strides(shape)
    assert pallas_gpu._merge(shape, whole) == [(1200, 1, 0)]
    batch = random.row_major_strides(shape[1:]).batched()
    assert pallas_gpu._merge(shape, batch) == [(4, 0, 0), (300, 1, 0)]


def test_the_result_can_take_the_memory_of_the_input():
    x = inputs((37, 300))
    rounding = api.make_rounding("bfloat16", ("toward_zero",), out_dtype=jnp.float32)
    expected = words(elements.round_elements(x, rounding)[0])

    def run(x):
        return pallas_gpu.round_pallas(
            x,
            rounding=rounding,
            strides=random.row_major_strides(x.shape),
            in_place=True,
            interpret=True,
        )[0]

    np.testing.assert_array_equal(words(jax.jit(run, donate_argnums=0)(x)), expected)
    assert x.is_deleted()


def test_too_many_elements_are_refused():
    x = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
    rounding = api.make_rounding("bfloat16", ("toward_zero",))
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 elements"):
        jax.eval_shape(
            lambda x: pallas_gpu.round_pallas(
                x, rounding=rounding, strides=random.row_major_strides(x.shape)
            ),
            x,
        )


@pytest.mark.parametrize("dtype", [f.dtype for f in formats.FORMATS])
def test_interpreted_kernel_reads_every_narrow_float(dtype):
    of_input = formats.find_format(dtype)
    patterns = np.arange(1 << of_input.bits, dtype=np.uint32)
    x = jnp.asarray(patterns.astype(of_input.pattern_dtype).view(of_input.dtype))
    for result in ("bfloat16", "float8_e5m2"):
        check_equal(x, api.make_rounding(result, modes.MODES))


@pytest.mark.parametrize("dtype", [f.dtype for f in formats.FORMATS])
@pytest.mark.parametrize("mode", modes.MODES)
def test_lowers_to_one_kernel_for_cuda(mode, dtype):
    x = jax.ShapeDtypeStruct((37, 300), jnp.float32)
    key = 3 if mode == "stochastic" else None
    function = jax.jit(
        lambda x: api.round_to(x, dtype, mode=mode, key=key, backend="pallas")
    )
    module = gpu.export(function, x).mlir_module()
    assert module.count(gpu.KERNEL) == 1


def operations(compiled):
    """Gives the operations of a program that do something: no names, no constants."""
    entry = compiled.as_text().split("ENTRY")[1]
    found = re.findall(r"^ +(?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", entry, re.M)
    idle = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")
    return [operation for operation in found if operation not in idle]


@pytest.mark.gpu_compile
@pytest.mark.parametrize("chip", gpu.CHIPS)
@pytest.mark.parametrize("dtype", [f.dtype for f in formats.FORMATS])
def test_every_mode_and_format_compiles_to_one_operation(dtype, chip):
    x = jax.ShapeDtypeStruct((37, 300), jnp.float32)
    for mode in modes.MODES:
        for out_dtype in (None, jnp.float32):
            for backend, expected in (("pallas", "custom-call"), ("xla", "fusion")):
                function = functools.partial(
                    api.round_to,
                    dtype=dtype,
                    mode=mode,
                    key=3 if mode == "stochastic" else None,
                    overflow="saturate",
                    out_dtype=out_dtype,
                    backend=backend,
                )
                compiled = gpu.compile_for(chip, jax.jit(function), x)
                assert operations(compiled) == [expected]
                assert compiled.memory_analysis().temp_size_in_bytes == 0


@pytest.mark.gpu_compile
@pytest.mark.parametrize("chip", gpu.CHIPS)
@pytest.mark.parametrize("dtype", [f.dtype for f in formats.FORMATS])
def test_narrow_inputs_compile_to_one_operation(dtype, chip):
    x = jax.ShapeDtypeStruct((37, 300), dtype)
    for out_dtype in (jnp.float8_e5m2, jnp.float32):
        function = functools.partial(
            api.round_to,
            dtype=jnp.float8_e5m2,
            mode="stochastic",
            key=3,
            out_dtype=out_dtype,
            backend="pallas",
        )
        compiled = gpu.compile_for(chip, jax.jit(function), x)
        assert operations(compiled) == ["custom-call"]
        assert compiled.memory_analysis().temp_size_in_bytes == 0


@pytest.mark.gpu_compile
@pytest.mark.parametrize("kind", shapes.SHAPES)
@pytest.mark.parametrize("chip", gpu.CHIPS)
def test_every_shape_compiles_with_no_other_traffic(chip, kind):
    for shape in shapes.SHAPES[kind]:
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        for function in (
            functools.partial(api.round_to, mode="stochastic", key=3, backend="pallas"),
            functools.partial(api.round_bracket, backend="pallas"),
        ):
            compiled = gpu.compile_for(chip, jax.jit(function), x)
            assert operations(compiled) == ["custom-call"], shape
            # Of two results, their addresses.
            assert compiled.memory_analysis().temp_size_in_bytes <= 16


@pytest.mark.gpu_compile
def test_batches_gradients_and_results_in_place_compile():
    def stochastic(x):
        return api.round_to(
            x,
            mode="stochastic",
            key=3,
            out_dtype=jnp.float32,
            backend="pallas",
            in_place=True,
        )

    x = jax.ShapeDtypeStruct((64, 37, 300), jnp.float32)
    batch = gpu.compile_for(gpu.H200, jax.jit(jax.vmap(stochastic)), x)
    assert operations(batch).count("custom-call") == 1
    donated = jax.jit(stochastic, donate_argnums=0)
    memory = gpu.compile_for(gpu.H200, donated, x).memory_analysis()
    assert memory.alias_size_in_bytes == 4 * 64 * 37 * 300
    assert memory.temp_size_in_bytes == 0
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(stochastic(x) ** 2)))
    assert "custom-call" in operations(gpu.compile_for(gpu.H200, gradient, x))


@pytest.mark.gpu_compile
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [("a", "b"), (("a", "b"),), (None, "a")], ids=str)
def test_shards_compile_without_communication(spec, check_vma):
    devices = np.array(gpu.topology(gpu.H100, "1x1x4").devices).reshape(2, 2)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(devices, ("a", "b"), axis_types=auto)
    partition = jax.sharding.PartitionSpec(*spec)
    sharding = jax.sharding.NamedSharding(mesh, partition)
    x = jax.ShapeDtypeStruct((4096, 8192), jnp.float32, sharding=sharding)

    def stochastic(x, **options):
        return api.round_to(x, mode="stochastic", key=3, backend="pallas", **options)

    inside = jax.shard_map(
        stochastic,
        mesh=mesh,
        in_specs=partition,
        out_specs=partition,
        check_vma=check_vma,
    )
    for function in (functools.partial(stochastic, sharding=sharding), inside):
        compiled = gpu.compile_on(jax.jit(function), x)
        assert operations(compiled).count("custom-call") == 1
        # The words of the seed, and of the index where the shard begins.
        assert set(operations(compiled)) <= {"custom-call", "fusion", "partition-id"}
        assert compiled.memory_analysis().temp_size_in_bytes <= 16
