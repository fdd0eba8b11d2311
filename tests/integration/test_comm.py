"""Comm processes with real Gloo over a real store: what they compute, and that a kill ends what they were doing."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from elasticgang.comm.arena import Arena
from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.work import CommWork
from elasticgang.errors import CollectiveTimeoutError, ElasticGangError, GangError, PeerLostError, StaleGenerationError
from elasticgang.process.forkserver import ForkServer, ForkServerClient
from tests.integration.conftest import World, Worlds
from tests.support import wait_dead, wait_until

GUARD_S = 20.0
AT_ONCE_S = 1.0

REDUCED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64
)  # fmt: skip
OTHERS = (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)
SHAPES = ((), (1,), (0,), (3, 0), (5,), (2, 3, 4), (1025,), (300_001,))


def all_reduce(world: World, tensors: list[Tensor], op: str = "sum", group: str = "all") -> None:
    def reduce(rank: int) -> None:
        world.comms[rank].submit(group, "allreduce", [tensors[rank]], [tensors[rank]], op=op).wait(GUARD_S)

    world.each(reduce)


def broadcast(world: World, tensors: list[Tensor], root: int) -> None:
    def send(rank: int) -> None:
        world.comms[rank].submit("all", "broadcast", [tensors[rank]], [tensors[rank]], root=root).wait(GUARD_S)

    world.each(send)


def all_gather(world: World, tensors: list[Tensor]) -> list[list[Tensor]]:
    def gather(rank: int) -> list[Tensor]:
        outputs = [torch.empty_like(tensors[rank]) for _ in tensors]
        world.comms[rank].submit("all", "allgather", outputs, [tensors[rank]]).wait(GUARD_S)
        return outputs

    return world.each(gather)


def start_sum(comm: CommProcess, tensor: Tensor, group: str = "all") -> CommWork:
    return comm.submit(group, "allreduce", [tensor], [tensor], op="sum")


def kill(comm: CommProcess) -> None:
    os.kill(comm.pid, signal.SIGKILL)


# -- what is computed


@pytest.fixture(scope="module")
def trio(forkserver: ForkServer, store: str) -> Iterator[World]:
    """Three comm processes for the tests that break nothing."""
    world = World(forkserver, store, 3, 30.0)
    world.configure(["all", "other"])
    yield world
    world.close()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REDUCED)
def test_a_sum_of_any_shape_and_dtype(trio: World, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = [torch.full(shape, rank + 1).to(dtype) for rank in range(3)]
    all_reduce(trio, tensors)
    for tensor in tensors:
        assert tensor.dtype is dtype
        assert torch.equal(tensor, torch.full(shape, 6).to(dtype))


@pytest.mark.parametrize(("op", "expected"), [("sum", 9.0), ("product", 24.0), ("min", 2.0), ("max", 4.0)])
def test_each_reduction(trio: World, op: str, expected: float) -> None:
    tensors = [torch.tensor([rank + 2.0]) for rank in range(3)]
    all_reduce(trio, tensors, op)
    assert [tensor.item() for tensor in tensors] == [expected] * 3


@pytest.mark.parametrize("root", range(3))
@pytest.mark.parametrize("dtype", REDUCED + OTHERS)
def test_a_broadcast_of_any_dtype_from_any_rank(trio: World, dtype: torch.dtype, root: int) -> None:
    tensors = [torch.full((2, 3), rank).to(dtype) for rank in range(3)]
    expected = tensors[root].clone()
    broadcast(trio, tensors, root)
    assert all(torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)) for tensor in tensors)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_broadcast_of_any_shape(trio: World, shape: tuple[int, ...]) -> None:
    tensors = [torch.full(shape, rank) for rank in range(3)]
    broadcast(trio, tensors, 2)
    assert all(torch.equal(tensor, torch.full(shape, 2)) for tensor in tensors)


@pytest.mark.parametrize("dtype", REDUCED + OTHERS)
def test_a_gather_of_any_dtype_in_rank_order(trio: World, dtype: torch.dtype) -> None:
    tensors = [torch.full((2, 3), rank).to(dtype) for rank in range(3)]
    for outputs in all_gather(trio, tensors):
        for output, tensor in zip(outputs, tensors, strict=True):
            assert torch.equal(output.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gather_of_any_shape(trio: World, shape: tuple[int, ...]) -> None:
    for outputs in all_gather(trio, [torch.full(shape, rank) for rank in range(3)]):
        assert all(torch.equal(output, torch.full(shape, rank)) for rank, output in enumerate(outputs))


def test_a_gather_into_the_tensor_that_is_gathered(trio: World) -> None:
    """In place: the own place among the outputs is the input."""

    def gather(rank: int) -> list[float]:
        outputs = [torch.full((2,), float(rank)) for _ in range(3)]
        trio.comms[rank].submit("all", "allgather", outputs, [outputs[rank]]).wait(GUARD_S)
        return [output[0].item() for output in outputs]

    assert trio.each(gather) == [[0.0, 1.0, 2.0]] * 3


def test_parameters_and_views_are_written_in_place(trio: World) -> None:
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    all_reduce(trio, list(parameters))
    assert all(parameter.tolist() == [3.0] * 4 and parameter.requires_grad for parameter in parameters)
    bases = [torch.ones(10) for _ in range(3)]
    all_reduce(trio, [base[2:5] for base in bases])
    assert all(base.tolist() == [1.0] * 2 + [3.0] * 3 + [1.0] * 5 for base in bases)
    strided = [torch.ones(3, 2).t() for _ in range(3)]
    all_reduce(trio, strided)
    assert all(tensor.tolist() == [[3.0] * 3] * 2 for tensor in strided)


def test_a_comm_process_lets_ranks_compute(trio: World) -> None:
    for comm in trio.comms:
        policies = {os.sched_getscheduler(int(task)) for task in os.listdir(f"/proc/{comm.pid}/task")}
        assert policies == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_works_of_different_groups_overlap(trio: World) -> None:
    """WORKER-2: the order in which groups are used may differ from rank to rank."""

    def reduce(rank: int) -> list[float]:
        tensors = {"all": torch.ones(1000), "other": torch.full((1000,), 2.0)}
        order = ["all", "other"] if rank else ["other", "all"]
        works = [start_sum(trio.comms[rank], tensors[name], name) for name in order]
        for work in works:
            work.wait(GUARD_S)
        return [tensors["all"][-1].item(), tensors["other"][-1].item()]

    assert trio.each(reduce) == [[3.0, 6.0]] * 3


def test_many_works_are_under_way_at_once(trio: World) -> None:
    def reduce(rank: int) -> list[float]:
        tensors = [torch.full((100,), float(number)) for number in range(200)]
        works = [start_sum(trio.comms[rank], tensor) for tensor in tensors]
        for work in works:
            work.wait(GUARD_S)
        return [tensor[99].item() for tensor in tensors]

    assert trio.each(reduce) == [[3.0 * number for number in range(200)]] * 3


def test_the_future_has_the_outputs_and_the_waiter_comes_after_them(trio: World) -> None:
    tensors = [torch.ones(3) for _ in range(3)]
    works = [start_sum(comm, tensor) for comm, tensor in zip(trio.comms, tensors, strict=True)]
    for work, tensor in zip(works, tensors, strict=True):
        (output,) = work.future.wait()
        assert output is tensor
        assert tensor.tolist() == [3.0] * 3
        assert work.done()
        assert work.error is None


def test_the_memory_between_the_processes_is_used_again(trio: World) -> None:
    all_reduce(trio, [torch.ones(5000) for _ in range(3)])
    taken = trio.arena._next_id
    for number in range(20):
        all_reduce(trio, [torch.full((5000,), float(number)) for _ in range(3)])
    assert trio.arena._next_id <= taken + 2


def test_a_call_with_more_tensors_than_one_message_of_descriptors_could_carry(worlds: Worlds) -> None:
    """A gather over so many ranks has as many outputs, each in memory that the comm process has not seen yet."""
    world = worlds(2)
    many = [[torch.ones(2000) for _ in range(200)] for _ in range(2)]
    works = [
        comm.submit("all", "allreduce", mine, mine, op="sum") for comm, mine in zip(world.comms, many, strict=True)
    ]
    for work in works:
        work.wait(GUARD_S)
    assert {tensor[-1].item() for tensor in many[0]} == {2.0}


# -- from generation to generation


def test_processes_are_configured_again_in_place(worlds: Worlds) -> None:
    world = worlds(3)
    pids = [comm.pid for comm in world.comms]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        for comm in world.comms:
            comm.close_groups(5.0)
        world.configure(["all", "more"], order)
        gathered = [torch.zeros(1) for _ in range(3)]
        tensors = [torch.tensor([float(index)]) for index in range(3)]
        all_reduce(world, [tensor.clone() for tensor in tensors], group="more")

        def gather(index: int, tensors: list[Tensor] = tensors) -> list[float]:
            outputs = [torch.zeros(1) for _ in range(3)]
            world.comms[index].submit("all", "allgather", outputs, [tensors[index]]).wait(GUARD_S)
            return [output.item() for output in outputs]

        assert world.each(gather) == [[float(order.index(rank)) for rank in range(3)]] * 3
        assert not any(map(torch.any, gathered))
    assert [comm.pid for comm in world.comms] == pids


def test_a_smaller_and_then_a_larger_group(worlds: Worlds) -> None:
    world = worlds(2)
    first, second = world.comms
    for comm in world.comms:
        comm.close_groups(5.0)
    world.comms = [second]
    world.configure()
    tensor = torch.ones(2)
    start_sum(second, tensor).wait(GUARD_S)
    assert tensor.tolist() == [1.0, 1.0]
    second.close_groups(5.0)
    world.comms = [second, first, world.start()]
    world.configure()
    tensors = [torch.ones(2) for _ in range(3)]
    all_reduce(world, tensors)
    assert all(tensor.tolist() == [3.0, 3.0] for tensor in tensors)


def test_nothing_is_left_behind_by_fifty_generations(worlds: Worlds) -> None:
    world = worlds(2)

    def live_through(number: int) -> None:
        world.configure([f"a{number}", "b"])
        tensors = [torch.ones(10) for _ in range(2)]
        all_reduce(world, tensors, group="b")
        for comm in world.comms:
            comm.close_groups(5.0)

    def counts() -> list[tuple[int, int]]:
        return [(process.num_fds(), process.num_threads()) for process in processes]

    processes = [psutil.Process(pid) for pid in (world.comms[0].pid, os.getpid())]
    for number in range(5):
        live_through(number)
    before = counts()
    for number in range(50):
        live_through(number)
    # Groups are torn down beside the path: a few may be on their way.
    wait_until(
        lambda: all(
            now <= then + 3 for a, b in zip(counts(), before, strict=True) for now, then in zip(a, b, strict=True)
        ),
        f"descriptors and threads are back at {before}",
        GUARD_S,
    )


def reader_threads() -> int:
    return sum(thread.name.startswith("comm-") for thread in threading.enumerate())


def test_nothing_is_left_behind_by_twenty_processes(forkserver: ForkServer, store: str) -> None:
    here = psutil.Process()

    def live() -> None:
        comm = CommProcess(forkserver, arena, store=store, host="127.0.0.1", timeout=5.0, group=0)
        comm.wait_ready()
        comm.close()

    arena = Arena()
    live()
    gc.collect()  # of what tests before have left
    before = here.num_fds(), reader_threads()
    for _ in range(20):
        live()
    gc.collect()
    assert (here.num_fds(), reader_threads()) == before


# -- aborts, deaths and errors


def test_an_abort_releases_all_waiters_with_its_error(worlds: Worlds) -> None:
    world = worlds(2, timeout=60.0)
    comm = world.comms[0]
    tensors = [torch.full((5,), 7.0) for _ in range(3)]
    works = [start_sum(comm, tensor) for tensor in tensors]
    waiting = [world.begin(lambda work=work: work.wait(GUARD_S)) for work in works]  # type: ignore[misc]
    why = PeerLostError("rank 1 was killed")
    comm.abort(why)
    for work, waiter in zip(works, waiting, strict=True):
        assert waiter.exception(GUARD_S) is why
        with pytest.raises(PeerLostError, match="rank 1 was killed"):
            work.future.wait()
        assert work.done()
        assert work.error is why
    pidfd = os.pidfd_open(comm.pid)
    assert wait_dead([pidfd], 0.0) == []  # dead, although nobody may have reaped it
    os.close(pidfd)
    assert all(tensor.tolist() == [7.0] * 5 for tensor in tensors)


def test_no_tensor_is_touched_after_an_abort(worlds: Worlds) -> None:
    """COMM-2: even when the peer comes at that very moment."""
    for _ in range(3):
        world = worlds(2)
        tensor = torch.zeros(100_000)
        work = start_sum(world.comms[0], tensor)
        peer = start_sum(world.comms[1], torch.ones(100_000))
        world.comms[0].abort(StaleGenerationError("over"))
        after = tensor.clone()
        assert work.done()
        tensor += 1
        with pytest.raises(GangError) if world.errors[1] else _nothing():
            peer.wait(GUARD_S)
        assert torch.equal(tensor, after + 1)
        assert (after == after[0]).all()


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> bool:
        return isinstance(error[1], GangError)


def test_what_comes_after_an_abort_fails_at_once_and_nothing_is_sent(worlds: Worlds) -> None:
    world = worlds(2)
    comm = world.comms[0]
    comm.abort(PeerLostError("over"))
    tensor = torch.full((5,), 7.0)
    work = start_sum(comm, tensor)
    assert work.done()
    with pytest.raises(StaleGenerationError):
        work.wait(0.0)
    with pytest.raises(StaleGenerationError):
        work.future.wait()
    assert tensor.tolist() == [7.0] * 5
    with pytest.raises(GangError):
        comm.configure("late", [GroupSpec("all", 0, 1)], lambda error: None)
    with pytest.raises(GangError):
        comm.close_groups(1.0)


def test_a_shared_tensor_of_a_call_that_was_never_sent_is_as_it_was(worlds: Worlds) -> None:
    world = worlds(1)
    comm = world.comms[0]
    shared, later = torch.ones(9 << 20), torch.full((9 << 20,), 7.0)
    start_sum(comm, shared).wait(GUARD_S)
    comm.abort(PeerLostError("over"))
    for tensor in (shared.fill_(7.0), later):
        assert start_sum(comm, tensor).done()
        assert bool((tensor == 7.0).all())


def test_all_that_wait_for_one_work_are_released_with_it(worlds: Worlds) -> None:
    """Whoever of them comes or goes meanwhile; one reads, the others wait beside it."""
    world = worlds(2)
    slowest = 0.0
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(300):
            tensors = [torch.ones(10) for _ in range(2)]
            work = start_sum(world.comms[0], tensors[0])
            waiting = [world.begin(lambda work=work: work.wait(GUARD_S)) for _ in range(6)]  # type: ignore[misc]
            if number % 2:
                with contextlib.suppress(CollectiveTimeoutError):
                    work.wait(1e-4)  # comes, and leaves
            start_sum(world.comms[1], tensors[1]).wait(GUARD_S)
            ended = time.monotonic()
            for waiter in waiting:
                waiter.result(GUARD_S)
            slowest = max(slowest, time.monotonic() - ended)
    finally:
        sys.setswitchinterval(switch)
    assert slowest < AT_ONCE_S


def test_an_abort_is_repeatable_from_any_thread_and_after_close(worlds: Worlds) -> None:
    world = worlds(2)
    comm = world.comms[0]
    first, second = PeerLostError("first"), PeerLostError("second")
    work = start_sum(comm, torch.ones(1))
    comm.abort(first)
    world.each(lambda _: comm.abort(second))
    assert work.error is first
    comm.close()
    comm.abort(second)
    comm.close()
    assert comm.ended


def test_aborts_race_with_a_close(worlds: Worlds) -> None:
    """A notice comes while the training thread leaves the generation by itself."""
    world = worlds(0, names=None)
    for _ in range(20):
        comm = world.start()
        aborts = [world.begin(lambda comm=comm: comm.abort(PeerLostError("noticed"))) for _ in range(4)]  # type: ignore[misc]
        comm.close()
        for abort in aborts:
            abort.result(GUARD_S)


def test_the_death_of_a_peer_is_seen_at_once(worlds: Worlds) -> None:
    world = worlds(3, timeout=60.0)
    works = [start_sum(world.comms[rank], torch.ones(100)) for rank in (0, 2)]
    kill(world.comms[1])
    for work in works:
        with pytest.raises(PeerLostError):
            work.wait(AT_ONCE_S)
    assert len(world.errors[1]) == 1
    with pytest.raises(GangError):
        start_sum(world.comms[0], torch.ones(100)).wait(AT_ONCE_S)


def test_the_death_of_the_own_process_fails_its_works_and_is_told_once(worlds: Worlds) -> None:
    world = worlds(2, timeout=60.0)
    works = [start_sum(world.comms[0], torch.ones(100)) for _ in range(5)]
    kill(world.comms[0])
    for work in works:
        with pytest.raises(PeerLostError, match="died"):
            work.wait(AT_ONCE_S)
    assert [str(error) for error in world.errors[0]] == [f"comm process {world.comms[0].pid} died"]
    assert world.comms[0].ended


def test_a_death_without_any_work_is_told_too(worlds: Worlds) -> None:
    world = worlds(2)
    kill(world.comms[0])
    wait_until(lambda: world.errors[0], "the error", AT_ONCE_S)
    with pytest.raises(StaleGenerationError):
        start_sum(world.comms[0], torch.ones(1)).wait(0.0)


def test_a_work_that_is_never_matched_ends_by_the_callers_deadline_and_goes_on(worlds: Worlds) -> None:
    world = worlds(2, timeout=60.0)
    tensors = [torch.ones(3), torch.ones(3)]
    work = start_sum(world.comms[0], tensors[0])
    with pytest.raises(CollectiveTimeoutError, match=r"allreduce timed out after 0.05 seconds"):
        work.wait(0.05)
    assert not work.done()
    start_sum(world.comms[1], tensors[1]).wait(GUARD_S)
    work.wait(GUARD_S)
    assert tensors[0].tolist() == [2.0] * 3


def test_the_groups_own_timeout_fails_the_work(worlds: Worlds) -> None:
    world = worlds(2, timeout=0.3)
    work = start_sum(world.comms[0], torch.ones(3))
    with pytest.raises(GangError):
        work.wait(GUARD_S)
    assert world.errors[0]


@pytest.mark.parametrize("call", ["no_such", "allreduce"])
def test_a_call_that_cannot_be_made_fails_as_a_work_does(worlds: Worlds, call: str) -> None:
    world = worlds(1)
    tensor = torch.ones(3)
    work = world.comms[0].submit("no_such_group", call, [tensor], [tensor], op="sum")
    with pytest.raises(GangError):
        work.wait(GUARD_S)
    assert len(world.errors[0]) == 1


def test_a_peer_that_does_not_come_ends_configure_by_the_timeout(worlds: Worlds) -> None:
    world = worlds(1, timeout=0.3, names=None)
    with pytest.raises(GangError, match="configure"):
        world.comms[0].configure("alone", [GroupSpec("all", 0, 2)], lambda error: None)


def test_an_abort_releases_configure(worlds: Worlds) -> None:
    world = worlds(1, timeout=60.0, names=None)
    comm = world.comms[0]
    configuring: Future[Any] = world.begin(
        lambda: comm.configure("waits", [GroupSpec("all", 0, 2)], lambda error: None)
    )
    wait_until(lambda: psutil.Process(comm.pid).num_threads() > 2, "the process is at it")
    comm.abort(PeerLostError("rank 1 died before the generation began"))
    assert isinstance(configuring.exception(AT_ONCE_S), PeerLostError)


def test_the_death_of_a_peer_during_configure_is_survived(worlds: Worlds) -> None:
    world = worlds(2, timeout=60.0, names=None)
    kill(world.comms[1])
    one = world.begin(lambda: world.comms[0].configure("half", [GroupSpec("all", 0, 2)], lambda error: None))
    with pytest.raises(GangError):
        world.comms[1].configure("half", [GroupSpec("all", 1, 2)], lambda error: None)
    world.comms[0].abort(PeerLostError("noticed"))
    assert isinstance(one.exception(AT_ONCE_S), GangError)


def test_generations_do_not_meet(worlds: Worlds) -> None:
    """RULE-1: members that do not agree on the prefix cannot connect."""
    world = worlds(2, timeout=0.5, names=None)

    def configure(rank: int) -> None:
        world.comms[rank].configure(f"generation/{rank}", [GroupSpec("all", rank, 2)], lambda error: None)

    for future in world.begin_each(configure):
        assert isinstance(future.exception(GUARD_S), GangError)


def test_groups_are_not_closed_in_order_while_a_work_is_under_way(worlds: Worlds) -> None:
    world = worlds(2)
    start_sum(world.comms[0], torch.ones(3))
    with pytest.raises(GangError, match="1 works are under way"):
        world.comms[0].close_groups(1.0)


def test_a_process_that_dies_while_it_starts_is_noticed(forkserver: ForkServer, store: str) -> None:
    comm = CommProcess(forkserver, Arena(), store=store, host="127.0.0.1", timeout=5.0, group=0)
    kill(comm)
    wait_until(lambda: comm.ended, "its death to be noticed")
    with pytest.raises(PeerLostError):  # also when it had been ready before
        comm.wait_ready(GUARD_S)
    comm.close()


def test_a_store_that_is_away_is_noticed(forkserver: ForkServer) -> None:
    comm = CommProcess(forkserver, Arena(), store="127.0.0.1:1", host="127.0.0.1", timeout=0.5, group=0)
    comm.wait_ready(GUARD_S)  # the store may come back before it is needed
    with pytest.raises(GangError):
        comm.configure("p", [GroupSpec("g", 0, 2)], lambda error: None)
    comm.close()


def test_a_stopped_process_is_aborted_all_the_same(worlds: Worlds) -> None:
    world = worlds(2)
    os.kill(world.comms[0].pid, signal.SIGSTOP)
    work = start_sum(world.comms[0], torch.ones(3))
    world.comms[0].abort(PeerLostError("it does not answer"))
    with pytest.raises(PeerLostError, match="it does not answer"):
        work.wait(0.0)


def test_a_sender_that_is_blocked_is_released_by_an_abort(worlds: Worlds) -> None:
    """The process reads nothing any more, and its socket is full."""
    world = worlds(1)
    comm = world.comms[0]
    os.kill(comm.pid, signal.SIGSTOP)
    stopped = threading.Event()

    def flood() -> ElasticGangError | None:
        while True:
            work = start_sum(comm, torch.ones(1))
            stopped.set()
            if work.done():
                return work.error

    flooding = world.begin(flood)
    assert stopped.wait(GUARD_S)
    sent = 0
    while sent != (sent := comm._next_id):  # until the sender stands
        time.sleep(0.05)
    comm.abort(PeerLostError("over"))
    assert isinstance(flooding.result(GUARD_S), GangError)


def test_works_that_block_hold_up_no_other(worlds: Worlds) -> None:
    """Gloo's reduce-scatters occupy a thread each of the process while they wait for the peer."""
    world = worlds(2, timeout=20.0)
    outputs, inputs = torch.ones(1), torch.ones(2)
    for _ in range(40):
        world.comms[0].submit("all", "reduce_scatter_single", [outputs], [inputs], op="sum")
    groups = world.begin_each(
        lambda rank: world.comms[rank].add_group(world.prefix, GroupSpec("more", rank, 2), timeout=5.0)
    )
    for each in groups:
        each.result(GUARD_S)
    tensors = [torch.ones(3), torch.ones(3)]
    all_reduce(world, tensors, group="more")
    assert tensors[0].tolist() == [2.0] * 3


# -- with its rank


def test_it_dies_with_its_rank_whoever_holds_the_descriptors(forkserver: ForkServer, store: str) -> None:
    """WORKER-1: a child of the rank is busy and holds the other end of every socket."""
    reader, writer = os.pipe()
    forks = forkserver.connect()
    spawned = forkserver.spawn("tests.integration.ranks:rank", {"store": store}, fds=[writer, forks.fileno()])
    forks.close()
    os.close(writer)
    with os.fdopen(reader) as told:
        comm, busy = json.loads(told.readline())
    pidfd = os.pidfd_open(comm)
    assert os.getpgid(comm) == spawned.pid
    signal.pidfd_send_signal(spawned.pidfd, signal.SIGKILL)
    assert wait_dead([pidfd], AT_ONCE_S) == []
    os.kill(busy, signal.SIGKILL)
    for descriptor in (pidfd, spawned.pidfd):
        os.close(descriptor)


def test_its_death_is_seen_although_a_child_of_the_rank_holds_its_socket(
    forkserver: ForkServer, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DataLoader worker that is forked while a comm process is started inherits both ends of the new socket."""
    inherited: list[int] = []
    spawn = ForkServerClient.spawn

    def spawn_while_forking(self: ForkServerClient, *args: Any, fds: Any, **options: Any) -> Any:
        inherited.extend(os.dup(fd) for fd in fds)  # what a fork at this moment would do
        return spawn(self, *args, fds=fds, **options)

    monkeypatch.setattr(ForkServerClient, "spawn", spawn_while_forking)
    comm = CommProcess(forkserver, Arena(), store=store, host="127.0.0.1", timeout=60.0, group=0)
    comm.wait_ready()
    told: list[GangError] = []
    comm.configure("held", [GroupSpec("all", 0, 1)], told.append)
    kill(comm)
    wait_until(lambda: told, "the error", AT_ONCE_S)
    comm.close()
    for fd in inherited:
        os.close(fd)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_for_the_whole_group_do_not_end_it(worlds: Worlds, number: signal.Signals) -> None:
    world = worlds(2)
    for comm in world.comms:
        os.kill(comm.pid, number)
    tensors = [torch.ones(2), torch.ones(2)]
    all_reduce(world, tensors)
    assert tensors[0].tolist() == [2.0, 2.0]


# -- a kill that nobody waits for


def test_a_kill_that_nobody_waits_for_ends_the_works_while_a_callback_runs(worlds: Worlds) -> None:
    world = worlds()
    comm, error = world.comms[0], PeerLostError("told by the agent")
    is_held, let_go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        is_held.set()
        assert let_go.wait(GUARD_S)

    future = start_sum(comm, torch.ones(3)).future.then(hold)
    start_sum(world.comms[1], torch.ones(3)).wait(GUARD_S)
    assert is_held.wait(GUARD_S)
    waits = start_sum(comm, torch.ones(3))  # the other rank does not come
    comm.kill(error)
    assert start_sum(comm, torch.ones(3)).error is not None
    wait_until(waits.done, "its end", GUARD_S)
    assert waits.error is error
    let_go.set()
    comm.abort(StaleGenerationError("the fence"))  # as before the rank asks: the process is dead when it returns
    future.wait()


class _Interrupt(Exception):
    pass


def test_a_wait_that_a_signal_interrupts_leaves_nobody_waiting_for_it(worlds: Worlds) -> None:
    """Its place would be kept for a thread that has gone, and a callback that waits would find nobody who reads."""
    world = worlds(2, names=("never", "all"))
    comm = world.comms[0]

    def submit(rank: int, group: str) -> CommWork:
        tensor = torch.ones(1)
        return world.comms[rank].submit(group, "allreduce", [tensor], [tensor], op="sum")

    def interrupt(number: int, frame: object) -> None:
        raise _Interrupt

    never = submit(0, "never")  # rank 1 does not come
    begun = threading.Event()

    def read() -> None:
        begun.set()
        with contextlib.suppress(CollectiveTimeoutError):
            never.wait(2.0)

    reader = threading.Thread(target=read)
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        reader.start()
        begun.wait(GUARD_S)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(_Interrupt):
            never.wait(GUARD_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
    reader.join(GUARD_S)
    first, second = submit(0, "all").future, submit(0, "all").future
    returned = threading.Event()

    def wait_inside(_: object) -> None:
        second.wait()
        returned.set()

    first.add_done_callback(wait_inside)
    for _ in range(2):
        submit(1, "all").wait(GUARD_S)
    assert returned.wait(GUARD_S)
    assert not comm.ended
