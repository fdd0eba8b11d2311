"""Some process groups of one kind, driven from this process: rank `r` is `ring[r]`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torchft.process_group import ProcessGroup

from tests.support import DEADLINE_S

SUM = ReduceOp.SUM
_T = TypeVar("_T")
_prefixes = itertools.count()


class Ring:
    """`make` makes each group; all are configured as one, over the store at `store`."""

    def __init__(self, make: Callable[[], Any], size: int, store: str, num_threads: int = 16) -> None:
        """`num_threads`: the most that `each` and `begin` use. A pool may start one more with each call, also while
        others are about to be idle: with `size` of them, their number is constant after the first call."""
        self.groups: list[Any] = [make() for _ in range(size)]
        self._store = store
        self._threads = ThreadPoolExecutor(num_threads, "ring")
        self.configure()

    def __getitem__(self, rank: int) -> Any:
        return self.groups[rank]

    def __len__(self) -> int:
        return len(self.groups)

    def next_address(self) -> str:
        """Of a prefix that no configuration had."""
        return f"{self._store}/ring/{next(_prefixes)}"

    def configure(self) -> None:
        address = self.next_address()
        self.each(lambda rank: self[rank].configure(address, "replica", rank, len(self)))

    def each(self, function: Callable[[int], _T]) -> list[_T]:
        """`function` of every rank, at the same time."""
        futures = [self.begin(lambda rank=rank: function(rank)) for rank in range(len(self))]  # type: ignore[misc]
        return [future.result(DEADLINE_S) for future in futures]

    def begin(self, function: Callable[[], _T]) -> Future[_T]:
        return self._threads.submit(function)

    def sums(self, value: float = 1.0) -> list[float]:
        """Of an all-reduce of it, on every rank: shows that the group works."""

        def reduce(rank: int) -> float:
            tensor = torch.tensor([value])
            self[rank].allreduce([tensor], SUM).wait()
            return tensor.item()

        return self.each(reduce)

    def close(self) -> None:
        for group in self.groups:
            with contextlib.suppress(RuntimeError):  # of an in-process group that has failed
                group.shutdown()
        self._threads.shutdown()


def bits(tensor: Tensor) -> bytes:
    """What equality of results means: nothing is rounded differently, and NaNs count."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bool:
        tensor = tensor.contiguous().view(torch.uint8) != 0  # Gloo alone leaves sums in them
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def reduced_alone(pg: ProcessGroup, tensor: Tensor) -> Tensor:
    """`tensor` after a sum over all ranks."""
    pg.allreduce([tensor], SUM).wait()
    return tensor
