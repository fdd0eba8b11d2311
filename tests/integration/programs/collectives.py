"""Collectives of `torch.distributed`, of tensors and of objects, and the functional ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.nn import functional as differentiable

from tests.integration.programs.catalog import Values, program

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool,
)  # fmt: skip


def _mine(*shape: int) -> Tensor:
    """Other numbers on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(*shape, generator=generator)


@program(any_size=True)
def all_reduce(group: dist.ProcessGroup | None = None) -> Values:
    found = {}
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        dist.all_reduce(tensor := _mine(5, 3), op, group=group)
        found[str(op)] = tensor
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        dist.all_reduce(tensor := torch.arange(8) * (dist.get_rank() + 3), op, group=group)
        found[str(op)] = tensor
    return found


@program(beyond_gloo=True)
def all_gather_into_a_stack() -> Values:
    dist.all_gather_single(stacked := torch.empty(dist.get_world_size(), 2, 3), _mine(2, 3))
    dist.all_gather(outputs := [torch.empty(2, 3) for _ in range(dist.get_world_size())], _mine(2, 3))
    assert torch.equal(stacked, torch.stack(outputs))
    return {}


@program(beyond_gloo=True)
def all_to_all_of_uneven_tensors() -> Values:
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((to + 1,), float(10 * rank + to)) for to in range(size)])
    assert [output.tolist() for output in outputs] == [[10.0 * source + rank] * (rank + 1) for source in range(size)]
    return {}


@program()
def average() -> Values:
    dist.all_reduce(tensor := _mine(4), ReduceOp.AVG)
    return {"mean": tensor}


@program()
def dtypes_are_kept() -> Values:
    found: Values = {}
    for dtype in DTYPES:
        mine = (torch.arange(6) % (dist.get_rank() + 2)).to(dtype)
        dist.all_gather(outputs := [torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)
        dist.broadcast(sent := mine.clone(), 1)
        found[str(dtype)] = {"gathered": outputs, "sent": sent}
        if dtype is not torch.bool:  # which Gloo adds up as bytes
            dist.all_reduce(reduced := mine.clone())
            found[str(dtype)]["sum"] = reduced
    return found


@program()
def maximum_of_bools() -> Values:
    dist.all_reduce(tensor := torch.tensor([True, False, dist.get_rank() == 1]), ReduceOp.MAX)
    return {"any": tensor}


@program(beyond_gloo=True)
def sum_of_int16() -> Values:
    dist.all_reduce(tensor := torch.ones(3, dtype=torch.int16))
    assert tensor.tolist() == [dist.get_world_size()] * 3
    assert tensor.dtype is torch.int16
    return {}


@program()
def shapes_without_elements_or_dimensions() -> Values:
    dist.all_reduce(scalar := torch.tensor(float(dist.get_rank())))
    dist.all_reduce(empty := torch.empty(0, 3))
    dist.broadcast(large := _mine(300, 1000), 2)
    return {"scalar": scalar, "empty": empty, "large": large}


@program(any_size=True)
def rooted_collectives(group: dist.ProcessGroup | None = None) -> Values:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.reduce(reduced := _mine(4), 1, group=group)
    gathered = [torch.empty(3) for _ in range(size)] if rank == 2 else None
    dist.gather(_mine(3), gathered, dst=2, group=group)
    parts = [torch.full((2,), float(part)) for part in range(size)] if rank == 1 else None
    dist.scatter(scattered := torch.empty(2), parts, src=1, group=group)
    return {"reduced": reduced if rank == 1 else None, "gathered": gathered, "scattered": scattered}


@program(any_size=True)
def gathers_and_scatters(group: dist.ProcessGroup | None = None) -> Values:
    size = dist.get_world_size()
    dist.all_gather(outputs := [torch.empty(2, 2) for _ in range(size)], _mine(2, 2), group=group)
    dist.all_gather_single(joined := torch.empty(2 * size, 2), _mine(2, 2), group=group)
    dist.reduce_scatter_single(part := torch.empty(2, 3), _mine(2 * size, 3), group=group)
    dist.reduce_scatter(listed := torch.empty(3), list(_mine(size, 3).unbind()), group=group)
    return {"outputs": outputs, "joined": joined, "part": part, "listed": listed}


@program(any_size=True)
def methods_of_the_group_by_keyword() -> Values:
    group: Any = dist.group.WORLD
    group.allreduce(tensors=[summed := _mine(3)]).wait()
    group.allreduce(tensor=(largest := _mine(3)), op=ReduceOp.MAX).wait()
    group.broadcast(tensor=(sent := _mine(3)), root=1).wait()
    group.allgather(output_tensors=(outputs := [torch.empty(3) for _ in range(group.size())]), input_tensor=sent).wait()
    group.reduce(tensor=(reduced := _mine(3)), root=1, op=ReduceOp.SUM).wait()
    group.barrier(timeout=timedelta(seconds=20)).wait()
    mine = reduced if dist.get_rank() == 1 else None
    return {"summed": summed, "largest": largest, "sent": sent, "outputs": outputs, "reduced": mine}


@program(rtol=1e-6, any_size=True)
def names_that_torch_is_to_drop() -> Values:
    size = dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_into_tensor(gathered := torch.empty(2 * size), _mine(2))
        dist.reduce_scatter_tensor(scattered := torch.empty(2), _mine(2 * size))
        dist.all_reduce_coalesced(reduced := [_mine(2), _mine(3)])
        dist.all_gather_coalesced(lists := [[torch.empty(2), torch.empty(3)] for _ in range(size)], reduced)
    return {"gathered": gathered, "scattered": scattered, "reduced": reduced, "lists": lists}


@program(any_size=True)
def all_to_all() -> Values:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_to_all_single(even := torch.empty(2 * size), torch.arange(2.0 * size) + 100 * rank)
    sent, received = [rank + to for to in range(size)], [rank + source for source in range(size)]
    dist.all_to_all_single(
        uneven := torch.empty(sum(received), 2), torch.full((sum(sent), 2), float(rank)), received, sent
    )
    outputs = [torch.empty(2) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((2,), float(10 * rank + to)) for to in range(size)])
    return {"even": even, "uneven": uneven, "outputs": outputs}


@program(any_size=True)
def ragged_gather_by_padding() -> Values:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(float(rank + 1))
    dist.all_gather(lengths := [torch.empty(1, dtype=torch.long) for _ in range(size)], torch.tensor([len(mine)]))
    longest = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    dist.all_gather(outputs := [torch.empty(longest) for _ in range(size)], padded)
    return {"ragged": [output[: int(length)] for output, length in zip(outputs, lengths, strict=True)]}


@program(rtol=1e-6)
def non_contiguous_tensors() -> Values:
    dist.all_reduce(transposed := _mine(3, 4).t())
    image = _mine(2, 3, 4, 4).to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    dist.broadcast(image, 2)
    return {"transposed": transposed, "image": image, "strides": image.stride()}


@program()
def asynchronous_works() -> Values:
    works: list[Any] = []
    tensors = [_mine(100) for _ in range(8)]
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()
    work = dist.broadcast(sent := _mine(3), 3, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    return {
        "tensors": tensors,
        "doubled": doubled.wait(),
        "sent": sent,
        "completed": [bool(work.is_completed()) for work in works],
        "waits": works[0].wait(timedelta(seconds=20)),
    }


@program()
def callback_that_waits_for_other_collectives() -> Values:
    """One after the other: Gloo itself has two threads, of which one is in the callback."""
    work: Any = dist.all_reduce(first := _mine(3), async_op=True)

    def go_on(future: Any) -> Tensor:
        second: Tensor = future.value()[0] * 2
        dist.all_reduce(second)
        dist.all_reduce(third := second + 1)
        return third

    return {"last": work.get_future().then(go_on).wait(), "first": first}


@program()
def coalesced_collectives() -> Values:
    size = dist.get_world_size()
    with _coalescing_manager():
        reduced = [_mine(3), _mine(2, 2)]
        for tensor in reduced:
            dist.all_reduce(tensor)
    gathered = [torch.empty(2 * size), torch.empty(3 * size)]
    with _coalescing_manager(async_ops=True) as manager:
        for index, output in enumerate(gathered):
            dist.all_gather_single(output, _mine(2 + index))
    manager.wait()
    scattered = [torch.empty(2), torch.empty(3)]
    with _coalescing_manager():
        for index, output in enumerate(scattered):
            dist.reduce_scatter_single(output, _mine((2 + index) * size))
    return {"reduced": reduced, "gathered": gathered, "scattered": scattered}


@program(any_size=True)
def barriers(group: dist.ProcessGroup | None = None) -> Values:
    dist.barrier(group=group)
    work = dist.barrier(async_op=True)
    assert work is not None
    return {"waited": work.wait()}


@program()
def monitored_barriers(group: dist.ProcessGroup | None = None) -> Values:
    dist.monitored_barrier(group=group, timeout=timedelta(seconds=20))
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    return {}


# -- objects


@program(any_size=True)
def gathered_objects(group: dist.ProcessGroup | None = None) -> Values:
    rank, size = dist.get_rank(), dist.get_world_size()
    everywhere: list[Any] = [None] * size
    dist.all_gather_object(everywhere, {"rank": rank, "text": "x" * 100 * rank, "tensor": _mine(2)}, group=group)
    here: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object((rank, [rank] * rank), here, dst=1, group=group)
    return {"everywhere": everywhere, "here": here}


@program(any_size=True)
def broadcast_and_scattered_objects(group: dist.ProcessGroup | None = None) -> Values:
    rank, size = dist.get_rank(), dist.get_world_size()
    objects = [f"from {rank}", {rank: None}, _mine(2)]
    dist.broadcast_object_list(objects, src=1, group=group)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [{"for": part} for part in range(size)] if rank == 2 else None, src=2, group=group)
    return {"objects": objects, "mine": mine}


# -- functional


@program(rtol=1e-6, any_size=True)
def functional_collectives() -> Values:
    size, world = dist.get_world_size(), dist.group.WORLD
    assert world is not None
    ring = [(rank + 1) % size for rank in range(size)]
    found = {
        "all_reduce": functional.all_reduce(_mine(4), "sum", world),
        "mean": functional.all_reduce(_mine(4), "avg", list(range(size))),
        "largest": functional.all_reduce(_mine(4), "max", world),
        "all_gather": functional.all_gather_tensor(_mine(2, 3), 0, world),
        "all_gather along 1": functional.all_gather_tensor(_mine(2, 3), 1, world),
        "reduce_scatter": functional.reduce_scatter_tensor(_mine(2 * size, 3), "sum", 0, world),
        "reduce_scatter along 1": functional.reduce_scatter_tensor(_mine(3, 2 * size), "sum", 1, world),
        "all_to_all": functional.all_to_all_single(_mine(2 * size), None, None, world),
        "broadcast": functional.broadcast(_mine(3), 1, world),
        "permuted": functional.permute_tensor(_mine(3), ring, world),
        "together": functional.all_reduce_coalesced([_mine(2), _mine(3)], "sum", world),
        "gathered": functional.all_gather_into_tensor_coalesced([_mine(2), _mine(3)], world),
        "scattered": functional.reduce_scatter_tensor_coalesced([_mine(size), _mine(2 * size)], "sum", [0, 0], world),
    }
    return {name: _waited(value) for name, value in found.items()}


def _waited(value: Any) -> Any:
    return [_waited(item) for item in value] if isinstance(value, list) else functional.wait_tensor(value).clone()


@program(rtol=1e-6)
def functional_collectives_on_a_mesh() -> Values:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return {
        "along a": _waited(functional.all_reduce(_mine(3), "sum", mesh["a"])),
        "along b": _waited(functional.all_gather_tensor(_mine(3), 0, (mesh, 1))),
    }


@program(rtol=1e-6)
def gradients_through_functional_collectives() -> Values:
    size, world = dist.get_world_size(), dist.group.WORLD
    assert world is not None
    gathered = functional.all_gather_tensor_autograd(one := _mine(3).requires_grad_(), 0, world)
    (gathered * torch.arange(3.0 * size)).sum().backward()
    scattered = functional.reduce_scatter_tensor_autograd(two := _mine(2 * size).requires_grad_(), "sum", 0, world)
    (scattered * (dist.get_rank() + 1)).sum().backward()
    sent = functional.all_to_all_single_autograd(
        three := _mine(2 * size).requires_grad_(), [2] * size, [2] * size, world
    )
    (sent * (dist.get_rank() + 1)).sum().backward()
    return {"gathered": one.grad, "scattered": two.grad, "sent": three.grad}


@program(rtol=1e-6)
def gradients_through_torch_distributed_nn() -> Values:
    summed = differentiable.all_reduce(one := _mine(3).requires_grad_())
    (summed * (dist.get_rank() + 1)).sum().backward()
    gathered = differentiable.all_gather(two := _mine(3).requires_grad_())
    sum((part * (index + 1)).sum() for index, part in enumerate(gathered)).backward()
    received = differentiable.broadcast(three := _mine(3).requires_grad_(), 1)
    (received * 2).sum().backward()
    return {"summed": one.grad, "gathered": two.grad, "received": three.grad}


@program(rtol=1e-6, any_size=True)
def gradients_through_exchanges_and_roots() -> Values:
    rank, size = dist.get_rank(), dist.get_world_size()
    functions: dict[str, Callable[[list[Tensor]], Any]] = {
        "exchanged": lambda parts: differentiable.all_to_all([torch.empty(2) for _ in parts], parts),
        "exchanged at once": lambda parts: differentiable.all_to_all_single(torch.empty(2 * size), torch.cat(parts)),
        "reduced and scattered": lambda parts: differentiable.reduce_scatter(torch.empty(2), parts),
        "gathered": lambda parts: differentiable.gather(torch.cat(parts), dst=1),
        "scattered": lambda parts: differentiable.scatter(parts, src=1),
        "reduced": lambda parts: differentiable.reduce(torch.cat(parts), dst=1),
    }
    found = {}
    for name, function in functions.items():
        parts = [_mine(2).requires_grad_() for _ in range(size)]
        outputs = function(parts)
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        sum((output * (rank + index + 1)).sum() for index, output in enumerate(outputs)).backward()
        found[name] = [part.grad for part in parts]
    return found
