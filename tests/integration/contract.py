"""What every gang must do, as plain functions, so that fake, static and elastic gangs are held to the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from elasticgang.collectives.collective import Collective
from elasticgang.gang import Gang, ReduceOperation, all_sum, broadcast_flag

SUM, MEAN = ReduceOperation.SUM, ReduceOperation.MEAN


def _filled(value: float, *shape: int) -> Tensor:
    return torch.full(shape, float(value))


def same_on_every_rank(gang: Gang) -> None:
    """Every rank does the same: defined for a fake gang too. (fairseq2's takes no MEAN, MIN or MAX; its real ones take
    no MEAN with Gloo, which has no average.)"""
    size = gang.size
    for op, expected in {
        SUM: 2.0 * size,
        MEAN: 2.0,
        ReduceOperation.PRODUCT: 2.0**size,
        ReduceOperation.MIN: 2.0,
        ReduceOperation.MAX: 2.0,
    }.items():
        tensor = _filled(2, 3)
        assert gang.all_reduce(tensor, op) is None
        assert tensor.tolist() == [expected] * 3, op
        if op is not MEAN:
            gang.all_reduce(flags := torch.tensor([True, False]), op)
            assert flags.tolist() == [True, False], op
    output = torch.empty(size, 2, 3)
    gang.all_gather(output, _filled(5, 2, 3))
    assert torch.equal(output, _filled(5, size, 2, 3))
    outputs = [torch.empty(2) for _ in range(size)]
    gang.all_gather_to_list(outputs, _filled(4, 2))
    assert all(torch.equal(tensor, _filled(4, 2)) for tensor in outputs)
    part = torch.empty(2)
    gang.reduce_scatter(part, torch.arange(size * 2.0).view(size, 2))
    assert part.tolist() == [size * 2.0 * gang.rank, size * (2.0 * gang.rank + 1)]
    outputs = [torch.empty(1) for _ in range(size)]
    gang.all_to_all(outputs, [_filled(index, 1) for index in range(size)])
    assert [tensor.item() for tensor in outputs] == [float(gang.rank)] * size
    objects: list[object] = ["a", 1]
    gang.broadcast_objects(objects, size - 1)
    assert objects == ["a", 1]
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.int64, torch.float16, torch.complex64):
        gang.all_reduce(tensor := torch.full((2, 2), 3, dtype=dtype), SUM)
        assert tensor[0, 0].item() == 3 * size, dtype
        part = torch.empty(2, dtype=dtype)
        gang.reduce_scatter(part, torch.full((size, 2), 2, dtype=dtype))
        assert part[1].item() == 2 * size, dtype
    for dtype in (torch.int16, torch.uint64, torch.float8_e4m3fn, torch.complex64, torch.bool):
        gang.all_gather(output := torch.zeros(size, 2, dtype=dtype), torch.ones(2, dtype=dtype))
        assert bool((output.view(-1).to(torch.complex64) == 1).all()), dtype
        gang.broadcast(torch.ones((), dtype=dtype), size - 1)
        cell = torch.ones(2, 2, dtype=dtype)[:1, 0]  # contiguous, whatever its stride
        gang.broadcast(cell, size - 1)
        gang.all_gather_to_list(outputs := [torch.zeros(2, 2, dtype=dtype)[:1, 0] for _ in range(size)], cell)
        assert all(torch.equal(tensor, cell) for tensor in outputs), dtype
    work = gang.all_reduce(tensor := _filled(3, 2), MEAN, async_op=True)
    assert work is not None
    assert work.wait()
    assert work.wait(), "waiting again changes nothing"
    assert tensor.tolist() == [3.0, 3.0]
    assert all_sum(gang, 2).item() == 2 * size
    assert broadcast_flag(gang, True)
    gang.barrier()


def callbacks_that_wait(gang: Gang) -> None:
    """A callback waits for another collective, whose callback waits for a third: more than Gloo has threads."""

    def total(level: int) -> float:
        work = gang.all_reduce(tensor := _filled(level, 2), SUM, async_op=True)
        assert work is not None
        future = work.get_future()
        return float(future.then(lambda _: total(level + 1) if level < 4 else tensor[0].item()).wait())

    for _ in range(3):
        assert total(1) == 4 * gang.size


def joined_parts(gang: Gang) -> None:
    """The parts of the ranks may lie one after another, as torch has it, or along a dimension of their own."""
    size = gang.size
    for shape in ((size, 2, 3), (size * 2, 3)):
        gang.all_gather(output := torch.empty(shape), _filled(5, 2, 3))
        assert torch.equal(output, _filled(5, *shape))
        source = torch.arange(size * 6.0).view(shape)
        gang.reduce_scatter(part := torch.empty(2, 3), source)
        assert torch.equal(part, size * source.view(size, 2, 3)[gang.rank])
    gang.all_gather(output := torch.empty(size), torch.tensor(4.0))
    assert output.tolist() == [4.0] * size
    gang.reduce_scatter(part := torch.empty(()), torch.arange(float(size)))
    assert part.item() == size * gang.rank


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last)


def _columns(tensor: Tensor) -> Tensor:
    """Every second one of a wider tensor."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 42).to(tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (_transposed, _channels_last, _columns, torch.clone)


def any_strides(gang: Gang) -> None:
    """Every rank gives the same elements, in a layout that differs from rank to rank; what it was given keeps its
    strides, and what lies between its elements is untouched."""
    size, rank = gang.size, gang.rank
    for turn in range(len(LAYOUTS)):
        layout = LAYOUTS[(rank + turn) % len(LAYOUTS)]
        for dtype in (torch.float32, torch.int16, torch.complex64):
            value = (torch.arange(48) + 1).view(2, 4, 3, 2).to(dtype)
            made: list[tuple[Tensor, tuple[int, ...]]] = []

            def new(
                value: Tensor,
                layout: Callable[[Tensor], Tensor] = layout,
                made: list[tuple[Tensor, tuple[int, ...]]] = made,
            ) -> Tensor:
                made.append((layout(value), layout(value).stride()))
                return made[-1][0]

            gang.all_reduce(tensor := new(value), SUM)
            assert torch.equal(tensor, value * size)
            if dtype is torch.float32:
                gang.all_reduce(tensor := new(value), MEAN)
                assert torch.equal(tensor, value)
                work = gang.all_reduce(tensor := new(value), SUM, async_op=True)
                assert work is not None
                assert work.get_future().wait()
                assert torch.equal(tensor, value * size)
            gang.broadcast(tensor := new(value), size - 1)
            assert torch.equal(tensor, value)
            gang.reduce(tensor := new(value), SUM, size - 1)
            assert rank != size - 1 or torch.equal(tensor, value * size)
            gang.all_gather(output := torch.empty(size, 2, 4, 3, 2, dtype=dtype), new(value))
            assert all(torch.equal(part, value) for part in output)
            outputs = [new(torch.zeros_like(value)) for _ in range(size)]
            gang.all_gather_to_list(outputs, new(value))
            assert all(torch.equal(part, value) for part in outputs)
            gang.reduce_scatter(part := new(torch.zeros_like(value)), new(torch.cat([value] * size)))
            assert torch.equal(part, value * size)
            outputs = [new(torch.zeros_like(value)) for _ in range(size)]
            gang.all_to_all(outputs, [new(value) for _ in range(size)])
            assert all(torch.equal(part, value) for part in outputs)
            received = [new(torch.zeros_like(value)) for _ in range(size)] if rank == 0 else None
            gang.gather(received, new(value), 0)
            assert received is None or all(torch.equal(part, value) for part in received)
            sent = [new(value) for _ in range(size)] if rank == 0 else None
            gang.scatter(part := new(value), sent, 0)
            assert torch.equal(part, value)
            for tensor, strides in made:
                assert tensor.stride() == strides
                base = tensor._base
                if layout is _columns and base is not None:
                    assert bool((base[..., 1::2] == 42).all())


def any_strides_in_a_process_group(pg: dist.ProcessGroup, rank: int) -> None:
    """Of a gang's own group. (Gloo's gives wrong results where layouts differ, or have gaps.)"""
    value, size = torch.arange(48.0).view(2, 4, 3, 2), pg.size()
    for turn in range(len(LAYOUTS)):
        layout = LAYOUTS[(rank + turn) % len(LAYOUTS)]
        dist.all_reduce(tensor := layout(value), group=pg)
        assert torch.equal(tensor, value * size)
        dist.broadcast(tensor := layout(value), group=pg, group_src=size - 1)
        assert torch.equal(tensor, value)
        dist.all_gather(outputs := [layout(torch.zeros_like(value)) for _ in range(size)], layout(value), group=pg)
        assert all(torch.equal(part, value) for part in outputs)
        dist.reduce_scatter_single(part := layout(value), layout(torch.cat([value] * size)), group=pg)
        assert torch.equal(part, value * size)


def strides_of_messages(gang: Gang) -> None:
    """For gangs of real processes."""
    value = torch.arange(48.0).view(2, 4, 3, 2)
    for index, layout in enumerate(LAYOUTS):
        if gang.rank == 0:
            gang.send(layout(value), 1, tag=5)
        if gang.rank == 1:
            gang.recv(tensor := LAYOUTS[index - 1](torch.zeros_like(value)), 0, tag=5)
            assert torch.equal(tensor, value)


def one_to_another(gang: Gang) -> None:
    """The ranks do different things: for gangs of real processes, of two ranks at least."""
    size, rank = gang.size, gang.rank
    last, numbers = size - 1, list(range(size))
    gang.all_reduce(tensor := _filled(rank + 1, 2), MEAN)
    assert tensor.tolist() == [(size + 1) / 2] * 2
    gang.all_gather(output := torch.empty(size, 1), _filled(rank, 1))
    assert output.flatten().tolist() == numbers
    gang.broadcast(tensor := _filled(rank, 2), last)
    assert tensor.tolist() == [last, last]
    outputs = [torch.empty(index + 1) for index in numbers]
    gang.all_to_all(outputs, [_filled(10 * rank + index, rank + 1) for index in numbers])
    assert [tensor.tolist() for tensor in outputs] == [[10 * index + rank] * (index + 1) for index in numbers]
    gang.reduce(tensor := _filled(rank + 1, 2), SUM, last)
    assert rank != last or tensor.tolist() == [size * (size + 1) / 2] * 2
    received = [torch.empty(1) for _ in numbers] if rank == 1 else None
    gang.gather(received, _filled(rank, 1), 1)
    assert received is None or [tensor.item() for tensor in received] == numbers
    gang.scatter(part := torch.empty(1), [_filled(index, 1) for index in numbers] if rank == 1 else None, 1)
    assert part.item() == rank
    if rank == 0:
        gang.send(_filled(7, 2), 1, tag=3)
    if rank == 1:
        gang.recv(tensor := torch.empty(2), 0, tag=3)
        assert tensor.tolist() == [7, 7]
    if rank < 2:  # both send first
        got, sent = torch.empty(2), torch.full((3,), rank, dtype=torch.int16)
        if rank == 1:
            got, sent = torch.empty(3, dtype=torch.int16), _filled(7, 2)
        assert gang.start(Collective("messages", (got,), (sent,), messages=((1 - rank, 5), (1 - rank, 5)))).wait()
        assert got.tolist() == ([7, 7] if rank == 0 else [0, 0, 0])
    objects: list[object] = [{"rank": rank}]
    gang.broadcast_objects(objects, 1)
    assert objects == [{"rank": 1}]
    for source in (0, 1):  # GANGOBJECTS-1
        objects = ["mine"] * (1 + gang.rank)
        with pytest.raises(ValueError, match=f"has 1 to {gang.size}, and {gang.rank + 1} on rank"):
            gang.broadcast_objects(objects, source)
        assert objects == ["mine"] * (1 + gang.rank)
    objects = [lambda: None]
    error, message = (
        (Exception, "pickle|get local object") if rank == 1 else (ValueError, "could not be pickled on rank 1")
    )
    with pytest.raises(error, match=message):
        gang.broadcast_objects(objects, 1)
    assert broadcast_flag(gang, rank == 1, 1)


def refusals(gang: Gang) -> None:
    """What does not fit is refused by name, with both sides, before anything is sent; the gang stays usable."""
    size = gang.size
    good = torch.zeros(2)
    outputs = [torch.empty(2)] * size
    wrong: dict[str, Callable[[], object]] = {
        "`output_tensor` must be contiguous": lambda: gang.all_gather(torch.zeros(size, 4)[:, ::2], good),
        "tensor.*layout": lambda: gang.all_reduce(torch.zeros(2).to_sparse(), SUM),
        "`tensor` must not share memory among": lambda: gang.all_reduce(torch.zeros(1).expand(2), SUM),
        "`tensor` must not share memory": lambda: gang.broadcast(torch.zeros(3).as_strided((2, 2), (1, 1))),
        "`output_tensor` must not share memory": lambda: gang.scatter(torch.zeros(1).expand(2), None, 0),
        "device": lambda: gang.all_reduce(torch.zeros(2, device="meta"), SUM),
        "floating-point": lambda: gang.all_reduce(torch.zeros(2, dtype=torch.int64), MEAN),
        rf"shape \[{size}, 2\], but has \[{size + 1}, 2\]": lambda: gang.all_gather(torch.empty(size + 1, 2), good),
        "dtype": lambda: gang.all_gather(torch.empty(size, 2, dtype=torch.int64), good),
        "each of the": lambda: gang.all_gather_to_list([*outputs, good], good),
        f"source_rank.*{size}": lambda: gang.broadcast(good, size),
        "source_rank.*-1": lambda: gang.broadcast_objects([1], -1),
        "input_tensor": lambda: gang.reduce_scatter(good, torch.zeros(2 * size + 1)),
        r"`input_tensors\[0\]` must be a tensor": lambda: gang.all_to_all(outputs, [1] * size),  # type: ignore[list-item]
        "`output_tensors` must be a list": lambda: gang.all_gather_to_list(None, good),  # type: ignore[arg-type]
        r"input_tensors": lambda: gang.all_to_all(outputs, [good] * (size + 1)),
        "destination_rank": lambda: gang.reduce(good, SUM, size),
        "another rank": lambda: gang.send(good, gang.rank),
        "source_rank.*0.0": lambda: gang.broadcast(good, 0.0),  # type: ignore[arg-type]
        "`op` must be a ReduceOperation": lambda: gang.all_reduce(good, "sum"),  # type: ignore[call-overload]
        "`op`.*RedOpType": lambda: gang.all_reduce(good, dist.ReduceOp.SUM),  # type: ignore[call-overload]
        "must be a tensor": lambda: gang.all_reduce([1.0], SUM),  # type: ignore[call-overload]
        "resolve_neg": lambda: gang.all_reduce(torch.zeros(2, dtype=torch.complex64).conj().imag, SUM),
        "conjugate.*resolve_conj": lambda: gang.all_reduce(torch.zeros(2, dtype=torch.complex64).conj(), SUM),
        "by sum needs a dtype": lambda: gang.all_reduce(torch.zeros(2).to(torch.float8_e4m3fn), SUM),
        "by min needs a dtype": lambda: gang.all_reduce(torch.zeros(2, dtype=torch.complex64), ReduceOperation.MIN),
        "must be a list": lambda: gang.broadcast_objects((1, 2)),  # type: ignore[arg-type]
        "because the root is": lambda: gang.gather(None if gang.rank == 0 else outputs, good, 0),
        "root": lambda: gang.scatter(good, None if gang.rank == 0 else outputs, 0),
        "`output_tensors` must have one": lambda: gang.gather([], good, gang.rank),
        "`input_tensors` must have one": lambda: gang.scatter(good, [], gang.rank),
    }
    if size > 1:
        wrong["outputs of one call must not share memory"] = lambda: gang.all_gather_to_list(outputs, good)
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()


def sub_gangs(gang: Gang) -> None:
    """Gangs from any gang, not only from the first; what is no set of its ranks is refused, the size itself too, which
    fairseq2 lets pass."""
    size = gang.size
    for ranks in ([], [0, 0], [size], [-1], 1, "01", [0.0], iter([0])):
        with pytest.raises(ValueError, match="ranks"):
            gang.create_gang(ranks)  # type: ignore[arg-type]
    chosen = list(reversed(range(1, size)))
    inner = gang.create_gang(chosen)
    assert (inner is None) == (gang.rank == 0)
    if inner is not None:
        assert (inner.rank, inner.size) == (gang.rank - 1, size - 1)
        pg = inner.as_process_group()
        assert (pg.rank(), pg.size()) == (inner.rank, inner.size)
        same_in_a_process_group(pg)
        same_on_every_rank(inner)
        innermost = inner.create_gang([0])
        assert (innermost is None) == (inner.rank != 0)


def same_in_a_process_group(pg: dist.ProcessGroup) -> None:
    """What a gang gives for torch's own calls; every rank does the same."""
    size = pg.size()
    dist.all_reduce(tensor := _filled(2, 3), group=pg)
    assert tensor.tolist() == [2.0 * size] * 3
    dist.all_reduce(tensor := _filled(2, 2), dist.ReduceOp.AVG, group=pg)
    assert tensor.tolist() == [2, 2]
    work = dist.all_reduce(tensor := _filled(3, 1), group=pg, async_op=True)
    assert work is not None
    assert [t.item() for t in work.get_future().wait()] == [3 * size]
    dist.all_gather_single(output := torch.empty(2 * size), _filled(5, 2), group=pg)
    assert output.tolist() == [5.0] * (2 * size)
    dist.reduce_scatter_single(part := torch.empty(2), _filled(1, size, 2).flatten(), group=pg)
    assert part.tolist() == [size, size]
    dist.all_to_all_single(output := torch.empty(size), _filled(4, size), group=pg)
    assert output.tolist() == [4.0] * size
    dist.broadcast(tensor := _filled(6, 1), group=pg, group_src=size - 1)
    assert tensor.item() == 6
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"a": 1}, group=pg)
    assert objects == [{"a": 1}] * size
    gathered = funcol.all_gather_single(_filled(7, 2), 0, pg)
    assert gathered.tolist() == [7.0] * (2 * size)
    assert funcol.all_reduce(_filled(2, 2), "sum", pg).tolist() == [2.0 * size] * 2
    dist.barrier(group=pg)
