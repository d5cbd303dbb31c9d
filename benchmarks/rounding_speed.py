"""Speed of rounding on this machine, as ratios to `astype(bfloat16)`.

    python benchmarks/rounding_speed.py [--elements 65536 1048576 16777216]

All are measured side by side, in turns, in one run; a figure is the median over turns.
Peers that are not installed are left out and named.
"""

import argparse
import functools
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import rich.console
import rich.progress
import rich.table

import mixprec
from mixprec.rounding import modes

_TURNS = 9
_BASE = "astype(bfloat16)"
# Calls are repeated, so that a measurement takes long enough, and so that what the
# function before it left in caches and in the allocator counts for little.
_ELEMENTS_A_MEASUREMENT = 1 << 26
_MOST_CALLS = 200


def ours() -> dict[str, Callable[[jax.Array], Any]]:
    """Gives jitted functions of a float32 array, by name."""
    functions: dict[str, Callable[[jax.Array], Any]] = {
        _BASE: lambda x: x.astype(jnp.bfloat16),
        "copy of the same bytes": lambda x: jax.lax.bitcast_convert_type(
            (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.uint16),
            jnp.bfloat16,
        ),
    }
    for mode in modes.MODES:
        key = jax.random.key(0) if mode == "stochastic" else None
        functions[mode] = functools.partial(mixprec.round_to, mode=mode, key=key)
    functions["stochastic by jax.random.bits"] = _by_threefry
    functions["bracket"] = mixprec.round_bracket
    functions["two astype(bfloat16)"] = lambda x: (
        x.astype(jnp.bfloat16),
        (-x).astype(jnp.bfloat16),
    )
    for dtype in ("float16", "float8_e4m3fn", "float8_e5m2"):
        functions[f"astype({dtype})"] = functools.partial(
            jax.lax.convert_element_type, new_dtype=dtype
        )
        functions[f"nearest_even to {dtype}"] = functools.partial(
            mixprec.round_to, dtype=dtype, mode="nearest_even"
        )
    return {name: jax.jit(function) for name, function in functions.items()}


def _by_threefry(x: jax.Array) -> jax.Array:
    """The usual way: random words from the framework's generator, added and cut off."""
    words = jax.random.bits(jax.random.key(0), x.shape, jnp.uint32) >> 16
    patterns = (jax.lax.bitcast_convert_type(x, jnp.uint32) + words) >> 16
    return jax.lax.bitcast_convert_type(patterns.astype(jnp.uint16), jnp.bfloat16)


def peers() -> dict[str, Callable[[np.ndarray], Any]]:
    """Gives functions of a NumPy array, by name; None for those not installed."""
    functions: dict[str, Any] = {
        "ml_dtypes astype": lambda x: x.astype(ml_dtypes.bfloat16)
    }
    gfloat, gfloat_formats, torch, torchao, qtorch, pychop = map(
        _import,
        (
            "gfloat",
            "gfloat.formats",
            "torch",
            "torchao.optim.quant_utils",
            "qtorch.quant",
            "pychop",
        ),
    )
    functions["gfloat nearest_even"] = gfloat and (
        lambda x: gfloat.round_ndarray(gfloat_formats.format_info_bfloat16, x)
    )
    functions["torch .to(bfloat16)"] = torch and (
        lambda x: torch.from_numpy(x).to(torch.bfloat16)
    )
    functions["torchao stochastic"] = torchao and (
        lambda x: torchao._fp32_to_bf16_sr(torch.from_numpy(x))
    )
    for rounding in ("nearest", "stochastic"):
        functions[f"qtorch {rounding}"] = qtorch and functools.partial(
            _qtorch, torch, qtorch, rounding
        )
        functions[f"pychop {rounding}"] = pychop and _pychop(pychop, rounding)
    return functions


def _pychop(pychop: Any, rounding: str) -> Callable[[np.ndarray], Any]:
    pychop.backend("jax")
    rmode = {"nearest": 1, "stochastic": 5}[rounding]
    chop = pychop.Chop(exp_bits=8, sig_bits=7, rmode=rmode)
    return lambda x: chop(jnp.asarray(x))


def _qtorch(torch: Any, qtorch: Any, rounding: str, x: np.ndarray) -> Any:
    return qtorch.float_quantize(torch.from_numpy(x), exp=8, man=7, rounding=rounding)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def measure(
    functions: dict[str, Callable[[Any], Any]], x: Any, progress: Callable[[], None]
) -> dict[str, float]:
    """Gives seconds a call: the median over turns in which each function is called."""
    calls = min(max(1, _ELEMENTS_A_MEASUREMENT // x.size), _MOST_CALLS)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(_TURNS + 1):  # the first compiles
        order = list(functions.items())
        for name, function in order[turn:] + order[:turn]:
            since = time.perf_counter()
            for _ in range(calls):
                result = function(x)
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - since) / calls)
        progress()
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--elements", type=int, nargs="+", default=[1 << 16, 1 << 20, 1 << 24]
    )
    sizes = parser.parse_args().elements
    known = peers()
    there = {name: function for name, function in known.items() if function}
    absent = sorted(known.keys() - there.keys())
    columns = []
    with rich.progress.Progress(transient=True) as progress:
        task = progress.add_task("turns", total=2 * len(sizes) * (_TURNS + 1))
        for size in sizes:
            x = jax.random.normal(jax.random.key(1), (size,))
            advance = functools.partial(progress.advance, task)
            found = measure(ours(), x, advance) | measure(there, np.array(x), advance)
            columns.append(found)
    table = rich.table.Table(title=f"time, as a multiple of {_BASE}")
    table.add_column("")
    for size in sizes:
        table.add_column(f"{size:,} elements", justify="right")
    for name in columns[0]:
        ratios = [f"{column[name] / column[_BASE]:.2f}" for column in columns]
        table.add_row(name, *ratios)
    table.caption = "; ".join(
        f"{size:,}: {1e9 * column[_BASE] / size:.2f} ns an element"
        for size, column in zip(sizes, columns, strict=True)
    )
    rich.console.Console(width=110).print(table)
    if absent:
        print(f"not installed: {', '.join(absent)}")


if __name__ == "__main__":
    main()
