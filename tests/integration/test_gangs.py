"""Elastic gangs over real comm processes. What all kinds of gang have in common is in `contract.py`."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.work import Work
from elasticgang.errors import InvalidOperationError, NotSupportedError, StepAborted
from elasticgang.gang import ElasticGang, Gang, GangGrid, ProcessGroupGang, ReduceOperation
from elasticgang.gang.elastic import Binding
from elasticgang.process.forkserver import ForkServer
from tests.integration import contract
from tests.integration.bound_gangs import CPU, binding, bound, group_of
from tests.integration.conftest import World

SUM = ReduceOperation.SUM
GUARD_S = 20.0


@pytest.fixture(scope="module")
def trio(forkserver: ForkServer, store: str) -> Iterator[World]:
    world = World(forkserver, store, 3, GUARD_S)
    world.configure()
    yield world
    world.close()


@pytest.mark.parametrize(
    "check",
    [
        contract.same_on_every_rank,
        contract.one_to_another,
        contract.refusals,
        contract.sub_gangs,
        contract.callbacks_that_wait,
    ],
)
def test_elastic_gangs_of_real_processes_keep_the_contract(trio: World, check: Callable[[Gang], None]) -> None:
    gangs = bound(trio)
    trio.each(lambda rank: check(gangs[rank]))
    trio.each(lambda rank: gangs[rank].barrier())


def test_a_gang_over_an_elastic_gangs_group_makes_gangs_as_that_gang_does(trio: World) -> None:
    """As from a mesh of elastic gangs: torch has no backend of that name to make a group with."""
    gangs = bound(trio)

    def split(rank: int) -> None:
        over = ProcessGroupGang(gangs[rank].as_process_group(), CPU)
        pair = over.create_gang([2, 0])
        assert (pair is None) == (rank == 1)
        if pair is not None:
            assert isinstance(pair, ElasticGang)
            contract.one_to_another(pair)
        cp = GangGrid([3], ["cp"], root=over).create_gang("cp")
        assert cp is not None
        contract.same_on_every_rank(cp)

    trio.each(split)
    for gang in gangs:
        gang.close()


def test_a_gang_of_one_keeps_the_contract_without_any_process() -> None:
    gang = ElasticGang("tp", CPU)
    gang.bind(Binding(0, (0,), None))
    contract.same_on_every_rank(gang)
    contract.refusals(gang)


# STAGING-2
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint64, torch.complex64], ids=lambda dtype: str(dtype))
def test_a_dtype_that_cannot_be_reduced_is_refused_before_anything_is_sent(trio: World, dtype: torch.dtype) -> None:
    """Sent, it would fail in the comm process, and with it the generation of all ranks."""
    gangs = bound(trio)
    calls: list[Callable[[], object]] = [
        lambda: gangs[0].all_reduce(torch.zeros(2).to(dtype), ReduceOperation.MAX),
        lambda: gangs[0].reduce(torch.zeros(2).to(dtype), ReduceOperation.MAX),
        lambda: gangs[0].reduce_scatter(torch.zeros(2).to(dtype), torch.zeros(3, 2).to(dtype), ReduceOperation.MAX),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"float32.* but the tensor's is {dtype} instead"):
            call()
    trio.each(lambda rank: gangs[rank].barrier())


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.bool, True),
        (torch.uint8, 200),  # wraps, as everywhere in torch
        (torch.int8, -100),
        (torch.int16, 30000),
        (torch.uint16, 60000),
        (torch.uint32, 7),
        (torch.int32, -7),
        (torch.int64, 2**60),
        (torch.float16, 1.5),
        (torch.bfloat16, 1.5),
        (torch.float64, 0.1),
        (torch.complex64, 1 + 2j),
        (torch.complex128, 1 - 2j),
    ],
)
def test_sums_are_torchs_own(trio: World, dtype: torch.dtype, value: complex) -> None:
    gangs = bound(trio)
    tensors = [torch.full((2, 2), value, dtype=dtype) for _ in gangs]
    trio.each(lambda rank: gangs[rank].all_reduce(tensors[rank], SUM))
    one = torch.full((2, 2), value, dtype=dtype)
    wide = torch.int64 if not (dtype.is_floating_point or dtype.is_complex) else dtype
    expected = (one.to(wide) * 3).to(dtype)
    for tensor in tensors:
        assert torch.equal(tensor, expected)


def test_a_dtype_that_cannot_be_reduced_can_be_moved(trio: World) -> None:
    gangs = bound(trio)

    def move(rank: int) -> None:
        mine = torch.full((2,), rank, dtype=torch.uint64)
        outputs = [torch.zeros(2, dtype=torch.uint64) for _ in range(3)]
        gangs[rank].all_gather_to_list(outputs, mine)
        assert [int(output[0]) for output in outputs] == [0, 1, 2]
        gangs[rank].all_to_all(outputs, [torch.full_like(mine, rank * 10 + other) for other in range(3)])
        assert [int(output[0]) for output in outputs] == [other * 10 + rank for other in range(3)]
        gangs[rank].scatter(mine, outputs if rank == 0 else None)
        assert int(mine[0]) == rank * 10
        gangs[rank].broadcast(mine, 2)
        assert int(mine[0]) == 20

    trio.each(move)


def test_objects_of_any_size_are_broadcast(trio: World) -> None:
    gangs = bound(trio)

    def broadcast(rank: int) -> None:
        objects: list[Any] = [{"text": "x" * 300_000, "n": rank}, None] if rank == 1 else ["mine", "too"]
        gangs[rank].broadcast_objects(objects, 1)
        assert objects == [{"text": "x" * 300_000, "n": 1}, None]

    trio.each(broadcast)


# GANGOBJECTS-1
def test_lists_of_objects_of_another_length_are_refused_and_unchanged(trio: World) -> None:
    gangs = bound(trio)

    def broadcast(rank: int) -> None:
        objects: list[object] = [1, 2] if rank == 0 else ["mine"]
        before = list(objects)
        with pytest.raises(ValueError, match=rf"has 1 to 2, and {len(objects)} on rank {rank}"):
            gangs[rank].broadcast_objects(objects, 0)
        assert objects == before

    trio.each(broadcast)


# ELASTIC-1
def test_a_gang_in_no_generation_and_a_closed_one_refuse(trio: World) -> None:
    gang = ElasticGang("dp", CPU)
    places: list[Callable[[], object]] = [lambda: gang.rank, lambda: gang.size, lambda: gang.ranks]
    places.append(gang.as_process_group)
    calls: list[Callable[[], object]] = [
        lambda: gang.all_reduce(torch.zeros(1), SUM),
        lambda: gang.broadcast_objects([1]),
        lambda: gang.create_gang([0]),
        lambda: gang.as_process_group().barrier(),
        gang.barrier,
    ]
    for call in [*places, *calls]:
        with pytest.raises(InvalidOperationError, match=r"is in no generation.*; use it inside `with step:`"):
            call()
    gang.bind(binding(trio, 1))
    ends: list[tuple[Callable[[], None], str]] = [
        (lambda: gang.bind(None), "is in no generation"),
        (gang.close, "is closed"),
    ]
    for end, message in ends:
        end()
        pg = gang.as_process_group()
        assert (gang.rank, gang.size, gang.ranks, pg.rank(), pg.size()) == (1, 3, (0, 1, 2), 1, 3)
        for call in calls:
            with pytest.raises(InvalidOperationError, match=message):
                call()
    assert gang.device == CPU


def test_a_gang_between_generations_keeps_nothing_of_the_last_one(trio: World) -> None:
    gang = ElasticGang("dp", CPU)
    group = group_of(trio, 0)
    alive = weakref.ref(group)
    gang.bind(Binding(0, (0, 1, 2), group))
    gang.bind(None)
    del group
    gc.collect()
    assert alive() is None
    assert not gang.is_poisoned


class Recording:
    """A group that does nothing. `fails`: as NCCL whose watchdog has aborted a communicator."""

    def __init__(self, *, fails: bool = False) -> None:
        self.started: list[Collective] = []
        self.is_poisoned, self._fails = False, fails

    def getBackendName(self) -> str:
        return "recording"

    def start(self, collective: Collective) -> Work:
        self.started.append(collective)
        return Work()

    def check(self) -> None:
        self.is_poisoned = self._fails


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What waits for a device, without one: torch makes tensors of CUDA that have no memory."""
    waited: list[str] = []

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(str(device)))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return waited


# ELASTIC-4
def test_a_barrier_on_cuda_ends_once_the_device_has_passed_it(streams: list[str]) -> None:
    group = Recording()
    gang = ElasticGang("dp", torch.device("cuda", 0))
    gang.bind(Binding(0, (0, 1), group))
    with FakeTensorMode():
        gang.barrier()
        dist.barrier(gang.as_process_group())
    devices = [str(tensor.device) for started in group.started for tensor in (*started.outputs, *started.inputs)]
    assert devices == ["cuda:0"] * 4, "NCCL has no tensors of the CPU"
    assert streams == ["cuda:0"] * 2


# ELASTIC-4
def test_a_barrier_that_has_failed_on_the_device_aborts_the_step(streams: list[str]) -> None:
    gang = ElasticGang("dp", torch.device("cuda", 0))
    for barrier in (gang.barrier, lambda: dist.barrier(gang.as_process_group())):
        gang.bind(Binding(0, (0, 1), Recording(fails=True)))
        with FakeTensorMode(), pytest.raises(StepAborted):
            barrier()


# ELASTIC-4
def test_the_size_of_objects_is_broadcast_in_memory_of_the_gangs_device(streams: list[str]) -> None:
    group = Recording()
    gang = ElasticGang("dp", torch.device("cuda", 0))
    gang.bind(Binding(0, (0, 1), group))
    with FakeTensorMode(), contextlib.suppress(Exception):  # the tensors have no values, so that nothing is read back
        gang.broadcast_objects([1, 2])
    assert {str(tensor.device) for started in group.started for tensor in started.outputs} == {"cuda:0"}


# ELASTIC-3
@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_cuda_graph_holds_no_collective(ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would use the communicator of an ended generation; a gang of one, none of those that join."""
    group = Recording()
    gang = ElasticGang("dp", torch.device("cuda", 0))
    gang.bind(Binding(0, ranks, group if len(ranks) > 1 else None))
    collective = Collective("all_reduce", (torch.ones(1),), (torch.ones(1),))
    gang.start(collective)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        NotSupportedError, match="a CUDA graph cannot hold the `all_reduce` of the gang dp: it would keep"
    ):
        gang.start(collective)
    assert len(group.started) == len(ranks) - 1
