"""Forked children of a process with groups, as the workers of a DataLoader are. The parent's groups go on."""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from elasticgang.errors import InvalidOperationError
from tests.integration.conftest import Rings
from tests.integration.rings import SUM, Ring

GUARD_S = 20


def in_child(function: Callable[[], None]) -> int:
    """The exit code of a forked child that calls `function`: 0, or 1 if it raises."""
    gc.collect()  # what former tests have left: the end of a group of Gloo waits for threads, which a child lacks
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(GUARD_S)
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def drop(ring: Ring) -> None:
    ring.groups.clear()
    gc.collect()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()


def use(pg: Any) -> None:
    with pytest.raises(InvalidOperationError):
        pg.allreduce([torch.ones(4)], SUM)
    with pytest.raises(InvalidOperationError):
        pg.configure("127.0.0.1:1/prefix", "replica", 0, 2)


# COMM-7
@pytest.mark.parametrize(
    "act",
    [drop, lambda ring: ring[0].shutdown(), lambda ring: ring[0].abort(), lambda ring: use(ring[0])],
    ids=["drop", "shutdown", "abort", "use"],
)
def test_a_child_does_not_disturb_an_isolated_group(act: Callable[[Ring], None], rings: Rings) -> None:
    ring = rings(2)
    assert ring.sums() == [2.0, 2.0]
    assert in_child(lambda: act(ring)) == 0
    assert ring.sums() == [2.0, 2.0]
    assert ring[0].errored() is None


# COMM-7
def test_a_pending_work_fails_in_the_child_only(rings: Rings) -> None:
    ring = rings(2)
    tensors = [torch.ones(4), torch.ones(4)]
    works = [ring[0].allreduce([tensors[0]], SUM)]

    def wait() -> None:
        with pytest.raises(InvalidOperationError):
            works[0].wait()

    assert in_child(wait) == 0
    works.append(ring[1].allreduce([tensors[1]], SUM))
    for work in works:
        work.wait()
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 4] * 2


# COMM-7
@pytest.mark.usefixtures("no_default_group")
def test_a_child_destroys_a_static_group_for_itself() -> None:
    dist.init_process_group("elasticgang", store=HashStore(), rank=0, world_size=1)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)

    def destroy() -> None:
        with pytest.raises(InvalidOperationError):
            dist.all_reduce(tensor)
        dist.destroy_process_group()

    assert in_child(destroy) == 0
    dist.all_reduce(tensor)
