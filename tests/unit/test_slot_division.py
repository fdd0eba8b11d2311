"""The parts of replica groups in a step that is tried again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from elasticgang.protocol.slot_division import Part, divide, holding
from elasticgang.train.partition import slots_of

Rank = tuple[Sequence[int], Sequence[int]]  # the runs that it holds, firm and loose


def parts_of(num_runs: int, groups: Sequence[Sequence[Rank]], is_active: Sequence[bool]) -> list[Part]:
    messages = [holding(num_runs, group, firm, loose) for group, ranks in enumerate(groups) for firm, loose in ranks]
    return divide([sum(column) for column in zip(*messages, strict=True)], len(groups[0]), is_active)


def alone(held: Sequence[Sequence[int]]) -> list[list[Rank]]:
    """Groups of one rank each."""
    return [[(runs, ())] for runs in held]


NOBODY = -1


# DIVISION-1, DIVISION-2
@given(
    holders=st.lists(st.integers(NOBODY, 5), min_size=1, max_size=70),
    is_active=st.lists(st.booleans(), min_size=6, max_size=6).filter(any),
)
def test_every_slot_is_kept_by_its_holder_or_due_from_one_active_rank(
    holders: list[int], is_active: list[bool]
) -> None:
    held = [[slot for slot, holder in enumerate(holders) if holder == rank] for rank in range(6)]
    parts = parts_of(len(holders), alone(held), is_active)
    check_cover(parts, len(holders), is_active)
    for rank, part in enumerate(parts):
        assert list(part.kept) == (held[rank] if is_active[rank] else [])


def check_cover(parts: list[Part], num_runs: int, is_active: Sequence[bool]) -> None:
    """DIVISION-1, DIVISION-2."""
    assert Counter(run for part in parts for run in part.numbers) == Counter(range(num_runs))
    for group, part in enumerate(parts):
        assert list(part.due) == sorted(part.due)
        assert is_active[group] or not part.numbers
    due = [len(part.due) for part, is_one in zip(parts, is_active, strict=True) if is_one]
    assert max(due) - min(due) <= 1


@st.composite
def groups_of_ranks(draw: st.DrawFn) -> tuple[int, list[list[Rank]]]:
    """Disjoint runs for each group, of which its ranks have finished any number, in any order; the last ones of each
    rank may be loose."""
    unit, num_groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    holders = draw(st.lists(st.integers(NOBODY, num_groups - 1), min_size=1, max_size=40))
    groups: list[list[Rank]] = []
    for group in range(num_groups):
        runs = draw(st.permutations([run for run, holder in enumerate(holders) if holder == group]))
        ranks: list[Rank] = []
        for _ in range(unit):
            num = draw(st.integers(max(0, len(runs) - 3), len(runs)) | st.just(0))
            num_loose = min(num, draw(st.integers(0, 3)))
            ranks.append((runs[: num - num_loose], runs[num - num_loose : num]))
        groups.append(ranks)
    return len(holders), groups


# DIVISION-1, DIVISION-3, DIVISION-4
@given(held=groups_of_ranks(), data=st.data())
def test_a_group_keeps_what_all_its_ranks_can_keep(held: tuple[int, list[list[Rank]]], data: st.DataObject) -> None:
    num_runs, groups = held
    is_active = data.draw(st.lists(st.booleans(), min_size=len(groups), max_size=len(groups)).filter(any))
    parts = parts_of(num_runs, groups, is_active)
    check_cover(parts, num_runs, is_active)
    for group, (ranks, part) in enumerate(zip(groups, parts, strict=True)):
        common = set.intersection(*({*firm, *loose} for firm, loose in ranks))
        can_keep = is_active[group] and all(common.issuperset(firm) for firm, _ in ranks)
        assert set(part.kept) == (common if can_keep else set())


# DIVISION-1
def test_nobody_keeps_anything_if_two_ranks_hold_one_slot() -> None:
    """Rank 0 has the sum of its four slots, from which nobody can take the one that rank 1 has too."""
    parts = parts_of(6, alone([[0, 1, 2, 3], [0], [5]]), [True] * 3)
    assert parts == [Part(due=(0, 1)), Part(due=(2, 3)), Part(due=(4, 5))]


# DIVISION-1
def test_no_group_keeps_anything_if_as_many_ranks_of_two_groups_hold_one_run() -> None:
    """As many as a group has. The mean of their groups is a group too."""
    groups: list[list[Rank]] = [[([2], ()), ((), ())], [((), ()), ((), ())], [([2], ()), ((), ())]]
    assert [part.kept for part in parts_of(3, groups, [True] * 3)] == [()] * 3


# DIVISION-3
def test_a_spare_that_takes_a_seat_holds_nothing_of_what_its_group_has() -> None:
    """It has healed. The other group keeps its runs, and both divide the rest."""
    groups: list[list[Rank]] = [[([0, 1], [2]), ((), ())], [([4], [5]), ([4], [5])]]
    assert parts_of(8, groups, [True, True]) == [Part((), (0, 1, 2)), Part((4, 5), (3, 6, 7))]


# DIVISION-3
def test_ranks_of_two_groups_that_form_one_have_nothing_in_common() -> None:
    assert parts_of(4, [[([0, 1], ()), ([2, 3], ())]], [True]) == [Part((), (0, 1, 2, 3))]


# DIVISION-4
def test_a_rank_that_is_ahead_leaves_out_what_is_loose_alone() -> None:
    ahead: Rank = ([0, 1], [2, 3])
    assert parts_of(5, [[ahead, ([0], [1])]], [True]) == [Part((0, 1), (2, 3, 4))]
    assert parts_of(5, [[ahead, ([], [0])]], [True]) == [Part((), (0, 1, 2, 3, 4))]


@given(num_slots=st.integers(1, 40), is_active=st.lists(st.booleans(), min_size=1, max_size=8).filter(any))
def test_the_parts_are_the_shares_if_nobody_holds_anything(num_slots: int, is_active: list[bool]) -> None:
    parts = parts_of(num_slots, alone([[] for _ in is_active]), is_active)
    shares = [tuple(slots_of(num_slots, index, sum(is_active))) for index in range(sum(is_active))]
    assert [part.due for part, is_one in zip(parts, is_active, strict=True) if is_one] == shares


def test_no_rank_is_active() -> None:
    assert parts_of(3, alone([[0], []]), [False, False]) == [Part(), Part()]


def test_numbers_of_groups_are_exact_in_a_job_of_many() -> None:
    """Sums of doubles: 100,000 groups of 64 ranks, of which one with a high number holds a run."""
    message = holding(2, 99_999, [1])
    sums = [64 * each for each in message]
    assert divide(sums, 64, [True] * 100_000)[99_999].kept == (1,)
