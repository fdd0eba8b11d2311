"""The next record: what voids a proposal, who is seated how, what becomes of the state; then random schedules."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from elasticgang.errors import LayoutError
from elasticgang.layout import Member, ParallelLayout, Plan, plan
from elasticgang.protocol.commit import Action, Attempt, action
from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.record import (
    ACTIVE,
    LEARNER,
    NO_RECORD,
    PROTOCOL,
    SPARE,
    MemberReport,
    Record,
    RecordRef,
    Report,
    Seat,
    Undecided,
    Unrecoverable,
    canonical_json,
    report_from_json,
    report_to_json,
)

FLAT = ParallelLayout()
PAIRS = ParallelLayout(tp=2)
WHOLE = (0, 0, 0)


def member(id: str, tip: Attempt | None = None, pending: Attempt | None = None, **facts: Any) -> MemberReport:
    """A member as it reports itself; it holds the whole model if it holds anything."""
    facts.setdefault("holds", WHOLE if tip else None)
    return MemberReport(id, int(id[-1]), f"{id}:1", tip, pending, **facts)


def report(agent: str, *members: MemberReport, seen: Record | RecordRef | None = None, **facts: Any) -> Report:
    known = {"host": agent, "job": "job", "coordinator": "c1", "layout": FLAT, **facts}
    name = seen.ref if isinstance(seen, Record) else seen or NO_RECORD
    return Report(agent=agent, newest_record=name, members=members, **known)


def agreed(record: Record | None, *proposal: Report) -> Record:
    answer = next_record(record, proposal)
    assert isinstance(answer, Record), answer
    return answer


def undecided(record: Record | None, *proposal: Report) -> Undecided:
    answer = next_record(record, proposal)
    assert isinstance(answer, Undecided), answer
    return answer


def first(*agents: str, layout: ParallelLayout = FLAT) -> Record:
    """The record of a job's start: agents "a", "b", ... with one member "a0", "b0", ... each."""
    return agreed(None, *(report(agent, member(f"{agent}0"), layout=layout) for agent in agents))


def trained(*agents: str, steps: int = 3) -> tuple[Record, Attempt]:
    """A record of generation 2 in which all are active, and its committed attempt."""
    start = first(*agents)
    attempt = Attempt(steps, 1)
    record = agreed(start, *(report(agent, member(f"{agent}0", attempt, entered=1), seen=start) for agent in agents))
    assert record.committed == attempt
    assert record.members(ACTIVE) == tuple(f"{agent}0" for agent in agents)
    return record, attempt


# --- the first record


def test_first_record_designates_one_holder_per_model_coordinate() -> None:
    record = first("a", "b", "c")
    assert (record.generation, record.parent, record.committed) == (1, "", Attempt(0, 1))
    assert not record.rolled_forward
    assert not record.rolled_back
    assert record.agents == ("a", "b", "c")
    (holder,) = record.members(ACTIVE)
    assert record.plan.coordinates(holder)["rdp"] == 0
    assert set(record.members(LEARNER)) == {"a0", "b0", "c0"} - {holder}


def test_first_record_of_a_sharded_layout_designates_a_whole_replica_group() -> None:
    agents = [report(host, member(f"{host}0"), member(f"{host}1"), layout=PAIRS) for host in "abc"]
    record = agreed(None, *agents)
    assert {record.model_coordinates(holder) for holder in record.members(ACTIVE)} == {WHOLE, (0, 0, 1)}
    assert len(record.members(LEARNER)) == 4


def test_who_has_no_seat_is_a_spare() -> None:
    record = agreed(None, report("a", member("a0"), member("a1"), member("a2"), layout=PAIRS))
    (spare,) = record.members(SPARE)
    assert spare not in record.plan.ranks
    seat = record.seat(spare)
    assert seat is not None
    assert (seat.agent, seat.host, seat.local_rank, seat.address) == ("a", "a", int(spare[-1]), f"{spare}:1")
    assert record.seat("z9") is None


def test_members_beyond_the_seats_that_are_asked_for_are_spares() -> None:
    members = [member(f"a{index}") for index in range(5)]
    record = agreed(None, report("a", *members, layout=PAIRS, num_seats=4))
    assert record.plan.shape[1] == 2
    assert record.members(SPARE) == ("a4",)
    flat = agreed(None, report("a", *members, num_seats=3))
    assert (flat.plan.shape[1], flat.members(SPARE)) == (3, ("a3", "a4"))
    both = agreed(None, report("a", *members, num_seats=3), report("b", member("b0"), member("b1")))
    assert both.plan.shape[1] == 5


def test_spares_take_the_seats_of_a_lost_host() -> None:
    agents = {agent: report(agent, *(member(f"{agent}{index}") for index in range(4)), num_seats=2) for agent in "ab"}
    start = agreed(None, *agents.values())
    assert start.plan.shape[1] == 4
    tips = [member(f"a{index}", Attempt(3, 1), entered=1, active=True) for index in range(4)]
    after = agreed(start, report("a", *tips, seen=start, num_seats=2, dead_agents=("b",)))
    assert after.plan.shape[1] == 4


def test_who_goes_takes_no_seat_from_a_spare_that_may_follow_it() -> None:
    a0, a1, a2 = (member(f"a{index}") for index in range(3))
    start = agreed(None, report("a", a0, a1, a2, num_seats=1))
    assert (start.members(ACTIVE), start.members(SPARE)) == (("a0",), ("a1", "a2"))
    goer = replace(a0, tip=Attempt(3, 1), holds=WHOLE, entered=1, active=True, draining=True)
    both = agreed(start, report("a", goer, a1, a2, seen=start, num_seats=1))
    assert (both.members(ACTIVE), both.members(LEARNER), both.members(SPARE)) == (("a0",), ("a1",), ("a2",))
    assert both.draining_members == ("a0",)
    goer = replace(goer, tip=Attempt(4, 2), entered=2)
    assert agreed(both, report("a", goer, a1, a2, seen=both, num_seats=1)).plan.shape[1] == 2
    healed = replace(a1, tip=Attempt(4, 2), holds=WHOLE, entered=2, active=True)
    after = agreed(both, report("a", healed, a2, seen=both, num_seats=1, exited=("a0",)))
    assert (after.members(ACTIVE), after.members(SPARE), after.draining_members) == (("a1",), ("a2",), ())


def test_who_goes_takes_no_seat_from_a_whole_replica_group_of_spares() -> None:
    members = [member(f"a{index}") for index in range(4)]
    start = agreed(None, report("a", *members, layout=PAIRS, num_seats=2))
    tips = [
        replace(mine, tip=Attempt(3, 1), holds=start.model_coordinates(mine.id), entered=1, active=True)
        for mine in members[:2]
    ]
    told = [replace(tips[0], draining=True), tips[1], *members[2:]]
    after = agreed(start, report("a", *told, seen=start, layout=PAIRS, num_seats=2))
    assert (after.members(ACTIVE), after.members(LEARNER)) == (("a0", "a1"), ("a2", "a3"))


def test_an_agent_whose_members_all_go_is_not_one_of_the_most() -> None:
    start = agreed(None, *(report(agent, member(f"{agent}0"), max_agents=1) for agent in "ab"))
    assert start.members(SPARE) == ("b0",)
    goer = member("a0", Attempt(3, 1), entered=1, active=True, draining=True)
    told = [report("a", goer, seen=start, max_agents=1), report("b", member("b0"), seen=start, max_agents=1)]
    after = agreed(start, *told)
    assert (after.members(ACTIVE), after.members(LEARNER)) == (("a0",), ("b0",))


def test_too_few_members_are_waited_for() -> None:
    with pytest.raises(LayoutError) as error:
        plan([Member("a0", "a")], PAIRS)
    assert undecided(None, report("a", member("a0"), layout=PAIRS)).reason == str(error.value)


def test_the_first_generation_waits_for_as_many_agents_as_any_asks_for() -> None:
    a, b = report("a", member("a0"), min_agents=2), report("b", member("b0"))
    assert undecided(None, a).reason == "1 of at least 2 agents are here"
    start = agreed(None, a, b)
    alone = replace(a, newest_record=start.ref, members=(member("a0", start.committed, entered=1),))
    assert agreed(start, alone).agents == ("a",)


def test_agents_beyond_the_most_wait_as_spares_until_a_seated_one_is_gone() -> None:
    start = agreed(None, *(report(agent, member(f"{agent}0"), max_agents=2) for agent in "bc"))
    tip = Attempt(3, 1)
    held = {agent: member(f"{agent}0", tip, entered=1, active=True) for agent in "bc"}
    joined = [report(agent, held.get(agent, member("a0")), seen=start, max_agents=2) for agent in "bc"]
    second = agreed(start, report("a", member("a0"), max_agents=2), *joined)
    assert second.members(SPARE) == ("a0",)
    assert second.members(ACTIVE) == ("b0", "c0")
    assert second.plan.spares == ()
    third = agreed(second, *(report(agent, *rest.members, seen=second, max_agents=2) for agent, rest in (
        ("a", report("a", member("a0", entered=2))),
        ("b", report("b", member("b0", tip, entered=2, active=True))),
    )))  # fmt: skip
    assert third.members(LEARNER) == ("a0",)
    assert third.members(ACTIVE) == ("b0",)


def test_who_alone_holds_the_state_has_a_seat_though_its_agent_is_one_too_many() -> None:
    start = agreed(None, *(report(agent, member(f"{agent}0"), max_agents=2) for agent in "bc"))
    tip = Attempt(3, 1)
    held = {agent: member(f"{agent}0", tip, entered=1, active=True) for agent in "bc"}
    a0 = member("a0")
    left = agreed(start, report("a", a0, max_agents=2), report("b", held["b"], seen=start, max_agents=2))
    assert left.absent_agents == ("c",)
    asked = [
        report("a", a0, seen=left, max_agents=2),
        report("b", member("b1"), seen=left, exited=("b0",), max_agents=2),
    ]
    back = agreed(left, *asked, report("c", held["c"], seen=start, max_agents=2))
    assert back.members(ACTIVE) == ("c0",)
    assert set(back.members(LEARNER)) == {"a0", "b1"}
    whole = [report(seat.agent, member(seat.member, tip, entered=3), seen=back, max_agents=2) for seat in back.seats]
    assert len(agreed(back, *whole).members(SPARE)) == 1


def test_an_agent_without_members_is_not_one_of_the_most() -> None:
    start = agreed(None, *(report(agent, member(f"{agent}0"), max_agents=2) for agent in "ab"))
    b0 = member("b0", Attempt(3, 1), entered=1, active=True)
    seated = report("b", b0, seen=start, max_agents=2)
    after = agreed(start, report("a", seen=start, exited=("a0",), max_agents=2), seated, report("c", member("c0")))
    assert after.members(LEARNER) == ("c0",)


def test_nobody_decides_nothing() -> None:
    assert undecided(None).reason == "nobody asked"


# --- undecided proposals (NEXT-2) and refused agents


def test_an_agent_asks_once() -> None:
    assert "twice" in undecided(None, report("a", member("a0")), report("a", member("a1"))).reason


def test_a_member_has_one_agent() -> None:
    assert "'a0'" in undecided(None, report("a", member("a0")), report("b", member("a0"))).reason


def test_joiners_only_are_void_while_a_member_may_live() -> None:
    record, tip = trained("a", "b")
    joiner = report("j", member("j0"))
    assert undecided(record, joiner).reason == "no witness of generation 2 is here, but a0, b0 may live"
    assert "but b0 may live" in undecided(record, joiner, report("a", seen=record, exited=("a0",))).reason
    assert agreed(record, joiner, report("b", member("b0", tip, entered=2), seen=record)).members(ACTIVE) == ("b0",)


def test_after_a_restart_of_the_lighthouse_the_first_to_ask_is_alone() -> None:
    record, tip = trained("a", "b", "c")
    assert isinstance(next_record(record, [report("j", member("j0"))]), Undecided)
    alone = agreed(record, report("b", member("b0", tip, entered=2), seen=record))  # harmless: the others come back
    assert alone.members(ACTIVE) == ("b0",)
    ahead = Attempt(4, 3)
    others = [report(agent, member(f"{agent}0", tip, entered=2), seen=record) for agent in "ac"]
    assert isinstance(next_record(alone, others), Undecided)
    together = agreed(alone, *others, report("b", member("b0", ahead, entered=3), seen=alone))
    assert together.committed == ahead
    assert (together.members(ACTIVE), set(together.members(LEARNER))) == (("b0",), {"a0", "c0"})


def test_a_learner_is_no_witness_until_it_is_active() -> None:
    record = first("a", "b")
    (holder,), (learner,) = record.members(ACTIVE), record.members(LEARNER)
    tip = Attempt(1, 1)

    def ask(active: bool, entered: int) -> Record | Undecided | Unrecoverable:
        mine = member(learner, tip, entered=entered, active=active)
        return next_record(record, [report(learner[0], mine, seen=record)])

    reason = f"no witness of generation 1 is here, but {holder} may live"
    assert ask(active=False, entered=1) == Undecided(reason, absent_agents=(holder[0],))
    assert isinstance(ask(active=True, entered=0), Undecided)
    assert isinstance(ask(active=True, entered=1), Record)


def test_a_torn_member_is_no_witness() -> None:
    """It voted, does not say for what, and others may have committed that."""
    record, tip = trained("a", "b", "c")
    joined = agreed(record, *(report(agent, member(f"{agent}0", tip, entered=2), seen=record) for agent in "abc"))
    torn = report("a", member("a0", entered=3), seen=joined)
    learner = report("j", member("j0", tip))  # whole at the recorded attempt
    assert undecided(joined, torn, learner).reason == "no witness of generation 3 is here, but b0, c0 may live"
    assert agreed(joined, torn, learner, report("b", seen=joined, exited=("b0", "c0"))).committed == tip


def test_a_member_that_has_not_entered_is_a_witness_without_state() -> None:
    record = first("a", "b")
    (holder,) = record.members(ACTIVE)
    (learner,) = record.members(LEARNER)
    mine = report(holder[0], member(holder), seen=record)
    assert undecided(record, mine).reason == f"nobody here holds step 0 of generation 1, but {learner} may live"
    assert agreed(record, mine, report(learner[0], seen=record, exited=(learner,))).committed == Attempt(0, 2)


def test_a_ghost_is_void() -> None:
    """The call of an agent timed out, but the lighthouse hands out its old report."""
    record, tip = trained("a", "b")
    fresh, ghost = (
        report(agent, member(f"{agent}0", tip), seen=seen)
        for agent, seen in (("a", record), ("b", RecordRef(1, record.parent)))
    )
    assert undecided(record, fresh, ghost).reason == "the report of agent b is of generation 1, before 2"


def test_who_was_away_is_no_ghost() -> None:
    record, tip = trained("a", "b")
    shrunk = agreed(record, report("a", member("a0", tip, entered=2), seen=record))
    back = report("b", member("b0", tip, entered=2), seen=record)
    assert agreed(shrunk, report("a", member("a0", tip, entered=3), seen=shrunk), back).members(ACTIVE) == ("a0", "b0")


def test_an_old_record_is_void() -> None:
    record, tip = trained("a", "b")
    asked = report("a", member("a0", tip), seen=RecordRef(3, ""))
    assert undecided(record, asked).reason == "agent a knows generation 3, but the record is of 2"
    assert undecided(None, asked).reason == "agent a knows generation 3, but the record is of 0"


def test_two_incarnations_of_the_coordinator_are_void() -> None:
    answer = undecided(None, report("a", member("a0")), report("b", member("b0"), coordinator="c2"))
    assert "coordinator" in answer.reason
    assert not answer.refused


@pytest.mark.parametrize(
    ("what", "other"), [("job", "other"), ("layout", ParallelLayout(min_replicas=2)), ("protocol", PROTOCOL + 1)]
)
def test_who_differs_from_the_record_is_refused(what: str, other: Any) -> None:
    record, tip = trained("a", "b")
    mismatched_agents = [report(agent, member(f"{agent}0"), **{what: other}) for agent in "cd"]
    answer = undecided(record, report("a", member("a0", tip), seen=record), *mismatched_agents)
    assert [agent for agent, _ in answer.refused] == ["c", "d"]  # although they are the more
    for _, why in answer.refused:
        assert why.startswith(f"its {what} is {other!r}, but the job's is ")


def test_an_agent_that_others_cannot_reach_is_refused() -> None:
    near, far = report("a", member("a0"), host="127.0.0.1"), report("b", member("b0"), host="10.0.0.2")
    assert [agent for agent, _ in undecided(None, near, far).refused] == ["a"]
    alone = agreed(None, near)
    seated = report("a", member("a0", alone.committed, entered=1, active=True), host="127.0.0.1", seen=alone)
    refused = dict(undecided(alone, seated, far).refused)
    assert list(refused) == ["b"]
    assert "known by a loopback address" in refused["b"]
    agreed(None, near, report("b", member("b0"), host="127.0.0.1"))


def test_without_a_record_the_majority_is_right() -> None:
    answer = undecided(
        None, report("a", member("a0"), layout=PAIRS), *(report(agent, member(f"{agent}0")) for agent in "bc")
    )
    assert [agent for agent, _ in answer.refused] == ["a"]
    tie = [report("a", member("a0"), layout=PAIRS), report("b", member("b0"))]
    assert undecided(None, *tie) == undecided(None, *tie[::-1])
    assert len(undecided(None, *tie).refused) == 1


# --- the state


@pytest.mark.parametrize(
    ("are_prepared", "known", "expected", "rolled_forward"),
    [
        ((True, True), None, Attempt(4, 2), True),
        ((True, False), None, Attempt(3, 1), False),
        ((True, True), Attempt(4, 2), Attempt(4, 2), False),
        ((True, False), Attempt(4, 2), Attempt(4, 2), False),
        ((False, False), None, Attempt(3, 1), False),
    ],
)
def test_a_step_in_doubt(
    are_prepared: Sequence[bool], known: Attempt | None, expected: Attempt, rolled_forward: bool
) -> None:
    record, tip = trained("a", "b", "c")
    members = [
        member(id, tip, Attempt(4, 2) if is_prepared else None, entered=2)
        for id, is_prepared in zip(("a0", "b0"), are_prepared, strict=True)
    ]
    after = agreed(record, *(report(mine.id[0], mine, seen=record, newest_commit=known) for mine in members))
    assert (after.committed, after.rolled_forward) == (expected, rolled_forward)
    for seat, mine in zip(after.seats, members, strict=True):
        assert (seat.status == ACTIVE) == (action(mine.tip, mine.pending, after.committed) is not Action.HEAL)


def test_the_decision_stands_for_those_who_have_not_acted_on_it() -> None:
    """COMMIT-3, over a chain of records: generation 3 decides, nobody acts, 4 and 5 decide the same."""
    record, tip = trained("a", "b")
    doubt = Attempt(4, 2)
    chain = [record]
    for _ in range(3):
        asked = [report(agent, member(f"{agent}0", tip, doubt, entered=2), seen=chain[-1]) for agent in "ab"]
        chain.append(agreed(chain[-1], *asked))
    assert [after.committed for after in chain[1:]] == [doubt] * 3
    assert [after.rolled_forward for after in chain[1:]] == [True, False, False]
    assert [after.generation for after in chain] == [2, 3, 4, 5]
    assert [after.parent for after in chain[1:]] == [before.digest for before in chain[:-1]]
    assert chain[-1].members(ACTIVE) == ("a0", "b0")


def test_a_dropped_attempt_stays_dropped() -> None:
    record, tip = trained("a", "b", "c")
    doubt = Attempt(4, 2)
    a, b = member("a0", tip, doubt, entered=2), member("b0", tip, entered=2)
    dropped = agreed(record, report("a", a, seen=record), report("b", b, seen=record))
    assert dropped.committed == tip
    again = agreed(dropped, report("a", a, seen=dropped))  # alone now, and it never acted
    assert (again.committed, again.rolled_forward) == (tip, False)


def test_joiners_and_returning_members_learn() -> None:
    record, tip = trained("a", "b")
    newer = Attempt(5, 2)
    back = member("b0", tip, entered=1)
    after = agreed(
        record, report("a", member("a0", newer, entered=2), member("a1"), seen=record), report("b", back, seen=record)
    )
    assert after.committed == newer
    assert (after.members(ACTIVE), set(after.members(LEARNER))) == (("a0",), {"a1", "b0"})


def test_state_of_other_model_coordinates_does_not_count() -> None:
    hosts = [report(host, member(f"{host}0"), member(f"{host}1"), layout=PAIRS) for host in "ab"]
    record = agreed(None, *hosts)
    tip = Attempt(2, 1)
    swapped = dict(zip("ab", "ba", strict=True))
    asked = [
        report(
            host,
            *(member(f"{host}{i}", tip, entered=1, holds=record.model_coordinates(f"{host}{1 - i}")) for i in (0, 1)),
            seen=record,
            layout=PAIRS,
        )
        for host in swapped
    ]
    after = agreed(record, *asked)
    for seat in after.seats:
        held = next(m.holds for r in asked for m in r.members if m.id == seat.member)
        assert (seat.status == ACTIVE) == (held == after.model_coordinates(seat.member))


def test_missing_state_is_waited_for() -> None:
    record, tip = trained("a", "b")
    newer = Attempt(4, 2)
    heard = report("a", member("a0", tip, entered=2), seen=record, newest_commit=newer)
    assert undecided(record, heard).reason == "nobody here holds step 4 of generation 2, but b0 may live"
    lowered = agreed(record, dataclasses.replace(heard, exited=("b0",)))
    assert (lowered.committed, lowered.rolled_back) == (tip, True)


def test_a_spare_may_hold_the_missing_state() -> None:
    """It was active in the generation before, and nothing was committed since."""
    start = agreed(None, *(report(host, member(f"{host}0"), member(f"{host}1"), layout=PAIRS) for host in "ab"))
    tip = Attempt(2, 1)
    three = [member(m, tip, entered=1, holds=start.model_coordinates(m)) for m in ("a0", "a1", "b0")]
    record = agreed(
        start,
        report("a", *three[:2], seen=start, layout=PAIRS),
        report("b", three[2], seen=start, exited=("b1",), layout=PAIRS),
    )
    assert record.members(SPARE) == ("b0",)
    lost = next(m for m in three[:2] if m.holds == three[2].holds)
    kept = next(m for m in three[:2] if m is not lost)
    asked = report("a", kept, member("a2"), seen=record, exited=(lost.id,), layout=PAIRS)
    assert undecided(record, asked).reason == "nobody here holds step 2 of generation 1, but b0 may live"
    back = report("b", three[2], seen=record, layout=PAIRS)
    assert agreed(record, asked, back).committed == tip
    assert isinstance(next_record(record, [dataclasses.replace(asked, exited=(lost.id, "b0"))]), Unrecoverable)


def test_lost_state_is_lowered_to_the_newest_checkpoint() -> None:
    record, _ = trained("a", "b")
    newer, checkpoint = Attempt(4, 2), Attempt(2, 1)
    torn = member("a0", entered=2)
    asked = report("a", torn, seen=record, newest_commit=newer, exited=("b0",), checkpoint=checkpoint)
    other = report("c", member("c0"), checkpoint=Attempt(1, 1))
    after = agreed(record, asked, other)
    assert (after.committed, after.rolled_back, after.rolled_forward) == (checkpoint, True, False)
    assert after.loads_checkpoint
    assert not after.members(ACTIVE)


def test_lost_state_is_lowered_to_the_newest_that_is_whole() -> None:
    """Step 5 was told, and is lost with b0; a0 holds step 4, of the same generation, or the one before, or neither."""
    record, tip = trained("a", "b")

    def ask(held: Attempt | None, checkpoint: Attempt | None) -> Record | Undecided | Unrecoverable:
        mine = member("a0", held, entered=2)
        asked = report("a", mine, seen=record, newest_commit=Attempt(5, 2), exited=("b0",), checkpoint=checkpoint)
        return next_record(record, [asked])

    for held in (Attempt(4, 2), tip):
        for checkpoint in (None, Attempt(1, 1), held):
            after = ask(held, checkpoint)
            assert isinstance(after, Record)
            assert (after.committed, after.rolled_back, after.loads_checkpoint) == (held, True, False)
            assert after.members(ACTIVE) == ("a0",)
    newest = ask(tip, Attempt(4, 2))
    assert isinstance(newest, Record)
    assert (newest.committed, newest.loads_checkpoint) == (Attempt(4, 2), True)
    assert isinstance(ask(Attempt(2, 1), None), Unrecoverable)  # it may be of a line that was given up


def test_who_may_hold_what_is_whole_is_waited_for_before_it_is_lowered() -> None:
    """Half of step 4 is lost with b0. Of step 3, c0 may hold that half."""
    across = ParallelLayout(tp=2, within_host=())
    start = first("a", "b", "c", layout=across)
    (spare,) = start.members(SPARE)
    here, dead = (m for m in ("a0", "b0", "c0") if m != spare)
    mine = member(here, Attempt(1, 1), entered=1, holds=start.model_coordinates(here))
    asked = report(here[0], mine, member(spare), seen=start, layout=across)
    assert undecided(start, asked).absent_agents == (dead[0],)
    lost = dataclasses.replace(asked, dead_agents=(dead[0],))
    assert isinstance(next_record(start, [lost]), Unrecoverable)


# --- agents that are lost


def test_the_members_of_a_lost_agent_are_waited_for_no_more() -> None:
    record, tip = trained("a", "b", "c")
    joiner = report("j", member("j0"))
    assert undecided(record, joiner).absent_agents == ("a", "b", "c")
    behind = report("a", member("a0", entered=2), seen=record)  # torn
    assert undecided(record, behind, joiner).absent_agents == ("b", "c")
    assert undecided(record, behind, dataclasses.replace(joiner, dead_agents=("b",))).absent_agents == ("c",)
    learner = report("k", member("k0", tip), dead_agents=("b", "c"))
    after = agreed(record, behind, learner)
    assert (after.committed, after.members(ACTIVE)) == (tip, ("k0",))
    assert after.dead_agents == (("b", "k"), ("c", "k"))
    assert after.absent_agents == ()


def test_the_ghost_of_a_lost_agent_is_no_participant_but_what_it_knew_counts() -> None:
    record, tip = trained("a", "b")
    ghost = report("b", member("b0", tip, entered=2), seen=record, newest_commit=Attempt(4, 2))
    alone = report("a", member("a0", tip, Attempt(4, 2), entered=2), seen=record, dead_agents=("b",))
    after = agreed(record, alone, ghost)
    assert (after.agents, after.committed, after.members(ACTIVE)) == (("a",), Attempt(4, 2), ("a0",))


def test_who_is_left_behind_is_waited_for_before_the_state_is_given_up() -> None:
    """Agent b was slow, and is in no later generation; it alone holds the committed state now."""
    record, tip = trained("a", "b")
    shrunk = agreed(record, report("a", member("a0", tip, entered=2), seen=record))
    assert shrunk.absent_agents == ("b",)
    restarted = report("a", member("a1"), seen=shrunk, exited=("a0",))
    assert undecided(shrunk, restarted) == Undecided(
        "nobody here holds step 3 of generation 1, but agent b may live", absent_agents=("b",)
    )
    back = report("b", member("b0", tip, entered=2), seen=record)
    after = agreed(shrunk, restarted, back)
    assert (after.committed, after.members(ACTIVE), after.absent_agents) == (tip, ("b0",), ())
    assert isinstance(next_record(shrunk, [dataclasses.replace(restarted, dead_agents=("b",))]), Unrecoverable)


def test_quorum_without_voters_does_not_restart_from_step_zero() -> None:
    """All that took part in the first generation are lost: nobody knows how many steps there were."""
    record = first("a", "b")
    joiner = report("j", member("j0"), dead_agents=("a", "b"))
    answer = next_record(record, [joiner])
    assert answer == Unrecoverable("all that took part in generation 1 are lost, and there is no checkpoint")
    loaded = agreed(record, dataclasses.replace(joiner, checkpoint=Attempt(7, 1)))
    assert (loaded.committed, loaded.rolled_back, loaded.loads_checkpoint) == (Attempt(7, 1), True, True)
    behind = report("b", seen=record, exited=("b0",))  # it would have heard of a step
    told = agreed(record, dataclasses.replace(joiner, dead_agents=("a",)), behind)
    assert (told.committed, told.rolled_back) == (Attempt(0, 2), False)


def test_who_comes_back_to_a_generation_that_is_lost_goes_back_in_so_many_words() -> None:
    record, tip = trained("a", "b")
    shrunk = agreed(record, report("a", member("a0", tip, entered=2), seen=record))
    back = report("b", member("b0", tip, entered=2), seen=record, dead_agents=("a",))
    after = agreed(shrunk, back)
    assert (after.committed, after.rolled_back, after.loads_checkpoint) == (tip, True, False)


# --- chains of records


def test_another_chain_is_refused_whatever_its_numbers() -> None:
    """Two jobs began with the same names: their attempts are called alike and are not the same."""
    record, tip = trained("a", "b")
    other, _ = trained("a", "c")
    assert record.generation == other.generation
    mismatched_agents = [
        report("c", member("c0", tip, entered=2), seen=other),  # of the same generation
        report("d", member("d0", tip, entered=1), seen=RecordRef(1, other.parent)),  # of one before
        report("e", member("e0", tip, entered=1), seen=RecordRef(1, "")),
    ]
    for mismatched_agent in mismatched_agents:
        answer = undecided(record, report("a", member("a0", tip, entered=2), seen=record), mismatched_agent)
        assert [agent for agent, _ in answer.refused] == [mismatched_agent.agent]
        assert "builds on" in answer.reason


def test_who_was_away_for_long_is_of_the_chain_up_to_a_limit() -> None:
    record, tip = trained("a", "b")
    chain = [record]
    for _ in range(30):
        chain.append(agreed(chain[-1], report("a", member("a0", tip, entered=2), seen=chain[-1])))
    for number, seen in enumerate(reversed(chain)):
        back = report("b", member("b0", tip, entered=2), seen=seen)
        answer = next_record(chain[-1], [report("a", member("a0", tip, entered=2), seen=chain[-1]), back])
        assert isinstance(answer, Record) == (number <= 16)
    assert all(len(record.ancestors) <= 16 for record in chain)


def test_what_was_lowered_does_not_come_back() -> None:
    """COMMIT-4: the agent still knows of step 4, and somebody who was long away even holds it."""
    record, tip = trained("a", "b")
    gone, checkpoint = Attempt(4, 2), Attempt(2, 1)
    asked = report(
        "a", member("a0", tip, entered=2), seen=record, newest_commit=gone, exited=("b0",), checkpoint=checkpoint
    )
    lowered = agreed(record, asked)
    going_on = report("a", member("a0", Attempt(3, 3), entered=3, active=True), seen=lowered, newest_commit=gone)
    back = report("z", member("z0", gone, entered=2), seen=record)
    after = agreed(lowered, going_on, back)
    assert (after.committed, after.rolled_back) == (Attempt(3, 3), False)
    assert (after.members(ACTIVE), after.members(LEARNER)) == (("a0",), ("z0",))


def test_the_state_before_the_first_step_is_designated_anew() -> None:
    """RECOVERY-3, under a new attempt: who held the former one and comes back heals."""
    record = first("a", "b", "c")
    (holder,) = record.members(ACTIVE)
    others = [m for m in ("a0", "b0", "c0") if m != holder]
    asked = [report(m[0], member(m, entered=1), seen=record) for m in others]
    assert undecided(record, *asked).reason == f"no witness of generation 1 is here, but {holder} may live"
    asked.append(report(holder[0], seen=record, exited=(holder,)))
    after = agreed(record, *asked)
    assert (after.committed, after.rolled_back) == (Attempt(0, 2), False)
    (designated,) = after.members(ACTIVE)
    assert action(Attempt(0, 1), None, after.committed) is Action.HEAL
    entered = [
        report(m[0], member(m, after.committed if m == designated else None, entered=2), seen=after) for m in others
    ]
    back = report(holder[0], member(holder, Attempt(0, 1), entered=1), seen=after)
    third = agreed(after, *entered, back)
    assert (third.committed, third.members(ACTIVE)) == (Attempt(0, 2), (designated,))


def test_a_step_that_cannot_be_completed_is_dropped_rather_than_lost() -> None:
    """Nobody is left with one half of step 3, in doubt, but somebody has that half of the step before."""
    across = ParallelLayout(tp=2, within_host=())
    start = first("a", "b", "c", "d", layout=across)
    before, doubt = Attempt(2, 1), Attempt(3, 2)
    half = {m: start.model_coordinates(m) for m in ("a0", "b0", "c0", "d0")}
    kept = "a0"
    lost, learner = (m for m in half if half[m] != half[kept])
    pair = [report(m[0], member(m, before, entered=1, holds=half[m]), seen=start, layout=across) for m in (kept, lost)]
    record = agreed(start, *pair)
    assert set(record.members(ACTIVE)) == {kept, lost}
    here = report("a", member(kept, before, doubt, entered=2, holds=half[kept]), seen=record, layout=across)
    back = report(learner[0], member(learner, before, entered=1, holds=half[learner]), seen=start, layout=across)
    assert undecided(record, here, back).reason == f"nobody here holds step 3 of generation 2, but {lost} may live"
    after = agreed(record, dataclasses.replace(here, exited=(lost,)), back)
    assert (after.committed, after.rolled_forward, after.rolled_back) == (before, False, False)
    assert set(after.members(ACTIVE)) == {kept, learner}


# --- the form of records and reports

FIXED = Record(
    job="job",
    generation=2,
    parent="0123456789abcdef",
    layout=ParallelLayout(sdp=2, min_replicas=1),
    plan=Plan((1, 1, 2, 1), (Member("a0", "h1"), Member("b0", "h2")), ("c0",)),
    seats=(
        Seat("a0", "a", "h1", 0, "h1:7000", ACTIVE),
        Seat("b0", "b", "h2", 0, "h2:7000", LEARNER),
        Seat("c0", "c", "h3", 1, "h3:7000", SPARE),
    ),
    agents=("a", "b", "c"),
    committed=Attempt(7, 1),
    rolled_forward=True,
)


def test_hosts_need_not_have_as_many_ranks_each() -> None:
    layout = ParallelLayout(min_replicas=3)
    hosts = [report("a", member("a0")), report("b", member("b0"), member("b1"))]
    told = [replace(host, layout=layout, max_agents=2, num_ranks=len(host.members)) for host in hosts]
    assert len(agreed(None, *told).seats) == 3


def test_when_all_hosts_are_here_and_too_small_each_is_told_all_numbers() -> None:
    layout = ParallelLayout(tp=2, min_replicas=2)
    hosts = [report("a", member("a0")), report("b", member("b0"), member("b1"))]
    told = [replace(host, layout=layout, max_agents=2, num_ranks=len(host.members)) for host in hosts]
    waiting = next_record(None, told)
    assert isinstance(waiting, Undecided)
    why = "the layout needs 4 ranks (min_replicas 2 x pp 1 x sdp 1 x tp 2), but the job has 3, 1 + 2 on its 2 hosts"
    assert waiting.refused == (("a", why), ("b", why))
    waiting = next_record(None, [replace(host, max_agents=3) for host in told])
    assert isinstance(waiting, Undecided)
    assert waiting.refused == ()


def test_digest_is_the_same_everywhere() -> None:
    """It is part of the rendezvous prefix: when this changes, so must PROTOCOL."""
    assert (PROTOCOL, FIXED.digest) == (9, "f909bef1cdb52f30")


@pytest.mark.parametrize(
    "changed",
    [
        {"generation": 3},
        {"draining_members": ("a0",)},
        {"parent": ""},
        {"committed": Attempt(7, 2)},
        {"rolled_back": True},
        {"ancestors": ("fedcba9876543210",)},
        {"addresses": ("10.0.0.1:1",)},
        {"dead_agents": (("d", "a"),)},
        {"absent_agents": ("d",)},
    ],
)
def test_digest_tells_records_apart(changed: dict[str, Any]) -> None:
    assert dataclasses.replace(FIXED, digest="", **changed).digest != FIXED.digest


def test_record_survives_being_written() -> None:
    full = dataclasses.replace(
        FIXED, digest="", ancestors=("0", "1"), dead_agents=(("d", "a"), ("e", "b")), absent_agents=("f",)
    )
    unplanned = Seat("c1", "c", "h3", 2, "h3:7001", SPARE)  # of a host that is one too many
    empty = dataclasses.replace(FIXED, digest="", agents=("a", "b", "c", "d"), seats=(*FIXED.seats, unplanned))
    for record in (FIXED, full, empty):
        back = Record.from_text(record.text)
        assert [back.seats_of(agent) for agent in "abcde"] == [record.seats_of(agent) for agent in "abcde"]
        assert back == record
        assert back.digest == record.digest
        assert dataclasses.replace(back, digest="").text == record.text


def test_report_survives_json() -> None:
    full = report(
        "a",
        member("a0", Attempt(3, 2), Attempt(4, 2), entered=2, active=True),
        member("a1"),
        member("a2", Attempt(3, 2), Attempt(4, 2), entered=2, active=True, draining=True),
        seen=RecordRef(2, "0123456789abcdef"),
        newest_commit=Attempt(4, 2),
        exited=("a9",),
        dead_agents=("z",),
        checkpoint=Attempt(1, 1),
    )
    for sent in (full, report("b")):
        assert report_from_json(json.loads(json.dumps(report_to_json(sent)))) == sent


@pytest.mark.parametrize(
    "broken",
    [
        {"members": None},
        {"seen": 2},
        {"seen": ["x", ""]},
        {"known": [1]},
        {"known": 5},
        {"checkpoint": [1, "x"]},
        {"layout": {"tp": 0}},
        {"layout": {"qp": 1}},
        {"more": 1},
        {"members": [{"id": "a0"}]},
        {"members": [["a0", 0, "", [0, 0], 0]], "states": [[None, None, 0, False]]},
        {"members": [["a0", 0, "", None, 0]]},
        {"members": [["a0", 0, "", None, 1]], "states": [[None, None, 0, False]]},
        {"states": [[None, None, 0]]},
    ],
)
def test_what_is_not_a_report_says_so(broken: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        report_from_json({**report_to_json(report("a")), **broken})


@pytest.mark.parametrize("absent", ["job", "shape", "committed", "rolled_back"])
def test_what_is_not_a_record_says_so(absent: str) -> None:
    head, *lines = FIXED.text.split("\n")
    data = json.loads(head)
    del data[absent]
    with pytest.raises((KeyError, TypeError, ValueError)):
        Record.from_text("\n".join((canonical_json(data), *lines)))


@pytest.mark.parametrize("text", ["", "{}", FIXED.text.rpartition("\n")[0], f"{FIXED.text}\n[]"])
def test_neither_is_a_part_of_one_or_more_than_one(text: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Record.from_text(text)


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        '["h1"]',  # nobody has rank 0
        '["h1",["a0",0,"h1:7000",0]]',
        '["h1",["a0",0,"h1:7000",3,0]]',
        '["h1",["a0",0,"h1:7000",0,1]]',  # two have rank 1
        '["h1",["b0",0,"h1:7000",0,0]]',  # somebody has two
    ],
)
def test_what_are_not_its_seats_say_so_when_they_are_asked_for(line: str) -> None:
    head, _, *lines = FIXED.text.split("\n")
    record = Record.from_text("\n".join((head, line, *lines)))
    assert record.seats_of("b") == FIXED.seats_of("b")
    with pytest.raises((KeyError, TypeError, ValueError)):
        _ = record.plan


def test_the_order_of_the_proposal_does_not_matter() -> None:
    record, tip = trained("a", "b", "c")
    asked = [report(agent, member(f"{agent}0", tip, Attempt(4, 2), entered=2), seen=record) for agent in "abc"]
    answers = {agreed(record, *order, report("j", member("j0"))).digest for order in itertools.permutations(asked)}
    assert len(answers) == 1


# --- random schedules

MODELS = {layout: tuple((0, 0, tp) for tp in range(layout.tp)) for layout in (FLAT, PAIRS)}


@dataclass
class Rank:
    """A member as it really is. `tip` names its state's whole history, see `Job.base`; `running`: it has entered its
    generation and has not asked since."""

    id: str
    agent: str
    tip: Attempt | None = None
    pending: Attempt | None = None
    holds: tuple[int, int, int] | None = None
    entered: int = 0
    active: bool = False
    running: bool = False

    def report(self) -> MemberReport:
        return member(self.id, self.tip, self.pending, holds=self.holds, entered=self.entered, active=self.active)


@dataclass
class Host:
    agent: str
    ranks: dict[str, Rank] = field(default_factory=dict)
    record: Record | None = None
    known: Attempt | None = None
    gone: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)


@dataclass
class Job:
    """Hosts that come and go, on a seeded schedule. Each generation runs a few whole steps and breaks off in one.

    `passed`: attempts whose vote succeeded, `committed`: those applied by somebody, `given_up`: those of them that
    were lost, with a part of the model.
    """

    chance: random.Random
    layout: ParallelLayout
    record: Record | None = None
    hosts: dict[str, Host] = field(default_factory=dict)
    base: dict[Attempt, Attempt] = field(default_factory=dict)
    passed: set[Attempt] = field(default_factory=set)
    committed: set[Attempt] = field(default_factory=set)
    given_up: set[Attempt] = field(default_factory=set)
    old_reports: list[Report] = field(default_factory=list)
    num_started: int = 0
    broken: int = 0
    seen: set[str] = field(default_factory=set)

    # -- what happens

    def add_host(self) -> None:
        self.num_started += 1
        host = Host(f"h{self.num_started:03}")
        self.hosts[host.agent] = host
        for _ in range(self.layout.unit):
            self.add_rank(host)

    def add_rank(self, host: Host) -> None:
        self.num_started += 1
        rank = Rank(f"m{self.num_started:03}", host.agent)
        host.ranks[rank.id] = rank

    def kill_rank(self) -> None:
        host = self.chance.choice(list(self.hosts.values()))
        if host.ranks:
            self.remove_rank(host, self.chance.choice(list(host.ranks)))
            if self.chance.random() < 0.7:
                self.add_rank(host)

    def kill_host(self) -> None:
        """Whoever is left learns of it, sooner or later."""
        dead = self.hosts.pop(self.chance.choice(list(self.hosts)))
        if not self.hosts:
            self.add_host()
        successor = self.chance.choice(list(self.hosts.values()))
        successor.lost |= dead.lost | {dead.agent}
        if self.chance.random() < 0.5:
            self.add_host()

    def remove_rank(self, host: Host, id: str) -> None:
        del host.ranks[id]
        host.gone.add(id)

    def run(self) -> None:
        """The present generation makes progress, if all of its members have entered it."""
        record = self.record
        assert record is not None
        if self.broken == record.generation:
            return
        ranks = {rank.id: rank for host in self.hosts.values() for rank in host.ranks.values()}
        seated = [seat.member for seat in record.seats if seat.status != SPARE]
        if not all(id in ranks and ranks[id].entered == record.generation and ranks[id].running for id in seated):
            return
        for _ in range(self.chance.randrange(3)):
            if not self.step([ranks[id] for id in seated], broken=False):
                return
        self.broken = record.generation
        self.step([ranks[id] for id in seated], broken=True)

    def step(self, seated: list[Rank], broken: bool) -> bool:
        """One step, or as much of it as comes before a break. False: it cannot be tried."""
        voters = [rank for rank in seated if rank.active]
        sources = {rank.holds: rank for rank in voters if rank.tip}
        for rank in seated:
            if not rank.tip and rank.holds in sources and self.chance.random() < 0.7:
                rank.tip = sources[rank.holds].tip
        if set(sources) != set(MODELS[self.layout]) or not all(rank.tip for rank in voters):
            return False
        (tip,) = {rank.tip for rank in voters if rank.tip}
        attempt = Attempt(tip.step + 1, seated[0].entered)
        assert self.base.setdefault(attempt, tip) == tip
        all_prepare = not broken or self.chance.random() < 0.6
        for rank in seated:
            if rank.tip == tip and (all_prepare or self.chance.random() < 0.6):
                rank.pending = attempt
        if all(rank.pending == attempt for rank in voters):
            self.passed.add(attempt)
            whole = [rank for rank in seated if rank.pending == attempt]
            for rank in seated:
                if not broken or self.chance.random() < 0.4:
                    self.hear_vote(rank, torn=broken and self.chance.random() < 0.2)
                    rank.active = rank.active or rank in whole
        return True

    def hear_vote(self, rank: Rank, torn: bool = False) -> None:
        if rank.pending in self.passed and rank.tip == self.base[rank.pending]:
            self.committed.add(rank.pending)
            rank.tip, rank.pending = (None if torn else rank.pending), None
            rank.running = rank.running and not torn
            if rank.tip and self.chance.random() < 0.7:
                self.hosts[rank.agent].known = rank.tip

    def propose(self, everyone: bool = False) -> None:
        """Some agents, or all of them, ask together."""
        asking = [host for host in self.hosts.values() if everyone or self.chance.random() < 0.7]
        for host in asking:
            for rank in host.ranks.values():
                rank.running = False
        proposal = [self.report(host) for host in asking]
        for host in self.hosts.values():  # those who are not asked may still hear how their old vote ended
            for rank in host.ranks.values():
                if rank.running and self.chance.random() < 0.3:
                    self.hear_vote(rank)
        if self.old_reports and not everyone and self.chance.random() < 0.1:
            ghost = self.chance.choice(self.old_reports)
            proposal = [ghost, *(mine for mine in proposal if mine.agent != ghost.agent)]
            self.check_ghost(ghost, proposal)
            return
        self.old_reports += proposal
        self.decide(asking, proposal, must_decide=everyone)

    def report(self, host: Host) -> Report:
        if host.record is None or (self.record and host.agent in self.record.agents):
            host.record = self.record if self.record and host.agent in self.record.agents else host.record
        return report(
            host.agent,
            *(rank.report() for rank in host.ranks.values()),
            seen=host.record,
            newest_commit=host.known,
            exited=tuple(sorted(host.gone)),
            dead_agents=tuple(sorted(host.lost)),
            layout=self.layout,
        )

    def decide(self, asking: list[Host], proposal: list[Report], must_decide: bool) -> None:
        answer = next_record(self.record, proposal)
        self.seen.add(type(answer).__name__)
        assert next_record(self.record, self.chance.sample(proposal, len(proposal))) == answer
        if isinstance(answer, Undecided):
            if must_decide:  # nothing stands in the way but that there are too few
                with pytest.raises(LayoutError):
                    plan([Member(m.id, mine.host) for mine in proposal for m in mine.members], self.layout)
            return
        if isinstance(answer, Unrecoverable):
            self.check_lost(proposal)
            self.__init__(self.chance, self.layout, seen=self.seen)  # type: ignore[misc]
            for _ in range(3):
                self.add_host()
            return
        self.check(answer, proposal)
        assert Record.from_text(answer.text) == answer
        self.record = answer
        for host in asking:
            if self.chance.random() < 0.9:
                host.record = answer
                for rank in list(host.ranks.values()):
                    if self.chance.random() < 0.9:
                        self.enter(host, rank, answer)

    def enter(self, host: Host, rank: Rank, record: Record) -> None:
        """As the manager does it."""
        seat = record.seat(rank.id)
        assert seat is not None
        todo = action(rank.tip, rank.pending, record.committed)
        if todo is Action.APPLY:
            assert rank.tip == self.base[record.committed]
            self.committed.add(record.committed)
            rank.tip = record.committed
        elif seat.status == ACTIVE and todo is Action.HEAL:
            assert record.committed == Attempt(0, record.generation)
            if rank.tip is None and rank.entered:
                self.remove_rank(host, rank.id)  # torn or half healed: not fit to be where the state is taken from
                return
            rank.tip = record.committed
        elif todo is Action.HEAL or seat.status == LEARNER:
            rank.tip = None
        rank.pending, rank.entered, rank.running = None, record.generation, seat.status != SPARE
        rank.active = seat.status == ACTIVE
        if seat.status != SPARE:
            rank.holds = record.model_coordinates(rank.id)

    # -- what must hold

    def past(self, attempt: Attempt) -> list[Attempt]:
        out = [attempt]
        while out[-1] in self.base:
            out.append(self.base[out[-1]])
        return out

    def parts(self, attempt: Attempt, ranks: Iterable[Rank]) -> set[tuple[int, int, int] | None]:
        """The model coordinates for which somebody holds a state with `attempt` in it, or can apply it."""
        return {
            rank.holds
            for rank in ranks
            if rank.tip
            and (attempt in self.past(rank.tip) or (rank.pending == attempt and self.base[attempt] == rank.tip))
        }

    def reachable(self, proposal: list[Report]) -> list[Rank]:
        """Who is here, or is in the record and alive."""
        here = {m.id for mine in proposal for m in mine.members}
        if self.record:
            here |= {seat.member for seat in self.record.seats}
        return [rank for host in self.hosts.values() for rank in host.ranks.values() if rank.id in here]

    def check(self, record: Record, proposal: list[Report]) -> None:
        before = self.record
        assert record.generation == (before.generation + 1 if before else 1)
        assert record.parent == (before.digest if before else "")
        ranks = {rank.id: rank for rank in self.reachable(proposal)}
        assert sorted(record.agents) == sorted(mine.agent for mine in proposal)
        assert sorted(seat.member for seat in record.seats) == sorted(m.id for mine in proposal for m in mine.members)
        past = self.past(record.committed)
        for attempt in self.committed - set(past) - self.given_up:  # COMMIT-1
            assert self.parts(attempt, ranks.values()) != set(MODELS[self.layout]), (attempt, record)
            self.given_up.add(attempt)
        assert not self.given_up & set(past)  # COMMIT-4
        if before and record.committed != Attempt(0, record.generation):
            assert before.committed in past
            self.seen.add("rolled forward" if record.rolled_forward else "resolved")
        if record.committed == Attempt(0, record.generation):
            self.seen.add("designated")
            assert len(record.members(ACTIVE)) == self.layout.unit
            return
        assert {action(rank.tip, rank.pending, record.committed) for rank in ranks.values()} != {Action.HEAL}
        for seat in record.seats:  # RECOVERY-2
            rank = ranks[seat.member]
            fit = action(rank.tip, rank.pending, record.committed) is not Action.HEAL
            if seat.status != SPARE:
                assert (seat.status == ACTIVE) == (fit and rank.holds == record.model_coordinates(seat.member))
        here = [ranks[seat.member] for seat in record.seats]
        assert self.parts(record.committed, here) == set(MODELS[self.layout])

    def check_lost(self, proposal: list[Report]) -> None:
        self.seen.add("lost")
        assert self.record is not None
        truths = {self.record.committed} | {a for a in self.committed if a.generation == self.record.generation}
        assert any(self.parts(truth, self.reachable(proposal)) != set(MODELS[self.layout]) for truth in truths)

    def check_ghost(self, ghost: Report, proposal: list[Report]) -> None:
        if any(ghost.agent in mine.dead_agents for mine in proposal):
            return
        if (
            self.record
            and ghost.agent in self.record.agents
            and ghost.newest_record.generation < self.record.generation
        ):
            self.seen.add("ghost")
            assert isinstance(next_record(self.record, proposal), Undecided)


@pytest.mark.parametrize("layout", [FLAT, PAIRS], ids=["flat", "pairs"])
def test_random_schedules(layout: ParallelLayout) -> None:
    seen: set[str] = set()
    for seed in range(100):
        job = Job(random.Random(seed), layout, seen=seen)
        for _ in range(3):
            job.add_host()
        for _ in range(60):
            if job.record is None or job.chance.random() < 0.3:
                job.propose(everyone=job.chance.random() < 0.4)
            else:
                job.chance.choices([job.run, job.kill_rank, job.kill_host, job.add_host], [10, 3, 1, 1])[0]()
    assert seen >= {"Record", "Undecided", "Unrecoverable", "rolled forward", "resolved", "designated", "ghost", "lost"}
