"""torch.compile over collectives. With the backend "aot_eager": the graphs are torch's, without a C++ compiler."""

from __future__ import annotations

import torch
import torch._inductor.compile_fx  # what the first compilation imports: here once, before the ranks are forked
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.integration.programs.catalog import Values, batch, mlp, program, train


@program(rtol=1e-5)
def compiled_functional_collective() -> Values:
    world = dist.group.WORLD

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(tensor: Tensor) -> Tensor:
        assert world is not None
        total = functional.all_reduce(tensor * 2, "sum", world)
        return functional.all_gather_tensor(total[:2] + dist.get_rank(), 0, world)

    return {"found": step(torch.full((3,), float(dist.get_rank()))), "again": step(torch.ones(3))}


@program(rtol=1e-5)
def compiled_all_reduce_in_place() -> Values:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(tensor: Tensor) -> Tensor:
        tensor = tensor + 1
        dist.all_reduce(tensor)
        return tensor * 2

    return {"found": step(torch.full((3,), float(dist.get_rank())))}


@program(rtol=1e-5)
def compiled_ddp_trains() -> Values:
    module = DistributedDataParallel(mlp())
    return train(torch.compile(module, backend="aot_eager"))  # type: ignore[arg-type]


@program(rtol=1e-5)
def compiled_fsdp2_trains() -> Values:
    module = mlp()
    for layer in (module[0], module[2]):
        fully_shard(layer)
        layer.compile(backend="aot_eager")
    fully_shard(module)
    return train(module)


@program(rtol=1e-5)
def compiled_step_with_its_backward() -> Values:
    """Forward, and DDP's all-reduce in backward, are run outside the graphs."""
    module = DistributedDataParallel(mlp())

    @torch.compile(backend="aot_eager")
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = torch.nn.functional.mse_loss(module(inputs), targets)
        loss.backward()
        return loss.detach()

    losses = [step(*batch(number, dist.get_rank())).item() for number in range(3)]
    return {"losses": losses, "gradients": [parameter.grad for parameter in module.parameters()]}
