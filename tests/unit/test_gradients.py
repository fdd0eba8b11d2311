"""What `Optimizer` does to gradients of every kind, of a rank that is alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import elasticgang as eg
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.state.snapshot_server import SnapshotServer

CPU = torch.device("cpu")
MAX_NORM = 0.5

Optim = Callable[[list[Tensor]], torch.optim.Optimizer]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """2 x 2 ranks, of which this is the first; the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("sdp", "tp"))
    dist.destroy_process_group()


def manager() -> QuorumManager:
    layout = eg.ParallelLayout()
    return QuorumManager(LocalRendezvous(layout, CPU), SnapshotServer(), layout, CPU)


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def step(ours: QuorumManager, optim: eg.Optimizer, backward: Callable[[], None], max_norm: float | None) -> None:
    """One step, with a weight of 2."""
    ours.register_state(parameters=held(optim), optim=optim)
    for each in ours.steps(1):
        with each:
            backward()
            assert optim.step(weight=2.0, max_norm=max_norm)


def held(optim: eg.Optimizer) -> nn.ParameterList:
    """A module that has the parameters of `optim`."""
    return nn.ParameterList([each for group in optim.param_groups for each in group["params"]])


def norm_seen(ours: QuorumManager, optim: eg.Optimizer, parameter: Tensor) -> float:
    """The norm of all gradients by which `optim`, which steps by the gradient, clips that of `parameter`."""
    assert parameter.grad is not None
    before, gradient = local(parameter).detach().clone(), local(parameter.grad).clone()
    step(ours, optim, lambda: None, MAX_NORM)
    clipped = before - local(parameter).detach()
    return float(MAX_NORM * (gradient.abs().sum() / clipped.abs().sum()))


def part(mesh: DeviceMesh, placements: list[Placement], value: float) -> nn.Parameter:
    """A DTensor whose part on this rank is four times `value`; its gradient is the same."""
    parameter = nn.Parameter(DTensor.from_local(torch.full((2, 2), value), mesh, placements, run_check=False))
    parameter.grad = parameter.detach().clone()
    return parameter


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@pytest.mark.parametrize(
    "make",
    [
        sgd,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0, fused=True),
    ],
    ids=["default", "foreach", "fused"],
)
def test_parameters_of_two_meshes_and_plain_ones_are_clipped_and_applied_together(
    make: Optim, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = manager()
    monkeypatch.setattr(QuorumManager, "layout", eg.ParallelLayout(sdp=2, tp=2))
    plain = nn.Parameter(torch.full((2, 2), 3.0))
    plain.grad = plain.detach().clone()
    unused = nn.Parameter(torch.ones(2))
    parameters: list[Tensor] = [
        part(mesh["sdp"], [Shard(0)], 1.0),
        part(mesh, [Shard(0), Shard(1)], 2.0),
        plain,
        unused,
    ]
    optim = eg.Optimizer(ours, make(parameters))
    for parameter in parameters:
        assert parameter is unused or parameter.grad is not None
    with caplog.at_level(logging.WARNING):
        ours.register_state(parameters=held(optim), optim=optim)
        for each in ours.steps(2):
            with each:
                assert optim.step(weight=2.0, max_norm=MAX_NORM)
            for parameter in parameters[:3]:
                parameter.grad = torch.zeros_like(parameter)  # of the second step, which changes nothing
    norm = math.sqrt(4 * (1.0 + 4.0 + 9.0)) / 2.0
    scale = MAX_NORM / (norm + 1e-6) / 2.0
    for parameter, value in zip(parameters[:3], (1.0, 2.0, 3.0), strict=True):
        torch.testing.assert_close(local(parameter).detach(), torch.full((2, 2), value * (1.0 - scale)))
    assert torch.equal(unused, torch.ones(2))
    told = [record.message for record in caplog.records if "plain tensors beside DTensors" in record.message]
    assert len(told) == (0 if make is sgd else 1)


def test_what_ranks_have_alike_counts_once_whether_named_or_known_or_both(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = manager()
    monkeypatch.setattr(QuorumManager, "layout", eg.ParallelLayout(sdp=2, tp=2))
    named = part(mesh["sdp"], [Shard(0)], 1.0)
    known = part(mesh, [Shard(0), Replicate()], 2.0)
    both = part(mesh, [Shard(0), Replicate()], 3.0)
    optim = eg.Optimizer(ours, sgd([named, known, both]), replicated={"tp": [named, both]})
    assert norm_seen(ours, optim, named) == pytest.approx(math.sqrt(4 * (1.0 + 4.0 + 9.0) / 2))


def test_an_optimizer_of_one_mesh_keeps_its_form(mesh: DeviceMesh) -> None:
    parameters: list[Tensor] = [part(mesh["sdp"], [Shard(0)], 1.0), part(mesh, [Shard(0), Shard(1)], 2.0)]
    ours = manager()
    optim = eg.Optimizer(ours, torch.optim.AdamW(parameters, foreach=True))
    step(ours, optim, lambda: None, None)
    assert optim.param_groups[0]["foreach"] is True


@pytest.mark.parametrize("max_norm", [None, MAX_NORM])
def test_a_group_without_gradients_is_no_error(max_norm: float | None) -> None:
    frozen, unused, used = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)

    def make(groups: list[list[Tensor]]) -> eg.Optimizer:
        return eg.Optimizer(ours, torch.optim.SGD([{"params": group} for group in groups], lr=1.0))

    ours = manager()
    step(ours, make([[frozen], [unused]]), lambda: None, max_norm)
    assert torch.equal(frozen, torch.ones(2))
    ours = manager()
    step(ours, make([[frozen, unused], [used]]), lambda: torch.autograd.backward((used * 4.0).sum()), max_norm)
    assert torch.equal(unused, torch.ones(2))
    length = 2.0 if max_norm is None else MAX_NORM / 2.0**0.5
    torch.testing.assert_close(used.detach(), torch.full((2,), 1.0 - length))


@pytest.mark.parametrize("max_norm", [None, MAX_NORM])
def test_sparse_gradients_are_divided_and_clipped_as_dense_ones(max_norm: float | None) -> None:
    weights = []
    for sparse in (True, False):
        torch.manual_seed(0)
        embedding, linear = nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 1)
        ours = manager()
        optim = eg.Optimizer(ours, sgd([*embedding.parameters(), *linear.parameters()]))

        def backward(embedding: nn.Embedding = embedding, linear: nn.Linear = linear) -> None:
            torch.autograd.backward(
                linear(embedding(torch.tensor([1, 1, 4]))).square().sum()
            )  # 1 is in the gradient twice

        step(ours, optim, backward, max_norm)
        weights.append((embedding.weight.detach(), linear.weight.detach()))
    torch.testing.assert_close(weights[0], weights[1])


def test_the_data_parallel_wrapper_refuses_dtensors(mesh: DeviceMesh) -> None:
    """torch's own fails in the first backward."""
    module = nn.Linear(2, 2)
    module.weight = part(mesh["tp"], [Shard(0)], 1.0)
    with pytest.raises(ValueError, match="weight is a DTensor; use `ShardedDataParallel`"):
        eg.DistributedDataParallel(manager(), module, over="rdp")


def test_a_complex_gradient_counts_with_both_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.full((2,), 3.0 + 4.0j)
    ours = manager()
    monkeypatch.setattr(QuorumManager, "layout", eg.ParallelLayout(tp=2))
    assert norm_seen(ours, eg.Optimizer(ours, sgd([parameter])), parameter) == pytest.approx(math.sqrt(50.0))
