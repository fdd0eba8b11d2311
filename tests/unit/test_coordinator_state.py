"""The coordinator's and the agent's state machines, rule by rule. The simulation plays them against each other."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from elasticgang.protocol import coordinator_messages as m
from elasticgang.protocol.absences import Absences
from elasticgang.protocol.agent_events import RecordAnswered
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.record import (
    CheckpointRef,
    Record,
    RecordRef,
    Report,
    Undecided,
    Unrecoverable,
)
from tests.unit.coordinator_driver import Driver, found, record, report


def test_a_record_is_pushed_only_after_it_was_written() -> None:
    driver = Driver(granted=True, has_directory=True)
    a = driver.open("a")
    (persist,) = driver.hear(a, m.Ready(report("a")))
    assert isinstance(persist, m.Persist)
    assert persist.decision is not None
    assert driver.hear(a, m.EndGeneration(1)) == []  # waits its turn
    assert driver.hear(a, m.Heartbeat(1)) == [m.Send(a, m.HeartbeatAnswer(1, True))]  # but a heartbeat does not
    assert driver.do(m.Persisted("another")) == []
    push, *_ = driver.do(m.Persisted(persist.decision.record.digest))
    assert push == m.Send(a, m.Push(persist.decision))
    assert driver.state.newest.over == 1


def test_who_is_not_in_office_decides_nothing_and_renews_no_lease() -> None:
    driver = Driver()
    a = driver.open("a")
    assert driver.hear(a, m.Ready(report("a"))) == []
    assert driver.hear(a, m.Heartbeat(1)) == [m.Send(a, m.HeartbeatAnswer(1, False))]
    assert any(isinstance(i.message, m.Push) for i in driver.do(m.OfficeGranted()) if isinstance(i, m.Send))


def test_a_higher_term_ends_an_office_without_a_directory() -> None:
    for has_directory in (False, True):
        driver, _, _ = found(has_directory=has_directory)
        driver.open("x", term=m.Term(7, "other"))
        assert driver.state.office.term == m.Term(8, "c")
        assert driver.state.in_office is has_directory


def test_a_newer_decision_is_requested_and_ends_the_office() -> None:
    other, _, _ = found()
    decision = other.state.newest.decision
    assert decision is not None
    driver = Driver(granted=True)
    (request,) = driver.hear(1, m.Hello("a", "a", 1, decision=decision.ref))
    assert request == m.Send(1, m.RequestDecision(decision.record.digest))
    assert driver.hear(1, m.KnownDecision(replace(decision, durable=True))) != []
    assert driver.state.record is None  # not what it asked for
    driver.hear(2, m.Hello("a", "a", 2, decision=decision.ref))
    driver.hear(2, m.KnownDecision(decision))
    assert driver.state.record is decision.record
    assert not driver.state.in_office
    for session, agent in ((2, "a"), (3, "b")):
        if agent == "b":
            driver.hear(3, m.Hello("b", "b", 1, decision=decision.ref))
        driver.hear(session, m.Promise(driver.state.office.term))
    assert driver.state.in_office  # every agent of the record has promised


# NEWEST
def test_a_newer_session_closes_the_one_that_has_not_sent_its_decision() -> None:
    other, _, _ = found()
    decision = other.state.newest.decision
    assert decision is not None
    driver, request = Driver(), m.RequestDecision(decision.record.digest)
    assert driver.hear(1, m.Hello("a", "a", 1, decision=decision.ref)) == [m.Send(1, request)]
    assert driver.hear(2, m.Hello("a", "a", 2, decision=decision.ref)) == [
        m.CloseSession(1, "agent a has opened a newer session"),
        m.Send(2, request),
    ]
    late = driver.hear(3, m.Hello("a", "a", 1, decision=decision.ref))
    assert late == [m.CloseSession(3, "agent a has a newer session")]
    assert driver.hear(1, m.KnownDecision(decision)) == []
    driver.hear(2, m.KnownDecision(decision))
    assert list(driver.state.sessions.begun) == [2]
    driver.do(m.SessionClosed(2))
    assert driver.state.is_abandoned


def test_a_silent_agent_is_lost_after_the_time_and_not_before() -> None:
    driver, a, b = found()
    for _ in range(24):
        driver.hear(a, m.Heartbeat(1))
        driver.wait(0.5)
    assert driver.state.absences.lost == set()
    driver.hear(a, m.Heartbeat(1))
    out = driver.wait(1.0)
    assert driver.state.absences.lost == {"b"}
    assert any(isinstance(i, m.CloseSession) and i.session == b for i in out)
    assert m.Send(a, m.EndGeneration(1, EndCause("is lost", ("b",)))) in out


@pytest.mark.parametrize("finished", [False, True])
def test_an_agent_that_leaves_a_finished_job_is_not_announced_as_lost(finished: bool) -> None:
    driver, a, b = found()
    if finished:
        driver.hear(b, m.Finished(1))
    out = driver.hear(b, m.Goodbye("all ranks have ended"))
    assert driver.state.absences.lost == {"b"}
    assert (m.Send(a, m.Notice("left", "", ("b",))) in out) is not finished


def test_a_coordinator_that_stood_still_declares_nobody_lost() -> None:
    driver, _, _ = found()
    driver.now_s += 1000
    driver.do(m.Ticked())
    driver.wait(10)
    assert driver.state.absences.lost == set()
    driver.wait(4)
    assert driver.state.absences.lost == {"a", "b"}


def test_absences_count_from_when_somebody_is_expected() -> None:
    absences = Absences(standstill_s=1.0)
    absences.advance(100.0)
    absences.expect(["a"])
    absences.advance(100.5)
    assert absences.beyond(0.4, ["b", "a"]) == ["a"]
    assert absences.beyond(0.5, ["b", "a"]) == []
    absences.hear("a")
    assert absences.beyond(0.0, ["b", "a"]) == []


@pytest.mark.parametrize(
    ("message", "is_closed"),
    [
        (m.Ready(report("b")), True),
        (m.Ready(report("a", member="b/0")), True),
        (m.Ready(report("a")), False),
    ],
)
def test_an_agent_speaks_for_itself_alone(message: m.AgentMessage, is_closed: bool) -> None:
    driver, a, _ = found()
    out = driver.hear(a, message)
    assert any(isinstance(i, m.CloseSession) for i in out) is is_closed


def test_a_session_has_one_agent() -> None:
    driver, a, b = found()
    assert [type(i) for i in driver.hear(a, m.Hello("b", "b", 9))] == [m.CloseSession]
    assert {number: session.agent for number, session in driver.state.sessions.begun.items()} == {a: "a", b: "b"}
    driver.do(m.SessionClosed(a))
    assert m.Send(b, m.HeartbeatAnswer(1, True)) in driver.hear(b, m.Heartbeat(1))


def test_only_members_end_a_generation_and_only_the_present_one() -> None:
    driver, a, b = found()
    x = driver.open("x")
    assert driver.hear(x, m.EndGeneration(1)) == []
    assert driver.hear(a, m.EndGeneration(2)) == []
    assert driver.hear(a, m.EndGeneration(1 << 40)) == []
    assert driver.hear(a, m.EndGeneration(1, EndCause("why"))) == [
        m.Send(b, m.EndGeneration(1, EndCause("why"))),
        m.Send(x, m.EndGeneration(1, EndCause("why"))),
    ]


# LATE-1
def test_a_collective_that_has_timed_out_is_told_once_after_the_end_of_the_generation() -> None:
    driver, a, b = found()
    driver.hear(a, m.EndGeneration(1, EndCause("lost a peer", ("a",), (0,), is_effect=True)))
    late = m.EndGeneration(1, EndCause("timed out in a collective", ("b",), (0,), is_effect=True, timed_out=True))
    assert driver.hear(b, late) == [m.Send(a, late)]
    assert driver.hear(a, late) == []


def test_a_lost_agent_with_an_ancestor_of_the_record_may_come_back_and_another_is_evicted() -> None:
    driver, a, _ = found()
    first = driver.state.newest.decision
    assert first is not None
    driver.do(m.AgentExited("b"))
    driver.hear(a, m.Ready(report("a", record(driver).ref)))
    assert record(driver).agents == ("a",)
    number = driver.open("b", decision=first.ref)
    assert number in driver.state.sessions.begun
    out = driver.hear(99, m.Hello("z", "z", 1, decision=first.ref._replace(digest="0" * 16, term=m.Term(0, ""))))
    assert any(isinstance(i.message, m.Evicted) for i in out if isinstance(i, m.Send))


# ALONE
def test_joiners_with_a_checkpoint_do_not_go_on_alone() -> None:
    """The agents of the record are silent here, and may have another coordinator."""
    driver, a, b = found()
    for session in (a, b):
        driver.do(m.SessionClosed(session))
    joiner = driver.open("c")
    driver.hear(joiner, m.Ready(replace(report("c"), checkpoint=CheckpointRef(Attempt(7, 1), "d7"))))
    driver.wait_with(joiner, driver.state.timeouts.lost_after_s + 1)
    assert driver.state.absences.lost == {"a", "b"}
    assert record(driver).generation == 1
    assert "may have another coordinator" in driver.state.word_awaited
    driver.do(m.OfficeGranted())
    assert (record(driver).agents, record(driver).checkpoint) == (("c",), "d7")


# LEFT, ALONE
@pytest.mark.parametrize("has_said_so", [False, True])
def test_who_has_exited_without_saying_so_may_have_had_another_coordinator(has_said_so: bool) -> None:
    driver, a, b = found()
    joiner = driver.open("c")
    driver.hear(joiner, m.Ready(replace(report("c"), checkpoint=CheckpointRef(Attempt(7, 1), "d7"))))
    for agent, session in (("a", a), ("b", b)):
        if has_said_so:
            driver.hear(session, m.Goodbye("the job is preempted"))
        else:
            driver.do(m.SessionClosed(session))
            driver.do(m.AgentExited(agent))
    if not has_said_so:
        assert record(driver).generation == 1
        assert "agent a, b of the record has exited" in driver.state.word_awaited
        driver.do(m.OfficeGranted())
    assert (record(driver).agents, record(driver).checkpoint) == (("c",), "d7")


# REJOIN
def test_an_agent_that_says_late_what_it_has_accepted_is_not_evicted() -> None:
    driver, a, _ = found()
    first = driver.state.newest.decision
    assert first is not None
    b = driver.open("b", decision=first.ref)
    for _ in range(20):  # more generations than a record names ancestors
        before = record(driver).ref
        driver.hear(a, m.Ready(report("a", before)))
        driver.hear(b, m.Ready(report("b", before)))
        assert record(driver).ref != before
        driver.hear(b, m.Accepted(*before))
    out = driver.do(m.OfficeGranted())
    assert not any(isinstance(i.message, m.Evicted) for i in out if isinstance(i, m.Send))
    assert driver.state.in_office


def test_a_report_of_another_record_does_not_count() -> None:
    """REPORT. It was left over from an earlier generation, or knows another chain of records."""
    driver, a, b = found()
    driver.hear(a, m.Ready(report("a")))
    driver.hear(b, m.Ready(report("b", record(driver).ref)))
    joiner, stranger = driver.open("c"), driver.open("d")
    driver.hear(joiner, m.Ready(report("c")))
    driver.hear(stranger, m.Ready(report("d", RecordRef(1, "of another chain"))))
    assert sorted(driver.state.reports.counting()) == ["b", "c"]
    assert driver.state.record is not None
    assert driver.state.record.generation == 1
    driver.hear(a, m.Ready(report("a", record(driver).ref)))
    assert record(driver).agents == ("a", "b", "c")


def test_the_end_of_a_generation_is_not_that_of_another_one_of_its_number() -> None:
    """The record of another coordinator is newer, and its ranks run."""
    driver, a, _ = found()
    driver.hear(a, m.EndGeneration(1, EndCause("died", ("a",))))
    assert driver.state.newest.over == 1
    other = found()[0].state.newest.decision
    assert other is not None
    other = replace(other, term=m.Term(9, "other"), record=replace(other.record, committed=Attempt(0, 2), digest=""))
    driver.num_sessions += 1
    driver.hear(driver.num_sessions, m.Hello("b", "b", driver.num_sessions, other.term, other.ref))
    out = driver.hear(driver.num_sessions, m.KnownDecision(other))
    assert driver.state.record == other.record
    welcomes = [i.message for i in out if isinstance(i, m.Send) and isinstance(i.message, m.Welcome)]
    assert {welcome.over for welcome in welcomes} == {0}


# REPORT
def test_a_report_that_crosses_a_record_does_not_count() -> None:
    """b has not accepted the first record, and the second one is decided without it while the first is on its way."""
    driver = Driver(granted=True)
    a, b = driver.open("a"), driver.open("b")
    driver.hear(a, m.Ready(report("a")))
    driver.hear(b, m.Ready(report("b")))
    first = record(driver).ref
    driver.hear(a, m.Accepted(*first))
    driver.hear(b, m.Heartbeat(1))
    driver.do(m.SessionClosed(b))
    driver.wait_with(a, m.JOB_TIMEOUTS.lost_after_s + 1)
    b = driver.open("b")
    driver.hear(a, m.Ready(report("a", first)))
    second = record(driver)
    assert (second.agents, second.generation) == (("a",), 2)
    driver.hear(a, m.Accepted(*second.ref))
    driver.hear(b, m.Ready(report("b")))
    assert driver.state.reports.counting() == {}
    driver.hear(b, m.Accepted(*first))
    driver.hear(b, m.Ready(report("b", first)))
    driver.hear(a, m.Ready(report("a", second.ref)))
    assert (record(driver).agents, record(driver).generation) == (("a", "b"), 3)


def test_a_job_that_finishes_is_persisted() -> None:
    driver, a, b = found(has_directory=True)
    persist, *others = driver.hear(a, m.Finished(1))
    assert persist == m.Persist(
        driver.state.office.term, driver.state.newest.decision, True, driver.state.office.addresses, own=True
    )
    assert m.Send(b, m.Finished(1)) in others
    assert driver.hear(b, m.Finished(1)) == []
    without, a, _ = found()
    assert not any(isinstance(each, m.Persist) for each in without.hear(a, m.Finished(1)))


# ABANDON
@pytest.mark.parametrize("has_directory", [True, False])
def test_a_job_is_abandoned_once_every_agent_of_its_record_is_lost(has_directory: bool) -> None:
    driver, a, b = found(has_directory=has_directory)
    driver.hear(a, m.Goodbye("done"))
    assert not driver.state.is_abandoned
    driver.do(m.SessionClosed(b))
    assert not driver.state.is_abandoned  # b may come back
    driver.wait(m.JOB_TIMEOUTS.lost_after_s + 1)
    assert driver.state.is_abandoned
    driver.open("c")
    assert not driver.state.is_abandoned


# ABANDON
def test_a_finished_job_that_was_forgotten_is_not_founded_anew() -> None:
    driver = Driver(granted=True, finished=True)
    a = driver.open("a")
    assert driver.hear(a, m.Ready(report("a"))) == []
    driver.wait(driver.state.timeouts.founding_s + 1)
    assert driver.state.record is None


# ABANDON
def test_out_of_office_a_job_is_abandoned_without_sessions() -> None:
    driver = Driver()
    a = driver.open("a")
    assert not driver.state.is_abandoned
    driver.do(m.SessionClosed(a))
    assert driver.state.is_abandoned


def test_a_second_process_with_an_id_is_refused_and_the_first_may_come_back() -> None:
    driver, _, b = found()
    driver.do(m.SessionClosed(b))
    for session in (50, 51):
        out = driver.hear(session, m.Hello("b", "another process", 1))
        assert [type(i.message) for i in out if isinstance(i, m.Send)] == [m.Refused]
        driver.do(m.AgentExited("b"))
    out = driver.hear(52, m.Hello("b", "b", 9))
    assert not any(isinstance(i.message, m.Refused) for i in out if isinstance(i, m.Send))


# FORMER
@pytest.mark.parametrize("how", ["goodbye", "exit", "silence", "another id"])
def test_a_coordinator_of_weeks_keeps_nothing_of_agents_that_have_gone(how: str) -> None:
    driver = Driver(granted=True, has_directory=True)

    def decide(*reports: tuple[int, Report]) -> None:
        for session, each in reports:
            out = driver.hear(session, m.Ready(each))
        (persist,) = (each for each in out if isinstance(each, m.Persist))
        assert persist.decision is not None
        driver.do(m.Persisted(persist.decision.record.digest))
        ref = record(driver).ref
        for session, _ in reports:
            driver.hear(session, m.Accepted(ref.generation, ref.digest))

    def of_a() -> Report:
        newest = record(driver)
        holder = replace(report("a").members[0], tip=newest.committed, holds=(0, 0, 0), entered=newest.generation)
        return replace(report("a", newest.ref), members=(replace(holder, active=True),))

    a, former = driver.open("a"), ""
    decide((a, report("a")))
    sizes = []
    for number in range(40):
        guest = f"guest-{number:06}"
        session = driver.open(guest, former=former, incarnation="guest" if how == "another id" else guest)
        decide((session, report(guest)), (a, of_a()))
        assert record(driver).has_agent(guest)
        if how == "goodbye":
            driver.hear(session, m.Goodbye("it ends"))
        driver.do(m.SessionClosed(session))
        if how == "exit":
            driver.do(m.AgentExited(guest))
        if how == "silence":
            driver.wait_with(a, driver.state.timeouts.lost_after_s + 1)
        if how == "another id":
            former = guest
        else:
            decide((a, of_a()))
            assert not record(driver).has_agent(guest)
        sizes.append(len(pickle.dumps(driver.state)))
    assert max(sizes[20:]) < sizes[19] + 64  # a record names the last 16 before it


# NEWEST
def test_of_an_agent_that_was_asked_for_its_decision_nothing_stays() -> None:
    other, _, _ = found()
    assert other.state.newest.decision is not None
    ref, driver, sizes = other.state.newest.decision.ref, Driver(), []
    for number in range(100, 130):
        agent = f"guest-{number}"
        driver.hear(number, m.Hello(agent, agent, 1, decision=ref))
        driver.do(m.SessionClosed(number))
        sizes.append(len(pickle.dumps(driver.state)))
    assert driver.state.is_abandoned
    assert sizes[-1] - sizes[0] < 29 * 16  # which process has used an id


# LEASE-2
def test_timeouts_that_would_lose_a_living_agent_are_refused() -> None:
    with pytest.raises(ValueError, match="`lost_after_s` must exceed"):
        m.Timeouts(lost_after_s=11.0)


# -- the agent's half


def welcome(session: AgentSession, now_s: float, number: int = 1) -> list[Any]:
    session.handle(m.Connected("host:1"), now_s)
    return [*session.handle(m.Answer(m.Welcome(m.Term(number, "c"), True)), now_s + 1)]


def seated(promised: m.Term = m.NO_TERM) -> AgentSession:
    """Of an agent with a record, from a coordinator before."""
    driver, _, _ = found()
    return AgentSession("a", "i", promised=promised, decision=driver.state.newest.decision)


# LEASE-1
def test_a_lease_runs_from_when_the_question_was_sent() -> None:
    session = seated()
    assert m.SetLease(108.0) in welcome(session, 100.0)
    (beat,) = session.handle(m.Ticked(), 102.0)
    assert beat == m.SendToCoordinator(m.Heartbeat(1))
    assert session.handle(m.Answer(m.HeartbeatAnswer(1, True)), 104.0) == [m.SetLease(110.0)]
    assert session.handle(m.Answer(m.HeartbeatAnswer(1, True)), 105.0) == []  # again
    session.handle(m.Ticked(), 105.0)
    assert session.is_led
    assert session.handle(m.Answer(m.HeartbeatAnswer(2, False)), 105.5) == []  # not in office
    assert not session.is_led  # CONTROL-1


# RESEND
def test_what_an_agent_notifies_before_it_is_welcome_is_not_lost() -> None:
    """The coordinator knows nothing of the job, and waits for the decision that the hello names."""
    driver, session, end = Driver(), seated(), m.EndGeneration(1, EndCause("a rank has exited"))

    def carried(event: m.SessionEvent) -> list[Any]:
        """What the coordinator answers."""
        sent = [i.message for i in session.handle(event, 0.0) if isinstance(i, m.SendToCoordinator)]
        told.extend(sent)
        return [i.message for message in sent for i in driver.hear(1, message)]

    told: list[Any] = []
    (asked,) = carried(m.Connected("host:1"))
    assert carried(m.Notify(end)) == []
    welcome = next(message for message in carried(m.Answer(asked)) if isinstance(message, m.Welcome))
    carried(m.Answer(welcome))
    assert driver.state.newest.over == 1
    carried(m.Answer(welcome))
    assert told.count(end) == 2
    session.handle(m.Disconnected(), 1.0)
    session.handle(m.Connected("host:1"), 1.0)
    carried(m.Answer(welcome))
    assert told.count(end) == 2  # `Hello` has told it


# FENCE
def test_the_end_of_the_lease_kills_the_ranks_and_no_answer_brings_them_back() -> None:
    driver, _, _ = found()
    decision = driver.state.newest.decision
    assert decision is not None
    session = AgentSession("a", "i")
    welcome(session, 100.0)
    session.handle(m.Answer(m.Push(decision)), 101.5)
    session.handle(m.Ticked(), 102.0)
    killed, ended = session.handle(m.Answer(m.HeartbeatAnswer(1, True)), 108.0)  # it was read too late
    assert killed == m.KillRanks("no coordinator has answered for 8 s")
    assert ended == m.SendToCoordinator(m.EndGeneration(1, EndCause("has no lease any more", ("a",))))
    assert session.is_ended
    assert session.handle(m.Answer(m.HeartbeatAnswer(1, True)), 108.1) == []
    assert session.handle(m.Connected("host:1"), 109.0) == []


# FENCE
def test_an_agent_is_not_ready_for_the_next_record_before_its_ranks_have_the_one_that_waits_for_a_lease() -> None:
    """A coordinator would count on ranks that run in no generation, which the waiting record then has them enter."""
    driver, _, _ = found()
    decision = driver.state.newest.decision
    assert decision is not None
    session = AgentSession("a", "i")
    welcome(session, 100.0)
    session.handle(m.Answer(m.Push(decision)), 120.0)  # the lease that nothing bound to is over
    session.handle(m.Disconnected(), 120.0)
    session.handle(m.Connected("host:1"), 121.0)
    answered = session.handle(m.Answer(m.Welcome(m.Term(2, "d"), False)), 121.0)
    assert m.CollectReport() not in answered
    assert session.handle(m.ReportCollected(report("a")), 121.0) == []  # it was asked for before
    session.handle(m.Answer(m.Welcome(m.Term(2, "d"), True)), 122.0)
    delivered = session.handle(m.Answer(m.HeartbeatAnswer(2, True)), 122.5)
    assert m.Inform(RecordAnswered(decision.record)) in delivered
    assert session.handle(m.ReportRequested(), 123.0) == [m.CollectReport()]


# READDRESS
def test_the_loss_of_the_host_s_address_kills_the_ranks_and_ends_the_generation_at_once() -> None:
    session = seated()
    welcome(session, 100.0)
    killed, ended = session.handle(m.AddressLost("this host is at 10.0.0.2"), 101.5)
    assert killed == m.KillRanks("this host is at 10.0.0.2")
    assert ended == m.SendToCoordinator(
        m.EndGeneration(1, EndCause("has lost its address: this host is at 10.0.0.2", ("a",)))
    )
    assert session.is_ended


# UNBOUND
def test_an_agent_without_a_record_has_no_lease_that_ends() -> None:
    """It takes its first record with the lease of the newest answer, if that still runs."""
    driver, _, _ = found()
    decision = driver.state.newest.decision
    assert decision is not None
    late, early = AgentSession("a", "i"), AgentSession("a", "i")
    for session in (late, early):
        assert m.SetLease(108.0) not in welcome(session, 100.0)
        out = session.handle(m.Ticked(), 107.0)
        assert not any(isinstance(i, m.HangUp | m.KillRanks) for i in out)
    assert m.SetLease(108.0) in early.handle(m.Answer(m.Push(decision)), 107.5)
    assert isinstance(early.handle(m.Ticked(), 108.0)[0], m.KillRanks)
    assert not any(isinstance(i, m.SetLease | m.Inform) for i in late.handle(m.Answer(m.Push(decision)), 108.5))
    lease, told, *_ = late.handle(m.Answer(m.HeartbeatAnswer(1, True)), 109.0)
    assert lease == m.SetLease(115.0)
    assert isinstance(told, m.Inform)
    assert isinstance(late.handle(m.Ticked(), 115.0)[0], m.KillRanks)


# UNBOUND
def test_an_agent_without_a_record_waits_longest_for_an_answer() -> None:
    session = AgentSession("a", "i")
    welcome(session, 100.0)
    session.handle(m.Ticked(), 102.0)  # its heartbeat
    assert not any(isinstance(i, m.HangUp) for i in session.handle(m.Ticked(), 126.0))
    assert m.HangUp("the coordinator has not answered for 24 s") in session.handle(m.Ticked(), 126.1)


def test_the_first_record_of_a_slow_coordinator_counts_as_an_answer() -> None:
    driver, _, _ = found()
    decision = driver.state.newest.decision
    assert decision is not None
    session = AgentSession("a", "i")
    welcome(session, 100.0)
    session.handle(m.Ticked(), 102.0)  # its heartbeat, which nothing answers
    session.handle(m.Answer(m.Push(decision)), 110.0)
    assert not any(isinstance(i, m.HangUp) for i in session.handle(m.Ticked(), 113.0))
    assert m.HangUp("the coordinator has not answered for 3 s") in session.handle(m.Ticked(), 113.1)


def test_a_refused_connection_renews_only_the_lease_of_its_own_address() -> None:
    session = seated()
    welcome(session, 100.0)
    session.handle(m.Disconnected(), 101.0)
    assert session.handle(m.ConnectionRefused("other:1", 103.0), 103.0) == []
    assert session.handle(m.ConnectionRefused("host:1", 103.0), 103.0) == [m.SetLease(111.0)]
    session.handle(m.Connected("other:1"), 104.0)
    session.handle(m.Answer(m.Welcome(m.Term(2, "d"), False)), 104.1)  # promised to another coordinator
    session.handle(m.Disconnected(), 105.0)
    assert session.handle(m.ConnectionRefused("host:1", 105.0), 105.0) == []
    assert isinstance(session.handle(m.ConnectionRefused("host:1", 111.0), 111.0)[0], m.KillRanks)


def test_a_record_of_a_term_that_was_not_promised_is_not_taken() -> None:
    driver, _, _ = found()
    decision = driver.state.newest.decision
    assert decision is not None
    session = AgentSession("a", "i", promised=m.Term(5, "x"))
    session.handle(m.Connected("host:1"), 0.0)
    assert session.handle(m.Answer(m.Push(decision)), 0.1) == []
    assert session.handle(m.Answer(m.Welcome(m.Term(1, "c"), True)), 0.2) == []  # an earlier term
    assert session.handle(m.Answer(m.Push(decision)), 0.3) == []
    session.handle(m.Answer(m.Welcome(m.Term(6, "c"), True)), 0.4)
    assert m.SendToCoordinator(m.Accepted(1, decision.record.digest)) in session.handle(m.Answer(m.Push(decision)), 0.5)


def test_ranks_get_a_record_before_the_coordinator_hears_of_it() -> None:
    driver, _, _ = found()
    decision = driver.state.newest.decision
    assert decision is not None
    session = AgentSession("a", "i")
    session.handle(m.Connected("host:1"), 0.0)
    session.handle(m.Answer(m.Welcome(m.Term(1, "c"), True)), 0.1)
    out = session.handle(m.Answer(m.Push(decision, joining=1)), 0.2)
    names = [type(getattr(i, "event", i)).__name__ for i in out]
    assert names == ["SetLease", "RecordAnswered", "PeerNotice", "SendToCoordinator"]


def test_a_record_that_comes_without_a_lease_waits_for_one() -> None:
    driver, _, _ = found()
    decision = driver.state.newest.decision
    assert decision is not None
    session = AgentSession("a", "i")
    session.handle(m.Connected("host:1"), 0.0)
    session.handle(m.Answer(m.Welcome(m.Term(1, "c"), False)), 0.1)
    out = session.handle(m.Answer(m.Push(decision, joining=1)), 0.2)
    assert m.SendToCoordinator(m.Heartbeat(1)) in out
    out = session.handle(m.Answer(m.HeartbeatAnswer(1, True)), 0.3)
    assert [type(getattr(i, "event", i)).__name__ for i in out] == ["SetLease", "RecordAnswered", "PeerNotice"]


def test_a_coordinator_that_does_not_answer_is_left() -> None:
    session = seated()
    session.handle(m.Connected("host:1"), 100.0)
    assert session.handle(m.Ticked(), 102.9)[-1] == m.SendToCoordinator(m.Heartbeat(1))
    assert any(isinstance(i, m.HangUp) for i in session.handle(m.Ticked(), 106.0))
    assert not session.is_connected


@pytest.mark.parametrize("addresses", [{"here"}, {"there"}, {"here", "there"}])
def test_a_coordinator_that_has_moved_declares_nobody_lost_that_it_has_not_heard(addresses: set[str]) -> None:
    """MOVED: a connection that is refused at the old address renews a lease."""
    before, _, _ = found(has_directory=True, address="there")
    driver = Driver(
        granted=True,
        has_directory=True,
        decision=before.state.newest.decision,
        own=True,
        address="here",
        addresses=frozenset(addresses),
    )
    ref = record(before).ref
    a = driver.open("a", decision=m.DecisionRef(before.state.office.term, ref.generation, ref.digest, True))
    driver.hear(a, m.Ready(report("a", ref)))
    driver.wait_with(a, 60)
    if addresses == {"here"}:
        assert driver.state.absences.lost == {"b"}
        assert not driver.state.word_awaited
        return
    assert driver.state.absences.lost == set()
    assert "agent b has not come to this coordinator at here" in driver.state.word_awaited
    assert "at there" in driver.state.word_awaited
    driver.do(m.OfficeGranted())
    driver.wait_with(a, 60)
    assert driver.state.absences.lost == {"b"}
    assert not driver.state.word_awaited


def test_an_agent_that_has_come_to_where_the_coordinator_is_now_is_lost_like_any_other() -> None:
    before, _, _ = found(has_directory=True, address="there")
    driver = Driver(
        has_directory=True,
        decision=before.state.newest.decision,
        own=True,
        address="here",
        addresses=frozenset({"there"}),
    )
    ref = record(before).ref
    known = m.DecisionRef(before.state.office.term, ref.generation, ref.digest, True)
    a, b = driver.open("a", decision=known), driver.open("b", decision=known)
    driver.hear(a, m.Ready(report("a", ref)))
    driver.do(m.SessionClosed(b))
    driver.wait_with(a, 60)
    assert driver.state.absences.lost == {"b"}


def test_an_agent_waits_longer_in_each_further_session_until_it_has_an_answer() -> None:
    session = seated()
    session.timeouts = m.EMBEDDED_TIMEOUTS  # whose lease does not end meanwhile
    now_s = 100.0
    for limit_s in (3.0, 6.0, 12.0, 24.0, 24.0):
        session.handle(m.Connected("host:1"), now_s)
        now_s += 1.0
        session.handle(m.Ticked(), now_s)  # its heartbeat
        assert not any(isinstance(i, m.HangUp) for i in session.handle(m.Ticked(), now_s + limit_s))
        now_s += limit_s + 0.1
        assert m.HangUp(f"the coordinator has not answered for {limit_s:g} s") in session.handle(m.Ticked(), now_s)
    welcome(session, now_s)  # this is none: a coordinator that is slow welcomes, and then answers too late
    session.handle(m.Ticked(), now_s + 1.0)
    assert m.HangUp("the coordinator has not answered for 24 s") in session.handle(m.Ticked(), now_s + 25.2)
    welcome(session, now_s + 26.0)
    sent = [i.message for i in session.handle(m.Ticked(), now_s + 27.0) if isinstance(i, m.SendToCoordinator)]
    (beat,) = [message.number for message in sent if isinstance(message, m.Heartbeat)]
    session.handle(m.Answer(m.HeartbeatAnswer(beat, True)), now_s + 27.5)
    session.handle(m.Ticked(), now_s + 28.0)
    assert m.HangUp("the coordinator has not answered for 3 s") in session.handle(m.Ticked(), now_s + 31.1)


def test_a_coordinator_does_not_look_at_all_reports_whenever_an_agent_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents of a large job come at once, each with its report: a look at all reports for each of them takes
    longer than their handshakes may."""
    looks = []

    def look(record: Record | None, proposal: list[Report], *rest: Any) -> Record | Undecided | Unrecoverable:
        looks.append(len(proposal))
        return next_record(record, proposal, *rest)

    monkeypatch.setattr("elasticgang.protocol.next_decision.next_record", look)
    driver = Driver(granted=True)
    names = [f"a{number:02}" for number in range(40)]
    for name in names[:-1]:
        driver.hear(driver.open(name), m.Ready(replace(report(name), min_agents=40)))
    assert looks == []
    driver.wait(1.0)
    assert looks == [39]  # a host that does not fit is refused on a tick, and the lack of agents gets its notice
    out = driver.hear(driver.open(names[-1]), m.Ready(replace(report(names[-1]), min_agents=40)))
    assert sum(isinstance(i, m.Send) and isinstance(i.message, m.Push) for i in out) == 40
    assert looks == [39, 40]


# UNACCEPTED
def test_an_agent_that_comes_back_without_accepting_the_record_is_lost_and_stays_so_until_it_does() -> None:
    driver, a, b = found()
    first = driver.state.newest.decision
    assert first is not None
    for session, agent in ((a, "a"), (b, "b")):
        driver.hear(session, m.Ready(report(agent, first.record.ref)))
    second = record(driver)
    driver.hear(a, m.Accepted(2, second.digest))
    pushed, out = [], []
    for _ in range(9):  # small messages pass between them, and the record does not
        driver.do(m.SessionClosed(b))
        b = driver.num_sessions = driver.num_sessions + 1
        pushed += driver.hear(b, m.Hello("b", "b", b, decision=first.ref))
        assert driver.hear(b, m.Heartbeat(1)) == [m.Send(b, m.HeartbeatAnswer(1, False))]
        out += driver.wait_with(a, 1.5)
    assert [i.message for i in pushed if isinstance(i.message, m.Welcome)] == [
        m.Welcome(driver.state.office.term, False)
    ] * 9
    assert sum(isinstance(i.message, m.Push) for i in pushed) == 9
    assert driver.state.absences.lost == {"b"}
    assert m.Send(a, m.EndGeneration(2, EndCause("is lost", ("b",)))) in out
    (closed,) = (i for i in out if isinstance(i, m.CloseSession))
    assert "it has not accepted generation 2" in closed.reason

    b = driver.num_sessions = driver.num_sessions + 1
    driver.hear(b, m.Hello("b", "b", b, decision=first.ref))
    assert driver.state.absences.lost == {"b"}
    out = driver.hear(b, m.Accepted(2, second.digest))
    assert driver.state.absences.lost == set()
    assert m.Send(b, m.Welcome(driver.state.office.term, True, over=2)) in out
    assert driver.hear(b, m.Heartbeat(2)) == [m.Send(b, m.HeartbeatAnswer(2, True))]


# UNACCEPTED
def test_an_agent_that_is_left_out_of_the_record_that_it_owed_is_welcomed_as_a_joiner() -> None:
    driver, a, b = found()
    first = driver.state.newest.decision
    assert first is not None
    for session, agent in ((a, "a"), (b, "b")):
        driver.hear(session, m.Ready(report(agent, first.record.ref)))
    driver.hear(a, m.Accepted(2, record(driver).digest))
    driver.hear(b, m.Heartbeat(1))
    driver.wait_with(a, driver.state.timeouts.lost_after_s + 1)
    assert driver.state.absences.lost == {"b"}
    b = driver.num_sessions = driver.num_sessions + 1
    driver.hear(b, m.Hello("b", "b", b, decision=first.ref))
    out = driver.hear(a, m.Ready(report("a", record(driver).ref)))
    assert record(driver).agents == ("a",)
    assert m.Send(b, m.Welcome(driver.state.office.term, True, over=2)) in out


# UNACCEPTED
def test_what_comes_while_a_record_is_written_is_heard() -> None:
    """Afterwards the agent owes that record."""
    driver, a, b = found(has_directory=True)
    driver.wait(6.0)
    driver.hear(a, m.Ready(report("a", record(driver).ref)))
    (persist,) = driver.hear(b, m.Ready(report("b", record(driver).ref)))
    assert isinstance(persist, m.Persist)
    assert persist.decision is not None
    driver.wait(6.0)
    for session in (a, b):
        driver.hear(session, m.JoinRequest(1))
    driver.do(m.Persisted(persist.decision.record.digest))
    driver.wait(12.0)
    assert driver.state.absences.lost == set()
    driver.wait(1.0)
    assert driver.state.absences.lost == {"a", "b"}
