"""The data-parallel wrapper of a rank that is alone: its buckets, and gradients that backward leaves out."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import elasticgang as eg
from elasticgang.collectives.collective import Collective
from elasticgang.collectives.work import Work
from elasticgang.errors import PeerLostError
from elasticgang.gang import FakeGang
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.state.snapshot_server import SnapshotServer
from elasticgang.train.data import Slots

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


def reproducible(module: nn.Module, **options: object) -> tuple[eg.QuorumManager, eg.DistributedDataParallel]:
    manager = eg.join(layout=eg.ParallelLayout())
    ddp = eg.DistributedDataParallel(manager, module, reduction="reproducible", **options)  # type: ignore[arg-type]
    return manager, ddp


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def tree_of_seven(gradients: list[Tensor | None], like: Tensor) -> Tensor | None:
    """The sum along the tree of `test_summation_tree.py`, written out. None if no slot has a gradient."""
    if all(each is None for each in gradients):
        return None
    a, b, c, d, e, f, g = (torch.zeros_like(like) if each is None else each for each in gradients)
    return (((a + b) + (c + d)) + (e + f)) + g


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.001}], ids=str)
def test_the_reproducible_gradient_is_the_sum_along_the_tree(options: dict[str, object]) -> None:
    """REPRODUCIBLE-1: also of parameters that some slots do not use, be it the last one, and in a later step."""
    torch.manual_seed(0)
    module, reference = Crossed(), Crossed()
    reference.load_state_dict(module.state_dict())
    manager, ddp = reproducible(module, **options)
    manager.register_state(model=ddp)
    batches = eg.GlobalBatch(70, size=14, slot=2, seed=0)
    data = torch.randn(70, 300)
    uses_all = [True, False, False, True, False, True, False]

    def see(seen: list[list[Tensor | None]], total: float) -> None:
        seen.append([None if each.grad is None else each.grad.clone() for each in module.parameters()])

    for step in manager.steps(2):
        expected: list[list[Tensor | None]] = [[] for _ in reference.parameters()]
        with step:
            for slot in batches.slots(step):
                for each in (module, reference):
                    each.uses_all = uses_all[slot.number] and step.index == 0
                with ddp.accumulate(last=slot.last):
                    ddp(data[slot.index]).square().sum().backward()
                reference(data[slot.index]).square().sum().backward()
                for sums, parameter in zip(expected, reference.parameters(), strict=True):
                    sums.append(parameter.grad)
                    parameter.grad = None
            seen: list[list[Tensor | None]] = []
            # The parameters keep their gradients.
            assert manager.commit(1.0, functools.partial(see, seen))
        for gradient, sums, parameter in zip(seen[0], expected, module.parameters(), strict=True):
            total = tree_of_seven(sums, parameter)
            assert (gradient is total is None) or (
                gradient is not None and total is not None and torch.equal(gradient, total)
            )


def test_two_backwards_of_a_slot_are_one_gradient_and_a_slot_may_have_none() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 0.5)
    manager, ddp = reproducible(module)
    optim = eg.Optimizer(manager, torch.optim.SGD(module.parameters(), lr=1.0))
    manager.register_state(model=ddp, optim=optim)
    before = module.weight.item()
    for step in manager.steps(1):
        with step:
            for slot in eg.GlobalBatch(4, size=4, slot=1).slots(step):
                for value in () if slot.number == 1 else (1.0, 2.0**24, -(2.0**24)) if slot.number == 0 else (4.0,):
                    with ddp.accumulate(last=slot.last):
                        ddp(torch.tensor([[value]])).sum().backward()
            assert optim.step(weight=1.0)
    assert module.weight.item() == before - 8.0  # 1 is lost in the sum of slot 0, which is in the order of backward


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_value_that_is_not_finite_stays_so(value: float) -> None:
    module = nn.Linear(1, 1, bias=False)
    manager, ddp = reproducible(module)
    manager.register_state(model=ddp)
    seen: list[float] = []
    for step in manager.steps(1):
        with step:
            for slot in eg.GlobalBatch(4, size=4, slot=1).slots(step):
                with ddp.accumulate(last=slot.last):
                    ddp(torch.tensor([[value if slot.number == 1 else 1.0]])).sum().backward()
            assert manager.commit(1.0, lambda total: seen.append(grad_of(module.weight).item()))
    assert str(seen[0]) == str(value)


class Doubled(LocalRendezvous):
    """As if another rank had the same gradients."""

    def __init__(self) -> None:
        super().__init__(eg.ParallelLayout(), CPU)

    def reduction(self, family: str) -> eg.Gang:
        return FakeGang(CPU, size=2)


def doubled(module: nn.Module, **options: Any) -> tuple[eg.QuorumManager, eg.DistributedDataParallel]:
    manager = eg.QuorumManager(Doubled(), SnapshotServer(), eg.ParallelLayout(), CPU)
    return manager, eg.DistributedDataParallel(manager, module, **options)


def gradients_of(
    manager: eg.QuorumManager, ddp: eg.DistributedDataParallel, in_slot: Callable[[eg.Step, bool], object]
) -> list[list[Tensor]]:
    """Of the parameters in each of three steps of two slots."""
    seen: list[list[Tensor]] = []
    manager.register_state(model=ddp)
    for step in manager.steps(3):
        with step:
            for last in (False, True):
                in_slot(step, last)
            assert manager.commit(1.0, lambda total: seen.append([grad_of(each) for each in ddp.module.parameters()]))
            for parameter in ddp.parameters():
                parameter.grad = None
    return seen


# DDP-6
@pytest.mark.parametrize("finds_unused", [False, True])
@pytest.mark.parametrize("place", ["before", "after", "between"])
def test_a_forward_outside_of_accumulate_leaves_the_gradients_as_they_are(place: str, finds_unused: bool) -> None:
    """Such as an evaluation without `torch.no_grad()`."""
    manager, ddp = doubled(nn.Linear(1, 1), find_unused_parameters=finds_unused)

    def in_slot(step: eg.Step, last: bool) -> None:
        if step.index == 1 and place == ("after" if last else "before"):
            ddp(torch.ones(1, 1))
        with ddp.accumulate(last=last):
            ddp(torch.full((1, 1), 3.0)).sum().backward()
        if step.index == 1 and place == ("after" if last else "between"):
            ddp(torch.ones(1, 1))

    seen = gradients_of(manager, ddp, in_slot)
    assert [[each.item() for each in gradients] for gradients in seen] == [[12.0, 4.0]] * 3


OPTIONS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"reduction": "reproducible"}, {"keep": True}]


CHANGES = ["clips", "replaces", "drops"]


# DDP-7
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("place", ["of one forward", "inside", "in another", "after", "before the vote", *CHANGES])
def test_a_backward_after_the_one_that_reduces_is_refused(place: str, options: dict[str, Any]) -> None:
    """Its gradient would be added to what is reduced already."""
    manager, ddp = doubled(nn.Linear(1, 1), **options)
    manager.register_state(model=ddp)
    x = torch.ones(1, 1)

    def train(step: eg.Step) -> None:
        for slot in eg.GlobalBatch(1, size=1, slot=1).slots(step):
            with ddp.accumulate(last=slot.last):
                loss = ddp(x).sum()
                loss.backward(retain_graph=True)
                if place == "of one forward":
                    loss.backward()
                elif place == "inside":
                    ddp(x).sum().backward()
            with ddp.accumulate(last=slot.last) if place == "in another" else contextlib.nullcontext():
                if place in ("in another", "after"):
                    ddp(x).sum().backward()
        if place == "before the vote":
            loss.backward()
        if place == "clips":
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        elif place in CHANGES:
            for each in ddp.parameters():
                each.grad = grad_of(each) / 2 if place == "replaces" else None
        manager.commit(1.0, lambda total: None)

    with pytest.raises(eg.InvalidOperationError, match=r"call `backward` once there"), next(manager.steps(1)) as step:
        train(step)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backwards_before_the_one_that_reduces_are_added(options: dict[str, Any]) -> None:
    manager = eg.join(layout=eg.ParallelLayout())
    ddp = eg.DistributedDataParallel(manager, nn.Linear(1, 1), **options)
    manager.register_state(model=ddp)
    seen: list[Tensor] = []
    with next(manager.steps(1)) as step:
        for slot in eg.GlobalBatch(2, size=2, slot=1).slots(step):
            for value in (1.0, 2.0, 4.0):
                with ddp.accumulate(last=slot.last and value == 4.0):
                    ddp(torch.full((1, 1), value)).sum().backward()
        assert manager.commit(1.0, lambda total: seen.extend(grad_of(each) for each in ddp.parameters()))
    assert [each.item() for each in seen] == [14.0, 6.0]


def test_an_evaluation_after_the_backward_that_reduces_changes_nothing() -> None:
    manager, ddp = doubled(nn.Linear(1, 1))

    def in_slot(step: eg.Step, last: bool) -> None:
        with ddp.accumulate(last=last):
            ddp(torch.full((1, 1), 3.0)).sum().backward()
            ddp(torch.ones(1, 1))

    seen = gradients_of(manager, ddp, in_slot)
    assert [[each.item() for each in gradients] for gradients in seen] == [[12.0, 4.0]] * 3


# TRAINABLE-1
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_parameter_may_be_frozen_and_unfrozen_later(options: dict[str, Any]) -> None:
    """Each step without it leaves torch's wrapper to be made again, unless it finds unused ones."""
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    manager = eg.join(layout=eg.ParallelLayout())
    ddp = eg.DistributedDataParallel(manager, module, bucket_cap_mb=1e-9, **options)
    at_first = buckets(ddp)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optim = eg.Optimizer(manager, sgd)
    manager.register_state(model=ddp, optim=optim)
    moved = []
    for step in manager.steps(5):
        module[0].requires_grad_(step.index not in (1, 2))
        before = [each.detach().clone() for each in module.parameters()]
        with step:
            for slot in eg.GlobalBatch(2, size=2, slot=1).slots(step):
                with ddp.accumulate(last=slot.last):
                    ddp(torch.full((1, 1), slot.number + 1.0)).sum().backward()
            assert optim.step(weight=2.0)
        assert buckets(ddp) == at_first
        moved.append([not torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True)])
    assert moved == [[index not in (1, 2)] * 2 + [True] * 2 for index in range(5)]


Wrapper = type[eg.DistributedDataParallel] | type[eg.ShardedDataParallel]


def with_frozen_bias(
    kind: Wrapper,
) -> tuple[eg.QuorumManager, nn.Linear, eg.DistributedDataParallel | eg.ShardedDataParallel]:
    manager = eg.join(layout=eg.ParallelLayout())
    module = nn.Linear(1, 1)
    module.bias.requires_grad_(False)
    model = kind(manager, module)
    manager.register_state(model=model)
    return manager, module, model


# TRAINABLE-1
@pytest.mark.parametrize("kind", [eg.DistributedDataParallel, eg.ShardedDataParallel])
@pytest.mark.parametrize("has_slots", [False, True])
def test_a_parameter_that_required_no_gradient_must_not_do_so_later(kind: Wrapper, has_slots: bool) -> None:
    """Other ranks would not reduce it, such as one that starts later."""
    manager, module, model = with_frozen_bias(kind)
    module.bias.requires_grad_(True)
    with next(manager.steps(1)) as step:
        with pytest.raises(eg.InvalidOperationError, match=r"bias requires gradients now"):
            (model.accumulate(last=True).__enter__ if has_slots else step.contribute)()
        module.bias.requires_grad_(False)
        manager.commit(1.0, lambda total: None)


# TRAINABLE-1
@pytest.mark.parametrize("kind", [eg.DistributedDataParallel, eg.ShardedDataParallel])
def test_a_parameter_that_comes_to_require_a_gradient_after_the_first_forward_is_found_before_the_vote(
    kind: Wrapper,
) -> None:
    manager, module, model = with_frozen_bias(kind)
    with next(manager.steps(1)):
        with model.accumulate(last=True):
            model(torch.ones(1, 1)).sum().backward()
        module.bias.requires_grad_(True)
        with pytest.raises(eg.InvalidOperationError, match=r"bias requires gradients now"):
            manager.commit(1.0, lambda total: None)


# TRAINABLE-1
def test_buckets_that_are_made_again_after_an_error_are_the_same_whatever_is_frozen() -> None:
    manager = eg.join(layout=eg.ParallelLayout())
    module = nn.Linear(1, 1)
    module.bias.requires_grad_(False)
    ddp = eg.DistributedDataParallel(manager, module)
    manager.register_state(model=ddp)
    for num_tries, step in enumerate(manager.steps(1)):
        with step:
            module.weight.requires_grad_(num_tries > 0)
            module.bias.requires_grad_(num_tries == 0)
            if num_tries == 0:
                raise PeerLostError("a peer has died")
            manager.commit(1.0, lambda total: None)
        assert buckets(ddp) == [["weight"]]
        assert (module.weight.requires_grad, module.bias.requires_grad) == (num_tries > 0, num_tries == 0)


# TRAINABLE-1
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_buckets_stay_the_same_when_layers_go_and_come(options: dict[str, Any]) -> None:
    """A rank that starts later wraps the module as it was."""
    manager = eg.join(layout=eg.ParallelLayout())
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    ddp = eg.DistributedDataParallel(manager, module, **options)
    at_first, gone = ddp.buckets, module[1]
    optim = eg.Optimizer(manager, torch.optim.SGD(module.parameters(), lr=0.1))
    manager.register_state(model=ddp, optim=optim)
    has_raised = False
    for step in manager.steps(3):
        before = [each.detach().clone() for each in (*module[0].parameters(), *gone.parameters())]
        with step:
            if step.index == 1:
                module[1] = nn.Linear(1, 1)
            elif step.index == 2:
                module[1] = nn.Identity()
            for slot in eg.GlobalBatch(2, size=2, slot=1).slots(step):
                with ddp.accumulate(last=slot.last):
                    ddp(torch.ones(1, 1)).sum().backward()
            if step.index and not has_raised:
                has_raised = True
                raise PeerLostError("a peer has died")  # torch's wrapper is made again
            assert optim.step(weight=2.0)
        moved = [
            not torch.equal(*pair) for pair in zip(before, (*module[0].parameters(), *gone.parameters()), strict=True)
        ]
        if step.committed:
            assert moved == [True, True, step.index == 0, step.index == 0]
        assert [list(map(id, each)) for each in ddp.buckets] == [list(map(id, each)) for each in at_first]


class Numbering(FakeGang):
    """Another rank has other gradients for all elements, in the order in which they are sent."""

    def _start(self, collective: Collective) -> Work:
        for output in collective.outputs:
            output.add_(torch.arange(1, output.numel() + 1, dtype=output.dtype).view(output.shape))
        return Work()


# DDP-11
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ranks_agree_on_the_order_of_elements_where_the_script_has_changed_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has left a step by an exception makes its buckets again, and others have no slots, or no step yet."""

    def gradient(*, is_left: bool, has_slots: bool) -> Tensor:
        manager = eg.join(layout=eg.ParallelLayout())
        monkeypatch.setattr(manager, "reduction", lambda family: Numbering(CPU, size=2))
        module = nn.Conv2d(3, 4, 2, bias=False)
        ddp = eg.DistributedDataParallel(manager, module, **options)
        ddp.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        manager.register_state(model=ddp)
        seen: list[Tensor] = []
        for num_tries, step in enumerate(manager.steps(1)):
            with step:
                for slot in eg.GlobalBatch(1, size=1, slot=1).slots(step):
                    if has_slots:
                        with ddp.accumulate(last=slot.last):
                            ddp(torch.zeros(1, 3, 2, 2)).sum().backward()
                if is_left and num_tries == 0:
                    raise PeerLostError("a peer has died")
                assert manager.commit(1.0, lambda total: seen.append(grad_of(module.weight)))
        return seen[0]

    first = gradient(is_left=False, has_slots=True)
    assert len(set(first.flatten().tolist())) == first.numel()
    assert torch.equal(gradient(is_left=True, has_slots=True), first)
    if not options.get("keep") and options.get("reduction") != "reproducible":
        assert torch.equal(gradient(is_left=False, has_slots=False), first)


# ALIKE-2
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ranks_compare_the_order_of_elements_where_the_script_can_change_it(options: dict[str, Any]) -> None:
    """With the sums of slots, it stays what it was when the module was wrapped."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    ddp = eg.DistributedDataParallel(eg.join(layout=eg.ParallelLayout()), module, **options)
    assert ddp.order == ()
    with torch.no_grad():
        module[0].weight.data = torch.ones(2, 3).T
        module[1].weight.data = torch.ones(2, 5)[:, :3]  # the gradient of one with gaps is contiguous
    is_by_slots = options.get("keep") or options.get("reduction") == "reproducible"
    assert ddp.order == (() if is_by_slots else (("the order in memory of 0.weight", "(1, 3)"),))


# DDP-11
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_order_in_memory_stays_from_the_first_forward_of_a_step_to_the_vote(options: dict[str, Any]) -> None:
    """A rank without slots would have the new order in this step, and others the old one."""
    manager = eg.join(layout=eg.ParallelLayout())
    module = nn.Conv2d(3, 4, 2, bias=False)
    ddp = eg.DistributedDataParallel(manager, module, **options)
    manager.register_state(model=ddp)
    with next(manager.steps(1)) as step:
        for slot in eg.GlobalBatch(1, size=1, slot=1).slots(step):
            with ddp.accumulate(last=slot.last):
                ddp(torch.zeros(1, 3, 2, 2)).sum().backward()
        ddp.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with pytest.raises(eg.InvalidOperationError, match="weight lies in memory in another order than"):
            step.contribute()
        ddp.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        manager.commit(1.0, lambda total: None)


@pytest.mark.parametrize("options", [*OPTIONS, {"is_sharded": True, "keep": True}], ids=str)
@pytest.mark.parametrize("has_slots", [False, True])
def test_a_module_is_converted_before_it_is_wrapped(options: dict[str, Any], has_slots: bool) -> None:
    options = dict(options)
    wrap = eg.ShardedDataParallel if options.pop("is_sharded", False) else eg.DistributedDataParallel
    manager = eg.join(layout=eg.ParallelLayout())
    module = nn.Linear(1, 1)
    model = wrap(manager, module, **options)
    manager.register_state(model=model)
    module.bfloat16()

    def train(step: eg.Step) -> None:
        for slot in eg.GlobalBatch(1, size=1, slot=1).slots(step):
            if has_slots:
                with model.accumulate(last=slot.last):
                    model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        step.contribute()

    told = "weight is bfloat16 now, but was float32 when"
    with pytest.raises(eg.InvalidOperationError, match=told), next(manager.steps(1)) as step:
        train(step)


def test_a_sharded_module_may_be_converted_after_it_is_wrapped() -> None:
    manager = eg.join(layout=eg.ParallelLayout())
    module = nn.Linear(1, 1)
    model = eg.ShardedDataParallel(manager, module)
    optim = eg.Optimizer(manager, torch.optim.SGD(module.parameters(), lr=1.0))
    manager.register_state(model=model, optim=optim)
    module.bfloat16()
    before = module.bias.item()
    with next(manager.steps(1)):
        with model.accumulate(last=True):
            model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        assert optim.step(weight=1.0)
    assert module.bias.item() == pytest.approx(before - 1.0, abs=0.01)


@pytest.mark.parametrize("options", [{}, {"reduction": "reproducible"}, {"keep": True}], ids=str)
@pytest.mark.parametrize("kind", [eg.DistributedDataParallel, eg.ShardedDataParallel])
def test_a_module_of_plain_tensors_is_wrapped_before_the_first_generation(
    kind: Wrapper, options: dict[str, Any]
) -> None:
    layout = eg.ParallelLayout()
    rendezvous = LocalRendezvous(layout, CPU)
    manager = eg.QuorumManager(rendezvous, SnapshotServer(), layout, CPU)
    del rendezvous.gangs  # those of other ranks have no rank or size yet
    kind(manager, nn.Linear(1, 1), **options)


class Dtypes(FakeGang):
    """Notes in which dtypes gradients are reduced."""

    dtypes: ClassVar[list[torch.dtype]] = []

    def _start(self, collective: Collective) -> Work:
        self.dtypes.extend(output.dtype for output in collective.outputs)
        return super()._start(collective)


# SHARDED-2
@pytest.mark.parametrize("options", [{}, {"reduction": "reproducible"}, {"keep": True}], ids=str)
@pytest.mark.parametrize("has_slots", [False, True])
def test_gradients_of_another_dtype_than_the_parameters_are_reduced_alike_by_a_rank_without_any(
    options: dict[str, Any], has_slots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = eg.join(layout=eg.ParallelLayout())
    monkeypatch.setattr(Dtypes, "dtypes", [])
    monkeypatch.setattr(manager, "reduction", lambda family: Dtypes(CPU, size=2))
    module = nn.Linear(1, 1).bfloat16()
    for each in module.parameters():
        each.grad_dtype = torch.float32
    model = eg.ShardedDataParallel(manager, module, **options)
    manager.register_state(model=model)
    with next(manager.steps(1)) as step:
        for slot in eg.GlobalBatch(1, size=1, slot=1).slots(step):
            if has_slots:
                with model.accumulate(last=slot.last):
                    model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        assert manager.commit(1.0, lambda total: None)
    assert set(Dtypes.dtypes) == {torch.float32}


class Heads(nn.Module):
    """Uses a head for each row, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
        self.trunk = nn.Linear(1, 1)

    def biases(self) -> list[Tensor]:
        return [parameter for name, parameter in self.heads.named_parameters() if name.endswith("bias")]

    def forward(self, heads: list[int]) -> Tensor:
        return torch.stack([self.heads[head](self.trunk(torch.ones(1))) for head in heads])


# DDP-8, SHARDED-4, SUM-3
@pytest.mark.parametrize("options", [*OPTIONS, {"is_sharded": True}, {"is_sharded": True, "keep": True}], ids=str)
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_an_optimizer_changes_what_a_slot_has_used_and_nothing_else(
    options: dict[str, Any], max_norm: float | None
) -> None:
    """As with torch's wrapper: weight decay and momentum would change others too."""
    options = dict(options)
    wrap = eg.ShardedDataParallel if options.pop("is_sharded", False) else eg.DistributedDataParallel
    manager = eg.join(layout=eg.ParallelLayout())
    module, reference = Heads(), Heads()
    model = wrap(manager, module, **options)
    optim = eg.Optimizer(manager, torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1))
    manager.register_state(model=model, optim=optim)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.1)
    for step in manager.steps(6):
        for each in (module, reference):
            each.heads[2].requires_grad_(step.index != 4)
        used = {0: [[0], [1, 2]], 1: [[2], [0]]}.get(step.index, [[2, 1], [1]])  # by each slot
        with step:
            for slot in eg.GlobalBatch(2, size=2, slot=1).slots(step):
                with model.accumulate(last=slot.last):
                    model(used[slot.number]).square().sum().backward()
                (reference(used[slot.number]).square().sum() / 2).backward()
            assert optim.step(weight=2.0, max_norm=max_norm)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        plain.step()
        plain.zero_grad()
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(module.heads[3].parameters(), Heads().heads[3].parameters(), strict=True):
        assert torch.equal(ours, theirs)


class WithAPeer(FakeGang):
    """Another rank has a gradient of ones for every parameter."""

    def _start(self, collective: Collective) -> Work:
        for output in collective.outputs:
            output.add_(1)
        return Work()


# DDP-8, SHARDED-4, SUM-3
@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"keep": True}, {"is_sharded": True}], ids=str
)
@pytest.mark.parametrize("has_slots", [False, True])
def test_a_rank_has_the_gradients_that_only_others_have(
    options: dict[str, Any], has_slots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(options)
    wrap = eg.ShardedDataParallel if options.pop("is_sharded", False) else eg.DistributedDataParallel
    manager = eg.join(layout=eg.ParallelLayout())
    monkeypatch.setattr(manager, "reduction", lambda family: WithAPeer(CPU, size=2))
    module = Heads()
    model = wrap(manager, module, **options)
    manager.register_state(model=model)
    seen: list[list[float]] = []
    with next(manager.steps(1)) as step:
        for slot in eg.GlobalBatch(1, size=1, slot=1).slots(step):
            if has_slots:
                with model.accumulate(last=slot.last):
                    model([1]).sum().backward()
        assert manager.commit(1.0, lambda total: seen.append([grad_of(each).item() for each in module.biases()]))
    assert seen == [[1.0, 2.0 if has_slots else 1.0, 1.0, 1.0]]


class Laid(nn.Module):
    """Its parameters lie in memory in many ways. Those of the other dtype are in buckets of their own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        memory = torch.randn(300, dtype=dtype)
        self.other = nn.Parameter(torch.randn(2, dtype=torch.float32 if dtype.is_complex else torch.float64))
        self.laid = nn.ParameterList(
            [
                memory.view(20, 15),
                memory.view(20, 15).t(),
                memory[:240].view(4, 3, 5, 4).to(memory_format=torch.channels_last),
                memory[:24].view(2, 3, 4).transpose(0, 2),
                memory[:30].view(3, 1, 10).transpose(0, 1),
                memory.view(30, 10)[::2, 1:4].t(),  # with gaps
                memory[0],
                memory[:0].view(0, 3),
            ]
        )

    def forward(self, factor: float, first: int) -> Tensor:
        parts = [(factor * each).abs().square().mul(place(each)).sum() for each in (self.other, *self.laid[first:])]
        return torch.stack([part.double() for part in parts]).sum()


def place(tensor: Tensor) -> Tensor:
    """Other values at each element."""
    return torch.arange(float(tensor.numel())).view(tensor.shape)


# DDP-9
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # of dimensions of size 1
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128], ids=str)
def test_a_gradient_is_right_however_its_parameter_lies_in_memory(
    dtype: torch.dtype, first: int, options: dict[str, Any]
) -> None:
    """`first`: the last backward leaves out the parameters before."""
    manager = eg.join(layout=eg.ParallelLayout())
    module = Laid(dtype)
    ddp = eg.DistributedDataParallel(manager, module, **options)
    manager.register_state(model=ddp)
    seen: list[list[Tensor]] = []
    for step in manager.steps(2):
        with step:
            for slot in eg.GlobalBatch(4, size=2, slot=1).slots(step):
                with ddp.accumulate(last=slot.last):
                    ddp(slot.number + 1.0, first if slot.last else 0).backward()
            assert manager.commit(1.0, lambda total: seen.append([grad_of(each) for each in ddp.parameters()]))
        for index, parameter in enumerate(module.parameters()):
            factor = 2.0 if 0 < index <= first else 2.0 + 8.0
            torch.testing.assert_close(seen[-1][index], factor * place(parameter) * parameter.detach())
            parameter.grad = None


# SLOTS-1
def test_a_backward_whose_slot_is_unknown_is_refused() -> None:
    manager, ddp = reproducible(nn.Linear(1, 1))
    manager.register_state(model=ddp)
    batches = eg.GlobalBatch(4, size=4, slot=1)
    with next(manager.steps(1)) as step:
        list(batches.slots(step))  # all before the first backward
        with pytest.raises(eg.InvalidOperationError, match=r"in a loop over `batches\.slots"):
            ddp.accumulate(last=True).__enter__()
        manager.commit(1.0, lambda total: None)


@pytest.mark.parametrize("kind", [eg.DistributedDataParallel, eg.ShardedDataParallel])
def test_a_forward_outside_of_accumulate_is_refused_unless_nothing_can_follow(kind: type[nn.Module]) -> None:
    """Its gradient would be lost."""
    manager = eg.join(layout=eg.ParallelLayout())
    model = kind(manager, nn.Linear(1, 1), reduction="reproducible")
    manager.register_state(model=model)
    with torch.no_grad():
        model(torch.ones(1, 1))
    with next(manager.steps(1)) as step:
        with pytest.raises(eg.InvalidOperationError, match="call the model inside `accumulate`"):
            model(torch.ones(1, 1))
        eg.GlobalBatch(1, size=1, slot=1).slots(step)
        manager.commit(1.0, lambda total: None)


def test_slots_of_two_batches_are_refused() -> None:
    manager, ddp = reproducible(nn.Linear(1, 1))
    manager.register_state(model=ddp)
    with next(manager.steps(1)) as step:
        for _ in eg.GlobalBatch(2, size=2, slot=1).slots(step):
            ddp.accumulate(last=False).__enter__()
        for _ in eg.GlobalBatch(3, size=3, slot=1).slots(step):
            with pytest.raises(eg.InvalidOperationError, match="of a batch of 2 slots and of one of 3"):
                ddp.accumulate(last=False).__enter__()
            break
        manager.commit(1.0, lambda total: None)


WRAPPERS = [eg.DistributedDataParallel, eg.ShardedDataParallel]


# EMPTYLOOP-1
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_evaluation_of_which_a_rank_has_no_slots_leaves_its_gradients_alone(wrapper: Any) -> None:
    manager = eg.join()
    model = wrapper(manager, nn.Linear(1, 1))
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=1.0))
    manager.register_state(model=model, optim=optim)
    before = model.module.bias.item()
    with next(manager.steps(1)) as step:
        with torch.no_grad():
            assert list(Slots((), step)) == []
        for slot in eg.GlobalBatch(1, size=1, slot=1).slots(step):
            with model.accumulate(last=slot.last):
                model(torch.ones(1, 1)).sum().backward()
        assert optim.step(weight=1.0)
    assert model.module.bias.item() == before - 1


# STEP-2
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_backward_after_a_loop_of_which_a_rank_has_no_slots_is_refused(wrapper: Any) -> None:
    """Its gradient would be in no sum."""
    manager = eg.join()
    model = wrapper(manager, nn.Linear(1, 1))
    manager.register_state(model=model)
    with next(manager.steps(1)) as step:
        assert list(Slots((), step)) == []
        with pytest.raises(eg.InvalidOperationError, match="are reduced already, because a loop over slots has ended"):
            model.accumulate(last=True).__enter__()
        manager.commit(1.0, lambda total: None)


# STEP-1
def test_slots_of_a_committed_step_are_refused() -> None:
    manager = eg.join()
    batches = eg.GlobalBatch(4, size=2, slot=1)
    manager.register_state(model=eg.DistributedDataParallel(manager, nn.Linear(1, 1)))
    for step in manager.steps(2):
        with step:
            list(batches.slots(step))
            assert manager.commit(1.0, lambda total: None)
            with pytest.raises(eg.InvalidOperationError, match=r"must be asked for before `optim\.step`"):
                eg.GlobalBatch(4, size=4, slot=1, seed=1).slots(step)
            assert len(batches.share(step.index, step.share)) == 2


def keeping_job() -> tuple[eg.QuorumManager, eg.DistributedDataParallel, eg.Optimizer]:
    manager = eg.join()
    model = eg.DistributedDataParallel(manager, nn.Linear(1, 1), keep=True)
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=1.0))
    manager.register_state(model=model, optim=optim)
    return manager, model, optim


# EMPTYLOOP-2
def test_an_evaluation_has_all_slots_also_where_gradients_are_kept() -> None:
    manager, model, optim = keeping_job()
    with next(manager.steps(1)) as step:
        for slot in eg.GlobalBatch(2, size=2, slot=1).slots(step):
            with model.accumulate(last=slot.last):
                model(torch.ones(1, 1)).sum().backward()
        with torch.no_grad():
            assert len(list(eg.GlobalBatch(3, size=3, slot=1).slots(step))) == 3
        assert step.num_slots == 2, "the division of the slots that are trained on"
        assert optim.step(weight=2.0)


# EMPTYLOOP-1
def test_the_slots_of_an_evaluation_are_none_whose_gradients_are_kept() -> None:
    manager, model, optim = keeping_job()
    with next(manager.steps(1)) as step:
        with torch.no_grad():
            for _ in eg.GlobalBatch(3, size=3, slot=1).slots(step):
                assert step.slot is None
        for slot in eg.GlobalBatch(2, size=2, slot=1, seed=1).slots(step):
            assert step.slot == slot.number
            with model.accumulate(last=slot.last):
                model(torch.ones(1, 1)).sum().backward()
        assert optim.step(weight=2.0)


# STEP-3
def test_a_loop_over_the_slots_of_a_committed_step_is_as_one_over_its_share() -> None:
    """The rank has left the step by then, where it has no slots too."""
    manager = eg.join()
    batches = eg.GlobalBatch(2, size=2, slot=1)
    manager.register_state(model=eg.DistributedDataParallel(manager, nn.Linear(1, 1)))
    with next(manager.steps(1)) as step:
        slots, empty = batches.slots(step), Slots((), step)
        assert manager.commit(1.0, lambda total: None)
        assert len(list(slots)) == 2
        assert list(empty) == []
        step.check_gradients()


def test_slots_in_another_order_are_refused() -> None:
    manager, ddp = reproducible(nn.Linear(1, 1))
    manager.register_state(model=ddp)
    with next(manager.steps(1)) as step:
        slots = eg.GlobalBatch(2, size=2, slot=1).slots(step)
        for _ in slots:
            ddp.accumulate(last=False).__enter__()
        for _ in slots:
            with pytest.raises(eg.InvalidOperationError, match="slot 0 was used after slot 1"):
                ddp.accumulate(last=False).__enter__()
            break
        manager.commit(1.0, lambda total: None)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match='must be "sum" or "reproducible", but is \'mean\' instead'):
        eg.DistributedDataParallel(eg.join(layout=eg.ParallelLayout()), nn.Linear(1, 1), reduction="mean")


class Allocating(LocalRendezvous):
    """Remembers the memory that it has given."""

    def __init__(self) -> None:
        super().__init__(eg.ParallelLayout(), CPU)
        self.given: list[Tensor] = []

    def empty(self, num: int, dtype: torch.dtype) -> Tensor:
        self.given.append(super().empty(num, dtype))
        return self.given[-1]

    def holds(self, gradient: Tensor | None) -> bool:
        storages = {tensor.untyped_storage().data_ptr() for tensor in self.given}
        return gradient is not None and gradient.untyped_storage().data_ptr() in storages


def managed_by(rendezvous: Allocating) -> eg.QuorumManager:
    return eg.QuorumManager(rendezvous, SnapshotServer(), eg.ParallelLayout(), CPU)


# DDP-5
@pytest.mark.parametrize("finds_unused", [False, True])
def test_buckets_lie_in_memory_of_the_manager_even_if_they_are_made_again(finds_unused: bool) -> None:
    rendezvous = Allocating()
    manager = managed_by(rendezvous)
    module = Crossed()
    ddp = eg.DistributedDataParallel(manager, module, bucket_cap_mb=1.0, find_unused_parameters=finds_unused)
    optim = eg.Optimizer(manager, torch.optim.SGD(ddp.parameters(), lr=0.1))
    manager.register_state(model=ddp, optim=optim)
    for step in manager.steps(4):
        with step:
            module.uses_all = (
                step.index % 2 == 0
            )  # otherwise torch's wrapper is made again, unless it finds unused ones
            with ddp.accumulate(last=True):
                ddp(torch.ones(2, 300)).sum().backward()
            step.contribute()
            used = [each for index, layer in enumerate(module.layers) if index != 2 for each in layer.parameters()]
            assert all(rendezvous.holds(parameter.grad) for parameter in used)
            assert optim.step(weight=2.0)


# DDP-5
def test_a_sharded_modules_gradients_lie_in_memory_of_the_manager_and_are_summed_again_if_nobody_clears_them() -> None:
    rendezvous = Allocating()
    manager = managed_by(rendezvous)
    module = nn.Linear(3, 2)
    sharded = eg.ShardedDataParallel(manager, module)
    optim = eg.Optimizer(manager, torch.optim.SGD([module.weight], lr=0.1))  # the bias keeps its gradient
    manager.register_state(model=sharded, optim=optim)
    for step in manager.steps(3):
        with step:
            with sharded.accumulate(last=True):
                sharded(torch.ones(4, 3)).sum().backward()
            assert optim.step(weight=4.0)
        assert rendezvous.holds(module.bias.grad)
        assert module.bias.grad is not None
        assert module.bias.grad.tolist() == [4.0 * (step.index + 1)] * 2


# MANAGER-5
def test_gradients_are_made_ready_before_they_are_applied_and_not_in_a_step_that_fails() -> None:
    manager = eg.join(layout=eg.ParallelLayout())
    manager.register_state(module=nn.Linear(1, 1))
    calls: list[str] = []

    def commit() -> bool:
        return manager.commit(
            3.0,
            lambda total, square: calls.append(f"apply {total:g} {square:g}"),
            lambda: [4.0],
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


class Started(Doubled):
    """Records the sizes of what is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def reduction(self, family: str) -> eg.Gang:
        sizes = self.sizes

        class Recording(FakeGang):
            def _start(self, collective: Collective) -> Work:
                sizes.append(collective.outputs[0].numel())
                return super()._start(collective)

        return Recording(CPU, size=2)


# DDP-10
@pytest.mark.parametrize("order", [(0, 1), (1, 0), ()], ids=["as made", "the other way", "without slots"])
def test_wrappers_reduce_in_the_order_in_which_they_were_made(order: tuple[int, ...]) -> None:
    rendezvous = Started()
    manager = eg.QuorumManager(rendezvous, SnapshotServer(), eg.ParallelLayout(), CPU)
    models = [eg.DistributedDataParallel(manager, nn.Linear(size, 1, bias=False)) for size in (3, 5)]
    manager.register_state(first=models[0], second=models[1])
    seen: list[list[float]] = []

    def see(total: float) -> None:
        parameters = [parameter for model in models for parameter in model.parameters()]
        seen.append([grad_of(each).sum().item() for each in parameters] if order else [])
        for parameter in parameters:
            parameter.grad = None

    for step in manager.steps(2):
        rendezvous.sizes.clear()
        with step:
            for index in order:
                with models[index].accumulate(last=True):
                    models[index](torch.full((1, (3, 5)[index]), index + 1.0)).sum().backward()
            assert manager.commit(1.0, see)
        assert rendezvous.sizes == [3, 5, *([] if order else [1, 1])]  # DDP-8
    assert seen == [[6.0, 20.0] if order else []] * 2


def test_a_copy_is_one_of_the_module_without_the_wrapper() -> None:
    """As torch's `AveragedModel` takes it."""
    manager = eg.join(layout=eg.ParallelLayout())
    ddp = eg.DistributedDataParallel(manager, nn.Linear(300, 2))
    averaged = AveragedModel(ddp)
    assert type(averaged.module) is nn.Linear
    first = ddp.module.get_parameter("weight").detach().clone()
    averaged.update_parameters(ddp)
    train(manager, ddp, 1)
    assert not torch.equal(ddp.module.get_parameter("weight"), first)
    assert torch.equal(averaged.module.get_parameter("weight"), first)
    assert averaged(torch.ones(1, 300)).shape == (1, 2)
    averaged.update_parameters(ddp)
    torch.testing.assert_close(averaged.module.weight, (first + ddp.module.get_parameter("weight")) / 2)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("wrap", [eg.DistributedDataParallel, eg.ShardedDataParallel])
def test_an_embedding_with_sparse_gradients_is_refused_unless_it_is_frozen(
    wrap: Callable[..., nn.Module], kind: Callable[..., nn.Module]
) -> None:
    manager = eg.join()
    model = nn.Sequential(kind(5, 3, sparse=True), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"gradients of `module` must be dense, but 0 has `sparse=True`"):
        wrap(manager, model)
    model[0].requires_grad_(False)
    wrap(manager, model)


def test_a_parameter_in_two_wrappers_is_refused_unless_it_is_frozen() -> None:
    """torch's reducer would raise in the first backward, and ask for an issue."""
    manager = eg.join()
    layers = [nn.Linear(2, 2) for _ in range(3)]
    eg.DistributedDataParallel(manager, nn.Sequential(layers[0], layers[1]))
    layers[1].weight.requires_grad_(False)
    eg.DistributedDataParallel(manager, nn.Sequential(layers[2]))
    with pytest.raises(ValueError, match=r"must be in one wrapper, but 0\.bias is in another one too"):
        eg.DistributedDataParallel(manager, nn.Sequential(layers[1]))
    layers[1].requires_grad_(False)
    eg.DistributedDataParallel(manager, nn.Sequential(layers[1], nn.Linear(2, 2)))


# DDP-7
@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"keep": True, "find_unused_parameters": True}]
)
def test_a_change_of_gradients_is_refused_where_the_last_backward_left_some_out(options: dict[str, Any]) -> None:
    """Their reduction is to come: ranks would sum what each has clipped by its own norm."""
    manager = eg.join()
    ddp = eg.DistributedDataParallel(manager, Crossed(uses_all=False), **options)
    optim = eg.Optimizer(manager, torch.optim.SGD(ddp.parameters(), lr=0.1))
    manager.register_state(model=ddp, optim=optim)
    batches = eg.GlobalBatch(4, size=4, slot=2)

    def train() -> None:
        for step in manager.steps(3):
            with step:
                for slot in batches.slots(step):
                    with ddp.accumulate(last=slot.last):
                        ddp(torch.ones(2, 300)).sum().backward()
                if step.index == 2:
                    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                assert optim.step(weight=4.0)

    with pytest.raises(eg.InvalidOperationError, match="has begun to reduce the gradients"):
        train()
    assert manager.committed_steps == 2


# SHARDED-8
@pytest.mark.parametrize("options", [{}, {"reduction": "reproducible"}, {"keep": True}], ids=str)
@pytest.mark.parametrize("foreach", [False, True])
def test_a_change_of_a_sharded_modules_gradients_before_the_vote_is_refused(
    options: dict[str, Any], foreach: bool
) -> None:
    manager = eg.join()
    model = eg.ShardedDataParallel(manager, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), **options)
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    batches = eg.GlobalBatch(4, size=4, slot=2)

    def train() -> None:
        for step in manager.steps(4):
            with step:
                factor = math.nan if step.index == 1 else 1.0  # that is no change
                for slot in batches.slots(step):
                    with model.accumulate(last=slot.last):
                        (model(torch.ones(2, 2)) * factor).sum().backward()
                if step.index == 2:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach)
                assert optim.step(weight=4.0)

    told = "gradients were changed between the last backward and `optim.step`, which has yet to sum them"
    with pytest.raises(eg.InvalidOperationError, match=told):
        train()
    assert manager.committed_steps == 2


# SHARDED-8
@pytest.mark.parametrize("options", [{}, {"reduction": "reproducible"}, {"keep": True}], ids=str)
@pytest.mark.parametrize("factor", [None, 0.5])
def test_a_gradient_of_a_sharded_module_that_is_dropped_or_replaced_is_refused(
    options: dict[str, Any], factor: float | None
) -> None:
    """One of the last layer's: the elements of others are compared. A gradient that was None may stay so."""
    manager = eg.join()
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    model = eg.ShardedDataParallel(manager, module, **options)
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    batches = eg.GlobalBatch(4, size=4, slot=2)
    weight = module[1].get_parameter("weight")

    def train() -> None:
        for step in manager.steps(3):
            with step:
                for slot in batches.slots(step):
                    with model.accumulate(last=slot.last):
                        module[1](module[0](torch.ones(2, 2))).sum().backward()
                module[2].weight.grad = None
                if step.index == 1:
                    weight.grad = None if factor is None else grad_of(weight) * factor
                assert optim.step(weight=4.0)

    with pytest.raises(eg.InvalidOperationError, match="gradients were changed between the last backward and `optim"):
        train()
    assert manager.committed_steps == 1
