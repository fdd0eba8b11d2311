"""The next record: who is seated how, and which proposals are undecided or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elasticgang.errors import LayoutError
from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.record import (
    ACTIVE,
    LEARNER,
    PROTOCOL,
    SPARE,
    CheckpointRef,
    Record,
    Undecided,
    Unrecoverable,
)
from tests.unit.proposals import PAIRS, WHOLE, agreed, first, member, report, trained, undecided

# --- the first record


# NEXT-1
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


def test_a_member_without_a_seat_is_a_spare() -> None:
    record = agreed(None, report("a", member("a0"), member("a1"), member("a2"), layout=PAIRS))
    (spare,) = record.members(SPARE)
    assert spare not in record.plan.ranks
    seat = record.seat(spare)
    assert seat is not None
    assert (seat.agent, seat.host, seat.local_rank, seat.address) == ("a", "a", int(spare[-1]), f"{spare}:1")
    assert record.seat("z9") is None


def test_members_beyond_the_requested_seats_are_spares() -> None:
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
    after = agreed(start, report("a", *tips, seen=start, num_seats=2), lost=("b",))
    assert after.plan.shape[1] == 4


# NEXT-3
def test_a_draining_member_takes_no_seat_from_its_successor() -> None:
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


def test_a_draining_member_takes_no_seat_from_a_replica_group_of_spares() -> None:
    members = [member(f"a{index}") for index in range(4)]
    start = agreed(None, report("a", *members, layout=PAIRS, num_seats=2))
    tips = [
        replace(mine, tip=Attempt(3, 1), holds=start.model_coordinates(mine.id), entered=1, active=True)
        for mine in members[:2]
    ]
    told = [replace(tips[0], draining=True), tips[1], *members[2:]]
    after = agreed(start, report("a", *told, seen=start, layout=PAIRS, num_seats=2))
    assert (after.members(ACTIVE), after.members(LEARNER)) == (("a0", "a1"), ("a2", "a3"))


def test_an_agent_whose_members_all_drain_does_not_count_for_max_agents() -> None:
    start = agreed(None, *(report(agent, member(f"{agent}0"), max_agents=1) for agent in "ab"))
    assert start.members(SPARE) == ("b0",)
    goer = member("a0", Attempt(3, 1), entered=1, active=True, draining=True)
    told = [report("a", goer, seen=start, max_agents=1), report("b", member("b0"), seen=start, max_agents=1)]
    after = agreed(start, *told)
    assert (after.members(ACTIVE), after.members(LEARNER)) == (("a0",), ("b0",))


def test_too_few_members_are_undecided() -> None:
    with pytest.raises(LayoutError) as error:
        plan([Member("a0", "a")], PAIRS)
    assert undecided(None, report("a", member("a0"), layout=PAIRS)).reason == str(error.value)


def test_the_first_generation_waits_for_the_largest_min_agents() -> None:
    a, b = report("a", member("a0"), min_agents=2), report("b", member("b0"))
    assert undecided(None, a).reason == "1 of at least 2 agents are here"
    start = agreed(None, a, b)
    alone = replace(a, newest_record=start.ref, members=(member("a0", start.committed, entered=1),))
    assert agreed(start, alone).agents == ("a",)


def test_agents_beyond_max_agents_are_spares_until_a_seated_one_is_lost() -> None:
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


def test_the_last_holder_has_a_seat_even_beyond_max_agents() -> None:
    start = agreed(None, *(report(agent, member(f"{agent}0"), max_agents=2) for agent in "bc"))
    tip = Attempt(3, 1)
    held = {agent: member(f"{agent}0", tip, entered=1, active=True) for agent in "bc"}
    a0 = member("a0")
    left = agreed(start, report("a", a0, max_agents=2), report("b", held["b"], seen=start, max_agents=2))
    assert left.agents == ("a", "b")
    asked = [
        report("a", a0, seen=left, max_agents=2),
        report("b", member("b1"), seen=left, exited=("b0",), max_agents=2),
    ]
    back = agreed(left, *asked, report("c", held["c"], seen=start, max_agents=2))
    assert back.members(ACTIVE) == ("c0",)
    assert set(back.members(LEARNER)) == {"a0", "b1"}
    whole = [report(seat.agent, member(seat.member, tip, entered=3), seen=back, max_agents=2) for seat in back.seats]
    assert len(agreed(back, *whole).members(SPARE)) == 1


def test_an_agent_without_members_does_not_count_for_max_agents() -> None:
    start = agreed(None, *(report(agent, member(f"{agent}0"), max_agents=2) for agent in "ab"))
    b0 = member("b0", Attempt(3, 1), entered=1, active=True)
    seated = report("b", b0, seen=start, max_agents=2)
    after = agreed(start, report("a", seen=start, exited=("a0",), max_agents=2), seated, report("c", member("c0")))
    assert after.members(LEARNER) == ("c0",)


# --- undecided proposals (NEXT-2) and refused agents


def test_a_member_has_one_agent() -> None:
    assert "'a0'" in undecided(None, report("a", member("a0")), report("b", member("a0"))).reason


def test_joiners_alone_are_undecided_while_a_member_may_live() -> None:
    record, tip = trained("a", "b")
    joiner = report("j", member("j0"))
    assert undecided(record, joiner).reason == "no witness of generation 2 is here, but a0, b0 may live"
    assert "but b0 may live" in undecided(record, joiner, report("a", seen=record, exited=("a0",))).reason
    assert agreed(record, joiner, report("b", member("b0", tip, entered=2), seen=record)).members(ACTIVE) == ("b0",)


def test_a_lone_joiner_is_undecided() -> None:
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
    assert ask(active=False, entered=1) == Undecided(reason)
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


def test_a_member_that_never_entered_is_a_witness_without_state() -> None:
    record = first("a", "b")
    (holder,) = record.members(ACTIVE)
    (learner,) = record.members(LEARNER)
    mine = report(holder[0], member(holder), seen=record)
    assert undecided(record, mine).reason == f"nobody here holds step 0 of generation 1, but {learner} may live"
    assert agreed(record, mine, report(learner[0], seen=record, exited=(learner,))).committed == Attempt(0, 2)


def test_an_agent_that_was_left_behind_takes_part_again() -> None:
    record, tip = trained("a", "b")
    shrunk = agreed(record, report("a", member("a0", tip, entered=2), seen=record))
    back = report("b", member("b0", tip, entered=2), seen=record)
    assert agreed(shrunk, report("a", member("a0", tip, entered=3), seen=shrunk), back).members(ACTIVE) == ("a0", "b0")


@pytest.mark.parametrize(
    ("what", "other"), [("job", "other"), ("layout", ParallelLayout(min_replicas=2)), ("protocol", PROTOCOL + 1)]
)
def test_an_agent_that_differs_from_the_record_is_refused(what: str, other: Any) -> None:
    record, tip = trained("a", "b")
    mismatched_agents = [report(agent, member(f"{agent}0"), **{what: other}) for agent in "cd"]
    answer = undecided(record, report("a", member("a0", tip), seen=record), *mismatched_agents)
    assert [agent for agent, _ in answer.refused] == ["c", "d"]  # although they are the more
    for _, why in answer.refused:
        assert why.startswith(f"its {what} is {other!r}, but the job's is ")


STEPS = "number of steps"


# NEXT-2
def test_a_joiner_with_other_settings_than_the_agents_that_take_part_is_refused() -> None:
    record, tip = trained("a", "b")
    joiners = [report(agent, member(f"{agent}0"), settings=((STEPS, "30"),)) for agent in "cd"]
    members = [report("a", member("a0", tip), seen=record, settings=((STEPS, "2000"),))]
    members.append(report("b", member("b0", tip), seen=record))
    why = "its number of steps is '30', but the job's is '2000'"
    assert undecided(record, *members, *joiners).refused == (("c", why), ("d", why))
    others = [replace(joiner, settings=(("model", "x"), (STEPS, "2000"))) for joiner in joiners]
    agreed(record, *members, *others)  # what only joiners name is not compared


# NEXT-2
def test_without_agents_that_take_part_the_most_common_settings_apply() -> None:
    reports = [
        report(agent, member(f"{agent}0"), settings=((STEPS, value),))
        for agent, value in (("a", "9"), ("b", "10"), ("c", "10"))
    ]
    assert undecided(None, *reports).refused == (("a", "its number of steps is '9', but the job's is '10'"),)
    record = agreed(None, *reports[1:])
    alone = report("d", member("d0"), settings=((STEPS, "99"),), checkpoint=CheckpointRef(Attempt(5, 1), "x"))
    assert agreed(record, alone, lost=("b", "c")).agents == ("d",)


def test_an_agent_that_others_cannot_reach_is_refused() -> None:
    near, far = report("a", member("a0"), host="127.0.0.1"), report("b", member("b0"), host="10.0.0.2")
    assert [agent for agent, _ in undecided(None, near, far).refused] == ["a"]
    alone = agreed(None, near)
    seated = report("a", member("a0", alone.committed, entered=1, active=True), host="127.0.0.1", seen=alone)
    refused = dict(undecided(alone, seated, far).refused)
    assert list(refused) == ["b"]
    assert "known by a loopback address" in refused["b"]
    agreed(None, near, report("b", member("b0"), host="127.0.0.1"))


def test_without_a_record_the_majority_decides() -> None:
    answer = undecided(
        None, report("a", member("a0"), layout=PAIRS), *(report(agent, member(f"{agent}0")) for agent in "bc")
    )
    assert [agent for agent, _ in answer.refused] == ["a"]
    tie = [report("a", member("a0"), layout=PAIRS), report("b", member("b0"))]
    assert undecided(None, *tie) == undecided(None, *tie[::-1])
    assert len(undecided(None, *tie).refused) == 1


# --- records that no message carries


def limit_to(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticgang.protocol.next_record.MAX_RECORD_BYTES", record.form.num_sent_bytes)


# NEXT-9
def test_the_size_of_a_record_is_that_of_its_text_in_a_message() -> None:
    record = agreed(None, report('a"\\', member("a0"), host="h\u00e4"))
    assert record.form.num_sent_bytes == len(json.dumps(record.text))


# NEXT-9
def test_a_job_too_large_for_a_message_is_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_to(first("a", "b"), monkeypatch)
    assert first("a", "b").agents == ("a", "b")
    answer = undecided(None, *(report(agent, member(f"{agent}0")) for agent in "abc"))
    assert [agent for agent, _ in answer.refused] == ["a", "b", "c"]
    (why,) = {why for _, why in answer.refused}
    assert why.startswith("the record of 3 agents and 3 ranks would have ")
    assert "run fewer hosts or ranks, with shorter host names" in why


# NEXT-9
@pytest.mark.parametrize(("joiners", "refused"), [("d", "d"), ("xde", "ex")])
def test_joiners_for_whom_no_message_has_room_are_refused(
    joiners: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on, with as many joiners as there is room for."""
    record, attempt = trained("a", "b", "c")
    there = [report(a, member(f"{a}0", attempt, entered=2, active=True), seen=record) for a in "abc"]
    fits = [agent for agent in joiners if agent not in refused]
    limit_to(agreed(record, *there, *(report(agent, member(f"{agent}0")) for agent in fits)), monkeypatch)
    joining = [report(agent, member(f"{agent}0")) for agent in joiners]
    while isinstance(answer := next_record(record, [*there, *joining]), Undecided):
        gone = {agent for agent, _ in answer.refused}
        assert gone
        joining = [each for each in joining if each.agent not in gone]
    assert isinstance(answer, Record)
    assert answer.agents == tuple(sorted([*"abc", *fits]))


# NEXT-9
def test_a_record_that_grows_beyond_a_message_without_joiners_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    record, attempt = trained("a", "b")
    limit_to(record, monkeypatch)
    there = [report(a, member(f"{a}0", attempt, entered=2, active=True), seen=record) for a in "ab"]
    more = replace(there[1], members=(*there[1].members, *(member(f"b{index}") for index in range(1, 9))))
    answer = undecided(record, there[0], more)
    assert answer.refused == ()
    assert answer.reason.startswith("the record of 2 agents and 10 ranks would have ")
