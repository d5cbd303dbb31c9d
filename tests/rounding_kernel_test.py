import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu
from arrays import normal, words
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mixprec
from mixprec.rounding import platforms

KEY = jax.random.key(0)
BACKENDS = ("xla", "pallas")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
SPECS = [
    PartitionSpec("a", "b"),
    PartitionSpec(("a", "b"), None),
    PartitionSpec(None, ("b", "a")),
    PartitionSpec("b"),
    PartitionSpec(),
]


def round_stochastically(x, **options):
    return mixprec.round_to(x, mode="stochastic", key=KEY, **options)


def with_key(x, key, backend="pallas"):
    return mixprec.round_to(x, mode="stochastic", key=key, backend=backend)


def place(x, spec, kind):
    kinds = kind if isinstance(kind, tuple) else (kind,) * 2
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=kinds)
    return jax.device_put(x, NamedSharding(mesh, spec))


# Batches


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_gives_each_member_what_it_gets_alone(axis):
    x = normal(4, 4, 4)
    keys = jax.random.split(KEY, 4)

    def one(x, key, backend):
        return mixprec.round_to(x, mode="stochastic", key=key, backend=backend)

    alone = [one(jnp.take(x, i, axis), key, "xla") for i, key in enumerate(keys)]
    shared = [one(jnp.take(x, i, axis), keys[0], "xla") for i in range(4)]
    for backend in BACKENDS:

        def run(in_axes, x, keys, backend=backend):
            mapped = jax.vmap(lambda x, key: one(x, key, backend), in_axes)
            return words(mapped(x, keys))

        np.testing.assert_array_equal(run((axis, 0), x, keys), words(jnp.stack(alone)))
        np.testing.assert_array_equal(
            run((axis, None), x, keys[0]), words(jnp.stack(shared))
        )
        many = run((None, 0), x[0], keys)
        np.testing.assert_array_equal(many[2], words(one(x[0], keys[2], "xla")))
        gradient = jax.vmap(
            jax.grad(lambda x, b=backend: one(x, KEY, b).astype(jnp.float32).sum()),
            axis,
        )(x)
        np.testing.assert_array_equal(gradient, jnp.ones((4, 4, 4)))


def test_an_axis_of_size_0_can_be_mapped():
    over_keys = jax.vmap(lambda x, key: with_key(x, key), (None, 0))
    assert over_keys(normal(3), jax.random.split(KEY, 0)).shape == (0, 3)
    for x in (
        jnp.zeros((0, 8)),
        place(jnp.zeros((0, 8)), PartitionSpec(None, "a"), AxisType.Explicit),
    ):
        for backend in BACKENDS:
            run = jax.vmap(lambda x, b=backend: round_stochastically(x, backend=b))
            for found in (run(x), jax.jit(run)(x)):
                assert (found.shape, found.dtype) == ((0, 8), jnp.bfloat16)
                assert jax.typeof(found).sharding == jax.typeof(x).sharding


@pytest.mark.parametrize("round_it", [round_stochastically, mixprec.round_down_and_up])
def test_a_batch_of_symbolic_size_is_refused(round_it):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32)
    options = {"backend": "pallas"} if round_it is round_stochastically else {}
    mapped = jax.jit(jax.vmap(lambda x: round_it(x, **options)))
    with pytest.raises(ValueError, match=r"`x` must have a shape .*, got \(b, 4\)"):
        jax.export.export(mapped)(x)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_batch_compiles_for_tpu_without_copies(axis):
    def one(x):
        return round_stochastically(x, backend="pallas")

    x = jax.ShapeDtypeStruct((4096, 8, 1024), jnp.float32)
    for generation in ("v5e:2x2", "tpu7x:2x2x1"):
        run = jax.jit(jax.vmap(one, axis, axis))
        compiled = tpu.compile_for(generation, run, x)
        assert tpu.kernels(compiled) == 1
        assert tpu.moves(compiled, x.shape) == []
        assert compiled.memory_analysis().temp_size_in_bytes <= 128 * 1024


@pytest.mark.tpu_compile
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("in_axes", [(0, 0), (None, 0)], ids=str)
def test_a_batch_of_keys_compiles_for_tpu_without_copies(in_axes, dtype):
    def one(x, key, to=jnp.bfloat16):
        return mixprec.round_to(x, to, mode="stochastic", key=key, backend="pallas")

    shape = (16, 1024, 2048)
    x = jax.ShapeDtypeStruct(shape if in_axes[0] == 0 else shape[1:], dtype)
    keys = jax.ShapeDtypeStruct((16, 2), jnp.uint32)
    compiled = tpu.compile_for("v5e:2x2", jax.jit(jax.vmap(one, in_axes)), x, keys)
    assert tpu.kernels(compiled) == 1
    assert tpu.moves(compiled, x.shape) == []
    assert compiled.memory_analysis().temp_size_in_bytes <= 128 * 1024
    # Floats of 8 bits are copied once; the compiler fails without.
    to_one_byte = jax.vmap(functools.partial(one, to=jnp.float8_e4m3fn), in_axes)
    compiled = tpu.compile_for("v5e:2x2", jax.jit(to_one_byte), x, keys)
    assert tpu.kernels(compiled) == 1


def test_vmap_over_keys_keeps_the_payloads_of_nans():
    patterns = np.random.default_rng(0).integers(0x7F800000, 2**31, 64, np.uint32)
    x = jnp.asarray(patterns.view(np.float32))
    keys = jax.random.split(KEY, 3)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e5m2):
        for source in (jnp.float32, jnp.bfloat16):
            is_narrow = source == jnp.bfloat16
            y = mixprec.round_to(x, mode="toward_zero") if is_narrow else x
            found = [
                words(
                    jax.vmap(
                        lambda key, y=y, d=dtype, b=b: mixprec.round_to(
                            y, d, mode="stochastic", key=key, backend=b
                        )
                    )(keys)
                )
                for b in BACKENDS
            ]
            np.testing.assert_array_equal(*found)


# Shards


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shards_draw_what_the_whole_array_draws(spec, kind, backend):
    x = normal(64, 96)
    expected = words(round_stochastically(x))
    placed = place(x, spec, kind)
    found = round_stochastically(placed, backend=backend)
    np.testing.assert_array_equal(words(found), expected)
    assert found.sharding.is_equivalent_to(placed.sharding, 2)
    # A tracer tells its sharding only in a mesh with explicit axes.
    sharding = placed.sharding if kind == AxisType.Auto else None

    @jax.jit
    def jitted(x):
        return round_stochastically(x, backend=backend, sharding=sharding)

    compiled = jitted.lower(placed).compile()
    np.testing.assert_array_equal(words(compiled(placed)), expected)
    assert not any(name in compiled.as_text() for name in COLLECTIVES)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_any_number_of_devices_draws_the_same(devices):
    x = normal(3, 64, 40)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("a",))
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "a")))
    for backend in BACKENDS:
        found = round_stochastically(placed, backend=backend)
        np.testing.assert_array_equal(words(found), words(round_stochastically(x)))


def test_shards_in_a_batch_draw_what_each_member_draws():
    x = normal(5, 64, 96)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("a", "b"))

    def one(x):
        return round_stochastically(x, backend="pallas", sharding=sharding)

    found = words(jax.jit(jax.vmap(one))(x))
    for member, expected in zip(found, x, strict=True):
        np.testing.assert_array_equal(member, words(round_stochastically(expected)))


@pytest.mark.parametrize("spec", [("a", "b"), (None, "a", "b"), ("b",), ()], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_batch_can_itself_be_split(kind, spec):
    x = normal(8, 8, 16)
    keys = jax.random.split(KEY, 8)
    placed = place(x, PartitionSpec(*spec), kind)
    # With explicit axes `jax.vmap` wants all it maps over to be split alike.
    placed_keys = jax.device_put(
        keys, NamedSharding(placed.sharding.mesh, PartitionSpec(*spec[:1]))
    )

    def one(x, key, backend="pallas"):
        return mixprec.round_to(x, mode="stochastic", key=key, backend=backend)

    for keys_in, placed_in, axes in (
        (KEY, KEY, (0, None)),
        (keys, placed_keys, (0, 0)),
    ):
        expected = words(jax.vmap(lambda x, key: one(x, key, "xla"), axes)(x, keys_in))
        for run in (jax.vmap(one, axes), jax.jit(jax.vmap(one, axes))):
            np.testing.assert_array_equal(words(run(placed, placed_in)), expected)
    over_keys = jax.vmap(jax.vmap(one, (0, None)), (None, 0))
    expected = words(
        jax.vmap(jax.vmap(lambda x, k: one(x, k, "xla"), (0, None)), (None, 0))(x, keys)
    )
    np.testing.assert_array_equal(words(over_keys(placed, keys)), expected)


# Axes of x and key in each of nested maps, the inner first; the specs of both.
NESTED = [
    ([(None, 0)], (), ("a",)),
    ([(None, 0)], (None, "b"), ("a",)),
    ([(None, 0)], ("a", "b"), ()),
    ([(0, 0), (0, 0)], ("a", "b"), ("a", "b")),
    ([(0, 0), (0, 0)], ("a",), ("a",)),
    ([(0, None), (0, 0)], ("a", "b"), ("a",)),
    ([(None, 0), (0, None)], ("a",), ("b",)),
    ([(None, 0), (0, None)], ("a",), ()),
    ([(None, 0), (0, 0)], ("a",), ("a", "b")),
    ([(0, None), (None, 0)], ("a",), ("b",)),
    ([(2, None), (1, 0)], ("a", "b"), ("b",)),
]


@pytest.mark.parametrize(("axes", "of_x", "of_keys"), NESTED, ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_nested_batches_of_any_split(kind, axes, of_x, of_keys):
    members = [in_x is not None for in_x, _ in axes].count(True)
    batches = [in_keys is not None for _, in_keys in axes].count(True)
    x = normal(*(8, 8, 8, 16)[2 - members :])
    keys = jax.random.split(KEY, (8,) * batches)
    placed = place(x, PartitionSpec(*of_x), kind)
    placed_keys = place(keys, PartitionSpec(*of_keys), kind)

    def mapped(backend):
        run = functools.partial(with_key, backend=backend)
        for in_axes in axes:
            run = jax.vmap(run, in_axes)
        return run

    expected = words(mapped("xla")(x, keys))
    for run in (mapped("pallas"), jax.jit(mapped("pallas"))):
        np.testing.assert_array_equal(words(run(placed, placed_keys)), expected)


def test_keys_on_a_mesh_round_what_is_on_none():
    keys = jax.random.split(KEY, 8)
    placed = place(keys, PartitionSpec("b"), AxisType.Explicit)
    x = normal(8, 16)
    expected = words(jax.vmap(lambda key: with_key(x, key, "xla"))(keys))
    run = jax.vmap(lambda key: with_key(x, key))
    np.testing.assert_array_equal(words(run(placed)), expected)
    np.testing.assert_array_equal(words(jax.jit(run)(placed)), expected)


@pytest.mark.parametrize("spmd_axis_name", [None, "a"])
def test_a_batch_whose_split_is_not_known_is_not_gathered(spmd_axis_name, caplog):
    x = normal(4, 8, 16)
    placed = place(x, PartitionSpec("a", None, "b"), AxisType.Auto)
    member = NamedSharding(placed.sharding.mesh, PartitionSpec(None, "b"))

    def one(x):
        return round_stochastically(x, backend="pallas", sharding=member)

    platforms._log_fallback.cache_clear()
    run = jax.jit(jax.vmap(one, spmd_axis_name=spmd_axis_name))
    with caplog.at_level(logging.WARNING):
        compiled = run.lower(placed).compile()
    assert bool(caplog.records) == (spmd_axis_name is None)
    found = compiled(placed)
    np.testing.assert_array_equal(
        words(found), words(jax.vmap(round_stochastically)(x))
    )
    assert found.sharding.is_equivalent_to(placed.sharding, 3)
    assert not any(name in compiled.as_text() for name in COLLECTIVES)


def test_axes_that_xla_splits_beside_explicit_ones_are_not_gathered(caplog):
    x = normal(8, 16)
    kinds = (AxisType.Explicit, AxisType.Auto)
    placed = place(x, PartitionSpec("a", "b"), kinds)
    for sharding in (None, placed.sharding):
        platforms._log_fallback.cache_clear()
        caplog.clear()

        @jax.jit
        def run(x, sharding=sharding):
            return round_stochastically(x, backend="pallas", sharding=sharding)

        with caplog.at_level(logging.WARNING):
            compiled = run.lower(placed).compile()
        assert bool(caplog.records) == (sharding is None)
        found = compiled(placed)
        np.testing.assert_array_equal(words(found), words(round_stochastically(x)))
        assert found.sharding.is_equivalent_to(placed.sharding, 2)
        assert not any(name in compiled.as_text() for name in COLLECTIVES)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [("a", "b"), ("a",)], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_inside_shard_map_over_some_axes_the_others_split(kind, spec, check_vma):
    x, keys = normal(8, 16), jax.random.split(KEY, 3)
    placed = place(x, PartitionSpec(*spec), kind)
    mesh = placed.sharding.mesh
    rest = NamedSharding(mesh, PartitionSpec(None, *spec[1:]))

    def run(backend, **options):
        def on_device(x, keys):
            rounded = round_stochastically(x, backend=backend, **options)
            several = jax.vmap(
                lambda key: mixprec.round_to(
                    x, mode="stochastic", key=key, backend=backend, **options
                )
            )
            return rounded, several(keys)

        parts = PartitionSpec("a"), PartitionSpec(None, "a")
        return jax.jit(
            jax.shard_map(
                on_device,
                mesh=mesh,
                in_specs=(parts[0], PartitionSpec()),
                out_specs=parts,
                axis_names={"a"},
                check_vma=check_vma,
            )
        )(placed, keys)

    expected = run("xla")
    for found in (run("pallas"), run("pallas", sharding=rest)):
        for y, z in zip(found, expected, strict=True):
            np.testing.assert_array_equal(words(y), words(z))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_inside_shard_map_each_device_can_have_its_key(backend, check_vma):
    x = normal(16, 10)
    keys = jax.random.split(KEY, 8)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def one(x, key):
        return mixprec.round_to(
            x, mode="stochastic", key=key, backend=backend, out_dtype=jnp.float32
        )

    def on_device(x, keys):
        weights = 1.0 + jax.lax.axis_index("a").astype(jnp.float32)
        value, pull = jax.vjp(lambda x: one(x, keys[0]) * weights, x)
        (gradient,) = pull(jnp.ones_like(value))
        if not check_vma:  # then nothing sums over devices by itself
            gradient = jax.lax.psum(gradient, "a")
        return value[None] / weights, gradient

    value, gradient = jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("a")),
            out_specs=(PartitionSpec("a"), PartitionSpec()),
            check_vma=check_vma,
        )
    )(x, keys)
    for found, key in zip(value, keys, strict=True):
        expected = mixprec.round_to(
            x, mode="stochastic", key=key, out_dtype=jnp.float32
        )
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(gradient, jnp.full(x.shape, sum(range(1, 9))))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_each_shard_is_an_array_of_its_own(check_vma, caplog):
    x = normal(64, 96)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("a")
    platforms._log_fallback.cache_clear()
    for backend in BACKENDS:
        run = jax.jit(
            jax.shard_map(
                jax.vmap(lambda x, b=backend: round_stochastically(x, backend=b)),
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
                check_vma=check_vma,
            )
        )
        expected = words(jax.vmap(round_stochastically)(x))
        with caplog.at_level(logging.WARNING):
            np.testing.assert_array_equal(words(run(x)), expected)
    fallbacks = [r for r in caplog.records if "interpreter" in r.getMessage()]
    assert len(fallbacks) == check_vma


def test_a_sharding_that_does_not_divide_is_refused():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    for spec in (PartitionSpec(None, "b"), PartitionSpec("a", None, "b")):
        with pytest.raises(ValueError, match="`sharding` must divide `x`, of shape"):
            round_stochastically(
                normal(4, 6), backend="pallas", sharding=NamedSharding(mesh, spec)
            )


def test_a_sharding_that_is_not_that_of_the_array_is_refused():
    x = place(normal(8, 16), PartitionSpec("a", "b"), AxisType.Explicit)
    mesh = x.sharding.mesh

    def run(spec, mesh=mesh):
        sharding = NamedSharding(mesh, spec)
        return lambda x: round_stochastically(x, backend="pallas", sharding=sharding)

    other = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    unreduced = PartitionSpec("a", unreduced={"b"})
    inside = jax.shard_map(
        run(PartitionSpec("a")),
        mesh=mesh,
        in_specs=PartitionSpec("a"),
        out_specs=PartitionSpec("a"),
    )
    for function, message in (
        (run(PartitionSpec("b")), "must be that of the type of `x`, P.'a', 'b'., got"),
        (run(PartitionSpec("a"), other), "must be over the mesh of `x`, {'a': 2, 'b'"),
        (run(unreduced), "must leave no sum over devices open, got P.'a', unreduced"),
        (inside, "must leave out the mesh axes of the shard_map around it"),
    ):
        given = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a")))
        for wrap in (lambda f: f, jax.jit):
            with pytest.raises(ValueError, match=f"`sharding` {message}"):
                wrap(function)(given if function is inside else x)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shards_compile_for_tpu_without_communication_or_copies(spec):
    devices = np.array(tpu.topology("v5e:2x2").devices).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((4096, 8192), jnp.float32, sharding=sharding)

    @jax.jit
    def run(x):
        return round_stochastically(x, backend="pallas", sharding=sharding)

    compiled = run.lower(x).compile()
    assert tpu.kernels(compiled) == 1
    assert tpu.moves(compiled, sharding.shard_shape(x.shape)) == []
    assert not any(name in compiled.as_text() for name in COLLECTIVES)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_gathered_after_rounding_is_narrow(backend, out_dtype, generation):
    devices = np.array(tpu.topology(generation).devices)
    mesh = jax.sharding.Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=sharding)
    x = jax.ShapeDtypeStruct((8192, 4096), out_dtype, sharding=sharding)

    @jax.jit
    def run(x, w):
        rounded = round_stochastically(
            w,
            out_dtype=out_dtype,
            backend=backend,
            sharding=sharding if backend == "pallas" else None,
        )
        return jax.lax.with_sharding_constraint(x @ rounded, sharding)

    text = run.lower(x, w).compile().as_text()
    gathered = re.findall(r"= \(?(\w+)\[[\d,]*\]\S*.* all-gather(?:-start)?\(", text)
    assert gathered == ["bf16"]


# The kernel alone

BARE = [
    (7,),
    (5000,),
    (37, 300),
    (3, 5, 7),
    (50, 8, 128),
    (2, 3, 4, 5),
    (2, 3, 1, 5, 7),
]


@pytest.mark.parametrize("shape", BARE, ids=str)
def test_round_down_and_up_gives_the_bracket(shape):
    x = normal(*shape)
    down, up = mixprec.round_down_and_up(x)
    expected = mixprec.round_bracket(x, out_dtype=jnp.float32, backend="xla")
    np.testing.assert_array_equal(words(down), words(expected[0]))
    np.testing.assert_array_equal(words(up), words(expected[1]))
    gradient = jax.grad(lambda x: sum(y.sum() for y in mixprec.round_down_and_up(x)))
    np.testing.assert_array_equal(gradient(x), jnp.full(shape, 2.0))


def test_round_down_and_up_is_compiled_once_and_can_be_mapped(caplog):
    x = normal(3, 5, 7)
    expected = [words(y) for y in mixprec.round_down_and_up(x)]
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        mixprec.round_down_and_up(x)
    assert not [r for r in caplog.records if "mixprec_round" in r.getMessage()]
    for axis in range(3):
        found = jax.vmap(mixprec.round_down_and_up, axis, axis)(x)
        for y, z in zip(found, expected, strict=True):
            np.testing.assert_array_equal(words(y), z)
    down, _ = jax.vmap(mixprec.round_down_and_up)(jnp.zeros((0, 4)))
    assert down.shape == (0, 4)


def test_round_down_and_up_is_for_one_device():
    x = normal(8, 16)
    for kind in (AxisType.Auto, AxisType.Explicit):
        placed = place(x, PartitionSpec("a"), kind)
        for run in (mixprec.round_down_and_up, jax.jit(mixprec.round_down_and_up)):
            with pytest.raises(ValueError, match="`x` must be on one device"):
                run(placed)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    for check_vma in (True, False):
        run = jax.shard_map(
            mixprec.round_down_and_up,
            mesh=mesh,
            in_specs=PartitionSpec("a"),
            out_specs=PartitionSpec("a"),
            check_vma=check_vma,
        )
        for y, z in zip(run(x), mixprec.round_down_and_up(x), strict=True):
            np.testing.assert_array_equal(words(y), words(z))


@pytest.mark.tpu_compile
@pytest.mark.parametrize("shape", [*BARE, (2048, 4096), (8000, 4097)], ids=str)
def test_round_down_and_up_is_one_kernel_and_nothing_else(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    function = jax.jit(mixprec.round_down_and_up)
    for generation in ("v4:2x2x1", "v5e:2x2", "tpu7x:2x2x1"):
        with tpu.on_device(generation):
            lowered = function.trace(x).lower(lowering_platforms=("tpu",))
        operations = re.findall(
            r"^ *(?:%\S+ = )?\"?([a-z]+\.?\w*)", lowered.as_text(), re.M
        )
        assert operations == ["module", "func.func", "stablehlo.custom_call", "return"]
        assert "@tpu_custom_call(%arg0)" in lowered.as_text()
        assert tpu.kernels(tpu.compile_for(generation, function, x)) == 1
