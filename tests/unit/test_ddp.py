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
    return [
        [names[each] for each in bucket.parameters()] for bucket in ddp._ddp[0].reducer._get_zeros_like_grad_buckets()
    ]


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


def test_what_backward_leaves_out_is_an_error_unless_it_is_looked_for() -> None:
    manager = eg.join(layout=eg.ParallelLayout())
    ddp = eg.DistributedDataParallel(manager, Crossed(uses_all=False), bucket_cap_mb=1.0)
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    with pytest.raises(
        eg.InvalidOperationError, match=r"has not reached all parameters; .*find_unused_parameters=True"
    ):
        train(manager, ddp, 1)
    assert all(map(torch.equal, before, ddp.parameters()))


def test_what_is_left_out_stays_as_it_is() -> None:
    manager = eg.join(layout=eg.ParallelLayout())
    ddp = eg.DistributedDataParallel(manager, Crossed(uses_all=False), bucket_cap_mb=1.0, find_unused_parameters=True)
    before = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
    train(manager, ddp, 2)
    changed = {name for name, parameter in ddp.module.named_parameters() if not torch.equal(before[name], parameter)}
    assert changed == {name for name in before if not name.startswith("layers.2.")}


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
