"""Lets a restarted rank wait for the memory of the dead one on its device.

MEMORY-1  A rank starts on a device only after the former rank there is gone with its process group (comm processes,
    data workers), and NVML no longer lists the rank; after `MEMORY_TIMEOUT_S` in any case, with a warning. Without NVML
    the end of the processes has to do: the driver frees the memory of a process as it exits.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from elasticgang.process.daemon_thread import in_daemon_thread

MEMORY_TIMEOUT_S = 10.0
LOOK_S = 0.1  # a look at NVML, whose calls may hang; the next look waits for the same call

Users = Callable[[int], "set[int] | None"]


class Memory(enum.Enum):
    """Of the former rank on a device."""

    FREE = "it has none, or there was no such rank"
    USED = "it has some"
    OVERDUE = "it has some after `MEMORY_TIMEOUT_S`, or nobody knows; nothing waits for it any longer"


@dataclass
class _Former:
    """The dead rank of a device, by its process `group`, which was killed. `until`: when the wait ends; None before the
    first look. `look`: the one under way."""

    group: int
    until: float | None = None
    look: asyncio.Future[bool] | None = None


class DeviceMemory:
    """Belongs to the agent's event loop. `users`: see `GpuMonitor`; it is called on threads."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self._former: dict[int, _Former] = {}  # by device

    def left(self, device: int, group: int) -> None:
        """The rank on the device is dead; `group`: its process group, which was killed."""
        self._former[device] = _Former(group)

    async def look(self, device: int) -> Memory:
        """Whether a rank may start on the device (MEMORY-1). Returns after `LOOK_S` at most. `MEMORY_TIMEOUT_S` runs
        from the first look."""
        former = self._former.get(device)
        if former is None:
            return Memory.FREE
        now = asyncio.get_running_loop().time
        former.until = now() + MEMORY_TIMEOUT_S if former.until is None else former.until
        former.look = former.look or in_daemon_thread(self._is_used, device, former.group)
        await asyncio.wait([former.look], timeout=LOOK_S)
        if former.look.done():
            is_used, former.look = former.look.result(), None
            if not is_used:
                self._forget(device, former)
                return Memory.FREE
        if now() < former.until:
            return Memory.USED
        self._forget(device, former)
        return Memory.OVERDUE

    def _forget(self, device: int, former: _Former) -> None:
        if self._former.get(device) is former:  # else another rank has died on it meanwhile
            del self._former[device]

    def _is_used(self, device: int, group: int) -> bool:
        users = self._users(device) or set()
        return group in users or bool(running_members(group))


def running_members(group: int) -> list[int]:
    """The ids of the live processes of a process group; one that has exited and is not reaped has no memory."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    except PermissionError:
        pass
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (OSError, psutil.Error):  # it has gone meanwhile
            continue
    return found
