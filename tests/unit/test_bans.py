"""When the gangs of a manager refuse to communicate: after a vote, and between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import elasticgang as eg
from elasticgang.gang.bans import Ban, Bans
from elasticgang.gang.elastic import Binding, ElasticGang

CPU = torch.device("cpu")
STEP_BANS = (Ban.COMMITTED, Ban.DROPPED, Ban.NO_STEP)


def calls(gang: eg.Gang) -> Mapping[str, Callable[[], object]]:
    """By what a refusal names."""
    return {
        "all_reduce": lambda: eg.all_sum(gang, 1),
        "broadcast": lambda: eg.broadcast_flag(gang, True),
        "all_gather_single": lambda: gang.all_gather(torch.empty(gang.size), torch.ones(1), async_op=True),
        "barrier": gang.barrier,
        "broadcast_objects": lambda: gang.broadcast_objects([1]),
        "create_gang": lambda: gang.create_gang([0]),
    }


def refused(gang: eg.Gang) -> list[str]:
    """The errors of `calls`, each of which is refused."""
    errors = []
    for name, call in calls(gang).items():
        with pytest.raises(eg.InvalidOperationError, match=rf"^`{name}` of the gang .* is refused") as caught:
            call()
        errors.append(str(caught.value))
    return errors


# BAN-1
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ban", STEP_BANS)
def test_a_gang_of_any_size_refuses_every_call_and_says_why(ban: Ban, size: int) -> None:
    bans = Bans()
    gang = ElasticGang("dp", CPU, bans=bans)
    gang.bind(Binding(0, tuple(range(size)), None))
    made = ElasticGang("dp.1", CPU, maker=gang)
    made.bind(Binding(0, (0,), None))
    assert bans.replace(ban) is None
    for each in (gang, made):
        assert all("Call it before `optim.step`" in error for error in refused(each))
    assert (gang.rank, gang.size) == (0, size)
    assert bans.replace(None) is ban
    made.barrier()


def test_a_gang_that_is_in_no_generation_says_that() -> None:
    bans = Bans()
    gang = ElasticGang("dp", CPU, bans=bans)
    gang.bind(Binding(0, (0,), None))
    gang.bind(None)
    bans.replace(Ban.NO_STEP)
    with pytest.raises(eg.InvalidOperationError, match="is in no generation"):
        gang.barrier()
    gang.close()
    with pytest.raises(eg.InvalidOperationError, match="is closed"):
        gang.barrier()


# BAN-2
def test_another_thread_goes_on() -> None:
    gang = ElasticGang("dp", CPU)
    gang.bind(Binding(0, (0,), None))
    gang.bans.replace(Ban.COMMITTED)
    with ThreadPoolExecutor(1) as other:
        for call in calls(gang).values():
            other.submit(call).result()


# BAN-1
def test_a_script_that_is_alone_is_refused_what_a_job_of_several_ranks_would_be() -> None:
    manager = eg.join(layout=eg.ParallelLayout())
    model = eg.DistributedDataParallel(manager, nn.Linear(1, 1))
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    has_failed = False
    for step in manager.steps(2):
        assert all("no step is open" in error for error in refused(manager.gangs.dp))
        with step:
            for call in calls(manager.gangs.dp).values():
                call()
            made = manager.gangs.dp.create_gang([0])
            assert made is not None
            model(torch.ones(1, 1)).sum().backward()
            if not has_failed:
                has_failed = True
                manager.report_error(ValueError())
            if optim.step(weight=1.0, sums={"loss": 2, "num": torch.tensor([3.0])}):
                assert optim.sums == {"loss": 2.0, "num": 3.0}
                for gang in (manager.gangs.dp, made):
                    assert all("the step is committed" in error for error in refused(gang))
            else:
                assert optim.sums == {}
                assert all("the step is not committed" in error for error in refused(manager.gangs.dp))
        assert all("no step is open" in error for error in refused(manager.gangs.dp))


def test_a_number_to_be_summed_has_one_element() -> None:
    manager = eg.join(layout=eg.ParallelLayout())
    model = eg.DistributedDataParallel(manager, nn.Linear(1, 1))
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    for step in manager.steps(1):
        with step:
            model(torch.ones(1, 1)).sum().backward()
            with pytest.raises(ValueError, match=r"`sums\['loss'\]` must have one element, but has the shape \(2,\)"):
                optim.step(weight=1.0, sums={"loss": torch.ones(2)})
            assert optim.step(weight=1.0, sums={"loss": torch.tensor(float("nan"))})
            assert optim.sums["loss"] != optim.sums["loss"]
