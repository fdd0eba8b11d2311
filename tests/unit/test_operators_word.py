"""What the operator's word stands for (WORD, OFFICE, ACCEPT)."""

from __future__ import annotations

from typing import Any

from elasticgang.protocol import coordinator_messages as m
from tests.unit.coordinator_driver import Driver, found, record, report


def restarted() -> tuple[Driver, m.DecisionRef]:
    """A coordinator without a directory, after the one that has founded the job with a and b."""
    before, _, _ = found()
    assert before.state.newest.decision is not None
    driver = Driver(number=5, decision=before.state.newest.decision)
    return driver, before.state.newest.decision.ref


def test_the_operators_word_is_about_absent_agents_alone() -> None:
    driver, ref = restarted()
    driver.hear(1, m.Hello("a", incarnation="a", session=1, decision=ref))
    assert "agent a, b" not in driver.state.word_awaited
    assert "agent b of the last record has not come back" in driver.state.word_awaited
    driver.do(m.OfficeGranted())
    assert not driver.state.in_office
    driver.do(m.SessionClosed(1))  # to another coordinator, perhaps
    driver.wait(60)
    assert (driver.state.in_office, driver.state.absences.lost) == (False, set())
    out = driver.hear(2, m.Hello("a", incarnation="a", session=2, decision=ref))
    out += driver.hear(2, m.Promise(driver.state.office.term))
    assert [i.message.in_office for i in out if isinstance(i, m.Send) and isinstance(i.message, m.Welcome)][-1]
    driver.hear(2, m.Ready(report("a", record(driver).ref)))
    driver.wait_with(2, driver.state.timeouts.lost_after_s + 1)
    assert (record(driver).generation, record(driver).agents) == (2, ("a",))


def test_an_agent_that_comes_back_after_the_operators_word_must_promise() -> None:
    driver, ref = restarted()
    a = driver.open("a", decision=ref)
    driver.do(m.OfficeGranted())
    assert driver.state.in_office
    driver.hear(7, m.Hello("b", incarnation="b", session=7, decision=ref))
    assert not driver.state.in_office
    assert driver.hear(a, m.Heartbeat(1)) == [m.Send(a, m.HeartbeatAnswer(1, False))]
    driver.hear(7, m.Promise(driver.state.office.term))
    assert driver.state.in_office
    assert driver.hear(a, m.Heartbeat(2)) == [m.Send(a, m.HeartbeatAnswer(2, True))]


def test_a_higher_term_does_not_bring_back_those_that_have_exited() -> None:
    """The others promise the next term: that is enough."""
    driver, ref = restarted()
    a = driver.open("a", decision=ref)
    driver.do(m.OfficeGranted())
    driver.hear(a, m.Promise(m.Term(driver.state.office.number + 3, "other")))
    assert not driver.state.in_office
    driver.hear(a, m.Promise(driver.state.office.term))
    assert driver.state.in_office


def test_a_higher_term_takes_back_that_no_directory_is_needed() -> None:
    """Somebody has it, perhaps."""
    before, _, _ = found(has_directory=True)
    assert before.state.newest.decision is not None
    driver = Driver(number=5, decision=before.state.newest.decision)
    a = driver.open("a", decision=before.state.newest.decision.ref)
    driver.do(m.OfficeGranted())
    assert driver.state.in_office
    driver.hear(a, m.Promise(m.Term(driver.state.office.number + 3, "other")))
    driver.hear(a, m.Promise(driver.state.office.term))
    assert not driver.state.in_office
    assert "state directory" in driver.state.word_awaited


def test_a_parent_that_has_a_session_is_waited_for_whatever_the_operator_says() -> None:
    """ACCEPT: it may not have accepted the record, and accept that of another coordinator."""
    driver, a, b = found()
    for session in (a, b):
        driver.hear(session, m.Accepted(*record(driver).ref))
    joiner = driver.open("c")
    driver.hear(joiner, m.Ready(report("c")))
    driver.hear(a, m.Ready(report("a", record(driver).ref)))
    out = driver.hear(b, m.Ready(report("b", record(driver).ref)))
    assert record(driver).agents == ("a", "b", "c")
    assert not pushed(out, joiner)
    driver.do(m.SessionClosed(b))
    assert not pushed(driver.do(m.OfficeGranted()), joiner)
    driver.do(m.SessionClosed(a))
    assert not pushed(driver.do(m.OfficeGranted()), joiner)
    assert record(driver).agents == ("a", "b"), "nobody has the other one, nor will (BACK)"


def pushed(out: list[Any], session: int) -> bool:
    return any(isinstance(i, m.Send) and i.session == session and isinstance(i.message, m.Push) for i in out)


# OFFICE
def test_a_directory_gives_no_office_over_a_record_that_agents_have_brought() -> None:
    """Another coordinator may have been promised a term since, or have the directory in which it was written first."""
    without, _, _ = found()
    with_one, _, _ = found(has_directory=True)
    assert Driver(has_directory=True).state.in_office
    assert with_one.state.newest.own
    assert with_one.state.newest.decision is not None
    assert Driver(has_directory=True, decision=with_one.state.newest.decision, own=True).state.in_office
    other = Driver(granted=True, has_directory=True)
    hello = m.Hello("a", incarnation="a", session=1, decision=with_one.state.newest.decision.ref)
    other.hear(1, hello)
    other.hear(1, m.KnownDecision(with_one.state.newest.decision))
    assert (other.state.in_office, other.state.newest.own) == (False, False)
    driver = Driver(number=5, has_directory=True, decision=without.state.newest.decision)
    assert not driver.state.in_office
    assert without.state.newest.decision is not None
    for agent in ("a", "b"):
        driver.open(agent, decision=without.state.newest.decision.ref)
    assert driver.state.in_office
