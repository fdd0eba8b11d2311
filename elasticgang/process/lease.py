"""The lease of a host: until when its ranks may take part without an answer from the coordinator.

A host that is cut off must kill its members before other agents may declare them dead. Its agent renews the lease; the
ranks read it in shared memory, so that they exit even if the agent is stopped.

LEASE-1  The lease counts from the moment at which an answered message was sent; `protocol/agent_session.py` decides
    which messages count.
LEASE-2  Its end kills the ranks before the coordinator may declare their agent lost (`Timeouts`).
LEASE-3  No reader acts on a torn value: the value is one aligned 8-byte word, and each access copies the whole word. A
    memoryview of format "d" compiles to one 8-byte load or store on x86-64 and aarch64, where such an access is atomic;
    `struct` with a byte order moves single bytes.
LEASE-4  The lease is a time of CLOCK_BOOTTIME, and so is all that it is computed from: that clock also counts while the
    host is suspended. By CLOCK_MONOTONIC a host that resumes after an hour would go on for seconds, while others have
    declared its agent lost.
"""

from __future__ import annotations

import mmap
import os
import time

FILE_NAME = "elasticgang-lease"

_NUM_BYTES = 8


def now_s() -> float:
    """LEASE-4."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """Eight bytes of shared memory: a time by `now_s`, which all processes of a host share (LEASE-3)."""

    def __init__(self, fd: int) -> None:
        self._words = memoryview(mmap.mmap(fd, _NUM_BYTES)).cast("d")  # a mapping begins at a page: aligned
        self.fd = fd

    @staticmethod
    def create() -> Lease:
        """A lease that does not expire before its first renewal."""
        fd = os.memfd_create(FILE_NAME)
        os.ftruncate(fd, _NUM_BYTES)
        lease = Lease(fd)
        lease.until = float("inf")
        return lease

    @property
    def until(self) -> float:
        return self._words[0]

    @until.setter
    def until(self, until: float) -> None:
        self._words[0] = until

    @property
    def remaining_s(self) -> float:
        return self.until - now_s()

    @property
    def is_expired(self) -> bool:
        return self.remaining_s <= 0
