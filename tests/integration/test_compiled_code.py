"""Which compiled code is dropped when a gang has another rank or size: in one process, without any peer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed import _functional_collectives as functional

import elasticgang as eg
from elasticgang.gang import compiled
from elasticgang.gang.elastic import Binding, ElasticGang

CPU = torch.device("cpu")


@pytest.fixture
def gang() -> Iterator[ElasticGang]:
    compiled.drop_stale()  # what former gangs have left
    dist.distributed_c10d._update_default_pg(None)
    gang = ElasticGang("cp", CPU)
    gang.bind(Binding(1, (0, 1), None))
    eg.set_default_process_group(gang)
    yield gang
    gang.close()
    dist.destroy_process_group()
    torch.compiler.reset()


class Traced:
    """A function that torch.compile has made, and how often."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.num = 0
        self._compiled = torch.compile(function, backend=self._backend)

    def _backend(self, graph: torch.fx.GraphModule, inputs: object) -> Any:
        self.num += 1
        return graph.forward

    def __call__(self, *args: object) -> Tensor:
        return self._compiled(*args)


def ranked(part: Tensor) -> Tensor:
    return part * dist.get_rank() + dist.get_world_size()


# COMPILED-1
def test_code_that_has_read_a_rank_or_size_is_dropped_when_one_changes(gang: ElasticGang) -> None:
    traced, part = Traced(ranked), torch.ones(1)
    for binding, num in [
        (Binding(1, (0, 1), None), 1),
        (Binding(1, (0, 1), None), 1),  # as before
        (Binding(0, (0, 1), None), 2),  # another rank
        (Binding(0, (0, 1, 2), None), 3),  # another size
        (Binding(1, (0, 1), None), 4),
    ]:
        gang.bind(None)
        gang.bind(binding)
        assert compiled.drop_stale() == (num > traced.num > 0)
        for _ in range(2):
            assert traced(part).item() == binding.rank + binding.size
        assert traced.num == num


# COMPILED-2
def test_code_that_has_read_neither_stays(gang: ElasticGang) -> None:
    traced = Traced(lambda part: part * 2)
    assert traced(torch.ones(1)).item() == 2.0
    assert (dist.get_rank(), gang.as_process_group().size()) == (1, 2)  # read, but not by code that is compiled
    gang.bind(Binding(0, (0,), None))
    assert not compiled.drop_stale()
    assert traced(torch.ones(1)).item() == 2.0
    assert traced.num == 1


def test_many_changes_do_not_come_to_torchs_limit_of_recompilations(gang: ElasticGang) -> None:
    limit = torch._dynamo.config.recompile_limit
    traced = Traced(ranked)
    for size in range(2, limit + 5):
        gang.bind(Binding(1, tuple(range(size)), None))
        compiled.drop_stale()
        assert traced(torch.ones(1)).item() == 1 + size
    assert traced.num == limit + 3


def test_a_mesh_has_the_rank_of_its_generation(gang: ElasticGang) -> None:
    importlib.import_module("torch._dynamo")  # as what compiles has done
    one = eg.FakeGang(CPU)
    gangs = eg.Gangs(root=gang, dp=gang, rdp=gang, sdp=one, tp=one, pp=one)
    assert not compiled.drop_stale()
    gangs.device_mesh("rdp")
    gang.bind(Binding(0, (0, 1), None))
    assert compiled.drop_stale()
    assert not compiled.drop_stale()


def test_a_gang_that_has_ended_takes_its_code_with_it(gang: ElasticGang) -> None:
    made = gang.create_gang([1])
    assert made is not None
    traced = Traced(lambda part, group: functional.all_gather_tensor(part, 0, group).sum() * 2)
    assert traced(torch.ones(2), made.as_process_group()).item() == 4.0
    gang.bind(Binding(1, (0, 1), None))  # of the next generation
    assert compiled.drop_stale()


@pytest.fixture
def static(no_default_group: None) -> Iterator[eg.ProcessGroupGang]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    gang = eg.ProcessGroupGang(torch.distributed.group.WORLD, CPU)  # type: ignore[arg-type]
    yield gang
    gang.close()
    torch.compiler.reset()


# GANG-5
def test_the_collectives_of_a_static_gang_are_run_between_the_graphs(static: eg.ProcessGroupGang) -> None:
    def step(part: Tensor) -> Any:
        total = part * 2
        static.all_reduce(total, eg.ReduceOperation.MEAN)
        work = static.broadcast(total, static.size - 1, async_op=True)
        assert work is not None
        work.wait()
        parts = total.new_zeros(static.size, 3)
        static.all_gather(parts, total + static.rank)
        static.barrier()
        objects: list[Any] = [5]
        static.broadcast_objects(objects)
        return parts.sum(0) + eg.all_sum(static, 1) + objects[0]

    traced = Traced(step)
    for _ in range(2):
        assert traced(torch.ones(3)).tolist() == [8.0] * 3
    assert traced.num > 1
