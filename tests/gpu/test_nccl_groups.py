"""In-process NCCL by the interface of all process groups. One device allows one rank: NCCL refuses two on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp

from elasticgang.comm import ProcessGroupNCCL, SwallowingProcessGroup, create_process_group
from scripts.benches.comm import open_store
from tests.gpu.test_isolated_nccl import NO_CONTEXT
from tests.integration.rings import Ring


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_store() as store:
        ring = Ring(lambda: create_process_group("nccl", 30.0), 1, store)
        yield ring
        ring.close()


def reduced(pg: Any, tensor: Tensor) -> Tensor:
    assert pg.allreduce([tensor], ReduceOp.SUM).wait()
    torch.cuda.synchronize()
    return tensor


def test_collectives_of_device_memory(ring: Ring) -> None:
    pg = ring[0]
    assert isinstance(pg, ProcessGroupNCCL)
    assert reduced(pg, torch.full((1000,), 3.0, device="cuda")).unique().tolist() == [3.0]  # type: ignore[no-untyped-call]
    output = torch.zeros(4, device="cuda")
    pg._allgather_base(output, torch.full((4,), 2.0, device="cuda"), AllgatherOptions()).wait()
    torch.cuda.synchronize()
    assert output.tolist() == [2.0] * 4


def test_a_configuration_after_a_clean_one_and_after_an_abort(ring: Ring) -> None:
    ring.configure()
    assert reduced(ring[0], torch.ones(3, device="cuda")).tolist() == [1.0] * 3
    ring[0].abort()
    ring.configure()
    assert reduced(ring[0], torch.ones(3, device="cuda")).tolist() == [1.0] * 3


@pytest.mark.filterwarnings(NO_CONTEXT)
def test_ddp_on_a_device_under_swallowing(ring: Ring) -> None:
    pg = SwallowingProcessGroup(ring[0])
    module = nn.Linear(2, 1).cuda()
    ddp = nn.parallel.DistributedDataParallel(module, process_group=pg)
    torch.autograd.backward(ddp(torch.ones(1, 2, device="cuda")).sum())
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[1.0, 1.0]]
    assert pg.error() is None
