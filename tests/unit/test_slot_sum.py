"""The sum of the gradients of a rank's slots, on one rank: what is kept, and what can be left out again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from elasticgang.gang import FakeGang
from elasticgang.train.plain_sum import PlainSum
from elasticgang.train.reproducible import ReproducibleSum

CPU = torch.device("cpu")
NUM_LEAVES = 7
KINDS = pytest.mark.parametrize("kind", [ReproducibleSum, PlainSum])
Kind = type[ReproducibleSum] | type[PlainSum]


def gradient_of(leaf: int) -> list[Tensor]:
    """Whole numbers, whose sums are exact in any order."""
    return [torch.full((3, 2), 2.0**leaf), torch.full((5,), -(2.0**leaf))]


def sum_of(kind: Kind, num_loose: int) -> ReproducibleSum | PlainSum:
    return kind(gradient_of(0), lambda num: torch.full((num,), 7.0), keeps=True, num_loose=num_loose)


def compute(total: ReproducibleSum | PlainSum, leaves: Sequence[int]) -> None:
    for leaf in leaves:
        total.add(leaf, gradient_of(leaf))


def reduce(total: ReproducibleSum | PlainSum) -> None:
    total.reduce(FakeGang(CPU))
    total.gather(FakeGang(CPU))


def whole(found: list[Tensor | None] | None) -> list[Tensor]:
    """All gradients: each has a leaf."""
    assert found is not None
    present = [each for each in found if each is not None]
    assert len(present) == len(found)
    return present


def check_whole(total: ReproducibleSum | PlainSum) -> None:
    found = whole(total.finish())
    expected = float(2**NUM_LEAVES - 1)
    assert [set(each.flatten().tolist()) for each in found] == [{expected}, {-expected}]


# SUM-2
@KINDS
@pytest.mark.parametrize("num_loose", [1, 2, 3])
@pytest.mark.parametrize("num_more", range(4))
def test_loose_leaves_can_be_left_out_again(kind: Kind, num_loose: int, num_more: int) -> None:
    """After a reduction too, which had all leaves in it. `num_more`: of the loose leaves, those that are kept."""
    num_more = min(num_more, num_loose)
    total = sum_of(kind, num_loose)
    total.begin([range(NUM_LEAVES)], 0)
    compute(total, range(NUM_LEAVES))
    reduce(total)
    total.drop()
    num_firm = NUM_LEAVES - num_loose
    assert (sorted(total.firm), total.loose) == (list(range(num_firm)), list(range(num_firm, NUM_LEAVES)))

    total.begin([range(NUM_LEAVES)], 0, range(num_firm + num_more))
    assert (sorted(total.firm), total.loose) == (list(range(num_firm + num_more)), [])
    compute(total, range(num_firm + num_more, NUM_LEAVES))
    reduce(total)
    check_whole(total)


# SUM-3
@KINDS
@pytest.mark.parametrize("num_loose", [0, 2])
@pytest.mark.parametrize("num_kept", [0, 2, 4])
def test_a_gradient_that_no_leaf_has_is_none(kind: Kind, num_loose: int, num_kept: int) -> None:
    """Whether or not the leaves that have it are kept."""
    total = sum_of(kind, num_loose)
    total.begin([range(NUM_LEAVES)], 0)
    for leaf in range(5):
        total.add(leaf, [gradient_of(leaf)[0], gradient_of(leaf)[1] if leaf == 3 else None])
    total.drop()

    total.begin([range(NUM_LEAVES)], 0, range(num_kept))
    kept = sorted(total.firm)
    for leaf in range(len(kept), NUM_LEAVES):
        total.add(leaf, [gradient_of(leaf)[0], None])
    reduce(total)
    found = total.finish()
    assert found is not None
    first, second = found
    assert first is not None
    assert set(first.flatten().tolist()) == {float(2**NUM_LEAVES - 1)}
    assert second is None if 3 not in kept else second is not None and set(second.tolist()) == {-8.0}


# SUM-1
@KINDS
@pytest.mark.parametrize("num_loose", [0, 1, 2])
def test_a_reduction_changes_no_leaf_that_stays(kind: Kind, num_loose: int) -> None:
    total = sum_of(kind, num_loose)
    total.begin([range(NUM_LEAVES)], 0)
    compute(total, range(NUM_LEAVES))
    for _ in range(3):
        reduce(total)
        found = whole(total.finish())
        found[0].zero_()  # as the optimizer divides them
        total.begin([range(NUM_LEAVES)], 0, range(NUM_LEAVES))
    reduce(total)
    check_whole(total)


@KINDS
@pytest.mark.parametrize("num_loose", [0, 1])
def test_a_leaf_that_may_be_wrong_is_dropped(kind: Kind, num_loose: int) -> None:
    """With all others, if it is in a sum with them."""
    total = sum_of(kind, num_loose)
    total.begin([range(NUM_LEAVES)], 0)
    compute(total, range(4))
    total.discard(3)
    total.discard(4)  # it has none
    kept = range(3) if num_loose else range(0)
    assert sorted(total.firm + total.loose) == list(kept)
    total.begin([range(NUM_LEAVES)], 0, kept)
    compute(total, range(len(kept), NUM_LEAVES))
    reduce(total)
    check_whole(total)


@KINDS
def test_vectors_are_used_again(kind: Kind) -> None:
    """Steps and tries need no new memory after the first ones."""
    num_made = 0

    def empty(num: int) -> Tensor:
        nonlocal num_made
        num_made += 1
        return torch.empty(num)

    total = kind(gradient_of(0), empty, keeps=True, num_loose=2)

    def attempt(kept: Sequence[int]) -> None:
        total.begin([range(NUM_LEAVES)], 0, kept)
        compute(total, range(len(kept), NUM_LEAVES))
        reduce(total)
        total.drop()

    for _ in range(2):
        attempt(())
        attempt(range(5))
    before = num_made
    for _ in range(5):
        attempt(())
        attempt(range(5))
    assert num_made == before
