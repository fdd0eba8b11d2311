"""Elastic gangs over real comm processes that have ended, or lose a peer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from elasticgang.collectives.collective import Collective
from elasticgang.errors import PeerLostError, StepAborted
from elasticgang.gang import ElasticGang, ProcessGroupGang, ReduceOperation, all_sum, broadcast_flag, composed
from tests.integration import contract
from tests.integration.bound_gangs import CPU, binding, bound
from tests.integration.conftest import World, Worlds

SUM, MEAN = ReduceOperation.SUM, ReduceOperation.MEAN


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
