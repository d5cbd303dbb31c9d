import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal, words

import mixprec
from mixprec import rules, tensors
from mixprec.policy import Policy
from mixprec.rules import Rule

SEED = np.array([1, 2], np.uint32)
POLICY = Policy()
HOW = {"seed": SEED, "place": "a/kernel", "has_key": True}


def round_value(x, rule, policy=POLICY, **how):
    how = HOW | {"hash_values": False} | how
    return tensors.round_value(x, rule, policy, **how)


# What is left alone


@pytest.mark.parametrize("dtype", rules.DTYPES)
@pytest.mark.parametrize("to", rules.DTYPES)
def test_what_has_all_values_of_a_dtype_does_not_round_it(dtype, to):
    patterns = np.arange(2 ** (8 * jnp.dtype(dtype).itemsize), dtype=np.uint32)
    x = patterns.astype(f"u{jnp.dtype(dtype).itemsize}").view(jnp.dtype(dtype))
    x = x[np.isfinite(x.astype(np.float32))]
    with np.errstate(all="ignore"):
        back = x.astype(np.float32).astype(to).astype(np.float32)
    is_exact = (back == x.astype(np.float32)).all()
    why = tensors.why_left_alone(Rule("a", "nearest_even", dtype=to), dtype, 1)
    assert why == (f"all its values are {to} values" if is_exact else None)


@pytest.mark.parametrize(
    ("rule", "dtype", "size", "why"),
    [
        (None, "float32", 1, "no rule"),
        (Rule("a", None), "float32", 1, "keep"),
        (Rule("a", "to_odd"), "int32", 1, "int32 is not rounded"),
        (Rule("a", "to_odd"), "bool", 1, "bool is not rounded"),
        (Rule("a", "to_odd", min_size=8), "float32", 7, "below min_size=8"),
        (Rule("a", "to_odd", min_size=8), "float32", 8, None),
        (Rule("a", "to_odd"), "float64", 1, None),
    ],
)
def test_the_reason_is_told(rule, dtype, size, why):
    assert tensors.why_left_alone(rule, np.dtype(dtype), size) == why


# Values


@pytest.mark.parametrize("to", rules.DTYPES)
@pytest.mark.parametrize("mode", ["toward_zero", "stochastic"])
def test_a_rule_says_all_that_the_operation_takes(mode, to):
    x = normal(64, 8) * 3e4
    options = {"random_bits": 8} if mode == "stochastic" else {}
    rule = Rule("a", mode, dtype=to, overflow="saturate", **options)
    found = round_value(x, rule)
    assert found.dtype == jnp.float32
    wide = {"dtype": to, "overflow": "saturate", "out_dtype": jnp.float32}
    if mode == "toward_zero":
        expected = mixprec.round_to(x, mode=mode, **wide)
        np.testing.assert_array_equal(words(found), words(expected))
        return
    down, up = mixprec.round_bracket(x, **wide)
    assert ((found == down) | (found == up)).all()
    assert (found != down).any()
    assert (found != up).any()


def test_values_are_carried_in_bfloat16_if_so_chosen_and_else_keep_their_dtype():
    x = normal(64)
    in_bfloat16 = Policy(out_dtype="bfloat16")
    for to in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        rule = Rule("a", "nearest_even", dtype=to)
        narrow = round_value(x, rule, in_bfloat16)
        assert narrow.dtype == jnp.bfloat16
        expected = np.asarray(x).astype(to).astype(np.float32)
        np.testing.assert_array_equal(narrow.astype(jnp.float32), expected)
    rule = Rule("a", "nearest_even", dtype="float8_e4m3fn")
    for dtype in ("bfloat16", "float16"):
        y = x.astype(dtype)
        found = round_value(y, rule, in_bfloat16)
        assert found.dtype == dtype
        expected = np.asarray(y).astype(np.float32).astype("float8_e4m3fn")
        np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype("f4"))


@pytest.mark.parametrize(
    ("dtype", "to", "share"),
    [
        ("float32", "bfloat16", 1 - 2**-16),
        ("float32", "float8_e5m2", 1 - 2**-21),
        ("bfloat16", "float8_e4m3fn", 1 - 2**-4),
        ("bfloat16", "float16", 0),
    ],
)
def test_the_share_of_inexact_values_is_that_of_random_mantissas(dtype, to, share):
    rule = Rule("a", "nearest_even", dtype=to)
    assert tensors.inexact_share(rule, dtype) == share
    # Every mantissa of one binade as often, rounded by another library.
    bits = np.arange(2**23, dtype=np.uint32) | np.uint32(0x3F800000)
    x = bits.view(np.float32)
    if dtype == "bfloat16":
        x = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    assert (x.astype(to).astype(np.float32) != x).mean() == share


# Cotangents


@pytest.mark.parametrize("mode", ["toward_zero", "stochastic"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_cotangent_is_rounded_and_the_value_is_not(mode, transform):
    x, weights = normal(16, 16), normal(16, 16, seed=1)
    rule = Rule("a", mode)

    @transform
    def loss(x):
        y = tensors.round_cotangent(x, rule, POLICY, **HOW)
        return jnp.sum(y * weights), y

    gradient, y = jax.grad(loss, has_aux=True)(x)
    np.testing.assert_array_equal(words(y), words(x))
    down, up = mixprec.round_bracket(weights, out_dtype=jnp.float32)
    if mode == "toward_zero":
        np.testing.assert_array_equal(words(gradient), words(down))
        return
    share = (gradient == up).mean()
    assert ((gradient == down) | (gradient == up)).all()
    assert 0.3 < share < 0.7  # of 256 draws, 6 sigma around a half


def test_cotangents_of_scanned_layers_draw_by_their_values():
    weights = normal(2, 32, 32)
    weights = weights.at[1].set(2 * weights[0])  # the same lower halves
    rule = Rule("a", "stochastic")

    def loss(x):
        def layer(total, pair):
            x, weight = pair
            y = tensors.round_cotangent(x, rule, POLICY, **HOW)
            return total + jnp.sum(y * weight), None

        return jax.lax.scan(layer, jnp.float32(0), (x, weights))[0]

    first, second = jax.grad(loss)(jnp.zeros_like(weights))
    _, up = mixprec.round_bracket(weights, out_dtype=jnp.float32)
    agree = ((first == up[0]) == (second == up[1])).mean()
    # Independent draws, up with probability p, agree in a share of 1 - 2 p (1 - p): 2/3
    # on average over p; equal draws agree in all.
    assert 0.55 < agree < 0.78


@pytest.mark.parametrize("x", [jnp.arange(3), jnp.ones(3, jnp.bfloat16)])
def test_what_needs_no_rounding_passes(x):
    found = tensors.round_cotangent(x, Rule("a", "to_odd"), POLICY, **HOW)
    assert found is x


# Keys


def test_differentiating_without_a_key_warns_once():
    x = normal(8)
    policy = Policy(seed=123456)
    rule = Rule("a", "stochastic")

    def loss(x):
        return jnp.sum(round_value(x, rule, policy, has_key=False))

    loss(x)
    with pytest.warns(UserWarning, match="without a key, so every step draws from"):
        jax.grad(jax.jit(loss))(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(loss)(x)
        jax.grad(lambda x: jnp.sum(round_value(x, rule, Policy(seed=9))))(x)


def test_rounding_a_cotangent_without_a_key_warns_once():
    policy = Policy(seed=654321)

    def loss(x):
        rule = Rule("a", "stochastic")
        how = HOW | {"has_key": False}
        return jnp.sum(tensors.round_cotangent(x, rule, policy, **how))

    with pytest.warns(UserWarning, match="without a key, so every step draws from"):
        jax.grad(loss)(normal(8))
