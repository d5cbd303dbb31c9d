"""Rounds every float32 in every deterministic mode and compares with the oracle.

    python tests/exhaustive.py [--dtype bfloat16 ...] [--processes 2]

All 2^32 patterns, both kinds of overflow; NaN by its sign and quiet bit. Prints one
line a format; exits with 1 if anything differs.
"""

import argparse
import concurrent.futures
import functools
import multiprocessing
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
import rounding_oracle as oracle

from mixprec.rounding import bits, formats

_CHUNK_BITS = 17  # patterns of one sign in a task
_CHUNKS = 1 << (31 - _CHUNK_BITS)
_CASES = [(mode, s) for mode in oracle.DETERMINISTIC for s in (False, True)]


@functools.cache
def _compiled(name):
    to = formats.find_format(name)

    @jax.jit
    def run(start):
        patterns = start + jnp.arange(1 << _CHUNK_BITS, dtype=jnp.uint32)
        return [
            bits.round_bits(patterns, to, mode, saturate=saturate)
            for mode, saturate in _CASES
        ]

    return run


def check_chunk(name, chunk):
    """Gives how many results of a chunk differ, and the first that does, in words."""
    first = chunk << _CHUNK_BITS
    magnitudes = np.arange(first, first + (1 << _CHUNK_BITS), dtype=np.int32)
    place = oracle.locate(magnitudes, name)
    # Of a NaN, the oracle gives no payload.
    payload = (1 << (oracle.table(name).mantissa_bits - 1)) - 1
    payload = np.where(magnitudes > 0x7F800000, np.int32(payload), np.int32(0))
    wrong, example = 0, None
    for sign in (0, 0x80000000):
        patterns = magnitudes.astype(np.uint32) | np.uint32(sign)
        results = _compiled(name)(np.uint32(first | sign))
        for (mode, saturate), result in zip(_CASES, results, strict=True):
            expected = oracle.round_patterns(
                patterns, name, mode, saturate=saturate, place=place
            )
            found = np.asarray(result).astype(np.int32)
            differs = np.flatnonzero((found | payload) != (expected | payload))
            wrong += len(differs)
            if len(differs) and example is None:
                at = differs[0]
                example = (
                    f"{name} {mode} saturate={saturate}: {patterns[at]:#010x} must "
                    f"give {expected[at]:#x}, got {found[at]:#x}"
                )
    return wrong, example


def check(name, processes):
    """Checks one format; gives whether all is right."""
    since, wrong, example = time.perf_counter(), 0, None
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool,
        rich.progress.Progress(
            *rich.progress.Progress.get_default_columns(),
            rich.progress.MofNCompleteColumn(),
        ) as progress,
    ):
        task = progress.add_task(name, total=_CHUNKS)
        for found, text in pool.map(
            check_chunk, [name] * _CHUNKS, range(_CHUNKS), chunksize=64
        ):
            wrong += found
            example = example or text
            progress.advance(task)
    results = _CHUNKS * len(_CASES) << (_CHUNK_BITS + 1)
    print(
        f"{name}: {1 << 32:,} patterns, {len(oracle.DETERMINISTIC)} modes, both kinds "
        f"of overflow: {results:,} results, {wrong:,} wrong, "
        f"{time.perf_counter() - since:,.0f} s"
    )
    if example:
        print(f"  for example: {example}")
    return wrong == 0


def main():
    """Checks the formats that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dtype", nargs="+", choices=oracle.FORMATS, default=["bfloat16"]
    )
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    right = [check(name, options.processes) for name in options.dtype]
    if not all(right):
        sys.exit(1)


if __name__ == "__main__":
    main()
