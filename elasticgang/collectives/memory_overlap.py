"""Whether tensors that a call writes to lie over one another: no result is right for it then."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elasticgang.torch_private import internal_overlap

_CERTAIN = {0: False, 1: True}  # torch does not find out for all


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of `tensor` share memory."""
    known = _CERTAIN.get(internal_overlap(tensor))
    if known is not None or not tensor.numel():
        return bool(known)
    reach = 0  # from the first element to the last one, along the dimensions so far
    dimensions = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, length in dimensions:
        if length > 1 and stride <= reach:
            break
        reach += (length - 1) * stride
    else:
        return False
    marked = torch.zeros(sum((length - 1) * stride for stride, length in dimensions) + 1, dtype=torch.bool)
    marked.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(marked.sum()) < tensor.numel()


def check_distinct(outputs: Sequence[Tensor]) -> None:
    """Raise ValueError when two of `outputs`, each of which shares no memory among its own elements, share some."""
    if len(outputs) < 2:
        return
    extents = sorted((*_extent(output), index) for index, output in enumerate(outputs) if output.numel())
    highest = -1  # of the tensors so far, the one that ends last
    for place, (first, _, index) in enumerate(extents):
        if highest >= 0 and first < extents[highest][1]:
            for _, last, other in extents[:place]:
                if first < last and _overlap(outputs[other], outputs[index]):
                    raise ValueError(
                        f"outputs of one call must not share memory, but those of the shapes "
                        f"{list(outputs[other].shape)} and {list(outputs[index].shape)} do; use a copy of one."
                    )
        if highest < 0 or extents[place][1] > extents[highest][1]:
            highest = place


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of its first byte, and after its last one."""
    start = tensor.data_ptr()
    steps = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Of two whose extents overlap. Columns of a matrix do so, and share nothing."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    start = min(one.data_ptr(), other.data_ptr())
    marked = torch.zeros(max(_extent(one)[1], _extent(other)[1]) - start, dtype=torch.bool)
    _bytes_of(one, marked, start).fill_(True)
    return bool(_bytes_of(other, marked, start).any())


def _bytes_of(tensor: Tensor, marked: Tensor, start: int) -> Tensor:
    """Where `tensor` lies in `marked`, which begins at the address `start`."""
    size = tensor.element_size()
    shape, strides = (*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1)
    return marked.as_strided(shape, strides, tensor.data_ptr() - start)
