"""A coordinator that can be killed, and agents whose ranks are nothing but names, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticgang.coordinator.decision_server import CoordinatorServer, ServerOptions
from elasticgang.coordinator.state_directory import StateDirectory
from elasticgang.layout import ParallelLayout
from elasticgang.protocol import agent_events
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.coordinator_messages import (
    EndGeneration,
    Notify,
    Timeouts,
    Welcome,
)
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.record import NO_RECORD, MemberReport, Record, Report
from elasticgang.protocol.rendezvous_keys import RendezvousKeys
from elasticgang.session.agent_client import AgentClient
from elasticgang.session.credentials import Credentials
from elasticgang.session.secret import Secret

DEADLINE_S = 60.0
# Fast, so that a silent agent is lost within the test; but a machine that stands still for a second ends no lease and
# no session.
QUICK = Timeouts(lease_s=4.0, grace_s=0.2, lost_after_s=5.0, heartbeat_s=0.1, answer_s=2.0, founding_s=2.0)
# Where no agent is to be lost.
PATIENT = replace(QUICK, lease_s=DEADLINE_S, lost_after_s=2 * DEADLINE_S, answer_s=DEADLINE_S)
CREDENTIALS = Credentials(Secret(b"0123456789abcdef"))


class Agent:
    """Ranks that are nothing but names: they are ready whenever their generation is over."""

    def __init__(
        self,
        name: str,
        port: int,
        num_ranks: int = 2,
        credentials: Credentials = CREDENTIALS,
        job: str = "job",
        min_agents: int = 2,
        address: str = "",
    ) -> None:
        self.name, self.num_ranks, self.job, self.min_agents = name, num_ranks, job, min_agents
        self.address = address
        self.record: Record | None = None
        self.records: asyncio.Queue[Record] = asyncio.Queue()
        self.keys: asyncio.Queue[RendezvousKeys] = asyncio.Queue()
        self.events: list[Any] = []
        self.leases: list[float] = []
        self.hosts: list[str] = []
        self.reasons: list[str] = []
        self.is_ready = True
        self.killed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.has_event = asyncio.Event()
        self.session = AgentSession(name, incarnation=os.urandom(4).hex(), timeouts=QUICK)
        self._credentials = credentials
        self._connect(port)

    def _connect(self, port: int) -> None:
        self.client = AgentClient(self.session, self, ("127.0.0.1", port), self.job, self._credentials)

    def restart(self, port: int) -> None:
        """After its client was stopped."""
        self._connect(port)
        self.client.start()

    def start(self) -> Agent:
        self.client.start()
        self.client.request_report()
        return self

    def end_generation(self) -> None:
        assert self.record is not None
        generation = self.record.generation
        self.is_ready = True
        self.client.notify(Notify(EndGeneration(generation, EndCause("a rank is lost"))))
        self.client.request_report()

    async def next(self) -> Record:
        return await asyncio.wait_for(self.records.get(), DEADLINE_S)

    # -- what the session asks for

    def set_lease(self, until_s: float) -> None:
        self.leases.append(until_s)

    def collect_report(self) -> Report | None:
        if not self.is_ready:
            return None
        record = self.record
        tip = None if record is None else Attempt(0, 1)
        members = tuple(
            MemberReport(
                f"{self.name}/{rank}",
                rank,
                "127.0.0.1:1",
                tip,
                None,
                None if record is None else (0, 0, 0),
                0 if record is None else record.generation,
                record is not None,
            )
            for rank in range(self.num_ranks)
        )
        seen = NO_RECORD if record is None else record.ref
        return Report(
            self.name,
            self.name,
            self.job,
            ParallelLayout(),
            seen,
            members,
            min_agents=self.min_agents,
            address=self.address,
        )

    def inform(self, event: Any) -> None:
        self.events.append(event)
        self.has_event.set()
        if isinstance(event, agent_events.RecordAnswered) and isinstance(event.answer, Record):
            self.record, self.is_ready = event.answer, False
            self.records.put_nowait(event.answer)
        elif isinstance(event, agent_events.PeerNotice) and event.over and not self.is_ready:
            self.is_ready = self.record is not None and event.generation == self.record.generation
            asyncio.get_running_loop().call_soon(self.client.request_report)

    def kill_ranks(self, reason: str) -> None:
        self.killed.set_result(reason)

    def welcomed(self, welcome: Welcome, host: str) -> None:
        self.hosts.append(host)

    def receive_keys(self, message: RendezvousKeys) -> None:
        self.keys.put_nowait(message)

    def disconnected(self, reason: str) -> None:
        self.reasons.append(reason)


class Job:
    """A coordinator that can be killed and started again at its port."""

    def __init__(self, directory: Path | None = None, founds: bool = True, advertise: str = "") -> None:
        self.path, self.founds, self.advertise = directory, founds, advertise
        self.directory: StateDirectory | None = None
        self.server: CoordinatorServer | None = None
        self.port = 0
        self.log: list[str] = []
        self.failures: list[BaseException] = []
        self.agents: list[Agent] = []

    async def start(self) -> CoordinatorServer:
        self.directory = None if self.path is None else StateDirectory(self.path)
        options = ServerOptions(CREDENTIALS, self.directory, self.founds, timeouts=QUICK, advertise=self.advertise)
        self.server = CoordinatorServer(options, self.log.append, self.failures.append)
        self.port = await self.server.start("127.0.0.1", self.port)
        return self.server

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop()
        if self.directory is not None:
            self.directory.close()
        self.server = self.directory = None

    def add(self, name: str, **options: Any) -> Agent:
        agent = Agent(name, self.port, **options)
        self.agents.append(agent)
        return agent.start()


def play(test: Callable[[Job], Coroutine[Any, Any, None]], job: Job) -> None:
    async def run() -> None:
        await job.start()
        try:
            await asyncio.wait_for(test(job), DEADLINE_S)
        finally:
            for agent in job.agents:
                await agent.client.stop()
            await job.stop()
        assert job.failures == []

    asyncio.run(run())


async def found(job: Job) -> tuple[Agent, Agent]:
    a, b = job.add("a"), job.add("b")
    first = await a.next()
    assert first.generation == 1
    assert (await b.next()).digest == first.digest
    return a, b


@contextlib.contextmanager
def full_listener(host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The address of a socket whose queue is full: a further connection is neither taken nor refused."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server((host, port), backlog=0))
        address = listener.getsockname()
        for _ in range(2):  # one more than its queue takes
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        yield f"{host}:{address[1]}"
