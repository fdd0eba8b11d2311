"""Records that a coordinator without a state directory has decided, and that nobody has accepted (BACK, ACCEPT)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticgang.protocol import coordinator_messages as m
from tests.unit.coordinator_driver import Driver, found, record, report


def decided_for_c() -> tuple[Driver, m.Decision, m.Decision, int, int, int]:
    """A coordinator with generation 1 of a and b and, of a later term, generation 2, which c joins and nobody has
    accepted."""
    driver, a, b = found()
    first = driver.state.newest.decision
    for session in (a, b):
        driver.hear(session, m.Accepted(*record(driver).ref))
    driver.hear(a, m.Promise(m.Term(3, "other")))
    for session in (a, b):
        driver.hear(session, m.Promise(driver.state.office.term))
    joiner = driver.open("c")
    driver.hear(joiner, m.Ready(report("c")))
    for agent, session in (("a", a), ("b", b)):
        driver.hear(session, m.Ready(report(agent, record(driver).ref)))
    second = driver.state.newest.decision
    assert first is not None
    assert second is not None
    assert (first.record.agents, second.record.agents) == (("a", "b"), ("a", "b", "c"))
    assert (first.term.number, second.term.number) == (1, 4)
    return driver, first, second, a, b, joiner


# BACK
def test_a_record_that_nobody_has_accepted_ends_with_the_office() -> None:
    driver, first, _, a, b, _ = decided_for_c()
    driver.do(m.SessionClosed(b))
    driver.hear(a, m.Promise(m.Term(7, "other")))
    assert (driver.state.in_office, driver.state.newest.decision) == (False, first)
    driver.hear(a, m.Promise(driver.state.office.term))
    assert not driver.state.in_office, "b may be led by the other one"
    assert "agent b of the last record has not come back" in driver.state.word_awaited


@pytest.mark.parametrize("says_hello", [True, False])
def test_whoever_has_accepted_a_record_brings_it_back(says_hello: bool) -> None:
    driver, _, second, a, b, joiner = decided_for_c()
    if says_hello:
        for session in (a, b):
            driver.do(m.SessionClosed(session))
        hello = m.Hello("a", incarnation="a", session=9, term=m.Term(7, "other"), decision=second.ref)
        driver.hear(9, hello)
        out = driver.hear(9, m.KnownDecision(second))
    else:
        driver.hear(b, m.Promise(m.Term(7, "other")))
        assert driver.state.newest.decision != second
        out = driver.hear(a, m.Accepted(*second.record.ref))
    assert (driver.state.in_office, driver.state.newest.decision) == (False, second)
    assert not pushed(out, joiner), "out of office"


def test_nobody_is_sent_a_record_out_of_office() -> None:
    """An agent may bring it back in the `Hello` by which it is accepted."""
    driver, first, second, a, b, _ = decided_for_c()
    for session in (a, b):
        driver.do(m.SessionClosed(session))
    out = driver.hear(8, m.Hello("b", incarnation="b", session=8, term=m.Term(7, "other"), decision=first.ref))
    out += driver.hear(9, m.Hello("a", incarnation="a", session=9, term=m.Term(7, "other"), decision=second.ref))
    out += driver.hear(9, m.KnownDecision(second))
    assert not any(isinstance(i, m.Send) and isinstance(i.message, m.Push) for i in out)


def test_news_are_those_of_a_later_term_whatever_came_before() -> None:
    """SESSION-ORDER, BACK. The record that nobody has accepted is of a later term than that which b brings."""
    driver, first, second, _, b, _ = decided_for_c()
    other = Driver(number=0, decision=first)
    for agent in ("a", "b"):
        number = other.open(agent, decision=first.ref)
        other.hear(number, m.Ready(report(agent, first.record.ref)))
    assert other.state.newest.decision is not None
    earlier = replace(other.state.newest.decision, term=m.Term(2, "other"))
    assert first.term < earlier.term < second.term
    driver.do(m.SessionClosed(b))
    hello = m.Hello("b", incarnation="b", session=9, term=m.Term(7, "other"), decision=earlier.ref)
    assert m.Send(9, m.RequestDecision(earlier.record.digest)) in driver.hear(9, hello)
    driver.hear(9, m.KnownDecision(earlier))
    assert driver.state.newest.decision == earlier


def test_a_decision_of_a_later_term_is_newer_whatever_its_generation() -> None:
    """SESSION-ORDER."""
    driver, _, second, _, _, _ = decided_for_c()
    later = m.DecisionRef(m.Term(5, "d"), second.record.generation - 1, "x", False)
    hello = m.Hello("d", incarnation="d", session=9, term=m.Term(1, "a"), decision=later)
    assert m.Send(9, m.RequestDecision("x")) in driver.hear(9, hello)


def pushed(out: list[Any], session: int) -> bool:
    return any(isinstance(i, m.Send) and i.session == session and isinstance(i.message, m.Push) for i in out)


# ACCEPT
def test_a_joiner_that_is_not_sent_a_record_need_not_report_again() -> None:
    """Another record may follow in place of the one that waits to be accepted."""
    driver, a, b = found()
    first = driver.state.newest.decision
    assert first is not None
    for session in (a, b):
        driver.hear(session, m.Accepted(*record(driver).ref))
    joiner = driver.open("c")
    driver.hear(joiner, m.Ready(report("c")))
    for agent, session in (("a", a), ("b", b)):
        driver.hear(session, m.Ready(report(agent, first.record.ref)))
    unaccepted = driver.state.newest.decision
    assert unaccepted is not None
    assert unaccepted.record.agents == ("a", "b", "c")
    for session in (a, b):
        driver.do(m.SessionClosed(session))
    other = Driver(number=9, decision=first)
    for agent in ("a", "b"):
        number = other.open(agent, decision=first.ref)
        other.hear(number, m.Ready(report(agent, first.record.ref)))
    second = other.state.newest.decision
    assert second is not None
    assert second.record.agents == ("a", "b")
    for agent in ("a", "b"):
        number = driver.num_sessions = driver.num_sessions + 1
        hello = m.Hello(agent, incarnation=agent, session=number, term=second.term, decision=second.ref)
        driver.hear(number, hello)
        driver.hear(number, m.KnownDecision(second))
        out = driver.hear(number, m.Promise(driver.state.office.term))
    out += driver.hear(joiner, m.Promise(driver.state.office.term))
    assert record(driver) == second.record
    assert sorted(driver.state.reports.counting()) == ["c"]
    assert any(isinstance(i, m.Send) and isinstance(i.message, m.JoinNotice) for i in out)


def decided_without_b() -> tuple[Driver, m.Decision, int]:
    """A coordinator with generation 1 of a and b and, since b has exited, generation 2 of a alone, which a was sent."""
    driver, a, b = found()
    first = driver.state.newest.decision
    assert first is not None
    for session in (a, b):
        driver.hear(session, m.Accepted(*first.record.ref))
    driver.hear(a, m.Ready(report("a", first.record.ref)))
    driver.do(m.AgentExited("b"))
    assert record(driver).agents == ("a",)
    return driver, first, a


def returned(driver: Driver, first: m.Decision, *, tip: Any) -> list[Any]:
    """b is back, from its former session, with the state of generation 1."""
    number = driver.open("b", decision=first.ref)
    members = [replace(member, tip=tip) for member in report("b", first.record.ref).members]
    return driver.hear(number, m.Ready(replace(report("b", first.record.ref), members=tuple(members))))


# BACK
@pytest.mark.parametrize("is_accepted", ["", "Accepted", "Ready"])
def test_no_state_is_lost_with_a_record_that_nobody_has_accepted(is_accepted: str) -> None:
    """Which an agent has that reports from it, too: `Accepted` comes after what ranks wait for."""
    driver, first, a = decided_without_b()
    if is_accepted == "Accepted":
        driver.hear(a, m.Accepted(*record(driver).ref))
    elif is_accepted:
        driver.hear(a, m.Ready(report("a", record(driver).ref)))
    driver.hear(a, m.Goodbye("the job is preempted"))
    out = returned(driver, first, tip=first.record.committed)
    followed = driver.state.newest.decision
    assert followed is not None
    lost = [i.message for i in out if isinstance(i, m.Send) and isinstance(i.message, m.JobUnrecoverable)]
    if is_accepted:
        assert lost
    else:
        assert not lost
        assert (followed.record.parent, followed.record.agents) == (first.record.digest, ("b",))
        assert followed.record.rolled_back, "a may have accepted generation 2, and have committed steps in it"


# BACK, LEFT
def test_one_that_has_exited_may_have_accepted_the_record_and_told_another_coordinator() -> None:
    driver, first, a = decided_without_b()
    driver.do(m.SessionClosed(a))
    driver.do(m.AgentExited("a"))
    out = returned(driver, first, tip=first.record.committed)
    assert not any(isinstance(i, m.Send) and isinstance(i.message, m.JobUnrecoverable) for i in out)
    assert record(driver).generation == 2
    assert "agent a of the record has exited" in driver.state.word_awaited
    driver.do(m.OfficeGranted())
    assert (record(driver).parent, record(driver).agents) == (first.record.digest, ("b",))


# BACK
def test_whoever_was_never_sent_the_record_before_is_sent_it_when_the_coordinator_goes_back() -> None:
    driver, _, a = decided_without_b()
    b = driver.open("b")  # it has not accepted generation 1 either
    driver.hear(b, m.Ready(report("b")))
    out = driver.hear(a, m.Goodbye("the job is preempted"))
    assert pushed(out, b)
