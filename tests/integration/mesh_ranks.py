"""A rank whose gangs are taken as a DeviceMesh: 2 x 2 (`rdp` x `tp`) under a launcher, 1 x 1 alone."""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elasticgang as eg
from tests.integration.checkpoint_cases import checkpoint

CPU = torch.device("cpu")


def check(gangs: eg.Gangs) -> None:
    mesh = gangs.device_mesh("rdp", "tp")
    assert mesh.mesh_dim_names == ("rdp", "tp")
    assert tuple(mesh.shape) == (gangs.rdp.size, gangs.tp.size)
    assert mesh.get_coordinate() == (gangs.rdp.rank, gangs.tp.rank)
    for name in ("rdp", "tp"):
        group, gang = mesh.get_group(name), getattr(gangs, name)
        assert group is gang.as_process_group()
        assert (group.rank(), group.size()) == (gang.rank, gang.size)
        assert dist.get_process_group_ranks(group) == mesh[name].mesh.tolist()
    assert dist.get_rank() == gangs.root.rank
    assert dist.get_world_size() == gangs.root.size
    assert gangs.device_mesh("tp").get_group() is gangs.tp.as_process_group()
    with pytest.raises(ValueError, match="at least one"):
        gangs.device_mesh()
    if gangs.root.size > 1:
        with pytest.raises(ValueError, match="one grid"):
            gangs.device_mesh("root", "tp")
    with pytest.raises(ValueError, match="'cp'"):
        gangs.device_mesh("cp")
    with pytest.raises(ValueError, match="distinct"):
        gangs.device_mesh("tp", "tp")
    dtensor(mesh)
    tensor_parallel(mesh["tp"])
    data_parallel(gangs.rdp)
    back(mesh, gangs)
    checkpoints(gangs)


def checkpoints(gangs: eg.Gangs) -> None:
    """Over the root's own process group, and as the default one."""
    for group in (gangs.root.as_process_group(), None):
        with tempfile.TemporaryDirectory() as mine:
            directory: list[object] = [mine]
            gangs.root.broadcast_objects(directory)
            checkpoint(gangs.device_mesh("root"), Path(str(directory[0])), group)
            gangs.root.barrier()  # rank 0 removes what all read


def dtensor(mesh: DeviceMesh) -> None:
    whole = torch.arange(8.0).view(4, 2)
    sharded = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    assert sharded.to_local().shape[0] == 4 // mesh["tp"].size()
    assert torch.equal(sharded.full_tensor(), whole)
    assert full(torch.sum(sharded * 2)).item() == 2 * whole.sum()
    assert torch.equal(sharded.redistribute(placements=[Shard(1), Shard(0)]).full_tensor(), whole)


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def tensor_parallel(mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    dense = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    split = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    split.load_state_dict(dense.state_dict())
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = torch.randn(3, 4)
    expected, found = dense(inputs), split(inputs)
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    gradients = [next(model.parameters()).grad for model in (split, dense)]
    torch.testing.assert_close(full(gradients[0]), gradients[1])


def data_parallel(gang: eg.Gang) -> None:
    """torch's own DDP, with its own reduction: no hook."""
    torch.manual_seed(4)
    module = nn.Linear(2, 1)
    ddp = nn.parallel.DistributedDataParallel(module, process_group=gang.as_process_group())
    for _ in range(3):  # DDP rebuilds its buckets after the first
        module.zero_grad()
        ddp(torch.full((1, 2), float(gang.rank + 1))).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [[(gang.size + 1) / 2] * 2]


def back(mesh: DeviceMesh, gangs: eg.Gangs) -> None:
    found = eg.Gangs.from_device_mesh(mesh)
    for name in ("root", "dp", "rdp", "sdp", "tp", "pp"):
        one, other = getattr(found, name), getattr(gangs, name)
        assert (one.rank, one.size) == (other.rank, other.size), name
    total = torch.ones(1)
    found.root.all_reduce(total, eg.ReduceOperation.SUM)
    assert total.item() == gangs.root.size
    with pytest.raises(ValueError, match="replicate"):
        eg.Gangs.from_device_mesh(mesh, rdp="replicate")
    with pytest.raises(ValueError, match="must have names"):
        eg.Gangs.from_device_mesh(DeviceMesh("cpu", mesh.mesh, _init_backend=False))
    with pytest.raises(ValueError, match="'ep'"):
        eg.Gangs.from_device_mesh(mesh, ep="tp")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", choices=["torchrun", "elasticgang", "none"], required=True)
    launcher = parser.parse_args().launcher
    if launcher == "elasticgang":
        manager = eg.join(layout=eg.ParallelLayout(tp=2))
        for step in manager.steps(1):
            with step:
                check(manager.gangs)
                manager.commit(1.0, lambda total: None)
    elif launcher == "torchrun":
        check(eg.create_parallel_gangs(eg.ProcessGroupGang.create_default_process_group(CPU), tp_size=2))
        dist.destroy_process_group()
        gc.collect()  # a Gloo group that outlives the interpreter can end it by SIGABRT
    else:
        check(eg.create_fake_gangs(CPU))
    print("mesh kept")


if __name__ == "__main__":
    main()
