"""`manager.build`: what it makes, when, and what becomes of the former seat's objects. In a job of one."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import elasticgang as eg
from elasticgang.gang.bans import Ban
from elasticgang.gang.elastic import Binding, ElasticGang
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.protocol.record import Record
from elasticgang.state.snapshot_server import SnapshotServer

CPU = torch.device("cpu")
BATCHES = eg.GlobalBatch(8, size=4, slot=2)


def manager() -> QuorumManager:
    layout = eg.ParallelLayout()
    return QuorumManager(LocalRendezvous(layout, CPU), SnapshotServer(), layout, CPU)


def trainer(manager: QuorumManager, built: list[eg.ModelCoordinates]) -> Callable[[eg.ModelCoordinates], Any]:
    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        built.append(seat)
        model = eg.DistributedDataParallel(manager, nn.Linear(1, 2 + seat.tp, bias=False))
        return {"model": model, "optim": eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))}

    return build


def train(manager: QuorumManager, state: Any, step: Any) -> None:
    slots = BATCHES.slots(step)
    for slot in slots:
        with state.model.accumulate(last=slot.last):
            state.model(torch.ones(slot.num_samples, 1)).sum().backward()
    assert state.optim.step(weight=slots.num_samples)


# SEATSTATE-1
def test_it_is_built_for_the_seat_before_the_first_step_and_stays_after_the_last() -> None:
    ours, built = manager(), list[eg.ModelCoordinates]()
    state = ours.build(trainer(ours, built))
    with pytest.raises(eg.InvalidOperationError, match="`model` is not built yet: a rank has its seat inside"):
        _ = state.model
    assert built == []
    for step in ours.steps(3):
        with step:
            train(ours, state, step)
    assert built == [(0, 0, 0)]
    assert state.model.module.weight.shape == (2, 1)
    with pytest.raises(AttributeError, match="there is no 'modle' here, only model, optim"):
        _ = state.modle


# SEATSTATE-2, SEATSTATE-3
def test_at_other_model_coordinates_it_is_built_anew_and_the_former_objects_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, built = manager(), list[eg.ModelCoordinates]()
    state = ours.build(trainer(ours, built))
    at = (0, 0, 0)
    monkeypatch.setattr(Record, "model_coordinates", lambda record, member: at)
    for step in ours.steps(3):
        with step:
            train(ours, state, step)
            if step.index == 0:
                former = [weakref.ref(state.model.module), weakref.ref(state.optim), weakref.ref(state.model)]
                at = (0, 0, 1)
            else:
                gc.collect()
                assert [ref() for ref in former] == [None] * 3
                assert state.model.module.weight.shape == (3, 1)
    assert built == [(0, 0, 0), (0, 0, 1)]


def test_it_is_called_once_and_before_the_first_step() -> None:
    ours = manager()
    state = ours.build(trainer(ours, []))
    with pytest.raises(eg.InvalidOperationError, match="`build` was called before"):
        ours.build(trainer(ours, []))
    for step in ours.steps(1):
        with step:
            train(ours, state, step)
    late = manager()
    late.register_state()
    for step in late.steps(1):
        with pytest.raises(eg.InvalidOperationError, match="call `build` before the first step"):
            late.build(trainer(late, []))
        with step:
            late.commit(1.0, lambda total: None)


@pytest.mark.parametrize(
    "made", [None, [nn.Linear(1, 1)], {}, {"a b": nn.Linear(1, 1)}, {"_x": nn.Linear(1, 1)}, {1: nn.Linear(1, 1)}]
)
def test_what_names_no_state_is_refused(made: Any) -> None:
    ours = manager()
    ours.build(lambda seat: made)
    with pytest.raises(TypeError, match="must return named training state, but returned"):
        next(ours.steps(1))


def test_what_is_no_state_is_refused() -> None:
    ours = manager()
    ours.build(lambda seat: {"model": 3})
    with pytest.raises(TypeError, match=r"model \(int\) must have state_dict"):
        next(ours.steps(1))


def test_a_name_that_is_registered_is_refused() -> None:
    ours = manager()
    ours.register_state(model=nn.Linear(1, 1))
    ours.build(lambda seat: {"model": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match="a state named 'model' is registered already"):
        next(ours.steps(1))


def test_while_it_builds_a_gang_has_rank_and_size_and_says_nothing() -> None:
    gang = ElasticGang("tp", CPU)
    gang.bind(Binding(0, (0,), None))
    gang.bans.replace(Ban.BUILD)
    assert (gang.rank, gang.size) == (0, 1)
    tensor, objects = torch.ones(1), list[object]([1])
    calls: Mapping[str, Callable[[], object]] = {
        "all_reduce": lambda: gang.all_reduce(tensor, eg.ReduceOperation.SUM),
        "barrier": gang.barrier,
        "broadcast_objects": lambda: gang.broadcast_objects(objects),
        "create_gang": lambda: gang.create_gang([0]),
    }
    for call in calls.values():
        with pytest.raises(eg.InvalidOperationError, match="cannot be used to communicate while the training state"):
            call()
    gang.bans.replace(None)
    for call in calls.values():
        call()


# RULE-10
def test_while_it_applies_a_gang_of_several_ranks_says_nothing() -> None:
    several, one = ElasticGang("sdp", CPU), ElasticGang("tp", CPU)
    part = ElasticGang("sdp.1", CPU, maker=several)
    for gang, ranks in ((several, (0, 1)), (part, (0, 1)), (one, (0,))):
        gang.bind(Binding(0, ranks, None))
    for gang in (several, one):
        gang.bans.replace(Ban.APPLY)
    for gang in (several, part):
        with pytest.raises(eg.InvalidOperationError, match=r"cannot be used to communicate while a step is applied"):
            gang.barrier()
    one.barrier()
    with ThreadPoolExecutor(1) as other_thread:  # such as one that saves a checkpoint
        other_thread.submit(several.barrier).result()
    several.bans.replace(None)
    part.barrier()


def test_a_layout_that_needs_several_ranks_is_refused_to_one_that_is_alone() -> None:
    layout = eg.ParallelLayout(sdp=2, tp=2, min_replicas=3)
    with pytest.raises(eg.LayoutError) as caught:
        LocalRendezvous(layout, CPU)
    assert str(caught.value) == (
        "the layout (sdp=2, tp=2, min_replicas=3) needs 12 ranks, but this process is alone; start it with "
        "`elasticgang run --nproc-per-node 12 ...`."
    )


def test_the_norm_counts_what_several_ranks_have_alike_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = eg.ParallelLayout()
    ours = QuorumManager(LocalRendezvous(layout, CPU), SnapshotServer(), layout, CPU)
    alike, own = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="`replicated` must name some of pp, sdp, tp, but names 'rdp' instead"):
        eg.Optimizer(ours, torch.optim.SGD([own], lr=1.0), replicated={"rdp": [own]})
    monkeypatch.setattr(QuorumManager, "layout", eg.ParallelLayout(tp=4, pp=2))
    optim = eg.Optimizer(ours, torch.optim.SGD([alike, own], lr=1.0), replicated={"tp": [alike], "pp": iter([alike])})
    alike.grad, own.grad = torch.full((4,), 2.0), torch.full((4,), 3.0)
    ours.register_state(parameters=nn.ParameterList([alike, own]), optim=optim)
    for step in ours.steps(1):
        with step:
            assert optim.step(weight=1.0, max_norm=0.5)
    norm = math.sqrt(4 * 4.0 / 8 + 4 * 9.0)
    torch.testing.assert_close(own.detach(), torch.full((4,), -3.0 * 0.5 / norm))
