"""DistributedDataParallel, its hooks, and the optimizers and samplers around it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.integration.programs.catalog import Values, batch, mlp, parameters, program, train


@program(rtol=1e-6, any_size=True)
def ddp_trains(group: dist.ProcessGroup | None = None) -> Values:
    return train(DistributedDataParallel(mlp(), process_group=group))


@program(rtol=1e-6)
def ddp_broadcasts_what_rank_0_has() -> Values:
    module = mlp()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(dist.get_rank())
    return parameters(DistributedDataParallel(module).module)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(6, 8)
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)
        self.never = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        branch = self.left if dist.get_rank() % 2 else self.right
        output: Tensor = branch(torch.tanh(self.stem(inputs)))
        return output


@program(rtol=1e-6)
def ddp_finds_unused_parameters() -> Values:
    return train(DistributedDataParallel(_Branches(), find_unused_parameters=True))


@program(rtol=1e-6)
def ddp_with_a_static_graph() -> Values:
    return train(DistributedDataParallel(mlp(), static_graph=True))


@program(rtol=1e-6)
def ddp_with_bucket_views() -> Values:
    return train(DistributedDataParallel(mlp(64), gradient_as_bucket_view=True, bucket_cap_mb=0.001))


@program(rtol=1e-6)
def ddp_accumulates_gradients() -> Values:
    module = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            inputs, targets = batch(10 * step + micro, dist.get_rank())
            with contextlib.nullcontext() if micro == 2 else module.no_sync():
                (nn.functional.mse_loss(module(inputs), targets) / 3).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return {"norm": norm, **parameters(module)}


@program(rtol=1e-6)
def ddp_broadcasts_buffers() -> Values:
    torch.manual_seed(1)
    module = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    values = train(module)
    return {**values, "buffers": {name: buffer.clone() for name, buffer in module.named_buffers()}}


@program(rtol=1e-6)
def ddp_joins_ranks_of_uneven_inputs() -> Values:
    module = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with module.join():
        for step in range(2 + dist.get_rank()):
            inputs, targets = batch(step, dist.get_rank())
            optimizer.zero_grad()
            nn.functional.mse_loss(module(inputs), targets).backward()
            optimizer.step()
    return parameters(module)


@program(rtol=1e-5)
def join_of_ddp_and_a_zero_optimizer() -> Values:
    module = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    with Join([module, optimizer]):
        for step in range(2 + dist.get_rank()):
            inputs, targets = batch(step, dist.get_rank())
            optimizer.zero_grad()
            nn.functional.mse_loss(module(inputs), targets).backward()
            optimizer.step()
    return parameters(module)


@program(rtol=1e-5)
def ddp_of_channels_last() -> Values:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten())
    module = DistributedDataParallel(model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        inputs = torch.full((2, 3, 8, 8), 0.1 * dist.get_rank()).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        module(inputs).pow(2).sum().backward()
        optimizer.step()
    strides = [parameter.stride() for parameter in module.parameters()]
    return {**parameters(module), "strides": strides}


@program(rtol=1e-6)
def ddp_over_half_of_the_ranks() -> Values:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return train(DistributedDataParallel(mlp(), process_group=halves[dist.get_rank() // 2]))


@program(rtol=1e-6)
def ddp_over_a_mesh() -> Values:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "other"))
    return train(DistributedDataParallel(mlp(), device_mesh=mesh["replicate"]))


@program(rtol=1e-6, any_size=True)
def replicate_trains() -> Values:
    """DDP as FSDP2 writes it: the module stays itself."""
    return train(replicate(mlp()))


@program(rtol=1e-6)
def synchronized_batch_norm() -> Values:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)))
    return {"output": model(batch(0, dist.get_rank())[0]).detach()}


# -- communication hooks


def _hooked(state: object, hook: Any, *, width: int = 32) -> Values:
    module = DistributedDataParallel(mlp(width))
    module.register_comm_hook(state, hook)
    return train(module, steps=5)


@program(rtol=1e-6)
def hook_all_reduce() -> Values:
    return _hooked(None, default_hooks.allreduce_hook)


@program(rtol=1e-2)
def hook_fp16_compress(group: dist.ProcessGroup | None = None) -> Values:
    return _hooked(group, default_hooks.fp16_compress_hook)


@program(rtol=1e-2)
def hook_bf16_compress() -> Values:
    return _hooked(None, default_hooks.bf16_compress_hook)


@program(rtol=1e-2)
def hook_fp16_compress_wrapper() -> Values:
    return _hooked(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


@program(rtol=1e-4, any_size=True)
def hook_power_sgd(group: dist.ProcessGroup | None = None) -> Values:
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return _hooked(state, powerSGD_hook.powerSGD_hook)


@program(rtol=1e-4)
def hook_batched_power_sgd() -> Values:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return _hooked(state, powerSGD_hook.batched_powerSGD_hook)


@program(rtol=1e-6)
def hook_post_local_sgd() -> Values:
    pairs, _ = dist.new_subgroups(2)
    state = post_localSGD_hook.PostLocalSGDState(None, pairs, start_localSGD_iter=2)
    return _hooked(state, post_localSGD_hook.post_localSGD_hook)


@program(rtol=1e-6)
def hook_that_waits_for_another_collective() -> Values:
    """As a user writes one: the mean, by a second collective that the first one's callback starts."""

    def hook(bucket: Any) -> torch.futures.Future[Tensor]:
        def divide(future: Any) -> Tensor:
            count = torch.ones(1)
            dist.all_reduce(count)
            total: Tensor = future.value()[0]
            return total.div_(count)

        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(divide)  # type: ignore[no-any-return]

    return _hooked(None, lambda state, bucket: hook(bucket))  # torch cannot read annotations that are strings


@program(beyond_gloo=torch.__version__ < "2.15")
def hook_quantization_per_tensor() -> Values:
    """Over Gloo, the future of an all-gather had not the form that this hook expects before torch 2.15."""
    hooked, plain = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    hooked.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
    inputs, targets = batch(0, dist.get_rank())
    for module in (hooked, plain):
        nn.functional.mse_loss(module(inputs), targets).backward()
    gradients = [torch.cat([each.grad.flatten() for each in some.parameters()]) for some in (hooked, plain)]  # type: ignore[union-attr]
    dist.all_reduce(widest := gradients[1].abs().max() * 4, dist.ReduceOp.MAX)
    assert not torch.equal(*gradients)
    torch.testing.assert_close(*gradients, rtol=0, atol=widest.item() / 100)  # of 256 levels
    return {}


@program(beyond_gloo=True)
def hook_with_a_zero_step() -> Values:
    """Torch refuses it over Gloo, because it may hang there. Its first two steps update nothing, as its page says."""
    hooked, plain = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    zero = ZeroRedundancyOptimizer(
        hooked.parameters(), torch.optim.SGD, overlap_with_ddp=True, parameters_as_bucket_view=True, lr=0.1
    )
    hooked.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, hooked, zero))
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(6):
        inputs, targets = batch(step, dist.get_rank())
        for module, optimizer in ((hooked, zero), (plain, sgd)):
            optimizer.zero_grad()
            nn.functional.mse_loss(module(inputs), targets).backward()
            if module is hooked or step >= 2:
                optimizer.step()
    for mine, theirs in zip(hooked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    return {}


# -- optimizers, averagers, data


@program(rtol=1e-5, any_size=True)
def zero_optimizer_trains(group: dist.ProcessGroup | None = None) -> Values:
    module = DistributedDataParallel(mlp(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, process_group=group, lr=0.01)
    values = train(module, optimizer)
    optimizer.consolidate_state_dict(to=1)
    state = optimizer.state_dict()["state"] if dist.get_rank() == 1 else {}
    return {**values, "state": {f"{key}": dict(value) for key, value in state.items()}}


@program(rtol=1e-6)
def periodic_averaging_of_models() -> Values:
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=1)
    norms = []
    for step in range(5):
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()
        averager.average_parameters(module.parameters())
        norms.append(float(torch.cat([parameter.flatten() for parameter in module.parameters()]).norm()))
    return {"norms": norms, **parameters(module)}


@program(rtol=1e-6)
def hierarchical_averaging_of_models() -> Values:
    module = mlp()
    averager = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()
        averager.average_parameters(module.parameters())
    return parameters(module)


@program(rtol=1e-6)
def post_local_sgd_optimizer() -> Values:
    module = DistributedDataParallel(mlp())
    pairs, _ = dist.new_subgroups(2)
    state = post_localSGD_hook.PostLocalSGDState(None, pairs, start_localSGD_iter=2)
    module.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), averagers.PeriodicModelAverager(period=2, warmup_steps=2)
    )
    return train(module, optimizer, steps=5)


@program(rtol=1e-6)
def sampler_and_loader_with_workers() -> Values:
    data = TensorDataset(torch.arange(22.0).view(22, 1).expand(22, 6), torch.arange(22))
    sampler: Any = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=2)
    module = DistributedDataParallel(mlp())
    seen: list[list[int]] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen.append([])
        for inputs, indices in loader:
            seen[-1] += indices.tolist()
            module(inputs / 22).sum().backward()
    return {"seen": seen, "gradient": module.module[0].weight.grad}


@program(rtol=1e-6)
def gradients_averaged_by_hand() -> Values:
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            inputs, targets = batch(10 * step + micro, dist.get_rank())
            nn.functional.mse_loss(module(inputs), targets).backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2 * dist.get_world_size()
        optimizer.step()
    return parameters(module)
