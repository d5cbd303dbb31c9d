import numpy as np
import pytest

from mixprec.rounding import modes


def test_every_mode_is_defined():
    assert set(modes.DEFINITIONS) == set(modes.MODES)


@pytest.mark.parametrize("mode", modes.MODES)
def test_known_modes_pass(mode):
    modes.check_mode(mode)


@pytest.mark.parametrize(
    ("mode", "hint"),
    [
        ("nearest_evn", "Did you mean 'nearest_even'?"),
        ("towards_zero", "Did you mean 'toward_zero'?"),
        ("xyz", "Choose one of them"),
        (None, "Choose one of them"),
        (np.zeros(3), "Choose one of them"),
        (np.array(["to_odd", "to_even"]), "Choose one of them"),
        (["to_odd"], "Did you mean 'to_odd'?"),
    ],
)
def test_unknown_modes_are_refused_with_the_near_one(mode, hint):
    with pytest.raises(
        ValueError, match="`mode` must be one of nearest_even, "
    ) as error:
        modes.check_mode(mode)
    assert hint in str(error.value)
