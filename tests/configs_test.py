import importlib

import jax
import jax.numpy as jnp
import ml_collections
import pytest

import train

NAMES = ("default", "small", "base", "large")


def get_config(name):
    return importlib.import_module(f"configs.{name}").get_config()


def keys(config, prefix=""):
    found = []
    for key, value in config.items():
        path = f"{prefix}{key}"
        nested = isinstance(value, ml_collections.ConfigDict)
        found += keys(value, path + ".") if nested else [path]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_config_becomes_a_wrapped_model_and_a_run(name):
    config = get_config(name)
    model = train.build_model(config)
    config.train.microbatches = 1  # the eight devices of the tests split them
    run = train.build_run(config)
    tokens = jax.ShapeDtypeStruct((1, run.dataset.config.sequence_length), jnp.int32)
    logits = jax.eval_shape(
        lambda tokens: model.init_with_output(jax.random.key(0), tokens)[0], tokens
    )
    assert logits.shape == (1, run.dataset.config.sequence_length, 256)
    assert run.resolved["model"]["width"] == config.model.width


@pytest.mark.parametrize("name", NAMES)
def test_no_config_adds_a_key_to_the_defaults(name):
    assert keys(get_config(name)) == keys(get_config("default"))


def count_parameters(name):
    model = train.build_model(get_config(name))
    tokens = jnp.zeros((1, 8), jnp.int32)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))
    return sum(leaf.size for leaf in jax.tree.leaves(variables))


def parameters_by_hand(layers, width, mlp_width, kv_fraction=1.0):
    attention = (2 + 2 * kv_fraction) * width**2
    norms = 2 * width
    return 256 * width + layers * (attention + 3 * width * mlp_width + norms) + width


@pytest.mark.parametrize(
    ("name", "layers", "width", "mlp_width", "kv_fraction"),
    [
        ("small", 4, 128, 352, 0.5),
        ("base", 12, 768, 2048, 1.0),
        ("large", 36, 1280, 3456, 1.0),
    ],
)
def test_sizes_are_those_that_the_configs_claim(
    name, layers, width, mlp_width, kv_fraction
):
    expected = parameters_by_hand(layers, width, mlp_width, kv_fraction)
    assert count_parameters(name) == expected


@pytest.mark.parametrize(("name", "millions"), [("base", 85), ("large", 714)])
def test_the_parameter_counts_in_the_comments_hold(name, millions):
    text = importlib.import_module(f"configs.{name}").__doc__
    assert f"{millions}M parameters" in text
    assert round(count_parameters(name) / 1e6) == millions
