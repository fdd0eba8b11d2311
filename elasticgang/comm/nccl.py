"""NCCL in a comm process, which accesses device memory by CUDA's IPC handles.

NCCL-1  Only tensors that are not contiguous are copied. The comm process opens a storage once, and drops it after this
    process has freed it.
NCCL-2  A collective begins after the operations that the caller's stream held at its submission, by an event of this
    process. It ends when the comm process says that it has passed on the device: `wait` blocks until then. No stream of
    this process waits for an event of the comm process: if that process were killed, the stream would wait forever
    (seen on an H100, driver 580, CUDA 13.0), and with it every later use of the device by this process.
NCCL-3  This process keeps a work's tensors until the work has ended. The works of a killed comm process end once it is
    gone.
NCCL-4  This process releases the storages that a killed comm process had open.
NCCL-5  A work that has not ended by its deadline fails, which ends the configuration.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as ProcessFuture
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.description import describe
from elasticgang.collectives.dtypes import check_nccl_dtype
from elasticgang.collectives.table import TABLE, check_reduction
from elasticgang.collectives.torch_calls import Call, barrier_on
from elasticgang.collectives.torch_methods import TorchWork
from elasticgang.collectives.work import Work
from elasticgang.comm import deadlines
from elasticgang.comm.arena import Arena
from elasticgang.comm.comm_process import CommProcess
from elasticgang.comm.cuda import Cuda
from elasticgang.comm.device_work import (
    CopyStream,
    DeviceWork,
    SharedEvent,
    SharedStorage,
    StagedDeviceTensor,
    WeakStorage,
)
from elasticgang.comm.isolated import ProcessGroupIsolated
from elasticgang.comm.nccl_worker import encoded_handle
from elasticgang.comm.staging import DTYPE_NAMES
from elasticgang.comm.standby_pool import local_launcher
from elasticgang.comm.work import CommWork
from elasticgang.comm.worker import encoded
from elasticgang.errors import (
    CollectiveTimeoutError,
    GangError,
    NotSupportedError,
)
from elasticgang.process.forkserver import ForkServerClient
from elasticgang.torch_private import storage_key

_MAX_FORGOTTEN = 1000  # storages in one message


class NCCLCommProcess(CommProcess):
    """A comm process with a CUDA context on `device`, for tensors of that device."""

    target = "elasticgang.comm.nccl_worker:main"
    uses_device = True

    def __init__(
        self, forkserver: ForkServerClient, arena: Arena, device: int, *, timeout: float, cuda: Cuda | None = None
    ) -> None:
        self._cuda, self._device = cuda or Cuda(), device
        self._memory_lock = threading.Lock()
        self._shared: dict[int, SharedStorage] = {}  # by `storage_key`, which a weak reference keeps unique
        self._replaced: list[SharedStorage] = []
        self._unsent: dict[int, SharedStorage] = {}  # freed storages of which the process was not notified yet
        self._next_shared = self._next_event = 0
        self._known: set[int] = set()  # ids of the storages that the process was told to open
        self._known_events: set[int] = set()
        self._free_events: list[SharedEvent] = []
        self._copies = CopyStream(self._cuda, device)
        super().__init__(forkserver, arena, timeout=timeout)

    def _start_arguments(self) -> dict[str, Any]:
        return {"device": self._device}

    def submit(
        self,
        group: str,
        collective: Collective,
        timeout: float | None = None,
        fail: Callable[[GangError], None] | None = None,
        number: int | None = None,
    ) -> DeviceWork:
        """See `CommProcess.submit`. On the device, the collective follows the operations of the current stream."""
        kind, outputs = TABLE[collective.call], collective.outputs
        tensors = outputs if kind.is_in_place else (*outputs, *collective.inputs)
        timeout = collective.timeout_s or timeout
        self._tidy()
        stream = self._cuda.current_stream(self._device)
        with torch.no_grad():
            staged_tensors = [self._span(tensor, _contiguous(tensor), kind.reduces) for tensor in tensors]
        began = self._take_event()
        began.event.record(stream)
        own = self._reply_reader, group, describe(collective), outputs
        work = DeviceWork(*own, timeout or self.timeout, fail, began, self._free_events.append)
        work.staged = list(staged_tensors)
        described = [staged_tensor.described for staged_tensor in staged_tensors]
        said = encoded(group, collective, timeout, described)
        body = json.dumps([said, self._cuda.key(stream), began.id]).encode()
        if not self._start(work, body, number):
            self._refuse(work)
        return work

    # -- memory and events

    def _span(self, tensor: Tensor, sent: Tensor, reduces: bool) -> StagedDeviceTensor:
        shared = self._share(sent.untyped_storage())
        offset = int(sent.storage_offset()) * sent.itemsize
        shape, dtype = list(sent.shape), sent.dtype
        if reduces and dtype.is_complex:
            shape, dtype = [*shape, 2], dtype.to_real()
        described = (shared.id, offset, shape, DTYPE_NAMES[dtype])
        return StagedDeviceTensor(tensor, sent, shared, described, self._copies)

    def _share(self, storage: torch.UntypedStorage) -> SharedStorage:
        """NCCL-1."""
        with self._memory_lock:
            found = self._shared.get(storage_key(storage))
            if found is not None and found.is_of(storage):
                return found
            if storage.nbytes() == 0:
                return SharedStorage(0, WeakStorage(storage), 0, 0, [])
            handle = self._cuda.share(storage)
            self._next_shared += 1
            made = SharedStorage(self._next_shared, WeakStorage(storage), storage.data_ptr(), storage.nbytes(), handle)
            if found is not None:  # its memory was replaced (`resize_`)
                self._replaced.append(found)
            self._shared[storage_key(storage)] = made
            return made

    def _take_event(self) -> SharedEvent:
        """Thread-safe, as `list.pop` and `list.append` are."""
        with contextlib.suppress(IndexError):
            return self._free_events.pop()
        with self._memory_lock:
            self._next_event += 1
            id = self._next_event
        return SharedEvent(id, self._cuda.new_event(self._device, shared=True))

    def _introduce(self, work: CommWork) -> None:
        """Send new storages and the event, if it is new, to the process. The caller has the send lock."""
        assert isinstance(work, DeviceWork)
        staged_tensors = work.staged
        for shared in {
            staged_tensor.shared.id: staged_tensor.shared
            for staged_tensor in staged_tensors
            if staged_tensor.shared.id not in self._known
        }.values():
            if shared.id:
                self._known.add(shared.id)
                message = {"kind": "share", "id": shared.id, "handle": encoded_handle(shared.handle)}
                self._sock.send(json.dumps(message).encode())
        if (began := work.began).id not in self._known_events:
            self._known_events.add(began.id)
            handle = self._cuda.event_handle(began.event).hex()
            self._sock.send(json.dumps({"kind": "event", "id": began.id, "handle": handle}).encode())

    def _give_back(self, staged_tensors: Sequence[Any]) -> None:
        """Does nothing: `_tidy` notices when their storages are freed."""

    def _tidy(self) -> None:
        if self._ended:
            return  # `_on_death` does it
        with self._memory_lock:
            gone = [key for key, shared in self._shared.items() if shared.storage.expired()]
            dead = [*self._replaced, *(self._shared.pop(key) for key in gone)]
            self._replaced.clear()
            for shared in dead:
                if shared.id in self._known:
                    self._unsent[shared.id] = shared
            never_known = [shared for shared in dead if shared.id not in self._known]
        for shared in never_known:
            self._release(shared)
        if self._unsent and self._send_lock.acquire(blocking=False):  # otherwise a later call sends them
            try:
                self._forget()
            finally:
                self._send_lock.release()

    def _forget(self) -> None:
        """Tell the process to drop freed storages. The caller has the send lock. Never blocks, because the calling
        thread may be the one that notices the death of the process."""
        with self._memory_lock:
            ids = list(self._unsent)[:_MAX_FORGOTTEN]
        message = json.dumps({"kind": "forget", "ids": ids}).encode()
        with contextlib.suppress(OSError):  # the socket is full, and a later call tries again; or the process is dead
            self._sock.send(message, socket.MSG_DONTWAIT)
            with self._memory_lock:
                for id in ids:
                    self._unsent.pop(id, None)

    def _release(self, shared: SharedStorage) -> None:
        with contextlib.suppress(RuntimeError):  # CUDA may have failed too
            self._cuda.release(shared.handle)

    def _on_death(self, error: GangError) -> None:
        with self._memory_lock:
            shareds, self._shared = [*self._shared.values(), *self._replaced, *self._unsent.values()], {}
        for shared in shareds:
            self._release(shared)  # NCCL-4


def _contiguous(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class ProcessGroupIsolatedNCCL(ProcessGroupIsolated):
    """NCCL in a comm process, for tensors on the CUDA device that is current at the construction. Replaces torchft's
    `ProcessGroupBabyNCCL`.

    `wait` blocks until the collective has passed on the device (NCCL-2). The comm process and its standby each have a
    CUDA context. Their kernels do not overlap with those of this process.
    """

    backend = "nccl"
    keeps_in_place = False
    has_mean = True
    _cuda = Cuda()

    def __init__(self, timeout: float | timedelta = 60.0, *, reuse: bool = True) -> None:
        self._device = 0
        super().__init__(timeout, reuse=reuse)

    def _check_available(self) -> None:
        if not dist.is_nccl_available():
            raise NotSupportedError("isolated-nccl is not available: torch was built without NCCL.")
        if not torch.cuda.is_available():
            raise NotSupportedError("isolated-nccl is not available: there is no CUDA device.")

    def _starter(self) -> Callable[[], ProcessFuture[CommProcess]]:
        cuda, self._device = self._cuda, self._cuda.current_device()
        device = self._device  # the function returned must not refer to this group
        make = self._process_kind()
        return lambda: local_launcher().start(lambda forks, arena: make(forks, arena, device, timeout=60.0, cuda=cuda))

    def _process_kind(self) -> type[NCCLCommProcess]:
        return NCCLCommProcess

    def _served(self) -> Sequence[str]:
        return (self._cuda.kind,)

    def _submit(self, call: Call) -> TorchWork:
        for part in call.parts:
            if part.call in ("monitored_barrier", "recv_anysource"):
                raise NotSupportedError(f"NCCL has no `{part.call}`; use a group of another backend.")
        if call.is_barrier:
            call = barrier_on(call, torch.device(self._cuda.kind, self._device))
        for part in call.parts:
            for tensor in (*part.outputs, *part.inputs):
                self._check_device(tensor)
        return TorchWork([self.start(part) for part in call.parts], call, owner=self)

    def start(self, collective: Collective) -> Work:
        work: Any = super().start(collective)
        timeout = collective.timeout_s or self._timeout
        late = CollectiveTimeoutError(f"{work.name} timed out after {timeout:g} seconds")
        fail = work.fail  # the deadline must not refer to the work or its tensors
        deadlines.deadlines.add(work, timeout, lambda: fail(late))  # NCCL-5
        return work  # type: ignore[no-any-return]

    def _check_dtype(self, part: Collective) -> None:
        check_reduction(part, check_nccl_dtype)

    def _check_device(self, tensor: Tensor) -> None:
        if tensor.device.type != self._cuda.kind or tensor.device.index not in (None, self._device):
            raise ValueError(
                f"a tensor must be on the group's device ({self._cuda.kind}:{self._device}), but is on "
                f"{tensor.device} instead."
            )
