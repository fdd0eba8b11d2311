"""Detects output tensors that share memory. A collective that writes to them has no defined result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elasticgang.torch_private import internal_overlap

_CERTAIN = {0: False, 1: True}  # torch returns a third value where it cannot decide


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of `tensor` share memory."""
    known = _CERTAIN.get(internal_overlap(tensor))
    if known is not None or not tensor.numel():
        return bool(known)
    reach = 0  # offset of the last element, over the dimensions so far
    dimensions = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, length in dimensions:
        if length > 1 and stride <= reach:
            break
        reach += (length - 1) * stride
    else:
        return False
    marked = torch.zeros(
        sum((length - 1) * stride for stride, length in dimensions) + 1, dtype=torch.bool, device="cpu"
    )
    marked.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(marked.sum()) < tensor.numel()


def check_distinct(outputs: Sequence[Tensor]) -> None:
    """Raises ValueError: two of `outputs` share memory. Each must have passed `overlaps_itself`."""
    if len(outputs) < 2:
        return
    extents = sorted((*_extent(output), index) for index, output in enumerate(outputs) if output.numel())
    highest = -1  # the index of the extent that ends last, so far
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
    """The address of the first byte, and the address after the last one."""
    start = tensor.data_ptr()
    steps = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors with overlapping extents share memory. Columns of a matrix do not."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    start = min(one.data_ptr(), other.data_ptr())
    marked = torch.zeros(max(_extent(one)[1], _extent(other)[1]) - start, dtype=torch.bool, device="cpu")
    _bytes_of(one, marked, start).fill_(True)
    return bool(_bytes_of(other, marked, start).any())


def _bytes_of(tensor: Tensor, marked: Tensor, start: int) -> Tensor:
    """The view of `marked`, one flag per byte from the address `start` on, for the bytes of `tensor`."""
    size = tensor.element_size()
    shape, strides = (*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1)
    return marked.as_strided(shape, strides, tensor.data_ptr() - start)
