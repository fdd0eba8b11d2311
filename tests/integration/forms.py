"""Every collective of a process group, in each form that torch's callers use, on tensors that a test makes.

A form takes the group, this rank and `new(seed, *shape)`, which makes a tensor: of values that `seed` decides, or (for
None) an output. It returns what it was to write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
)
from torch.distributed import ReduceOp

New = Callable[..., Tensor]
Form = Callable[[Any, int, New], Sequence[Tensor]]


def reducing(kind: Any, op: Any = ReduceOp.SUM, root: int | None = None) -> Any:
    options = kind()
    options.reduceOp = op
    if root is not None:
        options.rootRank = root
    return options


def rooted(kind: Any, root: int) -> Any:
    options = kind()
    options.rootRank = root
    return options


def root(pg: Any) -> int:
    """Rank 1, or the only one."""
    return min(1, int(pg.size()) - 1)


def allreduce(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    tensor = new(rank, 4, 3)
    pg.allreduce([tensor], reducing(AllreduceOptions)).wait()
    return [tensor]


def allreduce_coalesced(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    tensors = [new(rank, 4, 3), new(rank + 10, 5)]
    pg.allreduce_coalesced(tensors, reducing(AllreduceCoalescedOptions)).wait()
    return tensors


def allgather(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    outputs = [new(None, 4, 3) for _ in range(pg.size())]
    pg.allgather([outputs], [new(rank, 4, 3)], AllgatherOptions()).wait()
    return outputs


def allgather_coalesced(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    lists = [[new(None, 4, 3) for _ in range(pg.size())], [new(None, 2) for _ in range(pg.size())]]
    inputs = [new(rank, 4, 3), new(rank + 10, 2)]
    pg.allgather_coalesced([list(row) for row in zip(*lists, strict=True)], inputs, AllgatherOptions()).wait()
    return [output for outputs in lists for output in outputs]


def all_gather_single(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    output = new(None, 4 * pg.size(), 3)
    pg._allgather_base(output, new(rank, 4, 3), AllgatherOptions()).wait()
    return [output]


def allgather_into_tensor_coalesced(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    outputs = [new(None, 4 * pg.size(), 3), new(None, 2 * pg.size())]
    pg.allgather_into_tensor_coalesced(outputs, [new(rank, 4, 3), new(rank + 10, 2)], AllgatherOptions()).wait()
    return outputs


def reduce_scatter(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    output = new(None, 4, 3)
    inputs = [new(rank * 10 + place, 4, 3) for place in range(pg.size())]
    pg.reduce_scatter([output], [inputs], reducing(ReduceScatterOptions)).wait()
    return [output]


def reduce_scatter_single(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    output = new(None, 4, 3)
    pg._reduce_scatter_base(output, new(rank, 4 * pg.size(), 3), reducing(ReduceScatterOptions)).wait()
    return [output]


def reduce_scatter_tensor_coalesced(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    outputs, size = [new(None, 4, 3), new(None, 2)], pg.size()
    inputs = [new(rank, 4 * size, 3), new(rank + 10, 2 * size)]
    pg.reduce_scatter_tensor_coalesced(outputs, inputs, reducing(ReduceScatterOptions)).wait()
    return outputs


def alltoall(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    outputs = [new(None, 4, 3) for _ in range(pg.size())]
    inputs = [new(rank * 10 + place, 4, 3) for place in range(pg.size())]
    pg.alltoall(outputs, inputs, AllToAllOptions()).wait()
    return outputs


def alltoall_base(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    output = new(None, 4 * pg.size(), 3)
    pg.alltoall_base(output, new(rank, 4 * pg.size(), 3), [], [], AllToAllOptions()).wait()
    return [output]


def alltoall_base_uneven(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    """Rank r sends r + s + 1 rows to rank s."""
    sizes = [rank + place + 1 for place in range(pg.size())]
    output = new(None, sum(sizes), 3)
    pg.alltoall_base(output, new(rank, sum(sizes), 3), sizes, sizes, AllToAllOptions()).wait()
    return [output]


def broadcast(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    tensor = new(rank, 4, 3)
    pg.broadcast([tensor], rooted(BroadcastOptions, root(pg))).wait()
    return [tensor]


def broadcast_one(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    tensor = new(rank, 4, 3)
    pg.broadcast_one(tensor, root(pg)).wait()
    return [tensor]


def reduce(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    tensor = new(rank, 4, 3)
    pg.reduce([tensor], reducing(ReduceOptions, root=root(pg))).wait()
    return [tensor] if rank == root(pg) else []  # elsewhere undefined


def gather(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    outputs = [new(None, 4, 3) for _ in range(pg.size())] if rank == root(pg) else []
    pg.gather([outputs] if outputs else [], [new(rank, 4, 3)], rooted(GatherOptions, root(pg))).wait()
    return outputs


def scatter(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    output = new(None, 4, 3)
    inputs = [new(place, 4, 3) for place in range(pg.size())] if rank == root(pg) else []
    pg.scatter([output], [inputs] if inputs else [], rooted(ScatterOptions, root(pg))).wait()
    return [output]


def send_recv(pg: Any, rank: int, new: New) -> Sequence[Tensor]:
    if rank == 0:
        pg.send([new(5, 4, 3)], 1, 7).wait()
    if rank != 1:
        return []
    output = new(None, 4, 3)
    pg.recv([output], 0, 7).wait()
    return [output]


REDUCING: dict[str, Form] = {
    form.__name__: form
    for form in (
        allreduce,
        allreduce_coalesced,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor_coalesced,
    )
}
MOVING: dict[str, Form] = {
    form.__name__: form
    for form in (
        all_gather_single,
        allgather,
        allgather_coalesced,
        allgather_into_tensor_coalesced,
        alltoall,
        alltoall_base,
        alltoall_base_uneven,
        broadcast,
        broadcast_one,
        gather,
        scatter,
        send_recv,
    )
}
FORMS = {**REDUCING, **MOVING}
