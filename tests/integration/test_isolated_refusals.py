"""What does not fit is refused before anything is sent: the group goes on as if nothing had been asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    _make_nccl_premul_sum,
)
from torch.distributed import ReduceOp

from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
from elasticgang.errors import NotSupportedError
from tests.integration.forms import reducing, rooted
from tests.integration.rings import Ring

SIZE = 2


@pytest.fixture(scope="module")
def ring(store: str) -> Iterator[Ring]:
    ring = Ring(lambda: ProcessGroupIsolatedGloo(30.0), SIZE, store)
    yield ring
    ring.close()


@pytest.fixture(autouse=True)
def unharmed(ring: Ring) -> Iterator[None]:
    yield
    assert [pg.errored() for pg in ring.groups] == [None] * SIZE
    assert [pg.num_active_work() for pg in ring.groups] == [0] * SIZE
    assert ring.sums() == [2.0] * SIZE


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


OVERLAPPING = torch.zeros(10)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "allgather: too few outputs": (
        lambda pg: pg.allgather([[ones(3)]], [ones(3)], AllgatherOptions()),
        r"one tensor for each of the 2 ranks, but has 1",
    ),
    "allgather: another dtype": (
        lambda pg: pg.allgather([[ones(3), ones(3, dtype=torch.float64)]], [ones(3)], AllgatherOptions()),
        r"must be of torch\.float32 on cpu, but is of torch\.float64",
    ),
    "allgather: another size": (
        lambda pg: pg.allgather([[ones(3), ones(4)]], [ones(3)], AllgatherOptions()),
        r"must have 3 elements, but has 4",
    ),
    "allgather: as many lists as inputs": (
        lambda pg: pg.allgather([[ones(3), ones(3)]], [ones(3), ones(3)], AllgatherOptions()),
        r"must be as many as `input_tensors` \(2\), but are 1",
    ),
    "allgather_coalesced: one list a rank": (
        lambda pg: pg.allgather_coalesced([[ones(3)]], [ones(3)], AllgatherOptions()),
        r"must be 2 lists \(one a rank\) of 1 tensors \(one an input\), but are \[1\]",
    ),
    "all_gather_single: another size": (
        lambda pg: pg._allgather_base(ones(5), ones(3), AllgatherOptions()),
        r"`output` must have 6 elements, but has 5",
    ),
    "reduce_scatter: too many inputs": (
        lambda pg: pg.reduce_scatter([ones(3)], [[ones(3)] * 3], reducing(ReduceScatterOptions)),
        r"each of the 2 ranks, but has 3",
    ),
    "reduce_scatter: another size": (
        lambda pg: pg.reduce_scatter([ones(3)], [[ones(4)] * 2], reducing(ReduceScatterOptions)),
        r"own part must have 3 elements, but has 4",
    ),
    "reduce_scatter_single: another size": (
        lambda pg: pg._reduce_scatter_base(ones(3), ones(7), reducing(ReduceScatterOptions)),
        r"`input` must have 6 elements, but has 7",
    ),
    "alltoall: another size to oneself": (
        lambda pg: pg.alltoall([ones(3), ones(3)], [ones(2), ones(2)], AllToAllOptions()),
        r"what a rank sends to itself must have 3 elements, but has 2",
    ),
    "alltoall_base: uneven": (
        lambda pg: pg.alltoall_base(ones(3), ones(3), [], [], AllToAllOptions()),
        r"divides by the group's size \(2\), but it is 3",
    ),
    "alltoall_base: splits that do not add up": (
        lambda pg: pg.alltoall_base(ones(4), ones(4), [1, 2], [2, 2], AllToAllOptions()),
        r"must be 2 that sum to its first dimension \(4\), but are \[1, 2\]",
    ),
    "broadcast: a root outside": (
        lambda pg: pg.broadcast([ones(3)], rooted(BroadcastOptions, 2)),
        r"less than the group's size \(2\), but is 2",
    ),
    "reduce: a root outside": (
        lambda pg: pg.reduce([ones(3)], reducing(ReduceOptions, root=-1)),
        r"less than the group's size \(2\), but is -1",
    ),
    "gather: nothing for the root": (
        lambda pg: pg.gather([], [ones(3)], rooted(GatherOptions, 0)),
        r"`gather` must be given tensors of all ranks on rank 0, because the root is rank 0",
    ),
    "gather: something for another": (
        lambda pg: pg.gather([[ones(3), ones(3)]], [ones(3)], rooted(GatherOptions, 1)),
        r"`gather` must be given no such tensors on rank 0, because the root is rank 1",
    ),
    "scatter: nothing of the root": (
        lambda pg: pg.scatter([ones(3)], [], rooted(ScatterOptions, 0)),
        r"`scatter` must be given tensors of all ranks on rank 0",
    ),
    "scatter: something of another": (
        lambda pg: pg.scatter([ones(3)], [[ones(3), ones(3)]], rooted(ScatterOptions, 1)),
        r"`scatter` must be given no such tensors on rank 0",
    ),
    "allreduce: no tensors": (lambda pg: pg.allreduce([1]), r"a tensor is needed, but 1 \(of int\) was given"),
    "allreduce: no list": (lambda pg: pg.allreduce(1), r"tensors must be a tensor or a list of them, but are 1"),
    "allgather: no tensors": (lambda pg: pg.allgather([[1, 2]], ["x"]), r"a tensor is needed, but"),
    "broadcast: nothing": (lambda pg: pg.broadcast(None), r"tensors must be a tensor or a list of them, but are None"),
    "allreduce: elements that share memory": (
        lambda pg: pg.allreduce([OVERLAPPING.as_strided((3, 3), (2, 1))]),
        r"must not share memory among its elements",
    ),
    "allreduce: elements that share memory, otherwise": (
        lambda pg: pg.allreduce([OVERLAPPING.as_strided((2, 2), (1, 1))]),
        r"must not share memory among its elements",
    ),
    "send: to oneself": (lambda pg: pg.send([ones(3)], 0, 0), r"must be another rank than this one, but is 0"),
    "recv: of oneself": (lambda pg: pg.recv([ones(3)], 0, 0), r"must be another rank than this one, but is 0"),
    "send: outside": (lambda pg: pg.send([ones(3)], 2, 0), r"dst_rank must be .* less than .* \(2\), but is 2"),
    "recv: outside": (lambda pg: pg.recv([ones(3)], -1, 0), r"src_rank must be .* less than .* \(2\), but is -1"),
    "allreduce_coalesced: the second of a dtype that nobody adds": (
        lambda pg: pg.allreduce_coalesced(
            [ones(3), ones(3).to(torch.float8_e4m3fn)], reducing(AllreduceCoalescedOptions)
        ),
        r"needs a dtype that is reduced",
    ),
    "allreduce_coalesced: the second without a mean": (
        lambda pg: pg.allreduce_coalesced(
            [ones(3), ones(3, dtype=torch.int32)], reducing(AllreduceCoalescedOptions, ReduceOp.AVG)
        ),
        r"MEAN needs a floating-point",
    ),
}


# CALL-1
@pytest.mark.parametrize("case", list(REFUSED))
def test_what_does_not_fit_is_refused_before_anything_is_sent(case: str, ring: Ring) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call(ring[0])


def test_a_reduction_that_there_is_not_is_refused(ring: Ring) -> None:
    with pytest.raises(NotSupportedError, match="PREMUL"):
        ring[0].allreduce([ones(3)], reducing(AllreduceOptions, _make_nccl_premul_sum(2.0)))


# GANG-4
@pytest.mark.parametrize(
    ("shape", "strides"), [((3, 2), (4, 2)), ((2, 5), (1, 2)), ((4, 1), (2, 1)), ((3, 2), (2, 3)), ((2, 0), (0, 1))]
)
def test_elements_that_lie_apart_are_reduced_however_they_lie(
    shape: tuple[int, ...], strides: tuple[int, ...], ring: Ring
) -> None:
    tensors = [torch.ones(20).as_strided(shape, strides) for _ in range(SIZE)]
    ring.each(lambda rank: ring[rank].allreduce([tensors[rank]]).wait())
    assert tensors[0].flatten().tolist() == [2.0] * tensors[0].numel()


def test_nothing_at_all_is_nothing(ring: Ring) -> None:
    work = ring[0].allreduce([], AllreduceOptions())
    assert work.wait()
    assert work.get_future().wait() == []
