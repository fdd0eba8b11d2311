"""One rank of a static gang over NCCL: as many as there are devices, started by torchrun. Prints what went well."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticgang.gang import GangGrid, ProcessGroupGang, ReduceOperation, create_parallel_gangs, get_default_device
from tests.integration import contract


def begun(timeout_s: float) -> ProcessGroupGang:
    device = get_default_device()
    torch.cuda.set_device(device)
    torch.set_default_device(device)  # for the tensors of the contract
    return ProcessGroupGang.create_default_process_group(
        device, timeout=timedelta(seconds=timeout_s), high_priority=True
    )


def keep_the_contract() -> None:
    root = begun(60)
    pg: Any = root.as_process_group()
    assert pg.bound_device_id == root.device, "not initialized eagerly"
    assert pg._get_backend(root.device).options.is_high_priority_stream
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    contract.same_on_every_rank(root)
    contract.refusals(root)
    whole = root.create_gang(range(root.size))
    assert whole is not None
    contract.same_on_every_rank(whole)
    named = GangGrid([root.size], ["cp"], root=root).create_gangs()
    assert named is not None
    contract.same_on_every_rank(named["cp"])
    if root.size > 1:
        contract.one_to_another(root)
        contract.sub_gangs(root)
    if root.size % 2 == 0:
        gangs = create_parallel_gangs(root, tp_size=2)
        assert (gangs.tp.rank, gangs.dp.rank) == (root.rank % 2, root.rank // 2)
        contract.one_to_another(gangs.tp)
    torch.cuda.synchronize()
    print(f"rank {root.rank} kept the contract")
    root.close()


def outlive() -> None:
    """Rank 1 is killed; the others find that out and are still there."""
    root = begun(10)
    tensor = torch.ones(1)
    root.all_reduce(tensor, ReduceOperation.SUM)
    torch.cuda.synchronize()
    if root.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        root.all_reduce(tensor, ReduceOperation.SUM)
        torch.cuda.synchronize()  # until the communicator is aborted
    except RuntimeError:
        pass
    assert dist.is_initialized()
    print(f"rank {root.rank} is alive", flush=True)
    os._exit(0)  # the group cannot be destroyed in order any more


if __name__ == "__main__":
    {"contract": keep_the_contract, "outlive": outlive}[sys.argv[1]]()
