"""A gang of the user's own: a subclass with exactly fairseq2's abstract methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions, ReduceOp

import elasticgang as eg
from elasticgang.comm import ProcessGroupGloo
from elasticgang.gang.torch_process_group import GangProcessGroup
from tests.integration.conftest import Rings
from tests.integration.rings import Ring

CPU = torch.device("cpu")
# fairseq2 0.8.1's `Gang`, with `Closable`.
ABSTRACT = {
    "all_gather", "all_gather_to_list", "all_reduce", "as_process_group", "barrier", "broadcast", "broadcast_objects",
    "close", "create_gang", "device", "rank", "size", "supports_process_group",
}  # fmt: skip
_OPERATIONS: dict[str, Any] = {"SUM": ReduceOp.SUM, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX}


class OwnGang(eg.Gang):
    """Over in-process Gloo, whose collectives want contiguous tensors."""

    def __init__(self, ring: Ring, rank: int, ranks: Sequence[int] = (0, 1, 2, 3)) -> None:
        self._ring, self._ranks, self._me = ring, sorted(ranks), rank
        self._pg = ring[rank]
        if len(ranks) < len(ring):
            self._pg = ProcessGroupGloo(30.0)
            address = f"{ring.next_address().rpartition('/')[0]}/{'-'.join(map(str, self._ranks))}"
            self._pg.configure(f"{address}/{id(ring)}", "replica", self.rank, self.size)
        self.calls: list[str] = []

    @property
    def rank(self) -> int:
        return self._ranks.index(self._me)

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def device(self) -> torch.device:
        return CPU

    @property
    def supports_process_group(self) -> bool:
        return True

    def close(self) -> None:
        self._pg.shutdown()

    def create_gang(self, ranks: Sequence[int]) -> OwnGang | None:
        chosen = [self._ranks[rank] for rank in ranks]
        return OwnGang(self._ring, self._me, chosen) if self._me in chosen else None

    def as_process_group(self) -> dist.ProcessGroup:
        pg: dist.ProcessGroup = self._pg
        return pg

    def barrier(self) -> None:
        self._pg.barrier().wait()

    def all_reduce(self, tensor: Tensor, op: eg.ReduceOperation) -> None:  # type: ignore[override]  # as fairseq2's
        assert tensor.is_contiguous()
        self.calls.append("all_reduce")
        options = AllreduceOptions()
        options.reduceOp = _OPERATIONS[op.name]
        self._pg.allreduce([tensor], options).wait()

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:  # type: ignore[override]
        self.calls.append("all_gather")
        self._pg._allgather_base(output_tensor.view(-1), input_tensor.view(-1)).wait()

    def all_gather_to_list(self, output_tensors: list[Tensor], input_tensor: Tensor) -> None:  # type: ignore[override]
        assert input_tensor.is_contiguous()
        self.calls.append("all_gather_to_list")
        self._pg.allgather([output_tensors], [input_tensor]).wait()

    def broadcast(self, tensor: Tensor, source_rank: int = 0) -> None:  # type: ignore[override]
        assert tensor.is_contiguous()
        self.calls.append("broadcast")
        self._pg.broadcast_one(tensor, source_rank).wait()

    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        raise NotImplementedError


@pytest.fixture
def ring(rings: Rings) -> Ring:
    return rings(4, make=lambda: ProcessGroupGloo(30.0))


# GANG-2
def test_what_is_abstract_is_what_fairseq2_has() -> None:
    assert eg.Gang.__abstractmethods__ == ABSTRACT
    assert set(vars(OwnGang)) >= ABSTRACT
    for kind in (eg.FakeGang, eg.ProcessGroupGang, eg.ElasticGang):
        assert not kind.__abstractmethods__


def test_a_subclass_that_lacks_one_is_refused() -> None:
    incomplete: Any = type("Incomplete", (eg.Gang,), dict.fromkeys(ABSTRACT - {"all_gather"}))
    with pytest.raises(TypeError, match="all_gather"):
        incomplete()


def test_gangs_are_made_of_it(ring: Ring) -> None:
    def use(rank: int) -> list[Any]:
        root = OwnGang(ring, rank)
        gangs = eg.create_parallel_gangs(root, tp_size=2)
        assert gangs.root is root
        assert isinstance(gangs.tp, OwnGang)
        by_hand = eg.Gangs(root=root, dp=root, rdp=root, sdp=eg.FakeGang(CPU), tp=eg.FakeGang(CPU), pp=eg.FakeGang(CPU))
        with by_hand:
            assert eg.get_current_gangs().dp is root
        flag = eg.broadcast_flag(gangs.dp, rank >= 2, 1)
        return [eg.all_sum(root, rank).item(), eg.all_sum(gangs.tp, rank).item(), flag, gangs.dp.rank, gangs.tp.rank]

    assert ring.each(use) == [[6, 1, True, 0, 0], [6, 1, True, 0, 1], [6, 5, True, 1, 0], [6, 5, True, 1, 1]]


# COMPOSED-1, COMPOSED-2
def test_what_fairseq2_lacks_is_built_on_what_it_has(ring: Ring) -> None:
    gangs = [OwnGang(ring, rank) for rank in range(4)]

    def use(rank: int) -> None:
        gang = gangs[rank]
        matrix = torch.arange(8.0).view(2, 4) + rank
        for given in (matrix.t().contiguous(), matrix.t()):
            before = given.clone()
            gang.reduce_scatter(part := torch.empty(2), given)
            assert part.tolist() == [4.0 * rank + 6, 4.0 * rank + 22]
            assert torch.equal(given, before), "an input is not changed"
        gang.reduce_scatter(part := torch.empty(2), matrix.view(-1), eg.ReduceOperation.MEAN)
        assert part.tolist() == [2 * rank + 1.5, 2 * rank + 2.5]
        gang.reduce(tensor := torch.full((2,), rank + 1.0), eg.ReduceOperation.MAX, 2)
        assert rank != 2 or tensor.tolist() == [4.0, 4.0]
        received = [torch.empty(3) for _ in range(4)] if rank == 1 else None
        gang.gather(received, torch.full((3,), float(rank)), 1)
        assert received is None or [part[2].item() for part in received] == [0, 1, 2, 3]
        sent = [torch.full((2,), 10.0 * place) for place in range(4)] if rank == 3 else None
        gang.scatter(part := torch.empty(2), sent, 3)
        assert part.tolist() == [10.0 * rank] * 2
        outputs = [torch.empty(place + 1) for place in range(4)]
        work = gang.all_to_all(outputs, [torch.full((rank + 1,), 10.0 * rank + place) for place in range(4)],
                               async_op=True)  # fmt: skip
        assert work is not None
        assert work.wait()
        assert [output.tolist() for output in outputs] == [[10.0 * place + rank] * (place + 1) for place in range(4)]

    ring.each(use)
    assert len({tuple(gang.calls) for gang in gangs}) == 1, "every rank makes the same calls"


def test_a_process_group_of_it_has_every_collective_but_messages(ring: Ring) -> None:
    def use(rank: int) -> None:
        pg: Any = GangProcessGroup(OwnGang(ring, rank))
        pg.allreduce([tensor := torch.full((2, 2), rank + 1.0).t()], ReduceOp.AVG).wait()
        assert tensor.tolist() == [[2.5, 2.5]] * 2
        pg.broadcast([tensor := torch.full((4,), float(rank))[::2]]).wait()
        assert tensor.tolist() == [0.0, 0.0]
        pg._allgather_base(output := torch.empty(8), torch.full((2,), float(rank))).wait()
        assert output.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        pg._reduce_scatter_base(output := torch.empty(1), torch.arange(4.0)).wait()
        assert output.item() == 4 * rank
        pg.barrier().wait()
        with pytest.raises(eg.NotSupportedError, match="OwnGang has no `send`"):
            pg.send([tensor], (rank + 1) % 4, 0)
        with pytest.raises(eg.NotSupportedError, match="OwnGang has no reduction by BXOR"):
            pg.allreduce([torch.ones(1, dtype=torch.int64)], ReduceOp.BXOR)

    ring.each(use)


def test_messages_are_refused_by_name(ring: Ring) -> None:
    gang = OwnGang(ring, 0)
    for call in (gang.send, gang.recv):
        with pytest.raises(eg.NotSupportedError, match=f"OwnGang has no `{call.__name__}`"):
            call(torch.ones(1), 1)
