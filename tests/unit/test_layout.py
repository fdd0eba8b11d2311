"""What a user may declare, and what the families of gangs are."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import FrozenInstanceError, asdict
from typing import Any

import pytest

from elasticgang.errors import LayoutError
from elasticgang.layout import AXES, FAMILIES, ParallelLayout


def test_the_default_is_one_seat_to_a_replica_group() -> None:
    layout = ParallelLayout()
    assert asdict(layout) == {"pp": 1, "sdp": 1, "tp": 1, "min_replicas": 1, "within_host": ("tp",)}
    assert layout.unit == 1


def test_the_unit_is_the_product_of_the_model_axes() -> None:
    assert ParallelLayout(pp=2, sdp=3, tp=4, min_replicas=7).unit == 24


def test_a_layout_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        ParallelLayout().tp = 2  # type: ignore[misc]


@pytest.mark.parametrize("given", [("tp", "pp"), ("pp", "tp"), ["tp", "pp"]])
def test_equal_declarations_are_equal(given: Any) -> None:
    layout = ParallelLayout(pp=2, tp=2, within_host=given)
    assert layout == ParallelLayout(pp=2, tp=2, within_host=("pp", "tp"))
    assert hash(layout) == hash(ParallelLayout(pp=2, tp=2, within_host=("pp", "tp")))
    assert layout.within_host == ("pp", "tp")


@pytest.mark.parametrize("name", ["pp", "sdp", "tp", "min_replicas"])
@pytest.mark.parametrize("size", [0, -1, 1.0, "2", None, True])
def test_a_size_that_is_none_is_refused(name: str, size: Any) -> None:
    with pytest.raises(LayoutError, match=rf"`{name}` must be an integer of at least 1, but is .* instead\."):
        ParallelLayout(**{name: size})


@pytest.mark.parametrize("given", ["tp", ("rdp",), ("cp",), ("tp", "tp"), ("",), None, 3, ([],)])
def test_within_host_names_model_axes(given: Any) -> None:
    with pytest.raises(LayoutError, match="`within_host` must be a tuple of some of pp, sdp, tp, each once, but is"):
        ParallelLayout(within_host=given)


def test_a_layout_error_is_a_value_error_and_pickles() -> None:
    with pytest.raises(ValueError, match="`tp` must be") as caught:
        ParallelLayout(tp=0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is LayoutError
    assert str(again) == str(caught.value)


def test_the_families() -> None:
    assert AXES == ("pp", "rdp", "sdp", "tp")
    assert list(FAMILIES) == ["root", "dp", "rdp", "sdp", "tp", "pp", "replica"]
    assert set(itertools.chain.from_iterable(FAMILIES.values())) == set(AXES)
    assert set(FAMILIES["replica"]) == set(AXES) - {"rdp"}
