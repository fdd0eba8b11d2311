"""The lease: until when the ranks of a host may take part."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from elasticgang.process.lease import Lease, now_s


def test_without_a_coordinator_elsewhere_it_has_no_end() -> None:
    lease = Lease.create()
    assert not lease.is_expired
    assert lease.remaining_s == float("inf")


def test_it_ends_when_it_was_said_to() -> None:
    lease, now = Lease.create(), now_s()
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
    lease.until = now_s()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# Another time namespace, in which the host was suspended for so much longer.
_SUSPENDED = ("unshare", "--user", "--map-root-user", "--time", "--boottime")
_LOOK = "import sys; from elasticgang.process.lease import Lease; print(Lease(int(sys.argv[1])).remaining_s)"


@pytest.fixture
def can_be_suspended() -> None:
    try:
        subprocess.run([*_SUSPENDED, "1", "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"no time namespace can be made: {exc}")


# LEASE-4
@pytest.mark.parametrize("suspended_s", [0, 300, 3600])
def test_it_ends_while_the_host_is_suspended(suspended_s: int, can_be_suspended: None) -> None:
    lease = Lease.create()
    lease.until = now_s() + 600.0
    look = [*_SUSPENDED, str(suspended_s), sys.executable, "-c", _LOOK, str(lease.fd)]
    found = subprocess.run(look, check=True, capture_output=True, pass_fds=[lease.fd], timeout=60)
    assert 500.0 < float(found.stdout) + suspended_s <= 600.0


# CLIENT-LEASE
def test_on_a_host_that_was_suspended_an_agent_sets_it_by_the_same_clock(can_be_suspended: None) -> None:
    one = "tests/chaos/test_control_plane.py::test_what_ends_while_the_coordinator_is_away_is_told_on_its_return"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = [*_SUSPENDED, "3600", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", one]
    found = subprocess.run(run, env=env, capture_output=True, text=True, timeout=100)
    assert (found.returncode, "1 passed" in found.stdout) == (0, True), found.stdout[-3000:]
