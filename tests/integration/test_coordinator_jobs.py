"""Which jobs a coordinator keeps, and the operator's word."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticgang.agent.control_plane import ControlPlane, Limits
from elasticgang.coordinator import decision_server
from elasticgang.errors import OperationalError
from elasticgang.launch import cli
from elasticgang.process.lease import Lease
from elasticgang.protocol import agent_events
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.coordinator_messages import (
    JOB_TIMEOUTS,
    ConnectionRefused,
    Finished,
    Goodbye,
    GrantOffice,
    Hello,
    Notice,
    Notify,
    Term,
    Welcome,
)
from elasticgang.protocol.record import PROTOCOL, Undecided
from elasticgang.protocol.restarts import Restarts
from elasticgang.session.addresses import failure_of, probe
from elasticgang.session.agent_client import AgentClient
from elasticgang.session.connection import ClientConnection, Connection
from elasticgang.session.credentials import Credentials
from elasticgang.session.handshake import AGENT, Identity
from elasticgang.session.messages import encode
from elasticgang.session.operator_client import grant
from elasticgang.session.secret import SECRET_FILE_VARIABLE, Secret
from tests.integration import led_jobs
from tests.integration.led_jobs import CREDENTIALS, DEADLINE_S, PATIENT, Agent, Job, found, full_listener, play
from tests.support import PROMPT_S, reserved_port

NAME = "coordinator.example"


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def leave(*agents: Agent) -> None:
    for agent in agents:
        agent.client.notify(Notify(Goodbye("done")))
        await agent.client.stop()


async def finish(job: Job) -> None:
    a, b = await found(job)
    a.client.notify(Notify(Finished(1)))
    await until(lambda: any(isinstance(event, agent_events.Finished) for event in b.events))
    await leave(a, b)
    await is_forgotten(job)


async def is_forgotten(job: Job) -> None:
    server = job.server
    assert server is not None
    await until(lambda: server.num_jobs == 0)


async def is_told_that_it_has_finished(job: Job, name: str) -> bool:
    late = job.add(name)
    await until(lambda: late.events)
    await leave(late)
    return any(isinstance(event, agent_events.Finished) for event in late.events)


# SERVE-FORGET
def test_a_finished_job_is_forgotten_and_persisted(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        await finish(job)
        assert await is_told_that_it_has_finished(job, "late")
        await job.stop()
        await job.start()
        assert await is_told_that_it_has_finished(job, "later")
        await is_forgotten(job)

    play(test, Job(tmp_path / "state"))


# SERVE-FORGET
def test_without_a_directory_no_more_is_kept_than_that_it_has_finished() -> None:
    async def test(job: Job) -> None:
        await finish(job)
        for name in ("late", "later"):
            assert await is_told_that_it_has_finished(job, name)
            await is_forgotten(job)

    play(test, Job())


# SERVE-FORGET
def test_a_job_of_which_nothing_is_known_is_forgotten_with_its_last_session() -> None:
    async def test(job: Job) -> None:
        server = job.server
        assert server is not None
        agents = [job.add("a", job=f"job-{number}") for number in range(20)]
        await until(lambda: server.num_jobs == 20)
        await leave(*agents)
        await is_forgotten(job)
        await found(job)

    play(test, Job())


# SERVE-FORGET
def test_an_abandoned_job_makes_room_and_a_living_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_server, "MAX_JOBS", 2)

    async def test(job: Job) -> None:
        assert job.server is not None
        await leave(*await found(job))
        state = job.server.state_of("job")
        assert state is not None
        await until(lambda: state.is_abandoned)
        others = [job.add(name, job="second") for name in ("a", "b")]
        await others[0].next()
        assert job.server.num_jobs == 2
        third = [job.add(name, job="third") for name in ("a", "b")]
        await third[0].next()
        assert job.server.num_jobs == 2
        fourth = job.add("a", job="fourth")
        await until(lambda: any("leads 2 jobs already" in line for line in job.log))
        await until(lambda: bool(fourth.events))
        assert "leads 2 jobs already" in fourth.events[0].answer.refused[0][1]
        await fourth.client.stop()  # it would take the room too
        again = job.add("c")  # of the first: it is refused while there is no room
        await leave(*others)

        def is_answered(event: Any) -> bool:
            return isinstance(event, agent_events.RecordAnswered) and not getattr(event.answer, "refused", ())

        await until(lambda: any(is_answered(event) for event in again.events))

    play(test, Job())


# -- the operator's word


async def word(job: Job, name: str = "job", credentials: Credentials = CREDENTIALS) -> str:
    return await grant("127.0.0.1", job.port, name, credentials, DEADLINE_S)


def test_an_operator_without_the_secret_is_told_of_the_option() -> None:
    async def test(job: Job) -> None:
        with pytest.raises(OperationalError, match=r"without a secret: does it need --secret-file or --tls-cert\?"):
            await word(job, credentials=Credentials())
        with pytest.raises(OperationalError, match="the session ended"):
            await word(job, credentials=Credentials(Secret(b"fedcba9876543210")))

    play(test, Job())


async def why_unreached(job: Job, credentials: Credentials, limit_s: float = 2.0) -> str:
    callbacks: Any = SimpleNamespace(state=AgentState("a", "127.0.0.1", "job", Restarts(0), num_ranks=1))
    limits = Limits(connect=limit_s, reconnect=limit_s)
    coordinator = f"127.0.0.1:{job.port}"
    plane = ControlPlane(callbacks, coordinator, "job", credentials, limits, JOB_TIMEOUTS, Lease.create())
    with pytest.raises(OperationalError) as raised:
        await plane.open()
    await plane.leave("")
    return str(raised.value)


# CONTROL-8
def test_an_agent_is_told_that_the_state_of_its_job_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(led_jobs, "QUICK", PATIENT)  # a coordinator that refuses them renews no lease

    async def test(job: Job) -> None:
        a, b = await found(job)
        await job.stop()
        (path,) = tmp_path.glob("*.json")
        whole = path.read_bytes()
        path.write_bytes(whole[:20])
        await job.start()
        why = await why_unreached(job, CREDENTIALS, DEADLINE_S)
        assert why.startswith(f"the job refused this host: {path} is damaged")
        await until(lambda: any("is damaged" in line for line in job.log))
        path.write_bytes(whole)
        for agent in (a, b):
            agent.end_generation()
        assert (await a.next()).generation == 2
        assert (await b.next()).generation == 2

    play(test, Job(tmp_path))


# CONTROL-8
def test_a_refusal_before_it_is_welcomed_again_ends_no_agent_that_takes_part() -> None:
    async def test() -> None:
        handled: list[Any] = []
        state = AgentState("a", "127.0.0.1", "job", Restarts(0), num_ranks=1)
        callbacks: Any = SimpleNamespace(state=state, on_session_renewed=lambda: None, handle=handled.append)
        limits = Limits(connect=2.0, reconnect=2.0)
        plane = ControlPlane(callbacks, "127.0.0.1:1", "job", CREDENTIALS, limits, JOB_TIMEOUTS, Lease.create())
        plane.welcomed(Welcome(Term(1, "c"), True), "127.0.0.1")  # in a session that is over
        plane.begin()
        plane.inform(agent_events.RecordAnswered(Undecided("refused", (("a", "its state is damaged"),))))
        assert handled == []

    asyncio.run(test())


# CONTROL-9
def test_which_agents_have_gone_is_told_once() -> None:
    async def test() -> None:
        state = AgentState("a", "127.0.0.1", "job", Restarts(0), num_ranks=1)
        callbacks: Any = SimpleNamespace(
            state=state, on_session_renewed=lambda: None, on_facts_changed=lambda: None, log=lambda *_, **__: None
        )
        limits = Limits(connect=2.0, reconnect=2.0)
        plane = ControlPlane(callbacks, "127.0.0.1:1", "job", CREDENTIALS, limits, JOB_TIMEOUTS, Lease.create())
        plane.begin()
        plane.inform(Notice("lost", "", ("b", "c")))
        plane.inform(Notice("left", "", ("d",)))
        assert plane.take_gone(("a", "c", "d")) == ({"b"}, {"d"})  # the record may be older than the notice
        assert plane.take_gone(("a",)) == ({"c"}, {"d"})
        assert plane.take_gone(("a",)) == (set(), set())

    asyncio.run(test())


def test_an_agent_without_the_secret_is_told_of_the_option() -> None:
    async def test(job: Job) -> None:
        what = f"what answers at 127.0.0.1:{job.port} is not a coordinator of elasticgang "
        without = await why_unreached(job, Credentials())
        assert without.startswith(f"{what}that takes agents without a secret: does it need --secret-file or --tls-cert")
        other = await why_unreached(job, Credentials(Secret(b"fedcba9876543210")))
        assert other.startswith(f"{what}with the same secret: ")

    play(test, Job())


def test_a_word_that_is_refused_leaves_no_open_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its event loop ends at once."""

    def refused(port: int) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with pytest.raises(OperationalError, match="needs no word"):
                asyncio.run(grant("127.0.0.1", port, "job", CREDENTIALS, DEADLINE_S))
            gc.collect()
        return [str(each.message) for each in told if each.category is ResourceWarning]

    answer = decision_server.CoordinatorServer.grant

    def answer_and_stand_still(self: Any, name: str) -> Any:
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)  # it closes its end later
        return answer(self, name)

    monkeypatch.setattr(decision_server.CoordinatorServer, "grant", answer_and_stand_still)

    async def test(job: Job) -> None:
        await found(job)
        assert await asyncio.to_thread(refused, job.port) == []

    play(test, Job())


# OFFICE
def test_the_operators_word_lets_a_restarted_coordinator_go_on_without_an_agent() -> None:
    async def test(job: Job) -> None:
        a, b = await found(job)
        with pytest.raises(OperationalError, match="it refuses: job job needs no word: this coordinator leads it"):
            await word(job)
        await job.stop()
        await b.client.stop()
        job.founds = False
        server = await job.start()
        a.end_generation()
        await until(lambda: (state := server.state_of("job")) is not None and state.newest.decision is not None)
        state = server.state_of("job")
        assert state is not None
        await until(lambda: state.word_awaited == "agent b of the last record has not come back")
        assert not state.in_office
        assert await word(job) == (
            "job job: this coordinator leads it on from generation 1, without agent b once its silence has lasted"
        )
        assert (await a.next()).agents == ("a",)

    play(test, Job())


def test_a_word_for_a_job_without_agents_is_refused() -> None:
    async def test(job: Job) -> None:
        with pytest.raises(OperationalError, match="no agent of job other has a session with this coordinator"):
            await word(job, "other")
        assert job.server is not None
        assert job.server.num_jobs == 0

    play(test, Job())


def test_a_word_for_a_job_whose_agents_are_away_is_refused() -> None:
    async def test(job: Job) -> None:
        a, b = await found(job)
        await job.stop()
        await b.client.stop()
        job.founds = False
        server = await job.start()
        await until(lambda: (state := server.state_of("job")) is not None and state.newest.decision is not None)
        await a.client.stop()
        state = server.state_of("job")
        assert state is not None
        await until(lambda: not state.sessions.begun)
        with pytest.raises(OperationalError, match="no agent of job job has a session with this coordinator"):
            await word(job)
        assert not state.in_office

    play(test, Job())


class Silent:
    """An agent that has connected and said nothing yet."""

    def opened(self, connection: Connection) -> None: ...

    def received(self, connection: Connection, payload: bytes) -> None: ...

    def closed(self, connection: Connection, reason: str) -> None: ...


# OFFICE
def test_a_word_is_refused_while_an_agent_has_not_said_what_it_knows() -> None:
    async def test(job: Job) -> None:
        server = job.server
        assert server is not None
        connection = ClientConnection(Silent(), Identity("job", AGENT, PROTOCOL), CREDENTIALS.key)
        await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", job.port)
        await until(lambda: server.state_of("job") is not None)
        state = server.state_of("job")
        assert state is not None
        with pytest.raises(OperationalError, match="an agent of job job is connecting: try again"):
            await word(job)
        assert not state.in_office
        connection.send(encode(Hello("a", "incarnation", 1)))
        await until(lambda: state.sessions.begun)
        assert await word(job) == "job job: this coordinator founds it"
        connection.close()

    play(test, Job(founds=False))


class Impostor:
    """An agent that gives the operator's word."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def opened(self, connection: Connection) -> None:
        connection.send(encode(GrantOffice()))

    def received(self, connection: Connection, payload: bytes) -> None: ...

    def closed(self, connection: Connection, reason: str) -> None:
        self.ended.set()


def test_an_operator_needs_the_secret_and_an_agent_is_none() -> None:
    async def test(job: Job) -> None:
        with pytest.raises(OperationalError, match="it closed the connection during the handshake"):
            await word(job, credentials=Credentials(Secret(b"another secret of it")))
        impostor = Impostor()
        connection = ClientConnection(impostor, Identity("job", AGENT, PROTOCOL), CREDENTIALS.key)
        await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", job.port)
        await impostor.ended.wait()
        assert any("KeyError" in line for line in job.log)
        assert job.server is not None
        state = job.server.state_of("job")
        assert state is None or not state.in_office

    play(test, Job(founds=False))


def test_the_command_says_what_the_coordinator_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(CREDENTIALS.key)
    monkeypatch.setenv(SECRET_FILE_VARIABLE, str(secret))

    async def test(job: Job) -> None:
        arguments = ["grant", "--coordinator", f"127.0.0.1:{job.port}", "--job-id", "job"]
        assert await asyncio.to_thread(cli.main, arguments) == 1
        assert "start the agents first" in capsys.readouterr().err
        a = job.add("a")
        await until(lambda: a.hosts)
        assert await asyncio.to_thread(cli.main, arguments) == 0
        assert capsys.readouterr().out == "job job: this coordinator founds it\n"

    play(test, Job(founds=False))


# -- addresses


# ADDRESS-ALL, CLIENT-REFUSED
def test_a_refusal_by_one_address_of_several_is_none() -> None:
    errors: dict[str, OSError] = {"10.0.0.1": ConnectionRefusedError(), "10.0.0.2": TimeoutError("timed out")}
    failure = failure_of(errors)
    assert not isinstance(failure, ConnectionRefusedError)
    assert str(failure) == "no address answers: 10.0.0.1: Connection refused; 10.0.0.2: timed out"


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let `NAME` have these addresses."""
    resolve = socket.getaddrinfo

    def resolved(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != NAME:
            return resolve(host, *arguments, **options)
        return [found for each in addresses for found in resolve(each, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


# ADDRESS-ALL
def test_a_refusal_by_every_address_is_a_refusal_and_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "127.0.0.1", "127.0.0.2")
    with reserved_port() as port:
        reasons, has_refused = dial(NAME, port, monkeypatch)
    assert reasons[0] == (
        f"nothing listens at {NAME}:{port} (every address refuses: 127.0.0.1: Connection refused; "
        "127.0.0.2: Connection refused)"
    )
    assert has_refused


# ADDRESS-ALL, ADDRESS-TIME
def test_an_address_that_does_not_answer_keeps_nobody_from_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent, an operator, and who waits for a coordinator to listen."""
    resolve_to(monkeypatch, "127.0.0.2", "127.0.0.1")

    async def test(job: Job) -> None:
        agent = Agent("a", job.port)
        client = AgentClient(agent.session, agent, (NAME, job.port), "job", CREDENTIALS)
        with full_listener("127.0.0.2", job.port):
            client.start()
            await until(lambda: agent.hosts)
            assert agent.reasons == []
            assert await grant(NAME, job.port, "job", CREDENTIALS, PROMPT_S) == "job job: this coordinator founds it"
            await asyncio.to_thread(probe, NAME, job.port, 1.0)
            await client.stop()

    play(test, Job(founds=False))


# CLIENT-REFUSED
def test_an_address_that_cannot_be_reached_has_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons, has_refused = dial("255.255.255.255", 9, monkeypatch)
    assert reasons[0].startswith("the coordinator at 255.255.255.255:9 cannot be reached: OSError")
    assert not has_refused


def dial(host: str, port: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], bool]:
    """What an agent is told of two attempts to connect, and whether they count as refused."""
    reasons: list[str] = []
    events: list[Any] = []

    async def run() -> None:
        agent = Agent("a", port)
        agent.reasons = reasons
        handle = agent.session.handle

        def seen(event: Any, now_s: float) -> Any:
            events.append(event)
            return handle(event, now_s)

        monkeypatch.setattr(agent.session, "handle", seen)
        client = AgentClient(agent.session, agent, (host, port), "job", CREDENTIALS)
        client.start()
        await asyncio.wait_for(until(lambda: len(reasons) >= 2), DEADLINE_S)
        await client.stop()

    asyncio.run(run())
    return reasons, any(isinstance(event, ConnectionRefused) for event in events)
