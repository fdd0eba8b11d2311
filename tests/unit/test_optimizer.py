"""What an optimizer must not do: applying a step is atomic (RULE-10). And how a script must not use a step."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import elasticgang as eg
from elasticgang.gang.fake import FakeGang
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.state.registered_state import RegisteredState
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


def test_a_second_loop_is_refused_and_names_the_way_to_have_epochs() -> None:
    ours, parameter = eg.join(), torch.nn.Parameter(torch.ones(2))
    optim = eg.Optimizer(ours, torch.optim.SGD([parameter], lr=0.1))
    ours.register_state(parameters=torch.nn.ParameterList([parameter]), optim=optim)
    for step in ours.steps(2):
        with step:
            parameter.sum().backward()  # type: ignore[no-untyped-call]
            assert optim.step(weight=1.0)
    with pytest.raises(eg.InvalidOperationError, match=r"one loop over `steps` .* tell the epoch by `step\.index`"):
        next(ours.steps(4))


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


class Both(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class Whole(Both):
    """And says what their state is."""

    def state_dict(self) -> dict[str, Any]:
        for part in self.parts:
            self.state.update(part.state)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state


class Named(Whole):
    """In a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}


def parts_of(model: torch.nn.Linear) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.1)]


def test_an_optimizer_that_leaves_out_the_state_of_others_in_it_is_refused() -> None:
    manager = eg.join()
    model = torch.nn.Linear(2, 2)
    told = "Both has other optimizers in `parts`, and torch's `state_dict` and `load_state_dict`"
    with pytest.raises(eg.NotSupportedError, match=told):
        eg.Optimizer(manager, Both(*parts_of(model)))
    optim = eg.Optimizer(manager, Named(*parts_of(model)))
    with pytest.raises(
        TypeError, match=r"optim \(Optimizer\) has `param_groups`, so that its state dict must have `state`"
    ):
        manager.register_state(model=model, optim=optim)


def test_an_optimizer_of_others_may_say_what_their_state_is() -> None:
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    wholes = [Whole(*parts_of(model)) for model in models]
    states = [RegisteredState(), RegisteredState()]
    for model, whole, state in zip(models, wholes, states, strict=True):
        eg.Optimizer(eg.join(), whole)
        state.register(model=model, optim=whole)

    def train(number: int) -> None:
        models[number](torch.ones(1, 2)).square().sum().backward()
        wholes[number].step()
        wholes[number].zero_grad()

    train(0)
    train(0)
    states[0].begin_step()
    states[1].load({"large": copy.deepcopy(states[0].large()), "small": states[0].small.copy()})
    for _ in range(3):
        train(0)
        train(1)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


# OPTIMIZER-3
@pytest.mark.parametrize("change", ["a group", "a parameter of a group", "another parameter"])
def test_other_parameter_groups_than_those_of_the_first_step_are_refused(change: str) -> None:
    manager = eg.join()
    weight, later = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    sgd = torch.optim.SGD([weight], lr=0.1)
    optim = eg.Optimizer(manager, sgd)
    manager.register_state(weights=torch.nn.ParameterList([weight]), optim=optim)
    sgd.add_param_group({"params": [torch.nn.Parameter(torch.ones(2), requires_grad=False)]})  # it may here
    num = {"a group": "[1, 1, 1]", "a parameter of a group": "[2, 1]", "another parameter": "others"}[change]
    refused = []
    for step in manager.steps(2):
        with step:
            weight.grad = torch.ones(2)
            if step.index == 1:
                first = [{**group, "params": list(group["params"])} for group in sgd.param_groups]
                if change == "a group":
                    sgd.add_param_group({"params": [later]})
                elif change == "a parameter of a group":
                    sgd.param_groups[0]["params"].append(later)
                else:
                    sgd.param_groups[0]["params"][0] = later
                told = re.escape(f"with [1, 1] parameters, but have {num} now")
                with pytest.raises(eg.InvalidOperationError, match=told):
                    optim.step(weight=1.0)
                refused.append(step.index)
                sgd.param_groups[:] = first
            assert optim.step(weight=1.0)
    assert (refused, manager.committed_steps) == ([1], 2)


# OPTIMIZER-5
def test_an_optimizer_that_is_not_registered_is_refused() -> None:
    manager = eg.join()
    model = torch.nn.Linear(2, 2)
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model)
    with next(manager.steps(1)):
        with pytest.raises(
            eg.InvalidOperationError, match=r"register the optimizer before the first step.*optim=optim"
        ):
            optim.step(weight=1.0)
        manager.register_state(optim=optim.optim)
        assert optim.step(weight=1.0)


class Scale:
    """An object of the script with a parameter."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.data.copy_(state["weight"])


# OPTIMIZER-5
def test_a_parameter_that_is_in_nothing_that_is_registered_is_refused() -> None:
    manager = eg.join()
    model, scale = torch.nn.Linear(2, 2), Scale()
    model.bias.requires_grad_(False)  # it may be anywhere
    optim = eg.Optimizer(manager, torch.optim.SGD([model.bias, model.weight, scale.weight], lr=0.1))
    manager.register_state(weights=torch.nn.ParameterList([model.weight]), optim=optim)
    with next(manager.steps(1)):
        told = r"a parameter of the optimizer, of the shape \[3\], is in no module that is registered"
        with pytest.raises(eg.InvalidOperationError, match=told):
            optim.step(weight=1.0)
        manager.register_state(scale=scale)
        assert optim.step(weight=1.0)


def test_a_parameter_that_no_wrapped_module_has_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = eg.join()
    model, beside = eg.DistributedDataParallel(manager, torch.nn.Linear(2, 2)), torch.nn.Linear(2, 5)
    optim = eg.Optimizer(manager, torch.optim.SGD([*model.parameters(), *beside.parameters()], lr=0.1))
    manager.register_state(model=model, beside=beside, optim=optim)
    for step in manager.steps(2):
        with step:
            with model.accumulate(last=True):
                beside(model(torch.ones(1, 2))).sum().backward()
            assert optim.step(weight=1.0)
    told = [line for line in caplog.messages if "in no wrapped module" in line]
    assert len(told) == 1
    assert told[0].startswith("2 parameters of the optimizer, the first of the shape [5, 2], are in no wrapped module")


def test_a_parameter_that_comes_into_the_wrapped_module_later_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """As those of adapters: the ranks reduce what the module had when it was wrapped."""
    manager = eg.join()
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = eg.DistributedDataParallel(manager, module)
    module.append(torch.nn.Linear(2, 5))
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    with next(manager.steps(1)):
        with model.accumulate(last=True):
            model(torch.ones(1, 2)).sum().backward()
        assert optim.step(weight=1.0)
    told = "2 parameters of the optimizer, the first of the shape [5, 2], are in no wrapped module, as it was when"
    assert [line for line in caplog.messages if line.startswith(told)]


class Paired(LocalRendezvous):
    """As if another rank had other samples."""

    def __init__(self, num_collectives: int) -> None:
        super().__init__(eg.ParallelLayout(), CPU)
        self.gangs = replace(self.gangs, dp=FakeGang(CPU, size=2))
        self.num_collectives = num_collectives


@pytest.mark.parametrize(("num_collectives", "is_told"), [(0, True), (1, False)])
def test_gradients_that_nothing_sums_over_the_ranks_are_told(
    num_collectives: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layout = eg.ParallelLayout()
    manager = eg.QuorumManager(Paired(num_collectives), SnapshotServer(), layout, CPU)
    model = torch.nn.Linear(2, 2)
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    for step in manager.steps(2):
        with step:
            model(torch.ones(1, 2)).sum().backward()
            assert optim.step(weight=1.0)
    told = [line for line in caplog.messages if "2 parameters of the optimizer" in line and "no wrapped module" in line]
    assert len(told) == len(caplog.messages) == is_told


# OPTIMIZER-6
@pytest.mark.parametrize(
    ("is_given", "is_scaled", "told"),
    [
        (True, True, None),
        (False, False, None),
        (True, False, "the scaler has scaled no loss"),
        (False, True, "a registered scaler has scaled losses, but no optimizer divides"),
    ],
)
def test_a_scale_by_which_nothing_is_multiplied_or_divided_has_a_warning(
    is_given: bool, is_scaled: bool, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    manager, scaler = eg.join(), torch.amp.GradScaler("cpu")
    model = eg.DistributedDataParallel(manager, torch.nn.Linear(2, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optim = eg.Optimizer(manager, sgd, scaler=scaler if is_given else None)
    manager.register_state(model=model, optim=optim, scaler=scaler)
    for step in manager.steps(2):
        with step:
            with model.accumulate(last=True):
                loss = model(torch.ones(1, 2)).sum()
                (scaler.scale(loss) if is_scaled else loss).backward()
            assert optim.step(weight=1.0)
    assert len(caplog.messages) == (told is not None)
    assert all(line.startswith(told or "") for line in caplog.messages)


# OPTIMIZER-6
def test_a_scaler_of_another_optimizer_has_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    manager, scaler = eg.join(), torch.amp.GradScaler("cpu")
    model = eg.DistributedDataParallel(manager, torch.nn.Linear(2, 2))
    scaled, plain = (torch.optim.SGD([each], lr=0.1) for each in model.parameters())
    optims = [eg.Optimizer(manager, scaled, scaler=scaler), eg.Optimizer(manager, plain)]
    manager.register_state(model=model, scaled=scaled, plain=plain, scaler=scaler)
    for step in manager.steps(2):
        with step:
            with model.accumulate(last=True):
                loss = model(torch.ones(1, 2)).sum()
                (loss if step.index else scaler.scale(loss)).backward()
            assert optims[step.index].step(weight=1.0)
    assert not caplog.messages


# ALIKE-2
def test_what_requires_gradients_is_read_before_the_vote_and_not_when_a_peer_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meanwhile a reducer may be made anew, for which all parameters require them."""
    manager, module = eg.join(), torch.nn.Linear(2, 2)
    model = eg.DistributedDataParallel(manager, module)
    module.bias.requires_grad_(False)
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    commit, given = manager.commit, {}

    def and_keep(*args: Any, **options: Any) -> bool:
        given.update(options)
        return commit(*args, **options)

    monkeypatch.setattr(manager, "commit", and_keep)
    with next(manager.steps(1)):
        with model.accumulate(last=True):
            model(torch.ones(1, 2)).sum().backward()
        optim.step(weight=1.0)
    module.bias.requires_grad_(True)
    assert dict(given["settings"]())["what requires gradients in parameter group 0"] == "each parameter but 1"


class Counting(torch.optim.SGD):
    """Slows down by the number of its steps, which its state dict lacks."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.num_steps, self.name, self.is_new = 0, "counting", True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps, self.is_new = self.num_steps + 1, False
        super().step()


class Saving(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict.pop("num_steps")
        super().load_state_dict(state_dict)


# OPTIMIZER-7
@pytest.mark.parametrize(("kind", "is_told"), [(Counting, True), (Saving, False), (torch.optim.SGD, False)])
def test_a_number_that_the_state_dict_of_an_optimizer_lacks_is_named_once(
    kind: type[torch.optim.SGD], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    manager, model = eg.join(), torch.nn.Linear(2, 2)
    sgd = kind(model.parameters())
    optim, schedule = eg.Optimizer(manager, sgd), torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9)
    manager.register_state(model=model, optim=optim, schedule=schedule)
    for step in manager.steps(3):
        with step:
            model(torch.ones(1, 2)).sum().backward()
            if optim.step(weight=1.0):
                schedule.step()
    told = [line for line in caplog.messages if line.startswith("the state dict of the optimizer lacks `num_steps`")]
    assert len(told) == len(caplog.messages) == is_told


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


# REGISTERED-9
@pytest.mark.parametrize("how", ["by hand", "an optimizer in backward"])
def test_a_parameter_that_is_changed_before_the_vote_is_refused(how: str) -> None:
    manager = eg.join()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    bias = model.get_parameter("1.bias")
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    early = torch.optim.SGD([bias], lr=0.1)

    def train() -> None:
        for step in manager.steps(3):
            with step:
                if step.index == 1 and how == "an optimizer in backward":
                    bias.register_post_accumulate_grad_hook(lambda _: early.step())  # type: ignore[no-untyped-call]
                model(torch.ones(1, 2)).sum().backward()
                with torch.no_grad():
                    if step.index == 1 and how == "by hand":
                        bias.add_(1.0)
                    assert optim.step(weight=1.0)
                    bias.clamp_(-1.0, 1.0)  # now it may

    told = r"step 1 has changed the parameter '1.bias' of 'model' before `optim.step`"
    with pytest.raises(eg.InvalidOperationError, match=told):
        train()
    assert manager.committed_steps == 1


def test_a_second_call_in_a_step_is_refused_by_its_name() -> None:
    """And not for what the first one has changed."""
    manager = eg.join()
    model = torch.nn.Linear(2, 2)
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    with next(manager.steps(1)):
        model(torch.ones(1, 2)).sum().backward()
        assert optim.step(weight=1.0)
        with pytest.raises(eg.InvalidOperationError, match=r"step 0 was voted on before; there is one `optim\.step`"):
            optim.step(weight=1.0)


# REGISTERED-9
def test_a_parameter_that_was_made_in_inference_mode_may_be_there() -> None:
    """torch does not count its changes."""
    manager = eg.join()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with torch.inference_mode():
        frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    model.add_module("frozen", frozen)
    optim = eg.Optimizer(manager, torch.optim.SGD(model[:2].parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    with next(manager.steps(1)):
        model[:2](torch.ones(1, 2)).sum().backward()
        assert optim.step(weight=1.0)


# DRIVER-6
def test_optimizers_that_take_turns_leave_no_gradients_to_each_other() -> None:
    manager = eg.join()
    models = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
    optims = [eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=1.0)) for model in models]
    manager.register_state(first=models[0], second=models[1], one=optims[0], other=optims[1])
    before = [model.weight.detach().clone() for model in models]
    for step in manager.steps(2):
        with step:
            for model in models:
                model(torch.ones(1, 2)).sum().backward()
            assert optims[step.index].step(weight=1.0)
    for model, weight in zip(models, before, strict=True):
        assert torch.equal(model.weight, weight - 1.0)


# DRIVER-6
def test_a_step_that_is_tried_again_begins_without_the_gradients_of_the_first_try() -> None:
    """A script that sums gradients by itself has no wrapper that drops them."""
    manager = eg.join()
    weight = torch.nn.Parameter(torch.zeros(2))
    optim = eg.Optimizer(manager, torch.optim.SGD([weight], lr=1.0))
    manager.register_state(weights=torch.nn.ParameterList([weight]), optim=optim)
    tries = 0
    for step in manager.steps(1):
        with step:
            weight.sum().backward()  # type: ignore[no-untyped-call]
            tries += 1
            if tries == 1:
                manager.report_error(ValueError("not finite"))
            assert optim.step(weight=1.0) is (tries == 2)
    assert (tries, weight.tolist()) == (2, [-1.0, -1.0])


class Beside(LocalRendezvous):
    """As if another rank added `others` to the first sum, that of the totals."""

    def __init__(self, others: Sequence[float] = ()) -> None:
        super().__init__(eg.ParallelLayout(), CPU)
        self._others, self.sums = others, list[list[float]]()

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        others = self._others if not self.sums and self._others else [0.0] * len(values)
        self.sums.append([own + other for own, other in zip(values, others, strict=True)])
        return super().start_sum(self.sums[-1])


def totals_with(batches: Sequence[eg.GlobalBatch], others: Sequence[float] = (), lr: float = 0.1) -> list[float]:
    """The sums of a rank's first step, which it commits with samples of `batches`."""
    rendezvous = Beside(others)
    manager = eg.QuorumManager(rendezvous, SnapshotServer(), eg.ParallelLayout(), CPU)
    weight = torch.nn.Parameter(torch.ones(2))
    optim = eg.Optimizer(manager, torch.optim.SGD([weight], lr=lr))
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
# AGREEMENT-1
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


# AGREEMENT-1
def test_ranks_may_ask_for_global_batches_in_any_order_and_some_for_none() -> None:
    first, second = eg.GlobalBatch(64, size=16, slot=4), eg.GlobalBatch(80, size=8, slot=4)
    both = totals_with([first, second])
    totals_with([second, first, second], both)
    totals_with([], both)
    with pytest.raises(eg.InvalidOperationError, match="different global batches"):
        totals_with([first], both)


# AGREEMENT-2
def test_ranks_with_different_learning_rates_all_raise() -> None:
    batches = [eg.GlobalBatch(64, size=16, slot=4)]
    rates = (0.1, 0.1001)
    totals = [totals_with(batches, lr=lr) for lr in rates]
    for lr, others in zip(rates, reversed(totals), strict=True):
        with pytest.raises(eg.InvalidOperationError, match="the ranks have different learning rates in step 0"):
            totals_with(batches, others, lr)
    for lr, others in zip(rates, totals, strict=True):
        totals_with(batches, others, lr)
        totals_with(batches, others, lr * (1 + 1e-9))  # as another host may round it


@pytest.mark.parametrize("setting", [torch.tensor(0.5), torch.tensor([0.5]), None, "auto", math.inf])
def test_a_learning_rate_may_be_anything_that_the_optimizer_takes(setting: object) -> None:
    manager = eg.join()
    weight = torch.nn.Parameter(torch.ones(2))
    sgd = Noisy(weight)
    sgd.param_groups[0]["lr"] = setting
    optim = eg.Optimizer(manager, sgd)
    manager.register_state(weights=torch.nn.ParameterList([weight]), optim=optim)
    with next(manager.steps(1)):
        weight.grad = torch.ones(2)
        assert optim.step(weight=1.0)
