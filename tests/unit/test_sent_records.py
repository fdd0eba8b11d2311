"""What a coordinator without a state directory sends of a record that was decided before (STAMP, ACCEPT)."""

from __future__ import annotations

from dataclasses import replace

from elasticgang.protocol import coordinator_messages as m
from elasticgang.protocol.agent_session import AgentSession
from tests.unit.coordinator_driver import Driver, found, record, report


# STAMP
def test_a_record_is_sent_with_the_present_term() -> None:
    before, _, _ = found()
    decision = before.state.decision
    assert decision is not None
    driver = Driver(number=5, decision=decision)
    a = driver.open("a", decision=decision.ref)
    driver.hear(2, m.Hello("b", incarnation="b", session=2))  # it never got the record
    out = driver.hear(2, m.Promise(driver.state.term))
    pushes = {i.session: i.message.decision for i in out if isinstance(i, m.Send) and isinstance(i.message, m.Push)}
    assert pushes == {2: replace(decision, term=driver.state.term)}
    assert a not in pushes, "it has promised this term, and had the record before"
    assert driver.state.decision == pushes[2]


def test_a_durable_record_keeps_its_term() -> None:
    """A later term would be news to the coordinator that decided it, which would leave its office."""
    before, _, _ = found(has_directory=True)
    decision = before.state.decision
    driver = Driver(number=5, decision=decision, has_directory=True, granted=True)
    driver.hear(1, m.Hello("a", incarnation="a", session=1))
    assert driver.state.decision is decision


def test_an_agent_that_gets_its_record_again_has_it_of_the_later_term() -> None:
    """It is delivered once."""
    driver, _, _ = found()
    decision = driver.state.decision
    assert decision is not None
    session = AgentSession("a", "a", decision=decision, promised=decision.term)
    session.handle(m.Connected("host:1"), 10.0)
    later = replace(decision, term=m.Term(7, "d"))
    session.handle(m.Answer(m.Welcome(later.term, True, 0, 0, False)), 10.0)
    assert session.handle(m.Answer(m.Push(later)), 10.1) == []
    assert session.decision == later
    assert session.handle(m.Answer(m.Push(decision)), 10.2) == []
    assert session.decision == later


# ACCEPT
def test_a_joiner_that_is_not_sent_a_record_need_not_report_again() -> None:
    """Another record may follow in place of the one that waits to be accepted."""
    driver, a, b = found()
    first = driver.state.decision
    assert first is not None
    for session in (a, b):
        driver.hear(session, m.Accepted(*record(driver).ref))
    joiner = driver.open("c")
    driver.hear(joiner, m.Ready(report("c")))
    for agent, session in (("a", a), ("b", b)):
        driver.hear(session, m.Ready(report(agent, first.record.ref)))
    unaccepted = driver.state.decision
    assert unaccepted is not None
    assert unaccepted.record.agents == ("a", "b", "c")
    for session in (a, b):
        driver.do(m.SessionClosed(session))
    other = Driver(number=9, decision=first)
    for agent in ("a", "b"):
        number = other.open(agent, decision=first.ref)
        other.hear(number, m.Ready(report(agent, first.record.ref)))
    second = other.state.decision
    assert second is not None
    assert second.record.agents == ("a", "b")
    for agent in ("a", "b"):
        number = driver.num_sessions = driver.num_sessions + 1
        hello = m.Hello(agent, incarnation=agent, session=number, term=second.term, decision=second.ref)
        driver.hear(number, hello)
        driver.hear(number, m.KnownDecision(second))
        out = driver.hear(number, m.Promise(driver.state.term))
    out += driver.hear(joiner, m.Promise(driver.state.term))
    assert record(driver) == second.record
    assert sorted(driver.state.reports()) == ["c"]
    assert any(isinstance(i, m.Send) and isinstance(i.message, m.JoinNotice) for i in out)
