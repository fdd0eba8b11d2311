"""The reduce-scatter along the tree: its order, and what it refuses. `test_sdp_bits.py` runs it with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import elasticgang as eg
from elasticgang.layout import ParallelLayout
from elasticgang.train.summation_tree import insert, total_of
from elasticgang.train.tree_reduce_scatter import (
    TreeReduceScatter,
    add_along_tree,
    check_is_sharded,
    check_layouts,
    install,
)

CPU = torch.device("cpu")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("sdp",))
    dist.destroy_process_group()


def add(left: torch.Tensor, right: torch.Tensor) -> None:
    left.add_(right)


def rows_of(count: int) -> torch.Tensor:
    """Of very different sizes, so that nearly every order of addition gives other bits."""
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(-9, 9, (count, 50), generator=generator)
    return torch.randn(count, 50, generator=generator) * 2.0**sizes


# SCATTER-1
@pytest.mark.parametrize("sdp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_runs", [1, 2, 3, 5])
def test_runs_of_slots_are_nodes_of_the_tree_over_all_slots(num_runs: int, sdp: int) -> None:
    """Whole groups add their runs along the tree of runs, as `ReproducibleSum` does over the replica groups."""
    slots = rows_of(num_runs * sdp)
    nodes: dict[range, torch.Tensor] = {}
    for slot, gradient in enumerate(slots.clone()):
        insert(nodes, range(slot, slot + 1), gradient, add)
    runs: dict[range, torch.Tensor] = {}
    for run in range(num_runs):
        reduced = torch.empty(50)
        add_along_tree(slots[run * sdp : (run + 1) * sdp].clone(), reduced)
        insert(runs, range(run, run + 1), reduced, add)
    expected, found = (total_of(each, add) for each in (nodes, runs))
    assert torch.equal(found, expected)


def test_the_order_of_ranks_has_other_bits() -> None:
    """Otherwise the test before would show nothing."""
    rows, found = rows_of(8), torch.empty(50)
    in_order = rows[0].clone()
    for row in rows[1:]:
        in_order += row
    add_along_tree(rows.clone(), found)
    assert not torch.equal(found, in_order)


@pytest.mark.parametrize("sdp", [3, 6, 12])
def test_an_sdp_that_is_no_power_of_two_is_refused(sdp: int) -> None:
    good = [ParallelLayout(sdp=size) for size in (1, 2, 4, 64)]
    check_layouts(good)
    with pytest.raises(ValueError, match=rf"`sdp` must be a power of two, but is {sdp} in 'sdp={sdp}'"):
        check_layouts([*good, ParallelLayout(sdp=sdp)])


def test_an_sdp_of_a_fallback_layout_is_refused_at_the_start() -> None:
    manager = eg.join(layout=eg.ParallelLayout(fallback=(eg.ParallelLayout(sdp=3),)))
    eg.ShardedDataParallel(manager, nn.Linear(1, 1))
    with pytest.raises(ValueError, match="must be a power of two, but is 3"):
        eg.ShardedDataParallel(manager, nn.Linear(1, 1), reduction="reproducible")


# SCATTER-1
def test_another_dtype_than_that_of_the_parameters_is_refused() -> None:
    scatter = TreeReduceScatter("layers.0", {torch.float32})
    assert scatter.allocate((3,), dtype=torch.float32, device=CPU).shape == (3,)
    with pytest.raises(eg.InvalidOperationError, match=r"of layers.0 adds those of the ranks in torch.bfloat16"):
        scatter.allocate((3,), dtype=torch.bfloat16, device=CPU)


class Scatter:
    """Tells in which dtypes gradients are reduced."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.dtypes.append(dtype)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        output_tensor.copy_(input_tensor.view(2, -1)[0])


# SHARDED-11
@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_are_reduced_in_one_dtype_whatever_is_frozen_in_the_first_forward(
    is_frozen: bool, mesh: DeviceMesh
) -> None:
    """As on a rank that restarts while a layer is frozen."""
    module, scatter = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Scatter()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for each in (module[1], module):
        fully_shard(each, mesh=mesh, mp_policy=policy)
    eg.ShardedDataParallel(eg.join(layout=eg.ParallelLayout()), module)
    cast(FSDPModule, module[1]).set_custom_reduce_scatter(cast(Any, scatter))
    module[1].requires_grad_(not is_frozen)
    module(torch.ones(1, 2)).sum().backward()
    assert set(scatter.dtypes) == (set() if is_frozen else {torch.float32})
    assert all(each.requires_grad != is_frozen for each in module[1].parameters())
    module[1].requires_grad_(True)
    module(torch.ones(1, 2)).sum().backward()
    assert set(scatter.dtypes) == {torch.float32}
    assert all(each.grad is not None and each.grad.dtype is torch.float32 for each in module[1].parameters())


# SHARDED-11
def test_what_is_frozen_in_the_first_forward_may_have_another_dtype(mesh: DeviceMesh) -> None:
    """torch reduces those of one dtype, such as of adapters beside weights in bfloat16."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    eg.ShardedDataParallel(eg.join(layout=eg.ParallelLayout()), module)
    module[1].requires_grad_(False)
    module(torch.ones(1, 2)).sum().backward()
    assert [each.grad is not None for each in module.parameters()] == [True, True, False, False]


# SCATTER-2
def test_two_reductions_in_a_slot_are_refused(mesh: DeviceMesh) -> None:
    scatter, given, found = TreeReduceScatter("", {torch.float32}), torch.ones(4), torch.empty(2)
    for _ in range(2):
        scatter.begin_slot()
        scatter(found, given, mesh.get_group(), dist.ReduceOp.SUM)
    with pytest.raises(eg.InvalidOperationError, match="reduces that of the whole module again"):
        scatter(found, given, mesh.get_group(), dist.ReduceOp.SUM)


def test_each_sharded_module_has_a_reduce_scatter_of_its_own(mesh: DeviceMesh) -> None:
    """Frozen parameters need none, and tied ones are of the first module that has them."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    cast(nn.Linear, inner[1]).weight = cast(nn.Linear, inner[0]).weight
    module = nn.Sequential(nn.Linear(2, 2), inner, nn.Linear(2, 2).requires_grad_(False))
    fully_shard(module[1], mesh=mesh)
    fully_shard(module[2], mesh=mesh)
    assert len(install(module)) == 1
    with pytest.raises(ValueError, match=r"does not shard 0\.weight"):
        check_is_sharded(module)
    fully_shard(module, mesh=mesh)
    check_is_sharded(module)
    assert len(install(module)) == 2


def test_parameters_that_fully_shard_ignores_are_refused(mesh: DeviceMesh) -> None:
    module = nn.Linear(2, 2)
    fully_shard(module, mesh=mesh, ignored_params={module.bias})
    with pytest.raises(ValueError, match="does not shard bias: its gradients would be added in another order"):
        check_is_sharded(module)
    module.bias.requires_grad_(False)
    check_is_sharded(module)
