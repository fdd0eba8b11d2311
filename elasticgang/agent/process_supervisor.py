"""Starts and reaps an agent's processes: the fork server, the thread that talks to it, and orphans.

SUPERVISOR-1  Forks run one at a time, in the order of the requests. A fork server that has died, or has not answered in
    time, is replaced, and the new one repeats the fork. The old one may have forked too: each try of a function given
    to `fork` therefore uses ids and sockets of its own, and ends what a failed try has left.
SUPERVISOR-2  A process that was forked here and is awaited elsewhere is never reaped as an orphan, even if it dies at
    once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psutil

from elasticgang.errors import OperationalError
from elasticgang.process.forkserver import ForkServer, Spawned

_S = TypeVar("_S", bound=Spawned)

_END_S = 2.0
_END_POLL_S = 0.002
_NUM_TRIES = 3


class ProcessSupervisor:
    """Of one agent; for its loop's thread, but for what is handed to `fork`. `stopping`: nothing is replaced any more.
    `spawn_task`: as a task with which the agent fails. `preload`: the modules that the fork server imports."""

    def __init__(
        self,
        env: Mapping[str, str],
        preload: Sequence[str],
        stopping: threading.Event,
        spawn_task: Callable[[asyncio.Future[Any]], object],
    ) -> None:
        self._env = {"RUST_LOG": "error", "TORCH_CPP_LOG_LEVEL": "ERROR", **env}
        self._preload = tuple(preload)
        self._stopping, self._spawn_task = stopping, spawn_task
        self._thread = ThreadPoolExecutor(1, "fork")
        self._own: set[int] = set()
        self._num_forking = 0
        self._has_imported = False  # the present server

    def open(self) -> None:
        """Raises OperationalError: no process can be started."""
        self._server = self._new_server()

    async def ready(self) -> None:
        await self._off_loop(self._wait_ready)

    def kill(self) -> None:
        """Nothing has been forked yet, and nothing shall be."""
        self._server.process.kill()

    def stop(self) -> None:
        """Nothing is forked from here on."""
        self._stopping.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """End the fork server, and reap all that is left."""
        self.stop()
        self._server.close()
        deadline = time.monotonic() + _END_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is None:
                    with contextlib.suppress(OSError, psutil.Error):  # no descriptor is left to look with: once more
                        for child in psutil.Process().children():  # orphans too: this process is their subreaper
                            with contextlib.suppress(psutil.NoSuchProcess):
                                child.kill()
                    await asyncio.sleep(_END_POLL_S)

    async def fork(self, fork: Callable[[ForkServer], _S], *, is_own: bool) -> _S:
        """`fork`, on the forking thread, perhaps several times (SUPERVISOR-1). `is_own`: it is waited for elsewhere,
        until `release` (SUPERVISOR-2)."""
        self._num_forking += is_own
        try:
            spawned: _S = await self._off_loop(self._fork, fork)
            if is_own:
                self._own.add(spawned.pid)
            return spawned
        finally:
            self._num_forking -= is_own

    def release(self, pid: int) -> None:
        """It has been reaped."""
        self._own.discard(pid)

    def reap(self) -> None:
        """Comm processes and the ranks' own children are reparented to the agent; nobody else waits for them."""
        if self._num_forking:
            return  # whoever forks looks here again
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid in self._own:
                    return  # its own reader reaps it, and then looks here again
                if found.si_pid == self._server.process.pid:
                    self._server.process.wait()
                    if self._has_imported and not self._stopping.is_set():  # else the next fork replaces it
                        self._spawn_task(self._off_loop(self._replace_early))
                    continue
                os.waitid(os.P_PID, found.si_pid, os.WEXITED)

    def _off_loop(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    # -- on the forking thread

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
        """One that is dead or lost. What runs goes on; the ranks notice by themselves."""
        if not self._stopping.is_set() and (self._server.is_lost or self._server.process.poll() is not None):
            self._server.close()  # also one that still lives, or is dying: what comes from it is never heard
            self._server = self._new_server()
            self._wait_ready()

    def _wait_ready(self) -> None:
        self._server.wait_ready()
        self._has_imported = True

    def _new_server(self) -> ForkServer:
        self._has_imported = False
        try:
            return ForkServer(self._preload, env=self._env)
        except OSError as exc:
            raise OperationalError(f"the fork server could not be started: {exc}") from exc
