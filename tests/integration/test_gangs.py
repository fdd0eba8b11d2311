"""Elastic gangs over real comm processes, sound and poisoned; and which gangs are current where.

What all kinds of gang have in common is in `contract.py`.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticgang.collectives.collective import Collective
from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.error_swallowing import SwallowingProcessGroup
from elasticgang.comm.group_set import Configuration
from elasticgang.comm.isolated import SharedProcessGroup
from elasticgang.errors import GangError, InvalidOperationError, PeerLostError, StaleGenerationError, StepAborted
from elasticgang.gang import (
    ElasticGang,
    FakeGang,
    Gang,
    GangGrid,
    Gangs,
    ProcessGroupGang,
    ReduceOperation,
    all_sum,
    broadcast_flag,
    composed,
    create_fake_gangs,
    get_current_gangs,
    get_default_gangs,
    maybe_get_current_gangs,
)
from elasticgang.gang.elastic import Binding
from elasticgang.process.forkserver import ForkServer
from tests.integration import contract
from tests.integration.conftest import World, Worlds

CPU = torch.device("cpu")
SUM, MEAN = ReduceOperation.SUM, ReduceOperation.MEAN
GUARD_S = 20.0


@dataclass(frozen=True)
class Owner:
    """What a rank's groups belong to, as `member.generation.Generation` is."""

    comm: CommProcess

    @property
    def error(self) -> GangError | None:
        return StaleGenerationError("the comm process has ended") if self.comm.ended else None

    def fail(self, error: GangError) -> None:
        self.comm.abort(error)


def group_of(world: World, rank: int, spec: GroupSpec | None = None) -> SwallowingProcessGroup:
    comm = world.comms[rank]
    shared = SharedProcessGroup(Configuration(comm), spec or GroupSpec("all", rank, len(world.comms)))
    return SwallowingProcessGroup(shared, start=shared.start, owner=Owner(comm))


def binding(world: World, rank: int) -> Binding:
    """Of a gang of all ranks."""

    def make(name: str, ranks: Sequence[int]) -> SwallowingProcessGroup:
        spec = GroupSpec(name, list(ranks).index(rank), len(ranks))
        world.comms[rank].add_group(world.prefix, spec)
        return group_of(world, rank, spec)

    return Binding(rank, tuple(range(len(world.comms))), group_of(world, rank), make)


def bound(world: World, name: str = "dp") -> list[ElasticGang]:
    gangs = []
    for rank in range(len(world.comms)):
        gang = ElasticGang(name, CPU)
        gang.bind(binding(world, rank))
        gangs.append(gang)
    return gangs


@pytest.fixture(scope="module")
def trio(forkserver: ForkServer, store: str) -> Iterator[World]:
    world = World(forkserver, store, 3, GUARD_S)
    world.configure()
    yield world
    world.close()


# -- sound


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


def test_lists_of_objects_of_another_length_are_refused_and_unchanged(trio: World) -> None:
    gangs = bound(trio)

    def broadcast(rank: int) -> None:
        objects: list[object] = [1, 2] if rank == 0 else ["mine"]
        if rank == 0:
            gangs[rank].broadcast_objects(objects, 0)
            return
        with pytest.raises(ValueError, match=r"\(2\), but has 1 instead"):
            gangs[rank].broadcast_objects(objects, 0)
        assert objects == ["mine"]

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


# -- poisoned


def end_sound(world: World) -> None:
    world.comms[0].abort(PeerLostError("rank 1 was killed"))


def end_dead(world: World) -> None:
    for comm in world.comms:
        os.kill(comm.pid, signal.SIGKILL)


def end_peer(world: World) -> None:
    os.kill(world.comms[1].pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [end_sound, end_dead, end_peer])
def test_scalar_helpers_of_a_poisoned_gang_raise(worlds: Worlds, end: Callable[[World], None]) -> None:
    """Whoever branches on a flag that nobody agreed on leaves the others."""
    world = worlds(2)
    gang = bound(world)[0]
    assert not gang.is_poisoned
    end(world)
    of_group = ProcessGroupGang(gang.as_process_group(), CPU)
    for asked in (gang, of_group):
        with pytest.raises(StepAborted, match="broadcast_flag"):
            broadcast_flag(asked, True, 1)
        with pytest.raises(StepAborted, match="all_sum"):
            all_sum(asked, 1)
        with pytest.raises(StepAborted, match="all_sum"):
            all_sum(asked, torch.ones(2))
    assert gang.is_poisoned
    assert of_group.is_poisoned


# GANG-3
@pytest.mark.parametrize("end", [end_sound, end_dead, end_peer])
def test_a_poisoned_gang_gives_what_was_there_or_zeros_and_never_raises(
    worlds: Worlds, end: Callable[[World], None]
) -> None:
    world = worlds(2)
    gang = bound(world)[0]
    end(world)
    ones = torch.ones(4)
    for op in ReduceOperation:
        gang.all_reduce(ones, op)
        gang.reduce(ones, op)
    gang.broadcast(ones, 1)
    assert ones.tolist() == [1.0] * 4  # also after MEAN: nothing was summed, so nothing is divided
    junk = torch.full((2, 4), 7.0)
    gang.all_gather(junk, ones)
    assert not junk.any()
    lists: list[Callable[[list[Tensor]], object]] = [
        lambda outputs: gang.all_gather_to_list(outputs, ones),
        lambda outputs: gang.all_to_all(outputs, [ones] * 2),
        lambda outputs: gang.gather(outputs, ones),
    ]
    for fill in lists:
        outputs = [torch.full((4,), 7.0) for _ in range(2)]
        fill(outputs)
        assert not any(output.any() for output in outputs)
    part = torch.full((4,), 7.0)
    gang.reduce_scatter(part, torch.ones(2, 4))
    assert not part.any()
    part = torch.full((4,), 7.0)
    gang.scatter(part, [ones] * 2)
    assert not part.any()
    part = torch.full((4,), 7.0)
    gang.recv(part, 1)
    assert not part.any()
    gang.send(ones, 1)
    assert ones.tolist() == [1.0] * 4


# COMPOSED-3
@pytest.mark.parametrize("end", [end_sound, end_dead])
def test_an_exchange_over_a_poisoned_gang_gives_zeros(worlds: Worlds, end: Callable[[World], None]) -> None:
    """As a gang of the user's own performs it: the sizes that the ranks exchange first are none."""
    world = worlds(2)
    gang = bound(world)[0]
    end(world)
    outputs = [torch.full((length,), 7.0) for length in (3, 5)]
    composed.perform(gang, Collective("all_to_all", tuple(outputs), (torch.ones(3), torch.ones(4))))
    assert [output.tolist() for output in outputs] == [[0.0] * 3, [0.0] * 5]


def test_what_has_no_true_answer_raises(worlds: Worlds) -> None:
    world = worlds(2)
    gang = bound(world)[0]
    end_sound(world)
    with pytest.raises(StepAborted, match="dp"):
        gang.barrier()
    for source in (0, 1):
        objects: list[object] = ["mine"]
        with pytest.raises(StepAborted):
            gang.broadcast_objects(objects, source)
        assert objects == ["mine"]


# GANG-1
def test_what_is_wrong_is_refused_by_a_poisoned_gang_too(worlds: Worlds) -> None:
    """Whether a script is right does not depend on who has died."""
    world = worlds(2)
    gang = bound(world)[0]
    end_sound(world)
    contract.refusals(gang)


def test_a_work_that_was_under_way_ends_the_same_way(worlds: Worlds) -> None:
    world = worlds(2)
    gang = bound(world)[0]
    kept, junk = torch.ones(4), [torch.full((4,), 7.0) for _ in range(2)]
    reducing = gang.all_reduce(kept, MEAN, async_op=True)
    gathering = gang.all_gather_to_list(junk, torch.ones(4), async_op=True)
    end_peer(world)
    assert reducing is not None
    assert gathering is not None
    assert not reducing.wait()
    assert not gathering.wait()
    assert not reducing.wait()
    assert kept.tolist() == [1.0] * 4
    assert not any(output.any() for output in junk)


# ELASTIC-2
def test_the_first_error_poisons_all_gangs_of_the_rank(worlds: Worlds) -> None:
    world = worlds(2)
    dp, root = bound(world, "dp")[0], bound(world, "root")[0]
    end_peer(world)
    tensor = torch.ones(2)
    dp.all_reduce(tensor, SUM)
    assert world.comms[0].ended
    with pytest.raises(StepAborted):
        root.barrier()


def test_a_work_whose_peer_ends_is_over_and_says_so(worlds: Worlds) -> None:
    world = worlds(2)
    gangs = bound(world)
    pending = gangs[0].all_reduce(tensor := torch.ones(3), SUM, async_op=True)
    assert pending is not None
    end_peer(world)
    assert not pending.wait()
    assert tensor.tolist() == [1.0] * 3
    late = gangs[0].all_reduce(tensor, SUM, async_op=True)
    assert late is not None
    assert not late.wait()


# ELASTIC-1
def test_a_gang_bound_to_the_next_generation_is_sound_again(worlds: Worlds) -> None:
    first, second = worlds(2), worlds(3)
    gangs = bound(first)
    end_sound(first)
    gangs[0].all_reduce(tensor := torch.ones(1), SUM)
    assert tensor.item() == 1.0
    gangs.append(ElasticGang("dp", CPU))
    for rank, gang in enumerate(gangs):
        gang.bind(binding(second, rank))
    second.each(lambda rank: contract.one_to_another(gangs[rank]))


# -- which gangs are current


def gangs_of(rank: int = 0, size: int = 1) -> Gangs:
    gang = FakeGang(CPU, rank=rank, size=size)
    return Gangs(root=gang, dp=gang, rdp=gang, sdp=FakeGang(CPU), tp=FakeGang(CPU), pp=FakeGang(CPU))


def test_the_innermost_gangs_are_current() -> None:
    assert maybe_get_current_gangs() is None
    outer, inner = gangs_of(), gangs_of()
    with outer as entered:
        assert entered is outer
        with inner:
            assert maybe_get_current_gangs() is inner
            with outer:
                assert get_current_gangs() is outer
            assert maybe_get_current_gangs() is inner
        assert maybe_get_current_gangs() is outer
    assert maybe_get_current_gangs() is None


def test_what_was_not_entered_last_is_not_left() -> None:
    outer, inner = gangs_of(), gangs_of()
    with pytest.raises(InvalidOperationError, match="other gangs were entered last"):
        outer.__exit__(None, None, None)
    with outer:
        with pytest.raises(InvalidOperationError, match="other gangs were entered last"):
            inner.__exit__(None, None, None)
        assert maybe_get_current_gangs() is outer


def test_a_device_may_be_given_by_its_name() -> None:
    assert FakeGang("cpu").device == CPU
    gangs = create_fake_gangs("cpu")
    assert gangs.device == CPU
    with gangs:
        assert get_current_gangs("cpu") is gangs
    assert get_default_gangs("cpu") is get_default_gangs(CPU)
    assert get_default_gangs("meta").device == CPU
    with pytest.raises(ValueError, match="must not be of type `meta`"):
        FakeGang("meta")


def test_an_error_inside_leaves_no_gangs_behind() -> None:
    with pytest.raises(RuntimeError, match="mine"), gangs_of():
        raise RuntimeError("mine")
    assert maybe_get_current_gangs() is None


def test_other_threads_have_their_own() -> None:
    """GANGS-1, also in threads that were started before, and inside each other. There was a fairseq2 that had a stack
    in the main thread only, and an AttributeError in all others."""
    seen: list[Gangs | None] = []
    mine, theirs = gangs_of(), gangs_of()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        seen.append(maybe_get_current_gangs())
        with theirs:
            seen.append(maybe_get_current_gangs())
            inside.set()
            assert leave.wait(GUARD_S)
        seen.append(maybe_get_current_gangs())

    with mine:
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(GUARD_S)
        assert maybe_get_current_gangs() is mine
    assert maybe_get_current_gangs() is None
    leave.set()
    thread.join(GUARD_S)
    assert seen == [None, theirs, None]


def test_closing_closes_each() -> None:
    gangs = create_fake_gangs(CPU)
    gangs.close()
    for gang in (gangs.root, gangs.dp, gangs.rdp, gangs.sdp, gangs.tp, gangs.pp):
        with pytest.raises(InvalidOperationError):
            gang.barrier()
