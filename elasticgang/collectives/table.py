"""The one table of collectives: what each is, and how a process group performs it.

A new collective is one row of `TABLE`, the function that issues it, and its test. Gangs, the comm process, data groups
and fake gangs work from the row. What users call is one function of `torch_calls.py`, or one method of `Gang`.

TABLE-1  `issue` gives contiguous tensors of one dtype that the backend takes (`preparation.py`) to a process group of
    torch or of torchft. It never waits.
TABLE-2  What is not basic is made of one basic collective by `compose`, where only basic ones are there: every torchft
    process group has those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from elasticgang.collectives.collective import BitwiseOperation, Collective, ReduceOperation, writing
from elasticgang.collectives.dtypes import check_gloo_dtype
from elasticgang.collectives.exchange import Exchange
from elasticgang.collectives.work import Work
from elasticgang.torch_private import AllgatherOptions, all_gather_single, reduce_scatter_single, source_rank

Step = Callable[[], None]
Issued = tuple[Any, Step | None]  # torch's work, and what is left to do when it has completed
Composed = tuple[Collective, Step | None]  # the basic collective, and what is left to do when it has completed

TORCH_OPERATIONS: dict[Any, Any] = {
    ReduceOperation.SUM: ReduceOp.SUM,
    ReduceOperation.MEAN: ReduceOp.AVG,
    ReduceOperation.PRODUCT: ReduceOp.PRODUCT,
    ReduceOperation.MIN: ReduceOp.MIN,
    ReduceOperation.MAX: ReduceOp.MAX,
    BitwiseOperation.BAND: ReduceOp.BAND,
    BitwiseOperation.BOR: ReduceOp.BOR,
    BitwiseOperation.BXOR: ReduceOp.BXOR,
}


@dataclass(frozen=True)
class Kind:
    """One row. `reduces`: it computes, so that the dtype matters. `is_in_place`: its inputs are its outputs.
    `is_message`: between two ranks. `grace_s`: how much longer than its timeout it is waited for.
    """

    issue: Callable[[Any, Collective], Issued]
    compose: Callable[[Collective, int, int], Composed] | None = None
    is_basic: bool = False
    reduces: bool = False
    is_in_place: bool = False
    is_message: bool = False
    grace_s: float = 0.0


def compose(c: Collective, rank: int, size: int) -> Composed:
    """`c` as a basic collective (TABLE-2), for rank `rank` of `size`; `c` itself where it cannot be one."""
    made = TABLE[c.call].compose
    if made is None:
        return c, None
    with torch.no_grad():
        return made(c, rank, size)


def check_reduction(c: Collective, check: Callable[[str, str, torch.dtype], None] = check_gloo_dtype) -> None:
    """Raise ValueError when `c` reduces, and its dtype has no mean, or is none that the backend's `check` takes."""
    if TABLE[c.call].reduces:
        if c.op is ReduceOperation.MEAN:
            check_mean(c.outputs[0])
        check(c.call, c.op.name.lower(), c.outputs[0].dtype)


def check_mean(tensor: Tensor) -> None:
    """Raise ValueError when `tensor` has no mean."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"MEAN needs a floating-point or complex dtype, but the tensor's is {tensor.dtype} instead.")


def start_mean(start: Callable[[Collective], Work], c: Collective, size: int) -> Work:
    """MEAN over `size` as SUM and a division, which every backend can do."""
    tensor = c.outputs[0]

    def divide() -> None:
        with writing(tensor):
            tensor.div_(size)

    return start(replace(c, op=ReduceOperation.SUM)).then(divide)


def copy(source: Tensor, target: Tensor) -> None:
    """The elements of `source`, in order, into `target`, by whichever thread."""
    with writing(target):
        target.copy_(source.view(target.shape))


# -- in torch's terms


def options_of(kind: Callable[[], Any], c: Collective, **values: object) -> Any:
    """A call without a timeout of its own has the group's."""
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    if c.timeout_s is not None:
        options.timeout = timedelta(seconds=c.timeout_s)
    return options


def _operation(c: Collective) -> Any:
    op = c.op
    if op is ReduceOperation.SUM and c.outputs[0].dtype is torch.bool:
        op = ReduceOperation.MAX  # Gloo adds up bytes: what is no bool any more
    return TORCH_OPERATIONS[op]


def _all_reduce(pg: Any, c: Collective) -> Issued:
    op = _operation(c)
    if len(c.outputs) > 1:
        return pg.allreduce_coalesced(list(c.outputs), options_of(AllreduceCoalescedOptions, c, reduceOp=op)), None
    return pg.allreduce([c.outputs[0]], options_of(AllreduceOptions, c, reduceOp=op)), None


def _all_gather(pg: Any, c: Collective) -> Issued:
    return pg.allgather([list(c.outputs)], [c.inputs[0]], options_of(AllgatherOptions, c)), None


def _all_gather_single(pg: Any, c: Collective) -> Issued:
    flat, source = c.outputs[0].view(-1), c.inputs[0].view(-1)
    return all_gather_single(pg, flat, source, options_of(AllgatherOptions, c)), None


def _all_to_all(pg: Any, c: Collective) -> Issued:
    """One tensor on either side is equal parts for all ranks. Lists are sent as one: Gloo has no exchange of lists."""
    options = options_of(AllToAllOptions, c)
    if len(c.outputs) == 1:
        return pg.alltoall_base(c.outputs[0], c.inputs[0], [], [], options), None
    received, sent = (torch.cat([tensor.view(-1) for tensor in part]) for part in (c.outputs, c.inputs))
    sizes, sent_sizes = ([tensor.numel() for tensor in part] for part in (c.outputs, c.inputs))

    def unpack() -> None:
        for output, part in zip(c.outputs, torch.split(received, sizes), strict=True):
            copy(part, output)

    return pg.alltoall_base(received, sent, sizes, sent_sizes, options), unpack


def _broadcast(pg: Any, c: Collective) -> Issued:
    return pg.broadcast([c.outputs[0]], options_of(BroadcastOptions, c, rootRank=c.peer)), None


def _gather(pg: Any, c: Collective) -> Issued:
    outputs = [list(c.outputs)] if c.outputs else []
    return pg.gather(outputs, [c.inputs[0]], options_of(GatherOptions, c, rootRank=c.peer)), None


def _reduce(pg: Any, c: Collective) -> Issued:
    return pg.reduce([c.outputs[0]], options_of(ReduceOptions, c, reduceOp=_operation(c), rootRank=c.peer)), None


def _reduce_scatter(pg: Any, c: Collective) -> Issued:
    options = options_of(ReduceScatterOptions, c, reduceOp=_operation(c))
    return pg.reduce_scatter([c.outputs[0]], [list(c.inputs)], options), None


def _reduce_scatter_single(pg: Any, c: Collective) -> Issued:
    """Flat: Gloo ends the process where the shapes do not multiply."""
    options = options_of(ReduceScatterOptions, c, reduceOp=_operation(c))
    flat, source = c.outputs[0].view(-1), c.inputs[0].view(-1)
    return reduce_scatter_single(pg, flat, source, options), None


def _scatter(pg: Any, c: Collective) -> Issued:
    inputs = [list(c.inputs)] if c.inputs else []
    return pg.scatter([c.outputs[0]], inputs, options_of(ScatterOptions, c, rootRank=c.peer)), None


def _send(pg: Any, c: Collective) -> Issued:
    return pg.send([c.inputs[0]], c.peer, c.tag), None


def _recv(pg: Any, c: Collective) -> Issued:
    return pg.recv([c.outputs[0]], c.peer, c.tag), None


def _recv_anysource(pg: Any, c: Collective) -> Issued:
    received, source = c.outputs
    work = pg.recv_anysource([received], c.tag)
    return work, lambda: copy(torch.tensor([source_rank(work)]).view(source.dtype), source)


class _Barrier:
    """torch gives no work for its monitored barrier: `wait` performs it."""

    def __init__(self, pg: Any, c: Collective) -> None:
        self._pg, self._collective = pg, c

    def wait(self, timeout: timedelta | None = None) -> None:
        own = self._collective.timeout_s
        given = {} if own is None else {"timeout": timedelta(seconds=own)}
        self._pg.monitored_barrier(wait_all_ranks=self._collective.wait_all_ranks, **given)

    def get_future(self) -> Any:
        raise RuntimeError("a monitored barrier has no future")


# -- in terms of basic collectives


def _by_all_gather(c: Collective, rank: int, size: int) -> Composed:
    """Into the parts of one output; or, of a gather, into tensors that only its destination keeps."""
    if c.call == "gather":
        outputs = c.outputs or tuple(torch.empty_like(c.inputs[0]) for _ in range(size))
        return replace(c, call="all_gather", outputs=outputs), None
    (output,) = c.outputs
    whole = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
    parts = whole.view(-1).chunk(size) if whole.numel() else (whole,) * size
    gathered = replace(c, call="all_gather", outputs=tuple(parts), inputs=(c.inputs[0].reshape(-1),))
    return gathered, None if whole is output else lambda: copy(whole, output)


def _by_all_reduce(c: Collective, rank: int, size: int) -> Composed:
    """All ranks reduce all of it, and keep their part of a reduce-scatter, or the destination the whole."""
    total = torch.cat([source.reshape(-1) for source in c.inputs])
    reduced = replace(c, call="all_reduce", outputs=(total,), inputs=(total,))
    if c.call == "reduce":
        return reduced, (lambda: copy(total, c.outputs[0])) if rank == c.peer else None
    return reduced, lambda: copy(total.view(size, -1)[rank], c.outputs[0])


def _by_sum(c: Collective, rank: int, size: int) -> Composed:
    total = c.inputs[0].clone()
    return replace(c, call="all_reduce", outputs=(total,), inputs=(total,)), lambda: copy(total, c.outputs[0])


def _by_broadcast(c: Collective, rank: int, size: int) -> Composed:
    """Every rank gets the parts of all."""
    parts = torch.stack(c.inputs or c.outputs * size)
    return replace(c, call="broadcast", outputs=(parts,), inputs=(parts,)), lambda: copy(parts[rank], c.outputs[0])


TABLE = {
    "all_gather": Kind(_all_gather, is_basic=True),
    "all_gather_single": Kind(_all_gather_single, _by_all_gather),
    "all_reduce": Kind(_all_reduce, is_basic=True, reduces=True, is_in_place=True),
    "all_to_all": Kind(_all_to_all, is_basic=True),
    "broadcast": Kind(_broadcast, is_basic=True, is_in_place=True),
    "exchange_sum": Kind(lambda pg, c: (Exchange(pg, c), None), _by_sum, reduces=True),
    "gather": Kind(_gather, _by_all_gather),
    "monitored_barrier": Kind(lambda pg, c: (_Barrier(pg, c), None), grace_s=5.0),
    "recv": Kind(_recv, is_basic=True, is_message=True),
    "recv_anysource": Kind(_recv_anysource, is_message=True),
    "reduce": Kind(_reduce, _by_all_reduce, reduces=True, is_in_place=True),
    "reduce_scatter": Kind(_reduce_scatter, _by_all_reduce, reduces=True),
    "reduce_scatter_single": Kind(_reduce_scatter_single, _by_all_reduce, reduces=True),
    "scatter": Kind(_scatter, _by_broadcast),
    "send": Kind(_send, is_basic=True, is_message=True),
}
