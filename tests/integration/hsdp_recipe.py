"""Hybrid-sharded training of one small model on four CPU ranks, replicate 2 x shard 2, in the three forms of PyTorch's
DeviceMesh tutorial; and without any sharding, alone. Run by `test_hsdp.py` under torchrun and `elasticgang run`.

Written with plain torch: what comes from elasticgang is the default process group, or the mesh.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import elasticgang as eg

CPU = torch.device("cpu")
STEPS, BATCH = 4, 8


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)


def by_hand() -> nn.Module:
    """The tutorial's first half: groups made one by one, of the same ranks in the same order everywhere."""
    rank = dist.get_rank()
    shard_groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicate_groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    groups = (shard_groups[rank // 2], replicate_groups[rank % 2])
    return fsdp1(process_group=groups)


def fsdp1(**where: Any) -> nn.Module:
    return FullyShardedDataParallel(
        model(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=CPU, use_orig_params=True, **where
    )


def fsdp2(mesh: DeviceMesh) -> nn.Module:
    sharded = model()
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded[2], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return sharded


def wrap(form: str, mesh: DeviceMesh) -> nn.Module:
    if form == "by-hand":
        return by_hand()
    return fsdp1(device_mesh=mesh) if form == "fsdp1" else fsdp2(mesh)


class Training:
    def __init__(self, module: nn.Module, rank: int, size: int) -> None:
        self._module = module
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        self._rank, self._size = rank, size
        self.losses: list[float] = []

    def backward(self, step: int) -> float:
        inputs, targets = (part.chunk(self._size)[self._rank] for part in batch(step))
        self._optimizer.zero_grad()
        loss = nn.functional.mse_loss(self._module(inputs), targets)
        torch.autograd.backward(loss)
        return loss.item()

    def apply(self, weight: float = 1.0) -> None:
        self._optimizer.step()


def alone() -> list[float]:
    training = Training(model(), 0, 1)
    losses = []
    for step in range(STEPS):
        losses.append(training.backward(step))
        training.apply()
    return losses


def under_torchrun(forms: list[str]) -> dict[str, list[float]]:
    """The mesh as the tutorial makes it, and the gangs from it; or groups by hand."""
    root = eg.ProcessGroupGang.create_default_process_group(CPU)
    found: dict[str, list[float]] = {}
    for form in forms:
        gangs = eg.create_fsdp_gangs(eg.create_parallel_gangs(root), intra_node_size=2)
        if form == "from-gangs":
            module = fsdp2(gangs.device_mesh("rdp", "sdp"))
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            module = wrap(form, mesh)
            gangs = eg.Gangs.from_device_mesh(mesh, rdp="replicate", sdp="shard")
        assert (gangs.rdp.rank, gangs.sdp.rank) == (root.rank // 2, root.rank % 2)
        training = Training(module, gangs.dp.rank, gangs.dp.size)
        found[form] = []
        for step in range(STEPS):
            found[form].append(mean_over(gangs.dp, training.backward(step)))
            training.apply()
    del gangs, module, training
    dist.destroy_process_group()
    gc.collect()  # a Gloo group that outlives the interpreter can end it by SIGABRT
    return found


def under_elasticgang(forms: list[str]) -> dict[str, list[float]]:
    """One form after the other, in the steps of one job."""
    manager = eg.join(layout=eg.ParallelLayout(sdp=2, within_host=()))
    found: dict[str, list[float]] = {form: [] for form in forms}
    trainings: dict[str, Training] = {}
    for step in manager.steps(STEPS * len(forms)):
        form = forms[step.index // STEPS]
        with step:
            gangs = manager.gangs
            if form not in trainings:
                module = wrap(form, gangs.device_mesh("rdp", "sdp"))
                trainings[form] = Training(module, gangs.dp.rank, gangs.dp.size)
            loss = mean_over(gangs.dp, trainings[form].backward(step.index % STEPS))
            if manager.commit(1.0, trainings[form].apply):
                found[form].append(loss)
    return found


def mean_over(gang: eg.Gang, loss: float) -> float:
    gang.all_reduce(tensor := torch.tensor(loss, dtype=torch.float64), eg.ReduceOperation.MEAN)
    return tensor.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", choices=["torchrun", "elasticgang", "none"], default="none")
    parser.add_argument("--form", choices=["by-hand", "fsdp1", "fsdp2", "from-gangs"], nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    launchers = {"torchrun": under_torchrun, "elasticgang": under_elasticgang}
    found = {"alone": alone()} if args.launcher == "none" else launchers[args.launcher](args.form)
    with args.output.open("a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
