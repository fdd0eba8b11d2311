"""The Gang interface: a set of ranks that act collectively.

Names, argument order, shapes and in-place behaviour are those of fairseq2's `fairseq2.gang.Gang`.

A poisoned gang (an `ElasticGang` whose generation has ended) returns from tensor collectives at once, with finite,
deterministic outputs: what was there before, or zeros. Object and barrier-like calls raise `StepAborted` instead,
because nothing they could return is true.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class ReduceOperation(enum.Enum):
    """How `Gang.all_reduce` combines the tensors of the ranks."""

    SUM = "sum"
    MEAN = "mean"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


class Gang(ABC):
    """A set of ranks that act collectively; `rank` is this process's place in it, `0 <= rank < size`."""

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def close(self) -> None:
        """End the gang. Later calls raise `InvalidOperationError`."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOperation) -> None:
        """Reduce `tensor` over all ranks, in place.

        Shapes: `[*S]`, the same on every rank, contiguous. Blocks: at most the gang's timeout.

        Raises:
            ValueError: `tensor` cannot be reduced so. Nothing was sent; the gang is still usable.
            GangError: a peer left. `tensor` is undefined; drop the step.
        """

    @abstractmethod
    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        """Gather `input_tensor` from every rank into `output_tensor`, in rank order.

        Shapes: input `[*S]`; output `[size, *S]`, contiguous, same dtype and device. Errors: as `all_reduce`.
        """

    @abstractmethod
    def all_gather_to_list(self, output_tensors: list[Tensor], input_tensor: Tensor) -> None:
        """Gather `input_tensor` from every rank into `output_tensors`, one tensor `[*S]` a rank. Errors: as
        `all_reduce`."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source_rank: int = 0) -> None:
        """Copy `tensor` of rank `source_rank` to `tensor` of every rank. Errors: as `all_reduce`."""

    @abstractmethod
    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        """Replace the items of `objects` by those of rank `source_rank`, by pickle: only between trusted processes.

        Raises:
            ValueError: `source_rank` is not a rank of this gang.
            StepAborted: the generation has ended. `objects` is unchanged.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks. Raises `StepAborted` when the generation has ended."""


def check_rank(name: str, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"`{name}` must be at least 0 and less than the gang's size ({size}), but is {rank} instead.")


def check_collective(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"`{name}` must be on the gang's device ({device}), but is on {tensor.device} instead.")
    if not tensor.is_contiguous():
        raise ValueError(f"`{name}` must be contiguous, but has strides {tensor.stride()} instead.")


def check_gathered(name: str, output: Tensor, shape: Sequence[int], input_tensor: Tensor) -> None:
    """`output` must have `shape`, and the dtype of `input_tensor`."""
    if list(output.shape) != list(shape):
        raise ValueError(f"`{name}` must have the shape {list(shape)}, but has {list(output.shape)} instead.")
    if output.dtype != input_tensor.dtype:
        raise ValueError(
            f"`{name}` must have the dtype of `input_tensor` ({input_tensor.dtype}), but has {output.dtype} instead."
        )
