"""DTensor, tensor parallelism and FSDP."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, zeros
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.integration.programs.catalog import Values, batch, mlp, parameters, program, train, whole


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _grid(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


@program(any_size=True)
def dtensor_redistributes() -> Values:
    mesh = _mesh()
    table = torch.arange(60.0).view(10, 6)  # 10 rows do not divide by 4
    rows = distribute_tensor(table, mesh, [Shard(0)])
    everywhere = rows.redistribute(mesh, [Replicate()])
    columns = everywhere.redistribute(mesh, [Shard(1)])
    back = columns.redistribute(mesh, [Shard(0)])  # an all-to-all
    return {
        "rows": rows.to_local(),
        "everywhere": everywhere.to_local(),
        "columns": columns.to_local(),
        "back": back.to_local(),
        "full": back.full_tensor(),
        "placements": str((rows.placements, columns.placements)),
    }


@program(rtol=1e-6, any_size=True)
def dtensor_partial_sums() -> Values:
    mesh = _mesh()
    torch.manual_seed(dist.get_rank())
    local = torch.randn(8, 4)
    summed = DTensor.from_local(local, mesh, [Partial()])
    mean = DTensor.from_local(local, mesh, [Partial("avg")])
    return {
        "replicated": summed.redistribute(placements=[Replicate()]).to_local(),
        "scattered": summed.redistribute(placements=[Shard(0)]).to_local(),
        "mean": mean.full_tensor(),
        "largest": DTensor.from_local(local, mesh, [Partial("max")]).full_tensor(),
        "norm": whole(torch.linalg.vector_norm(distribute_tensor(torch.arange(12.0), mesh, [Shard(0)]))),
    }


@program(rtol=1e-6, any_size=True)
def dtensor_matmul() -> Values:
    mesh = _mesh()
    torch.manual_seed(2)
    left, right = torch.randn(8, 12), torch.randn(12, 4)
    by_rows = distribute_tensor(left, mesh, [Shard(0)]) @ distribute_tensor(right, mesh, [Replicate()])
    inner = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    return {"rows": whole(by_rows), "inner": whole(inner), "inner is": str(inner.placements)}


@program(rtol=1e-6)
def dtensor_on_a_grid_trains() -> Values:
    mesh = _grid("dp", "tp")
    torch.manual_seed(3)
    weight = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0), Shard(1)]).requires_grad_()
    inputs = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0), Replicate()])
    loss = (inputs @ weight).pow(2).sum()
    loss.backward()
    assert weight.grad is not None
    return {"loss": whole(loss.detach()), "gradient": whole(weight.grad), "made": whole(zeros(5, device_mesh=mesh))}


@program(rtol=1e-6)
def distribute_module_shards_what_it_is_told() -> Values:
    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))

    def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(tensor, mesh, [Replicate()]) for tensor in inputs)

    def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.full_tensor()

    module = distribute_module(mlp(), _mesh(), partition, input_fn=enter, output_fn=leave)
    return train(module, part=0)


@program(rtol=1e-5)
def tensor_parallel_trains() -> Values:
    module = parallelize_module(mlp(), _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(module, part=0)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.down(torch.relu(self.up(self.norm(inputs))))
        out: Tensor = self.head(hidden)
        return out


@program(rtol=1e-5)
def sequence_parallel_trains() -> Values:
    torch.manual_seed(4)
    module = parallelize_module(
        _Block(),
        _mesh(),
        {
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        },
    )
    return train(module, part=0)


@program(rtol=1e-5)
def loss_parallel_trains() -> Values:
    torch.manual_seed(5)
    head = parallelize_module(nn.Linear(6, 8), _mesh(), ColwiseParallel(use_local_output=False))
    inputs, targets = torch.randn(5, 6), torch.randint(8, (5,))
    with loss_parallel():
        loss = nn.functional.cross_entropy(head(inputs), targets)
        loss.backward()
    return {"loss": whole(loss.detach()), "gradient": whole(head.weight.grad)}  # type: ignore[arg-type]


@program(rtol=1e-5, any_size=True)
def fsdp1_full_shard() -> Values:
    module = FullyShardedDataParallel(
        mlp(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"), use_orig_params=True
    )
    losses = train(module)["losses"]
    norm = module.clip_grad_norm_(0.1)
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT):
        state = {name: value.clone() for name, value in module.state_dict().items()}
    with FullyShardedDataParallel.summon_full_params(module):
        summoned = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return {"losses": losses, "norm": norm, "state": state, "summoned": summoned}


@program(rtol=1e-5)
def fsdp1_hybrid_shard() -> Values:
    module = FullyShardedDataParallel(
        mlp(),
        device_mesh=_grid("replicate", "shard"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return {"losses": train(module)["losses"]}


@program(rtol=1e-5)
def fsdp1_over_a_process_group(group: dist.ProcessGroup | None = None) -> Values:
    module = FullyShardedDataParallel(
        mlp(),
        process_group=group,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=torch.device("cpu"),
    )
    return {"losses": train(module)["losses"]}


def _fully_shard(module: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in (module[0], module[2], module):
        fully_shard(layer, **options)
    return module


@program(rtol=1e-5, any_size=True)
def fsdp2_trains() -> Values:
    module = _fully_shard(mlp(10), mesh=_mesh())
    return train(module, torch.optim.AdamW(module.parameters(), lr=0.01))


@program(rtol=1e-5)
def fsdp2_finds_its_mesh() -> Values:
    return train(_fully_shard(mlp()))


@program(rtol=1e-5)
def fsdp2_hybrid_trains() -> Values:
    return train(_fully_shard(mlp(), mesh=_grid("replicate", "shard"), reshard_after_forward=False))


@program(rtol=1e-2)
def fsdp2_mixed_precision_trains() -> Values:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    module = _fully_shard(mlp(), mesh=_mesh(), mp_policy=policy)
    return train(module)


@program(rtol=1e-5)
def fsdp2_accumulates_gradients() -> Values:
    module: Any = _fully_shard(mlp(), mesh=_grid("replicate", "shard"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for micro in range(4):
        module.set_requires_gradient_sync(micro == 3)
        module(torch.full((2, 6), float(dist.get_rank() + micro))).sum().backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    return {"norm": whole(norm), **parameters(module)}


@program(rtol=1e-5)
def fsdp2_over_tensor_parallel_trains() -> Values:
    mesh = _grid("dp", "tp")
    module = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    values = train(module, part=dist.get_rank() // 2)
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    placements = {name: str(parameter.placements) for name, parameter in module.named_parameters()}
    return {**values, "norm": whole(norm), "placements": placements}


@program(rtol=1e-5)
def fsdp2_keeps_a_state_dict() -> Values:
    module = _fully_shard(mlp(), mesh=_mesh())
    train(module)
    sharded = {name: value.to_local() for name, value in module.state_dict().items()}
    other = _fully_shard(mlp(), mesh=_mesh())
    other.load_state_dict(module.state_dict())
    run = functools.partial(train, part=1)
    return {"sharded": sharded, "on": run(other)["losses"]}


@program(rtol=1e-5, any_size=True)
def fsdp2_offloads_to_the_cpu() -> Values:
    return train(_fully_shard(mlp(), mesh=_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


@program(rtol=1e-5, any_size=True)
def fsdp1_states_of_model_and_optimizer() -> Values:
    module = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(2):
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()
    full = FullyShardedDataParallel.full_optim_state_dict(module, optimizer)
    part = FullyShardedDataParallel.scatter_full_optim_state_dict(full if dist.get_rank() == 0 else None, module)
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        sharded = module.state_dict()
        module.load_state_dict(sharded)
    return {"full": full, "part": part["state"], "sharded": sorted(sharded)}
