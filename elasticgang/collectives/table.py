"""The table of collectives: the properties of each, and the function that issues it on a process group.

To add a collective, add a row to `TABLE` with the function that issues it, and a test. Gangs, the comm process, data
groups and fake gangs all read the row. The public call is a method of `Gang` (`gang/base.py`) or a function of
`torch_calls.py`.

TABLE-1  `issue` gets contiguous tensors of one supported dtype (`preparation.py`) and a process group of torch or
    torchft. It never waits.
TABLE-2  Every torchft process group has the basic collectives. `compose` builds any other one from one basic
    collective, for groups that have no others.
TABLE-3  Only rank 0 of a monitored barrier knows who is absent. It then closes its connections, and the other ranks
    fail later than it by `_RANK_0_FIRST_S`. Otherwise the report of one of them ends the step first.
TABLE-4  Several messages of one rank are issued in one group of NCCL, which performs them all at once. It would perform
    single ones one after another: two ranks that both send first would wait for each other.
"""

from __future__ import annotations

import time
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
from elasticgang.torch_private import (
    AllgatherOptions,
    all_gather_single,
    coalescing_backend,
    reduce_scatter_single,
    source_rank,
)

Step = Callable[[], None]
Issued = tuple[Any, Step | None]  # torch's work, and the step to run after it has completed
Composed = tuple[Collective, Step | None]  # the basic collective, and the step to run after it has completed

_RANK_0_FIRST_S = 0.25

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
    """One row. `compose`: the equivalent basic collective (TABLE-2). `reduces`: it computes with the elements, so the
    dtype matters; without it, `issue` gets every tensor as uint8 in the comm process. `is_in_place`: the outputs are
    the inputs. `is_message`: between two ranks. `grace_s`: additional seconds to wait after its timeout.
    """

    issue: Callable[[Any, Collective], Issued]
    compose: Callable[[Collective, int, int], Composed] | None = None
    is_basic: bool = False
    reduces: bool = False
    is_in_place: bool = False
    is_message: bool = False
    grace_s: float = 0.0


def compose(c: Collective, rank: int, size: int) -> Composed:
    """The basic collective equivalent to `c` on rank `rank` of `size` (TABLE-2); `c` itself if it has none."""
    made = TABLE[c.call].compose
    if made is None:
        return c, None
    with torch.no_grad():
        return made(c, rank, size)


def check_reduction(c: Collective, check: Callable[[str, str, torch.dtype], None] = check_gloo_dtype) -> None:
    """Raises ValueError: `c` is a reduction of a dtype that has no mean, or that the backend's `check` refuses."""
    if TABLE[c.call].reduces:
        if c.op is ReduceOperation.MEAN:
            check_mean(c.outputs[0])
        check(c.call, c.op.name.lower(), c.outputs[0].dtype)


def check_mean(tensor: Tensor) -> None:
    """Raises ValueError: `tensor` has a dtype without a mean."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"MEAN needs a floating-point or complex dtype, but the tensor's is {tensor.dtype} instead.")


def start_mean(start: Callable[[Collective], Work], c: Collective, size: int) -> Work:
    """Start MEAN over `size` ranks as a SUM and a division, which every backend supports. Raises ValueError: the dtype
    has no mean."""
    tensor = c.outputs[0]
    check_mean(tensor)

    def divide() -> None:
        with writing(tensor):
            tensor.div_(size)

    return start(replace(c, op=ReduceOperation.SUM)).then(divide)


def copy(source: Tensor, target: Tensor) -> None:
    """Copy the elements of `source`, in order, into `target`. Any thread may call it."""
    with writing(target):
        target.copy_(source.view(target.shape))


# -- issue: calls of torch's process groups


def options_of(kind: Callable[[], Any], c: Collective, **values: object) -> Any:
    """torch's options of the given `kind`. Without a timeout of its own, the call has the group's."""
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    if c.timeout_s is not None:
        options.timeout = timedelta(seconds=c.timeout_s)
    return options


def _operation(c: Collective) -> Any:
    op = c.op
    if op is ReduceOperation.SUM and c.outputs[0].dtype is torch.bool:
        op = ReduceOperation.MAX  # Gloo would add the bytes, and 2 is not a bool
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
    """With one tensor on each side, it has an equal part for each rank. Gloo has no all-to-all of lists: they are
    concatenated."""
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
    """Flat, because Gloo aborts the process if the shapes do not match."""
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
    return work, lambda: copy(torch.tensor([source_rank(work)], device="cpu").view(source.dtype), source)


def _messages(pg: Any, c: Collective) -> Issued:
    """TABLE-4."""
    backend = coalescing_backend(pg)
    if backend is None:
        return _Works(_issue_messages(pg, c)), None
    backend._start_coalescing()
    try:
        _issue_messages(backend, c)
    finally:
        work = backend._end_coalescing()
    return work, None


def single_messages(c: Collective) -> list[Collective]:
    """The sends of several messages, and then their receives; `c` itself if it is one message."""
    if c.call != "messages":
        return [c]
    num = len(c.outputs)
    received = [
        Collective("recv", (output,), (), peer=peer, tag=tag, timeout_s=c.timeout_s)
        for output, (peer, tag) in zip(c.outputs, c.messages[:num], strict=True)
    ]
    sent = [
        Collective("send", (), (source,), peer=peer, tag=tag, timeout_s=c.timeout_s)
        for source, (peer, tag) in zip(c.inputs, c.messages[num:], strict=True)
    ]
    return [*sent, *received]


def _issue_messages(pg: Any, c: Collective) -> list[Any]:
    return [TABLE[message.call].issue(pg, message)[0] for message in single_messages(c)]


class _Works:
    """Several works of torch as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *timeout: timedelta) -> None:
        for work in self._works:
            work.wait(*timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """Raises RuntimeError: Gloo's messages have no future."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


class _Barrier:
    """A work whose `wait` performs torch's monitored barrier, which blocks and returns no work."""

    def __init__(self, pg: Any, c: Collective) -> None:
        self._pg, self._collective = pg, c

    def wait(self, timeout: timedelta | None = None) -> None:
        own = self._collective.timeout_s
        given = {} if own is None else {"timeout": timedelta(seconds=own)}
        try:
            self._pg.monitored_barrier(wait_all_ranks=self._collective.wait_all_ranks, **given)
        except RuntimeError:
            if self._pg.rank() != 0:
                time.sleep(_RANK_0_FIRST_S)  # TABLE-3
            raise

    def get_future(self) -> Any:
        raise RuntimeError("a monitored barrier has no future")


# -- compose: basic collectives (TABLE-2)


def _by_all_gather(c: Collective, rank: int, size: int) -> Composed:
    """An all-gather into the parts of one output. For a gather: into tensors that only the root keeps."""
    if c.call == "gather":
        outputs = c.outputs or tuple(torch.empty_like(c.inputs[0]) for _ in range(size))
        return replace(c, call="all_gather", outputs=outputs), None
    (output,) = c.outputs
    whole = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
    parts = whole.view(-1).chunk(size) if whole.numel() else (whole,) * size
    gathered = replace(c, call="all_gather", outputs=tuple(parts), inputs=(c.inputs[0].reshape(-1),))
    return gathered, None if whole is output else lambda: copy(whole, output)


def _by_all_reduce(c: Collective, rank: int, size: int) -> Composed:
    """An all-reduce of the whole tensor. Each rank keeps its part of a reduce-scatter; only the root keeps a reduce."""
    total = torch.cat([source.reshape(-1) for source in c.inputs])
    reduced = replace(c, call="all_reduce", outputs=(total,), inputs=(total,))
    if c.call == "reduce":
        return reduced, (lambda: copy(total, c.outputs[0])) if rank == c.peer else None
    first = sum(source.numel() for source in c.inputs[:rank]) if len(c.inputs) > 1 else rank * c.outputs[0].numel()
    return reduced, lambda: copy(total[first : first + c.outputs[0].numel()], c.outputs[0])


def _by_sum(c: Collective, rank: int, size: int) -> Composed:
    total = c.inputs[0].clone()
    return replace(c, call="all_reduce", outputs=(total,), inputs=(total,)), lambda: copy(total, c.outputs[0])


def _by_broadcast(c: Collective, rank: int, size: int) -> Composed:
    """A broadcast of the parts of all ranks. Each rank keeps its own."""
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
    "messages": Kind(_messages, is_basic=True, is_message=True),
    "monitored_barrier": Kind(lambda pg, c: (_Barrier(pg, c), None), grace_s=5.0),
    "recv": Kind(_recv, is_basic=True, is_message=True),
    "recv_anysource": Kind(_recv_anysource, is_message=True),
    "reduce": Kind(_reduce, _by_all_reduce, reduces=True, is_in_place=True),
    "reduce_scatter": Kind(_reduce_scatter, _by_all_reduce, reduces=True),
    "reduce_scatter_single": Kind(_reduce_scatter_single, _by_all_reduce, reduces=True),
    "scatter": Kind(_scatter, _by_broadcast),
    "send": Kind(_send, is_basic=True, is_message=True),
}
