"""Integer arguments are those of Python and numpy; what is no integer is refused where it is given."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

import elasticgang as eg
from elasticgang.integers import integer, integer_from, required_integer


@pytest.mark.parametrize(
    ("value", "number"), [(3, 3), (np.int64(3), 3), (True, None), (np.bool_(True), None), (3.0, None), ("3", None)]
)
def test_an_integer_is_found(value: object, number: int | None) -> None:
    assert integer(value) == number
    assert integer_from(3, value) == number
    assert integer_from(4, value) is None


def test_what_is_required_is_named() -> None:
    assert required_integer("size", np.int32(0), 0) == 0
    with pytest.raises(ValueError, match=r"^`size` must be at least 1, but is 0 instead.$"):
        required_integer("size", 0, 1)
    with pytest.raises(ValueError, match=r"^`size` must be an integer, but is 1.0 instead.$"):
        required_integer("size", 1.0, 1)


def test_a_loop_over_no_integer_of_steps_is_refused_before_the_first() -> None:
    manager = eg.join(layout=eg.ParallelLayout())
    with pytest.raises(ValueError, match=r"^`num_steps` must be an integer, but is 1000.0 instead.$"):
        next(manager.steps(cast(int, 1e3)))
    assert list(manager.steps(0)) == []
