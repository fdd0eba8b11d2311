"""Starts, reads and reaps the rank processes of one host. The agent decides what their messages and exits mean.

RANK-1  The process group of a dead rank is killed before the rank is reaped, which frees the group's id for reuse.
RANK-2  An exit is reported only after the rank's last messages have been read from its socket, for `_LAST_OUTPUT_S` at
    most.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elasticgang.agent.job import Output
from elasticgang.agent.process_supervisor import ProcessSupervisor
from elasticgang.agent.rank_launch import RankLaunch
from elasticgang.errors import WireError
from elasticgang.process import framing
from elasticgang.process.stacks import StackSource
from elasticgang.process.status_page import StatusPage
from elasticgang.protocol.commit import Attempt

_NOTHING = Attempt(0, 0)
_LAST_OUTPUT_S = 0.5


@dataclass(eq=False)
class RankProcess:
    """`committed`: the newest attempt that the agent has read from the page. `status`: after the exit, as
    `Popen.returncode`."""

    member: str
    local_rank: int
    pid: int
    pidfd: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    door: socket.socket
    page: StatusPage
    stack_file: int
    committed: Attempt = _NOTHING
    status: int | None = None
    failure: dict[str, Any] | None = None
    has_joined: bool = False
    has_finished: bool = False

    def send(self, number: int) -> None:
        """Send a signal to this process alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the rank's whole process group."""
        kill_group(self.pid)

    def stack_source(self) -> StackSource | None:
        """None: the rank is dead. The source has descriptors of its own, so that a thread can read while the rank is
        reaped."""
        if self.status is not None:
            return None
        return StackSource(self.pid, os.dup(self.pidfd), os.dup(self.stack_file))


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class RankCallbacks(Protocol):
    """The agent."""

    def on_message(self, rank: RankProcess, message: dict[str, Any]) -> None:
        """Raises WireError, KeyError, TypeError or ValueError: the message is invalid. The rank is killed."""

    def on_exit(self, rank: RankProcess, died_at: float) -> None:
        """The rank is reaped and removed from the ranks. `died_at`: CLOCK_MONOTONIC seconds."""

    def spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that is cancelled when the agent exits, and whose failure ends the agent."""


class RankProcesses:
    """Belongs to the agent's event loop."""

    def __init__(self, supervisor: ProcessSupervisor, output: Output, callbacks: RankCallbacks) -> None:
        self._supervisor, self._output, self._callbacks = supervisor, output, callbacks
        self._by_member: dict[str, RankProcess] = {}
        self._shown: dict[str, int] = {}  # by traceback: the first rank that failed with it
        self._shown_whole: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._by_member)

    def __getitem__(self, member: str) -> RankProcess:
        return self._by_member[member]

    def all(self) -> list[RankProcess]:
        return list(self._by_member.values())

    def of(self, members: Sequence[str]) -> list[RankProcess]:
        """The processes of those `members` that run on this host."""
        return [self._by_member[member] for member in members if member in self._by_member]

    def pages(self) -> dict[str, StatusPage]:
        """The status pages of live ranks, by member."""
        return {member: rank.page for member, rank in self._by_member.items() if rank.status is None}

    def send(self, members: Sequence[str], kind: str, **fields: Any) -> None:
        message = framing.pack(kind, **fields)
        for rank in self.of(members):
            rank.writer.write(message)

    def kill(self) -> None:
        for rank in self.all():
            rank.kill()

    # -- start

    async def fork(self, launch: RankLaunch) -> RankProcess:
        """Start a rank. Its messages are read only from `follow` on. Raises OperationalError: it could not be
        started."""
        launched = await self._supervisor.fork(lambda server: launch.start(server, self._output), is_own=True)
        reader, writer = await asyncio.open_unix_connection(sock=launched.link)
        rank = RankProcess(
            launched.member,
            launch.local_rank,
            launched.pid,
            launched.pidfd,
            reader,
            writer,
            launched.door,
            launched.page,
            launched.stack_file,
        )
        self._by_member[rank.member] = rank
        self._output.track_steps(rank.local_rank, lambda: rank.page.committed[0])
        return rank

    def follow(self, rank: RankProcess) -> None:
        """Read its messages until it exits, then reap it."""
        listener = self._callbacks.spawn_task(self._listen(rank))
        asyncio.get_running_loop().add_reader(rank.pidfd, self._on_death, rank, listener)
        self._supervisor.reap()

    async def _listen(self, rank: RankProcess) -> None:
        try:
            while True:
                header = await rank.reader.readexactly(framing.HEADER_BYTES)
                message = framing.unpack(await rank.reader.readexactly(framing.body_size(header)))
                self._callbacks.on_message(rank, message)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except (WireError, KeyError, TypeError, ValueError) as exc:
            self._output.write_line(f"elasticgang: rank {rank.local_rank} sent an invalid message ({exc}); killing it")
            rank.kill()

    # -- exit

    def _on_death(self, rank: RankProcess, listener: asyncio.Task[None]) -> None:
        """The pidfd is readable. RANK-1."""
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        rank.kill()
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED)
            if found is not None:
                rank.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        rank.status = 1 if rank.status is None else rank.status
        os.close(rank.pidfd)
        self._supervisor.release(rank.pid)
        died_at = time.monotonic()
        self._supervisor.reap()
        self._callbacks.spawn_task(self._finish_exit(rank, listener, died_at))

    async def _finish_exit(self, rank: RankProcess, listener: asyncio.Task[None], died_at: float) -> None:
        """RANK-2."""
        await asyncio.wait([listener], timeout=_LAST_OUTPUT_S)
        listener.cancel()
        rank.writer.close()
        os.close(rank.stack_file)
        del self._by_member[rank.member]
        self._callbacks.on_exit(rank, died_at)

    def show_failure(self, rank: RankProcess) -> None:
        """Write a new traceback in full, a repeated one as one line."""
        assert rank.failure is not None
        traceback = rank.failure["traceback"]
        first = self._shown.setdefault(traceback, rank.local_rank)
        if first == rank.local_rank and traceback not in self._shown_whole:
            self._shown_whole.add(traceback)
            self._output.write_line(f"elasticgang: rank {rank.local_rank} failed:\n{traceback.rstrip()}")
        else:
            self._output.write_line(f"elasticgang: rank {rank.local_rank} failed with the traceback of rank {first}")
