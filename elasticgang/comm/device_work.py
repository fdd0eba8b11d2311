"""Device memory that a comm process accesses. `nccl.py` states the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from elasticgang.collectives.collective import writing
from elasticgang.collectives.description import Description
from elasticgang.comm.cuda import Cuda, Handle
from elasticgang.comm.work import Awaiting, CommWork
from elasticgang.errors import GangError

WeakStorage: Any = reductions.StorageWeakRef  # it is untyped


@dataclass(eq=False)
class SharedStorage:
    """A storage that the comm process opens. An empty storage has the `id` 0 and is not opened."""

    id: int
    storage: Any  # a weak reference
    address: int
    num_bytes: int
    handle: Handle

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` is the shared one and still has the same memory."""
        return (self.address, self.num_bytes) == (storage.data_ptr(), storage.nbytes()) and not self.storage.expired()


@dataclass(frozen=True)
class SharedEvent:
    """An event that the comm process opens, used by one work at a time."""

    id: int
    event: Any


class CopyStream:
    """The stream on which results are copied into tensors that are not contiguous. It is made when it is needed."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda, self._device = cuda, device
        self._stream: Any = None

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Blocks until the copy is done."""
        if self._stream is None:
            self._stream = self._cuda.new_stream(self._device)
        with self._cuda.on(self._stream), writing(target), torch.no_grad():
            target.copy_(source)
        self._stream.synchronize()


@dataclass(frozen=True)
class StagedDeviceTensor:
    """`sent` is `tensor`, or its contiguous copy. Neither is freed before the work has ended (NCCL-3)."""

    tensor: Tensor
    sent: Tensor
    shared: SharedStorage
    described: tuple[int, int, list[int], str]
    copies: CopyStream

    def copy_out(self) -> None:
        if self.sent is not self.tensor:
            self.copies.copy(self.sent, self.tensor)

    def discard(self) -> None: ...


class DeviceWork(CommWork):
    """A work that ends when it has passed on the device (NCCL-2)."""

    def __init__(
        self,
        reply_reader: Awaiting,
        group: str,
        description: Description,
        outputs: Sequence[Tensor],
        timeout: float,
        fail: Callable[[GangError], None] | None,
        began: SharedEvent,
        give_back: Callable[[SharedEvent], None],
    ) -> None:
        super().__init__(reply_reader, group, description, outputs, timeout, fail)
        self.began, self._give_back = began, give_back

    def end(self, error: GangError | None) -> None:
        super().end(error)
        if error is None:  # otherwise the process that has opened it is gone
            self._give_back(self.began)
