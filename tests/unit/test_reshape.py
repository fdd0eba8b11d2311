"""Fallback layouts: which one is taken, who keeps the state of the former one, and how long."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticgang.errors import LayoutError
from elasticgang.layout import Axes, ParallelLayout, is_filled
from elasticgang.layout.overlap import Part, common_share
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.agent_events import (
    CoordinatorConnected,
    MemberLeft,
    RecordAnswered,
    RequestRecord,
    StartExpired,
)
from elasticgang.protocol.agent_lifecycle import START_TIMEOUT_S
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_instructions import Observed
from elasticgang.protocol.member_lifecycle import Next
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.next_record import infeasible, next_record
from elasticgang.protocol.record import (
    ACTIVE,
    LEARNER,
    SPARE,
    CheckpointRef,
    FormerState,
    Holder,
    MemberReport,
    Record,
    Report,
    Undecided,
    Unrecoverable,
    layout_from_json,
    layout_to_json,
    report_from_json,
    report_to_json,
)
from elasticgang.protocol.record_delta import apply_delta, delta_of
from tests.unit import agent_hosts
from tests.unit.proposals import agreed, member, report, undecided
from tests.unit.test_agent_lifecycle import Host as LifecycleHost
from tests.unit.test_agent_lifecycle import record_of
from tests.unit.test_member_lifecycle import LOST, NUM_STEPS, Driver

ONE, PAIR = ParallelLayout(), ParallelLayout(sdp=2)
LAYOUT = ParallelLayout(sdp=2, fallback=(ONE,))
TWO_PAIRS = ParallelLayout(sdp=2, min_replicas=2, fallback=(ONE,))
THREE = ParallelLayout(sdp=3, fallback=(PAIR, ONE))
STAGES = ParallelLayout(pp=2, min_replicas=2, fallback=(PAIR, ONE))
FIRST, SECOND = (0, 0, 0), (0, 1, 0)
TIP = Attempt(4, 1)

# --- the declaration


# LAYOUT-5
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ParallelLayout(fallback=(1,)), "`fallback` must be a tuple of layouts without a `fallback`"),  # type: ignore[arg-type]
        (lambda: ParallelLayout(fallback=PAIR), "`fallback` must be a tuple of layouts"),  # type: ignore[arg-type]
        (lambda: ParallelLayout(tp=2, fallback=(LAYOUT,)), "layouts without a `fallback`"),
        (lambda: ParallelLayout(sdp=2, fallback=(PAIR,)), "other sizes `pp`, `sdp` and `tp`, but two layouts have the"),
        (
            lambda: ParallelLayout(sdp=2, views=(Axes((1, 2, 1), ("tp", "cp", "outer")),), fallback=(ONE,)),
            "`views` and `fallback` must not be given together",
        ),
    ],
)
def test_a_fallback_that_the_state_cannot_move_to_is_refused(make: object, why: str) -> None:
    assert callable(make)
    with pytest.raises(LayoutError, match=why):
        make()


def test_a_layout_with_fallback_is_sent_whole() -> None:
    for layout in (ONE, LAYOUT, THREE):
        assert layout_from_json(layout_to_json(layout)) == layout
    assert "fallback" not in layout_to_json(ONE)
    assert LAYOUT.options == (PAIR, ONE)
    assert hash(LAYOUT) == hash(ParallelLayout(sdp=2, fallback=[ONE]))  # type: ignore[arg-type]


def test_ranks_that_fill_a_fallback_can_train() -> None:
    assert infeasible(LAYOUT, 1) is None
    assert infeasible(ParallelLayout(sdp=4, fallback=(PAIR,)), 1) == (
        "the layout needs 2 ranks (min_replicas 1 x pp 1 x sdp 2 x tp 1), but the job has 1"
    )


# --- the layout in force


def begun(*agents: str, layout: ParallelLayout = LAYOUT) -> Record:
    return agreed(None, *(report(agent, member(f"{agent}0"), layout=layout) for agent in agents))


def holding(record: Record, id: str, tip: Attempt | None = TIP, **facts: Any) -> MemberReport:
    """The member holds the part of its seat in `record`."""
    known = {"holds": record.model_coordinates(id), "layout": record.in_force, "entered": record.generation, **facts}
    return member(id, tip, active=tip is not None, **known)


def of(record: Record, mine: MemberReport, **facts: Any) -> Report:
    return report(mine.id[0], mine, seen=record, layout=record.declared, **facts)


# NEXT-4
def test_the_first_layout_that_the_members_fill_is_in_force() -> None:
    assert begun("a", "b").layout == PAIR
    assert begun("a").layout == ONE
    assert begun("a", "b", "c", layout=TWO_PAIRS).plan.shape == (1, 3, 1, 1)
    assert begun("a", "b", layout=THREE).layout == PAIR
    record = begun("a", "b")
    assert (record.declared, record.layouts, record.in_force, record.holders) == (LAYOUT, (PAIR, ONE), 0, ())


# NEXT-4, NEXT-6
def test_members_that_hold_all_parts_keep_them_for_a_layout_that_fewer_fill() -> None:
    start = begun("a", "b", "c", "d", layout=TWO_PAIRS)
    assert {start.model_coordinates(id) for id in ("a0", "b0", "c0")} == {FIRST, SECOND}
    after = agreed(start, *(of(start, holding(start, id)) for id in ("a0", "b0", "c0")), lost="d")
    assert (after.layout, after.committed, after.rolled_back, after.checkpoint) == (ONE, TIP, False, "")
    assert set(after.members(LEARNER)) == {"a0", "b0", "c0"}
    assert after.holders == tuple(Holder(id, 0, start.model_coordinates(id)) for id in ("a0", "b0", "c0"))
    assert Record.from_text(after.text) == after
    made = delta_of(start, after)
    assert made is None or apply_delta(start, made) == after


# NEXT-4, NEXT-6
def test_stages_are_kept_for_a_layout_without_them() -> None:
    start = begun("a", "b", "c", "d", layout=STAGES)
    assert {start.model_coordinates(id) for id in ("a0", "b0", "c0")} == {(0, 0, 0), (1, 0, 0)}
    after = agreed(start, *(of(start, holding(start, id)) for id in ("a0", "b0", "c0")), lost="d")
    assert (after.layout, after.committed, after.checkpoint) == (PAIR, TIP, "")
    assert after.holders == tuple(Holder(id, 0, start.model_coordinates(id)) for id in ("a0", "b0", "c0"))
    assert len(after.members(LEARNER)) == 2


# NEXT-7
def test_members_sit_where_they_keep_the_most() -> None:
    """Of three pairs five members are left, who divide the model in four: each has its half of one of the quarters."""
    for axis in ("sdp", "pp"):
        layout = ParallelLayout.parse(f"{axis}=2,min_replicas=3/{axis}=4")
        start = begun("a", "b", "c", "d", "e", "f", layout=layout)
        staying = ("a0", "b0", "c0", "d0", "e0")
        after = agreed(start, *(of(start, holding(start, id)) for id in staying), lost="f")
        assert after.layout == layout.options[1]
        for id in after.members(LEARNER):
            former, now = (Part.of(record.layout, record.model_coordinates(id)) for record in (start, after))
            assert common_share(former, now) == now.share


# NEXT-4
def test_a_layout_is_taken_again_once_members_fill_it() -> None:
    start = begun("a")
    after = agreed(start, of(start, holding(start, "a0")), report("b", member("b0"), layout=LAYOUT))
    assert (after.layout, after.committed) == (PAIR, TIP)
    assert after.holders == (Holder("a0", 1, FIRST),)
    assert set(after.members(LEARNER)) == {"a0", "b0"}


# NEXT-4
def test_a_layout_that_is_filled_stays_whoever_dies() -> None:
    start = begun("a", "b", "c", "d")
    told = [of(start, holding(start, id)) for id in ("b0", "c0")]
    after = agreed(start, *told, lost="ad")
    assert (after.layout, after.holders) == (PAIR, ())
    assert set(after.members(ACTIVE)) == {"b0", "c0"}


# NEXT-4
def test_a_draining_member_fills_no_layout_that_others_do() -> None:
    start = begun("a", "b")
    staying, goer = holding(start, "a0"), holding(start, "b0", draining=True)
    after = agreed(start, of(start, staying), of(start, goer))
    assert (after.layout, set(after.members(LEARNER))) == (ONE, {"a0", "b0"})
    assert {holder.member for holder in after.holders} == {"a0", "b0"}
    both = agreed(start, of(start, replace(staying, draining=True)), of(start, goer))
    assert (both.layout, set(both.members(ACTIVE))) == (PAIR, {"a0", "b0"})


# NEXT-5
def test_the_layout_in_force_waits_for_ranks_that_are_being_started() -> None:
    start = begun("a", "b", layout=THREE)
    lost = [of(start, holding(start, "a0"), checkpoint=CheckpointRef(Attempt(2, 1), "d"), num_starting=1)]
    waiting = undecided(start, *lost, lost="b")
    assert waiting.reason == "1 ranks are being started, which the layout (sdp=2) waits for"
    after = agreed(start, *(replace(each, num_starting=0) for each in lost), lost="b")
    assert (after.layout, after.checkpoint, after.holders) == (ONE, "d", ())


# NEXT-5
def test_no_earlier_layout_waits_for_ranks_that_are_being_started() -> None:
    start = begun("a")
    assert agreed(start, of(start, holding(start, "a0"), num_starting=1)).layout == ONE


@given(
    st.integers(1, 3).flatmap(
        lambda size: st.tuples(st.just(size), st.lists(st.integers(0, 3), min_size=1, max_size=4))
    ),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.sampled_from([LAYOUT, TWO_PAIRS, THREE, ParallelLayout(tp=2, fallback=(ONE,)), STAGES]),
)
def test_a_first_record_has_the_first_layout_that_is_filled(
    fleet: tuple[int, list[int]], starting: list[int], layout: ParallelLayout
) -> None:
    agents = {chr(ord("a") + index): num for index, num in enumerate(fleet[1])}
    told = [
        report(agent, *(member(f"{agent}{rank}") for rank in range(num)), layout=layout, num_starting=more)
        for (agent, num), more in zip(agents.items(), starting, strict=False)
    ]
    here = {agent: num for agent, num in agents.items() if num}
    coming = {agent: num + more for (agent, num), more in zip(agents.items(), starting, strict=False)}
    filled = [number for number, option in enumerate(layout.options) if is_filled(option, here)]
    answer = next_record(None, told)
    if filled and (filled[0] == 0 or not is_filled(layout.options[0], coming)):
        assert isinstance(answer, Record)
        assert answer.in_force == filled[0]
    else:
        assert isinstance(answer, Undecided)


# --- while the state moves


def moving(*, spare: bool = False) -> tuple[Record, Record]:
    """The record before, of two pairs, and that of the move to single ranks."""
    start = begun("a", "b", "c", "d", layout=TWO_PAIRS)
    ids = ("a0", "b0", "c0")
    seats = {"a0": 1, "b0": 1, "c0": 0} if spare else dict.fromkeys(ids, 1)
    after = agreed(start, *(of(start, holding(start, id), num_seats=seats[id]) for id in ids), lost="d")
    return start, after


def keeping(start: Record, id: str, record: Record, tip: Attempt | None = None) -> MemberReport:
    """The member has a seat in `record`, and keeps what it had in `start`."""
    kept = FormerState(TIP, start.in_force, start.model_coordinates(id))
    return holding(record, id, tip, former=kept)


# RECOVERY-7
def test_kept_state_is_a_copy_until_the_move_is_over() -> None:
    """c0 has its part already, and dies; a0 and b0 still keep a pair."""
    start, after = moving()
    told = [of(after, keeping(start, id, after)) for id in ("a0", "b0")]
    again = agreed(after, *told, lost="c")
    assert (again.layout, again.committed, again.rolled_back) == (ONE, TIP, False)
    assert {holder.member for holder in again.holders} == {"a0", "b0"}
    moved = [of(after, keeping(start, "a0", after, TIP)), of(after, keeping(start, "b0", after))]
    again = agreed(after, *moved, lost="c")
    assert (again.members(ACTIVE), again.members(LEARNER), again.holders) == (("a0",), ("b0",), ())


# RECOVERY-7
def test_parts_of_several_layouts_do_not_add_up() -> None:
    start, after = moving()
    alone = of(after, keeping(start, "a0", after))
    assert isinstance(next_record(after, [alone], lost="bc"), Unrecoverable)
    back = agreed(after, replace(alone, checkpoint=CheckpointRef(Attempt(2, 1), "d")), lost="bc")
    assert (back.committed, back.checkpoint, back.holders) == (Attempt(2, 1), "d", ())


# RECOVERY-1
def test_an_absent_holder_may_keep_what_is_missing() -> None:
    start, after = moving()
    waiting = undecided(after, of(after, keeping(start, "a0", after)))
    assert "b0" in waiting.reason


def test_reports_and_members_say_what_they_keep() -> None:
    start, after = moving()
    told = of(after, keeping(start, "a0", after), num_starting=2)
    assert report_from_json(report_to_json(told)) == told


# --- members


def state_in(start: Record, id: str) -> MemberState:
    state = MemberState(id, tip=TIP, committed=TIP, holds=start.model_coordinates(id), layout=start.in_force)
    state.record, state.entered = start, start.generation
    return state


def enter(state: MemberState, record: Record) -> None:
    seat = record.seat(state.member)
    assert seat is not None
    state.enter(record, seat)


# MEMBER-7
def test_a_holder_keeps_its_state_until_a_later_commit_or_record() -> None:
    start, after = moving()
    kept = FormerState(TIP, 0, SECOND)
    state = state_in(start, "b0")
    enter(state, after)
    assert (state.former, state.tip, state.holds, state.layout) == (kept, None, FIRST, 1)
    assert {holder.member for _, holder in state.holders()} == {"a0", "b0", "c0"}
    enter(state, replace(after, generation=3, digest=""))
    assert state.former == kept
    state.healed()
    state.prepare(Attempt(5, 2))
    assert state.passed(Attempt(5, 2))
    assert state.former is None
    other = state_in(start, "b0")
    enter(other, replace(after, holders=(), digest=""))
    assert other.former is None


# MEMBER-7
def test_a_spare_that_keeps_state_is_relieved_once_everybody_has_fetched() -> None:
    start, after = moving(spare=True)
    assert after.members(SPARE)
    votes = {id: state_in(start, id) for id in after.plan.ranks}
    for state in votes.values():
        enter(state, after)
        state.healed()
    ballots = [state.ballot(state.attempt(), False, False) for state in votes.values()]
    sums = [sum(column) for column in zip(*ballots, strict=True)]
    assert all(state.count(state.attempt(), sums, False).regroups for state in votes.values())


# MEMBER-6
def test_the_last_holder_stays_until_the_record_knows_that_it_drains() -> None:
    start = begun("a", "b")
    for record, leaves in ((start, False), (replace(start, draining_members=("b0",), digest=""), True)):
        votes = {id: state_in(record, id) for id in ("a0", "b0")}
        for state in votes.values():
            state.active = {"a0", "b0"}
            state.prepare(state.attempt())
        ballots = [state.ballot(state.attempt(), False, id == "b0") for id, state in votes.items()]
        sums = [sum(column) for column in zip(*ballots, strict=True)]
        outcome = votes["b0"].count(votes["b0"].attempt(), sums, True)
        assert (outcome.leaves, outcome.regroups) == (leaves, True)


def moved() -> Driver:
    """a0 has entered the record of a move; its steps begin next."""
    start, after = moving()
    driver = Driver()
    state = driver.lifecycle.state
    state.tip, state.committed, state.holds, state.record = TIP, TIP, start.model_coordinates("a0"), start
    driver.enter(after)
    return driver


# MANAGER-14
def test_a_rank_keeps_its_state_before_it_builds_another_and_fetches_that() -> None:
    driver = moved()
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), {"Move": True}) is Next.LOAD
    assert driver.names == ["KeepFormer", "BuildSeat", "Move", "REPORT_HEALED"]
    keep, build, move, _ = driver.done
    assert keep == do.KeepFormer(FormerState(TIP, 0, FIRST), is_dropped=False)
    assert build == do.BuildSeat(FIRST, 1)
    assert isinstance(move, do.Move)
    assert (move.layout, move.attempt, len(move.holders)) == (replace(PAIR, min_replicas=2), TIP, 3)
    assert driver.lifecycle.state.tip == TIP


# MANAGER-14
def test_a_rank_that_cannot_fetch_ends_the_generation() -> None:
    driver = moved()
    driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), {"Move": False})
    assert driver.names == ["KeepFormer", "BuildSeat", "Move", "Poison"]
    assert driver.lifecycle.state.tip is None


# MANAGER-4
def test_a_step_that_a_move_rolls_forward_is_committed() -> None:
    """The vote fails, as d0 dies. What forward has changed stays: it belongs to the state that this rank keeps."""
    start = begun("a", "b", "c", "d", layout=TWO_PAIRS)
    driver = Driver()
    driver.enter(start)
    driver.begin()
    doubt = Attempt(1, 1)
    told = [holding(start, id, Attempt(0, 1), pending=doubt) for id in ("a0", "b0", "c0")]
    after = agreed(start, *(of(start, each) for each in told), lost="d")
    assert (after.committed, after.rolled_forward, len(after.holders)) == (doubt, True, 3)
    driver.records = [after]
    assert driver.run(driver.lifecycle.commit(1.0, measures=False), {"AWAIT_SUMS control": LOST})
    assert "APPLY" in driver.names
    assert (driver.lifecycle.state.tip, driver.lifecycle.state.former) == (None, FormerState(doubt, 0, FIRST))
    assert driver.run(driver.lifecycle.end(None)) is False
    (end,) = driver.done
    assert isinstance(end, do.EndStep)
    assert (end.restores, end.is_dropped) == (False, False)


# MANAGER-10
def test_a_draining_spare_stays_while_it_keeps_state() -> None:
    start, after = moving(spare=True)
    (spare,) = after.members(SPARE)
    driver = Driver()
    driver.lifecycle.state.member = spare
    state = driver.lifecycle.state
    state.tip, state.committed, state.holds, state.record = TIP, TIP, start.model_coordinates(spare), start
    driver.lifecycle.has_seat, driver.lifecycle.observed = True, Observed(draining=True)
    relieved = replace(after, generation=3, holders=(), digest="")
    driver.records = [after, None, relieved]
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.REGROUP
    assert driver.names.count("AWAIT_RECORD") == 3
    assert [each.former for each in driver.done if isinstance(each, do.KeepFormer)] == [
        FormerState(TIP, 0, start.model_coordinates(spare)),
        None,
    ]
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.LEAVE


# --- agents


# AGENT-9
def test_a_report_says_how_many_ranks_are_being_started_until_they_are_late() -> None:
    host = agent_hosts.Host(2, max_restarts=3)
    host.start("a0", "a1")
    assert host.asks("a0", layout=LAYOUT) == []
    assert host.asks("a1", layout=LAYOUT) == [RequestRecord()]
    record = replace(agent_hosts.record_of(("a0", "a1")), layout=PAIR, layouts=LAYOUT.options, digest="")
    host.state.handle(RecordAnswered(record))
    host.exits("a1")
    host.asks("a0", layout=LAYOUT, broken=True)
    assert host.state.report().num_starting == 1
    assert host.state.handle(StartExpired()) == [RequestRecord()]
    assert host.state.report().num_starting == 0
    host.start("a1'")
    assert host.state.report().num_starting == 0  # it is as late
    assert host.exits("a1'")[-1:]
    assert host.state.report().num_starting == 0


# AGENT-9
def test_an_agent_that_starts_no_rank_any_more_says_so() -> None:
    host = agent_hosts.Host(2)
    host.start("a0", "a1")
    host.asks("a0", layout=LAYOUT)
    host.asks("a1", layout=LAYOUT)
    record = replace(agent_hosts.record_of(("a0", "a1")), layout=PAIR, layouts=LAYOUT.options, digest="")
    host.state.handle(RecordAnswered(record))
    host.exits("a1")
    host.start("a1'")
    host.asks("a0", layout=LAYOUT, broken=True)
    assert host.state.report().num_starting == 1
    assert RequestRecord() in host.exits("a1'", 0, goes=True)
    assert host.state.report().num_starting == 0


def one_that_left(*, raised: bool) -> agent_hosts.Host:
    """Of two ranks of a job with another layout, a0 has requested the next record, and a1 has left its loop."""
    host = agent_hosts.Host(2, max_restarts=3)
    host.start("a0", "a1")
    host.asks("a0", layout=LAYOUT)
    host.asks("a1", layout=LAYOUT)
    record = replace(agent_hosts.record_of(("a0", "a1")), layout=PAIR, layouts=LAYOUT.options, digest="")
    host.state.handle(RecordAnswered(record))
    host.commits("a0", "a1")
    host.state.handle(MemberLeft("a1", finished=False, raised=raised))
    assert host.asks("a0", layout=LAYOUT, broken=True) == [RequestRecord()]
    return host


# AGENT-9
def test_a_rank_whose_loop_an_exception_has_left_is_waited_for_before_it_has_exited() -> None:
    host = one_that_left(raised=True)
    assert host.state.report().num_starting == 1
    assert host.state.num_successors([]) == 2  # a0 waits too
    assert host.state.num_successors(["a1"]) == 1
    assert RequestRecord() not in host.raises("a1", 3)
    assert host.state.report().num_starting == 1


# AGENT-9
def test_a_rank_that_is_restarted_against_expectation_is_told_of() -> None:
    host = one_that_left(raised=False)
    assert host.state.report().num_starting == 0
    assert host.state.num_successors([]) == 1
    assert RequestRecord() in host.raises("a1", 3)
    assert host.state.report().num_starting == 1


# AGENT-9, LIFE-1
@pytest.mark.parametrize("raised", [False, True])
def test_a_layout_waits_for_no_restart_that_a_signal_has_dropped(raised: bool) -> None:
    """Else the other ranks, which drain, would wait for a record until their grace period ends, and save nothing."""
    host = LifecycleHost(2)
    host(CoordinatorConnected("host", "127.0.0.1:7"))
    host.start("a0", "a1")
    host.asks("a0", layout=LAYOUT)
    host.asks("a1", layout=LAYOUT)
    host(RecordAnswered(replace(record_of("a0", "a1"), layout=PAIR, layouts=LAYOUT.options, digest="")))
    if raised:
        host(MemberLeft("a1", finished=False, raised=True))
    else:
        host.exits("a1")
    host.asks("a0", layout=LAYOUT)
    assert host.agent.state.report().num_starting == 1
    assert RequestRecord() in host.gets(signal.SIGTERM)
    assert host.agent.state.report().num_starting == 0


# AGENT-9
def test_ranks_that_are_being_started_are_late_after_the_start_timeout() -> None:
    host = LifecycleHost(2)
    host(CoordinatorConnected("host", "127.0.0.1:7"))
    host.start("a0", "a1")
    host.asks("a0", layout=LAYOUT)
    host.asks("a1", layout=LAYOUT)
    host(RecordAnswered(replace(record_of("a0", "a1"), layout=PAIR, layouts=LAYOUT.options, digest="")))
    host.now_s += 1000.0
    host.exits("a1")
    timers = host.agent.timers()
    assert timers["start"] == host.now_s + START_TIMEOUT_S
    host.asks("a0", layout=LAYOUT)
    host.now_s += START_TIMEOUT_S
    host.waits()
    assert host.agent.state.report().num_starting == 0
