import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixprec.training import program

TEXT = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %a)
}

%inner (p: bf16[8,16]) -> bf16[64,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %g = bf16[64,16]{1,0} all-gather(%p), dimensions={0}, metadata={op_name="f/w"}
}

%body (t: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %t = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x = bf16[8,16]{1,0} get-tuple-element(%t), index=1
  %fusion.1 = bf16[64,16]{1,0} fusion(%x), kind=kCustom, calls=%inner
  %r = (f32[4]{0}, f32[2,3]{1,0}) all-reduce(%x, %x), to_apply=%add
  ROOT %out = (s32[], bf16[8,16]{1,0}) tuple(%x, %x)
}

%condition (t: (s32[], bf16[8,16])) -> pred[] {
  %t = (s32[], bf16[8,16]{1,0}) parameter(0)
  %bound = s32[]{:T(128)} constant(5)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (p: bf16[8,16]) -> bf16[8,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  %tuple = (s32[], bf16[8,16]{1,0}) tuple(%p, %p)
  %w = (s32[], bf16[8,16]{1,0}) while(%tuple), condition=%condition, body=%body
  %s = (f8e4m3fn[4]{0}, f8e4m3fn[32]{0}) all-gather-start(%p), dimensions={0}
  %d = f8e4m3fn[32]{0} all-gather-done(%s)
  ROOT %o = bf16[8,16]{1,0} get-tuple-element(%w), index=1
}
"""


def test_operations_in_loops_and_fusions_count_as_often_as_they_run():
    found = {
        (o.kind, o.times): o.bytes_by_dtype
        for o in program.collectives(program.operations(TEXT))
    }
    assert found == {
        ("all-gather", 5): {"bf16": 64 * 16 * 2},
        ("all-reduce", 5): {"f32": 4 * (4 + 6)},
        ("all-gather", 1): {"f8e4m3fn": 32},
    }


def test_operations_keep_the_names_that_jax_gave_them():
    (gather, *_) = program.collectives(program.operations(TEXT))
    assert gather.name == "f/w"
    assert gather.result == (("bf16", (64, 16)),)


@pytest.mark.parametrize(
    ("dtype", "size"), [("pred", 1), ("s8", 1), ("bf16", 2), ("f32", 4), ("c128", 16)]
)
def test_sizes_of_dtypes(dtype, size):
    assert program.size_of(dtype) == size


def test_a_real_program_sends_what_its_mesh_asks_for():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def body(carry, w):
        w = jax.lax.with_sharding_constraint(w, whole)
        return jnp.tanh(carry @ w), None

    def f(x, ws):
        ws = jax.lax.with_sharding_constraint(
            ws, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
        )
        return jax.lax.scan(body, x, ws)[0]

    x = jax.device_put(np.ones((8, 16), np.float32), split)
    compiled = jax.jit(f).lower(x, np.ones((7, 16, 16), np.float32)).compile()
    found = program.collectives(program.operations(compiled.as_text()))
    gathers = [o for o in found if o.kind == "all-gather"]
    assert sum(o.times * o.bytes_by_dtype["f32"] for o in gathers) == 7 * 16 * 16 * 4
