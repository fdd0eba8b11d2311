"""Starts and reaps an agent's processes: the fork server, the thread that talks to it, and orphans.

SUPERVISOR-1  Forks run one at a time, in the order of the requests. The supervisor replaces a fork server that has died
    or has not answered in time, and repeats the fork. The old server may have forked too: each call of a function given
    to `fork` therefore uses ids and sockets of its own, and cleans up after itself if it fails.
SUPERVISOR-2  The supervisor never reaps a process as an orphan that another part of the agent waits for, even if the
    process dies at once.
SUPERVISOR-3  Orphans are reaped on a timer, about `_REAP_S` after the signal; after a fork, if one is under way. While
    several processes end at the low priority of RANK-4, the kernel can spin in the call that reaps one of them: 0.5 s
    and more were measured where the agent's loop reaped orphans at once. A rank and the fork server are reaped at once:
    their successors wait for that.
SUPERVISOR-4  At the end, the supervisor kills all children but those that the process had before `open`, such as the
    one that serves the job's page: that one has the last events to read, and its owner ends it.
SUPERVISOR-5  The supervisor says that the agent waits for the fork server: after `SLOW_FORK_S`, or `SLOW_START_S` while
    the server imports. It says so once until a wait has ended well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psutil

from elasticgang.errors import OperationalError
from elasticgang.process.forkserver import ForkServer, Spawned
from elasticgang.process.priority import session_niceness, weigh_own_session, weigh_session

log = logging.getLogger("elasticgang")

_S = TypeVar("_S", bound=Spawned)
_T = TypeVar("_T")

SLOW_FORK_S = 5.0
SLOW_START_S = 10.0

_END_S = 2.0
_REAP_S = 0.25
_END_POLL_S = 0.002
_NUM_TRIES = 3
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


class ProcessSupervisor:
    """Belongs to the agent's event loop; only functions given to `fork` run on another thread.

    `preload`: modules that the fork server imports. `stopping`: once set, no fork server is replaced. `spawn_task`:
    runs a task whose failure ends the agent. `num_ranks`: that are to compute at once.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        preload: Sequence[str],
        stopping: threading.Event,
        spawn_task: Callable[[asyncio.Future[Any]], object],
        num_ranks: int = 1,
    ) -> None:
        self._env = {"RUST_LOG": "error", _LOG_LEVEL: os.environ.get(_LOG_LEVEL, "ERROR"), **env}
        self._preload, self._num_ranks = tuple(preload), num_ranks
        self._stopping, self._spawn_task = stopping, spawn_task
        self._thread = ThreadPoolExecutor(1, "fork")
        self._own: set[int] = set()
        self._num_forking = 0
        self._reaper: asyncio.TimerHandle | None = None
        self._has_imported = False  # the current fork server
        self._is_told = False  # SUPERVISOR-5
        self._others: frozenset[psutil.Process] = frozenset()

    def open(self) -> None:
        """Raises OperationalError: no process can be started."""
        with contextlib.suppress(OSError, psutil.Error):
            self._others = frozenset(psutil.Process().children())  # SUPERVISOR-4
        self._chosen = session_niceness()
        self._server = self._new_server()

    async def ready(self) -> None:
        await self._tell_if_slow(self._off_loop(self._make_ready))

    def kill(self) -> None:
        """Kill a fork server that has forked nothing yet."""
        self._server.process.kill()

    def stop(self) -> None:
        """Fork nothing from now on."""
        self._stopping.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """Kill the fork server, kill and reap the remaining children (SUPERVISOR-4)."""
        self.stop()
        self._server.close()
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, psutil.Error):  # no descriptor is free: try again
                children = psutil.Process().children()  # orphans too: this process is their subreaper
                if not self._end([child for child in children if child not in self._others]):
                    break
            await asyncio.sleep(_END_POLL_S)

    @staticmethod
    def _end(children: Sequence[psutil.Process]) -> bool:
        """Kill them and reap those that are dead. Whether there are any that this process may kill."""
        may_kill = False
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
                may_kill = True
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG)
        return may_kill

    async def fork(self, fork: Callable[[ForkServer], _S], *, is_own: bool) -> _S:
        """Call `fork` on the forking thread, perhaps several times (SUPERVISOR-1). `is_own`: the caller reaps the
        process and calls `release` (SUPERVISOR-2)."""
        self._num_forking += is_own
        try:
            spawned: _S = await self._tell_if_slow(self._off_loop(self._fork, fork))
            if is_own:
                self._own.add(spawned.pid)
            return spawned
        finally:
            self._num_forking -= is_own
            self.reap()

    def release(self, pid: int) -> None:
        """The caller has reaped the process."""
        self._own.discard(pid)

    def reap(self) -> None:
        """A child has ended. Comm processes and the ranks' own children are reparented to the agent: SUPERVISOR-3."""
        self._reap_server()
        if self._reaper is None:  # SUPERVISOR-3
            self._reaper = asyncio.get_running_loop().call_later(_REAP_S, self._reap)

    def _reap(self) -> None:
        self._reaper = None
        if self._num_forking:
            return  # `fork` calls `reap` then
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid in self._own:
                    return  # its owner reaps it and calls `reap` again
                server = self._server.process
                if found.si_pid == server.pid and server.returncode is None:  # else the id is that of another process
                    self._reap_server()
                    continue
                os.waitid(os.P_PID, found.si_pid, os.WEXITED)

    def _reap_server(self) -> None:
        process = self._server.process
        has_died = process.returncode is None and process.poll() is not None
        if has_died and self._has_imported and not self._stopping.is_set():  # else the next fork replaces it
            self._spawn_task(self._off_loop(self._replace_early))

    def _off_loop(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _tell_if_slow(self, future: asyncio.Future[_T]) -> _T:
        """SUPERVISOR-5."""
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(SLOW_FORK_S, self._tell_slow, True),
            loop.call_later(SLOW_START_S, self._tell_slow, False),
        ]
        try:
            result = await future
        finally:
            for timer in timers:
                timer.cancel()
        self._is_told = False
        return result

    def _tell_slow(self, only_forks: bool) -> None:
        if self._is_told or (only_forks and not self._has_imported) or self._stopping.is_set():
            return
        self._is_told = True
        pid = self._server.process.pid
        is_stopped = False
        with contextlib.suppress(psutil.Error):
            is_stopped = psutil.Process(pid).status() == psutil.STATUS_STOPPED
        doing = "is stopped" if is_stopped else "does not answer" if self._has_imported else "still imports torch"
        log.warning("waiting for the fork server (pid %d), which %s: no rank can be started meanwhile", pid, doing)

    # -- on the forking thread

    def _make_ready(self) -> None:
        weigh_own_session()
        self._wait_ready()

    def _fork(self, fork: Callable[[ForkServer], _S]) -> _S:
        for _ in range(_NUM_TRIES - 1):
            with contextlib.suppress(OperationalError):
                self._replace()
                return fork(self._server)
        self._replace()
        return fork(self._server)

    def _replace_early(self) -> None:
        with contextlib.suppress(OperationalError):  # the next fork tries again
            self._replace()

    def _replace(self) -> None:
        """Replace a fork server that is dead or does not answer. Running processes go on; the ranks notice it."""
        if not self._stopping.is_set() and (self._server.is_lost or self._server.process.poll() is not None):
            self._server.close()  # even one that still runs: its late answers must not be read
            self._server = self._new_server()
            self._wait_ready()

    def _wait_ready(self) -> None:
        weigh_session(self._server.process.pid, self._num_ranks, self._chosen)
        self._server.wait_ready()
        self._has_imported = True

    def _new_server(self) -> ForkServer:
        self._has_imported = False
        try:
            return ForkServer(self._preload, env=self._env)
        except OSError as exc:
            raise OperationalError(f"the fork server could not be started: {exc}") from exc
