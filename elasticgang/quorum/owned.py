"""The coordinator that `elasticgang run` starts for a job of its own, and starts again, on the same address, when it
has died."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import threading
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from elasticgang.comm.forkserver import ForkServerClient, Spawned
from elasticgang.errors import OperationalError
from elasticgang.quorum.coordinator import GRACE_S, Reserved
from elasticgang.quorum.decide import Record
from elasticgang.quorum.nursery import Nursery
from elasticgang.quorum.ranks import kill_group

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0
_RETRY_S = 1.0
_ENDED = b'{"error": "the coordinator ended while it was starting"}'


class OwnCoordinator:
    def __init__(self) -> None:
        """Raises OperationalError: there is no port to be had."""
        self._reserved = Reserved(_HOST)
        self.address = f"{_HOST}:{self._reserved.port}"

    def start(self, forkserver: ForkServerClient, agent: str, record: Record | None) -> Spawned:
        """Blocks until it listens, and has `record`. Other agents than `agent` are given time to come back.

        Raises:
            OperationalError: it could not be started.
        """
        records = {} if record is None else {record.job: record.text}
        is_shared = record is not None and any(other != agent for other in (*record.agents, *record.away))
        args = {
            "host": _HOST,
            "port": self._reserved.port,
            "records": records,
            "grace_s": GRACE_S if is_shared else 0.0,
        }
        reader, writer = os.pipe()
        owner = os.pidfd_open(os.getpid())
        try:
            spawned = forkserver.spawn(
                "elasticgang.quorum.coordinator:main", args, fds=[writer, owner], name="eg-coordinator"
            )
        except BaseException:
            os.close(reader)  # what may have been started all the same ends when it announces itself
            raise
        finally:
            os.close(writer)
            os.close(owner)
        try:
            told = json.loads(_read_all(reader, _START_TIMEOUT_S) or _ENDED)
            if "error" in told:
                raise OperationalError(told["error"])
        except BaseException:
            signal.pidfd_send_signal(spawned.pidfd, signal.SIGKILL)
            os.close(spawned.pidfd)
            raise
        return spawned

    def close(self) -> None:
        self._reserved.close()


class Owner(Protocol):
    """The agent."""

    @property
    def id(self) -> str: ...

    @property
    def record(self) -> Record | None: ...

    def log(self, event: str, **fields: Any) -> None: ...

    def warn(self, text: str) -> None: ...

    def run_aside(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """As a task that ends with the agent, and with which the agent fails."""


class KeptCoordinator:
    """An `OwnCoordinator` that is started again whenever it has died, with the newest record. For the agent's loop."""

    def __init__(self, nursery: Nursery, stopping: threading.Event, owner: Owner) -> None:
        """Raises as OwnCoordinator."""
        self._nursery, self._stopping, self._owner = nursery, stopping, owner
        self._own = OwnCoordinator()
        self._pid = 0
        self.address = self._own.address

    async def start(self, record: Record | None) -> None:
        """Raises OperationalError: it could not be started."""
        agent = self._owner.id
        spawned = await self._nursery.fork(lambda server: self._own.start(server, agent, record), is_own=False)
        self._pid = spawned.pid
        asyncio.get_running_loop().add_reader(spawned.pidfd, self._on_death, spawned.pidfd)

    def kill(self) -> None:
        if self._pid:
            kill_group(self._pid)

    def close(self) -> None:
        self.kill()
        self._own.close()

    def _on_death(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._pid = 0
        self._nursery.reap()
        if not self._stopping.is_set():
            self._owner.log("coordinator died")
            self._owner.run_aside(self._restart())

    async def _restart(self) -> None:
        """Again and again: the job goes on without it, and has a limit of its own for when it cannot."""
        told = ""
        while True:
            try:
                return await self.start(self._owner.record)
            except (OperationalError, OSError) as exc:  # an OSError of this process: no descriptor is left, say
                if told != str(exc):
                    told = str(exc)
                    self._owner.warn(f"the coordinator could not be started, and is tried again: {exc}")
                await asyncio.sleep(_RETRY_S)


def _read_all(reader: int, timeout: float) -> bytes:
    """What is written to `reader`, which is closed here. Raises OperationalError: it has no end within `timeout`."""
    deadline, told = time.monotonic() + timeout, b""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    try:
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            data = os.read(reader, 1 << 16)
            if not data:
                return told
            told += data
    finally:
        os.close(reader)
    raise OperationalError(f"the coordinator did not start within {timeout:g} s")
