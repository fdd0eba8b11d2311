"""A rank of 2 replicas x 2 shards: each replica has a default group of its own, and an isolated group joins them as a
dimension of the mesh. Prints its losses and what it saw."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from elasticgang import extend_device_mesh
from elasticgang.comm import ProcessGroupIsolatedGloo

STEPS = 4


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def train(module: nn.Module, places: range, place: int) -> list[float]:
    """This rank's part of each batch is one of `places`; the loss is of the whole batch's mean."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)
        part = slice(8 // len(places) * place, 8 // len(places) * (place + 1))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(inputs[part]), targets[part])
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    store, replica, shard = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    host, _, port = store.partition(":")
    world = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore(f"replica{replica}", world), rank=shard, world_size=2)
    pg = ProcessGroupIsolatedGloo(30.0)
    assert pg.register("dp") is pg
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    found: dict[str, object] = {}
    for attempt in range(2):  # the second configuration serves the same mesh
        pg.configure(f"{store}/dp{attempt}/{shard}", f"replica{replica}", replica, 2)
        extended = extend_device_mesh(mesh, pg, "dp", 0)
        assert extended.mesh_dim_names == ("dp", "shard")
        assert extended.get_group("dp") is pg
        assert extended.get_group("dp").size() == 2
        assert tuple(extended.shape) == (1, 2)
        last = extend_device_mesh(mesh, pg, "replicate", 1)
        assert last.mesh_dim_names == ("shard", "replicate")
        module = model()
        for layer in (module[0], module[2], module):
            fully_shard(layer, mesh=extended)
        found[f"losses{attempt}"] = train(module, range(4), replica * 2 + shard)
        summed = functional.all_reduce(torch.ones(3), "sum", pg)
        found[f"sum{attempt}"] = summed.tolist()
        gathered = functional.all_gather_tensor(torch.full((1,), float(replica)), 0, (extended, 0))
        found[f"gathered{attempt}"] = gathered.tolist()
        tensor = distribute_tensor(torch.arange(4.0), extended, [Replicate(), Shard(0)])
        found[f"dtensor{attempt}"] = tensor.full_tensor().tolist()
    pg.unregister()
    pg.shutdown()
    print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
