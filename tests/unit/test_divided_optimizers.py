"""With `reduction="reproducible"`, nothing that a step does to an element depends on how ranks divide its parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import elasticgang as eg
from elasticgang.member.interfaces import Reducer
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.state.snapshot_server import SnapshotServer

CPU = torch.device("cpu")
NUM, STEPS = 1003, 4
Optim = Callable[[list[Tensor]], torch.optim.Optimizer]


class Wrapper:
    """Has no gradients of its own."""

    has_started = has_all = True
    form = order = exchanged = ()

    def __init__(self, *, is_reproducible: bool = True) -> None:
        self.is_reproducible = is_reproducible

    def stages_of(self, parameter: Tensor) -> Sequence[int]:
        return ()

    def leave_out_unused(self) -> None: ...

    def contribute(self) -> None: ...

    def finish(self) -> None: ...

    def drop(self, *, rebuild: bool) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """2 x 2 ranks, of which this is the first; the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("sdp", "tp"))
    dist.destroy_process_group()


def manager(*, is_reproducible: bool = True) -> QuorumManager:
    layout = eg.ParallelLayout()
    ours = QuorumManager(LocalRendezvous(layout, CPU), SnapshotServer(), layout, CPU)
    ours.add_reducer(cast(Reducer, Wrapper(is_reproducible=is_reproducible)))
    return ours


def take_step(ours: QuorumManager, optim: eg.Optimizer, max_norm: float | None = None) -> None:
    parameters = [each for group in optim.param_groups for each in group["params"]]
    ours.register_state(parameters=nn.ParameterList(parameters), optim=optim)
    for step in ours.steps(1):
        with step:
            assert optim.step(weight=1.0, max_norm=max_norm)


def divided(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2, 2, dtype=dtype), mesh["sdp"], [Shard(0)]))
    parameter.grad = parameter.detach().clone()
    return parameter


def trained(make: Optim, cuts: list[int], dtype: torch.dtype) -> Tensor:
    """The elements of one parameter, or of the parts that begin at `cuts`, after some steps."""
    generator = torch.Generator().manual_seed(0)
    parts = [nn.Parameter(each.clone()) for each in torch.randn(NUM, generator=generator).to(dtype).tensor_split(cuts)]
    optim = make(cast(list[Tensor], parts))
    for _ in range(STEPS):
        gradient = torch.randn(NUM, generator=generator) * torch.exp(3.0 * torch.randn(NUM, generator=generator))
        for part, own in zip(parts, gradient.to(dtype).tensor_split(cuts), strict=True):
            part.grad = own.clone()
        optim.step()
    return torch.cat([part.detach() for part in parts])


ELEMENTWISE: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
}


# OPTIMIZER-2
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_gives_every_part_the_bits_of_the_whole(name: str, foreach: bool, dtype: torch.dtype) -> None:
    """torch computes the last elements of a tensor by other code than those before."""
    make = partial(ELEMENTWISE[name], foreach=foreach)
    whole = trained(make, [], dtype)
    for cuts in ([1], [501], [13, 29, 333], list(range(1, NUM))):
        assert torch.equal(trained(make, cuts, dtype), whole), cuts


@pytest.fixture
def sdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has a further layout."""
    monkeypatch.setattr(QuorumManager, "layouts", (eg.ParallelLayout(), eg.ParallelLayout(sdp=2)))


class Own(torch.optim.Adafactor):
    """Of a script."""


class WithoutClosure(torch.optim.LBFGS):
    """Of a script; torch's own is refused in any layout."""

    def step(self, closure: Any = None) -> Any:
        raise AssertionError


MIXING: dict[str, Optim] = {
    "Adafactor": Own,
    "LBFGS": WithoutClosure,
    "Muon": torch.optim.Muon,
}


# OPTIMIZER-2
@pytest.mark.parametrize("name", MIXING)
@pytest.mark.usefixtures("sdp")
def test_an_optimizer_that_mixes_elements_is_refused(name: str, mesh: DeviceMesh) -> None:
    ours = manager()
    with pytest.raises(
        eg.NotSupportedError, match=f"must treat each element of a parameter by itself, but {name} does"
    ):
        take_step(ours, eg.Optimizer(ours, MIXING[name]([divided(mesh)])))


REFUSED: dict[str, tuple[Optim, torch.dtype, str]] = {
    "fused": (partial(torch.optim.AdamW, fused=True), torch.float32, "must not have `fused=True`"),
    "bfloat16": (torch.optim.SGD, torch.bfloat16, "must not be float16 or bfloat16"),
    "float16": (torch.optim.SGD, torch.float16, "must not be float16 or bfloat16"),
}


# OPTIMIZER-2
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("sdp")
def test_forms_that_round_the_last_elements_otherwise_are_refused(name: str, mesh: DeviceMesh) -> None:
    make, dtype, message = REFUSED[name]
    ours = manager()
    with pytest.raises(eg.NotSupportedError, match=message):
        take_step(ours, eg.Optimizer(ours, make([divided(mesh, dtype)])))


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["plain sums", "no sdp", "plain tensors"])
def test_they_are_not_refused_where_nothing_depends_on_them(
    kind: str, name: str, mesh: DeviceMesh, request: pytest.FixtureRequest
) -> None:
    make, dtype, _ = REFUSED[name]
    if kind != "no sdp":
        request.getfixturevalue("sdp")
    ours = manager(is_reproducible=kind != "plain sums")
    parameter = divided(mesh, dtype)
    if kind == "plain tensors":
        parameter = nn.Parameter(torch.ones(2, 2, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
    take_step(ours, eg.Optimizer(ours, make([parameter])))


# OPTIMIZER-2
def test_the_norm_is_the_root_of_an_exact_sum() -> None:
    """A float32 sum of these squares loses the small ones."""
    ours = manager()
    parameter = nn.Parameter(torch.zeros(1 << 16))
    parameter.grad = torch.full((1 << 16,), 2.0**-13)
    parameter.grad[0] = 1.0
    gradient = parameter.grad.clone()
    norm = math.sqrt(1.0 + ((1 << 16) - 1) * 2.0**-26)
    take_step(ours, eg.Optimizer(ours, torch.optim.SGD([parameter], lr=1.0)), max_norm=0.5)
    coefficient = torch.tensor(0.5 / (norm + 1e-6), dtype=torch.float64)
    assert torch.equal(parameter.detach(), -(gradient * coefficient))


def test_what_ranks_have_alike_counts_on_the_first_of_them(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of its square on each of them could be rounded. This is the first rank."""
    ours = manager()
    monkeypatch.setattr(QuorumManager, "layout", eg.ParallelLayout(sdp=2, tp=2))
    parameters = [
        nn.Parameter(DTensor.from_local(torch.full((2, 2), value), on, placements))
        for value, on, placements in (
            (1.0, mesh["sdp"], [Shard(0)]),
            (2.0, mesh, [Shard(0), Replicate()]),
            (3.0, mesh, [Shard(0), Shard(1)]),
        )
    ]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    before = [parameter.to_local().detach().clone() for parameter in parameters]  # type: ignore[attr-defined]
    optim = torch.optim.SGD(parameters, lr=1.0)
    take_step(ours, eg.Optimizer(ours, optim, replicated={"tp": parameters[:1]}), max_norm=0.5)
    norm = math.sqrt(4 * (1.0 + 4.0 + 9.0))
    for parameter, old in zip(parameters, before, strict=True):
        expected = old - old * torch.tensor(0.5 / (norm + 1e-6), dtype=torch.float64)
        torch.testing.assert_close(parameter.to_local().detach(), expected.to(torch.float32))  # type: ignore[attr-defined]
