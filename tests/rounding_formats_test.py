import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import rounding_oracle as oracle

from mixprec.rounding import formats


@pytest.mark.parametrize("format_", formats.FORMATS, ids=lambda format_: format_.dtype)
def test_properties_are_those_of_ml_dtypes_and_of_the_published_tables(format_):
    info = ml_dtypes.finfo(format_.dtype)
    assert format_.bits == info.bits
    assert format_.exponent_bits == info.nexp
    assert format_.mantissa_bits == info.nmant
    assert format_.bias == 1 - info.minexp
    assert format_.largest_value == float(info.max)
    largest = np.array(format_.largest, format_.pattern_dtype).view(format_.dtype)
    assert largest == info.max
    after = np.array(format_.largest + 1, format_.pattern_dtype).view(format_.dtype)
    assert np.isinf(after) == format_.has_infinity
    assert np.isnan(after) != format_.has_infinity
    exponent_bits, mantissa_bits, largest = oracle.FORMATS[format_.dtype]
    assert (format_.exponent_bits, format_.mantissa_bits) == (
        exponent_bits,
        mantissa_bits,
    )
    assert format_.largest == largest


def test_formats_are_found_by_every_way_to_name_a_dtype():
    for dtype in ("bfloat16", jnp.bfloat16, ml_dtypes.bfloat16, np.dtype("bfloat16")):
        assert formats.find_format(dtype).dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "float8_e4m3"])
def test_other_dtypes_are_refused_with_those_there_are(dtype):
    with pytest.raises(TypeError, match=f"`dtype` must be one of bfloat16, .*{dtype}"):
        formats.find_format(dtype)


@pytest.mark.parametrize("dtype", [None, "foo", 3, "(2,", np.zeros(3), jnp.zeros(3)])
def test_what_is_no_dtype_is_refused_as_it_was_given(dtype):
    with pytest.raises(TypeError, match="`dtype` must be one of bfloat16, ") as error:
        formats.find_format(dtype)
    assert f"got {dtype!r}. " in str(error.value)
