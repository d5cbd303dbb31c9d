import flax.linen as nn
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from flax.core import meta

import mixprec
from mixprec import shards

P = jax.sharding.PartitionSpec
KEY = jax.random.key(3)


class Reader(nn.Module):
    """Gives its parameter as it reads it."""

    logical: bool = True

    @nn.compact
    def __call__(self, scale=1.0):
        make = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        names = ("embed", "mlp") if self.logical else ("fsdp", "tensor")
        init = make(nn.initializers.normal(), names)
        kernel = self.param("kernel", init, (16, 24), jnp.float32)
        bias = self.param("bias", make(nn.initializers.normal(), names[:1]), (16,))
        return kernel * scale, bias


def read(module, layout, variables, **rngs):
    """Gives what a wrapped module reads of parameters that are split over devices."""

    def split(box):
        return box.replace_boxed(
            jax.device_put(box.value, layout.sharding(*names(box)))
        )

    names = lambda box: (  # noqa: E731
        ("embed", "mlp") if box.value.ndim == 2 else ("embed",)
    )
    placed = jax.tree.map(
        split, variables, is_leaf=lambda x: isinstance(x, meta.Partitioned)
    )
    with layout.context():
        return jax.jit(lambda v: module.apply(v, rngs=rngs))(placed)


@pytest.mark.parametrize("logical", [True, False])
@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 8}])
def test_what_is_gathered_has_the_bits_of_one_device(
    logical, backend, out_dtype, sizes
):
    policy = "params: kernel=stochastic; gather=fsdp"
    policy += f"; backend={backend}; out_dtype={out_dtype}"
    module = mixprec.wrap(Reader(logical), policy)
    variables = module.init(KEY)
    expected, bias = mixprec.wrap(Reader(logical), policy).apply(
        variables, rngs={"rounding": KEY}
    )
    kernel, same_bias = read(module, layouts.make(**sizes), variables, rounding=KEY)
    assert kernel.dtype == expected.dtype == jnp.dtype(out_dtype)
    np.testing.assert_array_equal(kernel, expected)
    np.testing.assert_array_equal(same_bias, bias)


@pytest.mark.parametrize("rule", ["keep", "nearest_even(min_size=1000)"])
def test_what_no_rule_rounds_is_left_to_xla(rule):
    module = mixprec.wrap(Reader(), f"params: kernel={rule}; gather=fsdp")
    variables = module.init(KEY)
    layout = layouts.make(fsdp=8)
    kernel, _ = read(module, layout, variables)
    np.testing.assert_array_equal(kernel, variables["params"]["kernel"].value)
    assert kernel.sharding.is_equivalent_to(layout.sharding("embed", "mlp"), 2)


def test_eight_bits_are_gathered_in_eight_bits():
    policy = "params: kernel=toward_zero(dtype=float8_e4m3fn); gather=fsdp"
    module = mixprec.wrap(Reader(), policy)
    variables, layout = module.init(KEY), layouts.make(fsdp=8)
    kernel, _ = read(module, layout, variables)
    expected = mixprec.round_to(
        variables["params"]["kernel"].value, "float8_e4m3fn", mode="toward_zero"
    )
    np.testing.assert_array_equal(kernel, expected.astype(jnp.float32))
    assert kernel.sharding.is_fully_replicated


def test_the_gradient_is_straight_through_in_float32():
    module = mixprec.wrap(Reader(), "params: kernel=nearest_even; gather=fsdp")
    variables, layout = module.init(KEY), layouts.make(fsdp=4, tensor=2)
    # Not a bfloat16 value, nor is any multiple of it here.
    scale = jax.random.normal(KEY, (16, 24))

    def loss(params):
        return jnp.sum(module.apply({"params": params}, scale)[0])

    with layout.context():
        gradient = jax.jit(jax.grad(loss))(variables["params"])
        jvp = jax.jit(lambda p: jax.jvp(loss, (p,), (p,))[1])(variables["params"])
    assert gradient["kernel"].value.dtype == jnp.float32
    np.testing.assert_array_equal(gradient["kernel"].value, scale)
    kernel = np.float64(variables["params"]["kernel"].value)
    np.testing.assert_allclose(jvp, (kernel * np.float64(scale)).sum(), rtol=1e-5)


def test_gathered_over_nothing_is_no_gathering():
    sharding = layouts.make(fsdp=4, tensor=2).sharding("embed", "mlp")
    assert shards.without_axes(None, ("fsdp",)) is None
    assert shards.without_axes(sharding, ()) is None
    assert shards.without_axes(sharding, ("data",)) is None  # of size 1
    assert shards.without_axes(sharding, ("unknown",)) is None
    assert shards.without_axes(sharding, ("fsdp",)).spec == P(None, ("tensor",))
    both = layouts.make("batch=data, embed=fsdp+tensor, mlp=", fsdp=4, tensor=2)
    sharding = both.sharding("embed", "mlp")
    assert shards.without_axes(sharding, ("fsdp",)).spec == P(("tensor",), None)
    assert shards.without_axes(sharding, ("fsdp", "tensor")).spec == P(None, None)


def test_only_boxes_on_a_mesh_tell_how_they_are_split():
    box = nn.Partitioned(jnp.ones(8), names=("fsdp",))
    assert shards.sharding_of(box) is None
    assert shards.sharding_of(jnp.ones(8)) is None
    with layouts.make(fsdp=8).context():
        assert shards.sharding_of(box).spec == P("fsdp")
        assert shards.sharding_of(jnp.ones(8)) is None
    with layouts.make().context():
        assert shards.sharding_of(box) is None
