"""Hosts that reach the coordinator, but not each other: who is in the next record, and when they come back."""

from __future__ import annotations

from typing import Any

from elasticgang.layout import ParallelLayout
from elasticgang.protocol import coordinator_messages as m
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.job_facts import AgentFacts
from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.record import ACTIVE, LEARNER, NO_RECORD, SPARE, CutOff, Record, Report, Undecided
from tests.unit import coordinator_driver
from tests.unit.coordinator_driver import Driver
from tests.unit.proposals import PAIRS, first, member, report, trained


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
def test_a_job_that_needs_both_hosts_tries_again_with_both() -> None:
    layout = ParallelLayout(min_replicas=2)
    record = first("a", "b", layout=layout)
    proposal = [report(agent, member(f"{agent}0"), seen=record, layout=layout) for agent in "ab"]
    following = decided(record, proposal, a="b", b="a")
    assert following.cut_off == ()
    assert not following.members(SPARE)
    parts = [report(agent, member(f"{agent}0"), layout=PAIRS) for agent in "ab"]
    assert isinstance(next_record(None, parts, unreached={"a": "b"}), Undecided)  # a pair is on one host


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
