"""Leads a job of names, once, in a process that forks coordinators (FORK-7).

What a coordinator does first fills caches and writes to the code of what it calls. In a fork each such write copies a
page. This coordinator and its one agent live for a few milliseconds, on a port of the loopback interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

from elasticgang.coordinator.server import CoordinatorOptions, serve
from elasticgang.errors import OperationalError
from elasticgang.layout import ParallelLayout
from elasticgang.process.parent_death import signal_at_parent_death
from elasticgang.protocol.agent_events import RecordAnswered
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.coordinator_messages import (
    EMBEDDED_TIMEOUTS,
    EndGeneration,
    JoinRequest,
    Notify,
    Welcome,
)
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.record import NO_RECORD, MemberReport, Record, Report
from elasticgang.protocol.rendezvous_keys import RendezvousKeys
from elasticgang.session.agent_client import AgentClient
from elasticgang.session.credentials import Credentials

_LIMIT_S = 1.0
_NAME = "rehearsal"
_NUM_RANKS = 4


def rehearse() -> None:
    """Found a job, lose a rank and take one in. It goes on without if it fails: without a loopback interface or
    descriptors, say. It sets no event loop for this thread, as `asyncio.run` does: `asyncio.get_event_loop` would raise
    in forks."""
    with contextlib.suppress(Exception):
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(asyncio.wait_for(_lead(), _LIMIT_S))
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left))
            loop.close()


async def _lead() -> None:
    loop = asyncio.get_running_loop()
    address: asyncio.Future[str] = loop.create_future()
    options = CoordinatorOptions("127.0.0.1", 0, grace_s=0.0, timeouts=EMBEDDED_TIMEOUTS)
    serving = asyncio.ensure_future(serve(options, lambda line: None, address.set_result))
    either: list[asyncio.Future[Any]] = [serving, address]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not address.done():
        return await serving  # which raises
    port = int(address.result().rpartition(":")[2])
    pid = os.fork()  # so that this process calls only what a coordinator does
    if not pid:
        _run_agent(port)
    try:
        agent = os.pidfd_open(pid)
        try:
            loop.add_reader(agent, serving.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        finally:
            loop.remove_reader(agent)
            os.close(agent)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run_agent(port: int) -> NoReturn:
    """In a process of its own, which ends with the session at the latest."""
    sys.setprofile(None)
    try:
        signal_at_parent_death(signal.SIGKILL)
        asyncio.run(asyncio.wait_for(_Agent(port).run(), _LIMIT_S))
    finally:
        os._exit(0)


class _Agent:
    """Its ranks are nothing but names. It has a report whenever it is asked for one."""

    def __init__(self, port: int) -> None:
        self._members = [f"{_NAME}/{rank}" for rank in range(_NUM_RANKS)]
        self._record: Record | None = None
        self._answers: asyncio.Queue[object] = asyncio.Queue()
        session = AgentSession(_NAME, _NAME, EMBEDDED_TIMEOUTS)
        self.client = AgentClient(session, self, ("127.0.0.1", port), _NAME, Credentials())

    async def run(self) -> None:
        self.client.start()
        record = await self._next()
        self.client.send_keys(RendezvousKeys(record.prefix, ("root",), ()))
        lost = self._members.pop()
        self._end(record)
        record = await self._next()
        self.client.notify(Notify(JoinRequest(record.generation)))
        self._members.append(f"{lost}/2")
        self._end(record)
        await self._next()

    def _end(self, record: Record) -> None:
        self.client.notify(Notify(EndGeneration(record.generation, EndCause("a rank is lost or joins"))))
        self.client.request_report()

    async def _next(self) -> Record:
        answer = await self._answers.get()
        if not isinstance(answer, Record):
            raise OperationalError(f"the coordinator answers {answer}")
        self._record = answer
        return answer

    # -- the client's `SessionOwner`

    def collect_report(self) -> Report:
        record = self._record
        seats = () if record is None else record.seats_of(_NAME)
        seated = {seat.member for seat in seats}
        members = tuple(
            MemberReport(member, rank, "127.0.0.1:1", record.committed, None, (0, 0, 0), record.generation, True)
            if record is not None and member in seated
            else MemberReport(member, rank, "127.0.0.1:1")
            for rank, member in enumerate(self._members)
        )
        return Report(
            _NAME,
            _NAME,
            _NAME,
            ParallelLayout(),
            NO_RECORD if record is None else record.ref,
            members,
            exited=tuple(member for member in seated if member not in self._members),
            num_ranks=_NUM_RANKS,
        )

    def inform(self, event: object) -> None:
        if isinstance(event, RecordAnswered):
            self._answers.put_nowait(event.answer)

    def set_lease(self, until_s: float) -> None: ...

    def kill_ranks(self, reason: str) -> None: ...

    def welcomed(self, welcome: Welcome, host: str) -> None: ...

    def receive_keys(self, message: RendezvousKeys) -> None: ...

    def disconnected(self, reason: str) -> None:
        self._answers.put_nowait(reason)
