"""torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from tests.integration.programs.catalog import Values, program


def _layers(number: int) -> list[nn.Module]:
    torch.manual_seed(6)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(number)]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def _run(schedule: Any, *, is_first: bool, is_last: bool, part: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(part)
    inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)
    losses: list[Tensor] = []
    arguments = [inputs] if is_first else []
    if is_last:
        schedule.step(*arguments, target=targets, losses=losses)
    else:
        schedule.step(*arguments)
    return [loss.item() for loss in losses]


def _gradients(modules: list[nn.Module]) -> Values:
    found = {}
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            found[f"{index}.{name}"] = parameter.grad.clone()
    return found


def _single(schedule: Any) -> Values:
    rank, size = dist.get_rank(), dist.get_world_size()
    module = _layers(size)[rank]
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    losses = _run(schedule(stage, 4, loss_fn=_loss), is_first=rank == 0, is_last=rank == size - 1)
    return {"losses": losses, **_gradients([module])}


@program(rtol=1e-6)
def pipeline_gpipe() -> Values:
    return _single(ScheduleGPipe)


@program(rtol=1e-6)
def pipeline_1f1b() -> Values:
    return _single(Schedule1F1B)


def _interleaved(kind: Any) -> Values:
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = _layers(2 * size)
    modules = [layers[rank], layers[rank + size]]
    cpu = torch.device("cpu")
    stages: Any = [PipelineStage(module, rank + index * size, 2 * size, cpu) for index, module in enumerate(modules)]
    schedule = kind(stages, 4, loss_fn=_loss)
    losses = _run(schedule, is_first=rank == 0, is_last=rank == size - 1)
    return {"losses": losses, **_gradients(modules)}


@program(rtol=1e-6)
def pipeline_interleaved() -> Values:
    return _interleaved(ScheduleInterleaved1F1B)


@program(rtol=1e-6)
def pipeline_without_bubbles() -> Values:
    return _interleaved(ScheduleInterleavedZeroBubble)


@program(rtol=1e-6)
def pipeline_of_two_stages_under_ddp() -> Values:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    module = DistributedDataParallel(_layers(2)[place], process_group=mesh.get_group("dp"))
    stage = PipelineStage(module, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 4, loss_fn=_loss)
    losses = _run(schedule, is_first=place == 0, is_last=place == 1, part=replica)
    return {"losses": losses, **_gradients([module.module])}
