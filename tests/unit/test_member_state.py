"""Who may leave at the end of a vote (MEMBER-6 of `protocol/member_state.py`), over whole votes of all members."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest

from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_state import MemberState, VoteOutcome
from elasticgang.protocol.record import ACTIVE, LEARNER, SPARE, Record, Seat

FLAT, PAIRS = ParallelLayout(), ParallelLayout(tp=2)


def ledgers(
    members: Mapping[str, str], layout: ParallelLayout = FLAT, spares: Collection[str] = ()
) -> dict[str, MemberState]:
    """Of the members of a generation, by name, with their seats: "a0" is on the host a. The active ones hold state."""
    planned = plan([Member(name, name[0]) for name in (*members, *spares)], layout)
    status = {**members, **dict.fromkeys(spares, SPARE)}
    seats = tuple(Seat(name, name[0], name[0], 0, "", status[name]) for name in status)
    record = Record("job", 1, "", layout, planned, seats, ("a", "b"), Attempt(3, 1))
    made = {name: MemberState(name) for name in members}
    for seat in seats:
        if seat.member in made:
            state = made[seat.member]
            state.tip = record.committed if seat.status == ACTIVE else None
            state.enter(record, seat)
    return made


def vote(
    ledgers: Mapping[str, MemberState],
    *,
    going: Collection[str] = (),
    healed: Collection[str] = (),
    noticed: Collection[str] = (),
    failing: Collection[str] = (),
    successors: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, VoteOutcome]:
    ballots = []
    for name, state in ledgers.items():
        attempt = state.attempt()
        state.begin()
        if name in healed:
            state.healed()
        if state.tip is not None and name not in failing:
            state.prepare(attempt)
        ballots.append(state.ballot(attempt, name in noticed, name in going, successors.get(name, 0)))
    sums = [sum(column) for column in zip(*ballots, strict=True)]
    counts = {name: state.count(state.attempt(), sums, name in going) for name, state in ledgers.items()}
    assert len({(count.passed, count.regroups) for count in counts.values()}) == 1
    assert len({frozenset(state.active) for state in ledgers.values()}) == 1
    return counts


def leaving(counts: Mapping[str, VoteOutcome]) -> set[str]:
    return {name for name, count in counts.items() if count.leaves}


def test_one_of_several_leaves_and_all_come_to_the_next_generation() -> None:
    counts = vote(ledgers({"a0": ACTIVE, "a1": ACTIVE}), going=["a1"])
    assert leaving(counts) == {"a1"}
    assert counts["a0"].regroups


def test_the_only_one_with_state_stays_until_a_learner_has_it() -> None:
    job = ledgers({"a0": ACTIVE, "a1": LEARNER})
    counts = vote(job, going=["a0"])
    assert not leaving(counts)
    assert not counts["a0"].regroups
    assert leaving(vote(job, going=["a0"], healed=["a1"])) == {"a0"}


# MANAGER-1, MEMBER-4
def test_in_a_vote_that_fails_nobody_becomes_active_and_it_stays() -> None:
    job = ledgers({"a0": ACTIVE, "a1": LEARNER})
    assert not leaving(vote(job, going=["a0"], healed=["a1"], failing=["a0"]))


def test_two_that_hold_it_do_not_both_leave_a_learner() -> None:
    job = ledgers({"a0": ACTIVE, "a1": ACTIVE, "a2": LEARNER})
    assert not leaving(vote(job, going=["a0", "a1"]))
    assert leaving(vote(job, going=["a0", "a1"], healed=["a2"])) == {"a0", "a1"}


def test_it_stays_while_somebody_waits_to_join_and_all_come_to_the_next_generation() -> None:
    counts = vote(ledgers({"a0": ACTIVE}), going=["a0"], noticed=["a0"])
    assert counts["a0"] == VoteOutcome(passed=True, regroups=True, leaves=False)


@pytest.mark.parametrize("others", [{}, {"a1": ACTIVE}])
def test_when_all_go_and_nobody_heals_all_leave(others: dict[str, str]) -> None:
    members = {"a0": ACTIVE, **others}
    counts = vote(ledgers(members), going=members)
    assert leaving(counts) == set(members)
    assert all(count.loses_part for count in counts.values())


def test_a_learner_that_goes_leaves_at_once_and_is_no_heir() -> None:
    job = ledgers({"a0": ACTIVE, "a1": LEARNER})
    counts = vote(job, going=["a0", "a1"], healed=["a1"])
    assert leaving(counts) == {"a1"}
    assert counts["a0"].regroups
    assert job["a0"].active == {"a0"}


def test_a_part_of_the_model_is_waited_for_by_those_who_hold_it_alone() -> None:
    job = ledgers({"a0": ACTIVE, "a1": ACTIVE, "b0": ACTIVE, "b1": LEARNER}, PAIRS)
    assert job["a0"].holds == job["b0"].holds
    counts = vote(job, going=["a0", "a1"])
    assert leaving(counts) == {"a0"}
    assert not any(count.loses_part for count in counts.values())
    assert leaving(vote(job, going=["a1"], healed=["b1"])) == {"a1"}


# MANAGER-22
def test_all_know_when_the_last_that_hold_a_part_leave() -> None:
    job = ledgers({"a0": ACTIVE, "a1": ACTIVE}, PAIRS)
    counts = vote(job, going=["a1"])
    assert leaving(counts) == {"a1"}
    assert {count.loses_part for count in counts.values()} == {True}
    assert not any(count.loses_part for count in vote(job).values())


def test_it_stays_for_heirs_whoever_has_heard_of_them_and_no_longer() -> None:
    job = ledgers({"a0": ACTIVE, "a1": ACTIVE}, PAIRS, spares=["b0"])
    counts = vote(job, going=["a1"], successors={"a0": 1})
    assert not leaving(counts)
    assert leaving(vote(job, going=["a1"])) == {"a1"}


def test_while_a_spare_waits_all_come_to_the_next_generation_once() -> None:
    """There it is known who goes, so that the spare may have a seat."""
    job = ledgers({"a0": ACTIVE, "a1": ACTIVE}, PAIRS, spares=["b0"])
    assert vote(job, going=["a1"], successors={"a0": 1})["a0"] == VoteOutcome(passed=True, regroups=True, leaves=False)
    for state in job.values():
        assert state.record is not None
        state.record = replace(state.record, draining_members=("a1",))
    assert vote(job, going=["a1"], successors={"a0": 1})["a0"] == VoteOutcome(passed=True, regroups=False, leaves=False)
    assert vote(job, going=["a0", "a1"], successors={"a0": 1})["a0"] == VoteOutcome(
        passed=True, regroups=True, leaves=False
    )


def test_heirs_keep_nobody_whose_state_another_has_who_stays() -> None:
    assert leaving(vote(ledgers({"a0": ACTIVE, "a1": ACTIVE}), going=["a1"], successors={"a0": 1, "a1": 1})) == {"a1"}


def test_a_share_is_that_of_its_place_among_all() -> None:
    layout = ParallelLayout(sdp=2)
    made = ledgers({f"a{number}": LEARNER if number == 3 else ACTIVE for number in range(6)}, layout)
    for state in made.values():
        assert state.record is not None
        at = state.record.plan.coordinates(state.member)
        assert state.share() == state.active_members.shares[at["rdp"] * layout.sdp + at["sdp"]]
    assert sorted(share.index for state in made.values() if (share := state.share()) is not None) == [0, 1, 2, 3]


# SNAPSHOT-4
def test_a_holder_knows_which_learners_need_its_part() -> None:
    members = {"a0": ACTIVE, "a1": ACTIVE, "b0": ACTIVE, "b1": LEARNER}
    made = ledgers(members, PAIRS)
    parts = {name: state.holds for name, state in made.items()}
    needed = {name for name, state in made.items() if state.tip is not None and state.prepares_digests}
    assert needed == {name for name in ("a0", "a1", "b0") if parts[name] == parts["b1"]}
    assert 0 < len(needed) < 3
    assert not any(state.prepares_digests for state in ledgers(dict.fromkeys(members, ACTIVE), PAIRS).values())


# SNAPSHOT-4
@pytest.mark.parametrize(
    ("members", "prepared"),
    [
        ({"a0": ACTIVE, "a1": ACTIVE, "a2": LEARNER}, {"a0"}),
        ({"a0": LEARNER, "a1": ACTIVE, "a2": ACTIVE}, {"a1"}),
        ({"a0": ACTIVE, "a1": ACTIVE, "b0": LEARNER}, {"a0", "a1"}),
        ({"a0": ACTIVE, "a1": ACTIVE, "b0": ACTIVE, "b1": ACTIVE, "b2": LEARNER}, {"a0", "a1", "b0"}),
    ],
)
def test_one_holder_of_the_learners_host_prepares_digests(members: dict[str, str], prepared: set[str]) -> None:
    made = ledgers(members)
    assert {name for name, state in made.items() if state.tip is not None and state.prepares_digests} == prepared
