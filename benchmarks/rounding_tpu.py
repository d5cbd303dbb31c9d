"""What the TPU's compiler makes of rounding: nothing is run, no TPU is needed.

    python benchmarks/rounding_tpu.py [--generations v5e:2x2 ...]

Three tables: for each shape and generation the kernel's blocks, their VMEM, and what is
read and written beyond input and output; and where the kernel or plain XLA operations
cost more, by the compiler's own account of bytes, with statistics too.
"""

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

import conftest  # noqa: F401  # finds the TPU compiler
import jax
import jax.numpy as jnp
import rich.console
import rich.progress
import rich.table
import shapes
import tpu

import mixprec
from mixprec.rounding import bits, formats, statistics, tiling

_KEY = 0
_LAYERS = ((4096, 16384), (16384, 4096))
_BFLOAT16 = formats.find_format("bfloat16")
_BYTES = 6  # of one element, float32 in and bfloat16 out


def shape_table(generations: list[str]) -> rich.table.Table:
    """Compiles the kernel for every shape."""
    table = rich.table.Table(title="stochastic rounding to bfloat16 by the kernel")
    for name in ("shape", "order in memory", "block", "VMEM", *generations):
        table.add_column(name, justify="right")
    function = jax.jit(
        functools.partial(
            mixprec.round_to, mode="stochastic", key=_KEY, backend="pallas"
        )
    )
    for shape in rich.progress.track(shapes.ALL, "shapes", transient=True):
        tiles = tiling.tile(shape or (1,), _BYTES)
        cells = []
        for generation in generations:
            x = jax.ShapeDtypeStruct(shape, jnp.float32)
            compiled = tpu.compile_for(generation, function, x)
            over = compiled.cost_analysis()["bytes accessed"] - _BYTES * math.prod(
                shape
            )
            copies = len(tpu.moves(compiled, shape))
            cells.append(f"+{over:,.0f} B, {copies} copies")
        table.add_row(
            "x".join(map(str, shape)) or "scalar",
            str(tiles.order),
            "x".join(map(str, tiles.block_shape)),
            f"{tiles.vmem_bytes(_BYTES) / 2**20:.2f} MiB",
            *cells,
        )
    return table


def cost_table(generations: list[str]) -> rich.table.Table:
    """Compiles the same computations with the kernel and with XLA operations."""
    table = rich.table.Table(
        title="XLA operations | kernel",
        caption="bytes: as a multiple of input and output once; time: the compiler's "
        "estimate, as a multiple of that of the same with astype(bfloat16)",
    )
    for name in ("", "", *generations):
        table.add_column(name, justify="right" if name in generations else "left")
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    least = {_bracket: 8, _nearest: 6, _stochastic: 6, _update: 10}
    alone = {
        "bracket": (_bracket, (w,)),
        "nearest_even": (_nearest, (w,)),
        "stochastic": (_stochastic, (w,)),
        "stochastic(w - 0.1 g)": (_update, (w, w)),
    }
    for name, (function, arguments) in alone.items():
        cells = []
        for generation in generations:
            found = [
                _cost(generation, function, backend, arguments)["bytes accessed"]
                / (least[function] * math.prod(w.shape))
                for backend in ("xla", "pallas")
            ]
            cells.append(" | ".join(f"{ratio:.3f}" for ratio in found))
        table.add_row(name, "bytes", *cells)
    layers = (x, *(jax.ShapeDtypeStruct(n, jnp.float32) for n in _LAYERS))
    products = {
        "x @ nearest_even(w)": (functools.partial(_product, _nearest), (x, w)),
        "x @ stochastic(w)": (functools.partial(_product, _stochastic), (x, w)),
        "x @ stochastic(w), x @ stochastic(w).T": (_two_products, (x, w)),
        "feed-forward layers, nearest_even": (
            functools.partial(_layers, _nearest),
            layers,
        ),
        "feed-forward layers, stochastic": (
            functools.partial(_layers, _stochastic),
            layers,
        ),
        "their gradient, stochastic": (
            functools.partial(_gradient, _stochastic),
            layers,
        ),
    }
    for name, (function, arguments) in products.items():
        cells = []
        for generation in generations:
            base, *found = (
                _cost(generation, function, backend, arguments)["optimal_seconds"]
                for backend in (None, "xla", "pallas")
            )
            # Of some programs the compiler estimates no time.
            ratios = [f"{t / base:.3f}" if min(t, base) > 0 else "-" for t in found]
            cells.append(" | ".join(ratios))
        table.add_row(name, "time", *cells)
    return table


def statistics_table(generations: list[str]) -> rich.table.Table:
    """Compiles rounding with statistics in the same pass, and not."""
    table = rich.table.Table(
        title="rounding to bfloat16 with statistics: bytes as a multiple of input and "
        "output once"
    )
    for name in ("", "", *generations):
        table.add_column(name, justify="right" if name in generations else "left")
    functions = {
        "XLA, a sum for each": _separate_sums,
        "XLA": functools.partial(_with_statistics, "xla"),
        "kernel": functools.partial(_with_statistics, "pallas"),
    }
    for shape in ((8192, 8192), (2048, 4096)):
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, function in functions.items():
            cells = []
            for generation in generations:
                compiled = tpu.compile_for(generation, jax.jit(function), x)
                accessed = compiled.cost_analysis()["bytes accessed"]
                cells.append(f"{accessed / _BYTES / math.prod(shape):.3f}")
            table.add_row("x".join(map(str, shape)), name, *cells)
    return table


def _with_statistics(backend: str, x: jax.Array) -> Any:
    return mixprec.round_with_statistics(x, mode="nearest_even", backend=backend)


def _separate_sums(x: jax.Array) -> Any:
    rounded = mixprec.round_to(x, mode="nearest_even")
    patterns = jax.lax.bitcast_convert_type(rounded, jnp.uint16).astype(jnp.uint32)
    parts = statistics.of_elements(bits.from_float(x), patterns, _BFLOAT16)
    return rounded, statistics.total(parts)


def _cost(
    generation: str,
    function: Callable[..., Any],
    backend: str | None,
    arguments: tuple[Any, ...],
) -> dict[str, float]:
    jitted = jax.jit(functools.partial(function, backend))
    return tpu.compile_for(generation, jitted, *arguments).cost_analysis()


def _bracket(backend: Any, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return mixprec.round_bracket(w, backend=backend)


def _nearest(backend: Any, w: jax.Array) -> jax.Array:
    if backend is None:
        return w.astype(jnp.bfloat16)
    return mixprec.round_to(w, mode="nearest_even", backend=backend)


def _stochastic(backend: Any, w: jax.Array) -> jax.Array:
    if backend is None:
        return w.astype(jnp.bfloat16)
    return mixprec.round_to(w, mode="stochastic", key=_KEY, backend=backend)


def _update(backend: Any, w: jax.Array, g: jax.Array) -> jax.Array:
    return _stochastic(backend, w - 0.1 * g)


def _product(
    round_it: Callable[..., jax.Array], backend: Any, x: jax.Array, w: jax.Array
) -> jax.Array:
    return x @ round_it(backend, w)


def _two_products(
    backend: Any, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rounded = _stochastic(backend, w)
    return x @ rounded, x @ rounded.T


def _layers(
    round_it: Callable[..., jax.Array], backend: Any, x: jax.Array, *w: jax.Array
) -> jax.Array:
    first, second = (round_it(backend, weight) for weight in w)
    return x + jax.nn.gelu(x @ first) @ second


def _gradient(
    round_it: Callable[..., jax.Array], backend: Any, x: jax.Array, *w: jax.Array
) -> Any:
    def loss(*arguments: jax.Array) -> jax.Array:
        y = _layers(round_it, backend, *arguments)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))(x, *w)


def main() -> None:
    """Compiles and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generations", nargs="+", default=list(tpu.GENERATIONS))
    generations = parser.parse_args().generations
    console = rich.console.Console(width=170)
    console.print(cost_table(generations))
    console.print(statistics_table(generations))
    console.print(shape_table(generations))


if __name__ == "__main__":
    main()
