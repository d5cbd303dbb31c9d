"""The number formats that values are rounded to, and what tells one from another."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Of float32, from which all others are made.
EXPONENT_BIAS = 127
MANTISSA_BITS = 23


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format, narrower than float32.

    Without its sign bit, the pattern of a number is its rank among the format's
    magnitudes: 0 is zero, 1 the smallest subnormal, and so on in steps of one.

    Attributes:
      dtype: its name in JAX.
      exponent_bits: width of the exponent.
      mantissa_bits: width of the mantissa, without the implied bit.
      bias: of the exponent.
      has_infinity: whether infinity is the pattern after the largest finite number; if
        not, that pattern is the NaN.
    """

    dtype: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinity: bool

    @property
    def bits(self) -> int:
        """Width of a pattern, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def dropped_bits(self) -> int:
        """How many mantissa bits of a float32 a normal number of the format lacks."""
        return MANTISSA_BITS - self.mantissa_bits

    @property
    def rebase(self) -> int:
        """What a float32 pattern loses when its exponent gets the format's bias."""
        return (EXPONENT_BIAS - self.bias) << MANTISSA_BITS

    @property
    def largest(self) -> int:
        """Pattern of the largest finite number."""
        top = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        return top - 1 if self.has_infinity else top + (1 << self.mantissa_bits) - 2

    @property
    def largest_value(self) -> float:
        """The largest finite number."""
        return float(jnp.finfo(self.dtype).max)

    @property
    def pattern_dtype(self) -> np.dtype:
        """The unsigned integers of the same width."""
        return np.dtype(f"uint{self.bits}")

    @property
    def has_float32_exponents(self) -> bool:
        """Whether a pattern is the upper part of a float32 pattern."""
        return self.bias == EXPONENT_BIAS


FORMATS: tuple[Format, ...] = (
    # Wang & Kanwar 2019, "BFloat16: the secret to high performance on Cloud TPUs".
    Format("bfloat16", 8, 7, 127, has_infinity=True),
    # IEEE 754-2019, table 3.5: binary16.
    Format("float16", 5, 10, 15, has_infinity=True),
    # Micikevicius et al. 2022, "FP8 formats for deep learning", table 1: E4M3, E5M2.
    Format("float8_e4m3fn", 4, 3, 7, has_infinity=False),
    Format("float8_e5m2", 5, 2, 15, has_infinity=True),
)
_BY_NAME = {format_.dtype: format_ for format_ in FORMATS}


def find_format(dtype: jax.typing.DTypeLike) -> Format:
    """Gives the format of a dtype.

    Raises:
      TypeError: there is none for it; the message names those there are.
    """
    name = dtype_name(dtype)
    if name not in _BY_NAME:
        raise TypeError(
            f"`dtype` must be one of {', '.join(_BY_NAME)}, got {name or repr(dtype)}. "
            "Choose one of them."
        )
    return _BY_NAME[name]


def dtype_name(dtype: Any) -> str | None:
    """Gives the name of a dtype, or None for what is no dtype."""
    # NumPy takes None for float64, and a JAX array for the dtype it has.
    if dtype is None or isinstance(dtype, (np.ndarray, jax.Array)):
        return None
    try:
        return jnp.dtype(dtype).name
    except Exception:  # of several kinds, SyntaxError among them
        return None
