"""A job that trains without an end, and the means of who attacks it: relays, connections, and sessions by hand."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from elasticgang.protocol.record import PROTOCOL
from elasticgang.session.frames import FrameWriter, body_frame
from elasticgang.session.handshake import ClientHandshake, Identity
from elasticgang.session.messages import Message, encode
from tests.chaos.several import Coordinator, secret_options
from tests.chaos.training_scripts import training
from tests.support import Command, Job, kill, wait_until

HOST = "127.0.0.1"
JOB_ID = "job"
_GUARD_S = 60.0
_MORE_STEPS = 3
_SETUP = 'steps = open(here / f"steps-{os.getpid()}", "a", buffering=1)'
_BODY = "time.sleep(0.1); print(step.index, step.generation, file=steps)"


def connect(port: int, sent: bytes = b"") -> socket.socket:
    sock = socket.create_connection((HOST, port), timeout=_GUARD_S)
    with contextlib.suppress(ConnectionError):
        sock.sendall(sent)
    return sock


def until_closed(sock: socket.socket) -> bytes:
    """What comes before the other end closes the connection."""
    received = b""
    with sock, contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            received += data
    return received


def listening_port(pid: int) -> int:
    (found,) = [each for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return int(found.laddr.port)


class Session:
    """A session with the coordinator by hand, of a holder of the secret."""

    def __init__(self, port: int, secret: bytes, role: str, job: str) -> None:
        self.sock = connect(port)
        handshake = ClientHandshake(Identity(job, role, PROTOCOL), secret, os.urandom(32))
        self.sock.sendall(body_frame(handshake.hello()))
        self.sock.sendall(body_frame(handshake.answer(self._body())))
        self.writer = FrameWriter(handshake.finish(self._body()).to_server)

    def send(self, message: Message) -> None:
        self.sock.sendall(self.writer.frame(encode(message)))

    def receive(self) -> bytes:
        """The next frame; its MAC is not looked at."""
        return self._body()

    def _body(self) -> bytes:
        (size,) = struct.unpack("!I", self._exactly(4))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.sock.recv(size - len(data))
            assert part, "the coordinator has closed the session"
            data += part
        return data


class Relay:
    """A wire between an agent and the coordinator, on which frames of the agent can be changed."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"
        self.recorded = b""  # what the agent sent in its newest connection
        self._tamper = "no"
        self.tampered = threading.Event()
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=function, args=args, daemon=True))
        self._threads[-1].start()

    def tamper(self, how: str) -> None:
        """With the next bytes of the agent: "replay" sends them twice, "flip" changes the last bit."""
        self.tampered.clear()
        self._tamper = how

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                agent, _ = self._listener.accept()
                coordinator = connect(self._to)
                for sock in (agent, coordinator):
                    sock.settimeout(None)
                self.recorded = b""
                self._run(self._forward, agent, coordinator, True)
                self._run(self._forward, coordinator, agent, False)

    def _forward(self, source: socket.socket, target: socket.socket, is_agent: bool) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if is_agent:
                    self.recorded += data
                    data = self._changed(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def _changed(self, data: bytes) -> bytes:
        how, self._tamper = self._tamper, "no"
        if how == "no":
            return data
        self.tampered.set()
        return data + data if how == "replay" else data[:-1] + bytes([data[-1] ^ 1])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(_GUARD_S)


class AttackedJob:
    """Two agents of one rank each, the second one behind a relay. As a context manager, ends everything."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._options = secret_options(directory)
        self.secret = (directory / "secret").read_bytes()
        self.coordinator = self._stack.enter_context(
            Coordinator(directory / "coordinator", state=True, credentials=self._options)
        )
        self.state_directory = directory / "coordinator" / "state"
        self.port = self.coordinator.port
        self.relay = Relay(self.port)
        self._stack.callback(self.relay.close)
        self.agents = [self._start("one", self.coordinator.address), self._start("other", self.relay.address)]
        for agent in self.agents:
            agent.expect("entered", generation=1)
        self.make_steps()

    def _start(self, name: str, coordinator: str) -> Job:
        directory = self._directory / name
        directory.mkdir()
        path = training(directory, steps=1_000_000, setup=_SETUP, body=_BODY)
        options = ["--coordinator", coordinator, "--nnodes", "2:2", "--job-id", JOB_ID, *self._options]
        return self._stack.enter_context(Job(directory, path, ranks=1, options=options))

    def session(self, role: str = "agent", job: str = JOB_ID) -> Session:
        return Session(self.port, self.secret, role, job)

    @property
    def prefix(self) -> str:
        """Of the rendezvous keys of generation 1."""
        digest = self.agents[0].expect("generation", generation=1)["digest"]
        return f"{JOB_ID}/1/{digest}"

    def ports(self) -> dict[str, int]:
        """Where the processes of the first agent listen."""
        agent = self.agents[0]
        return {"agent": listening_port(agent.process.pid), "rank": listening_port(agent.rank_pid(0))}

    def steps(self, agent: Job) -> list[tuple[int, int]]:
        """Each attempt of its first rank: step and generation."""
        pid = next(event["pid"] for event in agent.events() if event["event"] == "spawned")
        text = (agent.directory / f"steps-{pid}").read_text()
        return [(int(step), int(generation)) for step, generation in map(str.split, text.splitlines()[:-1])]

    def make_steps(self) -> None:
        for agent in self.agents:
            wait_until((agent.directory / f"steps-{agent.rank_pid(0)}").exists, "its first step")
        most = [len(self.steps(agent)) + _MORE_STEPS for agent in self.agents]
        wait_until(
            lambda: all(len(self.steps(agent)) > num for agent, num in zip(self.agents, most, strict=True)),
            "further steps",
        )

    @contextlib.contextmanager
    def unharmed(self, most_bytes: int) -> Iterator[None]:
        """The job loses no step meanwhile, and no process of it ever holds `most_bytes` more than before."""
        pids = [self.coordinator.process.pid]
        pids += [pid for agent in self.agents for pid in (agent.process.pid, agent.rank_pid(0))]
        before = {pid: _forget_peak(pid) for pid in pids}
        yield
        self.make_steps()
        for agent in self.agents:
            steps = self.steps(agent)
            assert steps == [(index, 1) for index in range(len(steps))]
        more = {pid: _peak(pid) - before[pid] for pid in pids}
        print(f"at most {max(more.values()) >> 10} kB more: {more}; the coordinator is {pids[0]}")
        assert max(more.values()) < most_bytes

    def logged(self, *parts: str, by: Command | None = None) -> list[str]:
        """The lines of `by`, the coordinator by default, that have all `parts`, once there is one."""
        process = by or self.coordinator

        def found() -> list[str]:
            return [line for line in process.stderr.splitlines() if all(part in line for part in parts)]

        return wait_until(found, f"a line with {parts}")

    def lose_rank(self) -> None:
        """Another one takes its place, heals from the other agent's rank, and trains on. It may start so early that the
        next generation has it already."""
        agent = self.agents[0]
        kill(agent.rank_pid(0))
        started = agent.expect("spawned", count=2)
        agent.expect("healed", member=started["member"])
        path = agent.directory / f"steps-{started['pid']}"
        wait_until(lambda: path.exists() and path.read_text().count("\n") > _MORE_STEPS, "steps of the new rank")

    def __enter__(self) -> AttackedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


def close_all(socks: Sequence[socket.socket]) -> None:
    for sock in socks:
        sock.close()


def _forget_peak(pid: int) -> int:
    """The bytes that the process holds now; its peak counts from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status(pid, "VmRSS")


def _peak(pid: int) -> int:
    return _status(pid, "VmHWM")


def _status(pid: int, name: str) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10
