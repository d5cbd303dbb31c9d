"""Models of other houses as their packages ship them: small, with random weights."""

import dataclasses
import functools
import os
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from oracle import noisy, toward_zero

KEY = jax.random.key(0)
BATCH, LENGTH, VOCABULARY = 2, 8, 97
# Without LLVM's optimizations. They merge multiplications and additions one way or the
# other, depending on what surrounds them; and they take most of the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass(frozen=True)
class Model:
    """A module and a call of it.

    Attributes:
      module: unwrapped.
      inputs: of a call.
      options: of the same call, by keyword.
      training: what options are in training; dropout is on.
      site: path of a module below, whose output is rounded in tests.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    site: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: dict[str, Any] = dataclasses.field(default_factory=dict)

    def init(self, module, rngs):
        """Gives the variables of `module`, this one's or a wrapped one."""
        init = functools.partial(module.init, **self.options)
        return jit(init)(rngs, *self.inputs)

    @functools.cached_property
    def initial(self):
        """The variables of `init`."""
        return self.init(self.module, KEY)

    @functools.cached_property
    def variables(self):
        """The same with noise: no parameter is one of bfloat16's values."""
        return self.initial | {"params": noisy(self.initial["params"])}

    @functools.cached_property
    def rounded(self):
        """The same, its parameters rounded beforehand."""
        return self.variables | {"params": toward_zero(self.variables["params"])}

    def apply(self, module, variables, **options):
        """Calls `module`, this one's or a wrapped one."""
        return module.apply(variables, *self.inputs, **{**self.options, **options})

    def loss(self, module, params, rngs):
        """Gives a loss in training, and the variables that are updated."""
        variables = self.initial | {"params": params}
        options = {**self.training, "rngs": rngs, "mutable": ["batch_stats"]}
        results, updates = self.apply(module, variables, **options)
        y = jax.tree.leaves(results)[0]
        target = np.random.default_rng(1).normal(size=y.shape).astype(np.float32)
        return jnp.mean((y - target) ** 2), updates


def cut(x):
    """Rounds an array toward zero to bfloat16, by the bits, traced or not."""
    if x.dtype != jnp.float32:
        return x
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def explained(explanation):
    """Gives path -> type and mode of the tensors that are rounded toward zero."""
    lines = re.sub(r"\\(.)", r"\1", explanation.to_markdown()).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    return {row[0]: row[1:3] for row in rows if "toward_zero" in row}


def type_of(x):
    """Gives a float32 array's type, as `explain` writes it."""
    return f"float32[{','.join(map(str, x.shape))}]"


def tokens():
    return jax.random.randint(KEY, (BATCH, LENGTH), 0, VOCABULARY, jnp.int32)


def positions():
    return jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))


def gpt2_config():
    import transformers

    return transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=2 * LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=1,
    )


def gpt2():
    """Reads its tied weights through `.variables`."""
    import transformers

    outer = transformers.FlaxGPT2LMHeadModel(gpt2_config(), _do_init=False)
    return Model(
        outer.module,
        (tokens(), jnp.ones((BATCH, LENGTH), jnp.int32), positions()),
        site="transformer/h/1/mlp",
        training={"deterministic": False},
    )


def bert():
    """Hands its tied weights to the head as an argument."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    outer = transformers.FlaxBertForMaskedLM(config, _do_init=False)
    mask, types = (f((BATCH, LENGTH), jnp.int32) for f in (jnp.ones, jnp.zeros))
    return Model(
        outer.module,
        (tokens(), mask, types, positions(), None),
        site="bert/encoder/layer/1/attention/self",
        training={"deterministic": False},
    )


def resnet18():
    """Has batch statistics, and blocks that write into a dict they are given."""
    import flaxmodels

    return Model(
        flaxmodels.ResNet18(output="logits", pretrained=None, num_classes=5),
        (jax.random.uniform(KEY, (BATCH, 32, 32, 3)),),
        site="BasicBlock_2",
        options={"train": False},
        training={"train": True},
    )


def e3x_attention():
    """Attention between points in space, equivariant under rotations."""
    import e3x

    points = jax.random.normal(KEY, (5, 3))
    to, of = e3x.ops.sparse_pairwise_indices(len(points))
    basis = e3x.nn.basis(
        points[of] - points[to],
        max_degree=1,
        num=4,
        radial_fn=e3x.nn.reciprocal_bernstein,
        cutoff_fn=functools.partial(e3x.nn.smooth_cutoff, cutoff=5.0),
    )
    features = jax.random.normal(KEY, (len(points), 1, 4, 8))
    return Model(
        e3x.nn.SelfAttention(max_degree=1, num_heads=2),
        (features, basis),
        site="query",
        options={"dst_idx": to, "src_idx": of, "num_segments": len(points)},
    )


def netket_autoregressive():
    """Convolutions under masks; a list of layers made in `setup`."""
    # It would switch JAX to 64 bits, for all tests of the process.
    os.environ["NETKET_ENABLE_X64"] = "0"
    import netket

    spins = netket.hilbert.Spin(0.5, LENGTH)
    return Model(
        netket.models.ARNNConv1D(
            hilbert=spins, layers=3, features=8, kernel_size=3, param_dtype=jnp.float32
        ),
        (jax.random.rademacher(KEY, (BATCH, LENGTH), jnp.float32),),
        site="_layers_1",
    )


_MAKERS = {
    "transformers_gpt2": gpt2,
    "transformers_bert": bert,
    "flaxmodels_resnet18": resnet18,
    "e3x_attention": e3x_attention,
    "netket_autoregressive": netket_autoregressive,
}
NAMES = tuple(_MAKERS)


@functools.cache
def model(name):
    """Makes a model and imports its package."""
    return _MAKERS[name]()
