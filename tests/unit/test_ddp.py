"""The data-parallel wrapper of a rank that is alone: its buckets, and gradients that backward leaves out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import elasticgang as eg

CPU = torch.device("cpu")


class Crossed(nn.Module):
    """Uses its layers in another order than that in which they are registered; the last of them only if asked."""

    def __init__(self, *, uses_all: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(6))
        self.uses_all = uses_all

    def forward(self, x: Tensor) -> Tensor:
        for index in (3, 0, 5, 1, 4, 2) if self.uses_all else (3, 0, 5, 1, 4):
            x = self.layers[index](x)
        return x


def buckets(ddp: eg.DistributedDataParallel) -> list[list[str]]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in ddp.module.named_parameters()}
    return [[names[each] for each in bucket] for bucket in ddp.buckets]


def train(manager: eg.QuorumManager, ddp: eg.DistributedDataParallel, num_steps: int) -> eg.Optimizer:
    optim = eg.Optimizer(manager, torch.optim.SGD(ddp.parameters(), lr=0.1))
    manager.register_state(model=ddp, optim=optim)
    for step in manager.steps(num_steps):
        with step:
            for last in (False, True):
                with ddp.accumulate(last=last):
                    ddp(torch.ones(2, 300)).sum().backward()
            assert optim.step(weight=2.0)
    return optim


# DDP-2
@pytest.mark.parametrize("finds_unused", [False, True])
def test_the_buckets_of_a_veteran_are_those_of_a_newcomer(finds_unused: bool) -> None:
    manager = eg.join(layout=eg.ParallelLayout())

    def build(manager: eg.QuorumManager) -> eg.DistributedDataParallel:
        return eg.DistributedDataParallel(manager, Crossed(), bucket_cap_mb=1.0, find_unused_parameters=finds_unused)

    veteran = build(manager)
    at_first = buckets(veteran)
    train(manager, veteran, 3)
    newcomer = build(eg.join(layout=eg.ParallelLayout()))
    assert buckets(veteran) == at_first == buckets(newcomer)
    assert len(at_first) > 1
    assert at_first[0][0].startswith("layers.5.")  # what is registered last is likely to be ready first


@pytest.mark.parametrize("bucket_cap_mb", [0.001, 1.0, 25.0])
@pytest.mark.parametrize("finds_unused", [False, True])
def test_what_the_last_backward_leaves_out_is_reduced_all_the_same(
    bucket_cap_mb: float, finds_unused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    module, reference = Crossed(), Crossed()
    reference.load_state_dict(module.state_dict())
    manager = eg.join(layout=eg.ParallelLayout())
    ddp = eg.DistributedDataParallel(manager, module, bucket_cap_mb=bucket_cap_mb, find_unused_parameters=finds_unused)
    optim = eg.Optimizer(manager, torch.optim.SGD(ddp.parameters(), lr=0.01))
    manager.register_state(model=ddp, optim=optim)
    plain = torch.optim.SGD(reference.parameters(), lr=0.01)
    for step in manager.steps(6):
        # All; all but one, which the first slot has used; all but one that nobody has used.
        uses = ((True, True), (True, False), (False, False))[step.index % 3]
        with step:
            for last, uses_all in enumerate(uses):
                module.uses_all = reference.uses_all = uses_all
                with ddp.accumulate(last=bool(last)):
                    ddp(torch.full((2, 300), 0.1)).square().sum().backward()
                (reference(torch.full((2, 300), 0.1)).square().sum() / 2).backward()
            assert optim.step(weight=2.0)
        plain.step()
        plain.zero_grad()
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    told = [record.message for record in caplog.records if "did not reach all parameters" in record.message]
    assert len(told) == (0 if finds_unused else 1)


# MANAGER-5
def test_gradients_are_made_ready_before_they_are_applied_and_not_in_a_step_that_fails() -> None:
    manager = eg.join(layout=eg.ParallelLayout())
    manager.register_state(module=nn.Linear(1, 1))
    calls: list[str] = []

    def commit() -> bool:
        return manager.commit(
            3.0,
            lambda total, square: calls.append(f"apply {total:g} {square:g}"),
            lambda: 4.0,
            prepare=lambda total, square: calls.append(f"prepare {total:g} {square:g}"),
        )

    for step in manager.steps(1):
        with step:
            if not calls:
                calls.append("report")
                manager.report_error(ValueError("not finite"))
                assert not commit()
            else:
                assert commit()
    assert calls == ["report", "prepare 3 4", "apply 3 4"]
