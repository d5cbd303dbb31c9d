import io
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import rich.console
from oracle import TOWARD_ZERO, same_bits, toward_zero
from zoo import CASES, WIDTH, Block, Compact, Jit, Scan, Setup, X

from mixprec import Explanation, Policy, Rule, explain, wrap
from mixprec.rounding import api, platforms, tiling

STRUCT = jax.ShapeDtypeStruct(X.shape, X.dtype)
KEY = jax.random.key(0)


class Options(nn.Module):
    """Takes what modules take besides arrays."""

    @nn.compact
    def __call__(self, x, mask=None, *, train=True):
        x = nn.Dense(WIDTH)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return x if mask is None else x * mask


def test_rows_tell_rule_mode_and_bytes_of_each_tensor():
    kernels, norms = Rule(".*/kernel", "stochastic"), Rule("LayerNorm_0/.*", None)
    blocks = Rule("Block_0", "toward_zero", at="in", dtype="float8_e5m2")
    whole = Rule("", "nearest_even", at="out")
    backward = Rule("head/kernel", "stochastic")
    policy = Policy(
        params=(kernels, norms), activations=(blocks, whole), gradients=(backward,)
    )
    explanation = explain(wrap(Compact(), policy), X)
    assert isinstance(explanation, Explanation)
    assert explanation.policy == policy
    assert explanation.unused == ()
    described = [
        (row.kind, row.path, row.shape, row.rule, row.bytes_before, row.bytes_after)
        for row in explanation.rows
    ]
    assert described == [
        ("parameter", "Block_0/Dense_0/bias", (8,), None, 32, 32),
        ("parameter", "Block_0/Dense_0/kernel", (8, 8), kernels, 256, 128),
        ("parameter", "LayerNorm_0/bias", (8,), norms, 32, 32),
        ("parameter", "LayerNorm_0/scale", (8,), norms, 32, 32),
        ("parameter", "head/bias", (3,), None, 12, 12),
        ("parameter", "head/kernel", (8, 3), kernels, 96, 48),
        ("activation", ":out", (4, 3), whole, 48, 24),
        ("activation", "Block_0:in", (4, 8), blocks, 128, 32),
        ("gradient", "head/kernel", (8, 3), backward, 96, 48),
    ]
    modes = [row.mode for row in explanation.rows]
    assert modes == [
        None,
        "stochastic",
        None,
        None,
        None,
        "stochastic",
        "nearest_even",
        "toward_zero",
        "stochastic",
    ]
    assert {row.dtype for row in explanation.rows} == {"float32"}
    assert [row.kept for row in explanation.rows if row.mode is None] == [
        "no rule",
        "keep",
        "keep",
        "no rule",
    ]
    assert all(row.by == ("xla" if row.mode else "") for row in explanation.rows)
    # Of float32's 23 bits of mantissa bfloat16 has 7, float8_e5m2 has 2.
    shares = {row.path: row.inexact for row in explanation.rows}
    assert shares["head/kernel"] == 1 - 2**-16
    assert shares["Block_0:in"] == 1 - 2**-21
    assert shares["head/bias"] == 0
    assert explanation.unmatched == ("Block_0/Dense_0/bias", "head/bias")


def test_the_table_names_every_tensor_and_the_totals():
    policy = Policy(
        params=(Rule(".*/kernel", "stochastic"), Rule("LayerNorm_0/.*", None)),
        activations=(Rule("Block_0", "toward_zero"),),
    )
    text = str(explain(wrap(Compact(), policy), X))
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert [row for row in rows if row[-1].isdecimal()] == [
        ["Block_0/Dense_0/bias", "float32[8]", "left alone", "32"],
        [
            "Block_0/Dense_0/kernel",
            "float32[8,8]",
            "stochastic",
            ".*/kernel",
            "256",
            "128",
        ],
        ["LayerNorm_0/bias", "float32[8]", "left alone", "LayerNorm_0/.*", "32"],
        ["LayerNorm_0/scale", "float32[8]", "left alone", "LayerNorm_0/.*", "32"],
        ["head/bias", "float32[3]", "left alone", "12"],
        [
            "head/kernel",
            "float32[8,3]",
            "stochastic",
            ".*/kernel",
            "96",
            "48",
        ],
        [
            "Block_0:out",
            "float32[4,8]",
            "toward_zero",
            "Block_0",
            "128",
            "64",
        ],
        # 32 + 256 + 32 + 32 + 12 + 96 bytes, of which 256 + 96 halved; no outputs.
        ["2 of 6 parameters rounded", "460", "284"],
    ]
    assert "rounded to bfloat16 by xla, carried as float32" in text
    assert "99.998% of random values would change" in text
    assert 'backend "auto": XLA fuses' in text
    assert "no rule for Block_0/Dense_0/bias, head/bias" in text


def test_the_table_shows_scalars_long_paths_and_other_choices():
    class Long(nn.Module):
        @nn.compact
        def __call__(self, x):
            name = "a_name_that_is_longer_than_most_columns"
            return x * self.param(name, nn.initializers.ones, ())

    policy = Policy(
        params=(Rule(".*", "away_from_zero"),), out_dtype="bfloat16", backend="pallas"
    )
    explanation = explain(wrap(Long(), policy), X)
    text = str(explanation)
    assert "float32[]" in text
    assert "carried as bfloat16" in text
    assert max(map(len, text.splitlines())) <= 110
    (row,) = explanation.rows
    assert (row.bytes_before, row.bytes_after) == (4, 2)
    assert row.path in text
    # Where it is narrow it has fewer columns, but no digit is lost.
    console = rich.console.Console(file=io.StringIO(), width=76)
    console.print(explain(wrap(nn.Dense(2**20), policy), STRUCT))
    narrow = console.file.getvalue()
    assert "33,554,432" in narrow
    assert "rule" not in narrow


def test_nothing_is_computed_and_shapes_are_enough():
    policy = Policy(params=(Rule(".*/kernel", "toward_zero"),))
    wrapped = wrap(Scan(), policy)
    explanation = explain(wrapped, STRUCT)
    assert explanation == explain(wrapped, X)
    shapes = {row.path: row.shape for row in explanation.rows}
    assert shapes["layers/Block_0/Dense_0/kernel"] == (3, 8, 8)

    big = jax.ShapeDtypeStruct((1, 2**20), jnp.float32)
    (bias, kernel) = explain(wrap(nn.Dense(2**20), Policy()), big).rows
    assert kernel.bytes_before == kernel.bytes_after == 4 * 2**40
    assert bias.rule is None


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ((X,), {"train": False}),
        ((X,), {"train": True}),
        ((STRUCT, STRUCT), {}),
        ((STRUCT,), {"mask": STRUCT, "train": True}),
        ((X,), {"mask": X, "train": False}),
        ((), {"x": STRUCT}),
    ],
)
def test_inputs_are_those_of_init(inputs, options):
    policy = Policy(activations=(Rule("Dropout_0", "stochastic"),))
    rows = explain(wrap(Options(), policy), *inputs, **options).rows
    assert [row.path for row in rows] == [
        "BatchNorm_0/bias",
        "BatchNorm_0/scale",
        "Dense_0/bias",
        "Dense_0/kernel",
        "Dropout_0:out",
    ]


def test_other_random_streams_can_be_given():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x + jax.random.normal(self.make_rng("noise"), x.shape))

    wrapped = wrap(Noisy(), TOWARD_ZERO)
    assert len(explain(wrapped, X, rngs={"params": KEY, "noise": KEY}).rows) == 2
    assert len(explain(wrapped, X, rngs=KEY).rows) == 2


def test_every_array_of_an_output_has_a_row_and_nothing_else_has():
    class Outputs(nn.Module):
        @nn.compact
        def __call__(self, x):
            ints = jnp.arange(3)
            return {"a": x, "b": (x[:2], ints), "c": None, "d": "text", "e": jnp.int8}

    policy = Policy(activations=(Rule("", "toward_zero"),))
    rows = explain(wrap(Outputs(), policy), X).rows
    described = [(row.shape, row.dtype, row.bytes_after) for row in rows]
    # Integers are left alone.
    assert described == [
        ((4, 8), "float32", 64),
        ((2, 8), "float32", 32),
        ((3,), "int32", 12),
    ]


def test_parts_with_a_policy_of_their_own_are_told_by_it():
    class Outer(nn.Module):
        part: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(self.part(x))

    own = Rule("Dense_0/kernel", "stochastic")
    own_output = Rule("", "toward_zero", at="out")
    outer = Rule(".*/kernel", "toward_zero")
    part = wrap(Block(), Policy(params=(own,), activations=(own_output,)))
    explanation = explain(wrap(Outer(part), Policy(params=(outer,))), X)
    assert [(row.path, row.rule) for row in explanation.rows] == [
        ("Dense_0/bias", None),
        ("Dense_0/kernel", outer),
        ("part/Dense_0/bias", None),
        ("part/Dense_0/kernel", own),
        ("part:out", own_output),
    ]


def test_what_nn_jit_has_cached_is_told_again():
    policy = Policy(activations=(Rule("first/Dense_0", "toward_zero"),))
    wrapped = wrap(Jit(), policy)
    explanations = [explain(wrapped, X) for _ in range(2)]
    assert explanations[0] == explanations[1]
    assert explanations[0].rows[-1].path == "first/Dense_0:out"


def test_other_dtypes_and_boxes_are_told():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("half", nn.initializers.ones, (4,), jnp.bfloat16)
            self.param("int", nn.initializers.zeros, (4,), jnp.int8)
            init = nn.with_partitioning(nn.initializers.ones, ("in",))
            self.param("box", init, (4,))
            self.param("tree", lambda key: (jnp.ones(1), jnp.ones(2)))
            return x

    explanation = explain(wrap(Mixed(), TOWARD_ZERO), X)
    described = {
        row.path: (row.dtype, row.bytes_before, row.bytes_after)
        for row in explanation.rows
    }
    assert described == {
        "box": ("float32", 16, 8),
        "half": ("bfloat16", 8, 8),
        "int": ("int8", 4, 4),
        "tree/0": ("float32", 4, 2),
        "tree/1": ("float32", 8, 4),
    }
    modes = {row.path: row.mode for row in explanation.rows}
    assert (modes["half"], modes["int"], modes["box"]) == (None, None, "toward_zero")
    assert "3 of 5 parameters rounded" in str(explanation)


def test_gradients_have_the_dtype_that_is_handed_out():
    policy = Policy.from_text(
        "params: kernel=toward_zero; activations: :in=toward_zero; gradients: "
        "(kernel|bias)=away_from_zero, :in=to_odd(dtype=float8_e5m2); "
        "out_dtype=bfloat16"
    )
    rows = explain(wrap(nn.Dense(4), policy), X).rows
    found = {r.path: (r.dtype, r.mode) for r in rows if r.kind == "gradient"}
    assert found == {
        "bias": ("float32", "away_from_zero"),
        "kernel": ("bfloat16", None),
        ":in": ("bfloat16", "to_odd"),
    }
    kept = [row.kept for row in rows if row.kind == "gradient" and row.kept]
    assert kept == ["all its values are bfloat16 values"]


def test_parameters_that_cannot_be_rounded_are_refused_as_by_apply():
    module = nn.Dense(3, dtype=jnp.float16, param_dtype=jnp.float16)
    with pytest.raises(TypeError, match=r"must be float32 to be rounded.*got float16"):
        explain(wrap(module, TOWARD_ZERO), X)
    left_alone = Policy(params=(Rule(".*", None),))
    assert explain(wrap(module, left_alone), X).rows[0].dtype == "float16"


def test_explain_wants_a_wrapped_module_and_rules_that_match():
    message = "`wrapped` must be a module from mixprec.wrap, got a plain Setup"
    with pytest.raises(TypeError, match=message):
        explain(Setup(), X)
    for field in ("params", "activations"):
        policy = Policy(**{field: (Rule("haed(/kernel)?", "toward_zero"),)})
        with pytest.raises(ValueError, match=r"'haed.*The nearest: 'head"):
            explain(wrap(Setup(), policy), X)


def test_explaining_leaves_no_trace():
    module, variables = CASES["compact"].module, CASES["compact"].variables()
    wrapped = wrap(module, TOWARD_ZERO)
    with pytest.raises(TypeError, match="the same shape"):
        explain(wrap(nn.Sequential([nn.Dense(3), lambda y: y @ X]), TOWARD_ZERO), X)
    explain(wrapped, X)
    expected = module.apply(toward_zero(variables), X)
    assert same_bits(wrapped.apply(variables, X), expected)
    assert not same_bits(module.apply(variables, X), expected)


def test_with_strict_off_rules_that_match_nothing_are_named():
    policy = Policy(
        params=(Rule("haed/kernel", "toward_zero"), Rule(".*/kernel", "toward_zero")),
        activations=(Rule("haed", "toward_zero"),),
        gradients=(Rule("haed/bias", "stochastic"), Rule("head", None, at="in")),
    )
    explanation = explain(wrap(Setup(), policy), X, strict=False)
    assert len(explanation.unused) == 3
    for message, pattern, near in zip(
        explanation.unused,
        ("'haed/kernel'", "'haed/bias'", "'haed'"),
        ("'head/kernel'", "'head/bias'", "'head'"),
        strict=True,
    ):
        assert pattern in message
        assert near in message
        assert message in " ".join(str(explanation).replace("\n", " ").split())
        assert message in re.sub(r"\\(.)", r"\1", explanation.to_markdown())
    assert "head/kernel" in {row.path for row in explanation.rows if row.mode}


def test_everything_is_there_as_data_and_as_markdown():
    policy = Policy.from_text(
        "params: (a|Block_0/.*)/kernel=stochastic(dtype=float8_e4m3fn), head/.*=keep"
    )
    explanation = explain(wrap(Compact(), policy), X)
    found = json.loads(json.dumps(explanation.to_dict()))
    assert found["policy"] == str(policy)
    assert found["unmatched"] == list(explanation.unmatched)
    row = next(r for r in found["rows"] if r["path"] == "Block_0/Dense_0/kernel")
    assert row == {
        "kind": "parameter",
        "path": "Block_0/Dense_0/kernel",
        "shape": [8, 8],
        "dtype": "float32",
        "rule": "(a|Block_0/.*)/kernel=stochastic(dtype=float8_e4m3fn)",
        "kept": None,
        "by": "xla",
        "bytes_before": 256,
        "bytes_after": 64,
        "inexact": 1 - 2**-20,
    }
    lines = explanation.to_markdown().splitlines()
    assert lines[0].startswith("| tensor | type | mode | rule |")
    assert (
        "| Block_0/Dense_0/kernel | float32[8,8] | stochastic to float8_e4m3fn | "
        r"(a\|Block_0/.\*)/kernel | 256 | 64 | 99.999% | xla |"
    ) in lines
    cells = [re.findall(r"(?<!\\)\|", line) for line in lines if line.startswith("|")]
    assert {len(found) for found in cells} == {9}


def test_the_kernels_block_is_that_of_the_layer_inside_a_scan():
    policy = Policy.from_text("params: .*/kernel=stochastic; backend=pallas")
    rows = explain(wrap(Scan(), policy), X).rows
    row = next(row for row in rows if row.path == "layers/Block_0/Dense_0/kernel")
    assert row.shape == (3, 8, 8)
    assert row.by == "pallas 1x8x8 (interpreted)"


def test_what_the_kernel_is_not_taken_for_is_told(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    shape = (5, 4, 3, 2, 129, 9)
    assert not tiling.have_one_order(shape, (4, 1))

    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("odd", nn.initializers.ones, shape)
            return nn.Dense(256, name="dense")(x)

    policy = Policy.from_text(
        "params: odd|.*/kernel=stochastic(dtype=float8_e5m2); backend=pallas; "
        "out_dtype=float32"
    )
    by = {row.path: row.by for row in explain(wrap(Odd(), policy), X).rows}
    # Carried in float32 both lie in one order.
    assert by["odd"].startswith("pallas ")
    assert by["dense/kernel"] == "pallas 1x8x256"
    to_one_byte = platforms.describe(
        shape,
        jnp.dtype("float32"),
        api.make_rounding("float8_e5m2", ("stochastic",)),
    )
    assert to_one_byte.startswith("xla: a TPU stores float32 and float8_e5m2 of shape")


def test_other_methods_can_be_explained():
    policy = Policy.from_text("activations: :encode:out=toward_zero")
    rows = explain(wrap(Setup(), policy), X, method="encode").rows
    assert [row.path for row in rows if row.mode] == [":encode:out"]
    # `__call__` calls it too.
    assert explain(wrap(Setup(), policy), X).rows[-1].path == ":encode:out"
