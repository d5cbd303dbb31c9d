"""Rounding on the GPU of this machine: the same bits as on the CPU, and how fast.

    python benchmarks/rounding_gpu.py [--elements 268435456]

Needs JAX with its CUDA plugin, of the same version (`pip install "jax[cuda12]"`). First
compares, bit for bit and in every mode and format, what XLA's operations and the kernel
give there with what XLA's operations give on the CPU. Then times a rounding against a
copy of the same bytes, all in turns.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

import mixprec
from mixprec.rounding import formats, modes

_SHAPES = ((), (7,), (5000,), (37, 300), (3, 40, 2, 300))
_TURNS = 9
_CALLS = 20


def compare(device: jax.Device) -> list[str]:
    """Gives what differs between the device and the CPU."""
    cpu = jax.devices("cpu")[0]
    generator = np.random.default_rng(0)
    different = []
    for shape in _SHAPES:
        words = np.asarray(generator.integers(0, 2**32, shape, np.uint32))
        x = words.view(np.float32).reshape(shape)
        for mode in modes.MODES:
            for dtype in (f.dtype for f in formats.FORMATS):
                run = functools.partial(
                    mixprec.round_to,
                    dtype=dtype,
                    mode=mode,
                    key=3 if mode == "stochastic" else None,
                )
                expected = _run_on(cpu, run, x)
                for backend in ("xla", "pallas"):
                    found = _run_on(device, functools.partial(run, backend=backend), x)
                    if not np.array_equal(found, expected):
                        different.append(f"{backend}, {mode} to {dtype}, {shape}")
    return different


def _run_on(
    device: jax.Device, function: Callable[..., jax.Array], x: np.ndarray
) -> np.ndarray:
    found = np.asarray(jax.jit(function)(jax.device_put(x, device)))
    return found.view(f"u{found.dtype.itemsize}")


def speed(device: jax.Device, elements: int) -> rich.table.Table:
    """Times rounding to bfloat16 against a copy of the same bytes."""
    x = jax.device_put(jnp.full((elements,), 1.001, jnp.float32), device)
    functions: dict[str, Callable[[jax.Array], Any]] = {
        "copy of the same bytes": jax.jit(_copy),
        "astype(bfloat16)": jax.jit(lambda x: x.astype(jnp.bfloat16)),
    }
    for mode in ("nearest_even", "stochastic"):
        for backend in ("xla", "pallas"):
            key = 3 if mode == "stochastic" else None
            functions[f"{mode}, {backend}"] = jax.jit(
                functools.partial(mixprec.round_to, mode=mode, key=key, backend=backend)
            )
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(_TURNS + 1):  # the first compiles
        for name, function in functions.items():
            since = time.perf_counter()
            results = [function(x) for _ in range(_CALLS)]
            jax.block_until_ready(results)
            times[name].append((time.perf_counter() - since) / _CALLS)
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    table = rich.table.Table(title=f"{device.device_kind}, {elements:,} elements")
    for column in ("", "times the copy", "GB/s"):
        table.add_column(column, justify="right" if column else "left")
    base = medians["copy of the same bytes"]
    for name, median in medians.items():
        rate = 6 * elements / median / 1e9  # 4 bytes in, 2 out
        table.add_row(name, f"{median / base:.2f}", f"{rate:,.0f}")
    return table


def _copy(x: jax.Array) -> jax.Array:
    """Reads and writes what rounding to bfloat16 does, and computes next to nothing."""
    return (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.uint16)


def main() -> None:
    """Compares, then measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 28)
    parser.add_argument("--platform", default="gpu", help='"cpu" tries this script')
    arguments = parser.parse_args()
    try:
        device = jax.devices(arguments.platform)[0]
    except RuntimeError as error:
        sys.exit(f"no {arguments.platform} for JAX on this machine: {error}")
    different = compare(device)
    for line in different:
        print(f"differs from the CPU: {line}")
    if not different:
        print("every mode, format, backend and shape: the same bits as on the CPU")
    rich.console.Console(width=100).print(speed(device, arguments.elements))
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
