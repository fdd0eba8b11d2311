"""`SwallowingProcessGroup`: every collective that fails, at its start and later, leaves what SWALLOW-1 to SWALLOW-3
say."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from elasticgang.collectives.table import TABLE
from elasticgang.collectives.torch_methods import CollectiveMethods
from elasticgang.comm.error_swallowing import SwallowingProcessGroup
from elasticgang.comm.in_process import create_process_group
from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
from elasticgang.errors import GangError, InvalidOperationError, PeerLostError, StepAborted
from tests.integration.conftest import Rings
from tests.integration.forms import FORMS, MOVING, Form
from tests.integration.rings import SUM

SIZE = 3
ERROR = PeerLostError("rank 2 was killed")


class FailedWork(Work):
    """Has written garbage, and fails: when it is waited for, and in its future."""

    def wait(self, timeout: Any = None) -> bool:
        raise ERROR

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(ERROR)
        return future


class Faulty(CollectiveMethods):
    """Fails every collective."""

    def __init__(self, at_start: bool, keeps_in_place: bool = False) -> None:
        self.at_start, self.keeps_in_place = at_start, keeps_in_place
        self.asked: list[str] = []
        self.num_configured = 0

    def configure(self, *args: Any) -> None:
        self.num_configured += 1

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return SIZE

    def errored(self) -> None:
        return None

    def _perform(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.asked.append(name)
        if self.at_start:
            raise ERROR
        for part in call.parts:
            if not (TABLE[part.call].is_in_place and self.keeps_in_place):
                for output in part.outputs:
                    output.fill_(float("nan") if output.is_floating_point() else -77)
        return FailedWork()


def new(seed: int | None, *shape: int) -> Tensor:
    return torch.full(shape, float("nan") if seed is None else 5.0)


# What the forms ask for in place; `send` writes nothing.
IN_PLACE = {"allreduce", "allreduce_coalesced", "broadcast", "broadcast_one", "reduce"}


class Later:
    """The forms wait for their works; this lets a test end them by another way."""

    def __init__(self, pg: SwallowingProcessGroup, end: Callable[[Any], object]) -> None:
        self._pg, self._end = pg, end

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._pg, name)
        if name in ("size", "rank", "getBackendName"):
            return method

        def started(*args: Any) -> Any:
            work = method(*args)
            self._end(work)
            return work

        return started


ENDS: dict[str, Callable[[Any], object]] = {
    "wait": lambda work: work.wait(),
    "future": lambda work: work.get_future().wait(),
    "result": lambda work: work.result(),
    "synchronize": lambda work: work.synchronize(),
}


@pytest.mark.parametrize("keeps_in_place", [False, True], ids=["writes", "keeps"])
@pytest.mark.parametrize("end", list(ENDS))
@pytest.mark.parametrize("at_start", [True, False], ids=["at-start", "later"])
@pytest.mark.parametrize("name", list(FORMS))
def test_a_collective_that_fails_leaves_finite_outputs_that_are_always_the_same(
    name: str, at_start: bool, end: str, keeps_in_place: bool
) -> None:
    faulty = Faulty(at_start, keeps_in_place)
    pg = SwallowingProcessGroup(faulty)
    outputs = FORMS[name](Later(pg, ENDS[end]), 1, new)
    assert outputs
    kept = 5.0 if name in IN_PLACE and (at_start or keeps_in_place) else 0.0
    assert {value for output in outputs for value in output.flatten().tolist()} == {kept}
    assert pg.error() is ERROR
    assert pg.errored() is ERROR
    # SWALLOW-1: nothing more is sent, whatever it is
    asked = list(faulty.asked)
    for form in FORMS.values():
        for output in form(Later(pg, ENDS[end]), 1, new):
            assert output.isfinite().all()
    assert faulty.asked == asked
    pg.configure("store", "replica", 1, SIZE)
    assert faulty.num_configured == 1
    assert pg.error() is None
    assert pg.errored() is None
    FORMS[name](pg, 1, new)
    assert len(faulty.asked) > len(asked)


def whole(seed: int | None, *shape: int) -> Tensor:
    return torch.full(shape, -1 if seed is None else 5)


def barrier(pg: Any, rank: int, new: Any) -> list[Tensor]:
    pg.barrier().wait()
    return []


EXACT = [*(MOVING[name] for name in ("allgather", "broadcast", "broadcast_one", "gather", "scatter")), barrier]
EXACT += [MOVING["allgather_coalesced"], MOVING["send_recv"]]


@pytest.mark.parametrize("end", list(ENDS))
@pytest.mark.parametrize("at_start", [True, False], ids=["at-start", "later"])
@pytest.mark.parametrize("form", EXACT, ids=lambda form: form.__name__)
def test_objects_and_barriers_raise(form: Form, at_start: bool, end: str) -> None:
    """SWALLOW-3. Integers that are moved are what torch's object collectives are made of."""
    faulty = Faulty(at_start)
    pg = SwallowingProcessGroup(faulty)
    aborted = StepAborted if end != "future" or at_start else RuntimeError  # a future names it
    for _ in range(2):  # the second was never sent
        with pytest.raises(aborted, match="rank 2 was killed"):
            form(Later(pg, ENDS[end]), 1, whole)
        aborted = StepAborted
    assert pg.error() is ERROR


@pytest.mark.parametrize("at_start", [True, False], ids=["at-start", "later"])
@pytest.mark.parametrize("form", [form for form in FORMS.values() if form not in EXACT], ids=lambda form: form.__name__)
def test_other_integers_are_as_numbers_are(form: Form, at_start: bool) -> None:
    pg = SwallowingProcessGroup(Faulty(at_start))
    for output in form(pg, 1, whole):
        assert {*output.flatten().tolist()} == {5 if form.__name__ in IN_PLACE and at_start else 0}


def test_only_the_first_error_is_kept() -> None:
    pg = SwallowingProcessGroup(Faulty(at_start=True))
    first, second = PeerLostError("first"), ValueError("second")
    pg.report_error(first)
    pg.report_error(second)
    pg.allreduce([torch.ones(1)], SUM).wait()
    assert pg.error() is first


def test_what_does_not_fit_is_no_error_of_the_group() -> None:
    faulty = Faulty(at_start=False)
    pg = SwallowingProcessGroup(faulty)
    with pytest.raises(ValueError, match="must not share memory"):
        pg.allreduce([torch.ones(1).expand(3)], SUM)
    with pytest.raises(ValueError, match="elements"):
        pg._allgather_base(torch.ones(4), torch.ones(3))
    assert pg.error() is None
    assert faulty.asked == []


def test_a_work_that_is_not_waited_for_reports_its_error_by_its_future() -> None:
    pg = SwallowingProcessGroup(Faulty(at_start=False))
    work = pg.allreduce([torch.ones(1)], SUM)
    assert pg.error() is None
    assert work.get_future().done()
    assert pg.error() is ERROR


# -- with real groups


class WithoutFuture(Work):
    """As works of Gloo's messages."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        raise RuntimeError("this work has no future")


class Futureless(Faulty):
    def _perform(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        return WithoutFuture()


def test_a_work_without_a_future_is_polled_and_waited_for() -> None:
    pg = SwallowingProcessGroup(Futureless(at_start=False))
    work = pg.allreduce([torch.ones(1)], SUM)
    assert work.is_completed()
    assert work.is_success()
    assert work.wait()
    assert pg.error() is None


def test_nothing_of_a_sound_group_changes(rings: Rings) -> None:
    ring = rings(2, make=lambda: SwallowingProcessGroup(ProcessGroupIsolatedGloo(30.0)))
    assert ring.sums() == [2.0, 2.0]
    for rank, pg in enumerate(ring.groups):
        assert (pg.rank(), pg.size(), pg.getRank(), pg.getSize()) == (rank, 2, rank, 2)
        assert isinstance(pg.parent, ProcessGroupIsolatedGloo)
        assert pg.getBackendName() == "elasticgang-isolated-gloo"
        assert repr(pg) == f"SwallowingProcessGroup(ProcessGroupIsolatedGloo(rank={rank}, size=2))"
        assert pg.errored() is None


@pytest.mark.parametrize("kind", ["isolated-gloo", "gloo"])
def test_ddp_goes_on_when_the_peer_is_lost(kind: str, rings: Rings) -> None:
    """Nothing is raised inside backward; after a `configure` the same DDP goes on."""
    ring = rings(2, make=lambda: SwallowingProcessGroup(create_process_group(kind, 10.0)))

    def build(rank: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            module = nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Linear(300, 1))
        return nn.parallel.DistributedDataParallel(module, process_group=ring[rank], find_unused_parameters=True)

    def step(rank: int) -> list[Tensor]:
        models[rank].zero_grad()
        torch.autograd.backward(models[rank](torch.full((2, 4), rank + 1.0)).sum())
        return [parameter.grad.clone() for parameter in models[rank].parameters() if parameter.grad is not None]

    models = ring.each(build)
    sound = ring.each(step)
    assert all(map(torch.equal, *sound))
    if kind == "gloo":
        ring[1].parent.shutdown()
        ring[1].report_error(RuntimeError("rank 1 left"))
        ring[0].report_error(RuntimeError("rank 1 left"))
    else:
        os.kill(ring[1].parent.comm_process.pid, signal.SIGKILL)
    for gradients in ring.each(step):
        assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(pg.error() for pg in ring.groups)
    with pytest.raises(StepAborted):
        ring[0].barrier().wait()
    ring.configure()
    assert all(map(torch.equal, ring.each(step)[0], sound[0]))


def test_an_average_of_a_lost_group_is_finite(rings: Rings) -> None:
    ring = rings(2, make=lambda: SwallowingProcessGroup(ProcessGroupIsolatedGloo(10.0)))
    ring[1].parent.abort()
    tensor = torch.full((3,), 5.0)
    assert ring[0].allreduce([tensor], ReduceOp.AVG).wait()
    assert tensor.tolist() == [5.0] * 3
    assert ring[0].error()


@pytest.mark.parametrize("end", ["wait", "future", "result", "synchronize"])
def test_an_error_of_an_earlier_configuration_is_none_of_this_one(end: str) -> None:
    pg = SwallowingProcessGroup(Faulty(at_start=False))
    tensor, exact = torch.full((3,), 5.0), torch.full((3,), 5)
    kept, kept_exact = pg.allreduce([tensor], SUM), pg.broadcast_one(exact, 0)
    pg.configure("store", "replica", 1, SIZE)
    ENDS[end](kept)
    assert tensor.tolist() == [0.0] * 3  # as its own configuration had it
    with pytest.raises((StepAborted, RuntimeError), match="rank 2 was killed"):
        ENDS[end](kept_exact)
    assert pg.error() is None
    pg.allreduce([tensor], SUM).wait()
    assert pg.error() is ERROR


def test_an_error_of_a_collective_that_started_during_configure_is_none_of_the_configuration() -> None:
    class Late(Faulty):
        """Another thread starts a collective while it is configured."""

        def configure(self, *args: Any) -> None:
            begun.append(pg.allreduce([torch.ones(3)], SUM))
            super().configure(*args)

    begun: list[Any] = []
    pg = SwallowingProcessGroup(Late(at_start=False))
    pg.configure("store", "replica", 1, SIZE)
    begun[0].wait()
    assert pg.error() is None


def test_a_kept_work_does_not_silence_the_next_configuration(rings: Rings) -> None:
    ring = rings(2, make=lambda: SwallowingProcessGroup(ProcessGroupIsolatedGloo(10.0)))
    kept = [ring[0].allreduce([torch.ones(3)], SUM) for _ in range(2)]  # that the peer does not take part in
    future = kept[1].get_future()
    ring.configure()
    assert kept[0].wait()
    future.wait()
    assert ring[0].error() is None
    assert ring.sums() == [2.0, 2.0]


def test_after_a_configure_that_failed_nothing_is_sent(rings: Rings) -> None:
    ring = rings(2, make=lambda: SwallowingProcessGroup(ProcessGroupIsolatedGloo(10.0)))
    ring[0].set_timeout(timedelta(seconds=0.2))
    with pytest.raises(GangError):
        ring[0].configure(ring.next_address(), "replica", 0, 2)
    assert isinstance(ring[0].error(), GangError)
    tensor = torch.full((3,), 5.0)
    ring[0].allreduce([tensor], SUM).wait()
    assert tensor.tolist() == [5.0] * 3
    with pytest.raises(ValueError, match="rank"):
        ring[0].configure(ring.next_address(), "replica", 2, 2)
    ring[0].set_timeout(timedelta(seconds=10.0))
    ring.configure()
    assert ring.sums() == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["isolated-gloo", "gloo"])
def test_misuse_is_raised(kind: str, rings: Rings) -> None:
    pg = SwallowingProcessGroup(create_process_group(kind, 10.0))
    with pytest.raises(InvalidOperationError, match="call `configure` first"):
        pg.allreduce([torch.ones(1)], SUM)
    assert pg.error() is None


def test_an_in_process_group_that_was_aborted_is_not_misused(rings: Rings) -> None:
    ring = rings(2, make=lambda: SwallowingProcessGroup(create_process_group("gloo", 10.0)))
    ring[0].parent.abort()
    tensor = torch.full((3,), 5.0)
    ring[0].allreduce([tensor], SUM).wait()
    assert tensor.tolist() == [5.0] * 3
    assert ring[0].error()
