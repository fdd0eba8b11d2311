"""The lease: until when the ranks of a host may take part."""

from __future__ import annotations

import os
import time

from elasticgang.process.lease import Lease


def test_without_a_coordinator_elsewhere_it_has_no_end() -> None:
    lease = Lease.create()
    assert not lease.is_expired
    assert lease.remaining_s == float("inf")


def test_it_ends_when_it_was_said_to() -> None:
    lease, now = Lease.create(), time.monotonic()
    lease.until = now + 600.0
    assert 500.0 < lease.remaining_s <= 600.0
    lease.until = now
    assert lease.is_expired


def test_another_process_sees_it() -> None:
    lease = Lease.create()
    child = os.fork()
    if child == 0:
        theirs = Lease(lease.fd)
        while not theirs.is_expired:
            time.sleep(0.001)
        os._exit(7)
    lease.until = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
