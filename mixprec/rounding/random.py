"""Counter-based random bits: a pure function of (seed, element index, element value).

There is no generator state and no array of random bits in memory: each element hashes
its own position, so the bits are the same for any block shape, mesh or backend, and the
hash fuses into whatever reads it. The Pallas kernel and the XLA path call the same
code.

The index is multiplied by an odd number and folded (a Weyl sequence), then mixed by
`lowbias32` (Chris Wellons, "Prospecting for Hash Functions", 2018; two multiplications,
three shifts, a bijection of the 32-bit words). One seed word goes in before each. With
`lowbias32` alone, pairs of neighbours are not uniform; with another one in front, more
operations buy nothing that the tests can see (docs/rounding.md has both figures).
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from mixprec.rounding import primitives

# 2^32 divided by the golden ratio, which is odd. It keeps the all-zero seed and index
# away from 0, the fixed point of the mixing function.
_GOLDEN = np.uint32(0x9E3779B9)
_VALUE_FACTOR = np.uint32(0x85EBCA6B)  # odd, so multiplying by it loses nothing


def mix(h: jax.Array) -> jax.Array:
    """Mixes [...] uint32 words so that each input bit flips about half the output."""
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x7FEB352D)
    h = h ^ (h >> np.uint32(15))
    h = h * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


class Strides(NamedTuple):
    """How far apart neighbours along each dimension are, in the element index.

    The index of an array with up to 2^32 elements is one 32-bit word. That of a larger
    one is two: the place among the trailing dimensions that together stay below that
    number, and the place among the leading ones.

    Attributes:
      low: of the first word, one a dimension.
      high: of the second word, one a dimension; all 0 if there is none.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def has_high(self) -> bool:
        """Whether there is a second word."""
        return any(self.high)

    def batched(self, place: int = 0) -> "Strides":
        """Adds a dimension, before `place`, whose members have the same indices."""
        low, high = (
            (*word[:place], 0, *word[place:]) for word in (self.low, self.high)
        )
        return Strides(low, high)


def row_major_strides(shape: tuple[int, ...]) -> Strides:
    """Gives the strides of elements counted in row-major order.

    Raises:
      ValueError: a dimension is longer than 2^32, or symbolic.
    """
    check_sizes_known(shape)
    if any(size > 2**32 for size in shape):
        raise ValueError(
            f"`x` must have no dimension longer than 2**32, got shape {shape}. "
            "Reshape it."
        )
    remaining = [math.prod(shape[d:]) for d in range(len(shape) + 1)]
    first_low = next(d for d, number in enumerate(remaining) if number <= 2**32)
    leading = math.prod(shape[:first_low])
    low, high = [], []
    for dimension, size in enumerate(shape):
        leading //= max(size, 1) if dimension < first_low else 1
        # Of a single element there is no neighbour.
        is_low = dimension >= first_low and size > 1
        low.append(remaining[dimension + 1] if is_low else 0)
        is_high = dimension < first_low and size > 1
        high.append(leading if is_high else 0)
    return Strides(tuple(low), tuple(high))


def check_sizes_known(shape: tuple[Any, ...]) -> None:
    """Raises ValueError if a dimension is symbolic, as `jax.export` can make it."""
    if not all(isinstance(size, int) for size in shape):
        raise ValueError(
            '`x` must have a shape of known sizes for mode "stochastic", for '
            f"statistics and for the kernel, got {shape}. Export it for each shape, or "
            'take another mode of round_to with backend "xla".'
        )


def element_index(shape: tuple[int, ...], strides: tuple[int, ...]) -> jax.Array:
    """Gives each element's position: the sum over dimensions of place times stride.

    Args:
      shape: of the array.
      strides: one a dimension.

    Returns:
      [*shape] uint32.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for dimension, stride in enumerate(strides):
        if stride and shape[dimension] > 1:
            place = jax.lax.broadcasted_iota(jnp.uint32, shape, dimension)
            index = index + place * np.uint32(stride)
    return index


def index_words(shape: tuple[int, ...], strides: Strides) -> tuple[jax.Array, ...]:
    """Gives each element's index, as one or two [*shape] uint32 words."""
    words = (strides.low, strides.high) if strides.has_high else (strides.low,)
    return tuple(element_index(shape, word) for word in words)


def random_bits(
    seed: Sequence[jax.Array],
    index: Sequence[jax.Array],
    value_bits: jax.Array | None = None,
) -> jax.Array:
    """Draws 32 random bits an element.

    Args:
      seed: two uint32 scalars, themselves hashed, as `fold_words` gives them.
      index: one or two [...] uint32 words: each element's place in the whole array.
      value_bits: [...] uint32 or None. The element's own bit pattern, to tell apart
        draws that have seed and index in common (the layers of a scanned stack).

    Returns:
      [...] uint32.
    """
    h = (index[0] ^ seed[0]) * _GOLDEN
    h = h ^ (h >> np.uint32(15))
    for word in index[1:]:
        h = mix((h ^ word) + _GOLDEN)
    if value_bits is not None:
        h = h ^ (value_bits * _VALUE_FACTOR)
    return mix((h ^ seed[1]) + _GOLDEN)


def seed_from_key(key: jax.Array | int) -> jax.Array:
    """Turns a JAX key or an integer into the two seed words.

    Args:
      key: a typed key (`jax.random.key`), a raw uint32 key (`jax.random.PRNGKey`), or
        an integer seed. Every word of the key counts, whatever its implementation.

    Returns:
      [2] uint32.

    Raises:
      TypeError: `key` is none of these, or an array of several keys.
      ValueError: `key` is a negative integer or one of more than 64 bits.
    """
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        if not 0 <= key < 2**64:
            raise ValueError(
                f"`key` must be from 0 to 2**64 - 1 if an integer, got {key}. "
                "Pass a smaller seed or a JAX key."
            )
        words: Any = jnp.array([int(key) >> 32, int(key) & 0xFFFFFFFF], jnp.uint32)
    elif isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(key)
    else:
        words = key
    is_array = isinstance(words, (np.ndarray, jax.Array))
    if not is_array or words.dtype != jnp.uint32 or words.ndim != 1 or not words.size:
        described = getattr(key, "aval", None) or repr(key)
        raise TypeError(
            "`key` must be one JAX key or a non-negative integer seed, got "
            f"{described}. Make one with `jax.random.key(seed)`."
        )
    return fold_words(words)


def fold_words(words: jax.Array) -> jax.Array:
    """Hashes [n] uint32 words into [2] uint32 seed words that all depend on all."""
    first, second = jnp.uint32(0), jnp.uint32(1)
    for position in range(words.shape[0]):
        first, second = mix((first ^ words[position]) + _GOLDEN), first ^ second
        second = mix(second + first + np.uint32(position))
    return jnp.stack([first, second])


def fold_in_path(seed: jax.Array, path: str) -> jax.Array:
    """Gives the seed of the tensor at `path`.

    Args:
      seed: [2] uint32.
      path: of the parameter or module, such as "layers/mlp/up/kernel".

    Returns:
      [2] uint32.
    """
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    words = np.frombuffer(digest, "<u4").astype(np.uint32)
    (folded,) = _fold_in_p.bind(seed, words)
    return folded


def _fold_in(seed: jax.Array, words: jax.Array) -> list[jax.Array]:
    if seed.ndim > 1:  # a batch
        return jax.vmap(_fold_in, (0, None))(seed, words)
    return [mix((seed ^ words) + _GOLDEN)]


# One equation a tensor, since a model folds in the paths of many.
_fold_in_p = primitives.make("mixprec_fold_in", lambda seed, words: [seed])
mlir.register_lowering(_fold_in_p, mlir.lower_fun(_fold_in))


def _batch_fold_in(
    args: tuple[jax.Array, jax.Array], dimensions: tuple[int, None]
) -> tuple[list[jax.Array], list[int]]:
    seed, words = args
    return _fold_in_p.bind(jnp.moveaxis(seed, dimensions[0], 0), words), [0]


batching.primitive_batchers[_fold_in_p] = _batch_fold_in
