"""Isolated NCCL groups over a stand-in for CUDA (`fake_cuda.py`) and real comm processes: what has no GPU in it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.distributed import ReduceOp

from elasticgang.collectives.collective import Collective
from elasticgang.comm import ProcessGroupGloo, ProcessGroupIsolatedNCCL, SwallowingProcessGroup, device_work
from elasticgang.errors import GangError, NotSupportedError
from tests.integration.conftest import Rings
from tests.integration.fake_cuda import GROUP_MEMORY, Event, IsolatedFake, Stream
from tests.integration.forms import FORMS, REDUCING, reducing
from tests.integration.rings import SUM, Ring, bits
from tests.support import is_alive, wait_until

pytestmark = pytest.mark.alone

GUARD_S = 20.0
SIZE = 3


@pytest.fixture(scope="module")
def ours(store: str) -> Iterator[Ring]:
    ring = Ring(lambda: IsolatedFake(30.0), SIZE, store)
    yield ring
    ring.close()


@pytest.fixture(scope="module")
def gloo(store: str) -> Iterator[Ring]:
    ring = Ring(lambda: ProcessGroupGloo(30.0), SIZE, store)
    yield ring
    ring.close()


@pytest.fixture
def pair(rings: Rings) -> Ring:
    return rings(2, make=lambda: IsolatedFake(30.0))


# TABLE-4
def test_two_ranks_that_both_send_first_do_not_wait_for_each_other(pair: Ring) -> None:
    """A stream of the comm process performs one collective after another."""
    into = [torch.empty(1 << 18) for _ in range(2)]

    def exchange(rank: int) -> bool:
        whom = ((1 - rank, 0), (1 - rank, 0))
        sent = torch.full_like(into[rank], rank)
        return bool(pair[rank].start(Collective("messages", (into[rank],), (sent,), messages=whom)).wait())

    assert pair.each(exchange) == [True, True]
    assert [(tensor == 1 - rank).all().item() for rank, tensor in enumerate(into)] == [True, True]


def new(seed: int | None, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed or 0) + 1)
    return torch.full(shape, 99.0) if seed is None else torch.randint(0, 5, shape, generator=generator).float()


def strided(seed: int | None, *shape: int) -> Tensor:
    """Every other element of a larger tensor."""
    larger = torch.full((*shape, 2), -1.0)
    larger[..., 0] = new(seed, *shape)
    return larger[..., 0]


def complexes(seed: int | None, *shape: int) -> Tensor:
    return torch.complex(new(seed, *shape), new(None if seed is None else seed + 50, *shape))


def run(ring: Ring, name: str, make: Callable[..., Tensor]) -> list[list[bytes]]:
    def form(rank: int) -> Sequence[Tensor]:
        written = FORMS[name](ring[rank], rank, make)
        if isinstance(ring[rank], IsolatedFake):
            ring[rank].cuda.current_stream(0).synchronize()
        return written

    return [[bits(tensor) for tensor in tensors] for tensors in ring.each(form)]


def start(pg: Any, value: float = 1.0, size: int = 1000) -> tuple[Tensor, Any]:
    tensor = torch.full((size,), value)
    return tensor, pg.allreduce([tensor], SUM)


def begun(pg: Any) -> Event:
    """Of the first work: the event of its begin."""
    found: Event = pg.cuda.events[0]
    return found


def stream(pg: Any) -> Stream:
    found: Stream = pg.cuda.current_stream(0)
    return found


def stuck(pg: Any) -> tuple[Tensor, Any]:
    """A work that does not pass on the device until `begun(pg).let_pass()`."""
    pg.allreduce([torch.ones(1)], SUM).wait()
    hold_back_next(pg)
    return start(pg)


def hold_back_next(pg: Any) -> None:
    """The next work uses the event of the former one, and does not pass on the device until `begun(pg).let_pass()`."""
    wait_until(lambda: pg.comm_process.num_free_events == 1, "the event of the former work", GUARD_S)
    begun(pg).hold_back()


# -- what is computed


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("make", [new, strided, complexes])
def test_every_collective(name: str, make: Callable[..., Tensor], ours: Ring, gloo: Ring) -> None:
    found = run(ours, name, make)
    if make is complexes and name not in REDUCING:  # which Gloo does not move
        expected = run(gloo, name, lambda *args: torch.view_as_real(make(*args)).contiguous())
    else:
        expected = run(gloo, name, lambda *args: make(*args).contiguous())
    assert found == expected
    assert any(found)


def test_a_mean_is_the_backends_own(ours: Ring) -> None:
    def mean(rank: int) -> float:
        tensor = torch.full((4,), float(rank))
        ours[rank].allreduce([tensor], reducing(AllreduceOptions, ReduceOp.AVG)).wait()
        return tensor[0].item()

    assert ours.each(mean) == [1.0] * SIZE


@pytest.mark.parametrize("empty", [torch.empty(0), torch.empty(3, 0)])
def test_what_is_empty(empty: Tensor, ours: Ring) -> None:
    ours.each(lambda rank: ours[rank].broadcast_one(empty.clone(), 0).wait())
    assert ours.sums() == [3.0] * SIZE


@pytest.mark.parametrize(
    ("tensor", "op", "why"),
    [
        (torch.ones(1, dtype=torch.int16), ReduceOp.SUM, "needs a dtype that NCCL reduces .* is torch.int16"),
        (torch.ones(1, dtype=torch.complex64), ReduceOp.MAX, "needs a dtype that NCCL reduces"),
        (torch.ones(1, dtype=torch.int32), ReduceOp.BAND, "NCCL has no `all_reduce` by band"),
        (torch.ones(1, dtype=torch.int32), ReduceOp.AVG, "MEAN needs a floating-point"),
    ],
)
def test_what_nccl_cannot_reduce_is_refused(tensor: Tensor, op: Any, why: str, ours: Ring) -> None:
    for tensors in ([tensor], [torch.ones(1), tensor]):  # nothing of a call is sent before all of it is checked
        with pytest.raises(ValueError, match=why):
            ours[0].allreduce_coalesced(tensors, reducing(AllreduceOptions, op))
    assert ours.sums() == [3.0] * SIZE


def test_a_tensor_of_another_device_is_refused(ours: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(ours[0].cuda), "kind", "cuda")
    with pytest.raises(ValueError, match=r"on the group's device \(cuda:0\), but is on cpu"):
        ours[0].allreduce([torch.ones(1)], SUM)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.parametrize(("has_nccl", "why"), [(True, "there is no CUDA device"), (False, "built without NCCL")])
def test_without_cuda_it_is_refused_when_it_is_made(has_nccl: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    with pytest.raises(NotSupportedError, match=f"isolated-nccl is not available: .*{why}"):
        ProcessGroupIsolatedNCCL(30.0)
    with pytest.raises(ValueError, match="`timeout` must be above 0"):
        ProcessGroupIsolatedNCCL(0)


# -- memory


# NCCL-1
def test_a_storage_is_opened_once_while_it_lives(pair: Ring) -> None:
    tensors = [torch.ones(1000) for _ in range(2)]
    for _ in range(3):
        for part in (slice(0, 500), slice(500, None)):
            pair.each(lambda rank, part=part: pair[rank].allreduce([tensors[rank][part]], SUM).wait())  # type: ignore[misc]
    assert [pg.cuda.shared for pg in pair.groups] == [[4000], [4000]]
    assert tensors[0].tolist() == [8.0] * 1000


def test_a_storage_with_other_memory_is_another() -> None:
    storage = torch.ones(1000).untyped_storage()  # torch itself dies of a shared one that is resized
    shared = device_work.SharedStorage(1, device_work.WeakStorage(storage), storage.data_ptr(), storage.nbytes(), [])
    assert shared.is_of(storage)
    storage.resize_(8000)
    assert not shared.is_of(storage)


def test_a_storage_that_is_gone_is_let_go_of_by_the_process(pair: Ring) -> None:
    def mapped(pg: Any) -> int:
        return Path(f"/proc/{pg.comm_process.pid}/maps").read_text().count("/torch_")

    before = [mapped(pg) for pg in pair.groups]
    tensors = [torch.ones(1000) for _ in range(2)]
    pair.each(lambda rank: pair[rank].allreduce([tensors[rank]], SUM).wait())
    assert [mapped(pg) for pg in pair.groups] == [number + 1 for number in before]
    tensors.clear()
    gc.collect()
    wait_until(lambda: [mapped(pg) for pg in pair.groups] == before, "its end in the process", GUARD_S)
    assert [pg.cuda.released for pg in pair.groups] == [[], []]  # by the process, not for it
    assert pair.sums() == [2.0, 2.0]


# -- streams


def test_a_death_is_noticed_though_a_sender_stands(pair: Ring) -> None:
    """What is gone here is told to the process by the thread that notices its death."""
    pg: Any = pair[0]
    pair.sums()
    wait_until(lambda: pg.num_active_work() == 0, "the end", GUARD_S)
    gc.collect()
    with pg.comm_process.sending():  # as who sends into a full socket
        wait_until(lambda: not pg.comm_process.num_shared, "the end of all storages", GUARD_S)
        time.sleep(0.3)  # some rounds of that thread
        os.kill(pg.comm_process.pid, signal.SIGKILL)
        wait_until(pg.errored, "the error", GUARD_S)
    pair.configure()
    assert pair.sums() == [2.0, 2.0]


# NCCLWORKER-2
def test_a_collective_begins_after_its_callers_stream(pair: Ring) -> None:
    pair.sums()
    hold_back_next(pair[0])
    begun_works = pair.each(lambda rank: start(pair[rank]))
    time.sleep(0.05)  # in which it would have been queued
    assert pair[0].num_active_work() == 1
    assert not begun_works[0][1].is_completed()
    begun(pair[0]).let_pass()
    for tensor, work in begun_works:
        work.wait()
        assert tensor[0].item() == 2.0


# NCCLWORKER-3
def test_a_closed_group_leaves_no_memory_behind(pair: Ring) -> None:
    def num_held(rank: int) -> int:
        found = 0
        for file in Path(f"/proc/{pair[rank].comm_process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is closed at this moment
                found += GROUP_MEMORY in os.readlink(file)
        return found

    pids = pair.each(lambda rank: int(pair[rank].comm_process.pid))
    for _ in range(3):
        assert pair.sums() == [2.0, 2.0]
        pair.configure()
        wait_until(lambda: pair.each(num_held) == [1, 1], "the end of the former group", GUARD_S)
    assert pair.each(lambda rank: int(pair[rank].comm_process.pid)) == pids, "the processes were kept"


# NCCL-2
def test_wait_blocks_until_it_has_passed_and_no_stream_waits_for_the_comm_process(rings: Rings) -> None:
    ring = rings(1, make=lambda: IsolatedFake(30.0))
    tensor, work = stuck(ring[0])
    waiting = ring.begin(work.wait)
    with pytest.raises(FutureTimeoutError):
        waiting.result(0.05)
    assert not work.is_completed()
    begun(ring[0]).let_pass()
    assert waiting.result(GUARD_S)
    wait_until(work.is_completed, "its end", GUARD_S)
    assert work.wait()
    assert tensor[0].item() == 1.0
    assert stream(ring[0]).waited == []


def test_a_future_completes_when_it_has_passed(rings: Rings) -> None:
    ring = rings(1, make=lambda: IsolatedFake(30.0))
    tensor, work = stuck(ring[0])
    future = work.get_future()
    time.sleep(0.05)
    assert not future.done()
    begun(ring[0]).let_pass()
    assert future.wait()[0] is tensor
    assert stream(ring[0]).waited == []


def test_a_barrier_blocks_until_it_has_passed(rings: Rings) -> None:
    ring = rings(1, make=lambda: IsolatedFake(30.0))
    ring[0].barrier().wait()
    hold_back_next(ring[0])
    waiting = ring.begin(lambda: ring[0].barrier().wait())
    wait_until(lambda: ring[0].num_active_work() == 1, "its begin", GUARD_S)
    with pytest.raises(FutureTimeoutError):
        waiting.result(0.05)
    begun(ring[0]).let_pass()
    assert waiting.result(GUARD_S)


# NCCL-3
def test_tensors_are_held_until_their_work_has_passed(rings: Rings) -> None:
    ring = rings(1, make=lambda: IsolatedFake(30.0))
    tensor, work = stuck(ring[0])
    weak = device_work.WeakStorage(tensor.untyped_storage())
    del tensor, work
    gc.collect()
    assert not weak.expired()
    begun(ring[0]).let_pass()
    wait_until(weak.expired, "its end", GUARD_S)


# -- ends


# NCCL-3, NCCL-4
def test_an_abort_fails_what_has_not_passed_once_the_process_is_gone(rings: Rings) -> None:
    ring = rings(1, make=lambda: IsolatedFake(30.0))
    pg = ring[0]
    tensor, work = stuck(pg)
    pid, released = int(pg.comm_process.pid), len(pg.cuda.released)
    weak = device_work.WeakStorage(tensor.untyped_storage())
    pg.abort()
    assert not is_alive(pid)
    with pytest.raises(GangError, match="aborted"):
        work.wait()
    assert len(pg.cuda.released) > released  # what the killed process had open
    assert work.is_completed()
    del tensor, work
    ring.configure()  # until then the error refers to the work
    wait_until(lambda: gc.collect() >= 0 and weak.expired(), "its end", GUARD_S)
    assert ring.sums() == [1.0]


# NCCL-5
def test_a_work_that_never_passes_is_an_error_at_the_timeout(rings: Rings) -> None:
    """Nobody waits for it."""
    ring = rings(1, make=lambda: IsolatedFake(30.0))
    ring[0].set_timeout(timedelta(seconds=3.0))  # more than what a machine may stand still before the wait
    _, work = stuck(ring[0])
    assert [str(each) for _, each in ring[0].comm_process.under_way()] == ["all_reduce of 1000 float32 by SUM"]
    wait_until(work.is_completed, "the error", GUARD_S)
    assert "timed out after 3 seconds" in str(ring[0].errored())
    with pytest.raises(GangError):
        work.wait()
    ring[0].set_timeout(timedelta(seconds=30.0))
    ring.configure()
    assert ring.sums() == [1.0]


def test_a_killed_process_releases_its_waiters_and_the_next_configure_works(pair: Ring) -> None:
    _, work = start(pair[0])
    future = work.get_future()
    os.kill(pair[0].comm_process.pid, signal.SIGKILL)
    with pytest.raises(GangError):
        work.wait()
    with pytest.raises(RuntimeError, match="PeerLostError"):
        future.wait()
    pair.configure()
    assert pair.sums() == [2.0, 2.0]


def test_a_configuration_after_a_clean_one_keeps_the_process(pair: Ring) -> None:
    before = [pg.comm_process.pid for pg in pair.groups]
    for _ in range(3):
        assert pair.sums() == [2.0, 2.0]
        pair.configure()
    assert [pg.comm_process.pid for pg in pair.groups] == before


def test_errors_are_swallowed_to_zeros(pair: Ring) -> None:
    pg: Any = SwallowingProcessGroup(pair[0])
    tensor, output = torch.ones(3), torch.full((6,), 5.0)
    work = pg.allreduce([tensor], SUM)
    pair[0].abort()
    assert work.wait()
    pg._allgather_base(output, torch.ones(3), AllgatherOptions()).wait()
    assert isinstance(pg.error(), GangError)
    assert (tensor.tolist(), output.tolist()) == ([0.0] * 3, [0.0] * 6)
