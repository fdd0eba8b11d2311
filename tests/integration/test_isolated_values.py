"""What isolated groups compute, against in-process Gloo: every collective, dtype, and kind of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torchft.process_group as torchft
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import ReduceOp

from elasticgang.comm.in_process import ProcessGroupGloo
from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
from tests.exhaustive import always_without
from tests.integration.forms import FORMS, MOVING, REDUCING, Form, reducing, rooted
from tests.integration.rings import Ring, bits

SIZE = 3
# Gloo cannot reduce int16, nor move it or complex numbers in most calls: the oracle runs on another dtype.
DTYPES = (
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
OPERATIONS = {
    "product": ReduceOp.PRODUCT, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "avg": ReduceOp.AVG,
    "band": ReduceOp.BAND, "bor": ReduceOp.BOR, "bxor": ReduceOp.BXOR,
}  # fmt: skip
BIG = 600_000  # elements: of a size whose memory is shared, not copied


@pytest.fixture(scope="module")
def ours(store: str) -> Iterator[Ring]:
    # glibc raises the size from which on memory is mapped, and can be shared, as such memory is freed.
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    ring = Ring(lambda: ProcessGroupIsolatedGloo(30.0), SIZE, store)
    yield ring
    ring.close()


@pytest.fixture(scope="module")
def gloo(store: str) -> Iterator[Ring]:
    ring = Ring(lambda: ProcessGroupGloo(30.0), SIZE, store)
    yield ring
    ring.close()


@pytest.fixture(autouse=True)
def unharmed(ours: Ring) -> Iterator[None]:
    """No test here ends a configuration: what is refused is refused before anything is sent."""
    yield
    assert [pg.errored() for pg in ours.groups] == [None] * SIZE
    assert ours.sums() == [3.0] * SIZE


def values(seed: int, shape: Sequence[int]) -> Tensor:
    """Small whole numbers, which every dtype can add up."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(0, 5, tuple(shape), generator=generator)


def plain(dtype: torch.dtype) -> Callable[..., Tensor]:
    """`new` of the forms, for tensors that are nothing special."""

    def new(seed: int | None, *shape: int) -> Tensor:
        if seed is None:
            return torch.full(shape, 99).to(dtype)
        if dtype.is_complex:
            return torch.complex(values(seed, shape).float(), values(seed + 50, shape).float()).to(dtype)
        return (values(seed, shape) % 2 if dtype is torch.bool else values(seed, shape)).to(dtype)

    return new


def as_gloo_has_it(dtype: torch.dtype, reduces: bool) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """To a dtype of which Gloo has every call, and back."""
    if dtype is torch.int16:
        return (lambda tensor: tensor.to(torch.int32)), (lambda tensor: tensor.to(torch.int16))
    if dtype.is_complex and not reduces:
        return torch.view_as_real, torch.view_as_complex
    return (lambda tensor: tensor), (lambda tensor: tensor)


def expected(gloo: Ring, form: Form, dtype: torch.dtype) -> list[list[bytes]]:
    there, back = as_gloo_has_it(dtype, form not in MOVING.values())
    new = plain(dtype)
    found = gloo.each(lambda rank: form(gloo[rank], rank, lambda *args: there(new(*args)).contiguous()))
    return [[bits(back(tensor)) for tensor in tensors] for tensors in found]


def run(ring: Ring, form: Form, new: Callable[..., Tensor]) -> list[list[bytes]]:
    return [[bits(tensor) for tensor in tensors] for tensors in ring.each(lambda rank: form(ring[rank], rank, new))]


def only(tensor: Tensor) -> Any:
    """The value that all elements have."""
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


# -- dtypes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(FORMS))
def test_every_collective_of_every_dtype(name: str, dtype: torch.dtype, ours: Ring, gloo: Ring) -> None:
    found = run(ours, FORMS[name], plain(dtype))
    assert found == expected(gloo, FORMS[name], dtype)
    assert any(found)


def reduced(pg: Any, tensor: Tensor, op: Any) -> Tensor:
    pg.allreduce([tensor], reducing(AllreduceOptions, op)).wait()
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_every_reduction_of_every_dtype_or_a_refusal(name: str, dtype: torch.dtype, ours: Ring, gloo: Ring) -> None:
    op = OPERATIONS[name]
    is_refused = (
        (dtype.is_complex and name != "avg")
        or (name == "avg" and not (dtype.is_floating_point or dtype.is_complex))
        or (name.startswith("b") and dtype.is_floating_point)
    )

    def form(pg: Any, rank: int, new: Any) -> list[Tensor]:
        return [reduced(pg, new(rank, 50), op)]

    if is_refused:
        for rank in range(SIZE):
            with pytest.raises(ValueError, match=r"dtype|integers"):
                form(ours[rank], rank, plain(dtype))
    else:
        assert run(ours, form, plain(dtype)) == expected(gloo, form, dtype)


# -- memory


def transposed(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    base = torch.zeros(tuple(reversed(shape)), dtype=dtype)
    return base.permute(*reversed(range(len(shape)))), base


def sliced(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    size = torch.Size(shape).numel()
    base = torch.zeros(size + 7, dtype=dtype)
    return base[3 : 3 + size].view(tuple(shape)), base


def strided(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    base = torch.zeros((*shape, 2), dtype=dtype)
    return base[..., 1], base


def parameter(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tensor = nn.Parameter(torch.zeros(tuple(shape), dtype=dtype))
    return tensor, tensor


def shared(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tensor = torch.zeros(tuple(shape), dtype=dtype)
    return tensor.share_memory_(), tensor  # type: ignore[no-untyped-call]


def from_numpy(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory that torch did not allocate."""
    tensor = torch.from_numpy(torch.zeros(tuple(shape), dtype=dtype).numpy().copy())
    return tensor, tensor


LAYOUTS = {layout.__name__: layout for layout in (transposed, sliced, strided, parameter, shared, from_numpy)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", list(FORMS))
def test_every_collective_in_every_kind_of_memory(
    name: str, layout: str, dtype: torch.dtype, ours: Ring, gloo: Ring
) -> None:
    """And the tensor stays what it was, and nothing beside it is touched."""
    made: list[tuple[Tensor, Tensor, Any, bytes]] = []

    def described(tensor: Tensor) -> Any:
        return tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.requires_grad, tensor.is_leaf

    def new(seed: int | None, *shape: int) -> Tensor:
        tensor, base = LAYOUTS[layout](shape, dtype)
        with torch.no_grad():
            base.fill_(42)
            tensor.copy_(plain(dtype)(seed, *shape))
        made.append((tensor, base, described(tensor), bits(without(tensor, base))))
        return tensor

    assert run(ours, FORMS[name], new) == expected(gloo, FORMS[name], dtype)
    for tensor, base, before, beside in made:
        assert described(tensor) == before
        assert bits(without(tensor, base)) == beside


def without(tensor: Tensor, base: Tensor) -> Tensor:
    """`base` with zeros where `tensor` lies."""
    rest = base.detach().clone()
    rest.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
    return rest


@pytest.mark.parametrize("name", list(FORMS))
def test_every_collective_of_no_elements(name: str, ours: Ring) -> None:
    def new(seed: int | None, *shape: int) -> Tensor:
        return torch.empty(*shape[:-1], 0) if len(shape) > 1 else torch.empty(0)

    assert all(not any(outputs) for outputs in run(ours, FORMS[name], new))


# They make works that others make too, which run without ELASTICGANG_EXHAUSTIVE=1.
LIKE_OTHERS = {
    *("all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce_coalesced"),
    *("alltoall_base_uneven", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
}


@pytest.mark.parametrize("name", always_without(FORMS, LIKE_OTHERS))
def test_every_collective_of_tensors_that_are_large(name: str, ours: Ring, gloo: Ring) -> None:
    """Whose memory is shared with the comm process; at the second use it has been already."""

    def large(*args: Any) -> Tensor:
        seed, first, *rest = args
        return plain(torch.float32)(seed, first, BIG // 4, *rest[1:])

    kept: dict[Any, Tensor] = {}

    def again(rank: int) -> Callable[..., Tensor]:
        count = iter(range(100))

        def new(*args: Any) -> Tensor:
            tensor = kept.setdefault((rank, next(count)), large(*args))
            return tensor.copy_(large(*args))

        return new

    wanted = run(gloo, FORMS[name], large)
    for _ in range(2):
        found = ours.each(lambda rank: FORMS[name](ours[rank], rank, again(rank)))
        assert [[bits(tensor) for tensor in tensors] for tensors in found] == wanted


@pytest.mark.parametrize("elements", [6, BIG])
def test_what_is_gathered_into_is_what_is_gathered_from(elements: int, ours: Ring) -> None:
    """In place, as FSDP does."""

    def gather(rank: int) -> list[Any]:
        output = torch.zeros(SIZE, elements)
        output[rank] = rank + 1
        ours[rank]._allgather_base(output.view(-1), output[rank], AllgatherOptions()).wait()
        return [only(output[place]) for place in range(SIZE)]

    for _ in range(2):
        assert ours.each(gather) == [[1.0, 2.0, 3.0]] * SIZE


@pytest.mark.parametrize("elements", [6, BIG])
def test_what_is_scattered_into_is_a_part_of_what_is_reduced(elements: int, ours: Ring) -> None:
    def reduce(rank: int) -> Any:
        source = torch.full((SIZE, elements), float(rank + 1))
        ours[rank]._reduce_scatter_base(source[rank], source.view(-1), reducing(ReduceScatterOptions)).wait()
        return only(source[rank])

    for _ in range(2):
        assert ours.each(reduce) == [6.0] * SIZE


def test_parts_of_a_reduce_scatter_may_differ_in_size(ours: Ring) -> None:
    def scatter(rank: int) -> list[float]:
        inputs = [torch.full((place + 1,), place + 1.0) for place in range(SIZE)]
        output = torch.empty(rank + 1)
        ours[rank].reduce_scatter([output], [inputs], reducing(ReduceScatterOptions)).wait()
        return output.tolist()

    assert ours.each(scatter) == [[(rank + 1.0) * SIZE] * (rank + 1) for rank in range(SIZE)]


@pytest.mark.parametrize("elements", [6, BIG])
@pytest.mark.parametrize("name", ["allgather", "reduce_scatter", "alltoall", "alltoall_base", "gather", "scatter"])
def test_an_output_that_is_an_input(name: str, elements: int, ours: Ring) -> None:
    """This rank's own place in the lists, or all of them: as if the inputs were copies."""

    def perform(rank: int, in_place: bool) -> list[Any]:
        pg = ours[rank]
        whole = torch.arange(1.0, SIZE + 1).repeat_interleave(elements) * (rank + 1)
        parts = list(whole.view(SIZE, elements))
        inputs = parts if in_place else list(whole.clone().view(SIZE, elements))
        if name == "allgather":
            pg.allgather([parts], [inputs[rank]], AllgatherOptions()).wait()
        elif name == "reduce_scatter":
            pg.reduce_scatter([parts[rank]], [inputs], reducing(ReduceScatterOptions)).wait()
            return [only(parts[rank])]
        elif name == "alltoall":
            pg.alltoall(parts, inputs, AllToAllOptions()).wait()
        elif name == "alltoall_base":
            flat = whole if in_place else whole.clone()
            pg.alltoall_base(whole, flat, [], [], AllToAllOptions()).wait()
        elif name == "gather":
            pg.gather([parts] if rank == 1 else [], [inputs[rank]], rooted(GatherOptions, 1)).wait()
        else:
            pg.scatter([parts[1]], [inputs] if rank == 1 else [], rooted(ScatterOptions, 1)).wait()
        return [only(part) for part in parts]

    wanted = ours.each(lambda rank: perform(rank, in_place=False))
    for _ in range(2):
        assert ours.each(lambda rank: perform(rank, in_place=True)) == wanted


# CALL-2
@pytest.mark.parametrize("elements", [6, BIG])
def test_outputs_that_share_memory_are_refused(elements: int, ours: Ring) -> None:
    tensor = torch.ones(elements)
    matrix = torch.ones(elements, SIZE)
    for pair in ([tensor, tensor], [tensor[1:], tensor[:-1]], [matrix[:, 1], matrix[2]], [tensor[::2], tensor[2:3]]):
        with pytest.raises(ValueError, match="outputs of one call must not share memory"):
            ours[0].allreduce_coalesced(pair, reducing(AllreduceOptions))
    with pytest.raises(ValueError, match="outputs of one call must not share memory"):
        ours[0].allgather([[tensor] * SIZE], [torch.ones(elements)], AllgatherOptions())


@pytest.mark.parametrize("elements", [6, BIG])
def test_outputs_that_lie_between_each_others_elements_are_written(elements: int, ours: Ring) -> None:
    def gather(rank: int) -> Any:
        matrix = torch.zeros(elements, SIZE)
        source = torch.full((elements,), rank + 1.0)
        ours[rank].allgather([list(matrix.unbind(1))], [source], AllgatherOptions()).wait()
        return [only(column) for column in matrix.unbind(1)]

    assert ours.each(gather) == [[1.0, 2.0, 3.0]] * SIZE


def test_an_input_may_share_memory_among_its_elements(ours: Ring) -> None:
    def gather(rank: int) -> list[list[float]]:
        outputs = [torch.zeros(4) for _ in range(SIZE)]
        ours[rank].allgather([outputs], [torch.tensor([rank + 1.0]).expand(4)], AllgatherOptions()).wait()
        return [output.tolist() for output in outputs]

    assert ours.each(gather) == [[[1.0] * 4, [2.0] * 4, [3.0] * 4]] * SIZE


def test_an_output_that_shares_memory_among_its_elements_is_refused(ours: Ring) -> None:
    shares = torch.ones(1).expand(4)
    with pytest.raises(ValueError, match="must not share memory"):
        ours[0].allreduce([shares], AllreduceOptions())
    with pytest.raises(ValueError, match="must not share memory"):
        ours[0].allgather([[torch.zeros(4), torch.zeros(4), shares]], [torch.ones(4)], AllgatherOptions())


@pytest.mark.parametrize("elements", [10, BIG])
def test_a_conjugate_is_moved_and_reduced_as_what_it_is(elements: int, ours: Ring) -> None:
    def both(rank: int) -> tuple[Any, Any]:
        tensor = torch.full((elements,), complex(1, rank + 1)).conj()
        outputs = [torch.zeros(elements, dtype=torch.complex64) for _ in range(SIZE)]
        ours[rank].allgather([outputs], [tensor], AllgatherOptions()).wait()
        total = torch.full((elements,), complex(1, rank + 1)).conj()
        ours[rank].allreduce([total], AllreduceOptions()).wait()
        return only(outputs[2]), only(total)

    assert ours.each(both) == [(complex(1, -3), complex(3, -6))] * SIZE


@pytest.mark.parametrize("elements", [10, BIG])
def test_a_negative_is_moved_and_reduced_as_what_it_is(elements: int, ours: Ring) -> None:
    def both(rank: int) -> tuple[Any, Any]:
        tensor = torch._neg_view(torch.full((elements,), rank + 1.0))
        outputs = [torch.zeros(elements) for _ in range(SIZE)]
        ours[rank].allgather([outputs], [tensor], AllgatherOptions()).wait()
        ours[rank].allreduce([tensor], AllreduceOptions()).wait()
        return only(outputs[2]), only(tensor)

    assert ours.each(both) == [(-3.0, -6.0)] * SIZE


@pytest.mark.parametrize("elements", [10, BIG])
@pytest.mark.parametrize("ending", ["inside", "outside", "future"])
def test_tensors_of_inference_mode(ending: str, elements: int, ours: Ring) -> None:
    """Whoever writes their results; and others use what was made for them afterwards."""

    def reduce(rank: int) -> Any:
        with torch.inference_mode():
            tensor = torch.ones(elements)
            work = ours[rank].allreduce([tensor], reducing(AllreduceOptions, ReduceOp.AVG))
            if ending == "inside":
                work.wait()
        if ending == "outside":
            work.wait()
        elif ending == "future":
            work.get_future().wait()
        assert tensor.is_inference()
        return only(tensor)

    assert ours.each(reduce) == [1.0] * SIZE
    for _ in range(4):
        ours.each(lambda rank: reduced(ours[rank], torch.ones(elements), ReduceOp.SUM))


def test_a_gradient_is_not_tracked_through_a_collective(ours: Ring) -> None:
    def reduce(rank: int) -> tuple[bool, list[float]]:
        leaf = torch.ones(3, requires_grad=True)
        tensor = leaf * 2
        ours[rank].allreduce([tensor], AllreduceOptions()).wait()
        torch.autograd.backward(tensor.sum())
        assert leaf.grad is not None
        return tensor.requires_grad, leaf.grad.tolist()

    assert ours.each(reduce) == [(True, [2.0] * 3)] * SIZE


def test_a_tensor_that_is_not_dense_is_refused(ours: Ring) -> None:
    for tensor in (torch.ones(3).to_sparse(), torch.ones(3, device="meta")):
        with pytest.raises(ValueError, match="dense"):
            ours[0].allreduce([tensor], AllreduceOptions())
        with pytest.raises(ValueError, match="dense"):
            ours[0].send([tensor], 1, 0)


# -- in process


@pytest.mark.parametrize("name", list(REDUCING) + list(MOVING))
def test_the_in_process_group_has_every_collective_too(name: str, gloo: Ring, store: str) -> None:
    """Of torchft's, the oracle of the oracle, some raise."""
    ring = Ring(lambda: torchft.ProcessGroupGloo(torchft.timedelta(seconds=30)), SIZE, store)
    try:
        wanted = ring.each(lambda rank: FORMS[name](ring[rank], rank, plain(torch.float32)))
    except (RuntimeError, NotImplementedError, AttributeError):
        return
    finally:
        ring.close()
    assert run(gloo, FORMS[name], plain(torch.float32)) == [[bits(tensor) for tensor in tensors] for tensors in wanted]


@pytest.mark.parametrize("root", [-1, SIZE])
def test_a_root_outside_the_group_is_refused(root: int, ours: Ring) -> None:
    with pytest.raises(ValueError, match=rf"less than the group's size \({SIZE}\), but is {root}"):
        ours[0].broadcast([torch.ones(1)], rooted(BroadcastOptions, root))
