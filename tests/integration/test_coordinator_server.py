"""The coordinator and its agents' clients over real connections: records, restarts, deltas, and who may take part."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticgang.coordinator import decision_server
from elasticgang.coordinator.push_payloads import MIN_DELTA_BYTES
from elasticgang.protocol import agent_events
from elasticgang.protocol.coordinator_messages import (
    DecisionRef,
    EndGeneration,
    Goodbye,
    Granted,
    Hello,
    Notify,
    Term,
)
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.job_facts import AgentFacts, JobFacts, ScriptFailure
from elasticgang.protocol.record import Undecided
from elasticgang.session import agent_client
from elasticgang.session import connection as connections
from elasticgang.session.agent_client import RETRY_S, pause_s
from elasticgang.session.connection import ServerConnection
from elasticgang.session.credentials import Credentials
from elasticgang.session.handshake import AGENT, OPERATOR
from elasticgang.session.secret import Secret
from tests.chaos.attacked import Session, until_closed
from tests.integration import led_jobs
from tests.integration.led_jobs import CREDENTIALS, DEADLINE_S, PATIENT, QUICK, Agent, Job, found, full_listener, play
from tests.support import PROMPT_S


def test_a_change_reaches_every_agent() -> None:
    async def test(job: Job) -> None:
        a, b = await found(job)
        a.num_ranks = 1
        a.end_generation()
        second, same = await a.next(), await b.next()
        assert (second.generation, second.digest) == (2, same.digest)
        assert len(second.seats) == 3
        assert a.leases == sorted(a.leases)

    play(test, Job())


def test_a_large_record_is_pushed_as_a_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    # Answers to heartbeats count as sent, too: few, also on a slow machine.
    monkeypatch.setattr(led_jobs, "QUICK", replace(PATIENT, heartbeat_s=1.0))

    async def test(job: Job) -> None:
        agents = [job.add(f"a{number:02}", num_ranks=8, min_agents=40) for number in range(40)]
        for agent in agents:
            await agent.next()
        assert job.server is not None
        before = job.server.num_bytes_sent
        agents[0].end_generation()  # all but one are learners, and become active
        first = [await agent.next() for agent in agents]
        assert (job.server.num_bytes_sent - before) / len(agents) < 3000 < len(first[0].text)
        before = job.server.num_bytes_sent
        agents[20].num_ranks = 7
        agents[20].end_generation()
        second = [await agent.next() for agent in agents]
        assert len({record.digest for record in second}) == 1
        assert {(len(one.seats), len(two.seats)) for one, two in zip(first, second, strict=True)} == {(320, 319)}
        assert len(second[0].text) > MIN_DELTA_BYTES
        assert (job.server.num_bytes_sent - before) / len(agents) < 2000 < len(second[0].text)
        assert [agent.reasons for agent in agents if agent.reasons] == []  # all have understood it

    play(test, Job())


# SERVE-LIMIT
def test_an_agent_whose_record_is_over_the_limit_of_a_message_is_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody is told the same in session after session."""
    monkeypatch.setattr("elasticgang.session.messages.MAX_PAYLOAD_BYTES", 100)

    async def test(job: Job) -> None:
        agents = [job.add("a"), job.add("b")]
        for agent in agents:
            while not (refused := [each for each in map(refusal, agent.events) if each]):
                agent.has_event.clear()
                await agent.has_event.wait()
            assert refused[0].startswith("the record of 2 agents cannot be sent: a message of ")
            assert refused[0].endswith("bytes is over the limit of 100")
        assert sum("cannot be sent" in line for line in job.log) == 1

    play(test, Job())


# NEXT-9
def test_a_job_whose_record_would_be_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticgang.protocol.next_record.MAX_RECORD_BYTES", 100)

    async def test(job: Job) -> None:
        for agent in [job.add("a"), job.add("b")]:
            while not (refused := [each for each in map(refusal, agent.events) if each]):
                agent.has_event.clear()
                await agent.has_event.wait()
            assert "run fewer hosts or ranks" in refused[0]
        assert job.server is not None
        state = job.server.state_of("job")
        assert state is not None
        assert state.record is None

    play(test, Job())


def refusal(event: Any) -> str:
    answer = event.answer if isinstance(event, agent_events.RecordAnswered) else None
    return answer.refused[0][1] if isinstance(answer, Undecided) and answer.refused else ""


def test_a_silent_agent_is_lost_and_the_job_goes_on() -> None:
    async def test(job: Job) -> None:
        a, b = await found(job)
        await b.client.stop()
        second = await a.next()
        assert second.dead_agents == ("b",)
        assert second.agents == ("a",)

    play(test, Job())


def test_an_agent_that_says_goodbye_is_lost_at_once() -> None:
    async def test(job: Job) -> None:
        a, b = await found(job)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        b.client.notify(Notify(Goodbye("done")))
        assert (await a.next()).agents == ("a",)
        assert loop.time() - began_s < QUICK.lost_after_s

    play(test, Job())


def test_training_goes_on_without_a_coordinator_and_the_job_after_its_restart(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        a, b = await found(job)
        await job.stop()
        num_leases = len(a.leases)
        while len(a.leases) < num_leases + 3:  # refused connections renew the lease
            await asyncio.sleep(0.05)
        assert not a.killed.done()
        a.is_ready = True
        a.client.notify(Notify(EndGeneration(1, EndCause("a rank is lost"))))
        a.client.request_report()
        server = await job.start()
        second = await a.next()
        assert (await b.next()).digest == second.digest
        assert second.generation == 2
        assert second.parent
        state = server.state_of("job")
        assert state is not None
        assert state.office.term.number >= 2

    play(test, Job(tmp_path / "state"))


def test_nothing_of_a_server_runs_once_it_has_stopped() -> None:
    """Also not the probe of an absent agent whose host does not answer (SERVE-EXITED)."""

    def probes() -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name() == "probe of agent b"]

    async def test(job: Job) -> None:
        with full_listener() as address:
            a, b = job.add("a"), job.add("b", address=address)
            await asyncio.gather(a.next(), b.next())
            await b.client.stop()
            while not probes():
                await asyncio.sleep(0.01)
            await job.stop()
            assert probes() == []

    play(test, Job())


# CLIENT-STOP
def test_a_client_that_is_stopped_while_its_connection_is_made_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(job: Job) -> None:
        is_made = asyncio.Event()

        async def noticed(*args: Any) -> None:
            await connections.connect(*args)
            is_made.set()

        monkeypatch.setattr(agent_client, "connect", noticed)
        agent = Agent("a", job.port).start()
        await is_made.wait()
        await asyncio.wait_for(agent.client.stop(), PROMPT_S)
        assert not agent.hosts

    play(test, Job())


# CONTROL-1
def test_a_report_is_sent_again_to_a_restarted_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(led_jobs, "QUICK", PATIENT)

    async def test(job: Job) -> None:
        a, b = await found(job)
        await b.client.stop()
        a.end_generation()
        assert job.server is not None
        state = job.server.state_of("job")
        while state is None or "a" not in state.reports.counting():
            await asyncio.sleep(0.01)
        await job.stop()
        await job.start()
        b.restart(job.port)
        assert (await a.next()).digest == (await b.next()).digest

    play(test, Job(tmp_path / "state"))


def test_without_a_directory_a_restarted_coordinator_waits_for_every_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(led_jobs, "QUICK", PATIENT)

    async def test(job: Job) -> None:
        a, b = await found(job)
        await job.stop()
        await b.client.stop()
        job.founds = False
        server = await job.start()
        while (state := server.state_of("job")) is None or not state.sessions.begun:
            await asyncio.sleep(0.02)
        while state.record is None:
            await asyncio.sleep(0.02)
        assert not state.in_office
        b.restart(job.port)
        while not state.in_office:
            await asyncio.sleep(0.02)
        a.end_generation()
        assert (await a.next()).digest == (await b.next()).digest

    play(test, Job())


def test_the_operators_word_takes_office() -> None:
    async def test(job: Job) -> None:
        job.add("a")
        assert job.server is not None
        while (state := job.server.state_of("job")) is None or not state.sessions.begun:
            await asyncio.sleep(0.02)
        assert not state.in_office
        job.add("b")
        job.server.grant("job")
        assert (await job.agents[0].next()).generation == 1

    play(test, Job(founds=False))


# SERVE-BEGIN
@pytest.mark.parametrize(("role", "says_hello"), [(AGENT, False), (AGENT, True), (OPERATOR, False)])
def test_a_session_that_does_not_begin_is_closed(monkeypatch: pytest.MonkeyPatch, role: str, says_hello: bool) -> None:
    unknown = DecisionRef(Term(3, "another"), 7, "digest", False)

    async def test(job: Job) -> None:
        assert job.server is not None
        a = job.add("a")
        while (state := job.server.state_of("job")) is None or not state.sessions.begun:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(decision_server, "HANDSHAKE_S", 1.0)
        silent = await asyncio.to_thread(Session, job.port, CREDENTIALS.key, role, "job")
        if says_hello:
            silent.send(Hello("silent", "incarnation", 1, decision=unknown))  # and not the decision that it names
        await asyncio.to_thread(until_closed, silent.sock)
        while not job.log:
            await asyncio.sleep(0.01)
        assert job.log == ["closed a connection from 127.0.0.1: its session had not begun after 1 s"]
        assert isinstance(job.server.grant("job"), Granted)
        assert a.reasons == []

    play(test, Job(founds=False))


def many_facts(number: int) -> Notify:
    """Of 4 kB and more, also when they are compressed."""
    names = (os.urandom(128).hex() for _ in range(32))
    return Notify(AgentFacts(failures=tuple(ScriptFailure(name, 0, 32 * number + at) for at, name in enumerate(names))))


# SERVE-ORDER
def test_a_session_that_breaks_in_the_midst_of_a_broadcast_is_handled_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is founded once the agent that does not read is cut off: the others get the message first."""
    monkeypatch.setattr(connections, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(led_jobs, "QUICK", replace(QUICK, founding_s=DEADLINE_S, lost_after_s=DEADLINE_S))

    async def test(job: Job) -> None:
        stuck = await asyncio.to_thread(Session, job.port, CREDENTIALS.key, AGENT, "job")
        sockets.callback(stuck.sock.close)
        stuck.send(Hello("stuck", "incarnation", 1))
        assert job.server is not None
        while (state := job.server.state_of("job")) is None or not state.sessions.begun:
            await asyncio.sleep(0.01)
        sender, receiver = job.add("a"), job.add("b")
        while not (sender.hosts and receiver.hosts):
            await asyncio.sleep(0.01)
        num_received = 0
        while len(state.sessions.begun) == 3:
            sender.client.notify(many_facts(num_received))
            num_received += 1
            while sum(isinstance(event, JobFacts) for event in receiver.events) < num_received:
                await receiver.has_event.wait()
                receiver.has_event.clear()
        assert num_received > 10
        await receiver.next()
        kinds = [type(event) for event in receiver.events if not isinstance(event, agent_events.PeerNotice)]
        assert kinds == [JobFacts] * num_received + [agent_events.RecordAnswered]

    with contextlib.ExitStack() as sockets:
        play(test, Job())


class _Newcomer(Agent):
    """Keeps what had gone wrong when its first record came."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.before_first: list[str] | None = None

    def inform(self, event: Any) -> None:
        super().inform(event)
        if self.record is not None and self.before_first is None:
            self.before_first = list(self.reasons)


# CONN-DEADLINE, UNBOUND
def test_a_fleet_comes_at_once_to_a_coordinator_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the job is founded, a turn in which the coordinator reads from all of them takes most of a lease, so that
    one that an answer grants is over when the next answer comes. Nevertheless each gets in with its first connection,
    and has the first record."""
    num_agents, work_s = 50, 0.024  # after the founding, all agents read the record on the one loop of this test
    timeouts = replace(PATIENT, lease_s=1.5, heartbeat_s=1.0, answer_s=1.0, founding_s=DEADLINE_S)
    assert 2 * num_agents * work_s > timeouts.lease_s
    monkeypatch.setattr(led_jobs, "QUICK", timeouts)
    monkeypatch.setattr(agent_client, "CONNECT_S", DEADLINE_S)  # here the coordinator's turns delay its clients too
    take = ServerConnection.data_received
    job = Job()

    def take_slowly(self: ServerConnection, data: bytes) -> None:
        state = None if job.server is None else job.server.state_of("job")
        until_s = time.monotonic() + (work_s if state is None or state.record is None else 0.0)
        while time.monotonic() < until_s:
            pass
        take(self, data)

    monkeypatch.setattr(ServerConnection, "data_received", take_slowly)

    async def test(job: Job) -> None:
        fleet = [_Newcomer(f"a{number:03}", job.port, min_agents=num_agents) for number in range(num_agents)]
        job.agents += fleet
        for agent in fleet:
            agent.start()
        records = await asyncio.gather(*(agent.next() for agent in fleet))
        assert len({record.digest for record in records}) == 1
        assert [agent.before_first for agent in fleet] == [[]] * num_agents

    play(test, job)


# CLIENT-RETRY
def test_agents_that_failed_together_come_back_at_random_times() -> None:
    assert [pause_s(0, draw) for draw in (0.0, 0.5, 1.0)] == [RETRY_S] * 3  # nothing listens there
    assert [pause_s(number, 0.0) for number in (1, 2, 9)] == [0.0] * 3
    assert [pause_s(number, 1.0) for number in (1, 2, 3, 9)] == [0.8, 1.6, 3.2, 3.2]
    assert pause_s(2, 0.5) == 0.8


def test_jobs_are_apart() -> None:
    async def test(job: Job) -> None:
        a, _ = await found(job)
        others = [job.add(name, job="other") for name in ("a", "b")]
        assert (await others[0].next()).job == "other"
        others[0].client.notify(Notify(AgentFacts(has_successors=True)))
        while not any(isinstance(event, JobFacts) for event in others[1].events):
            others[1].has_event.clear()
            await others[1].has_event.wait()
        assert [e for e in others[1].events if isinstance(e, JobFacts)] == [JobFacts(have_successors=True)]
        assert not any(isinstance(event, JobFacts) for event in a.events)

    play(test, Job())


def test_a_second_process_with_the_id_of_a_member_is_refused() -> None:
    async def test(job: Job) -> None:
        await found(job)
        impostor = job.add("a")
        while not impostor.events:
            await impostor.has_event.wait()
        (event, *_) = impostor.events
        assert isinstance(event, agent_events.RecordAnswered)
        assert isinstance(event.answer, Undecided)
        assert "another process takes part as agent a" in event.answer.refused[0][1]

    play(test, Job())


def test_an_agent_without_the_secret_is_not_heard() -> None:
    async def test(job: Job) -> None:
        wrong = job.add("x", credentials=Credentials(Secret(b"another secret of it")))
        while not any("ended" in line for line in wrong.reasons):
            await asyncio.sleep(0.02)
        await found(job)
        assert wrong.events == []
        assert sum("does not hold the secret" in line for line in job.log) == 1

    play(test, Job())
