"""Which gradients of slots a rank keeps when its generation ends before the step is committed. The rank is alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor, nn

import elasticgang as eg
from elasticgang.checkpoint.saver import DurableCheckpoints
from elasticgang.errors import PeerLostError
from elasticgang.gang.elastic import Binding, ElasticGang
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.member.step import Step
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.member_instructions import Instruction
from elasticgang.protocol.record import Record
from elasticgang.state.snapshot_server import SnapshotServer
from elasticgang.train.data import Slots
from elasticgang.train.reproducible import ReproducibleSum
from elasticgang.train.slot_gradients import REDUCTIONS

CPU = torch.device("cpu")
NUM_SLOTS, NUM_STEPS, WIDTH = 7, 4, 30
DATA = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(3))


class Generations(LocalRendezvous):
    """Enters a new generation whenever one has ended."""

    def __init__(self) -> None:
        super().__init__(eg.ParallelLayout(), CPU)
        self.num_collectives = 0
        self.digest = ""  # of the checkpoint that the next record goes back to
        self._generation = 0

    def perform(self, instruction: Instruction) -> Record | None:
        found = super().perform(instruction)
        if isinstance(instruction, do.SendRequest):
            assert self.record is not None
            self._generation += 1
            self.record = replace(self.record, generation=self._generation, checkpoint=self.digest)
        return found

    def end(self) -> None:
        self.poison(PeerLostError("a peer has died"))


class Unreadable(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise MemoryError


class Layers(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))
        self.on_forward: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.on_forward()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.dropout(x)


class Run:
    """One job. `computed`: the slots whose backward has ended, and in which step and generation."""

    def __init__(
        self,
        *,
        keep: bool = True,
        reduction: str = "reproducible",
        checkpoints: DurableCheckpoints | None = None,
        **options: Any,
    ) -> None:
        self.rendezvous = Generations()
        self.manager = eg.QuorumManager(
            self.rendezvous,
            SnapshotServer(),
            eg.ParallelLayout(),
            CPU,
            make_checkpoints=None if checkpoints is None else lambda *_: checkpoints,
        )
        if checkpoints is not None:
            self.manager.checkpoints("unused", every_steps=1000)
        self.module = Layers()
        self.model = eg.DistributedDataParallel(
            self.manager,
            self.module,
            reduction=reduction,
            keep=keep,
            **options,
        )
        self.batches = eg.GlobalBatch(40, size=2 * NUM_SLOTS, slot=2, seed=1)
        self.computed: list[tuple[int, int, int]] = []
        self.kept: dict[tuple[int, int], list[int]] = {}  # by step and generation

    def train(
        self,
        in_slot: Callable[[Step, int], object] = lambda step, slot: None,
        after_slots: Callable[[Step], object] = lambda step: None,
        between: Callable[[Step], object] = lambda step: None,
    ) -> list[Tensor]:
        """The final parameters. `in_slot`: called after the backward of each slot; `between`: after each step."""
        sgd = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.5)
        optim = eg.Optimizer(self.manager, sgd)
        self.manager.register_state(model=self.model, optim=optim)
        for step in self.manager.steps(NUM_STEPS):
            with step:
                slots = self.batches.slots(step)
                self.kept[step.index, step.generation] = [slot.number for slot in slots.kept]
                assert slots.num_samples == 2 * NUM_SLOTS
                for slot in slots:
                    with self.model.accumulate(last=slot.last):
                        self.model(DATA[slot.index]).square().sum().backward()
                    self.computed.append((step.index, step.generation, slot.number))
                    in_slot(step, slot.number)
                after_slots(step)
                optim.step(weight=slots.num_samples, max_norm=1.0)
            between(step)
        return [parameter.detach().clone() for parameter in self.module.parameters()]

    def times(self, step: int) -> list[int]:
        """How often each slot of `step` was computed."""
        counted = Counter(slot for index, _, slot in self.computed if index == step)
        return [counted[slot] for slot in range(NUM_SLOTS)]


@pytest.fixture(scope="module")
def undisturbed() -> list[Tensor]:
    return Run(keep=False).train()


def same(found: list[Tensor], expected: list[Tensor], reduction: str = "reproducible") -> bool:
    """Bit for bit, or up to the order of additions."""
    alike = torch.equal if reduction == "reproducible" else torch.allclose
    return all(alike(one, other) for one, other in zip(found, expected, strict=True))


ONCE = [1] * NUM_SLOTS
TWICE = [2] * NUM_SLOTS
OPTIONS: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 0.001}, {"find_unused_parameters": True}]


def end_in(run: Run, at: int, slot: int) -> Callable[[Step, int], None]:
    """Ends the first generation there."""

    def in_slot(step: Step, number: int) -> None:
        if (step.index, number, step.generation) == (at, slot, 1):
            run.rendezvous.end()

    return in_slot


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("slot", range(NUM_SLOTS))
def test_finished_slots_are_not_computed_again(
    slot: int, options: dict[str, Any], reduction: str, undisturbed: list[Tensor]
) -> None:
    """KEEP-2: that in which the generation ends is finished too."""
    run = Run(reduction=reduction, **options)

    assert same(run.train(end_in(run, 2, slot)), undisturbed, reduction)
    assert [run.times(step) for step in range(NUM_STEPS)] == [ONCE] * NUM_STEPS
    assert run.kept[2, 2] == list(range(slot + 1))


def test_without_keep_all_slots_are_computed_again(undisturbed: list[Tensor]) -> None:
    run = Run(keep=False)
    assert same(run.train(end_in(run, 2, 5)), undisturbed)
    assert run.times(2) == [2, 2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_generation_may_end_at_every_slot(options: dict[str, Any], reduction: str, undisturbed: list[Tensor]) -> None:
    """And before the first one, and after the last one. Then a try has no slots."""
    run = Run(reduction=reduction, **options)
    ended: set[tuple[int, int]] = set()

    def end_once(step: Step, slot: int) -> None:
        if step.index == 2 and (step.index, slot) not in ended:
            ended.add((step.index, slot))
            run.rendezvous.end()

    run.module.on_forward = lambda: end_once(run.manager.step, -1)
    assert same(run.train(end_once, lambda step: end_once(step, NUM_SLOTS)), undisturbed, reduction)
    assert run.times(2) == ONCE
    assert run.manager.generation == 2 + NUM_SLOTS  # that before slot 0 ends after it


@pytest.mark.parametrize("slot", [3, NUM_SLOTS - 1])
def test_a_generation_may_end_before_the_ranks_agree(
    slot: int, undisturbed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DIVISION-5: what was kept before is kept still."""
    run = Run()
    start_sum = run.rendezvous.start_sum

    def failing(values: list[float]) -> Callable[[], list[float]]:
        if run.manager.generation == 2 and not run.manager.poisoned:
            run.rendezvous.end()
            raise PeerLostError("a peer has died")
        return start_sum(values)

    monkeypatch.setattr(run.rendezvous, "start_sum", failing)
    assert same(run.train(end_in(run, 2, slot)), undisturbed)
    assert run.times(2) == ONCE
    assert (2, 2) not in run.kept
    assert run.kept[2, 3] == list(range(slot + 1))


# DIVISION-5
def test_nothing_is_kept_of_step_0(undisturbed: list[Tensor]) -> None:
    run = Run()
    assert same(run.train(end_in(run, 0, 4)), undisturbed)
    assert run.times(0) == [2, 2, 2, 2, 2, 1, 1]


# DIVISION-5
def test_nothing_is_kept_if_the_job_goes_back_to_a_checkpoint(undisturbed: list[Tensor]) -> None:
    """Of the same attempt, maybe of another job in the same directory. This one has the present state."""
    checkpoints = create_autospec(DurableCheckpoints, instance=True, proposes=False, is_saving=False, coverage=None)
    checkpoints.newest.return_value = None
    checkpoints.save_last.return_value = (False, False)
    run = Run(checkpoints=checkpoints)
    end = end_in(run, 2, 4)

    def in_slot(step: Step, number: int) -> None:
        end(step, number)
        if run.manager.poisoned:
            run.rendezvous.digest = "another"

    assert same(run.train(in_slot), undisturbed)
    checkpoints.load.assert_called_once()
    assert run.times(2) == [2, 2, 2, 2, 2, 1, 1]


# DIVISION-5
def test_nothing_of_a_committed_step_is_kept_for_the_next(undisturbed: list[Tensor]) -> None:
    run = Run()
    between = {1: run.rendezvous.end}
    assert same(run.train(between=lambda step: between.get(step.index, int)()), undisturbed)
    assert run.manager.generation == 2
    assert run.kept[2, 2] == []
    assert run.times(2) == ONCE


# KEEP-1
def test_nothing_is_kept_if_a_rank_reports_an_error(undisturbed: list[Tensor]) -> None:
    """In the first generation, and in the first step of another one, in which slots are kept."""
    run = Run()
    ends = end_in(run, 2, 4)

    def after_slots(step: Step) -> None:
        if (step.index, step.generation) in ((1, 1), (2, 2)) and run.times(step.index)[-1] == 1:
            run.manager.report_error(ValueError("not finite"))

    assert same(run.train(ends, after_slots), undisturbed)
    assert run.times(1) == TWICE
    assert run.times(2) == TWICE
    assert run.manager.generation == 2


# KEEP-1
def test_nothing_is_kept_if_the_generation_ends_after_the_error(undisturbed: list[Tensor]) -> None:
    """A rank may wait to join."""
    run = Run()

    def of_first_try(action: Callable[[], object]) -> Callable[[Step], object]:
        return lambda step: action() if (step.index, step.generation) == (2, 1) else None

    report = of_first_try(lambda: run.manager.report_error(ValueError("not finite")))
    assert same(run.train(after_slots=report, between=of_first_try(run.rendezvous.end)), undisturbed)
    assert run.times(2) == TWICE


# KEEP-1
@pytest.mark.parametrize("reporting", [None, 1])
def test_nothing_is_kept_if_the_generation_ends_in_the_step_of_the_error(
    reporting: int | None, undisturbed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reporting`: the slot in which the error is reported. None: that is before the first slot."""
    run = Run()
    ends, slots = end_in(run, 2, 4), run.batches.slots

    def report_once(step: Step, number: int | None) -> None:
        if (step.index, step.generation, number) == (2, 1, reporting):
            run.manager.report_error(ValueError("not finite"))

    def in_slot(step: Step, number: int) -> None:
        report_once(step, number)
        ends(step, number)

    def slots_after_error(step: Step) -> Slots:
        report_once(step, None)
        return slots(step)

    monkeypatch.setattr(run.batches, "slots", slots_after_error)
    assert same(run.train(in_slot), undisturbed)
    assert run.kept[2, 2] == []
    assert run.times(2) == [2, 2, 2, 2, 2, 1, 1]


# KEEP-2
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("using", "times"), [({2, 3, 4}, [1, 1, 1, 1, 2, 1, 1]), ({2}, ONCE)])
def test_a_slot_in_which_a_collective_may_have_failed_is_computed_again(
    using: set[int], times: list[int], reduction: str, undisturbed: list[Tensor]
) -> None:
    """`using`: the slots that use a gang. The generation ends in slot 4."""
    run = Run(reduction=reduction)
    ends = end_in(run, 2, 4)

    def in_slot(step: Step, number: int) -> None:
        ends(step, number)
        run.rendezvous.num_collectives += number in using

    assert same(run.train(in_slot), undisturbed, reduction)
    assert run.times(2) == times


# KEEP-2
def test_a_gang_counts_the_collectives_of_gangs_that_are_made_from_it() -> None:
    gang = ElasticGang("dp", CPU)
    gang.bind(Binding(0, (0,), None))
    made = gang.create_gang([0])
    assert made is not None
    for each in (gang, made, made):
        each.all_reduce(torch.ones(1), eg.ReduceOperation.SUM)
    gang.barrier()
    assert (gang.num_started, made.num_started) == (4, 2)


# KEEP-2
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.001}], ids=str)
def test_nothing_is_kept_if_a_collective_may_have_failed_in_the_last_slot(
    options: dict[str, Any], undisturbed: list[Tensor]
) -> None:
    """Its gradient is in the sums already."""
    run = Run(**options)
    ends = end_in(run, 2, NUM_SLOTS - 1)

    def in_slot(step: Step, number: int) -> None:
        ends(step, number)
        run.rendezvous.num_collectives += 1

    assert same(run.train(in_slot), undisturbed)
    assert run.times(2) == TWICE


# KEEP-4, KEEP-2
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_rank_of_a_group_of_several_drops_the_slot_under_way_alone(
    options: dict[str, Any], reduction: str, undisturbed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last one, whose gradient is in the sums already, and may be wrong. The wrapper is made for two ranks."""
    with monkeypatch.context() as patched:
        patched.setattr(QuorumManager, "layout", eg.ParallelLayout(tp=2))
        run = Run(reduction=reduction, **options)
    ends = end_in(run, 2, NUM_SLOTS - 1)

    def in_slot(step: Step, number: int) -> None:
        ends(step, number)
        run.rendezvous.num_collectives += 1

    assert same(run.train(in_slot), undisturbed, reduction)
    assert run.times(2) == [1] * (NUM_SLOTS - 1) + [2]


# KEEP-3
def test_nothing_is_kept_if_a_slot_changes_a_buffer(
    undisturbed: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    run.module.on_forward = lambda: run.module.calls.add_(1)
    assert same(run.train(end_in(run, 2, 4)), undisturbed)
    assert run.times(2) == [2, 2, 2, 2, 2, 1, 1]
    assert run.module.calls.item() == NUM_STEPS * NUM_SLOTS
    assert caplog.text.count("the slots change buffers of the module") == 1


# KEEP-3
def test_a_buffer_may_change_outside_of_the_slots(undisturbed: list[Tensor]) -> None:
    run = Run()
    assert same(run.train(end_in(run, 2, 4), lambda step: run.module.calls.add_(1)), undisturbed)
    assert run.times(2) == ONCE
    assert run.module.calls.item() == NUM_STEPS


# KEEP-2
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_wrong_is_kept_if_backward_raises(options: dict[str, Any], undisturbed: list[Tensor]) -> None:
    """In the last slot it may have added the gradients of some parameters."""
    run = Run(**options)
    fails = [True]

    def fail(gradient: Tensor) -> None:
        if run.manager.step.index == 2 and run.manager.step.slot == NUM_SLOTS - 1 and fails.pop():
            run.rendezvous.end()
            fails.append(False)
            raise ArithmeticError("of the script")

    next(run.module.parameters()).register_hook(fail)  # type: ignore[no-untyped-call]  # the last gradient
    found = run.train()
    assert same(found, undisturbed)
    assert run.times(2)[:-1] in ([1] * (NUM_SLOTS - 1), [2] * (NUM_SLOTS - 1))


# EMPTYLOOP-1
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_evaluation_within_the_loop_finishes_no_slot(reduction: str, undisturbed: list[Tensor]) -> None:
    """Of which it has more than the training: the gradient of one that is cut off later would be kept."""
    run = Run(reduction=reduction)
    others, fails = eg.GlobalBatch(50, size=50, slot=1, seed=7), [True]

    def evaluate(step: Step, slot: int) -> None:
        with torch.no_grad():
            assert len(list(others.slots(step))) == 50
        assert step.slot == slot

    def fail(gradient: Tensor) -> None:
        if fails and run.manager.step.index == 2 and run.manager.step.slot == 4:
            fails.clear()
            run.rendezvous.end()
            raise ArithmeticError("of the script")

    next(run.module.parameters()).register_hook(fail)  # type: ignore[no-untyped-call]  # the last gradient
    assert same(run.train(evaluate), undisturbed, reduction)
    assert not fails
    assert run.kept[2, 2] == [0, 1, 2, 3]


def test_another_step_and_another_try_keep_nothing_of_it(undisturbed: list[Tensor]) -> None:
    """A generation that ends after the step was committed."""
    run = Run()
    assert same(run.train(end_in(run, 2, 0)), undisturbed)
    assert run.kept[2, 2] == [0]
    assert run.kept[3, 2] == []


def test_memory_may_run_out_while_a_slot_is_added(undisturbed: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two groups has the gradient of slot 0 then, and the second has not."""
    run = Run(bucket_cap_mb=0.006)
    assert len(run.model.buckets) == 2
    add, num_calls = ReproducibleSum.add, [0]

    def fail_at_second(total: ReproducibleSum, leaf: int, gradients: Sequence[Tensor | None]) -> None:
        num_calls[0] += 1
        if num_calls[0] == 2:
            run.rendezvous.end()
            gradients = Unreadable(gradients)
        add(total, leaf, gradients)

    def in_slot(step: Step, slot: int) -> None:
        if step.index == 2 and step.generation == 1 and slot == 0:
            monkeypatch.setattr(ReproducibleSum, "add", fail_at_second)

    assert same(run.train(in_slot), undisturbed)
    assert run.times(2) == ONCE
    assert run.kept[2, 2] == [0]


def test_keep_is_refused_beside_another_wrapper() -> None:
    run = Run()
    eg.DistributedDataParallel(run.manager, nn.Linear(1, 1))
    with pytest.raises(eg.InvalidOperationError, match="one wrapper for all gradients, but there are 2"):
        run.train()


def test_slots_of_two_batches_in_one_step_are_refused() -> None:
    run = Run()
    other = eg.GlobalBatch(40, size=4, slot=2)
    with pytest.raises(eg.InvalidOperationError, match="a batch of 7 slots and of one of 2"):
        run.train(lambda step, slot: other.slots(step))
