"""The arguments of torch's process-group methods: their forms, and the checks of CALL-1 and CALL-2."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from elasticgang.collectives.collective import ReduceOperation
from elasticgang.collectives.memory_overlap import overlaps_itself
from elasticgang.collectives.table import TORCH_OPERATIONS
from elasticgang.errors import NotSupportedError


def check_timeout(timeout: object) -> None:
    """Raises TypeError: `timeout` is neither a timedelta nor None."""
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"`timeout` must be a timedelta, but is {timeout!r} instead.")


def seconds(timeout: timedelta) -> float:
    """`timeout` in seconds. Raises TypeError: it is not a timedelta; or ValueError: it is not above 0."""
    check_timeout(timeout)
    if timeout <= timedelta(0):
        raise ValueError(f"`timeout` must be above 0 seconds, but is {timeout.total_seconds():g} instead.")
    return timeout.total_seconds()


def as_list(tensors: Any) -> list[Any]:
    if not isinstance(tensors, Tensor | list | tuple):
        raise ValueError(f"tensors must be a tensor or a list of them, but are {described(tensors)} instead.")
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def described(value: object) -> str:
    return f"{value!r} (of {type(value).__name__})"[:200]


def operation_of(opts: Any) -> Any:
    """The operation of an options object or a `ReduceOp`; SUM for None."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return ReduceOperation.SUM
    for operation, known in TORCH_OPERATIONS.items():
        if op == known:
            return operation
    name = repr(op) if isinstance(op, str) else getattr(op, "op", op)
    known_names = ", ".join(known.name for known in TORCH_OPERATIONS.values())
    raise NotSupportedError(f"A reduction by {name} is not supported; use one of {known_names}.")


def root_of(opts: Any, size: int) -> int:
    """The root of an options object, or a number; 0 for None."""
    root = getattr(opts, "rootRank", opts)
    if isinstance(root, ReduceOp | ReduceOp.RedOpType):  # it has `__index__` too
        raise TypeError(f"the root must be an integer, but is {root!r} instead.")
    return 0 if root is None else check_rank("the root", root, size)


def check_options(opts: Any) -> None:
    """Raises TypeError: `opts` of a call that takes only a timeout are neither options nor a timeout."""
    if opts is not None and not isinstance(opts, timedelta) and not hasattr(opts, "timeout"):
        raise TypeError(f"`opts` must be options or a timeout, but are {described(opts)} instead.")


def check_rank(name: str, rank: int, size: int) -> int:
    rank = operator.index(rank)
    if not 0 <= rank < size:
        raise ValueError(f"{name} must be at least 0 and less than the group's size ({size}), but is {rank} instead.")
    return rank


def moves_objects(tensors: Sequence[Tensor]) -> bool:
    """Whether the call may belong to torch's object collectives, which move integers: sizes and pickled bytes."""
    return any(not (tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors)


def check_writable(outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    for output in outputs:
        check_dense(output)
        if overlaps_itself(output):
            raise ValueError(
                f"an output must not share memory among its elements, but has the shape {list(output.shape)} and the "
                f"strides {output.stride()}; use a copy of it."
            )
    return outputs


def check_dense(tensor: Tensor) -> Tensor:
    given: object = tensor
    if not isinstance(given, Tensor):
        raise ValueError(f"a tensor is needed, but {described(given)} was given.")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(
            f"a tensor must be dense (of layout torch.strided) and have data, but is of {tensor.layout} on "
            f"{tensor.device} instead."
        )
    return tensor


def check_fits(name: str, tensor: Tensor, like: Tensor, num_elements: int) -> None:
    check_dense(tensor)
    check_dense(like)
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} must be of {like.dtype} on {like.device}, but is of {tensor.dtype} on {tensor.device}."
        )
    if tensor.numel() != num_elements:
        raise ValueError(f"{name} must have {num_elements} elements, but has {tensor.numel()} instead.")


def check_same_length(name: str, tensors: Sequence[Any], other_name: str, others: Sequence[Any]) -> None:
    if len(tensors) != len(others):
        raise ValueError(f"`{name}` must be as many as `{other_name}` ({len(others)}), but are {len(tensors)} instead.")


def check_for_each_rank(name: str, tensors: Sequence[Tensor], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"`{name}` must have one tensor for each of the {size} ranks, but has {len(tensors)} instead.")


def split_of(name: str, tensor: Tensor, sizes: Sequence[int] | None, num_ranks: int) -> tuple[Tensor, ...]:
    if num_ranks == 1 and not sizes:  # also without a first dimension
        return (tensor,)
    length = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if length % num_ranks:
            raise ValueError(
                f"`{name}` must have a first dimension that divides by the group's size ({num_ranks}), but it is "
                f"{length} instead."
            )
        sizes = [length // num_ranks] * num_ranks
    if len(sizes) != num_ranks or sum(sizes) != length:
        raise ValueError(
            f"the split sizes of `{name}` must be {num_ranks} that sum to its first dimension ({length}), but are "
            f"{list(sizes)} instead."
        )
    return torch.split(tensor, list(sizes))
