"""When ranks compare their states, whose state is right, and what follows."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticgang.errors import DamagedStateError, OperationalError
from elasticgang.layout import ParallelLayout
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_instructions import Do, Observed
from elasticgang.protocol.member_lifecycle import Next
from elasticgang.protocol.state_comparison import Finding, find, first_numbers, second_numbers
from tests.unit.compared_ranks import NUM_STEPS, ComparedRanks
from tests.unit.test_member_lifecycle import active

PAIRS = ParallelLayout(tp=2)
FOUR, THREE, TWO = ("a0", "a1", "b0", "b1"), ("a0", "a1", "b0"), ("a0", "b0")
OTHER = [7, 6, 9]


def found_in(states: Sequence[Sequence[int]], parts: Sequence[Sequence[int]]) -> list[Finding]:
    """With the digests of each rank's tensors."""
    numbers = [first_numbers(digests, rank, len(states)) for rank, digests in enumerate(states)]
    return find([sum(column) for column in zip(*numbers, strict=True)], parts)


def damages(outcome: object) -> bool | None:
    """Whether a rank that has raised this heals; None: it has not raised that states differ."""
    return outcome.heals if isinstance(outcome, DamagedStateError) else None


# -- which ranks are right


# COMPARE-2
@pytest.mark.parametrize(
    ("states", "right", "damaged"),
    [
        ("AAB", (0, 1), (2,)),
        ("ABA", (0, 2), (1,)),
        ("AB", (), (0, 1)),
        ("AABB", (), (0, 1, 2, 3)),
        ("ABC", (), (0, 1, 2)),
        ("AABC", (), (0, 1, 2, 3)),
        ("AAABC", (0, 1, 2), (3, 4)),
        (".AAB", (1, 2), (3,)),
        (".AB", (), (1, 2)),
    ],
)
def test_what_more_than_half_of_those_with_a_state_have_is_right(
    states: str, right: tuple[int, ...], damaged: tuple[int, ...]
) -> None:
    (finding,) = found_in([[ord(state)] * (state != ".") for state in states], [range(len(states))])
    assert (finding.right, finding.damaged) == (right, damaged)


# COMPARE-2
def test_ranks_with_another_part_of_the_model_are_not_compared() -> None:
    assert found_in([[1], [2], [1], [2]], [[0, 2], [1, 3]]) == []
    assert [finding.ranks for finding in found_in([[1], [2], [1], [3]], [[0, 2], [1, 3]])] == [(1, 3)]


def test_ranks_without_a_state_differ_from_nobody() -> None:
    assert found_in([[1], [], [1], []], [range(4)]) == []


@given(st.lists(st.integers(0, (1 << 52) - 1), min_size=1, max_size=5), st.integers(0, 4), st.integers(0, 51))
def test_any_bit_of_any_digest_shows_and_its_place(digests: list[int], place: int, bit: int) -> None:
    place %= len(digests)
    other = [digest ^ ((1 << bit) * (number == place)) for number, digest in enumerate(digests)]
    found = found_in([digests, digests, other], [range(3)])
    assert [finding.damaged for finding in found] == [(2,)]
    numbers = [second_numbers(found, state, rank) for rank, state in enumerate((digests, digests, other))]
    sums = [sum(column) for column in zip(*numbers, strict=True)]
    assert [at for at, value in enumerate(sums) if value] == [place]


def test_states_of_other_sizes_differ_and_all_ranks_sum_as_many_numbers() -> None:
    states = [[1, 2], [1, 2, 3], [4], [5]]
    found = found_in(states, [[0, 1], [2, 3]])
    numbers = [second_numbers(found, state, rank) for rank, state in enumerate(states)]
    assert {len(each) for each in numbers} == {4}
    assert [sum(column) for column in zip(*numbers, strict=True)] == [0, 0, -3, -1]


# -- when they are compared


# COMPARE-1
@pytest.mark.parametrize(("step", "saves", "compares"), [(10, False, True), (11, False, False), (11, True, True)])
def test_states_are_compared_every_so_many_steps_and_before_a_save(step: int, saves: bool, compares: bool) -> None:
    ranks = ComparedRanks(THREE, step=step)
    ranks.saves = saves
    assert set(ranks.boundary().values()) == {Next.STEP}
    assert ranks.compared() == (set(THREE) if compares else set())


# COMPARE-1
def test_the_last_state_is_compared_before_it_is_saved_and_before_ranks_finish() -> None:
    for saves_last in (False, True):
        ranks = ComparedRanks(TWO, step=11)
        for rank in ranks.ranks.values():
            rank.saves_last = saves_last
        outcomes = ranks.boundary(11)
        assert ranks.compared() == set(TWO)
        assert set(outcomes.values()) == {Next.SAVE if saves_last else Next.LEAVE}
        for done in ranks.done.values():
            assert not saves_last or done.index(Do.SAVE_LAST) > done.index(Do.DIGEST_STATE)


def test_nothing_is_compared_without_the_option_or_a_peer_or_before_the_first_commit() -> None:
    for ranks in (ComparedRanks(THREE, every=0), ComparedRanks(("a0",)), ComparedRanks(("a0", "a1"), PAIRS)):
        assert set(ranks.boundary().values()) == {Next.STEP}
        assert not any(isinstance(each, do.SumState) for done in ranks.done.values() for each in done)
        assert set(ranks.boundary(10).values()) == {Next.LEAVE}
    ranks = ComparedRanks(THREE, step=0)
    assert set(ranks.boundary().values()) == {Next.STEP}
    assert ranks.compared() == set()


def test_learners_take_part_without_a_state() -> None:
    ranks = ComparedRanks(TWO)
    ranks.enter(*TWO, learners=["a1"])
    assert set(ranks.boundary().values()) == {Next.STEP}
    assert ranks.compared() == set(TWO)


def test_an_active_rank_that_has_lost_its_state_is_not_compared() -> None:
    ranks = ComparedRanks(THREE)
    ranks.ranks["a1"].state.tip = None
    assert set(ranks.boundary().values()) == {Next.STEP}
    assert ranks.compared() == {"a0", "b0"}


# COMPARE-3
def test_a_boundary_is_passed_after_one_comparison_in_each_generation() -> None:
    ranks = ComparedRanks(TWO)
    has_passed = [rank.comparison for rank in ranks.ranks.values()]
    assert not any(each.has_passed for each in has_passed)
    ranks.boundary()
    assert all(each.has_passed for each in has_passed)
    ranks.boundary()  # the step is tried again
    assert ranks.compared() == set()
    ranks.enter()
    assert not any(each.has_passed for each in has_passed)
    ranks.boundary()
    assert ranks.compared() == set(TWO)
    ranks.commit()
    assert not any(each.has_passed for each in has_passed)


# COMPARE-3
@pytest.mark.parametrize("step", [10, NUM_STEPS])
def test_no_boundary_is_passed_if_the_generation_ends_in_its_comparison(step: int) -> None:
    ranks = ComparedRanks(THREE, step=step)
    ranks.lost = {(name, 1) for name in THREE}
    assert set(ranks.boundary().values()) == {Next.REGROUP}
    assert not any(rank.comparison.has_passed for rank in ranks.ranks.values())


# MANAGER-20
def test_a_rank_that_leaves_takes_part_before() -> None:
    driver = active()
    driver.lifecycle.comparison.every = 1
    driver.lifecycle.observed = Observed(draining=True)
    assert driver.step({"AWAIT_SUMS control": [0.0, 0, 0, 2, 2, 2, 0, 1]})
    alike = {"DIGEST_STATE": ([7], str), "SumState": [9.0, 1.0, 9.0, 1.0]}
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), alike) is Next.LEAVE
    assert driver.names == ["DIGEST_STATE", "SumState"]


# MANAGER-20
def test_a_rank_with_fewer_steps_than_its_peers_starts_no_sum() -> None:
    ranks = ComparedRanks(TWO, step=11)
    ranks.enter(*TWO, learners=["a1"])
    rank = ranks.ranks["a1"]
    with pytest.raises(OperationalError, match="the job has committed 11 steps, but this script takes 7"):
        list(rank.pass_boundary(7))


# MANAGER-20
def test_a_comparison_that_never_ends_is_given_up() -> None:
    ranks = ComparedRanks(TWO)
    ranks.lost = {(name, 1) for name in TWO}
    for rank in ranks.ranks.values():
        rank.max_lost_steps = 3
    for _ in range(2):
        assert set(ranks.boundary().values()) == {Next.REGROUP}
        ranks.enter()
    outcomes = ranks.boundary()
    assert all(isinstance(outcome, OperationalError) for outcome in outcomes.values())
    assert "step 10 was lost 3 times in a row; the last: a peer is lost" in str(outcomes["a0"])


# -- what follows from a difference


# COMPARE-5
def test_the_damaged_rank_has_no_state_any_more_and_the_others_begin_nothing() -> None:
    ranks = ComparedRanks(THREE)
    ranks.digests["a1"] = OTHER
    outcomes = ranks.boundary()
    assert damages(outcomes["a1"]) is True
    assert ranks.ranks["a1"].state.tip is None
    for name in TWO:
        assert outcomes[name] is Next.REGROUP
        assert ranks.ranks[name].state.tip == Attempt(10, 1)
        assert not ranks.ranks[name].comparison.has_passed
    for name in THREE:
        (told,) = ranks.told(name)
        what = "that of rank 1 on a differs from that of rank 0 on a, rank 0 on b in tensor 1"
        assert told == do.ReportDifference(10, 1, f"of the training states after step 10, {what}")
    ranks.enter(*TWO)
    assert set(ranks.boundary().values()) == {Next.STEP}


# COMPARE-5
def test_if_nobody_can_say_who_is_right_every_rank_ends() -> None:
    ranks = ComparedRanks(("a0", "a1", "b0", "b1"), PAIRS)
    parts = ranks.ranks["a0"].state.comparing()
    ranks.digests[parts[0][0]] = OTHER
    outcomes = ranks.boundary()
    assert {damages(outcome) for outcome in outcomes.values()} == {False}
    assert {rank.state.tip for rank in ranks.ranks.values()} == {None}
    for name in ranks.ranks:
        (told,) = ranks.told(name)
        assert told.ends_job
        assert "; nobody can say which is right: the job ends. When it is started again," in told.text
        assert (" in tensor 1;" in told.text) is (name in parts[0])


# COMPARE-5
def test_ranks_of_other_parts_end_their_generation_and_say_nothing() -> None:
    ranks = ComparedRanks(("a0", "a1", "b0", "b1", "c0", "c1"), PAIRS)
    first, second = ranks.ranks["a0"].state.comparing()
    ranks.digests[first[2]] = OTHER
    outcomes = ranks.boundary()
    assert {name for name, outcome in outcomes.items() if outcome is not Next.REGROUP} == {first[2]}
    assert [name for name in second if ranks.told(name)] == []


# COMPARE-5
def test_damage_in_several_parts_is_told_together() -> None:
    ranks = ComparedRanks(("a0", "a1", "b0", "b1", "c0", "c1"), PAIRS)
    first, second = ranks.ranks["a0"].state.comparing()
    ranks.digests[first[0]] = ranks.digests[second[2]] = OTHER
    outcomes = ranks.boundary()
    assert {name for name, outcome in outcomes.items() if damages(outcome)} == {first[0], second[2]}
    assert {name for name, outcome in outcomes.items() if outcome is Next.REGROUP} == {*first[1:], *second[:2]}
    for name in ranks.ranks:
        (told,) = ranks.told(name)
        assert not told.ends_job
        assert [told.text.count(f"that of {in_words(each)} differs") for each in (first[0], second[2])] == [1, 1]


def in_words(name: str) -> str:
    return f"rank {name[1]} on {name[0]}"


# COMPARE-4
def test_a_damaged_rank_ends_also_if_not_all_know() -> None:
    ranks = ComparedRanks(THREE)
    ranks.digests["b0"] = OTHER
    ranks.lost = {(name, 2) for name in THREE}
    outcomes = ranks.boundary()
    assert damages(outcomes["b0"]) is True
    assert outcomes["a0"] is outcomes["a1"] is Next.REGROUP
    (told,) = ranks.told("a0")
    assert told.text.endswith("that of rank 0 on b differs from that of rank 0 on a, rank 1 on a")


# COMPARE-4
def test_a_rank_that_knows_it_does_not_go_on_though_the_others_may() -> None:
    ranks = ComparedRanks(TWO)
    ranks.digests["b0"] = OTHER
    ranks.lost = {("a0", 1), ("b0", 2)}
    outcomes = ranks.boundary()
    assert outcomes["a0"] is Next.REGROUP
    assert not ranks.told("a0")
    assert damages(outcomes["b0"]) is False
    (told,) = ranks.told("b0")
    assert told.ends_job
    assert "those of rank 0 on a and of rank 0 on b differ; nobody" in told.text


# COMPARE-3, COMPARE-5
@given(
    st.lists(st.sampled_from([(7, 8, 9), (7, 6, 9)]), min_size=4, max_size=4),
    st.sets(st.tuples(st.sampled_from(FOUR), st.integers(1, 2))),
)
def test_whoever_loses_a_sum_nobody_passes_beside_a_difference(
    states: list[tuple[int, ...]], lost: set[tuple[str, int]]
) -> None:
    ranks = ComparedRanks(FOUR)
    ranks.digests = {name: list(state) for name, state in zip(FOUR, states, strict=True)}
    ranks.lost = lost
    outcomes = ranks.boundary()
    for name, outcome in outcomes.items():
        num_like_this = states.count(tuple(ranks.digests[name]))
        if outcome is Next.STEP:
            assert num_like_this == len(FOUR)
        elif outcome is not Next.REGROUP:
            assert damages(outcome) is (num_like_this == 1)
            assert num_like_this <= 2
            assert ranks.ranks[name].state.tip is None


# COMPARE-6
def test_it_is_said_when_the_same_ranks_were_alike_last() -> None:
    ranks = ComparedRanks(THREE)
    ranks.boundary()
    ranks.commit(5)
    ranks.digests["a1"] = OTHER
    ranks.boundary()
    assert ranks.told("a0")[0].text.endswith("; after step 10 they were alike")


# COMPARE-6
def test_nothing_is_said_of_a_rank_that_came_later_or_after_a_state_was_loaded() -> None:
    ranks = ComparedRanks(TWO)
    ranks.boundary()
    ranks.enter(*TWO, learners=["a1"])
    ranks.digests["a1"] = OTHER
    ranks.ranks["a1"].state.healed()
    for rank in ranks.ranks.values():
        rank.state.active.add("a1")
    ranks.commit(5)
    ranks.boundary()
    assert [ranks.told(name)[0].text.endswith("rank 0 on b in tensor 1") for name in TWO] == [True, True]
    loaded = ComparedRanks(TWO)
    loaded.boundary()
    loaded.commit(5)
    loaded.digests["b0"] = OTHER
    for rank in loaded.ranks.values():
        rank.comparison.state_loaded()
    loaded.boundary()
    assert "were alike" not in loaded.told("a0")[0].text


def test_of_many_ranks_some_are_named() -> None:
    ranks = ComparedRanks([f"{host}{number}" for host in "ab" for number in range(9)])
    for number in range(9):
        ranks.digests[f"a{number}"] = OTHER
    ranks.boundary()
    ends = [f"rank 7 on {host} and 1 more" for host in "ab"]
    assert re.search(
        f"those of rank 0 on a, .*{ends[0]} and of rank 0 on b, .*{ends[1]} differ", ranks.told("a0")[0].text
    )
