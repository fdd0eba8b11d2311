"""Hosts that reach the coordinator, but not each other: who is in the next record, and when they come back."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from elasticgang.agent.change_log import ChangeLog
from elasticgang.layout import ParallelLayout
from elasticgang.observe.event_names import EventName
from elasticgang.protocol import coordinator_messages as m
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.job_facts import AgentFacts
from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.record import (
    ACTIVE,
    LEARNER,
    NO_RECORD,
    SPARE,
    CheckpointRef,
    CutOff,
    Record,
    Report,
    Undecided,
)
from tests.unit import coordinator_driver
from tests.unit.coordinator_driver import Driver
from tests.unit.proposals import PAIRS, first, member, report, trained


class RecordedEvents:
    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []

    def write(self, event: EventName, **fields: Any) -> None:
        self.written.append(fields)

    def write_file(self, name: str, text: str) -> None: ...


def decided(record: Record | None, proposal: list[Report], **unreached: str) -> Record:
    """`unreached`: by agent, those that its host does not reach."""
    answer = next_record(record, proposal, unreached=unreached)
    assert isinstance(answer, Record), answer
    return answer


def at_step(record: Record, attempt: Attempt, *agents: str) -> list[Report]:
    return [report(agent, member(f"{agent}0", attempt, entered=2, active=True), seen=record) for agent in agents]


# NEXT-10
def test_the_members_of_a_host_that_the_others_do_not_reach_are_spares() -> None:
    record, attempt = trained("a", "b", "c")
    following = decided(record, at_step(record, attempt, "a", "b", "c"), a="c", b="c", c="ab")
    assert following.members(ACTIVE) == ("a0", "b0")
    assert following.members(SPARE) == ("c0",)
    assert following.cut_off == (CutOff("c", ("a", "b")),)
    assert Record.from_text(following.text) == following


# NEXT-10
def test_a_host_that_is_left_out_while_none_of_its_ranks_runs_does_not_end_the_agents() -> None:
    record, attempt = trained("a", "b")
    following = decided(record, [*at_step(record, attempt, "a"), report("b", seen=record)], a="b")
    assert following.cut_off == (CutOff("b", ("a",)),)
    events = RecordedEvents()
    ChangeLog(events, 0.0).agreed(following, "a", (), ())
    (written,) = events.written
    assert [host["agent"] for host in written["seats"]] == ["a"]


# NEXT-10
def test_two_hosts_that_do_not_reach_each_other_go_on_with_one() -> None:
    record, attempt = trained("a", "b")
    following = decided(record, at_step(record, attempt, "a", "b"), b="a")
    assert following.members(ACTIVE) == ("a0",)
    assert decided(record, at_step(record, attempt, "a", "b")).cut_off == ()


# NEXT-10
def test_a_joiner_is_left_out_before_who_holds_state_and_a_small_host_before_a_large_one() -> None:
    record, attempt = trained("b", "c")
    joiner = report("a", member("a0"), member("a1"))
    assert decided(record, [joiner, *at_step(record, attempt, "b", "c")], a="b").cut_off == (CutOff("a", ("b",)),)
    small, large = report("a", member("a0")), report("b", member("b0"), member("b1"))
    assert decided(None, [small, large], a="b").cut_off == (CutOff("a", ("b",)),)


# CUT-2, NEXT-10
def test_nobody_is_left_out_who_alone_holds_a_part_of_the_state() -> None:
    record, attempt = trained("a", "b")
    joiner, holder = report("a", member("a0")), at_step(record, attempt, "b")[0]
    following = decided(record, [joiner, holder], a="b")
    assert following.members(ACTIVE) == ("b0",)
    lone = report("a", member("a0"), member("a1"), member("a2"), seen=record)
    following = decided(record, [lone, holder], b="a")
    assert following.members(ACTIVE) == ("b0",)
    assert following.cut_off == (CutOff("a", ("b",)),)


# CUT-2
def test_who_alone_holds_the_state_stays_although_it_reaches_the_fewest() -> None:
    record, attempt = trained("a")
    joiners = [report(agent, member(f"{agent}0")) for agent in "bc"]
    following = decided(record, [*at_step(record, attempt, "a"), *joiners], a="bc")
    assert following.members(ACTIVE) == ("a0",)
    assert following.cut_off == (CutOff("c", ("a",)), CutOff("b", ("a",)))


# CUT-2
def test_a_job_that_needs_both_hosts_tries_again_with_both() -> None:
    layout = ParallelLayout(min_replicas=2)
    record = first("a", "b", layout=layout)
    proposal = [report(agent, member(f"{agent}0"), seen=record, layout=layout) for agent in "ab"]
    following = decided(record, proposal, a="b", b="a")
    assert following.cut_off == ()
    assert not following.members(SPARE)
    parts = [report(agent, member(f"{agent}0"), layout=PAIRS) for agent in "ab"]
    assert isinstance(next_record(None, parts, unreached={"a": "b"}), Undecided)  # a pair is on one host


# CUT-2
def test_nobody_is_left_out_if_the_agents_that_may_take_part_do_not_fill_the_layout_then() -> None:
    layout, sizes = ParallelLayout(min_replicas=6), {"a": 4, "b": 4, "c": 1, "d": 1}
    proposal = [
        report(agent, *(member(f"{agent}{number}") for number in range(size)), layout=layout, max_agents=2)
        for agent, size in sizes.items()
    ]
    record = decided(None, proposal, b="a")
    assert (record.cut_off, record.members(SPARE)) == ((), ("c0", "d0"))


# CUT-2
def test_the_half_of_a_parted_network_that_fills_the_layout_goes_on_although_it_has_fewer_hosts() -> None:
    layout, sizes = ParallelLayout(min_replicas=6), {"a": 4, "b": 4, "c": 1, "d": 1, "e": 1}
    proposal = [
        report(agent, *(member(f"{agent}{number}") for number in range(size)), layout=layout)
        for agent, size in sizes.items()
    ]
    record = decided(None, proposal, c="ab", d="ab", e="ab")
    assert [each.agent for each in record.cut_off] == ["e", "d", "c"]
    assert record.plan.size == 8


# NEXT-10
def test_a_host_that_drains_is_left_out_before_one_that_stays() -> None:
    record, attempt = trained("a", "b")
    drains = report("a", member("a0", attempt, entered=2, active=True, draining=True), seen=record)
    (stays,) = at_step(record, attempt, "b")
    assert decided(record, [drains, stays], b="a").cut_off == (CutOff("a", ("b",)),)


# CUT-2, NEXT-10
def test_nobody_is_left_out_who_alone_can_load_the_checkpoint() -> None:
    saved = CheckpointRef(Attempt(10, 3), "abcd")
    able, unable = report("b", member("b0"), checkpoint=saved), report("a", member("a0"))
    record = decided(None, [able, unable])
    assert (record.checkpoint, record.committed) == ("abcd", saved.attempt)
    proposal = [replace(each, newest_record=record.ref) for each in (unable, able)]
    following = decided(record, proposal, a="b")
    assert following.checkpoint == "abcd"
    assert following.cut_off == (CutOff("a", ("b",)),)


# NEXT-10
def test_a_host_that_waits_takes_the_seats_of_one_that_is_left_out() -> None:
    start = [report(agent, member(f"{agent}0"), max_agents=2) for agent in "abc"]
    record = decided(None, start)
    assert record.members(SPARE) == ("c0",)
    seen = [report(agent, member(f"{agent}0"), max_agents=2, seen=record) for agent in "abc"]
    following = decided(record, seen, b="a")
    assert {*following.members(ACTIVE), *following.members(LEARNER)} == {"a0", "c0"}
    assert following.members(SPARE) == ("b0",)


def left_out() -> tuple[Driver, list[int]]:
    """A job of a, b and c that goes on without c, and their sessions."""
    driver = Driver(granted=True)
    sessions = [driver.open(agent) for agent in "abc"]
    tell(driver, sessions)
    assert coordinator_driver.record(driver).generation == 1
    for session, unreached in zip(sessions, ("c", "c", "ab"), strict=True):
        driver.hear(session, AgentFacts(unreached=tuple(unreached)))
    driver.hear(sessions[0], m.EndGeneration(1))
    tell(driver, sessions)
    record = coordinator_driver.record(driver)
    assert (record.generation, record.members(SPARE)) == (2, ("c/0",))
    return driver, sessions


def tell(driver: Driver, sessions: list[int]) -> None:
    """All are ready, and accept what follows."""
    known = driver.state.record
    for agent, session in zip("abc", sessions, strict=True):
        driver.hear(session, m.Ready(coordinator_driver.report(agent, NO_RECORD if known is None else known.ref)))
    ref = coordinator_driver.record(driver).ref
    for session in sessions:
        driver.hear(session, m.Accepted(ref.generation, ref.digest))


def joins(out: list[Any]) -> bool:
    return any(isinstance(each, m.Send) and isinstance(each.message, m.JoinNotice) for each in out)


# REACHED
def test_a_host_comes_back_once_it_and_all_others_reach_each_other() -> None:
    driver, (a, b, c) = left_out()
    assert not joins(driver.hear(c, AgentFacts()))
    assert not joins(driver.hear(a, AgentFacts()))
    assert not joins(driver.hear(a, AgentFacts(has_successors=True)))
    assert joins(driver.hear(b, AgentFacts()))
    tell(driver, [a, b, c])
    record = coordinator_driver.record(driver)
    assert (record.generation, record.members(SPARE), record.cut_off) == (3, (), ())


# OVER
def test_when_the_others_have_finished_no_record_follows_for_a_host_that_is_left_out() -> None:
    """It would take steps again that they have committed."""
    driver, (a, b, c) = left_out()
    driver.hear(c, m.Ready(coordinator_driver.report("c", coordinator_driver.record(driver).ref)))
    out = [*driver.hear(a, m.Finished(2)), *driver.hear(a, m.Goodbye()), *driver.hear(b, m.Goodbye())]
    told = [each.message for each in out if isinstance(each, m.Send) and each.session == c]
    assert told == [m.Finished(2)]
    assert coordinator_driver.record(driver).generation == 2


# REACHED
def test_nobody_comes_back_while_one_path_is_broken() -> None:
    driver, (a, b, c) = left_out()
    assert not joins(driver.hear(a, AgentFacts()))
    assert not joins(driver.hear(c, AgentFacts(unreached=("b",))))
    driver.hear(a, m.EndGeneration(2))
    tell(driver, [a, b, c])
    record = coordinator_driver.record(driver)
    assert (record.generation, record.members(SPARE)) == (3, ("c/0",))


# REACHED
def test_a_coordinator_that_was_started_again_lets_nobody_back_before_all_have_told_whom_they_reach() -> None:
    former, _ = left_out()
    decision = former.state.newest.decision
    assert decision is not None
    driver = Driver(granted=True, decision=decision)
    a, b, c = (driver.open(agent, session=2, decision=decision.ref) for agent in "abc")
    assert not joins(driver.hear(c, AgentFacts()))
    assert not joins(driver.hear(b, AgentFacts()))
    assert not joins(driver.hear(a, AgentFacts(unreached=("c",))))
    assert joins(driver.hear(a, AgentFacts()))


# REACHED
def test_facts_of_many_agents_cost_no_look_at_all_paths_each() -> None:
    agents = [f"a{number:03}" for number in range(300)]
    there, away = agents[:-30], agents[-30:]
    driver = Driver(granted=True)
    sessions = {agent: driver.open(agent) for agent in agents}
    for agent in agents:
        driver.hear(sessions[agent], m.Ready(replace(coordinator_driver.report(agent), min_agents=len(agents))))
    driver.wait(0.5)
    first = coordinator_driver.record(driver).ref
    for agent in agents:
        driver.hear(sessions[agent], m.Accepted(first.generation, first.digest))
        unreached = tuple(there if agent in away else away)
        driver.hear(sessions[agent], AgentFacts(unreached=unreached))
    driver.hear(sessions[agents[0]], m.EndGeneration(1))
    for agent in agents:
        driver.hear(sessions[agent], m.Ready(coordinator_driver.report(agent, first)))
    assert len(coordinator_driver.record(driver).cut_off) == len(away)
    began = time.process_time()
    outs = [driver.hear(sessions[agent], AgentFacts()) for agent in (*away, *there)]
    assert time.process_time() - began < 1.0
    assert [joins(out) for out in outs].index(True) == len(agents) - 1


# REACHED
def test_an_agent_that_has_reached_all_from_the_start_says_nothing_and_keeps_nobody_out() -> None:
    driver = Driver(granted=True)
    sessions = [a, b, _] = [driver.open(agent, session=1) for agent in "abc"]
    tell(driver, sessions)
    driver.hear(b, AgentFacts(unreached=("a",)))
    driver.hear(a, m.EndGeneration(1))
    tell(driver, sessions)
    assert coordinator_driver.record(driver).cut_off == (CutOff("b", ("a",)),)
    assert joins(driver.hear(b, AgentFacts()))
