"""The rank processes of one host: born, heard, and buried. What their words and deaths mean is the agent's to say.

Z1  The process group of a dead rank is killed before the reaping frees its id for others.
Z2  A death is told after the last words of the dead one have been heard: they are in its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elasticgang.comm.page import Page
from elasticgang.errors import WireError
from elasticgang.quorum import wire
from elasticgang.quorum.commit import Attempt
from elasticgang.quorum.job import Output
from elasticgang.quorum.newborn import Birth
from elasticgang.quorum.nursery import Nursery
from elasticgang.quorum.stacks import StackSource

_NOTHING = Attempt(0, 0)
_LAST_WORDS_S = 0.5


@dataclass(eq=False)
class RankProcess:
    """`committed`: what the agent has heard of; `status`: once it is dead, as `Popen.returncode`."""

    member: str
    local_rank: int
    pid: int
    pidfd: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    page: Page
    stack_file: int
    committed: Attempt = _NOTHING
    status: int | None = None
    failure: dict[str, Any] | None = None
    has_joined: bool = False
    has_finished: bool = False

    def send(self, number: int) -> None:
        """A signal, to itself alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """With all that belongs to it."""
        kill_group(self.pid)

    def stack_source(self) -> StackSource | None:
        """None: it is dead. The descriptors are its own, so that a thread may read while the rank is buried."""
        if self.status is not None:
            return None
        return StackSource(self.pid, os.dup(self.pidfd), os.dup(self.stack_file))


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Owner(Protocol):
    """The agent."""

    def hear(self, rank: RankProcess, message: dict[str, Any]) -> None:
        """Raises WireError, KeyError, TypeError or ValueError when it is no message of a rank: it is ended."""

    def bury(self, rank: RankProcess, died_at: float) -> None:
        """It is dead, and not among the ranks any more."""

    def run_aside(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """As a task that ends with the agent, and with which the agent fails."""


class Ranks:
    """For the agent's loop alone."""

    def __init__(self, nursery: Nursery, output: Output, owner: Owner) -> None:
        self._nursery, self._output, self._owner = nursery, output, owner
        self._by_member: dict[str, RankProcess] = {}
        self._shown: dict[str, int] = {}  # who came first with a traceback
        self._shown_whole: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._by_member)

    def __getitem__(self, member: str) -> RankProcess:
        return self._by_member[member]

    def all(self) -> list[RankProcess]:
        return list(self._by_member.values())

    def of(self, members: Sequence[str]) -> list[RankProcess]:
        """Those of `members` that are here."""
        return [self._by_member[member] for member in members if member in self._by_member]

    def pages(self) -> dict[str, Page]:
        """Of those that live, by member."""
        return {member: rank.page for member, rank in self._by_member.items() if rank.status is None}

    def send(self, members: Sequence[str], kind: str, **fields: Any) -> None:
        message = wire.pack(kind, **fields)
        for rank in self.of(members):
            rank.writer.write(message)

    def kill(self) -> None:
        for rank in self.all():
            rank.kill()

    # -- birth

    async def fork(self, birth: Birth) -> RankProcess:
        """Not heard before `follow`. Raises OperationalError: it could not be started."""
        born = await self._nursery.fork(lambda server: birth.start(server, self._output), is_own=True)
        reader, writer = await asyncio.open_unix_connection(sock=born.link)
        rank = RankProcess(
            born.member, birth.local_rank, born.pid, born.pidfd, reader, writer, born.page, born.stack_file
        )
        self._by_member[rank.member] = rank
        self._output.follow(rank.local_rank, lambda: rank.page.committed[0])
        return rank

    def follow(self, rank: RankProcess) -> None:
        """Hear it from here on, and bury it in the end."""
        listener = self._owner.run_aside(self._listen(rank))
        asyncio.get_running_loop().add_reader(rank.pidfd, self._on_death, rank, listener)
        self._nursery.reap()

    async def _listen(self, rank: RankProcess) -> None:
        try:
            while True:
                header = await rank.reader.readexactly(wire.HEADER_BYTES)
                message = wire.unpack(await rank.reader.readexactly(wire.body_size(header)))
                self._owner.hear(rank, message)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except (WireError, KeyError, TypeError, ValueError) as exc:
            self._output.say(
                f"elasticgang: rank {rank.local_rank} sent what is no message of ours ({exc}); it is ended"
            )
            rank.kill()

    # -- death

    def _on_death(self, rank: RankProcess, listener: asyncio.Task[None]) -> None:
        """The pidfd is readable. Z1."""
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        rank.kill()
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED)
            if found is not None:
                rank.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        rank.status = 1 if rank.status is None else rank.status
        os.close(rank.pidfd)
        self._nursery.release(rank.pid)
        died_at = time.monotonic()
        self._nursery.reap()
        self._owner.run_aside(self._bury(rank, listener, died_at))

    async def _bury(self, rank: RankProcess, listener: asyncio.Task[None], died_at: float) -> None:
        """Z2."""
        await asyncio.wait([listener], timeout=_LAST_WORDS_S)
        listener.cancel()
        rank.writer.close()
        os.close(rank.stack_file)
        del self._by_member[rank.member]
        self._owner.bury(rank, died_at)

    def show_failure(self, rank: RankProcess) -> None:
        """A traceback whole, once; a repetition in one line."""
        assert rank.failure is not None
        traceback = rank.failure["traceback"]
        first = self._shown.setdefault(traceback, rank.local_rank)
        if first == rank.local_rank and traceback not in self._shown_whole:
            self._shown_whole.add(traceback)
            self._output.say(f"elasticgang: rank {rank.local_rank} failed:\n{traceback.rstrip()}")
        else:
            self._output.say(f"elasticgang: rank {rank.local_rank} failed as rank {first} did")
