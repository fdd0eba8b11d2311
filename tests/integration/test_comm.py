"""Comm processes with real Gloo over a real store: what they compute, from generation to generation."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from elasticgang.collectives.collective import Collective
from elasticgang.comm.arena import Arena
from elasticgang.comm.comm_process import CommProcess
from elasticgang.process.forkserver import ForkServer
from tests.integration.comm_calls import GUARD_S, all_gather, all_reduce, broadcast, start_gather, start_sum
from tests.integration.conftest import World, Worlds
from tests.support import wait_until

REDUCED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64
)  # fmt: skip
OTHERS = (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)
SHAPES = ((), (1,), (0,), (3, 0), (5,), (2, 3, 4), (1025,), (300_001,))


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


@pytest.mark.parametrize(("op", "expected"), [("SUM", 9.0), ("PRODUCT", 24.0), ("MIN", 2.0), ("MAX", 4.0)])
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


# STAGING-5
def test_fake_tensors_are_left_alone_and_real_ones_are_reduced_beside_them(trio: World) -> None:
    real = [torch.ones(3, dtype=torch.int16) for _ in range(3)]
    with FakeTensorMode():
        fakes = [torch.ones(5, dtype=torch.int16) for _ in range(3)]
        for fake in fakes:
            assert start_sum(trio.comms[0], fake).wait(GUARD_S)
        for work in [start_sum(comm, tensor) for comm, tensor in zip(trio.comms, real, strict=True)]:
            work.wait(GUARD_S)
    assert [tensor.tolist() for tensor in real] == [[3] * 3] * 3
    tensors = [torch.ones(5, dtype=torch.int16) for _ in range(3)]
    for work in [start_sum(comm, tensor) for comm, tensor in zip(trio.comms, tensors, strict=True)]:
        work.wait(GUARD_S)
    assert [tensor.tolist() for tensor in tensors] == [[3] * 5] * 3


# STAGING-4
def test_the_backward_of_a_broadcasts_root_finds_its_parameter_as_it_was(trio: World) -> None:
    for num in (4, 9 << 20):
        tensors = [torch.full((num,), float(rank), requires_grad=True) for rank in range(3)]
        for _ in range(2):  # the second time, large ones are in shared memory
            loss = (tensors[1] * tensors[1]).sum()
            broadcast(trio, tensors, 1)
            torch.autograd.backward(loss)
        assert all(bool((tensor == 1).all()) for tensor in tensors)


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
        start_gather(trio.comms[rank], outputs, outputs[rank]).wait(GUARD_S)
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
        policies = set()
        for task in os.listdir(f"/proc/{comm.pid}/task"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                policies.add(os.sched_getscheduler(int(task)))
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


# COMM-4
def test_the_future_has_the_outputs_and_the_waiter_comes_after_them(trio: World) -> None:
    tensors = [torch.ones(3) for _ in range(3)]
    works = [start_sum(comm, tensor) for comm, tensor in zip(trio.comms, tensors, strict=True)]
    for work, tensor in zip(works, tensors, strict=True):
        (output,) = work.future.wait()
        assert output is tensor
        assert tensor.tolist() == [3.0] * 3
        assert work.done()
        assert work.error is None


def slabs() -> set[str]:
    """Of all arenas that this process maps."""
    return set(re.findall(r"/memfd:elasticgang-\d+-\d+-\d+", Path("/proc/self/maps").read_text()))


# ARENA-1
def test_the_memory_between_the_processes_is_used_again(worlds: Worlds) -> None:
    of_others = slabs()  # of which those that tests before have left may go meanwhile
    world = worlds(2)
    all_reduce(world, [torch.ones(5000) for _ in range(2)])
    taken = slabs() - of_others
    for number in range(20):
        all_reduce(world, [torch.full((5000,), float(number)) for _ in range(2)])
    assert taken
    assert taken <= slabs() - of_others
    assert len(slabs() - of_others) <= len(taken) + 2


def test_a_call_with_more_tensors_than_one_message_of_descriptors_could_carry(worlds: Worlds) -> None:
    """A gather over so many ranks has as many outputs, each in memory that the comm process has not seen yet."""
    world = worlds(2)
    many = [tuple(torch.ones(2000) for _ in range(200)) for _ in range(2)]
    works = [
        comm.submit("all", Collective("all_reduce", mine, mine)) for comm, mine in zip(world.comms, many, strict=True)
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
            comm.close_groups(GUARD_S)
        world.configure(["all", "more"], order)
        gathered = [torch.zeros(1) for _ in range(3)]
        tensors = [torch.tensor([float(index)]) for index in range(3)]
        all_reduce(world, [tensor.clone() for tensor in tensors], group="more")

        def gather(index: int, tensors: list[Tensor] = tensors) -> list[float]:
            outputs = [torch.zeros(1) for _ in range(3)]
            start_gather(world.comms[index], outputs, tensors[index]).wait(GUARD_S)
            return [output.item() for output in outputs]

        assert world.each(gather) == [[float(order.index(rank)) for rank in range(3)]] * 3
        assert not any(map(torch.any, gathered))
    assert [comm.pid for comm in world.comms] == pids


def test_a_smaller_and_then_a_larger_group(worlds: Worlds) -> None:
    world = worlds(2)
    first, second = world.comms
    for comm in world.comms:
        comm.close_groups(GUARD_S)
    world.comms = [second]
    world.configure()
    tensor = torch.ones(2)
    start_sum(second, tensor).wait(GUARD_S)
    assert tensor.tolist() == [1.0, 1.0]
    second.close_groups(GUARD_S)
    world.comms = [second, first, world.start()]
    world.configure()
    tensors = [torch.ones(2) for _ in range(3)]
    all_reduce(world, tensors)
    assert all(tensor.tolist() == [3.0, 3.0] for tensor in tensors)


def test_nothing_is_left_behind_by_fifty_generations(worlds: Worlds) -> None:
    world = worlds(2, num_threads=2)

    def live_through(number: int) -> None:
        world.configure([f"a{number}", "b"])
        tensors = [torch.ones(10) for _ in range(2)]
        all_reduce(world, tensors, group="b")
        for comm in world.comms:
            comm.close_groups(GUARD_S)

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


def reader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("comm-")}


def descriptors() -> Counter[str]:
    """What is open, by kind."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of the listing
            found.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{number}")))
    return Counter(found)


def test_nothing_is_left_behind_by_twenty_processes(forkserver: ForkServer, store: str) -> None:
    def live() -> None:
        comm = CommProcess(forkserver, arena, store=store, host="127.0.0.1", timeout=5.0, group=0)
        comm.wait_ready()
        comm.close()

    arena = Arena()
    live()
    gc.collect()  # of what tests before have left, of which more may end meanwhile
    before = descriptors(), reader_threads()
    for _ in range(20):
        live()
    gc.collect()
    assert reader_threads() <= before[1]
    # The store, in this process, closes its connections once it notices that the processes are dead.
    wait_until(lambda: descriptors() <= before[0], f"the descriptors are back at {before[0]}", GUARD_S)


class OnCuda(torch.Tensor):
    """A tensor that says that it is on CUDA; its memory is the CPU's."""

    is_cuda = True


# STAGING-3
def test_a_tensor_on_a_device_is_copied_behind_its_stream_and_there_when_the_work_ends(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(2)
    world.configure()
    tensors = [torch.full((3,), float(rank + 1)).as_subclass(OnCuda) for rank in range(2)]
    drained: list[list[float]] = []

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: drained.append([float(tensor[0]) for tensor in tensors]))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    sum_of = [Collective("all_reduce", (tensor,), (tensor,)) for tensor in tensors]
    works = [world.comms[rank].submit("all", sum_of[rank]) for rank in range(2)]
    assert drained == [[1.0, 2.0]] * 2, "before anything is sent"
    assert all(work.wait() for work in works)
    assert len(drained) == 4
    assert drained[-1] == [3.0, 3.0], "after the result was copied"
