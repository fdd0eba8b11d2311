"""What the coordinator's state machine tells agents beside records: losses, refusals, and why it does not decide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticgang.layout import ParallelLayout
from elasticgang.protocol import coordinator_messages as m
from elasticgang.protocol.agent_events import PeerNotice
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.record import SPARE, MemberReport, Report
from tests.unit.coordinator_driver import Driver, found, record, report


def sent(instructions: list[Any], kind: type) -> list[tuple[int, Any]]:
    return [(i.session, i.message) for i in instructions if isinstance(i, m.Send) and isinstance(i.message, kind)]


def undecided(driver: Driver, agents: int) -> Report:
    return replace(report("a"), min_agents=agents)


def test_an_agent_that_comes_back_under_another_id_is_lost_under_the_former_one() -> None:
    driver, _, b = found()
    out = driver.hear(9, m.Hello("a.2", "a", 1, former="a"))
    assert driver.state.absences.lost == {"a"}
    assert sent(out, m.Notice) == [(b, m.Notice("lost", "", ("a",))), (9, m.Notice("lost", "", ("a",)))]
    assert (b, m.EndGeneration(1, EndCause("is lost", ("a",)))) in sent(out, m.EndGeneration)


def test_an_agent_does_not_speak_for_the_id_of_another_process() -> None:
    driver, _, _ = found()
    driver.hear(9, m.Hello("x", "x", 1, former="a"))
    assert driver.state.absences.lost == set()


def test_an_agent_without_seats_that_ends_ends_no_generation() -> None:
    driver, a, b = found()
    generation = record(driver)
    member = MemberReport("b/0", 0, "127.0.0.1:1", generation.committed, None, (0, 0, 0), 1, True)
    driver.hear(a, m.Ready(replace(report("a", generation.ref), members=(), exited=("a/0",))))
    driver.hear(b, m.Ready(replace(report("b", generation.ref), members=(member,))))
    assert record(driver).generation == 2
    assert record(driver).agents == ("a", "b")
    out = driver.hear(a, m.Goodbye())
    assert sent(out, m.EndGeneration) == []
    assert sent(out, m.Notice) == [(b, m.Notice("left", "", ("a",)))]
    assert driver.state.absences.lost == {"a"}


# LOST
@pytest.mark.parametrize("end", [m.Goodbye(), m.AgentExited("c")])
def test_an_agent_whose_ranks_are_all_spares_costs_no_step(end: Any) -> None:
    """As when all agents get SIGTERM: its ranks leave at once, those of the others save the state meanwhile."""
    driver = Driver(granted=True)
    sessions = {agent: driver.open(agent) for agent in "abc"}
    for agent, session in sessions.items():
        asked = replace(report(agent), layout=ParallelLayout(sdp=2), min_agents=3)
        driver.hear(session, m.Ready(asked))
    generation = record(driver)
    for session in sessions.values():
        driver.hear(session, m.Accepted(1, generation.digest))
    assert generation.members(SPARE) == ("c/0",)
    out = driver.do(end) if isinstance(end, m.AgentExited) else driver.hear(sessions["c"], end)
    assert sent(out, m.EndGeneration) == []
    assert len(sent(out, m.JoinNotice)) == 2
    assert driver.state.absences.lost == {"c"}
    for agent, member in zip("ab", ("a/0", "b/0"), strict=True):
        driver.hear(sessions[agent], m.EndGeneration(1))
        seat = MemberReport(
            member, 0, "127.0.0.1:1", Attempt(1, 1), None, generation.model_coordinates(member), 1, True
        )
        asked = replace(report(agent, generation.ref), layout=ParallelLayout(sdp=2), members=(seat,), min_agents=2)
        driver.hear(sessions[agent], m.Ready(asked))
    assert record(driver).agents == ("a", "b")


def test_an_agent_with_seats_that_says_goodbye_has_left() -> None:
    driver, a, b = found()
    out = driver.hear(a, m.Goodbye("the agent ends"))
    assert sent(out, m.EndGeneration) == [(b, m.EndGeneration(1, EndCause("has left", ("a",))))]
    assert sent(out, m.Notice) == [(b, m.Notice("left", "", ("a",)))]
    assert driver.state.absences.lost == {"a"}


@pytest.mark.parametrize("is_effect", [False, True])
def test_the_end_of_a_generation_says_whether_it_was_only_noticed(is_effect: bool) -> None:
    driver, a, b = found()
    end = m.EndGeneration(1, EndCause("lost a peer", ("a",), (0,), is_effect))
    assert sent(driver.hear(a, end), m.EndGeneration) == [(b, end)]
    session = AgentSession("b", "b")
    session.handle(m.Connected("here"), 0.0)
    told = session.handle(m.Answer(end), 0.1)
    assert told == [m.Inform(PeerNotice(1, over=True, cause=end.cause))]


def test_agents_that_are_lost_together_are_one_notice() -> None:
    """A rack of many is lost: a notice for each, to each of the others, would keep the coordinator busy."""
    driver = Driver(granted=True)
    a, *_ = sessions = [driver.open(name) for name in "abcd"]
    for session, name in zip(sessions, "abcd", strict=True):
        driver.hear(session, m.Ready(report(name)))
    assert record(driver).agents == ("a", "b", "c", "d")
    driver.hear(a, m.Accepted(1, record(driver).digest))
    notices = []
    for _ in range(30):
        notices += sent(driver.wait(0.5), m.Notice)
        driver.hear(a, m.Heartbeat(1))
    assert notices == [(a, m.Notice("lost", "", ("b", "c", "d")))]


def test_an_agent_that_ends_after_the_job_has_finished_ends_no_generation() -> None:
    driver, a, _ = found()
    driver.hear(a, m.Finished(1))
    assert sent(driver.hear(a, m.Goodbye()), m.EndGeneration) == []


# LOST
def test_an_exit_in_a_generation_after_the_one_in_which_the_job_finished_ends_that() -> None:
    """Ranks of the newer one may wait for connections to those of the agent that exits."""
    driver, a, b = found()
    first = record(driver).ref
    for agent, session in (("a", a), ("b", b)):
        driver.hear(session, m.Ready(report(agent, first)))
    assert record(driver).generation == 2
    driver.hear(a, m.Finished(1))
    assert sent(driver.hear(b, m.Goodbye()), m.EndGeneration)[0][0] == a


# LOST
def test_the_newest_generation_in_which_an_agent_has_finished_is_the_one_that_counts() -> None:
    driver, a, b = found()
    first = record(driver).ref
    for agent, session in (("a", a), ("b", b)):
        driver.hear(session, m.Ready(report(agent, first)))
    driver.hear(a, m.Finished(2))
    driver.hear(b, m.Finished(1))
    assert sent(driver.hear(b, m.Goodbye()), m.EndGeneration) == []


def test_an_agent_with_another_layout_is_refused_at_once_and_ends_nothing() -> None:
    driver, a, b = found()
    c = driver.open("c")
    out = driver.hear(c, m.Ready(replace(report("c"), layout=ParallelLayout(min_replicas=2))))
    ((session, refusal),) = sent(out, m.Refused)
    assert session == c
    assert refusal.reason.startswith("its layout is ")
    assert [session for session, _ in sent(out, m.Notice)] == [a, b]
    assert {(notice.topic, notice.agents) for _, notice in sent(out, m.Notice)} == {("refused", ("c",))}
    assert sent(out, m.JoinNotice) == []
    assert c not in driver.state.sessions.begun


def test_agents_are_told_once_why_no_record_follows() -> None:
    driver = Driver(granted=True)
    a = driver.open("a")
    driver.hear(a, m.Ready(undecided(driver, 2)))
    assert sent(driver.wait(2.5), m.Notice) == []
    assert sent(driver.wait(5.0), m.Notice) == [(a, m.Notice("undecided", "1 of at least 2 agents are here"))]
    b = driver.open("b")
    out = driver.hear(b, m.Ready(report("b")))
    assert len(sent(out, m.Push)) == 2
    assert sent(driver.wait(5.0), m.Notice) == []


# NOTICE
def test_an_agent_is_told_again_in_its_next_session_but_only_while_the_reason_holds() -> None:
    driver, a, b = found()
    asked = m.Ready(replace(report("a", record(driver).ref), members=(), exited=("a/0",)))
    driver.hear(b, m.Goodbye())
    driver.hear(a, asked)
    ((session, told),) = sent(driver.wait_with(a, 8.0), m.Notice)
    assert session == a
    assert told.reason.startswith("the layout (all sizes 1) needs 1 rank; 0 are present")
    again = driver.open("a")
    assert sent(driver.wait_with(again, 8.0), m.Notice) == []  # it is its own report that is waited for
    driver.hear(again, asked)
    assert sent(driver.wait_with(again, 2.5), m.Notice) == []
    assert sent(driver.wait_with(again, 8.0), m.Notice) == [(again, told)]


# NOTICE
def test_agents_are_told_for_whom_they_wait_once_the_generation_is_over() -> None:
    driver, a, b = found()
    ready = m.Ready(report("a", record(driver).ref))
    driver.hear(a, ready)
    driver.hear(b, m.Heartbeat(1))
    assert sent(driver.wait_with(a, 5.0), m.Notice) == []  # b is in its step
    driver.hear(b, m.Heartbeat(2))
    driver.hear(a, m.EndGeneration(1))
    assert sent(driver.wait_with(a, 3.0), m.Notice) == []
    told = m.Notice("waiting", "waiting for agent b (at 127.0.0.1)")
    assert sent(driver.wait_with(a, 2.0), m.Notice) == [(a, told), (b, told)]
    again = driver.open("a")
    driver.hear(again, ready)
    driver.hear(b, m.Heartbeat(3))
    assert sent(driver.wait_with(again, 5.0), m.Notice) == [(again, told)]


# NOTICE
def test_of_many_agents_that_are_waited_for_the_first_few_are_named() -> None:
    driver = Driver(granted=True)
    names = [f"agent{number}" for number in range(9)]
    sessions = [driver.open(name) for name in names]
    for session, name in zip(sessions, names, strict=True):
        driver.hear(session, m.Ready(report(name)))
    for session in sessions:
        driver.hear(session, m.Accepted(1, record(driver).digest))
    driver.hear(sessions[0], m.Ready(report(names[0], record(driver).ref)))
    driver.hear(sessions[0], m.EndGeneration(1))
    (_, told), *_ = sent(driver.wait(4.0), m.Notice)
    assert told.reason.startswith("waiting for agent agent1 (at 127.0.0.1), agent2 (at")
    assert told.reason.endswith(" and 4 more")


# NOTICE
def test_agents_are_told_that_the_disk_of_the_state_directory_is_late() -> None:
    driver = Driver(granted=True, has_directory=True)
    a = driver.open("a")
    (persist,) = [each for each in driver.hear(a, m.Ready(report("a"))) if isinstance(each, m.Persist)]
    assert sent(driver.wait_with(a, 2.5), m.Notice) == []
    told = m.Notice("waiting", "generation 1 is not yet on the disk of the coordinator's state directory")
    assert sent(driver.wait_with(a, 5.0), m.Notice) == [(a, told)]
    assert persist.decision is not None
    assert sent(driver.do(m.Persisted(persist.decision.record.digest)), m.Push) != []
    assert sent(driver.wait_with(a, 5.0), m.Notice) == []


# NOTICE
def test_agents_are_told_why_a_coordinator_is_not_in_office() -> None:
    """Its state directory was lost, for example, and it was started with an empty one."""
    former, *_ = found(has_directory=True)
    driver = Driver(has_directory=True, granted=True)
    decision = former.state.newest.decision
    assert decision is not None
    driver.hear(1, m.Hello("a", "a", 1, decision=decision.ref))
    driver.hear(1, m.KnownDecision(decision))
    assert not driver.state.in_office
    assert sent(driver.wait_with(1, 2.5), m.Notice) == []
    why = "the last record was decided with a state directory, which this coordinator does not have"
    assert driver.state.overdue_office == ""
    assert sent(driver.wait_with(1, 5.0), m.Notice) == [(1, m.Notice("waiting", f"{why} (`elasticgang grant`)"))]
    assert driver.state.overdue_office == why
    driver.do(m.OfficeGranted())
    driver.wait_with(1, 0.5)
    assert driver.state.overdue_office == ""


def test_each_welcome_says_whether_the_coordinator_listens_everywhere() -> None:
    driver = Driver(granted=True, everywhere=True)
    (welcome,) = sent(driver.hear(1, m.Hello("a", "a", 1)), m.Welcome)
    assert welcome[1].everywhere


def test_absent_agents_are_those_without_a_session_that_may_live() -> None:
    driver, a, b = found()
    assert driver.state.absent_agents() == {}
    driver.do(m.SessionClosed(a))
    assert list(driver.state.absent_agents()) == ["a"]
    driver.do(m.SessionClosed(b))
    driver.do(m.AgentExited("a"))
    assert list(driver.state.absent_agents()) == ["b"]
