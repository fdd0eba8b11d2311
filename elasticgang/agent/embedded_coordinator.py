"""The coordinator that `elasticgang run` starts for its own job, and restarts on the same address when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from elasticgang.agent.process_supervisor import ProcessSupervisor
from elasticgang.agent.rank_processes import kill_group
from elasticgang.coordinator.server import ReservedPort
from elasticgang.errors import OperationalError
from elasticgang.observe.event_names import EventName
from elasticgang.process.forkserver import ForkServerClient, Spawned
from elasticgang.process.priority import raise_priority
from elasticgang.protocol.record import Record
from elasticgang.session.credentials import Credentials

_HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
_RETRY_S = 1.0
_ENDED = b'{"error": "the coordinator exited while it was starting"}'


class CoordinatorLauncher:
    def __init__(self, credentials: Credentials) -> None:
        """Raises OperationalError: no port is free."""
        self._credentials = credentials
        self._reserved = ReservedPort(_HOST)
        self.address = f"{_HOST}:{self._reserved.port}"

    def start(self, forkserver: ForkServerClient, founds: bool) -> Spawned:
        """Blocks until it listens. `founds`: whether the job is new.

        Raises:
            OperationalError: it could not be started.
        """
        args = {
            "host": _HOST,
            "port": self._reserved.port,
            "founds": founds,
            "credentials": self._credentials.to_json(),
        }
        reader, writer = os.pipe()
        owner = os.pidfd_open(os.getpid())
        try:
            spawned = forkserver.spawn(
                "elasticgang.coordinator.server:main", args, fds=[writer, owner], name="eg-coordinator"
            )
        except BaseException:
            os.close(reader)  # a process that was started nevertheless exits when it writes to the pipe
            raise
        finally:
            os.close(writer)
            os.close(owner)
        try:
            announcement = json.loads(_read_all(reader, START_TIMEOUT_S) or _ENDED)
            if "error" in announcement:
                raise OperationalError(announcement["error"])
        except BaseException:
            signal.pidfd_send_signal(spawned.pidfd, signal.SIGKILL)
            os.close(spawned.pidfd)
            raise
        return spawned

    def close(self) -> None:
        self._reserved.close()


class EmbeddedCoordinatorCallbacks(Protocol):
    """The agent."""

    @property
    def record(self) -> Record | None: ...

    def log(self, event: EventName, **fields: Any) -> None: ...

    def warn(self, text: str) -> None: ...

    def spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that is cancelled when the agent exits, and whose failure ends the agent."""


class EmbeddedCoordinator:
    """Starts the coordinator, and restarts it whenever it dies; the agent's session brings it the newest record.
    Belongs to the agent's event loop."""

    def __init__(
        self,
        supervisor: ProcessSupervisor,
        stopping: threading.Event,
        owner: EmbeddedCoordinatorCallbacks,
        credentials: Credentials,
    ) -> None:
        """Raises as CoordinatorLauncher."""
        self._supervisor, self._stopping, self._callbacks = supervisor, stopping, owner
        self._launcher = CoordinatorLauncher(credentials)
        self._pid = 0
        self.address = self._launcher.address

    async def start(self) -> None:
        """Raises OperationalError: it could not be started."""
        founds = self._callbacks.record is None
        spawned = await self._supervisor.fork(lambda server: self._launcher.start(server, founds), is_own=False)
        self._pid = spawned.pid
        with contextlib.suppress(ProcessLookupError):  # `_on_death` will tell
            raise_priority(spawned.pid)
        asyncio.get_running_loop().add_reader(spawned.pidfd, self._on_death, spawned.pidfd)

    def kill(self) -> None:
        if self._pid:
            kill_group(self._pid)

    def close(self) -> None:
        self.kill()
        self._launcher.close()

    def _on_death(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._pid = 0
        self._supervisor.reap()
        if not self._stopping.is_set():
            self._callbacks.log("coordinator died")
            self._callbacks.spawn_task(self._restart())

    async def _restart(self) -> None:
        """Retry without a limit: the job goes on meanwhile, and `--coordinator-timeout` limits its waits."""
        reported = ""
        while True:
            try:
                return await self.start()
            except (OperationalError, OSError) as exc:  # an OSError of this process: no descriptor is left, for example
                if reported != str(exc):
                    reported = str(exc)
                    self._callbacks.warn(f"the coordinator could not be started; trying again: {exc}")
                await asyncio.sleep(_RETRY_S)


def _read_all(reader: int, timeout: float) -> bytes:
    """All data up to the end of `reader`, which is closed. Raises OperationalError: no end within `timeout` seconds."""
    deadline, received = time.monotonic() + timeout, b""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    try:
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            data = os.read(reader, 1 << 16)
            if not data:
                return received
            received += data
    finally:
        os.close(reader)
    raise OperationalError(f"the coordinator did not start within {timeout:g} s")
