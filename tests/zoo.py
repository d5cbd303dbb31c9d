"""Small modules in every style that Flax offers; none has heard of rounding."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from arrays import normal
from oracle import noisy

WIDTH = 8
X = normal(4, WIDTH)
TOKENS = jnp.arange(6).reshape(2, 3)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(WIDTH)(x))


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.LayerNorm()(Block()(x)))


class Setup(nn.Module):
    def setup(self):
        self.blocks = [Block(), Block()]
        self.norms = {"before": nn.LayerNorm(), "after": nn.RMSNorm()}
        self.head = nn.Dense(3)

    def encode(self, x):
        x = self.norms["before"](x)
        for block in self.blocks:
            x = block(x)
        return self.norms["after"](x)

    def __call__(self, x):
        return self.head(self.encode(x))


class Fields(nn.Module):
    first: nn.Module
    rest: dict[str, Sequence[nn.Module]]

    def __call__(self, x):
        x = self.first(x)
        for module in self.rest["more"]:
            x = module(x)
        return x


class Layer(nn.Module):
    @nn.compact
    def __call__(self, carry, _):
        return Block()(carry), None


def scanned(layer=Layer, **options):
    """Gives a class whose layers' parameters are stacked along axis 0."""
    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}} | options
    return nn.scan(layer, length=3, **options)


class Scan(nn.Module):
    layer: Any = Layer
    options: Any = dataclasses.field(default_factory=dict)

    @nn.compact
    def __call__(self, x):
        layers = scanned(self.layer, **self.options)(name="layers")
        return nn.Dense(3)(layers(x, None)[0])


class SetupScan(nn.Module):
    def setup(self):
        self.layers = scanned(nn.remat(Layer))()

    def __call__(self, x):
        return self.layers(x, None)[0]


class Sharing(nn.Module):
    """Scans over one layer's parameters, and uses another one twice."""

    @nn.compact
    def __call__(self, x):
        options = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        x, _ = nn.scan(Layer, length=3, **options)()(x, None)
        shared = Block(name="shared")
        return shared(shared(x))


class Remat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Block)()(nn.checkpoint(Block)(name="second")(x))


class Vmap(nn.Module):
    @nn.compact
    def __call__(self, x):
        members = nn.vmap(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=3
        )
        return members()(jnp.stack([x, x + 1, x * 2]))


class Embedding(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(10, WIDTH)
        return embed.attend(Block()(embed(tokens)))


class TiedByVariables(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(10, WIDTH, name="embed")
        x = Block()(embed(tokens))
        return x @ embed.variables["params"]["embedding"].T


class RawParam(nn.Module):
    @nn.compact
    def __call__(self, x):
        matrix = self.param("matrix", nn.initializers.normal(), (WIDTH, 3))
        scale = self.param("scale", nn.initializers.ones, ())
        return (x @ matrix) * scale


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2, decode=False)(x[None])


class Recurrent(nn.Module):
    def setup(self):
        self.rnn = nn.RNN(nn.LSTMCell(WIDTH))

    def __call__(self, x):
        return self.rnn(x[None])


class While(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = Block()
        if self.is_initializing():
            return block(x)

        def body(block, carry):
            return carry[0] + 1, block(carry[1])

        return nn.while_loop(lambda _, c: c[0] < 3, body, block, (jnp.int32(0), x))[1]


class Branches(nn.Module):
    def setup(self):
        self.one, self.other = nn.Dense(WIDTH), nn.Dense(WIDTH)

    def __call__(self, x):
        if self.is_initializing():
            return self.one(x) + self.other(x)
        branches = (lambda m, x: m.one(x), lambda m, x: m.other(x))
        y = nn.cond(x.sum() > 0, *branches, self, x)
        return y + nn.switch(jnp.int32(y.sum() > 0), branches, self, x)


class Gradients(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = Block()
        if self.is_initializing():
            return block(x)

        def total(block, x):
            return block(x).sum()

        def forward(block, x):
            return nn.vjp(total, block, x)

        def backward(function, gradient):
            return function(2 * gradient)

        y = nn.custom_vjp(total, forward, backward)(block, x)
        return y, nn.value_and_grad(total, block, x)


JitBlock = nn.jit(Block)


class Jit(nn.Module):
    @nn.compact
    def __call__(self, x):
        return JitBlock(name="second")(JitBlock(name="first")(x))


class Decorated(nn.Module):
    @nn.jit
    @nn.compact
    def jitted(self, x):
        return nn.Dense(WIDTH)(x)

    @nn.remat
    def remated(self, x):
        return jnp.tanh(self.jitted(x))

    def __call__(self, x):
        return self.remated(x)


class TwoDecorated(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Decorated(name="second")(Decorated(name="first")(x))


class LowRank(nn.Module):
    base: nn.Module

    def setup(self):
        nn.share_scope(self, self.base)

    @nn.compact
    def __call__(self, x):
        a = self.param("a", nn.initializers.normal(), (WIDTH, 2))
        b = self.param("b", nn.initializers.normal(), (2, WIDTH))
        return self.base(x) + x @ a @ b


class ShareScope(nn.Module):
    @nn.compact
    def __call__(self, x):
        outside = nn.Dense(WIDTH, name="outside")
        # The part of this base has a scope already when that of the base moves.
        dense = nn.Dense(WIDTH, parent=None)
        base = nn.Sequential([dense, jnp.tanh], parent=None)
        return LowRank(outside)(LowRank(base, name="inside")(x))


class JitFields(nn.Module):
    first: nn.Module
    second: nn.Module

    @nn.remat
    def __call__(self, x):
        return self.second(self.first(x))


class JitArguments(nn.Module):
    def setup(self):
        self.first, self.second = JitBlock(), JitBlock()

    def __call__(self, x):
        def call(_, parts, x):
            return parts[1](parts[0](x))

        return nn.remat(call)(self, (self.first, self.second), x)


class NameScopes(nn.Module):
    @nn.compact_name_scope
    def up(self, x):
        return nn.Dense(WIDTH)(x)

    @nn.compact_name_scope
    def down(self, x):
        return nn.Dense(WIDTH)(x)

    def __call__(self, x):
        return self.down(self.up(x))


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.GroupNorm(2)(nn.Conv(4, (3,))(x[None]))


class Odd(nn.Module, kw_only=True):
    """What a subclass made on the fly might get wrong."""

    options: dict[str, int]  # unhashable, but for the author's own hash
    default: int = 3
    mixprec_policy: int = 5

    def __hash__(self):
        return 17

    def __eq__(self, other):
        return type(self) is type(other) and self.options == other.options

    def __getattr__(self, name):
        return 2 if name == "two" else super().__getattr__(name)

    @staticmethod
    def double(x):
        return x * 2

    @classmethod
    def make(cls):
        return cls(options={"features": WIDTH})

    @nn.nowrap
    def helper(self, x):
        return self.block(x)

    @property
    def kernel(self):
        return self.block.variables["params"]["Dense_0"]["kernel"]

    def setup(self):
        self.block = Block()
        self.bias = self.param(
            "bias", nn.initializers.ones, (self.options["features"],)
        )

    def __call__(self, x):
        return self.double(self.helper(x)) @ self.kernel + self.bias[None] * self.two


class SubOfOdd(Odd, kw_only=True):
    def setup(self):
        super().setup()
        self.more = nn.Dense(WIDTH)

    def __call__(self, x):
        return self.more(super().__call__(x))


class Trees(nn.Module):
    """Parameters that are trees."""

    @nn.compact
    def __call__(self, x):
        def init(key):
            return {0: normal(WIDTH, WIDTH), 1: (normal(WIDTH), normal(WIDTH))}

        tree = self.param("tree", init)
        return x @ tree[0] * tree[1][0][None] + tree[1][1][None]


class Reads(nn.Module):
    """Reads that are not `self.param`."""

    @nn.compact
    def __call__(self, x):
        self.param("kernel", nn.initializers.normal(), (WIDTH, WIDTH))
        x = x @ self.get_variable("params", "kernel")
        x = x @ self.variables["params"]["kernel"]
        x = x @ self.variable("params", "other", lambda: normal(WIDTH, WIDTH)).value
        Block(name="block")(x)
        return x @ self.scope.get_variable("params", "block")["Dense_0"]["kernel"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A module and what to call it with."""

    module: nn.Module
    inputs: tuple[jax.Array, ...] = (X,)

    def variables(self):
        """Gives variables of noise; `init` would compile a lot for the same purpose."""
        shapes = jax.eval_shape(self.module.init, jax.random.key(0), *self.inputs)
        return noisy(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


CASES = {
    "compact": Case(Compact()),
    "setup": Case(Setup()),
    "fields": Case(Fields(Block(), {"more": (nn.Dense(WIDTH), nn.LayerNorm())})),
    "sequential": Case(nn.Sequential([nn.Dense(5), nn.relu, nn.Sequential([Block()])])),
    "scan": Case(Scan()),
    "remat": Case(Remat()),
    "scan_remat": Case(Scan(nn.remat(Layer, prevent_cse=False))),
    "setup_scan": Case(SetupScan()),
    "scan_at_the_root": Case(scanned()(), (X, None)),
    "sharing": Case(Sharing()),
    "vmap": Case(Vmap()),
    "embedding": Case(Embedding(), (TOKENS,)),
    "tied_by_variables": Case(TiedByVariables(), (TOKENS,)),
    "raw_param": Case(RawParam()),
    "attention": Case(Attention()),
    "recurrent": Case(Recurrent()),
    "while_loop": Case(While()),
    "branches": Case(Branches()),
    "gradients": Case(Gradients()),
    "jit": Case(Jit()),
    "jit_at_the_root": Case(JitBlock()),
    "decorated": Case(TwoDecorated()),
    "decorated_at_the_root": Case(Decorated()),
    "jit_fields": Case(JitFields(JitBlock(), JitBlock())),
    "jit_arguments": Case(JitArguments()),
    "share_scope": Case(ShareScope()),
    "share_scope_at_the_root": Case(LowRank(Block())),
    "name_scopes": Case(NameScopes()),
    "conv": Case(Conv()),
    "odd": Case(Odd(options={"features": WIDTH})),
    "sub_of_odd": Case(SubOfOdd(options={"features": WIDTH})),
    "trees": Case(Trees()),
    "reads": Case(Reads()),
}
