"""NNX models of every shape that the tests wrap, and what they read when rounded."""

import jax
import jax.numpy as jnp
from arrays import normal
from flax import nnx
from oracle import noisy

WIDTH = 8
X = normal(4, WIDTH)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(self.norm(x)))


class Stack(nnx.Module):
    """A list of blocks, with a head."""

    def __init__(self, rngs, length=3):
        self.layers = nnx.List([Block(rngs) for _ in range(length)])
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.encode(x))

    def encode(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return x

    def run(self, layer, x):
        return layer(x)


class RematStack(Stack):
    """The same, each block rematerialized."""

    def run(self, layer, x):
        return nnx.remat(lambda layer, x: layer(x))(layer, x)


class JitStack(Stack):
    """The same, each block traced on its own."""

    @nnx.jit
    def run(self, layer, x):
        return layer(x)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
def scan_layers(layer, x):
    return layer(x)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
@nnx.remat
def scan_remat_layers(layer, x):
    return layer(x)


class Scanned(nnx.Module):
    """Blocks whose parameters are stacked."""

    run = staticmethod(scan_layers)

    def __init__(self, rngs, length=3, block=Block):
        @nnx.split_rngs(splits=length)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return block(rngs)

        self.layers = create(rngs)
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.run(self.layers, x))


class ScannedRemat(Scanned):
    run = staticmethod(scan_remat_layers)


class Ensemble(Scanned):
    """The same stack as members that take the same input."""

    def __call__(self, x):
        members = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
        return self.head(members(self.layers, x))


class Tied(nnx.Module):
    """One Param at two paths, `first/kernel` and `second/kernel`."""

    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class Embedded(nnx.Module):
    """An embedding that is read by row and as a whole."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(5, WIDTH, rngs=rngs)

    def __call__(self, x):
        indices = jnp.arange(4) % 5
        return self.embed.attend(self.embed(indices) + x)


class Reads(nnx.Module):
    """Every way to read a Param, in lists and trees too."""

    def __init__(self, rngs):
        self.a = nnx.Param(rngs.params.normal((WIDTH,)))
        self.listed = nnx.data([nnx.Param(rngs.params.normal((WIDTH,)))])
        self.tree = nnx.Param({"b": rngs.params.normal((WIDTH,)), "c": jnp.arange(3)})
        self.lora = nnx.LoRAParam(rngs.params.normal((WIDTH,)))

    def __call__(self, x):
        a = self.a
        reads = [
            a[...],
            a[:2],
            a[1],
            a.get_value(),
            a.T,
            a.sum(),
            a.astype(jnp.float32),
            a.reshape(2, -1),
            jnp.asarray(a),
            jnp.stack([*a]),
            a + 1.0,
            2.0 * a,
            -a,
            a @ a,
            a == a[...],
            self.lora[...],
            self.listed[0][...],
            self.tree.get_value(),
            self.tree["b"],
        ]
        return reads, jnp.zeros(a.shape, a.dtype), a.ndim, len(a)


class Many(nnx.Module):
    """Layers of many kinds."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs)
        self.general = nnx.LinearGeneral(WIDTH, (2, 4), rngs=rngs)
        self.einsum = nnx.Einsum("abc,bcd->ad", (2, 4, WIDTH), (WIDTH,), rngs=rngs)
        self.group = nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs)
        self.rms = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.lora = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)
        self.cell = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))
        self.prelu = nnx.PReLU()

    def __call__(self, x):
        x = self.conv(self.attention(x[None]))[0]
        x = self.rms(self.group(self.einsum(self.general(x))))
        return self.prelu(self.cell(self.lora(x)[None]))


def sequential(rngs):
    first, last = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
    return nnx.Sequential(first, jnp.tanh, last)


CLASSES = {
    "stack": Stack,
    "remat": RematStack,
    "jit": JitStack,
    "scan": Scanned,
    "scan_remat": ScannedRemat,
    "vmap": Ensemble,
    "tied": Tied,
    "embedded": Embedded,
    "reads": Reads,
    "many": Many,
    "sequential": sequential,
}


def make(name, seed=0):
    """Gives the model of that name, no value of which is one of bfloat16's."""
    return noised(CLASSES[name](nnx.Rngs(seed)))


def noised(model):
    return map_params(noisy, model)


def map_params(function, model):
    """Gives a copy of a model with `function` applied to the tree of its Params."""
    copy = nnx.clone(model)
    state = function(nnx.state(copy, nnx.Param))
    nnx.update(copy, jax.tree.map(jnp.asarray, state))
    return copy


def params(model):
    """Gives the tree of arrays of a model's Params."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))
