"""NCCL in a comm process, which accesses device memory by CUDA's IPC handles.

This was never run on a GPU. Tests run its code over a stand-in for `Cuda` (shared CPU memory, Gloo), which does not
cover the behaviour of CUDA. The main unknown: what a stream does that waits for an event of a killed process.

NCCL-1  Only tensors that are not contiguous are copied. The comm process opens a storage once, and drops it after this
    process has freed it.
NCCL-2  A collective begins after the operations that the caller's stream held at its submission. `wait` makes the
    current stream wait for its end, and blocks only until it is queued. Both use events of this process, because the
    events of a killed process are lost.
NCCL-3  This process keeps a work's tensors until the work has passed on the device; after an abort, until the streams
    that were ordered with it have drained. The allocator does not reuse their memory before.
NCCL-4  This process releases the storages that a killed comm process had open.
NCCL-5  A work that has not passed on the device by its deadline fails, which ends the configuration.
NCCL-6  What has passed on the device counts only if the comm process had not begun to exit by then: the events of a
    killed process may count as passed, and `errored` therefore looks at the process.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future as ProcessFuture
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from elasticgang.collectives.collective import Collective
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
    POLL_S,
    DeviceWork,
    EventPair,
    InFlight,
    SharedStorage,
    StagedDeviceTensor,
    WeakStorage,
    drain,
    keep_until_drained,
)
from elasticgang.comm.isolated import ProcessGroupIsolated
from elasticgang.comm.nccl_worker import encoded_handle
from elasticgang.comm.staging import DTYPE_NAMES
from elasticgang.comm.standby_pool import local_launcher
from elasticgang.comm.worker import encoded
from elasticgang.errors import (
    CollectiveTimeoutError,
    GangError,
    NotSupportedError,
    PeerLostError,
    StaleGenerationError,
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
        self._next_shared = self._next_pair = 0
        self._known: set[int] = set()  # ids of the storages that the process was told to open
        self._known_pairs: set[int] = set()
        self._pairs: list[EventPair] = []
        self._in_flight: list[InFlight] = []
        super().__init__(forkserver, arena, timeout=timeout)

    def _start_arguments(self) -> dict[str, Any]:
        return {"device": self._device}

    def submit(
        self,
        group: str,
        collective: Collective,
        timeout: float | None = None,
        fail: Callable[[GangError], None] | None = None,
    ) -> DeviceWork:
        """See `CommProcess.submit`. On the device, the collective follows the operations of the current stream."""
        call, kind, outputs = collective.call, TABLE[collective.call], collective.outputs
        tensors = outputs if kind.is_in_place else (*outputs, *collective.inputs)
        timeout = collective.timeout_s or timeout
        self._tidy()
        stream = self._cuda.current_stream(self._device)
        with torch.no_grad():
            sent = [_contiguous(tensor) for tensor in tensors]
        staged_tensors = [self._span(tensor, kind.reduces) for tensor in sent]
        copies = [pair for pair in zip(sent[: len(outputs)], outputs, strict=True) if pair[0] is not pair[1]]
        pair = self._take_pair()
        pair.began.record(stream)
        held = InFlight(self._cuda, self._device, pair, sent, copies, [stream])
        work = DeviceWork(self, call, outputs, timeout or self.timeout, fail, staged_tensors, held)
        described = [staged_tensor.described for staged_tensor in staged_tensors]
        said = encoded(group, collective, timeout, described)
        body = json.dumps([said, self._cuda.key(stream), pair.id]).encode()
        with self._memory_lock:
            self._in_flight.append(held)
        if not self._start(work, body, group):
            error = StaleGenerationError(f"{call}: the comm process of this generation was aborted")
            held.lose(error)
            work.end(error)
        return work

    @property
    def num_works(self) -> int:
        self._tidy()
        return len(self._in_flight)

    def close_groups(self, timeout: float) -> None:
        """See `CommProcess.close_groups`. First waits until all works have passed on the device."""
        deadline = time.monotonic() + timeout
        while self.num_works and time.monotonic() < deadline:
            time.sleep(POLL_S)
        super().close_groups(timeout)

    # -- memory and events

    def _span(self, tensor: Tensor, reduces: bool) -> StagedDeviceTensor:
        shared = self._share(tensor.untyped_storage())
        offset = int(tensor.storage_offset()) * tensor.itemsize
        shape, dtype = list(tensor.shape), tensor.dtype
        if reduces and dtype.is_complex:
            shape, dtype = [*shape, 2], dtype.to_real()
        return StagedDeviceTensor(tensor, shared, (shared.id, offset, shape, DTYPE_NAMES[dtype]))

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

    def _take_pair(self) -> EventPair:
        with self._memory_lock:
            if self._pairs:
                return self._pairs.pop()
            self._next_pair += 1
            id = self._next_pair
        events = (self._cuda.new_event(self._device, shared=True) for _ in range(2))
        return EventPair(id, *events)

    def _introduce(self, staged_tensors: Sequence[Any]) -> None:
        """Send new storages and events to the process. The caller has the send lock."""
        for shared in {
            staged_tensor.shared.id: staged_tensor.shared
            for staged_tensor in staged_tensors
            if staged_tensor.shared.id not in self._known
        }.values():
            if shared.id:
                self._known.add(shared.id)
                message = {"kind": "share", "id": shared.id, "handle": encoded_handle(shared.handle)}
                self._sock.send(json.dumps(message).encode())
        with self._memory_lock:
            pairs = [held.pair for held in self._in_flight if held.pair.id not in self._known_pairs]
        for pair in pairs:
            self._known_pairs.add(pair.id)
            events = [self._cuda.event_handle(event).hex() for event in (pair.began, pair.done)]
            self._sock.send(json.dumps({"kind": "events", "id": pair.id, "events": events}).encode())

    def _give_back(self, staged_tensors: Sequence[Any]) -> None:
        """Does nothing: `_tidy` releases them later (NCCL-3)."""

    def _tidy(self) -> None:
        drain()
        with self._memory_lock:
            if self._ended:
                return  # `_on_death` does it
            passed = [held for held in self._in_flight if held.done()]
            for held in passed:
                self._in_flight.remove(held)
                held.tensors.clear()
                self._pairs.append(held.pair)
        del passed  # and their tensors, whose storages may now expire
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
            helds, self._in_flight = self._in_flight, []
            shareds, self._shared = [*self._shared.values(), *self._replaced, *self._unsent.values()], {}
        lost = [held for held in helds if held.lose(error)]
        keep_until_drained(lost)
        for shared in shareds:
            self._release(shared)  # NCCL-4


def _contiguous(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class DeviceTorchWork(TorchWork):
    """The work of a call in the comm process."""

    _works: Sequence[Any]  # `DeviceWork`s

    def __init__(self, works: Sequence[Any], call: Call, pg: ProcessGroupIsolatedNCCL) -> None:
        super().__init__(works, call)
        self._pg = pg

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See `TorchWork.wait`. Blocks for a barrier until it has passed on the device."""
        super().wait(timeout)
        if self._call.is_barrier:
            seconds = timeout.total_seconds() if timeout else self._pg._timeout
            for work in self._works:
                work.wait_passed(seconds)
        return True

    def is_completed(self) -> bool:
        return all(work.held.done() or work.error is not None for work in self._works)

    def get_future(self) -> Future[Any]:
        return self._future_after(self._pg._cuda.new_future(self._pg._device))


class ProcessGroupIsolatedNCCL(ProcessGroupIsolated):
    """NCCL in a comm process, for tensors on the CUDA device that is current at the construction. Replaces torchft's
    `ProcessGroupBabyNCCL`.

    The comm process and its standby each have a CUDA context (about 0.5 to 1 GB). Their kernels do not overlap with
    those of this process.

    This was never run on a GPU; see the module's docstring.
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

    def errored(self) -> Exception | None:
        """See `ProcessGroupIsolated.errored`. A comm process that has begun to exit ends the configuration (NCCL-6)."""
        present = self._groups.present
        if present is not None and present.error is None and present.comm.is_exiting:
            present.fail(PeerLostError("the comm process has died"))
        return super().errored()

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
        return DeviceTorchWork([self.start(part) for part in call.parts], call, self)

    def start(self, collective: Collective) -> Work:
        work: Any = super().start(collective)
        timeout = collective.timeout_s or self._timeout
        late = CollectiveTimeoutError(f"{work.name} timed out after {timeout:g} seconds")
        fail = work.fail  # the deadline must not refer to the work or its tensors
        deadlines.deadlines.add(work.held, timeout, lambda: fail(late))  # NCCL-5
        return work  # type: ignore[no-any-return]

    def _check_dtype(self, part: Collective) -> None:
        check_reduction(part, check_nccl_dtype)

    def _check_device(self, tensor: Tensor) -> None:
        if tensor.device.type != self._cuda.kind or tensor.device.index not in (None, self._device):
            raise ValueError(
                f"a tensor must be on the group's device ({self._cuda.kind}:{self._device}), but is on "
                f"{tensor.device} instead."
            )
