"""What statistics are, told by float64 and NumPy's own conversions.

Nothing here shares a formula with the code under test, which compares integers.
"""

import numpy as np

# Published: IEEE 754-2019, table 3.5; Micikevicius et al. 2022, table 1.
LARGEST = {
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float16": 65504.0,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}
COUNTS = ("inexact", "up", "underflowed", "overflowed", "nan", "not_finite")
SUMS = ("error", "squared_error", "squared_value")


def statistics(x, rounded, name):
    """Gives the fields by name, from the array and what it was rounded to.

    The sums are float64; `absolute_error`, no field, tells how far off they may be.
    """
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        x, y = (np.asarray(a).astype(np.float64).ravel() for a in (x, rounded))
    is_finite = np.isfinite(x)
    is_pair = is_finite & np.isfinite(y)
    error, value = (y - x)[is_pair], x[is_pair]
    return {
        "inexact": np.sum(is_finite & (y != x)),
        "up": np.sum(is_finite & ~(abs(y) <= abs(x))),
        "underflowed": np.sum((x != 0) & (y == 0)),
        "overflowed": np.sum(is_finite & (abs(x) > LARGEST[name])),
        "nan": np.sum(np.isnan(y) & ~np.isnan(x)),
        "not_finite": np.sum(~is_finite),
        "error": error.sum(),
        "squared_error": (error**2).sum(),
        "squared_value": (value**2).sum(),
        "largest_error": abs(error).max(initial=0),
        "absolute_error": abs(error).sum(),
    }


def check(found, x, rounded, name="bfloat16", sums=True):
    """Compares `found`, with or without its sums, which can overflow."""
    expected = statistics(x, rounded, name)
    for field in COUNTS:
        assert getattr(found, field).dtype == np.uint32
        assert int(getattr(found, field)) == expected[field], field
    assert found.largest_error.dtype == np.float32
    np.testing.assert_allclose(found.largest_error, expected["largest_error"], 1e-7)
    for field in SUMS if sums else ():
        assert getattr(found, field).dtype == np.float32
        scale = "absolute_error" if field == "error" else field
        away = abs(float(getattr(found, field)) - expected[field])
        assert away <= 1e-5 * expected[scale], field
