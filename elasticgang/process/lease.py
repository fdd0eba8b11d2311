"""The lease of a host: until when its ranks may take part without an answer from the coordinator's host.

A host that is cut off must kill its members before other agents may declare them dead. Its agent renews the lease; the
ranks read it in shared memory, so that they exit even if the agent is stopped.

LEASE-1  The lease counts from the start of the last answered heartbeat. A refused connection is an answer: the network
    works and no coordinator runs, so that no generation can be agreed without this host.
LEASE-2  Other agents declare an agent dead no sooner than `LEASE_S + MARGIN_S` after its counter in the store has
    grown.
LEASE-3  No reader acts on a torn value: the value is one aligned 8-byte word, and each access copies the whole word. A
    memoryview of format "d" compiles to one 8-byte load or store on x86-64 and aarch64, where such an access is atomic;
    `struct` with a byte order moves single bytes.
"""

from __future__ import annotations

import mmap
import os
import time

LEASE_S = 10.0  # a loaded machine may not schedule a process for seconds, which must not kill its ranks
MARGIN_S = 2.0  # for the ranks to exit, and for clock drift; LEASE-2

_NUM_BYTES = 8


class Lease:
    """Eight bytes of shared memory: a time of CLOCK_MONOTONIC, which all processes of a host share (LEASE-3)."""

    def __init__(self, fd: int) -> None:
        self._words = memoryview(mmap.mmap(fd, _NUM_BYTES)).cast("d")  # a mapping begins at a page: aligned
        self.fd = fd

    @staticmethod
    def create() -> Lease:
        """A lease that does not expire before its first renewal."""
        fd = os.memfd_create("eg-lease")
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

    def begin(self, began: float) -> None:
        """Start the lease anew, for members that no record names yet."""
        self.until = began + LEASE_S

    def renew(self, began: float) -> bool:
        """LEASE-1: the coordinator's host has answered a heartbeat that began at `began`. False: the lease had expired
        before and stays so: other agents may have declared the members dead."""
        if self.is_expired:
            return False
        self.until = began + LEASE_S
        return True

    @property
    def remaining_s(self) -> float:
        return self.until - time.monotonic()

    @property
    def is_expired(self) -> bool:
        return self.remaining_s <= 0
