"""What an optimizer must not do: applying a step is atomic (RULE-10). And how a script must not use a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import elasticgang as eg
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.state.snapshot_server import SnapshotServer

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by the import
def test_an_optimizer_that_communicates_in_its_step_is_refused() -> None:
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    manager = eg.join()
    weight = torch.nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([weight], lr=0.1)
    optim = eg.Optimizer(manager, plain)
    manager.register_state(weights=torch.nn.ParameterList([weight]), optim=optim)
    refused = 0
    for step in manager.steps(1):
        with step:
            sharded = ZeroRedundancyOptimizer([weight], optimizer_class=torch.optim.SGD, lr=0.1)
            averaging = PostLocalSGDOptimizer(plain, averager=None)  # type: ignore[arg-type]
            for communicating in (sharded, averaging):
                name = type(communicating).__name__
                with pytest.raises(eg.NotSupportedError, match=f"must not communicate in its step, but {name} does"):
                    eg.Optimizer(manager, communicating)
                refused += 1
            weight.grad = torch.ones(2)
            optim.step(weight=1.0)
    assert refused == 2
    torch.distributed.destroy_process_group()


def test_a_step_is_entered_once() -> None:
    """Otherwise the samples of one step would be used twice, and those of the next one never."""
    manager = eg.join()
    weight = torch.nn.Parameter(torch.ones(2))
    optim = eg.Optimizer(manager, torch.optim.SGD([weight], lr=0.1))
    manager.register_state(weights=torch.nn.ParameterList([weight]), optim=optim)
    committed = []
    for step in manager.steps(2):
        with step:
            weight.grad = torch.ones(2)
            assert optim.step(weight=1.0)
        with pytest.raises(eg.InvalidOperationError, match=f"step {step.index} is over; write one `with step:`"):
            step.__enter__()
        committed.append(manager.committed_steps)
    assert committed == [1, 2]


def test_an_optimizer_whose_step_needs_a_closure_is_refused() -> None:
    manager = eg.join()
    weight = torch.nn.Parameter(torch.ones(2))
    lbfgs = torch.optim.LBFGS([weight])
    with pytest.raises(eg.NotSupportedError, match="step without arguments, but that of LBFGS needs `closure`"):
        eg.Optimizer(manager, lbfgs)
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SparseAdam):
        optim = kind([weight], lr=0.1)
        torch.optim.lr_scheduler.LinearLR(optim)  # replaces the method
        eg.Optimizer(manager, optim)


# OPTIMIZER-3
@pytest.mark.parametrize("adds_group", [True, False], ids=["a group", "a parameter of a group"])
def test_other_parameter_groups_than_those_of_the_first_step_are_refused(adds_group: bool) -> None:
    manager = eg.join()
    weight, later = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    sgd = torch.optim.SGD([weight], lr=0.1)
    optim = eg.Optimizer(manager, sgd)
    manager.register_state(weights=torch.nn.ParameterList([weight]), optim=optim)
    sgd.add_param_group({"params": [torch.nn.Parameter(torch.ones(2), requires_grad=False)]})  # it may here
    num = "[1, 1, 1]" if adds_group else "[2, 1]"
    refused = []
    for step in manager.steps(2):
        with step:
            weight.grad = torch.ones(2)
            if step.index == 1:
                first = [{**group, "params": list(group["params"])} for group in sgd.param_groups]
                if adds_group:
                    sgd.add_param_group({"params": [later]})
                else:
                    sgd.param_groups[0]["params"].append(later)
                told = re.escape(f"with [1, 1] parameters, but have {num} now")
                with pytest.raises(eg.InvalidOperationError, match=told):
                    optim.step(weight=1.0)
                refused.append(step.index)
                sgd.param_groups[:] = first
            assert optim.step(weight=1.0)
    assert (refused, manager.committed_steps) == ([1], 2)


class Noisy(torch.optim.SGD):
    """Draws in its step, as optimizers with noise or stochastic rounding do."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__([weight], lr=0.1)
        self.drawn: list[list[float]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.drawn.append(torch.rand(3).tolist())


def drawn_with(batches: eg.GlobalBatch | None, seed: int) -> tuple[list[list[float]], list[list[float]]]:
    """What three steps draw in their applies, and after them."""
    manager = eg.join()
    weight = torch.nn.Parameter(torch.ones(2))
    noisy = Noisy(weight)
    optim = eg.Optimizer(manager, noisy)
    manager.register_state(weights=torch.nn.ParameterList([weight]), optim=optim)
    after = []
    torch.manual_seed(seed)
    for step in manager.steps(3):
        with step:
            for slot in batches.slots(step) if batches is not None else ():
                torch.rand(slot.num_samples)  # as dropout does
            weight.grad = torch.ones(2)
            assert optim.step(weight=1.0)
            after.append(torch.rand(3).tolist())
    return noisy.drawn, after


# OPTIMIZER-4
def test_what_an_apply_draws_does_not_depend_on_the_slots_of_the_rank() -> None:
    first = drawn_with(eg.GlobalBatch(64, size=16, slot=2, seed=1), seed=1)
    assert drawn_with(eg.GlobalBatch(64, size=16, slot=8, seed=1), seed=2) == first  # as if it had other slots
    assert drawn_with(eg.GlobalBatch(64, size=16, slot=2, seed=2), seed=1) != first
    assert len({str(each) for of_place in first for each in of_place}) == 6


def test_without_slots_the_generators_are_the_scripts() -> None:
    drawn, after = drawn_with(None, seed=3)
    torch.manual_seed(3)
    assert [torch.rand(3).tolist() for _ in range(6)] == [
        each for pair in zip(drawn, after, strict=True) for each in pair
    ]


class Beside(LocalRendezvous):
    """As if another rank added `others` to the first sum, that of the totals."""

    def __init__(self, others: Sequence[float] = ()) -> None:
        super().__init__(eg.ParallelLayout(), CPU)
        self._others, self.sums = others, list[list[float]]()

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        others = self._others if not self.sums and self._others else [0.0] * len(values)
        self.sums.append([own + other for own, other in zip(values, others, strict=True)])
        return super().start_sum(self.sums[-1])


def totals_with(batches: Sequence[eg.GlobalBatch], others: Sequence[float] = ()) -> list[float]:
    """The sums of a rank's first step, which it commits with samples of `batches`."""
    rendezvous = Beside(others)
    manager = eg.QuorumManager(rendezvous, SnapshotServer(), eg.ParallelLayout(), CPU)
    weight = torch.nn.Parameter(torch.ones(2))
    optim = eg.Optimizer(manager, torch.optim.SGD([weight], lr=0.1))
    manager.register_state(weights=torch.nn.ParameterList([weight]), optim=optim)
    with next(manager.steps(1)) as step:
        for each in batches:
            list(each.slots(step))
        weight.grad = torch.ones(2)
        assert optim.step(weight=1.0)
    return rendezvous.sums[0]


@pytest.mark.parametrize(
    "other",
    [
        {"num_samples": 65},
        {"size": 8},
        {"slot": 2},
        {"seed": 2},
        {"sampler": lambda seed, step: range(16)},
    ],
    ids=lambda other: next(iter(other)),
)
# DRIVER-3
def test_ranks_that_take_samples_of_different_global_batches_all_raise(other: dict[str, Any]) -> None:
    options: dict[str, Any] = {"num_samples": 64, "size": 16, "slot": 4, "seed": 1}
    batches = eg.GlobalBatch(**options), eg.GlobalBatch(**{**options, **other})
    totals = [totals_with([each]) for each in batches]
    for own, others in zip(batches, reversed(totals), strict=True):
        with pytest.raises(eg.InvalidOperationError, match="take step 0 from different global batches") as raised:
            totals_with([own], others)
        assert f"`GlobalBatch({own.num_samples}, size={own.size}, slot={own.slot}, seed={own.seed})`" in str(
            raised.value
        )


# DRIVER-3
def test_ranks_may_ask_for_global_batches_in_any_order_and_some_for_none() -> None:
    first, second = eg.GlobalBatch(64, size=16, slot=4), eg.GlobalBatch(80, size=8, slot=4)
    both = totals_with([first, second])
    totals_with([second, first, second], both)
    totals_with([], both)
    with pytest.raises(eg.InvalidOperationError, match="different global batches"):
        totals_with([first], both)
