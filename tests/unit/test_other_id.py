"""A process that takes another id speaks for the former one (PROMISE, OFFICE)."""

from __future__ import annotations

from elasticgang.protocol import coordinator_messages as m
from elasticgang.protocol.agent_session import AgentSession
from tests.unit.coordinator_driver import Driver, found


def hello_of(session: AgentSession) -> m.Hello:
    (sent,) = session.handle(m.Connected("here"), 0.0)
    assert isinstance(sent, m.SendToCoordinator)
    assert isinstance(sent.message, m.Hello)
    return sent.message


def test_it_keeps_what_it_has_promised_and_accepted() -> None:
    driver, _, _ = found()
    decision = driver.state.newest.decision
    assert decision is not None
    session = AgentSession("a", "i", promised=m.Term(7, "x"), decision=decision).under("a.2")
    hello = hello_of(session)
    assert (hello.agent, hello.incarnation, hello.former) == ("a.2", "i", "a")
    assert (hello.term, hello.decision, hello.former_decision) == (m.Term(7, "x"), None, decision.ref)
    (answer,) = session.handle(m.Answer(m.RequestDecision(decision.record.digest)), 0.0)
    assert answer == m.SendToCoordinator(m.KnownDecision(decision))
    again = hello_of(session.under("a.3"))
    assert again.former == "a", "no record has a.2, which has accepted none"
    assert again.former_decision == decision.ref


def test_its_promise_counts_for_the_former_id_too() -> None:
    before, _, _ = found()
    decision = before.state.newest.decision
    assert decision is not None
    driver = Driver(number=5, decision=decision)
    driver.open("b", decision=decision.ref)
    assert not driver.state.in_office
    driver.open("a.2", incarnation="a", former="a", former_decision=decision.ref)
    assert driver.state.in_office
    assert driver.state.absences.lost == {"a"}


def test_a_record_that_the_former_id_had_accepted_is_learned() -> None:
    driver, _, _ = found()
    newer = driver.state.newest.decision
    assert newer is not None
    other = Driver(granted=True)
    other.hear(1, m.Hello("a.2", incarnation="a", session=1, former="a", former_decision=newer.ref))
    assert other.state.newest.decision is None
    other.hear(1, m.KnownDecision(newer))
    assert other.state.newest.decision == newer
    assert not other.state.in_office
    assert other.state.sessions.begun[1].seen is None, "the new id is a joiner"
