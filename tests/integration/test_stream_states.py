"""`StreamLoader` with streams whose states are large, or cannot be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elasticgang.errors import OperationalError
from elasticgang.train.stream_reader import MAX_STATES_BYTES
from tests.integration.test_stream_loader import NUM_SPLITS, WAYS, Alone, Numbers, trained


class Stated(Numbers):
    """Its state is what `saved` returns, beside its place."""

    def __init__(self, number: int, saved: Callable[[], Any]) -> None:
        super().__init__(number)
        self._saved = saved

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "saved": self._saved()}


def fail() -> None:
    raise ArithmeticError("no state")


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


# STREAMREADER-2
@WAYS
@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (fail, "the `state_dict` of the split cannot be saved: ArithmeticError: no state"),
        (lambda: {1, 2}, r"cannot be saved: TypeError: state\['saved'\] is of set"),
        (endless, "cannot be saved: RecursionError"),
        (lambda: "x" * (MAX_STATES_BYTES // NUM_SPLITS), r"has 8,38\d,\d\d\d bytes as text, and may have 8,388,608"),
        (
            lambda: torch.zeros(1 << 20, dtype=torch.float64),
            r"has 11,18\d,\d\d\d bytes as text, and may have 8,388,608",
        ),
    ],
    ids=["raises", "set", "endless", "long", "tensor"],
)
def test_a_state_that_cannot_be_saved_names_its_split(
    saved: Callable[[], Any], message: str, options: dict[str, int]
) -> None:
    with pytest.raises(OperationalError, match=r"slot 0 of step 0 cannot be read from split 0:") as raised:
        trained(lambda number: Stated(number, saved if number == 0 else lambda: 0), 1, **options)
    assert raised.match(message)


@WAYS
def test_a_split_may_have_a_state_of_megabytes(options: dict[str, int]) -> None:
    def saved() -> Any:
        return {"text": '"' * (1 << 20), "tensor": torch.arange(1 << 18)}  # 4 and 2.8 MB as text

    whole = trained(Numbers, 4).committed
    first = trained(lambda number: Stated(number, saved), 2, **options)
    second = Alone(lambda number: Stated(number, saved), **options)
    second.loader.load_state_dict(first.loader.state_dict())
    second.register()
    assert first.committed + second.train(2).committed == whole
