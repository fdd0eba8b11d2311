"""The lease: until when the ranks of a host may take part."""

from __future__ import annotations

import os
import time

from elasticgang.process.lease import LEASE_S, Lease


def test_without_a_coordinator_elsewhere_it_has_no_end() -> None:
    lease = Lease.create()
    assert not lease.is_expired
    assert lease.remaining_s == float("inf")


# LEASE-1
def test_it_runs_from_the_beginning_of_what_was_answered() -> None:
    lease, now = Lease.create(), time.monotonic()
    assert lease.renew(now - 1.0)
    assert LEASE_S - 1.5 < lease.remaining_s <= LEASE_S - 1.0


def test_once_over_it_stays_so_until_it_begins_anew() -> None:
    lease, now = Lease.create(), time.monotonic()
    lease.renew(now - LEASE_S - 0.1)
    assert lease.is_expired
    assert not lease.renew(now)
    assert lease.is_expired
    lease.begin(now)
    assert not lease.is_expired
    assert lease.renew(now)


def test_another_process_sees_it() -> None:
    lease = Lease.create()
    child = os.fork()
    if child == 0:
        theirs = Lease(lease.fd)
        while not theirs.is_expired:
            time.sleep(0.001)
        os._exit(7)
    lease.renew(time.monotonic() - LEASE_S - 1.0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
