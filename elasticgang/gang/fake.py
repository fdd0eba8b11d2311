"""A gang without processes: every other rank is imagined to do exactly what this one does."""

from __future__ import annotations

import torch
from torch import Tensor

from elasticgang.errors import InvalidOperationError, NotSupportedError
from elasticgang.gang.base import Gang, ReduceOperation, check_collective, check_gathered, check_rank


class FakeGang(Gang):
    """Simulates a gang of `size` identical ranks. For single-process runs and tests."""

    def __init__(self, device: torch.device, *, rank: int = 0, size: int = 1) -> None:
        if size < 1:
            raise ValueError(f"`size` must be at least 1, but is {size} instead.")
        check_rank("rank", rank, size)
        self._device, self._rank, self._size = device, rank, size
        self._closed = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def device(self) -> torch.device:
        return self._device

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidOperationError("The gang is closed.")

    def all_reduce(self, tensor: Tensor, op: ReduceOperation) -> None:
        self._check_open()
        check_collective("tensor", tensor, self._device)
        with torch.no_grad():
            if op is ReduceOperation.SUM:
                tensor.mul_(self._size)
            elif op is ReduceOperation.PRODUCT:
                tensor.pow_(self._size)

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        self._check_open()
        check_collective("input_tensor", input_tensor, self._device)
        check_collective("output_tensor", output_tensor, self._device)
        check_gathered("output_tensor", output_tensor, [self._size, *input_tensor.shape], input_tensor)
        with torch.no_grad():
            output_tensor.copy_(input_tensor.unsqueeze(0).expand_as(output_tensor))

    def all_gather_to_list(self, output_tensors: list[Tensor], input_tensor: Tensor) -> None:
        self._check_open()
        if len(output_tensors) != self._size:
            raise ValueError(
                f"`output_tensors` must have one tensor for each of the {self._size} ranks, but has "
                f"{len(output_tensors)} instead."
            )
        check_collective("input_tensor", input_tensor, self._device)
        for index, output in enumerate(output_tensors):
            check_gathered(f"output_tensors[{index}]", output, input_tensor.shape, input_tensor)
        with torch.no_grad():
            for output in output_tensors:
                output.copy_(input_tensor)

    def broadcast(self, tensor: Tensor, source_rank: int = 0) -> None:
        self._check_open()
        check_collective("tensor", tensor, self._device)
        self._check_source(source_rank)

    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        self._check_open()
        self._check_source(source_rank)

    def _check_source(self, source_rank: int) -> None:
        check_rank("source_rank", source_rank, self._size)
        if source_rank != self._rank:
            raise NotSupportedError(
                f"A fake gang has no rank {source_rank} to broadcast from; it is rank {self._rank}."
            )

    def barrier(self) -> None:
        self._check_open()
