"""Lets a restarted rank wait for the memory of the dead one on its device.

MEMORY-1  A rank starts on a device only after the former rank there is gone with its process group (comm processes,
    data workers), and NVML no longer lists the rank; after `MEMORY_TIMEOUT_S` in any case, with a warning. Without NVML
    the end of the processes has to do: the driver frees the memory of a process as it exits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import psutil

from elasticgang.process.daemon_thread import in_daemon_thread

MEMORY_TIMEOUT_S = 10.0
_POLL_S = 0.02

Users = Callable[[int], "set[int] | None"]


class DeviceMemory:
    """Belongs to the agent's event loop. `users`: see `GpuMonitor`; it is called on threads."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self._former: dict[int, int] = {}  # by device: the dead rank's process group

    def left(self, device: int, group: int) -> None:
        """The rank on the device is dead; `group`: its process group, which was killed."""
        self._former[device] = group

    async def wait_free(self, device: int) -> str | None:
        """Wait for the memory of the former rank on the device (MEMORY-1). Returns a warning if it is not free."""
        if device not in self._former:
            return None
        group = self._former.pop(device)
        try:
            await asyncio.wait_for(self._wait(device, group), MEMORY_TIMEOUT_S)
        except asyncio.TimeoutError:
            return (
                f"the former process {group} on device {device}, or one of its group, has not freed its memory within "
                f"{MEMORY_TIMEOUT_S:g} s"
            )
        return None

    async def _wait(self, device: int, group: int) -> None:
        while await in_daemon_thread(self._is_used, device, group):
            await asyncio.sleep(_POLL_S)

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
