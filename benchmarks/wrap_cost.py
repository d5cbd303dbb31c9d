"""What wrapping costs: memory, time of a step and of tracing, against the plain module.

    python benchmarks/wrap_cost.py [--layers 12] [--repeats 15]

A transformer under scan and remat. Memory is that of temporaries in the compiled
gradient; times are medians, taken in turn in one run.
"""

import argparse
import statistics
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import rich.console
import rich.progress
import rich.table

import mixprec
import models

POLICIES = {
    "nearest_even": "params: .*=nearest_even",
    "stochastic": "params: .*=stochastic",
    "both, activations too": (
        "params: .*=stochastic; activations: layers/(attention|mlp):out=nearest_even"
    ),
}


def build(layers: int) -> nn.Module:
    """Gives the model."""
    return models.build(
        models.TransformerConfig(
            vocab_size=256,
            num_layers=layers,
            width=256,
            num_heads=4,
            num_kv_heads=4,
            mlp_width=1024,
            remat="full",
        )
    )


def make_gradient(module: nn.Module) -> Any:
    """Gives the gradient of a loss as a function of (variables, tokens, key)."""

    def loss(variables: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        logits = module.apply(variables, tokens, rngs={"rounding": key})
        return jnp.mean(logits**2)

    return jax.grad(loss)


def arguments(module: nn.Module) -> tuple[Any, jax.Array, jax.Array]:
    """Gives what `make_gradient`'s function takes."""
    tokens = jnp.arange(4 * 128).reshape(4, 128) % 256
    return jax.jit(module.init)(jax.random.key(0), tokens), tokens, jax.random.key(1)


def seconds(function: Any, *args: Any) -> float:
    """Gives the time of one call."""
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - start


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    plain = build(options.layers)
    modules = {"plain": plain} | {
        name: mixprec.wrap(plain, policy) for name, policy in POLICIES.items()
    }
    args = arguments(plain)
    names = list(modules)
    gradients = {name: make_gradient(module) for name, module in modules.items()}
    traced = {name: [] for name in names}
    for _ in range(3):
        for name in names:
            jax.clear_caches()
            start = time.perf_counter()
            jax.jit(gradients[name]).trace(*args)
            traced[name].append(time.perf_counter() - start)
    compiled = {
        name: jax.jit(gradients[name]).lower(*args).compile()
        for name in rich.progress.track(names, "compiling", transient=True)
    }
    stepped = {name: [] for name in names}
    for _ in rich.progress.track(range(options.repeats), "steps", transient=True):
        for name in names:
            stepped[name].append(seconds(compiled[name], *args))
    table = rich.table.Table(
        title=f"multiples of the plain module's: {options.layers} layers, scan, remat"
    )
    for column in ("policy", "temporary memory", "step", "tracing"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name in names[1:]:
        memory = [
            compiled[n].memory_analysis().temp_size_in_bytes for n in (name, "plain")
        ]
        steps = [statistics.median(stepped[n]) for n in (name, "plain")]
        traces = [statistics.median(traced[n]) for n in (name, "plain")]
        table.add_row(name, *(f"{a / b:.3f}" for a, b in (memory, steps, traces)))
    rich.console.Console().print(table)


if __name__ == "__main__":
    main()
