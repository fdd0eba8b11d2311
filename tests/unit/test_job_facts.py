"""What agents know of each other, by way of their coordinator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elasticgang.protocol import agent_events
from elasticgang.protocol import coordinator_messages as m
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.job_facts import (
    MAX_FAILURES,
    MAX_WAITS,
    RECENT_S,
    AgentFacts,
    GatheredFacts,
    JobFacts,
    KnownSuccessors,
    ScriptFailure,
    Wait,
    furthest,
)
from tests.unit.coordinator_driver import Driver, found, record, report

COMING = AgentFacts(has_successors=True)


def failed(*steps: int, member: str = "a0") -> AgentFacts:
    return AgentFacts(failures=tuple(ScriptFailure(member, 0, step) for step in steps))


def waiting(*waits: tuple[int | None, int | None]) -> AgentFacts:
    return AgentFacts(waits=tuple(Wait(1, group, reached) for group, reached in waits))


def sent(out: list[Any]) -> dict[int, JobFacts]:
    """By session."""
    return {i.session: i.message for i in out if isinstance(i, m.Send) and isinstance(i.message, JobFacts)}


def told(out: list[Any]) -> list[m.AgentMessage]:
    return [i.message for i in out if isinstance(i, m.SendToCoordinator)]


# -- what is gathered


# FACTS-JOB
def test_a_job_has_successors_while_one_of_its_agents_has() -> None:
    facts = GatheredFacts()
    facts.replace("a", COMING)
    assert facts.changed() == JobFacts(have_successors=True)
    facts.replace("b", COMING)
    facts.replace("b", COMING)
    facts.replace("a", AgentFacts())
    assert facts.changed() is None
    facts.drop(["b"])
    assert facts.changed() == JobFacts()
    assert facts.by_agent == {}


# FACTS-JOB
def test_of_a_step_the_first_two_failures_are_told() -> None:
    facts = GatheredFacts()
    facts.replace("a", failed(5))
    assert facts.changed() == JobFacts(failures=(ScriptFailure("a0", 0, 5, "a"),))
    facts.replace("b", failed(3, 5))
    first = (ScriptFailure("a0", 0, 3, "b"), ScriptFailure("a0", 0, 5, "a"), ScriptFailure("a0", 0, 5, "b"))
    assert facts.changed() == JobFacts(failures=first)
    facts.replace("c", failed(5))
    facts.replace("b", failed(3, 5))
    assert facts.changed() is None
    facts.drop(["c"])
    assert facts.changed() is None
    facts.replace("c", failed(5))
    facts.replace("d", failed(5))
    facts.drop(["a"])
    assert facts.changed() is None  # whoever knows a failure, knows it
    assert facts.sent.failures == (first[0], first[2])
    facts.replace("e", failed(9))
    gathered = facts.changed()
    assert gathered is not None
    assert [(failure.step, failure.agent) for failure in gathered.failures] == [(3, "b"), (5, "b"), (5, "c"), (9, "e")]
    facts.drop("bcde")
    assert facts.changed() is None
    assert facts.sent == JobFacts()


# FACTS-JOB
def test_the_failures_of_the_last_steps_are_told() -> None:
    facts = GatheredFacts()
    for number in range(4):
        facts.replace(f"a{number}", failed(*range(number * MAX_FAILURES, (number + 1) * MAX_FAILURES)))
    gathered = facts.changed()
    assert gathered is not None
    assert [failure.step for failure in gathered.failures] == list(range(2 * MAX_FAILURES, 4 * MAX_FAILURES))


# FACTS-JOB
def test_of_members_that_wait_the_furthest_in_each_group_are_told() -> None:
    facts = GatheredFacts()
    facts.replace("a", waiting((7, 3), (7, 5), (None, None)))
    facts.replace("b", waiting((7, 4), (8, None)))
    gathered = facts.changed(on_tick=True)
    assert gathered == JobFacts(waits=(Wait(1, 7, 5, "a"), Wait(1, None, None, "a"), Wait(1, 8, None, "b")))
    facts.replace("c", waiting((7, 5), (8, None), (8, 2)))
    gathered = facts.changed(on_tick=True)
    assert gathered is not None
    assert gathered.waits == (Wait(1, 7, 5), Wait(1, None, None, "a"), Wait(1, 8, None), Wait(1, 8, 2, "c"))
    facts.replace("d", waiting((7, 5)))
    facts.drop("a")
    gathered = facts.changed(on_tick=True)
    assert gathered is not None
    assert gathered.waits == (Wait(1, 7, 5), Wait(1, 8, None), Wait(1, 8, 2, "c"))
    facts.drop("bcd")
    assert facts.changed(on_tick=True) == JobFacts()


def test_waits_have_a_bound() -> None:
    facts = GatheredFacts()
    facts.replace("a", waiting(*((group, 1) for group in range(1, 2 * MAX_WAITS))))
    facts.replace("b", waiting((2 * MAX_WAITS, 1)))
    gathered = facts.changed(on_tick=True)
    assert gathered is not None
    assert len(gathered.waits) == MAX_WAITS
    assert furthest([Wait(1, 7), Wait(1, 7, 3), Wait(1, 7, 2), Wait(2, 7, 1)]) == (
        Wait(1, 7),
        Wait(1, 7, 3),
        Wait(2, 7, 1),
    )


# FACTS-JOB
def test_how_often_facts_are_sent_does_not_grow_with_the_number_of_agents() -> None:
    def all_tell(num_agents: int) -> list[JobFacts]:
        facts, messages = GatheredFacts(), []
        agents = [f"a{number}" for number in range(num_agents)]
        for said in (AgentFacts(True, (Wait(1, 7, 3),), (ScriptFailure("a0", 0, 5),)), AgentFacts()):
            for agent in agents:
                facts.replace(agent, said)
                messages.append(facts.changed())
            messages.append(facts.changed(on_tick=True))
        return [message for message in messages if message is not None]

    few, many = all_tell(5), all_tell(50)
    assert len(few) == len(many) == 5
    assert max(len(repr(message)) for message in many) < 1.1 * max(len(repr(message)) for message in few)


# FACTS-TICK
def test_waits_are_told_on_a_tick_alone() -> None:
    facts = GatheredFacts()
    facts.replace("a", waiting((7, 3)))
    assert facts.changed() is None
    facts.replace("b", COMING)
    assert facts.changed() == JobFacts(have_successors=True)
    assert facts.changed(on_tick=True) == JobFacts(have_successors=True, waits=(Wait(1, 7, 3, "a"),))
    facts.replace("a", AgentFacts())
    facts.replace("a", waiting((7, 3)))
    assert facts.changed(on_tick=True) is None


# FACTS-RECENT
def test_an_agent_that_loses_its_session_counts_the_successors_that_it_knew_for_a_time() -> None:
    known = KnownSuccessors()
    assert not known.any(0.0)
    known.hear(True)
    known.hear(False)
    known.lose_session(1.0)
    assert not known.any(1.0)
    known.hear(True)
    assert known.any(1e9)
    known.lose_session(2.0)
    known.hear(False)  # a coordinator that was started again has yet to hear of them
    known.lose_session(9.0)
    assert known.any(2.0 + RECENT_S - 0.1)
    assert not known.any(2.0 + RECENT_S)


# -- the coordinator


# FACTS-JOB
def test_all_sessions_are_sent_the_facts_of_a_job_and_a_new_one_first() -> None:
    driver, a, b = found()
    out = driver.hear(b, COMING)
    assert sent(out) == dict.fromkeys((a, b), JobFacts(have_successors=True))
    assert sent(driver.hear(a, COMING)) == {}
    c = driver.num_sessions + 1
    out = driver.hear(c, m.Hello("c", "c", 1))
    assert [type(i.message) for i in out] == [m.Welcome, JobFacts]
    assert sent(out) == {c: JobFacts(have_successors=True)}
    assert sent(driver.hear(a, waiting((7, 3)))) == {}
    assert sent(driver.wait(0.5)) == dict.fromkeys((a, b, c), JobFacts(True, (Wait(1, 7, 3, "a"),)))


# FACTS-WHOLE
def test_the_facts_of_a_member_outlive_its_session_until_it_is_lost() -> None:
    driver, a, b = found()
    driver.hear(b, COMING)
    assert sent(driver.do(m.SessionClosed(b))) == {}
    assert sent(driver.wait_with(a, driver.state.timeouts.lost_after_s - 1)) == {}
    assert sent(driver.wait_with(a, 2)) == {a: JobFacts()}
    assert driver.state.absences.lost == {"b"}


# FACTS-WHOLE
def test_the_facts_of_an_agent_that_has_left_or_is_refused_end_with_its_session() -> None:
    driver, a, b = found()
    c, d = driver.open("c"), driver.open("d")
    other = replace(report("c"), job="another")
    for session, end in ((c, m.Ready(other)), (d, m.Goodbye()), (b, m.Goodbye())):
        assert a in sent(driver.hear(session, COMING))
        assert sent(driver.hear(session, end))[a] == JobFacts()


# FACTS-ABSENT
def test_the_successors_of_an_agent_that_takes_no_part_yet_count_while_it_may_come_back() -> None:
    driver, a, _ = found()
    c = driver.open("c")
    assert a in sent(driver.hear(c, COMING))
    assert sent(driver.do(m.SessionClosed(c))) == {}
    c = driver.num_sessions + 1
    assert sent(driver.hear(c, m.Hello("c", "c", c))) == {c: JobFacts(have_successors=True)}
    newer = c + 1
    assert sent(driver.hear(newer, m.Hello("c", "c", newer))) == {newer: JobFacts(have_successors=True)}
    driver.do(m.SessionClosed(newer))
    lost_after_s = driver.state.timeouts.lost_after_s
    assert sent(driver.wait_with(a, lost_after_s)) == {}
    assert sent(driver.wait_with(a, 1))[a] == JobFacts()


# FACTS-ABSENT
def test_the_successors_of_an_agent_whose_record_is_dropped_do_not_count_for_ever() -> None:
    """Without its session it was in a record that nobody has accepted."""
    driver = Driver(granted=True)
    a = driver.open("a")
    driver.hear(a, m.Ready(report("a")))
    ref = record(driver).ref
    driver.hear(a, m.Accepted(ref.generation, ref.digest))
    b = driver.open("b")
    driver.hear(b, COMING)
    driver.hear(b, m.Ready(report("b")))
    driver.hear(a, m.Ready(report("a", ref)))
    assert record(driver).agents == ("a", "b")
    driver.do(m.SessionClosed(b))
    driver.hear(a, m.Promise(m.Term(driver.state.office.number + 1, "other")))
    driver.hear(a, m.Promise(driver.state.office.term))
    assert record(driver).agents == ("a",)
    assert sent(driver.wait_with(a, driver.state.timeouts.lost_after_s + 1)) == {a: JobFacts()}


# FACTS-ABSENT
def test_what_else_is_known_of_an_agent_that_takes_no_part_ends_with_its_session() -> None:
    driver, a, b = found()
    c = driver.open("c")
    driver.hear(c, replace(waiting((7, 3)), has_successors=True, failures=failed(5).failures))
    driver.wait(0.5)
    driver.do(m.SessionClosed(c))
    assert sent(driver.wait(0.5)) == dict.fromkeys((a, b), JobFacts(have_successors=True))


# FACTS-WHOLE
def test_the_facts_of_an_agent_that_is_in_the_record_no_more_end_with_it() -> None:
    """It had no session when another coordinator decided without it."""
    driver, _, b = found()
    driver.hear(b, COMING)
    driver.do(m.SessionClosed(b))
    other, other_a, _ = found()
    other.wait_with(other_a, other.state.timeouts.lost_after_s + 1)
    other.hear(other_a, m.Ready(report("a", record(other).ref)))
    decision = other.state.newest.decision
    assert decision is not None
    assert decision.record.agents == ("a",)
    decision = replace(decision, term=m.Term(9, "other"))
    c = driver.num_sessions + 1
    driver.hear(c, m.Hello("a", "a", 7, decision=decision.ref))
    assert sent(driver.hear(c, m.KnownDecision(decision))) == {}
    assert driver.state.record == decision.record


def test_a_difference_of_states_is_told_once_and_by_a_member() -> None:
    driver, a, b = found()
    stranger = driver.open("c")
    difference = m.JobFailed(4, 1, "they differ")
    assert driver.hear(stranger, difference) == []
    assert driver.hear(b, difference) == [m.Send(a, difference), m.Send(stranger, difference)]
    assert driver.hear(a, difference) == []
    assert driver.hear(a, replace(difference, step=5)) != []


def test_a_difference_of_states_reaches_an_agent_of_that_generation_that_had_no_session() -> None:
    driver, a, b = found()
    known = driver.state.newest.decision
    assert known is not None
    difference = m.JobFailed(4, 1, "they differ")
    driver.do(m.SessionClosed(b))
    driver.hear(a, difference)
    newcomer, back = driver.num_sessions + 1, driver.num_sessions + 2
    assert m.Send(newcomer, difference) not in driver.hear(newcomer, m.Hello("c", "c", newcomer))
    assert m.Send(back, difference) in driver.hear(back, m.Hello("b", "b", back, decision=known.ref))


# -- the agent


def connect(session: AgentSession) -> list[Any]:
    session.handle(m.Connected("x:1"), 0.0)
    return session.handle(m.Answer(m.Welcome(m.Term(1, "c"), True)), 0.0)


# FACTS-WHOLE, RESEND
def test_an_agent_sends_its_facts_in_each_session() -> None:
    session = AgentSession("a", "a")
    assert told(session.handle(m.Notify(COMING), 0.0)) == []
    assert COMING in told(connect(session))
    assert told(session.handle(m.Answer(m.Welcome(m.Term(1, "c"), True)), 0.0)) == [m.Promise(m.Term(1, "c"))]
    assert told(session.handle(m.Notify(AgentFacts()), 0.0)) == [AgentFacts()]
    session.handle(m.Disconnected(), 0.0)
    assert AgentFacts() in told(connect(session))  # the coordinator may know former ones


# FACTS-ALONE
def test_an_agent_that_takes_part_alone_tells_no_facts() -> None:
    driver, _, b = found()
    both = driver.state.newest.decision
    assert both is not None
    driver.hear(b, m.Goodbye())
    driver.hear(1, m.Ready(report("a", record(driver).ref)))
    alone = driver.state.newest.decision
    assert alone is not None
    session = AgentSession("a", "a")
    session.handle(m.Notify(COMING), 0.0)
    connect(session)
    both, alone = (replace(each, term=m.Term(1, "c")) for each in (both, alone))
    assert AgentFacts() not in told(session.handle(m.Answer(m.Push(both)), 0.0))
    assert AgentFacts() in told(session.handle(m.Answer(m.Push(alone)), 0.0))
    assert told(session.handle(m.Notify(failed(5)), 0.0)) == []
    stopping = replace(failed(5), is_stopping=True)  # its coordinator ends after it (SERVE-LEAVE)
    assert told(session.handle(m.Notify(stopping), 0.0)) == [AgentFacts(is_stopping=True)]


# SERVE-LEAVE
def test_a_coordinator_knows_which_agents_with_a_session_are_stopping() -> None:
    driver = Driver(granted=True)
    a, b = driver.open("a"), driver.open("b")
    driver.hear(a, AgentFacts(is_stopping=True))
    assert driver.state.stopping_agents == ["a"]
    driver.hear(b, AgentFacts(is_stopping=True))
    driver.hear(a, AgentFacts())
    assert driver.state.stopping_agents == ["b"]
    driver.hear(b, m.Goodbye())
    assert driver.state.stopping_agents == []


# FACTS-WHOLE
def test_what_a_record_changes_is_told_after_what_was_so_before() -> None:
    """An agent that took part alone has successors, which get their seats in the record in which another one joins."""
    driver = Driver(granted=True)
    a = driver.open("a")
    driver.hear(a, m.Ready(report("a")))
    alone, (both, _, _) = driver.state.newest.decision, found()
    assert alone is not None
    assert both.state.newest.decision is not None
    later = replace(both.state.newest.decision, record=replace(record(both), generation=2, parent=alone.record.digest))
    alone, later = (replace(each, term=m.Term(1, "c")) for each in (alone, later))
    session = AgentSession("a", "a")
    sent: list[m.AgentMessage] = []

    def handle(event: m.SessionEvent) -> None:
        for instruction in session.handle(event, 0.0):
            sent.extend(told([instruction]))
            if isinstance(instruction, m.Inform) and instruction.event == agent_events.RecordAnswered(later.record):
                handle(m.Notify(AgentFacts()))

    handle(m.Connected("x:1"))
    handle(m.Answer(m.Welcome(m.Term(1, "c"), True)))
    handle(m.Answer(m.Push(alone)))
    handle(m.Notify(COMING))
    handle(m.Answer(m.Push(later)))
    assert [message for message in sent if isinstance(message, AgentFacts)] == [COMING, AgentFacts()]


def test_a_first_session_without_facts_tells_none() -> None:
    assert told(connect(AgentSession("a", "a"))) == [m.Promise(m.Term(1, "c"))]


def test_what_a_coordinator_tells_of_others_is_brought_to_the_agent() -> None:
    session = AgentSession("a", "a")
    connect(session)
    facts = JobFacts(have_successors=True)
    assert session.handle(m.Answer(facts), 0.0) == [m.Inform(facts)]
    differ = agent_events.PeerFailedJob("they differ")
    assert session.handle(m.Answer(m.JobFailed(4, 1, "they differ")), 0.0) == [m.Inform(differ)]


def test_facts_reach_sessions_that_wait_for_a_record() -> None:
    driver = Driver(granted=True)
    a = driver.open("a")
    assert sent(driver.hear(a, failed(5))) == {a: JobFacts(failures=(ScriptFailure("a0", 0, 5, "a"),))}
