"""Starts, reads and reaps the rank processes of one host. The agent decides what their messages and exits mean.

RANK-1  The process group of a dead rank is killed before the rank is reaped, which frees the group's id for reuse.
RANK-2  An exit is reported only after the rank's last messages have been read from its socket, for `_LAST_OUTPUT_S` at
    most; and the beginning of an exit only after those that it had sent by then. The last lines of a rank that has
    aborted are read before too, as long at most: they may name its device (CUDA-1).
RANK-3  The beginning of an exit is watched for from the moment when the rank has joined: it holds its mutex by then.
    The pidfd alone tells that the rank is gone, so that it is restarted.
RANK-4  What is left of a rank that has begun to exit gets a lower priority before its process group is killed. To free
    the memory of a rank and of its comm processes takes 20 ms of CPU and more, while its survivors need every core.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elasticgang.agent.job import Output
from elasticgang.agent.process_supervisor import ProcessSupervisor
from elasticgang.agent.rank_launch import RankLaunch
from elasticgang.agent.rank_link import RankLink
from elasticgang.process import framing
from elasticgang.process.death_watch import DeathWatch
from elasticgang.process.stacks import StackSource
from elasticgang.process.status_page import StatusPage
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.devices import NOT_JOINED, Taken
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.record import Record

_NOTHING = Attempt(0, 0)
_LAST_OUTPUT_S = 0.5
_EXIT_NICE = 10  # above the rank's own: about a tenth of the share of a rank that computes
_MAX_NICE = 19


@dataclass(eq=False)
class RankProcess:
    """`tail`: returns the last lines that it wrote. `committed`: the newest attempt that the agent has read from the
    page. `status`: after the exit, as `Popen.returncode`. `taken`: its device, once it has joined. `has_left`: when the
    others knew that it would, or because it has finished. `is_told`: the user was told why the agent kills it."""

    member: str
    local_rank: int
    pid: int
    pidfd: int
    link: RankLink
    door: socket.socket
    page: StatusPage
    stack_file: int
    tail: Callable[[], list[str]]
    watch: DeathWatch | None = None
    committed: Attempt = _NOTHING
    status: int | None = None
    failure: dict[str, Any] | None = None
    taken: Taken = NOT_JOINED
    notified: int = 0  # the newest generation of whose end it has been notified
    has_joined: bool = False
    has_left: bool = False
    is_told: bool = False

    def send(self, number: int) -> None:
        """Send a signal to this process alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the rank's whole process group."""
        kill_group(self.pid)

    def notify_end(self, generation: int, message: bytes) -> None:
        """Send the notice that the generation has ended, once for each generation."""
        if self.notified < generation:
            self.notified = generation
            self.link.send(message)

    def lower_priority(self) -> None:
        """RANK-4. Of all threads of the rank's process group. The rank is not reaped yet."""
        lower_group_priority(self.pid)

    def num_steps(self, record: Record | None) -> int:
        """The steps that the rank knows to be committed. `record`: the agent's newest one, whose steps the rank has
        loaded, or heals, if it has not committed one since."""
        step, generation = self.page.committed
        is_newer = record is not None and record.generation > generation and self.page.generation > 0
        return record.committed.step if record is not None and is_newer else step

    def stack_source(self) -> StackSource | None:
        """None: the rank is dead. The source has descriptors of its own, so that a thread can read while the rank is
        reaped."""
        if self.status is not None:
            return None
        pidfd = os.dup(self.pidfd)
        try:
            return StackSource(self.pid, pidfd, os.dup(self.stack_file))
        except OSError:
            os.close(pidfd)
            raise


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def lower_group_priority(pid: int) -> None:
    with contextlib.suppress(OSError):  # the group is gone
        nice = min(os.getpriority(os.PRIO_PROCESS, pid) + _EXIT_NICE, _MAX_NICE)
        os.setpriority(os.PRIO_PGRP, pid, nice)


class RankCallbacks(Protocol):
    """The agent."""

    @property
    def record(self) -> Record | None:
        """The newest one. Any thread may read it."""

    def on_message(self, rank: RankProcess, message: dict[str, Any]) -> None:
        """Raises WireError, KeyError, TypeError or ValueError: the message is invalid. The rank is killed."""

    def on_exit_began(self, rank: RankProcess, began_at: float) -> None:
        """The rank has begun to exit; `on_exit` follows. `began_at`: CLOCK_MONOTONIC seconds."""

    def on_exit(self, rank: RankProcess, died_at: float) -> None:
        """The rank is reaped and removed from the ranks. `died_at`: CLOCK_MONOTONIC seconds."""

    def spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that is cancelled when the agent exits, and whose failure ends the agent."""


class RankProcesses:
    """Belongs to the agent's event loop."""

    def __init__(self, supervisor: ProcessSupervisor, output: Output, callbacks: RankCallbacks) -> None:
        self._supervisor, self._output, self._callbacks = supervisor, output, callbacks
        self._by_member: dict[str, RankProcess] = {}
        self._last_optimizer_bytes = 0  # of the rank that exited last

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

    @property
    def optimizer_bytes(self) -> int:
        """What a rank of this host says of its state, as of `StatusPage`. 0: nobody has said."""
        found = [rank.page.optimizer_bytes for rank in self._by_member.values()]
        return max(found, default=0) or self._last_optimizer_bytes

    def send(self, members: Sequence[str], kind: str, **fields: Any) -> None:
        message = framing.pack(kind, **fields)
        for rank in self.of(members):
            rank.link.send(message)

    def abort(self, members: Sequence[str], generation: int, cause: EndCause, agent: str) -> None:
        """Notify the ranks, which are those of `agent`, of the end of that generation."""
        how = {"timed_out": cause.timed_out, "is_elsewhere": cause.is_elsewhere(agent)}
        message = framing.pack("abort", generation=generation, reason=cause.text(agent), **how)
        for rank in self.of(members):
            rank.notify_end(generation, message)

    def kill(self) -> None:
        for rank in self.all():
            rank.kill()

    # -- start

    async def fork(self, launch: RankLaunch) -> RankProcess:
        """Start a rank. Its messages are read only from `follow` on. Raises OperationalError: it could not be
        started."""
        launched = await self._supervisor.fork(lambda server: launch.start(server, self._output), is_own=True)
        link = await RankLink.open(launched.link)
        rank = RankProcess(
            launched.member,
            launch.local_rank,
            launched.pid,
            launched.pidfd,
            link,
            launched.door,
            launched.page,
            launched.stack_file,
            self._output.tail(launch.local_rank),
        )
        self._by_member[rank.member] = rank
        self._output.track_steps(rank.local_rank, lambda: rank.num_steps(self._callbacks.record))
        return rank

    def follow(self, rank: RankProcess) -> None:
        """Read its messages until it exits, then reap it."""
        rank.link.follow(
            lambda message: self._callbacks.on_message(rank, message), lambda exc: self._on_invalid(rank, exc)
        )
        asyncio.get_running_loop().add_reader(rank.pidfd, self._on_death, rank)
        self._supervisor.reap()

    def _on_invalid(self, rank: RankProcess, exc: Exception) -> None:
        self._output.write_line(f"elasticgang: rank {rank.local_rank} sent an invalid message ({exc}); killing it")
        rank.is_told = True
        rank.kill()

    def watch(self, rank: RankProcess) -> None:
        """Report when the rank begins to exit (RANK-3)."""
        loop = asyncio.get_running_loop()

        def on_death() -> None:
            began_at = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent exits
                loop.call_soon_threadsafe(self._on_exit_began, rank, began_at)

        rank.watch = rank.watch or DeathWatch(rank.page.mutex, on_death, f"death-watch-{rank.local_rank}")

    def _on_exit_began(self, rank: RankProcess, began_at: float) -> None:
        """RANK-2."""

        def report() -> None:
            if rank.status is None:
                self._callbacks.on_exit_began(rank, began_at)

        rank.link.when_read(report)

    # -- exit

    def _on_death(self, rank: RankProcess) -> None:
        """The pidfd is readable. RANK-1."""
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        rank.kill()
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED)
            if found is not None:
                rank.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        rank.status = 1 if rank.status is None else rank.status
        os.close(rank.pidfd)
        if rank.watch is not None:
            rank.watch.close()
        self._supervisor.release(rank.pid)
        died_at = time.monotonic()
        self._supervisor.reap()
        self._callbacks.spawn_task(self._finish_exit(rank, died_at))

    async def _finish_exit(self, rank: RankProcess, died_at: float) -> None:
        """RANK-2."""
        await rank.link.wait_closed(_LAST_OUTPUT_S)
        if rank.status == -signal.SIGABRT:
            await self._read_output(rank)
        rank.link.close()
        os.close(rank.stack_file)
        self._last_optimizer_bytes = rank.page.optimizer_bytes or self._last_optimizer_bytes
        del self._by_member[rank.member]
        self._callbacks.on_exit(rank, died_at)

    async def _read_output(self, rank: RankProcess) -> None:
        loop, is_read = asyncio.get_running_loop(), asyncio.Event()

        def on_read() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent exits
                loop.call_soon_threadsafe(is_read.set)

        self._output.when_read(rank.local_rank, on_read)
        with contextlib.suppress(asyncio.TimeoutError):  # who reads this command's output stands still
            await asyncio.wait_for(is_read.wait(), _LAST_OUTPUT_S)
