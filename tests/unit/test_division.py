"""The parts of ranks in a step that is tried again."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elasticgang.train.division import Part, divide, holding
from elasticgang.train.partition import slots_of


def parts_of(num_slots: int, held: list[list[int]], is_active: list[bool]) -> list[Part]:
    messages = [holding(num_slots, rank, slots) for rank, slots in enumerate(held)]
    return divide([sum(column) for column in zip(*messages, strict=True)], is_active)


NOBODY = -1


# DIVISION-1, DIVISION-2, DIVISION-3
@given(
    holders=st.lists(st.integers(NOBODY, 5), min_size=1, max_size=70),
    is_active=st.lists(st.booleans(), min_size=6, max_size=6).filter(any),
)
def test_every_slot_is_kept_by_its_holder_or_due_from_one_active_rank(
    holders: list[int], is_active: list[bool]
) -> None:
    held = [[slot for slot, holder in enumerate(holders) if holder == rank] for rank in range(6)]
    parts = parts_of(len(holders), held, is_active)
    assert Counter(slot for part in parts for slot in part.slots) == Counter(range(len(holders)))
    for rank, part in enumerate(parts):
        assert list(part.kept) == (held[rank] if is_active[rank] else [])
        assert list(part.due) == sorted(part.due)
        assert is_active[rank] or not part.slots
    due = [len(part.due) for rank, part in enumerate(parts) if is_active[rank]]
    assert max(due) - min(due) <= 1


# DIVISION-1
def test_nobody_keeps_anything_if_two_ranks_hold_one_slot() -> None:
    """Rank 0 has the sum of its four slots, from which nobody can take the one that rank 1 has too."""
    parts = parts_of(6, [[0, 1, 2, 3], [0], [5]], [True] * 3)
    assert parts == [Part(due=(0, 1)), Part(due=(2, 3)), Part(due=(4, 5))]


@given(num_slots=st.integers(1, 40), is_active=st.lists(st.booleans(), min_size=1, max_size=8).filter(any))
def test_the_parts_are_the_shares_if_nobody_holds_anything(num_slots: int, is_active: list[bool]) -> None:
    parts = parts_of(num_slots, [[] for _ in is_active], is_active)
    shares = [tuple(slots_of(num_slots, index, sum(is_active))) for index in range(sum(is_active))]
    assert [part.due for part, is_one in zip(parts, is_active, strict=True) if is_one] == shares


def test_no_rank_is_active() -> None:
    assert parts_of(3, [[0], []], [False, False]) == [Part(), Part()]
