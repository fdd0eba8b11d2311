"""Isolated NCCL on a device: what `tests/integration/test_isolated_nccl.py` sees over a stand-in. One device allows one
rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.distributed import ReduceOp

from elasticgang.comm import ProcessGroupIsolatedNCCL, create_process_group
from elasticgang.errors import GangError
from scripts.benches.comm import open_store
from tests.integration.forms import FORMS, reducing
from tests.integration.rings import SUM, Ring
from tests.support import wait_until

CUDA: Any = torch.cuda
NO_CONTEXT = "ignore:Attempting to run cuBLAS"  # of torch, in a thread of autograd that has not used the device before


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_store() as store:
        ring = Ring(lambda: create_process_group("isolated-nccl", 60.0), 1, store)
        yield ring
        ring.close()


def on_device(seed: int | None, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed or 0) + 1)
    return (torch.full(shape, 99.0) if seed is None else torch.rand(shape, generator=generator)).cuda()


@pytest.mark.parametrize("name", [name for name in FORMS if name not in ("send", "recv", "send_recv")])
def test_every_collective(name: str, ring: Ring) -> None:
    assert isinstance(ring[0], ProcessGroupIsolatedNCCL)
    for _ in range(2):
        written = FORMS[name](ring[0], 0, on_device)
        CUDA.synchronize()
        assert written
        assert all(tensor.isfinite().all() for tensor in written)
    assert ring[0].errored() is None


def test_what_is_not_contiguous_and_what_is_a_mean(ring: Ring) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).cuda().t()
    ring[0].allreduce([tensor], reducing(AllreduceOptions, ReduceOp.AVG)).wait()
    assert tensor.cpu().tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_streams_are_ordered(ring: Ring) -> None:
    """What is queued before is seen by the collective, and its result by what is queued after `wait`."""
    for number in range(20):
        source, output = torch.zeros(1 << 22, device="cuda"), torch.zeros(1 << 22, device="cuda")
        CUDA._sleep(20_000_000)
        source.fill_(number)
        ring[0]._allgather_base(output, source, AllgatherOptions()).wait()
        assert (output * 2).sum().item() == 2 * number * output.numel()


# NCCL-2
def test_wait_blocks_until_the_collective_has_passed(ring: Ring) -> None:
    tensor = torch.ones(1000, device="cuda")
    ring[0].allreduce([tensor], SUM).wait()
    CUDA.synchronize()
    CUDA._sleep(2_000_000_000)  # about a second
    work = ring[0].allreduce([tensor], SUM)
    assert not CUDA.current_stream().query()
    work.wait()
    assert CUDA.current_stream().query()


def test_memory_of_dropped_tensors_is_given_back(ring: Ring) -> None:
    def use() -> int:
        for _ in range(50):
            tensor = torch.ones(1 << 22, device="cuda")
            ring[0].allreduce([tensor], SUM).wait()
        CUDA.synchronize()
        wait_until(lambda: ring[0].num_active_work() == 0, "the end of all works")
        return int(CUDA.memory_allocated())

    first = use()
    wait_until(lambda: use() <= first, "nothing grows")


@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGSTOP])
def test_an_abort_and_the_next_configuration(number: signal.Signals | None, ring: Ring) -> None:
    pg = ring[0]
    tensor = torch.ones(1000, device="cuda")
    pg.allreduce([tensor], SUM).wait()
    CUDA.synchronize()
    if number is not None:
        os.kill(pg.comm_process.pid, number)
    pg.abort()
    with pytest.raises(GangError):
        pg.allreduce([tensor], SUM).wait()
    ring.configure()
    pg.allreduce([tensor], SUM).wait()
    assert tensor.cpu().tolist() == [1.0] * 1000


# NCCL-2
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_in_a_collective_leaves_no_stream_waiting(number: signal.Signals, ring: Ring) -> None:
    pg = ring[0]
    tensor = torch.ones(1000, device="cuda")
    pg.allreduce([tensor], SUM).wait()
    CUDA._sleep(4_000_000_000)  # some seconds, for which the collective waits
    work = pg.allreduce([tensor], SUM)
    os.kill(pg.comm_process.pid, number)
    pg.abort()
    with pytest.raises(GangError):
        work.wait()
    CUDA.synchronize()
    ring.configure()
    pg.allreduce([tensor], SUM).wait()
    assert tensor.cpu().tolist() == [1.0] * 1000


@pytest.mark.filterwarnings(NO_CONTEXT)
def test_ddp(ring: Ring) -> None:
    module = nn.Linear(2, 1).cuda()
    ddp = nn.parallel.DistributedDataParallel(module, process_group=ring[0])
    torch.autograd.backward(ddp(torch.ones(1, 2, device="cuda")).sum())
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[1.0, 1.0]]


def test_its_own_deadline(ring: Ring) -> None:
    """A stream that holds a collective back for longer than the timeout."""
    pg = ring[0]
    tensor = torch.ones(1000, device="cuda")
    pg.allreduce([tensor], SUM).wait()
    pg.set_timeout(timedelta(seconds=0.2))
    CUDA._sleep(4_000_000_000)
    pg.allreduce([tensor], SUM)
    wait_until(lambda: pg.errored() is not None, "the deadline")
    CUDA.synchronize()
    pg.set_timeout(timedelta(seconds=60.0))
    ring.configure()
    pg.allreduce([tensor], SUM).wait()
    CUDA.synchronize()
