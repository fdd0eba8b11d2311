"""What isolated groups leave behind: nothing, after many configurations and after the death of their rank."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import ReduceOp

from elasticgang.comm import standby_pool
from elasticgang.comm.error_swallowing import SwallowingProcessGroup
from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
from elasticgang.comm.standby_pool import StandbyPool, local_launcher
from elasticgang.errors import OperationalError
from tests.exhaustive import exhaustive
from tests.integration.conftest import Rings
from tests.support import REPOSITORY, Command, busy_core, is_alive, run_preloaded, wait_dead, wait_until

GUARD_S = 20.0
RANKS = [sys.executable, "-m", "tests.integration.isolated_ranks"]
# Two comm processes of which the standbys are new ones, groups that are torn down beside the path, allocators' caches.
ALLOWED = {
    "processes": 0, "threads": 0, "descriptors": 2, "memfds": 2, "mappings": 2, "shm_files": 0, "rss_mb": 15,
    "comm_threads": 8, "comm_descriptors": 8, "comm_rss_mb": 40,
}  # fmt: skip


@pytest.mark.timeout(420)
@pytest.mark.parametrize("generations", [300, pytest.param(1000, marks=exhaustive)])
def test_nothing_grows_over_hundreds_of_configurations(generations: int, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_preloaded([*RANKS, "reconfigure", str(generations)], timeout=360)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\n  before, and after {generations} configurations (every 50th of them after an abort):")
        for name in ALLOWED:
            print(f"    {name:18}{found['before'][name]:10g}{found['after'][name]:10g}")
    for name, allowed in ALLOWED.items():
        assert found["after"][name] <= found["before"][name] + allowed, f"{name}; new: {new(found)}"


def new(found: dict[str, dict[str, list[str]]]) -> dict[str, list[str]]:
    """The threads, descriptors and processes that there are after it and were not before, by name."""
    before, after = found["before"], found["after"]
    return {
        name: list((Counter(after[name]) - Counter(before[name])).elements())
        for name in ("thread_names", "links", "below")
    }


# ARENA-3
def test_few_descriptors_are_enough_and_none_is_an_error_that_passes() -> None:
    done = run_preloaded([*RANKS, "with_few_descriptors"], timeout=110)
    assert done.returncode == 0, done.stderr


def test_a_group_that_is_dropped_ends_its_processes(rings: Rings) -> None:
    ring = rings(2)
    assert ring.sums() == [2.0, 2.0]
    process = weakref.ref(ring[0].comm_process)
    pidfd = os.pidfd_open(ring[0].comm_process.pid)
    standby = os.pidfd_open(ring[0].wait_standby(GUARD_S).pid)
    del ring.groups[0]
    gc.collect()
    assert wait_dead([pidfd, standby], GUARD_S) == []
    wait_until(lambda: gc.collect() >= 0 and process() is None, "the rest of it", GUARD_S)
    for fd in (pidfd, standby):
        os.close(fd)


@pytest.mark.parametrize("swallows", [False, True], ids=["plain", "swallowing"])
@pytest.mark.parametrize("operation", [ReduceOp.SUM, ReduceOp.AVG])
def test_a_group_that_is_dropped_ends_though_a_future_waits(operation: Any, swallows: bool, rings: Rings) -> None:
    """And does not wait for its deadline."""
    ring = rings(2, timeout=60.0)
    comm = ring[0].comm_process
    dropped = ring.groups.pop(0)
    if swallows:
        dropped = SwallowingProcessGroup(dropped)
    future = dropped.allreduce([torch.ones(3)], operation).get_future()
    group, process, pidfd = weakref.ref(dropped), weakref.ref(comm), os.pidfd_open(comm.pid)
    del dropped, comm
    gc.collect()
    assert wait_dead([pidfd], GUARD_S) == []
    wait_until(future.done, "the future", GUARD_S)
    assert group() is None
    del future  # its error's traceback has frames of the thread that ended it
    wait_until(lambda: gc.collect() >= 0 and process() is None, "the rest of it", GUARD_S)
    os.close(pidfd)


SHUT_DOWN = """\
import atexit, psutil
atexit.register(lambda: print(psutil.Process().children()))  # called last
from tests.integration import isolated_ranks
isolated_ranks.shut_down()
"""


def test_a_program_whose_groups_are_shut_down_ends_its_fork_server() -> None:
    """An interpreter that ends can warn of a subprocess that still runs."""
    command = [sys.executable, "-X", "dev", "-c", SHUT_DOWN]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


# STANDBY-2
def test_a_program_that_ends_without_shutdown_ends(tmp_path: Path) -> None:
    """And with it what it has started: its interpreter's end finds groups that nobody has let go of."""
    with Command(tmp_path / "rank", [*RANKS, "leave"]) as rank:
        started = json.loads(wait_until(lambda: rank.stdout, "its pids"))
        assert rank.process.wait(GUARD_S) == 0
        assert len(started) >= 3  # comm processes and the fork server
        wait_until(lambda: not any(is_alive(pid) for pid in started), "their end", GUARD_S)


# STANDBY-4
def test_a_killed_standby_is_replaced_by_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_pool, "STANDBY_RETRY_S", 0.0)
    pool = StandbyPool(local_launcher().start)
    try:
        standby = pool.wait_standby(GUARD_S)
        pool.prepare_when_due()
        assert pool.wait_standby(GUARD_S) is standby
        os.kill(standby.pid, signal.SIGKILL)
        wait_until(lambda: standby.has_died, "its death", GUARD_S)
        pool.prepare_when_due()
        assert pool.wait_standby(GUARD_S) is not standby
    finally:
        pool.close()


def test_a_comm_process_whose_replies_nobody_can_read_ends_at_once(rings: Rings) -> None:
    """Its rank has no thread left. Python 3.12.1 starts none once the interpreter has begun to end."""
    ring = rings(1)
    pg = ring[0]
    pg.wait_standby(GUARD_S)
    num_children = len(psutil.Process().children())
    usual = threading.stack_size(1 << 47)  # more than there is
    try:
        pg.abort()
        pg.configure(ring.next_address(), "replica", 0, 1)  # by the standby
        with pytest.raises(OperationalError, match="no thread is left for its replies"):
            pg.wait_standby(GUARD_S)
    finally:
        threading.stack_size(usual)
    assert ring.sums() == [1.0]
    wait_until(lambda: len(psutil.Process().children()) == num_children - 1, "one without a standby", GUARD_S)
    pg.abort()
    ring.configure()
    assert ring.sums() == [1.0]


@pytest.mark.parametrize("busy", [False, True], ids=["", "busy"])
def test_they_end_with_their_rank_whoever_holds_their_descriptors(busy: bool, store: str, tmp_path: Path) -> None:
    """After a SIGKILL in the middle of a collective, with busy DataLoader workers that inherited every
    descriptor and do not look at them."""
    peer = ProcessGroupIsolatedGloo(300.0)
    address = f"{store}/ends/{time.monotonic_ns()}"
    with Command(tmp_path / "rank", [*RANKS, "wait_for_ever", address], preloaded=True) as rank:
        peer.configure(address, "replica", 1, 2)
        told = json.loads(wait_until(lambda: rank.stdout, "its pids"))
        names = [name for name, _ in told["started"]]
        assert names.count("eg-comm") == 2  # with the standby
        assert len(told["workers"]) == 2
        pidfds = [os.pidfd_open(pid) for _, pid in told["started"]]
        with busy_core() if busy else contextlib.nullcontext():
            rank.process.kill()
            alive = wait_dead(pidfds, GUARD_S)
        assert not alive, [told["started"][pidfds.index(pidfd)] for pidfd in alive]
        assert all(os.path.exists(f"/proc/{pid}") for pid in told["workers"])  # busy all the while
        for pidfd in pidfds:
            os.close(pidfd)
    peer.shutdown()
