import flax.linen as nn
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
import tpu

import mixprec
import models
from mixprec.training import program, sharding, state, step

SIZES = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}
CONFIG = models.TransformerConfig(
    vocab_size=64, num_layers=2, width=32, num_heads=4, num_kv_heads=2, mlp_width=64
)
LENGTH, BATCH = 16, 16
TOKENS = np.random.default_rng(0).integers(0, 64, (20, BATCH, LENGTH + 1), np.int32)
MESHES = [
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 2},
    {"sequence": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "tensor": 2, "sequence": 2},
]
STOCHASTIC = "params: .*/scale=keep, .*=stochastic; gather=fsdp"


# Training on a mesh


def train(policy, layout, steps):
    """Gives the losses from weights made on one device, and what is left at the end."""
    model = models.build(CONFIG)
    model = mixprec.wrap(model, policy) if policy else model
    optimizer = optax.adamw(1e-2)
    first = state.init_state(
        model, optimizer, layouts.make(), seed=0, sequence_length=LENGTH
    )
    split = state.abstract_state(model, optimizer, layout, sequence_length=LENGTH)
    current = jax.device_put(first, jax.tree.map(lambda leaf: leaf.sharding, split))
    train_step = step.make_train_step(
        model,
        optimizer,
        optax.constant_schedule(1e-2),
        seed=0,
        microbatches=2,
        boxes=state.make_boxes(model, LENGTH),
    )
    losses = []
    for tokens in TOKENS[:steps]:
        with layout.context():
            current, measured = train_step(current, layout.place(tokens, BATCH))
        losses.append(measured.compute()["loss"])
    return np.array(losses), current


@pytest.fixture(scope="module")
def on_one_device():
    return {
        policy: train(policy, layouts.make(), steps)
        for policy, steps in (("", 20), (STOCHASTIC, 1))
    }


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_on_every_mesh_training_is_that_of_one_device(sizes, on_one_device):
    layout = layouts.make(**sizes)
    losses, last = train("", layout, 20)
    expected, _ = on_one_device[""]
    # Sums in another order: 2^-24 of the loss each time, and 20 steps that pass it on.
    np.testing.assert_allclose(losses[0], expected[0], rtol=2**-21)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    boxes = state.make_boxes(models.build(CONFIG), LENGTH)
    wanted = jax.tree.leaves(layout.params_shardings(boxes))
    moments = last.optimizer_state[0]
    for tree in (last.params, moments.mu, moments.nu):
        for leaf, split in zip(jax.tree.leaves(tree), wanted, strict=True):
            assert leaf.sharding.is_equivalent_to(split, leaf.ndim)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_on_every_mesh_the_first_step_draws_alike(sizes, backend, on_one_device):
    losses, _ = train(f"{STOCHASTIC}; backend={backend}", layouts.make(**sizes), 1)
    expected, _ = on_one_device[STOCHASTIC]
    np.testing.assert_allclose(losses, expected, rtol=2**-21)


def test_other_draws_show_in_the_first_loss(on_one_device):
    other, _ = train(STOCHASTIC.replace("stochastic", "toward_zero"), layouts.make(), 1)
    expected, _ = on_one_device[STOCHASTIC]
    assert abs(other / expected - 1).max() > 2**-18


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_initial_weights_are_from_the_same_draws_on_every_mesh(sizes):
    def init(layout):
        model, optimizer = models.build(CONFIG), optax.sgd(1.0)
        first = state.init_state(
            model, optimizer, layout, seed=0, sequence_length=LENGTH
        )
        return [np.asarray(leaf) for leaf in jax.tree.leaves(first.params)]

    for found, expected in zip(
        init(layouts.make(**sizes)), init(layouts.make()), strict=True
    ):
        # The polynomials of a normal draw, with or without fused multiply-adds, as the
        # shard's shape has it: 2 ulp of the last step, and what the steps before pass.
        np.testing.assert_array_max_ulp(found, expected, maxulp=4)


# Compiled for TPUs


def compile_for(name, policy, *, dtype="float32", **sizes):
    """Compiles the train step of a model in float32 products; gives its operations."""
    config = models.TransformerConfig(
        vocab_size=512,
        num_layers=2,
        width=512,
        num_heads=8,
        num_kv_heads=8,
        mlp_width=1024,
        remat="full",
        dtype=dtype,
    )
    model = models.build(config)
    model = mixprec.wrap(model, policy) if policy else model
    layout = layouts.make(devices=tpu.topology(name).devices, **sizes)
    optimizer = optax.adamw(1e-3)
    train_step = step.make_train_step(
        model,
        optimizer,
        optax.constant_schedule(1e-3),
        seed=0,
        microbatches=1,
        boxes=state.make_boxes(model, 128),
    )
    abstract = state.abstract_state(model, optimizer, layout, sequence_length=128)
    tokens = jax.ShapeDtypeStruct(
        (64, 129), jnp.int32, sharding=layout.sharding("batch")
    )
    # Or else XLA narrows float32 to bfloat16 by itself, before it gathers.
    with layout.context(), jax.default_matmul_precision("highest"):
        compiled = train_step.lower(abstract, tokens).compile()
    return program.operations(compiled.as_text())


LAYERS = 2 * (4 * 512 * 512 + 3 * 512 * 1024)  # parameters, of kernels alone
EMBEDDING = 512 * 512
# In the forward pass, and those of layers in the recomputation.
GATHERED = 2 * LAYERS + EMBEDDING
# The embedding's from both of its uses.
REDUCED = LAYERS + 2 * EMBEDDING


def sent(operations, *, gradients):
    """Adds up the bytes, by dtype, of collectives of whole kernels.

    On a large mesh this compiler gathers by sums too, of shards among zeros; what is
    summed for a gradient has the name of the operation that makes it, and that is not
    one of the recomputation.
    """
    total = {}
    for operation in program.collectives(operations):
        is_gradient = (
            operation.kind == "all-reduce"
            and operation.name.endswith(("dot_general", "scatter-add"))
            and "rematted_computation" not in operation.name
        )
        for dtype, shape in operation.result:
            if np.prod(shape) >= EMBEDDING and is_gradient == gradients:
                size = int(np.prod(shape)) * program.size_of(dtype) * operation.times
                total[dtype] = total.get(dtype, 0) + size
    return total


@pytest.mark.tpu_compile
@pytest.mark.parametrize(("name", "fsdp"), [("v5p:2x2x2", 8), ("v5p:4x4x4", 64)])
def test_what_is_rounded_is_gathered_in_half_the_bytes(name, fsdp):
    kernels = compile_for(name, f"{STOCHASTIC}; backend=pallas", fsdp=fsdp)
    assert sent(kernels, gradients=False) == {"bf16": 2 * GATHERED}
    assert sent(kernels, gradients=True) == {"f32": 4 * REDUCED}
    # The kernel rounds the shard.
    shards = [o for o in kernels if "tpu_custom_call" in o.text]
    elements = [int(np.prod(shape)) for o in shards for _, shape in o.result]
    assert len(elements) == 2 * 7 + 1
    assert max(elements) == 512 * 1024 // fsdp


@pytest.mark.tpu_compile
def test_what_is_not_rounded_is_gathered_whole():
    plain = compile_for("v5p:4x4x4", "", fsdp=64)
    assert sent(plain, gradients=False)["f32"] >= 4 * GATHERED
    # Nor does XLA gather what it has rounded, without being told to.
    untold = compile_for("v5p:4x4x4", STOCHASTIC.replace("fsdp", "data"), fsdp=64)
    assert sent(untold, gradients=False)["f32"] >= 4 * GATHERED


@pytest.mark.tpu_compile
def test_gradients_are_summed_in_the_dtype_of_products():
    operations = compile_for("v5p:4x4x4", STOCHASTIC, dtype="bfloat16", fsdp=64)
    assert sent(operations, gradients=False) == {"bf16": 2 * GATHERED}
    assert sent(operations, gradients=True) == {"bf16": 2 * REDUCED}


# Errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("embed", "must be parts such as 'embed=fsdp', got 'embed'"),
        ("=fsdp", "must be parts such as"),
        ("embed=fsdp, embed=", "one rule for each name, got two for 'embed'"),
        ("embed=fdsp", "must name axes of the mesh, data, fsdp, tensor, sequence, got"),
        ("embed=data+", "must name axes of the mesh.* got ''"),
    ],
)
def test_rules_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        sharding.MeshConfig(**SIZES, rules=text)


def test_rules_are_read_in_their_order():
    assert sharding.parse_rules(" batch = data + fsdp,mlp=,embed=fsdp ") == (
        ("batch", ("data", "fsdp")),
        ("mlp", ()),
        ("embed", ("fsdp",)),
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 0}, "`data` must be positive, or -1 .* got 0"),
        ({"fsdp": -2}, "`fsdp` must be positive, or -1 .* got -2"),
        ({"fsdp": -1, "data": -1}, "one size of the mesh may be -1, got .*'data': -1"),
        ({"data": 16}, "must make up the 8 devices that there are, got .*'data': 16"),
        ({"data": 4}, "must make up the 8 devices"),
        ({"data": -1, "fsdp": 3}, "must make up the 8 devices"),
        ({"data": -1, "fsdp": 16}, "must make up the 8 devices"),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_layout(
            sharding.MeshConfig(**SIZES | sizes, rules=layouts.RULES), jax.devices()
        )


def test_one_size_is_what_is_left():
    config = sharding.MeshConfig(
        **SIZES | {"data": -1, "tensor": 2}, rules=layouts.RULES
    )
    assert dict(sharding.make_layout(config).mesh.shape) == SIZES | {
        "data": 4,
        "tensor": 2,
    }


@pytest.mark.parametrize(
    ("rules", "sizes", "message"),
    [
        (
            layouts.RULES.replace("mlp=tensor, ", ""),
            {},
            "must have one for 'mlp', an axis of `layers/mlp/down/kernel`.*'mlp='",
        ),
        (layouts.RULES + ", mpl=tensor", {}, "must name batch, .*: see 'mpl'"),
        (layouts.RULES.replace("batch=data+fsdp, ", ""), {}, "see 'batch'"),
        (
            layouts.RULES,
            {"tensor": 3},
            r"must divide `embed/embedding` \[64, 32\], got tensor=3 for 'vocab', of "
            "size 64",
        ),
        (
            layouts.RULES.replace("embed=fsdp", "embed=").replace("+fsdp", ""),
            {"fsdp": 2},
            "config.mesh.fsdp must be 1 where no rule makes use of it, got 2",
        ),
    ],
)
def test_rules_that_do_not_fit_the_parameters_are_refused(rules, sizes, message):
    boxes = state.make_boxes(models.build(CONFIG), LENGTH)
    with pytest.raises(ValueError, match=message):
        layouts.make(rules, **sizes).params_shardings(boxes)


def test_what_the_mesh_does_not_divide_is_refused():
    layout = layouts.make(data=2, fsdp=2, sequence=2)
    layout.check_divides({"batch": ("batch", 8), "length": ("length", 16)})
    layout.check_divides({"unknown": ("nothing", 7)})
    message = "must divide the batch = 6, got 4 parts for 'batch'"
    with pytest.raises(ValueError, match=message):
        layout.check_divides({"batch": ("the batch", 6)})
    with pytest.raises(ValueError, match="the length = 15, got 2 parts"):
        layout.check_divides({"batch": ("b", 8), "length": ("the length", 15)})


# Batches


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_a_batch_lies_where_the_rules_say(sizes):
    layout = layouts.make(**sizes)
    assert layout.rows(16) == slice(0, 16)
    placed = layout.place(TOKENS[0], BATCH)
    np.testing.assert_array_equal(placed, TOKENS[0])
    assert placed.sharding.is_equivalent_to(layout.sharding("batch", None), 2)
    assert placed.addressable_shards[0].data.shape[0] == 16 // layout.shares("batch")


def test_what_has_no_boxes_is_on_every_device():
    layout = layouts.make("batch=data", data=8)
    shardings = layout.params_shardings(
        {"w": jnp.ones(3), "b": nn.Partitioned(jnp.ones(3), names=(None,))}
    )
    assert all(split.is_fully_replicated for split in jax.tree.leaves(shardings))
