"""State dicts and checkpoints of a sharded model, as users write them. Plain torch: a mesh, and the default group."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def build(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded over `mesh`, with a step behind it."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    torch.autograd.backward(module(torch.ones(2, 6)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def whole(module: nn.Module) -> list[float]:
    """Of every parameter, all elements."""
    found: list[float] = []
    for parameter in module.parameters():
        assert isinstance(parameter, DTensor)
        full: Tensor = parameter.full_tensor()
        found += full.flatten().tolist()
    return found


def checkpoint(mesh: DeviceMesh, directory: Path, process_group: dist.ProcessGroup | None = None) -> list[float]:
    """What a model has after it was loaded in each way. Each rank that is first in `process_group` (None: the default
    one) writes to `directory`, which all of the group have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it calls
        return _checkpoint(mesh, directory, process_group)


def _checkpoint(mesh: DeviceMesh, directory: Path, process_group: dist.ProcessGroup | None) -> list[float]:
    module, optimizer = build(mesh, 1)
    expected = whole(module)
    found = list(expected)
    full = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(full) == (dist.get_rank() == 0)

    other, _ = build(mesh, 2)
    assert whole(other) != expected
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full, options=options)
    assert whole(other) == expected
    found += whole(other)

    def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        model, optim = get_state_dict(module, optimizer)
        return {"model": model, "optim": optim}

    save(state(module, optimizer), checkpoint_id=str(directory / "sync"), process_group=process_group)
    later: Any = async_save(
        state(module, optimizer), checkpoint_id=str(directory / "async"), process_group=process_group
    )
    later.result()
    for seed, name in enumerate(("sync", "async"), start=3):
        other, its_optimizer = build(mesh, seed)
        loaded = state(other, its_optimizer)
        load(loaded, checkpoint_id=str(directory / name), process_group=process_group)
        set_state_dict(other, its_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        assert whole(other) == expected, name
        found += whole(other)
        moments = [its_optimizer.state[parameter]["exp_avg"] for parameter in other.parameters()]
        found += [moment.full_tensor().sum().item() for moment in moments]
        written = sorted(path.name for path in (directory / name).iterdir())
        assert len(written) > dist.get_world_size(process_group), "every rank has written its shards"
    return found
