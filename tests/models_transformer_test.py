import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models

SMALL = dict(
    vocab_size=23,
    num_layers=3,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_width=20,
    rope_theta=100.0,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 23, (2, 9)), jnp.int32)


def make(**changes):
    return models.build(models.TransformerConfig(**SMALL | changes))


def random_params(model, seed=0):
    """Gives random weights, norms' scales included, without boxes."""
    params = nn.meta.unbox(model.init(jax.random.key(0), TOKENS)["params"])
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(generator.normal(size=leaf.shape) * 0.3, jnp.float32),
        params,
    )


def paths(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in keys): leaf for keys, leaf in flat}


# An independent transformer, in NumPy and float64, one sequence and head at a time.


def reference(params, tokens, config):
    p = {path: np.asarray(leaf, np.float64) for path, leaf in paths(params).items()}
    x = p["embed/embedding"][tokens]
    for layer in range(config.num_layers):
        of_layer = {
            path.removeprefix("layers/"): leaf[layer]
            for path, leaf in p.items()
            if path.startswith("layers/")
        }
        x = x + reference_attention(
            reference_norm(x, of_layer["attention_norm/scale"], config),
            of_layer,
            config,
        )
        h = reference_norm(x, of_layer["mlp_norm/scale"], config)
        gate = h @ of_layer["mlp/gate/kernel"]
        hidden = gate / (1 + np.exp(-gate)) * (h @ of_layer["mlp/up/kernel"])
        x = x + hidden @ of_layer["mlp/down/kernel"]
    x = reference_norm(x, p["final_norm/scale"], config)
    head = p["embed/embedding"].T if config.tie_embeddings else p["head/kernel"]
    return x @ head


def reference_norm(x, scale, config):
    rms = np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon)
    return x / rms * scale


def reference_attention(x, p, config):
    length, head_size = x.shape[0], config.width // config.num_heads
    frequencies = config.rope_theta ** (-np.arange(head_size // 2) * 2 / head_size)
    turns = np.exp(1j * np.arange(length)[:, None] * frequencies)

    def turned(head):
        pairs = (head[:, : head_size // 2] + 1j * head[:, head_size // 2 :]) * turns
        return np.concatenate([pairs.real, pairs.imag], -1)

    total = 0
    for n in range(config.num_heads):
        shared = n * config.num_kv_heads // config.num_heads
        own, common = (
            slice(head * head_size, (head + 1) * head_size) for head in (n, shared)
        )
        query = turned(x @ p["attention/query/kernel"][:, own])
        key = turned(x @ p["attention/key/kernel"][:, common])
        value = x @ p["attention/value/kernel"][:, common]
        scores = query @ key.T / np.sqrt(head_size)
        scores[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        total = total + weights @ value @ p["attention/out/kernel"][own]
    return total


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_logits_are_those_of_an_independent_transformer(num_kv_heads, tie_embeddings):
    model = make(num_kv_heads=num_kv_heads, tie_embeddings=tie_embeddings)
    params = random_params(model)
    found = jax.jit(model.apply)({"params": params}, TOKENS)
    assert found.dtype == jnp.float32
    for row, tokens in zip(found, np.asarray(TOKENS), strict=True):
        expected = reference(params, tokens, model.config)
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-5)


def test_logits_depend_on_no_later_token():
    model = make()
    params = random_params(model)
    apply = jax.jit(model.apply)
    before = apply({"params": params}, TOKENS)
    after = apply({"params": params}, TOKENS.at[:, 5].set((TOKENS[:, 5] + 1) % 23))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any()


def test_remat_gives_the_same_gradients():
    def gradient(remat):
        model = make(remat=remat)
        params = random_params(model)

        def loss(params):
            return jnp.mean(model.apply({"params": params}, TOKENS) ** 2)

        return jax.jit(jax.grad(loss))(params)

    expected = gradient("none")
    for remat in ("dots", "full"):
        # The same operations, but fused otherwise: units in the last place.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(
                a, b, rtol=1e-4, atol=1e-5 * float(abs(b).max())
            ),
            gradient(remat),
            expected,
        )


def test_remat_keeps_less():
    def kept(remat):
        model = make(remat=remat, num_layers=8)
        params = random_params(model)

        def loss(params):
            return jnp.mean(model.apply({"params": params}, TOKENS) ** 2)

        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert kept("full") < kept("dots") < kept("none")


def test_parameters_have_their_documented_paths_and_named_axes():
    model = make(tie_embeddings=False)
    boxed = model.init(jax.random.key(0), TOKENS)["params"]
    shapes = {path: leaf.shape for path, leaf in paths(nn.meta.unbox(boxed)).items()}
    assert shapes == {
        "embed/embedding": (23, 16),
        "layers/attention_norm/scale": (3, 16),
        "layers/attention/query/kernel": (3, 16, 16),
        "layers/attention/key/kernel": (3, 16, 8),
        "layers/attention/value/kernel": (3, 16, 8),
        "layers/attention/out/kernel": (3, 16, 16),
        "layers/mlp_norm/scale": (3, 16),
        "layers/mlp/gate/kernel": (3, 16, 20),
        "layers/mlp/up/kernel": (3, 16, 20),
        "layers/mlp/down/kernel": (3, 20, 16),
        "final_norm/scale": (16,),
        "head/kernel": (16, 23),
    }
    names = jax.tree.map(
        tuple, nn.get_partition_spec(boxed), is_leaf=lambda x: not isinstance(x, dict)
    )
    flat, _ = jax.tree_util.tree_flatten_with_path(
        names, is_leaf=lambda x: isinstance(x, tuple)
    )
    named = {"/".join(key.key for key in keys): axes for keys, axes in flat}
    assert named.keys() == shapes.keys()
    for path, axes in named.items():
        assert len(axes) == len(shapes[path])
        assert all(isinstance(axis, str) for axis in axes)
        assert (axes[0] == "layers") == path.startswith("layers/")


def test_layers_start_differently():
    params = nn.meta.unbox(make().init(jax.random.key(0), TOKENS)["params"])
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    assert (kernel[0] != kernel[1]).any()


def test_bfloat16_products_have_float32_parameters_and_logits():
    model = make(dtype="bfloat16")
    params = random_params(model)
    logits = jax.jit(model.apply)({"params": params}, TOKENS)
    assert logits.dtype == jnp.float32
    exact = jax.jit(make().apply)({"params": params}, TOKENS)
    relative = float(jnp.linalg.norm(logits - exact) / jnp.linalg.norm(exact))
    # Some 20 roundings of relative error 2^-9 one after the other, at random.
    assert 0 < relative < 20 * 2**-9
    initial = nn.meta.unbox(model.init(jax.random.key(0), TOKENS))
    assert {leaf.dtype for leaf in jax.tree.leaves(initial)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 20}, "`width` must be a multiple of 2 . num_heads = 8"),
        ({"num_kv_heads": 3}, "`num_kv_heads` must divide num_heads = 4, got 3"),
        ({"num_layers": 0}, "`num_layers` must be positive, got 0"),
        ({"vocab_size": -1}, "`vocab_size` must be positive, got -1"),
        ({"mlp_width": 0}, "`mlp_width` must be positive"),
        ({"norm_epsilon": 0.0}, "`norm_epsilon` must be positive"),
        ({"remat": "some"}, "`remat` must be one of none, dots, full, got 'some'"),
        ({"dtype": "int8"}, "`dtype` must be one of float32, bfloat16, float16"),
    ],
)
def test_bad_shapes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        models.TransformerConfig(**SMALL | changes)


# Segments

SEGMENTS = jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 2, 2], [3] * 9], jnp.int32)
PARTS = ((0, slice(0, 3)), (0, slice(3, 7)), (0, slice(7, 9)), (1, slice(0, 9)))


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_each_segment_has_the_logits_that_it_has_alone(remat):
    model = make(remat=remat)
    params = random_params(model)
    logits = model.apply({"params": params}, TOKENS, SEGMENTS)
    for row, part in PARTS:
        alone = reference(params, np.asarray(TOKENS)[row, part], model.config)
        # Float32 against float64, and positions that begin elsewhere.
        np.testing.assert_allclose(logits[row, part], alone, rtol=1e-3, atol=1e-4)


def test_a_segment_does_not_see_another():
    model = make()
    params = random_params(model)

    def first_logits(tokens):
        return model.apply({"params": params}, tokens, SEGMENTS)

    changed = first_logits(TOKENS.at[0, 3:7].set((TOKENS[0, 3:7] + 1) % 23))
    logits = first_logits(TOKENS)
    others = [0, 1, 2, 7, 8]
    np.testing.assert_array_equal(changed[0, others], logits[0, others])
    assert (changed[0, 3:7] != logits[0, 3:7]).any(axis=-1).all()
    # Without segments it does.
    plain = model.apply({"params": params}, TOKENS)
    assert not np.allclose(plain[0, 7:], logits[0, 7:], atol=1e-2)
    np.testing.assert_array_equal(plain[0, 0], logits[0, 0])
