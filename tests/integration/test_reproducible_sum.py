"""`ReproducibleSum` over real comm processes: the bits are those of one rank that has all leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.work import Work
from elasticgang.comm.staging import Staging
from elasticgang.gang import FakeGang, Gang, ReduceOperation
from elasticgang.process.forkserver import ForkServer
from elasticgang.protocol.slot_division import Part, divide, holding
from elasticgang.train.partition import slots_of
from elasticgang.train.reproducible import ReproducibleSum
from tests.integration.bound_gangs import CPU, bound
from tests.integration.conftest import World
from tests.integration.rings import bits

GUARD_S = 20.0
SHAPES = ((3, 5), (7,), (2, 3, 4, 5))  # 142 elements, which 3 and 4 ranks cannot divide equally


@pytest.fixture(scope="module", params=[2, 3, 4])
def world(forkserver: ForkServer, store: str, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(forkserver, store, request.param, GUARD_S)
    world.configure()
    yield world
    world.close()


def gradient_of(step: int, leaf: int, dtype: torch.dtype) -> list[Tensor]:
    """Of very different sizes, so that nearly every order of addition gives other bits."""
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    real = dtype if dtype.is_floating_point else torch.float64
    gradients = []
    for shape in SHAPES:
        size = torch.randint(-9, 9, shape, generator=generator)
        gradients.append((torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0**size).to(real).to(dtype))
    return gradients


def whole(found: list[Tensor | None] | None) -> list[Tensor]:
    """All gradients: each has a leaf."""
    assert found is not None
    present = [each for each in found if each is not None]
    assert len(present) == len(found)
    return present


def summed(gang: Gang, total: ReproducibleSum, leaves: Sequence[range], step: int, dtype: torch.dtype) -> list[bytes]:
    total.begin(leaves, gang.rank)
    for leaf in leaves[gang.rank]:
        total.add(leaf, gradient_of(step, leaf, dtype))
    total.reduce(gang)
    total.gather(gang)
    found = whole(total.finish())
    return [bits(each) for each in found]


def like(dtype: torch.dtype) -> list[Tensor]:
    first, second, third = (torch.zeros(shape, dtype=dtype) for shape in SHAPES)
    return [first, second, third.contiguous(memory_format=torch.channels_last)]


# REPRODUCIBLE-1, REPRODUCIBLE-2
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64], ids=str
)
@pytest.mark.parametrize("num_slots", [1, 3, 13, 16])
def test_every_number_of_ranks_gets_the_bits_of_one(world: World, num_slots: int, dtype: torch.dtype) -> None:
    """Some ranks are learners, or have no slots. Three steps with the same memory."""
    alone = ReproducibleSum(like(dtype), lambda num: torch.full((num,), 7.0).to(dtype))
    expected = [summed(FakeGang(CPU), alone, [range(num_slots)], step, dtype) for step in range(3)]
    gangs = bound(world)
    for has_learner in (False, True):
        count = len(gangs) - has_learner
        leaves = [slots_of(num_slots, index, count) for index in range(count)] + [range(0)] * has_learner

        def train(rank: int, leaves: Sequence[range] = leaves) -> list[list[bytes]]:
            total = ReproducibleSum(like(dtype), lambda num: Staging.of(world.arena).empty(num, dtype))
            return [summed(gangs[rank], total, leaves, step, dtype) for step in range(3)]

        assert world.each(train) == [expected] * len(gangs)


def test_plain_sums_of_these_gradients_have_other_bits(world: World) -> None:
    """Otherwise the test before would show nothing."""
    alone = ReproducibleSum(like(torch.float32), torch.zeros)
    expected = summed(FakeGang(CPU), alone, [range(13)], 0, torch.float32)
    gangs = bound(world)

    def train(rank: int) -> list[bytes]:
        sums = [torch.zeros_like(each) for each in like(torch.float32)]
        for leaf in slots_of(13, rank, len(gangs)):
            for total, gradient in zip(sums, gradient_of(0, leaf, torch.float32), strict=True):
                total.add_(gradient)
        for total in sums:
            gangs[rank].all_reduce(total, ReduceOperation.SUM)
        return [bits(each) for each in sums]

    assert all(found != expected for found in world.each(train))


# REPRODUCIBLE-3
def test_one_thread_can_reduce_for_all_ranks_in_turn(world: World) -> None:
    """So no rank waits for another before the exchange that it needs has begun everywhere."""
    gangs, dtype = bound(world), torch.float32
    leaves = [slots_of(13, index, len(gangs)) for index in range(len(gangs))]
    sums = [[ReproducibleSum(like(dtype), torch.empty) for _ in range(2)] for _ in gangs]
    for gang, of_rank in zip(gangs, sums, strict=True):
        for index, total in enumerate(of_rank):
            total.begin(leaves, gang.rank)
            for leaf in leaves[gang.rank]:
                total.add(leaf, gradient_of(index, leaf, dtype))
            total.reduce(gang)
    for gang, of_rank in zip(gangs, sums, strict=True):
        for total in of_rank:
            total.gather(gang)
    for index in range(2):
        alone = ReproducibleSum(like(dtype), torch.empty)
        expected = summed(FakeGang(CPU), alone, [range(13)], index, dtype)
        for of_rank in sums:
            found = whole(of_rank[index].finish())
            assert [bits(each) for each in found] == expected


def test_what_is_dropped_leaves_nothing_in_the_next_step(world: World) -> None:
    gangs, dtype = bound(world), torch.float32
    leaves = [slots_of(13, index, len(gangs)) for index in range(len(gangs))]
    alone = ReproducibleSum(like(dtype), torch.empty)
    expected = summed(FakeGang(CPU), alone, [range(13)], 1, dtype)

    def train(rank: int) -> list[bytes]:
        total = ReproducibleSum(like(dtype), torch.empty)
        total.begin(leaves, rank)
        total.add(leaves[rank].start, gradient_of(0, 0, dtype))
        total.drop()
        total.begin(leaves, rank)
        total.reduce(gangs[rank])
        total.drop()
        return summed(gangs[rank], total, leaves, 1, dtype)

    assert world.each(train) == [expected] * len(gangs)


def test_values_that_are_not_finite_are_alike_on_all_ranks(world: World) -> None:
    """Infinities of both signs in one element, of one sign, and NaN, from different ranks."""
    gangs, num_slots = bound(world), 8
    leaves = [slots_of(num_slots, index, len(gangs)) for index in range(len(gangs))]
    special = {0: (0, torch.inf), 7: (0, -torch.inf), 3: (1, -torch.inf), 5: (2, torch.nan)}

    def sums(gang: Gang, leaves: Sequence[range]) -> Tensor:
        total = ReproducibleSum([torch.zeros(9)], torch.empty)
        total.begin(leaves, gang.rank)
        for leaf in leaves[gang.rank]:
            gradient = torch.full((9,), float(leaf))
            place, value = special.get(leaf, (8, 1.0))
            gradient[place] = value
            total.add(leaf, [gradient])
        total.reduce(gang)
        total.gather(gang)
        found = whole(total.finish())
        return found[0].clone()

    expected = sums(FakeGang(CPU), [range(num_slots)])
    assert expected[:4].tolist() == pytest.approx([torch.nan, -torch.inf, torch.nan, 28.0], nan_ok=True)
    first, *others = world.each(lambda rank: sums(gangs[rank], leaves))
    torch.testing.assert_close(first, expected, rtol=0.0, atol=0.0, equal_nan=True)
    assert all(bits(other) == bits(first) for other in others)


class NotedGang:
    """Rank 0 of so many that no machine of the tests has them: notes what is started."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.started: list[Collective] = []

    def start(self, collective: Collective) -> Work:
        self.started.append(collective)
        return FakeGang(CPU).start(Collective("all_reduce", (torch.zeros(1),), (torch.zeros(1),)))


@pytest.mark.parametrize(("size", "num_leaves"), [(100, 100), (100, 150), (999, 999)])
def test_vectors_have_room_for_equal_parts_of_many_ranks(size: int, num_leaves: int) -> None:
    gang = NotedGang(size)
    total = ReproducibleSum([torch.zeros(1001)], torch.empty)
    leaves = [slots_of(num_leaves, rank, size) for rank in range(size)]
    total.begin(leaves, 0)
    for leaf in leaves[0]:
        total.add(leaf, [torch.ones(1001)])
    total.reduce(cast(Gang, gang))
    total.gather(cast(Gang, gang))
    exchange, gather = gang.started
    assert exchange.inputs[0].numel() == exchange.outputs[0].numel()
    assert exchange.outputs[0].numel() % size == 0
    assert gather.outputs[0].numel() == size * gather.inputs[0].numel() >= 1001


# SUM-1, DIVISION-1
@pytest.mark.parametrize("num_slots", [3, 13, 16])
def test_nodes_that_ranks_keep_give_the_bits_of_one_rank(world: World, num_slots: int) -> None:
    """Four tries of one step, none of which comes to its end but the last. In each of them another rank has lost its
    nodes, and each rank computes some more leaves. In the third one the exchanges begin, in the fourth they end."""
    gangs, dtype = bound(world), torch.float32
    alone = ReproducibleSum(like(dtype), torch.empty)
    expected = summed(FakeGang(CPU), alone, [range(num_slots)], 0, dtype)
    sums = [ReproducibleSum(like(dtype), lambda num: torch.full((num,), 7.0), keeps=True) for _ in gangs]

    def begin(lost: int | None) -> list[Part]:
        if lost is not None:
            sums[lost].release()
        held = [total.firm for total in sums]
        messages = [holding(num_slots, rank, leaves) for rank, leaves in enumerate(held)]
        parts = divide([sum(column) for column in zip(*messages, strict=True)], 1, [True] * len(gangs))
        assert [list(part.kept) for part in parts] == [sorted(leaves) for leaves in held]
        for rank, (total, part) in enumerate(zip(sums, parts, strict=True)):
            total.begin([each.numbers for each in parts], rank, part.kept)
        return parts

    def compute(parts: list[Part], most: int) -> None:
        for total, part in zip(sums, parts, strict=True):
            for leaf in part.due[:most]:
                total.add(leaf, gradient_of(0, leaf, dtype))

    compute(begin(None), 2)
    for total in sums:
        total.drop()
    compute(begin(0), 1)
    for total in sums:
        total.drop()
    for lost in (1, None):
        compute(begin(lost), num_slots)
        for gang, total in zip(gangs, sums, strict=True):
            total.reduce(gang)
        for gang, total in zip(gangs, sums, strict=True):
            total.gather(gang)
        if lost is not None:
            for total in sums:
                total.drop()
    for total in sums:
        found = whole(total.finish())
        assert [bits(each) for each in found] == expected
        found[0].zero_()  # as the optimizer divides them; the nodes stay
    computed = begin(None)
    assert not any(part.due for part in computed)

    def again(rank: int) -> list[bytes]:
        sums[rank].reduce(gangs[rank])
        sums[rank].gather(gangs[rank])
        found = whole(sums[rank].finish())
        return [bits(each) for each in found]

    assert world.each(again) == [expected] * len(gangs)


def test_one_rank_keeps_its_nodes_too() -> None:
    total = ReproducibleSum(like(torch.float32), torch.empty, keeps=True)
    alone = ReproducibleSum(like(torch.float32), torch.empty)
    expected = summed(FakeGang(CPU), alone, [range(13)], 0, torch.float32)
    assert summed(FakeGang(CPU), total, [range(13)], 0, torch.float32) == expected
    total.begin([tuple(range(13))], 0, range(13))
    total.reduce(FakeGang(CPU))
    total.gather(FakeGang(CPU))
    found = whole(total.finish())
    assert [bits(each) for each in found] == expected


@pytest.mark.parametrize("size", [2, 100])
def test_kept_vectors_have_room_for_the_parts_of_another_number_of_ranks(size: int) -> None:
    """1001 elements in equal parts are 1100 for 100 ranks, and 1089 for 99; a vector has 1065 or more."""
    total = ReproducibleSum([torch.zeros(1001)], torch.empty, keeps=True)
    total.begin([range(4 * rank, 4 * rank + 4) for rank in range(size)], 0)
    for leaf in range(2):
        total.add(leaf, [torch.full((1001,), 2.0)])
    total.drop()
    gang = NotedGang(99)
    total.begin([range(4 * rank, 4 * rank + 4) for rank in range(99)], 0, range(2))
    for leaf in range(2, 4):
        total.add(leaf, [torch.full((1001,), 3.0)])
    total.reduce(cast(Gang, gang))
    (exchange,) = gang.started
    assert exchange.inputs[0].numel() == 1089
    assert exchange.inputs[0][:1001].tolist() == [10.0] * 1001
