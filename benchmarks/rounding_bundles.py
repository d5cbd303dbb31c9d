"""What the TPU kernel costs to compute, by the compiler's schedules. Nothing is run.

    python benchmarks/rounding_bundles.py [--generations v5e:2x2 ...]

A bundle is what a core begins in one cycle. The figure is the bundles for each vector
of 1024 elements: the difference between kernels for 2048 and for 1024 columns, so that
what a kernel needs once falls out.
"""

import argparse
import functools
import os
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import conftest  # noqa: F401  # finds the TPU compiler
import jax
import jax.numpy as jnp
import rich.console
import rich.progress
import rich.table
import tpu

import mixprec

_ROWS = 8192
_COLUMNS = (1024, 2048)
# A strip of the kernel has 32 rows: four vectors of eight in each 128 columns.
_VECTORS_BETWEEN = 4 * (_COLUMNS[1] - _COLUMNS[0]) // 128


def functions() -> dict[str, Callable[[jax.Array], Any]]:
    """Gives the kernels to look at, by name."""
    round_to = functools.partial(mixprec.round_to, backend="pallas")
    stochastic = functools.partial(round_to, mode="stochastic", key=3)
    with_statistics = functools.partial(mixprec.round_with_statistics, backend="pallas")
    return {
        "toward_zero": functools.partial(round_to, mode="toward_zero"),
        "nearest_even": functools.partial(round_to, mode="nearest_even"),
        "bracket": functools.partial(mixprec.round_bracket, backend="pallas"),
        "stochastic, hash": stochastic,
        "nearest_even, statistics": functools.partial(
            with_statistics, mode="nearest_even"
        ),
        "stochastic, hash, statistics": functools.partial(
            with_statistics, mode="stochastic", key=3
        ),
        "stochastic, hardware": functools.partial(stochastic, random_source="hardware"),
        "stochastic to float8_e4m3fn, hash": functools.partial(
            stochastic, dtype=jnp.float8_e4m3fn
        ),
        "stochastic to float8_e4m3fn, hardware": functools.partial(
            stochastic, dtype=jnp.float8_e4m3fn, random_source="hardware"
        ),
    }


def bundles(
    dump: pathlib.Path, generation: str, function: Callable[..., Any], columns: int
) -> int:
    """Compiles for f32[8192,columns], and counts the kernel's bundles in the dump."""
    for old in dump.iterdir():
        old.unlink()
    x = jax.ShapeDtypeStruct((_ROWS, columns), jnp.float32)
    tpu.compile_for(generation, jax.jit(function), x)
    (schedule,) = dump.glob("*mixprec_round*schedule-analysis_final_bundles.txt")
    found = re.search(r"non empty scheduled bundles: (\d+)", schedule.read_text())
    assert found, f"no count in {schedule}"
    return int(found[1])


def main() -> None:
    """Compiles and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generations", nargs="+", default=list(tpu.GENERATIONS))
    generations = parser.parse_args().generations
    table = rich.table.Table(title="bundles for each vector of 1024 elements")
    for name in ("", *generations):
        table.add_column(name, justify="right" if name else "left")
    with tempfile.TemporaryDirectory() as dump:
        # Read when the compiler starts.
        arguments = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = arguments
        kernels = functions().items()
        for name, function in rich.progress.track(kernels, "kernels", transient=True):
            cells = []
            for generation in generations:
                few, many = (
                    bundles(pathlib.Path(dump), generation, function, columns)
                    for columns in _COLUMNS
                )
                cells.append(f"{(many - few) / _VECTORS_BETWEEN:.1f}")
            table.add_row(name, *cells)
    rich.console.Console(width=110).print(table)


if __name__ == "__main__":
    main()
