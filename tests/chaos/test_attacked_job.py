"""An attacker reaches the ports of a running job: it loses no step, holds no more memory, and logs each attack once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticgang.coordinator.decision_server import MAX_JOBS
from elasticgang.protocol.coordinator_messages import (
    JOB_TIMEOUTS,
    Decision,
    EndGeneration,
    Heartbeat,
    Hello,
    JobFailed,
    KnownDecision,
    Term,
)
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.job_facts import AgentFacts, ScriptFailure
from elasticgang.protocol.record import PROTOCOL
from elasticgang.protocol.rendezvous_keys import Key, RendezvousKeys
from elasticgang.session.frames import FrameWriter, body_frame
from elasticgang.session.handshake import AGENT, RANK, ClientHandshake, Identity
from elasticgang.session.messages import encode
from tests.chaos.attacked import JOB_ID, AttackedJob, Session, close_all, connect, until_closed
from tests.chaos.several import SLOW_S, secret_options
from tests.integration.test_rank_rendezvous import record_of
from tests.support import wait_until

pytestmark = pytest.mark.timeout(600)

MB = 1 << 20
TIMES = 20
NUM_HALF_OPEN = 10_000
NUM_HEARTBEATS = 30_000
TWO_GB = struct.pack("!I", 2 << 30)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedJob]:
    with AttackedJob(tmp_path_factory.mktemp("attacked")) as made:
        yield made


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = NUM_HALF_OPEN + 1000
    if needed > hard != resource.RLIM_INFINITY and os.geteuid() != 0:
        pytest.skip(f"needs {needed} descriptors, and may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard if hard == resource.RLIM_INFINITY else max(hard, needed)))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def hello(role: str, secret: bytes = b"") -> bytes:
    return body_frame(ClientHandshake(Identity(JOB_ID, role, PROTOCOL), secret, b"n" * 32).hello())


# -- without the secret


@pytest.mark.parametrize(
    ("sent", "parts"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", ["1195725856 bytes", "1024"]),
        (TWO_GB + b"x" * 1000, ["2147483648 bytes", "1024"]),
        (body_frame(os.urandom(300)), ["hello"]),
        (hello(AGENT) + body_frame(b"w" * 32), ["the secret"]),
        (hello(RANK), ["role rank"]),
    ],
)
def test_the_coordinator_rejects_what_is_no_agent(job: AttackedJob, sent: bytes, parts: list[str]) -> None:
    with job.unharmed(8 * MB):
        for _ in range(TIMES):
            until_closed(connect(job.port, sent))
        assert len(job.logged(*parts)) == 1


@pytest.mark.usefixtures("many_descriptors")
def test_ten_thousand_half_open_connections(job: AttackedJob) -> None:
    opened: list[socket.socket] = []
    with job.unharmed(32 * MB):
        try:
            for _ in range(NUM_HALF_OPEN):
                opened.append(connect(job.port, hello(AGENT)[:100]))
            job.make_steps()
            assert len(job.logged("connections", "handshake")) == 1
        finally:
            close_all(opened)


def test_a_recorded_session_is_worthless(job: AttackedJob) -> None:
    with job.unharmed(8 * MB):
        for _ in range(3):
            until_closed(connect(job.port, job.relay.recorded))
        assert len(job.logged("the secret")) == 1


@pytest.mark.parametrize(("how", "reason"), [("replay", "in place of"), ("flip", "MAC")])
def test_frames_are_changed_on_their_way(job: AttackedJob, how: str, reason: str) -> None:
    """The agent opens another session."""
    agent = job.agents[1]
    with job.unharmed(8 * MB):
        num = len([event for event in agent.events() if event["event"] == "coordinator reachable"])
        job.relay.tamper(how)
        assert job.relay.tampered.wait(60.0)
        agent.expect("coordinator reachable", count=num + 1)
        assert len(job.logged(reason)) == 1


# -- with the secret


Attack = Callable[[FrameWriter], bytes]


@pytest.mark.parametrize("job_id", [JOB_ID, "another job"])
@pytest.mark.parametrize(
    ("attack", "parts"),
    [
        (lambda w: TWO_GB + b"x" * 1000, ["2147483648 bytes", "1677"]),
        (lambda w: w.frame(os.urandom(1000)), ["UnicodeDecodeError"]),
        (lambda w: w.frame(b'["Finished"]'), ["TypeError"]),
        (lambda w: w.frame(b"[" * 100_000), ["RecursionError"]),
        (lambda w: w.frame(b'["GrantOffice"]'), ["KeyError"]),
    ],
)
def test_a_session_ends_at_its_first_fault(job: AttackedJob, job_id: str, attack: Attack, parts: list[str]) -> None:
    with job.unharmed(16 * MB):
        for _ in range(TIMES):
            session = job.session(job=job_id)
            session.sock.sendall(attack(session.writer))
            until_closed(session.sock)
        assert len(job.logged(*parts)) == 1


def say_hello(job: AttackedJob, job_id: str = JOB_ID, name: str = "stranger") -> Session:
    """An agent that is in no record."""
    session = job.session(job=job_id)
    session.send(Hello(name, f"incarnation of {name}", 1))
    session.receive()  # Welcome
    return session


# SENDER, SERVE-KEYS
def test_a_stranger_speaks_for_nobody(job: AttackedJob) -> None:
    """Of the generation that runs: its end, and a rendezvous key."""
    with job.unharmed(16 * MB):
        session = say_hello(job)
        session.send(EndGeneration(1, EndCause("forged")))
        session.send(RendezvousKeys(job.prefix, ("root",), (Key("root", "0", "forged"),)))
        until_closed(session.sock)
        assert len(job.logged("rendezvous keys", "generation")) == 1


# SERVE-LOG
def test_a_forged_record_that_nobody_has_asked_for(job: AttackedJob) -> None:
    record = record_of("stranger/0", generation=2)
    with job.unharmed(16 * MB):
        for _ in range(TIMES):
            session = say_hello(job)
            session.send(KnownDecision(Decision(Term(99, "forged"), record)))
            until_closed(session.sock)
        assert len(job.logged("a decision")) == 1


# SERVE-APART
def test_a_holder_of_the_secret_in_another_job_reaches_nobody(job: AttackedJob) -> None:
    with job.unharmed(16 * MB):
        name = job.agents[0].expect("started")["agent"]
        session = say_hello(job, "yet another job", name)
        session.send(EndGeneration(1, EndCause("forged")))
        session.send(RendezvousKeys(job.prefix, ("root",), (Key("root", "0", "forged"),)))
        session.send(AgentFacts(failures=(ScriptFailure("m", 0, 1), ScriptFailure("n", 0, 1))))
        session.send(JobFailed(1, 1, "forged"))
        session.sock.close()


# SERVE-NEW
@pytest.mark.usefixtures("many_descriptors")
def test_a_holder_of_the_secret_names_too_many_jobs(job: AttackedJob) -> None:
    """More than the coordinator leads at once, most of them at the same time; the disk keeps nothing of them."""
    files = sorted(job.state_directory.iterdir())
    opened: list[socket.socket] = []
    with job.unharmed(64 * MB):
        try:
            for number in range(MAX_JOBS + 100):
                session = job.session(job=f"nobody's job {number}")
                opened.append(session.sock)
                with contextlib.suppress(ConnectionError):  # it leads `MAX_JOBS` already
                    session.send(Hello("stranger", "incarnation", 1))
            job.make_steps()
            assert len(job.logged(f"the coordinator leads {MAX_JOBS} jobs already")) == 1
        finally:
            close_all(opened)
    assert sorted(job.state_directory.iterdir()) == files


def test_a_holder_of_the_secret_sends_heartbeats_without_a_pause(job: AttackedJob) -> None:
    """Another session is answered meanwhile, before an agent would give up."""
    with job.unharmed(32 * MB):
        flooding, other = (say_hello(job, "another job", name) for name in ("flooding", "other"))
        flooding.sock.settimeout(SLOW_S)  # `sendall` has so long for all of them
        frames = [flooding.writer.frame(encode(Heartbeat(number))) for number in range(1, NUM_HEARTBEATS + 1)]
        all_read = threading.Event()

        def send() -> None:
            flooding.sock.sendall(b"".join(frames))
            number = len(frames)
            while not all_read.wait(0.2):  # its lease lasts until the last answer is read, however late that is
                number += 1
                flooding.send(Heartbeat(number))

        def receive() -> None:
            try:
                for _ in frames:
                    flooding.receive()
            finally:
                all_read.set()

        threads = [threading.Thread(target=target) for target in (send, receive)]
        for thread in threads:
            thread.start()
        waits: list[float] = []
        while threads[1].is_alive():
            sent_s = time.monotonic()
            other.send(Heartbeat(len(waits) + 1))
            other.receive()
            waits.append(time.monotonic() - sent_s)
        print(f"{len(waits)} answers, the last after {max(waits):.3f} s")
        threads[0].join(SLOW_S)
        assert max(waits) < JOB_TIMEOUTS.answer_s
        close_all([flooding.sock, other.sock])


def test_a_log_that_nobody_reads_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A stranger has it filled, with a reason of its own for each connection."""
    command = [sys.executable, "-m", "elasticgang", "coordinator", "--port", "0", *secret_options(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as coordinator:
        try:
            assert coordinator.stdout is not None
            assert coordinator.stderr is not None
            fcntl.fcntl(coordinator.stderr, fcntl.F_SETPIPE_SZ, 4096)
            port = int(coordinator.stdout.readline().rpartition(":")[2])
            for number in range(200):  # of 100 bytes and more
                until_closed(connect(port, struct.pack("!I", (1 << 30) + number)))
            session = Session(port, (tmp_path / "secret").read_bytes(), AGENT, JOB_ID)
            session.send(Hello("a", "incarnation", 1))
            assert b"Welcome" in session.receive()
            session.sock.close()
        finally:
            coordinator.kill()


def test_a_slow_reader_is_cut_off(job: AttackedJob) -> None:
    """By the coordinator once it leaves too much unread (CONN-UNREAD), or by the kernel, which on a slow machine comes
    first: it has then read nothing for 5 s (CONN-ALIVE). It sends heartbeats: otherwise its silence would end its
    session. So does who only looks on."""

    def facts(number: int) -> AgentFacts:
        names = (secrets.token_urlsafe(192) for _ in range(32))
        return AgentFacts(failures=tuple(ScriptFailure(name, 0, 32 * number + at) for at, name in enumerate(names)))

    logged_before = len(job.coordinator.stderr)

    def ends() -> list[str]:
        lines = job.coordinator.stderr[logged_before:].splitlines()
        return [line for line in lines if "bytes unread" in line or "Connection timed out" in line]

    with job.unharmed(96 * MB):
        reader, writer, other = (say_hello(job, "a slow job", name) for name in ("reader", "writer", "other"))
        try:
            other.send(facts(1 << 20))
            for session in (writer, other):
                session.receive()
            for number in range(20_000):  # 12 kB for each of them, of which the reader reads none
                writer.send(facts(number))
                for session in (writer, other):
                    session.receive()
                if number % 100 == 0:
                    if ends():
                        break
                    other.send(Heartbeat(number + 1))
                    with contextlib.suppress(ConnectionError):  # its end may come before the line that tells of it
                        reader.send(Heartbeat(number + 1))
            assert len(wait_until(ends, "the end of the reader's session")) == 1
        finally:
            close_all([reader.sock, writer.sock, other.sock])


# -- the other ports


@pytest.mark.parametrize(
    ("sent", "parts"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", ["1195725856 bytes", "1024"]),
        (TWO_GB + b"x" * 1000, ["2147483648 bytes", "1024"]),
        (hello(AGENT), ["role agent"]),
        (hello(RANK) + body_frame(b"w" * 32), ["the secret"]),
    ],
)
def test_a_rank_serves_its_state_to_no_stranger(job: AttackedJob, sent: bytes, parts: list[str]) -> None:
    with job.unharmed(16 * MB):
        port = job.ports()["rank"]
        for _ in range(TIMES):
            until_closed(connect(port, sent))
        assert len(job.logged(*parts, by=job.agents[0])) == 1


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("process", ["agent", "rank"])
def test_a_thousand_half_open_connections_to_an_agent_and_a_rank(job: AttackedJob, process: str) -> None:
    opened: list[socket.socket] = []
    with job.unharmed(32 * MB):
        try:
            port = job.ports()[process]
            for _ in range(1000):
                opened.append(connect(port, b"\0\0"))
            job.make_steps()
        finally:
            close_all(opened)
        if process == "rank":
            assert len(job.logged("connections wait to be authenticated", by=job.agents[0])) == 1


def test_afterwards_a_rank_is_lost_and_heals(job: AttackedJob) -> None:
    job.lose_rank()
