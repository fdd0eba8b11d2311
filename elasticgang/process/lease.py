"""Until when the ranks of a host may take part without word from the coordinator's host.

A cut-off host must end its members before others may hold them to be dead. Its agent renews the lease; a rank looks at
it in shared memory, so that an agent that is stopped cannot keep it from ending.

LEASE-1  It runs from the moment at which an answered heartbeat began. A refused connection is an answer: the network
    is there, and the coordinator is not, so that nobody agrees on anything without this host.
LEASE-2  Others hold an agent to be dead no sooner than `LEASE_S + MARGIN_S` after they saw its count in the store grow.
LEASE-3  No reader acts on a torn value: the value is one aligned 8-byte word, and each access copies the whole word. A
    memoryview of format "d" compiles to one 8-byte load or store on x86-64 and aarch64, where such an access is atomic;
    `struct` with a byte order moves single bytes.
"""

from __future__ import annotations

import mmap
import os
import time

LEASE_S = 10.0  # a machine may give a process no share for seconds; to end its ranks for that may cost the job
MARGIN_S = 2.0  # for the ranks to end, and for clocks that run unlike

_NUM_BYTES = 8


class Lease:
    """Eight bytes of memory, of CLOCK_MONOTONIC, which all processes of a host share."""

    def __init__(self, fd: int) -> None:
        self._words = memoryview(mmap.mmap(fd, _NUM_BYTES)).cast("d")  # a mapping begins at a page: aligned
        self.fd = fd

    @staticmethod
    def create() -> Lease:
        """A lease without end, until it is renewed for the first time."""
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
        """Anew, for members that nobody has heard of yet."""
        self.until = began + LEASE_S

    def renew(self, began: float) -> bool:
        """The coordinator's host has answered what began then. False: the lease was over, and stays so: others may
        hold the members to be dead."""
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
