"""Works on device memory that a comm process accesses: their tensors, events and ends.

This was never run on a GPU. `nccl.py` states the rules (NCCL-1 to NCCL-5).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from elasticgang.collectives.collective import writing
from elasticgang.comm.comm_process import CommProcess
from elasticgang.comm.cuda import Cuda, Handle
from elasticgang.comm.work import CommWork
from elasticgang.errors import CollectiveTimeoutError, GangError

POLL_S = 0.0005
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
class EventPair:
    """Two shared events, used by one work at a time."""

    id: int
    began: Any
    done: Any


@dataclass(frozen=True)
class StagedDeviceTensor:
    """A contiguous tensor, which holds the result once its work has passed on the device. Nothing is copied."""

    tensor: Tensor
    shared: SharedStorage
    described: tuple[int, int, list[int], str]

    def copy_out(self) -> None: ...

    def discard(self) -> None: ...


@dataclass(eq=False)
class InFlight:
    """The tensors of one work (NCCL-3). `copies`: pairs of (the sent tensor, the caller's tensor, not contiguous)."""

    cuda: Cuda
    device: int
    pair: EventPair
    tensors: list[Tensor]
    copies: list[tuple[Tensor, Tensor]]
    streams: list[Any]
    is_queued: bool = False
    lost: GangError | None = None
    _has_passed: bool = False
    _copied: Any = None
    _drains: list[Any] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self) -> bool:
        """Whether the work has passed on the device, or was lost."""
        with self._lock:
            if self.is_queued and self.lost is None and not self._has_passed:
                self._has_passed = bool(self.pair.done.query())
            return self._has_passed or self.lost is not None

    def order(self) -> None:
        """Make the current stream wait for the work (NCCL-2). Raises GangError: the comm process was lost before."""
        with self._lock:
            if self.lost is not None:
                raise self.lost
            stream = self.cuda.current_stream(self.device)
            if not self._has_passed:  # otherwise another work has its events
                stream.wait_event(self.pair.done)
                self.streams.append(stream)
            if self.copies and self._copied is not None:
                stream.wait_event(self._copied)
            elif self.copies:
                for sent, tensor in self.copies:
                    with writing(tensor):
                        tensor.copy_(sent)
                self._copied = self.cuda.new_event(self.device, shared=False)
                self._copied.record(stream)

    def lose(self, error: GangError) -> bool:
        """Mark the work as lost by `error`. False: it had passed before."""
        if self.done():
            return False
        with self._lock:
            self.lost = error
            for stream in self.streams:
                self._drains.append(self.cuda.new_event(self.device, shared=False))
                self._drains[-1].record(stream)
        return True

    def is_drained(self) -> bool:
        return all(event.query() for event in self._drains)


class DeviceWork(CommWork):
    """A work that ends when the comm process has queued it. `wait` orders streams (NCCL-2)."""

    def __init__(
        self,
        comm: CommProcess,
        name: str,
        outputs: Sequence[Tensor],
        timeout: float,
        fail: Callable[[GangError], None] | None,
        staged_tensors: Sequence[StagedDeviceTensor],
        held: InFlight,
    ) -> None:
        super().__init__(comm._reply_reader, name, outputs, timeout, fail)
        self.staged = list(staged_tensors)
        self.comm, self.held = comm, held

    def end(self, error: GangError | None) -> None:
        self.held.is_queued = error is None
        super().end(error)

    def _wait(self, timeout: float | None) -> bool:
        """Block until the work is queued, and order the current stream after it."""
        super()._wait(timeout)
        try:
            self.held.order()
        except GangError as error:
            if self.fail is not None:
                self.fail(error)
            raise
        return True

    def wait_passed(self, timeout: float) -> None:
        """Block until the work has passed on the device. Raises GangError as `wait`."""
        deadline = time.monotonic() + timeout
        while not self.held.done():
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"{self.name} timed out after {timeout:g} seconds")
            time.sleep(POLL_S)
        self.held.order()


_lost: list[InFlight] = []  # lost works of dead comm processes
_lock = threading.Lock()


def keep_until_drained(works: Sequence[InFlight]) -> None:
    """Keep the tensors of lost works until their streams have drained (NCCL-3)."""
    with _lock:
        _lost.extend(works)


def drain() -> None:
    """Release the tensors of lost works whose streams have drained."""
    with _lock:
        drained = [held for held in _lost if held.is_drained()]
        for held in drained:
            _lost.remove(held)
            held.tensors.clear()  # the work or its error may still be referenced
            held.copies.clear()
