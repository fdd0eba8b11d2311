"""torch.distributed.checkpoint, and the state-dict helpers beside it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.integration.programs.catalog import Values, mlp, parameters, program, train


def _directory() -> Path:
    """One for all ranks."""
    found = [tempfile.mkdtemp(dir=os.environ.get("ELASTICGANG_RUN_DIR")) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return Path(found[0])


def _files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _sharded(width: int = 8) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = mlp(width)
    fully_shard(module, mesh=mesh)
    return module


@program(any_size=True)
def dcp_keeps_each_ranks_part(group: dist.ProcessGroup | None = None) -> Values:
    mesh, directory = init_device_mesh("cpu", (dist.get_world_size(),)), _directory()
    table = torch.arange(48.0).view(12, 4)
    state = {"table": distribute_tensor(table, mesh, [Shard(0)]), "mine": {f"rank {dist.get_rank()}": dist.get_rank()}}
    dcp.save(state, checkpoint_id=directory, process_group=group)
    loaded = {
        "table": distribute_tensor(torch.zeros(12, 4), mesh, [Shard(1)]),  # as other parts
        "mine": {f"rank {dist.get_rank()}": -1},
    }
    dcp.load(loaded, checkpoint_id=directory, process_group=group)
    everywhere = {"table": distribute_tensor(torch.zeros(12, 4), mesh, [Replicate()])}
    dcp.load(everywhere, checkpoint_id=directory)
    return {
        "files": _files(directory),
        "table": loaded["table"].to_local(),
        "mine": loaded["mine"],
        "everywhere": everywhere["table"].to_local(),
    }


@program(rtol=1e-6, any_size=True)
def dcp_keeps_model_and_optimizer() -> Values:
    directory = _directory()
    module = _sharded()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    train(module, optimizer)
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)

    other = _sharded()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    set_state_dict(other, other_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    loaded = parameters(other)
    return {"loaded": loaded, "then": train(other, other_optimizer), "lr": other_optimizer.param_groups[0]["lr"]}


@program(rtol=1e-6, any_size=True)
def dcp_saves_beside_training() -> Values:
    """Its collectives run in a thread of their own, and so over a group of their own."""
    directory, group = _directory(), dist.new_group()
    module = _sharded()
    saved = dcp.async_save({"model": get_model_state_dict(module)}, checkpoint_id=directory, process_group=group)
    before = parameters(module)
    train(module)
    saved.result()  # type: ignore[union-attr]
    state = {"model": get_model_state_dict(module)}
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(module, state["model"])
    return {"files": _files(directory), "before": before, "loaded": parameters(module)}


@program(rtol=1e-6)
def dcp_of_a_replicated_model() -> Values:
    directory = _directory()
    module = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    train(module, optimizer)
    dcp.save({"model": get_model_state_dict(module)}, checkpoint_id=directory)
    state = {"model": get_model_state_dict(DistributedDataParallel(mlp(8)))}
    dcp.load(state, checkpoint_id=directory)
    return {"files": _files(directory), "model": state["model"]}


@program(rtol=1e-6, any_size=True)
def full_state_on_rank_0_is_broadcast() -> Values:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    module = _sharded()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    train(module, optimizer)
    model_state = get_model_state_dict(module, options=options)
    optimizer_state = get_optimizer_state_dict(module, optimizer, options=options)
    names = [sorted(model_state), sorted(optimizer_state)]

    other = _sharded()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    mine: Any = model_state if dist.get_rank() == 0 else {}
    my_optimizer: Any = optimizer_state if dist.get_rank() == 0 else {}
    set_model_state_dict(other, mine, options=broadcast)
    set_optimizer_state_dict(other, other_optimizer, my_optimizer, options=broadcast)
    return {"names": names, "loaded": parameters(other), "then": train(other, other_optimizer)}


@program(rtol=1e-6)
def full_state_of_a_grid() -> Values:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    directory = _directory()
    dcp.save({"model": get_model_state_dict(module)}, checkpoint_id=directory)
    state = {"model": get_model_state_dict(module)}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(module, state["model"])
    full = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    return {"full": dict(full), "files": _files(directory)}
