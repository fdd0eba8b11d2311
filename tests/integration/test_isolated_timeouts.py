"""Timeouts of isolated groups, and comm processes that are lost before a configure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from elasticgang.comm import ProcessGroupIsolatedGloo, SwallowingProcessGroup
from elasticgang.errors import CollectiveTimeoutError
from tests.integration.conftest import Rings
from tests.integration.forms import rooted
from tests.integration.rings import SUM, Ring
from tests.integration.test_isolated import GUARD_S, pid, start
from tests.support import REPOSITORY, wait_until

# -- timeouts

FORMS_WITH_OPTIONS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "allreduce": (AllreduceOptions, lambda pg, opts: pg.allreduce([torch.ones(3)], opts)),
    "allreduce_coalesced": (
        AllreduceCoalescedOptions,
        lambda pg, opts: pg.allreduce_coalesced([torch.ones(3), torch.ones(4)], opts),
    ),
    "broadcast": (partial(rooted, BroadcastOptions, 1), lambda pg, opts: pg.broadcast([torch.ones(3)], opts)),
    "allgather": (AllgatherOptions, lambda pg, opts: pg.allgather([[torch.ones(3), torch.ones(3)]],
                                                                  [torch.ones(3)], opts)),
    "reduce_scatter": (
        ReduceScatterOptions,
        lambda pg, opts: pg.reduce_scatter([torch.ones(3)], [[torch.ones(3), torch.ones(3)]], opts),
    ),
    "alltoall": (AllToAllOptions, lambda pg, opts: pg.alltoall([torch.ones(3), torch.ones(3)],
                                                               [torch.ones(3), torch.ones(3)], opts)),
    "barrier": (BarrierOptions, lambda pg, opts: pg.barrier(opts)),
}  # fmt: skip


def with_timeout(kind: Callable[[], Any], seconds: float) -> Any:
    options = kind()
    options.timeout = timedelta(seconds=seconds)
    return options


@pytest.mark.parametrize("name", list(FORMS_WITH_OPTIONS))
def test_a_call_has_the_timeout_of_its_options(name: str, rings: Rings) -> None:
    kind, form = FORMS_WITH_OPTIONS[name]
    ring = rings(2, timeout=60.0)
    began = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="timed out"):
        form(ring[0], with_timeout(kind, 0.2)).wait()
    assert time.monotonic() - began < GUARD_S, "the timeout of the group"
    assert isinstance(ring[0].errored(), CollectiveTimeoutError)
    ring.configure()
    assert ring.sums() == [2.0, 2.0]


def test_a_call_has_the_timeout_that_it_is_given_by_name(rings: Rings) -> None:
    ring = rings(2, timeout=60.0)
    with pytest.raises(CollectiveTimeoutError, match="timed out"):
        ring[0].allreduce([torch.ones(3)], SUM, timeout=timedelta(seconds=0.2)).wait()


def configured_within(seconds: float, rings: Rings) -> Ring:
    """A ring of two whose configuration has that timeout. A busy machine may need several attempts."""
    ring = rings(2)
    for pg in ring.groups:
        pg.set_timeout(timedelta(seconds=seconds))

    def is_configured() -> bool:
        address = ring.next_address()
        begun = [ring.begin(lambda rank=rank: ring[rank].configure(address, "replica", rank, 2)) for rank in (0, 1)]  # type: ignore[misc]
        return not any(future.exception(GUARD_S) for future in begun)

    wait_until(is_configured, f"a configuration within {seconds} s", 60.0)
    return ring


@pytest.mark.parametrize("by", ["options", "set_timeout"])
@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter", "alltoall", "recv"])
def test_a_timeout_may_be_longer_than_the_configurations(name: str, by: str, rings: Rings) -> None:
    ring = configured_within(0.3, rings)
    if by == "set_timeout" or name == "recv":
        for pg in ring.groups:
            pg.set_timeout(timedelta(seconds=30.0))
    if name == "recv":
        tensor = torch.zeros(3)
        works = [ring[0].recv([tensor], 1, 0)]
        time.sleep(0.6)  # what would be too long otherwise
        works.append(ring[1].send([torch.ones(3)], 0, 0))
    else:
        kind, form = FORMS_WITH_OPTIONS[name]
        works = [form(ring[0], kind() if by == "set_timeout" else with_timeout(kind, 30.0))]
        time.sleep(0.6)
        works.append(form(ring[1], kind() if by == "set_timeout" else with_timeout(kind, 30.0)))
    for work in works:
        assert work.wait()
    assert [pg.errored() for pg in ring.groups] == [None, None]


def test_a_work_that_nobody_waits_for_ends_the_configuration_as_a_timeout(rings: Rings) -> None:
    ring = configured_within(0.3, rings)
    start(ring[0])
    wait_until(ring[0].errored, "its end", GUARD_S)
    assert isinstance(ring[0].errored(), CollectiveTimeoutError)
    with pytest.raises(CollectiveTimeoutError, match="timed out"):
        raise ring[0].errored()


def test_a_peer_that_does_not_come_is_a_timeout(rings: Rings) -> None:
    ring = rings(2)
    ring[0].set_timeout(timedelta(seconds=0.3))
    with pytest.raises(CollectiveTimeoutError):
        ring[0].configure(ring.next_address(), "replica", 0, 2)


# -- processes that are killed before a configure, and slow starts


def test_configure_works_though_both_processes_were_just_killed(rings: Rings) -> None:
    ring = rings(2, make=lambda: SwallowingProcessGroup(ProcessGroupIsolatedGloo(30.0)))
    for _ in range(5):
        for pg in ring.groups:
            standby = pg.parent.wait_standby(GUARD_S)
            for process in (standby.pid, pid(pg.parent)):
                os.kill(process, signal.SIGKILL)
        ring.configure()
        assert ring.sums() == [2.0, 2.0]


def test_a_standby_that_dies_while_it_is_configured_is_replaced(rings: Rings) -> None:
    """It stands still, so that it is certain to die in the middle of it."""
    ring = rings(2)
    before = ring[0].comm_process
    stopped = ring[0].wait_standby(GUARD_S)
    os.kill(stopped.pid, signal.SIGSTOP)
    ring[0].abort()
    address = ring.next_address()
    configuring = [ring.begin(lambda rank=rank: ring[rank].configure(address, "r", rank, 2)) for rank in (0, 1)]  # type: ignore[misc]
    wait_until(lambda: ring[0].comm_process is stopped, "it is at it", GUARD_S)
    os.kill(stopped.pid, signal.SIGKILL)
    for each in configuring:
        each.result(GUARD_S)
    assert ring.sums() == [2.0, 2.0]
    assert ring[0].comm_process not in (before, stopped)


# Its fork server takes longer than the timeout to start, also where torch is imported quickly.
SLOW_START = """
import sys, time
if "elasticgang.process.forkserver" in sys.orig_argv:
    time.sleep(5)
"""
COLD = """
from elasticgang.comm import create_process_group
from scripts.benches.comm import open_store
from tests.integration.rings import Ring

with open_store() as store:
    ring = Ring(lambda: create_process_group("isolated-gloo", 4.0), 1, store)
    assert ring.sums() == [1.0]
    ring.close()
"""


def test_the_first_start_does_not_count_against_the_timeout(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    command = [sys.executable, "-c", COLD]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_what_is_reduced_together_goes_to_the_comm_process_as_one(rings: Rings) -> None:
    ring = rings(2)
    tensors = [torch.ones(3) for _ in range(100)] + [torch.ones(3, dtype=torch.int64) for _ in range(100)]
    work = ring[0].allreduce_coalesced(tensors)
    assert ring[0].num_active_work() == 2  # one of each dtype
    ring[1].allreduce_coalesced([tensor.clone() for tensor in tensors]).wait()
    work.wait()
    assert all(bool((tensor == 2).all()) for tensor in tensors)
