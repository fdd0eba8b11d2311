"""Plain torch on four ranks with the backend that is named: DDP, HSDP by FSDP2, tensor parallelism, groups by hand. Run
by `test_backend.py` under torchrun; nothing here is elasticgang's but the backend's name."""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.integration.checkpoint_cases import checkpoint

STEPS = 4


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(module: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs, targets = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
        loss = nn.functional.mse_loss(module(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(rank: int) -> list[float]:
    return train(nn.parallel.DistributedDataParallel(model()), rank)


def hsdp(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = model()
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    return train(module, rank)


def fsdp_allocates(rank: int) -> list[float]:
    """FSDP2 asks the group's backend for its buffers."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    module = model()
    for layer in (module[0], module[2], module):
        sharded: Any = fully_shard(layer, mesh=mesh)
        sharded.set_allocate_memory_from_process_group_for_comm(True)
    return train(module, rank)


def tensor_parallel(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = model()
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(module, rank // 2)


def by_hand(rank: int) -> list[float]:
    """Every collective that torch.distributed offers, over a group of three, one of a pair, and objects."""
    trio = dist.new_group([0, 1, 3])
    pair = dist.new_group([1, 2])
    found = []
    for group, size in ((trio, 3), (pair, 2)):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        me = float(dist.get_group_rank(group, rank))
        tensor = torch.full((3,), me + 1)
        dist.all_reduce(tensor, group=group)
        found.append(tensor.sum().item())
        dist.all_gather(outputs := [torch.empty(2) for _ in range(size)], torch.full((2,), me), group=group)
        found += [output[0].item() for output in outputs]
        dist.all_gather_single(output := torch.empty(2 * size), torch.full((2,), me), group=group)
        found += output.tolist()
        dist.reduce_scatter_single(output := torch.empty(2), torch.arange(2.0 * size) + me, group=group)
        found += output.tolist()
        dist.all_to_all_single(output := torch.empty(size), torch.arange(float(size)) * (me + 1), group=group)
        found += output.tolist()
        dist.broadcast(tensor := torch.full((2,), me), group_src=1, group=group)
        found += tensor.tolist()
        dist.reduce(tensor := torch.full((2,), me), group_dst=0, group=group)
        found += tensor.tolist() if me == 0 else []
        dist.scatter(tensor := torch.empty(1), list(torch.split(torch.arange(float(size)), 1)) if me == 0 else None,
                     group_src=0, group=group)  # fmt: skip
        found += tensor.tolist()
        gathered = [torch.empty(1) for _ in range(size)] if me == 0 else None
        dist.gather(torch.full((1,), me), gathered, group_dst=0, group=group)
        found += [output.item() for output in gathered or []]
        if me == 0:
            dist.send(torch.full((2,), 5.0), group_dst=1, group=group)
        if me == 1:
            dist.recv(tensor := torch.empty(2), group_src=0, group=group)
            found += tensor.tolist()
        objects: list[object] = [None] * size
        dist.all_gather_object(objects, {"rank": me}, group=group)
        found += [entry["rank"] for entry in objects if isinstance(entry, dict)]
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    return found


def any_source(rank: int) -> list[object]:
    """Rank 0 receives from whom it may: of all, and of a group whose ranks have other numbers."""
    found: list[object] = []
    group = dist.new_group([3, 1, 0])
    for pg, others in ((None, [1, 2, 3]), (group, [1, 3])):
        if rank in others:
            dist.send(torch.full((2,), 10.0 * rank), dst=0, group=pg, tag=4)
            dist.send_object_list([{"from": rank}], dst=0, group=pg)
        elif rank == 0:
            for _ in others:
                source = dist.recv(tensor := torch.empty(2), group=pg, tag=4)
                found.append([source, tensor.tolist()])
            for _ in others:
                source = dist.recv(length := torch.empty(1, dtype=torch.int64), group=pg, tag=0)
                dist.recv(data := torch.empty(int(length), dtype=torch.uint8), src=source, group=pg, tag=0)
                found.append([source, pickle.loads(data.numpy().tobytes())])
        dist.barrier()
        if rank == 0:
            work = dist.irecv(tensor := torch.empty(1), group=pg)
            dist.barrier()
            assert work is not None
            work.wait()
            found.append([work._source_rank(), tensor.item()])
        else:
            if rank == 3:
                dist.send(torch.tensor([7.0]), dst=0, group=pg)
            dist.barrier()
    return sorted(found, key=str) if rank == 0 else ["sent"]


def split(rank: int) -> list[float]:
    """Each half for itself, and once more under the same name. Gloo's own halves time out now and then."""
    if dist.get_backend() == "gloo":
        return [value for _ in range(2) for value in (rank // 2, 2, 3.0, 3.0)]
    found: list[float] = []
    ranks = [0, 3] if rank in (0, 3) else [1, 2]
    for _ in range(2):
        world: Any = dist.group.WORLD
        half = world.split_group(ranks, timeout=timedelta(seconds=60), group_name=f"half{ranks[0]}")
        half.allreduce([tensor := torch.full((2,), float(rank))]).wait()
        found += [half.rank(), half.size(), *tensor.tolist()]
        half.shutdown()
    return found


def monitored_barrier(rank: int) -> list[object]:
    group = dist.new_group([0, 2])
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)
    if rank in (0, 2):
        dist.monitored_barrier(group)
    timeout: Any = 30.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.monitored_barrier(timeout=timeout)
    return ["passed", *(str(each.message) for each in caught)]


def checkpoints(rank: int) -> list[float]:
    with tempfile.TemporaryDirectory() as mine:
        directory = [mine]
        dist.broadcast_object_list(directory)
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        found = checkpoint(mesh, Path(directory[0]))
        dist.barrier()  # rank 0 removes what all read
    return found


FORMS: dict[str, Callable[[int], object]] = {
    "ddp": ddp,
    "hsdp": hsdp,
    "fsdp-allocates": fsdp_allocates,
    "tp": tensor_parallel,
    "by-hand": by_hand,
    "any-source": any_source,
    "split": split,
    "monitored-barrier": monitored_barrier,
    "checkpoint": checkpoints,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="elasticgang")
    parser.add_argument("--init-method")
    backend = parser.parse_args().backend
    dist.init_process_group(backend)
    rank = dist.get_rank()
    results = {name: form(rank) for name, form in FORMS.items()}
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # a Gloo group that outlives the interpreter can end it by SIGABRT
    if rank == 0:
        print("RESULT", json.dumps(gathered))


if __name__ == "__main__":
    main()
