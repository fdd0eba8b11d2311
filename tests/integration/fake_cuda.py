"""A stand-in for CUDA between two real processes: its memory is the CPU's, shared; its events are counters in shared
memory; NCCL is Gloo. All else is the code of the isolated NCCL groups: who opens what, waits for whom, holds what.

A stream of the rank's remembers what it waits for and blocks nobody; one of the comm process does it at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, ReduceOp

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.table import TABLE
from elasticgang.comm import worker
from elasticgang.comm.cuda import Cuda, Handle
from elasticgang.comm.nccl import NCCLCommProcess, ProcessGroupIsolatedNCCL
from elasticgang.comm.nccl_worker import NCCLWorker

GROUP_MEMORY = "memory of a group"  # the name of the file that stands for it
_COUNTS = struct.Struct("<qqq")  # recorded, passed, is held back


class Event:
    """Passes when it is recorded, unless it is held back."""

    def __init__(self, path: str | None = None) -> None:
        self.fd = os.memfd_create("event") if path is None else os.open(path, os.O_RDWR)
        if path is None:
            os.ftruncate(self.fd, _COUNTS.size)
        self._memory = mmap.mmap(self.fd, _COUNTS.size)

    def _counts(self) -> list[int]:
        return list(_COUNTS.unpack_from(self._memory))

    def hold_back(self) -> None:
        recorded, passed, _ = self._counts()
        _COUNTS.pack_into(self._memory, 0, recorded, passed, 1)

    def let_pass(self) -> None:
        recorded, _, _ = self._counts()
        _COUNTS.pack_into(self._memory, 0, recorded, recorded, 0)

    def record(self, stream: Stream) -> None:
        recorded, passed, is_held = self._counts()
        passes = not is_held and stream.is_drained()
        _COUNTS.pack_into(self._memory, 0, recorded + 1, recorded + 1 if passes else passed, is_held)

    def query(self) -> bool:
        recorded, passed, _ = self._counts()
        return passed >= recorded

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.0005)

    def __del__(self) -> None:
        os.close(self.fd)


class Stream:
    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)
        if self._waits:
            self.synchronize()

    def is_drained(self) -> bool:
        return all(event.query() for event in self.waited)

    def synchronize(self) -> None:
        while not self.is_drained():
            time.sleep(0.0005)
        self.waited.clear()


class FakeCuda(Cuda):
    kind = "cpu"
    is_rank = True

    def __init__(self) -> None:
        self.shared: list[int] = []  # of each `share` the size
        self.released: list[int] = []
        self.events: list[Event] = []  # that the other process knows too
        self.own_events: list[Event] = []
        self._streams = threading.local()
        self._default = Stream(waits=False)

    def begin(self, device: int) -> None:
        self.is_rank = False

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: int) -> Stream:
        stream: Stream = getattr(self._streams, "present", self._default)
        return stream

    def new_stream(self, device: int) -> Stream:
        return Stream(waits=not self.is_rank)

    def key(self, stream: Stream) -> int:
        return id(stream)

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(0)
        self._streams.present = stream
        yield
        self._streams.present = before

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return self._on(stream)

    def new_event(self, device: int, *, shared: bool) -> Event:
        event = Event()
        (self.events if shared else self.own_events).append(event)
        return event

    def event_handle(self, event: Event) -> bytes:
        return f"/proc/{os.getpid()}/fd/{event.fd}".encode()

    def open_event(self, device: int, handle: bytes) -> Event:
        return Event(handle.decode())

    def share(self, storage: torch.UntypedStorage) -> Handle:
        fd, size = storage._share_fd_cpu_()
        self.shared.append(size)
        return [f"/proc/{os.getpid()}/fd/{fd}".encode(), size]

    def open(self, handle: Handle) -> torch.UntypedStorage:
        path, size = handle
        fd = os.open(path, os.O_RDWR)
        memory = mmap.mmap(fd, size)
        os.close(fd)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def release(self, handle: Handle) -> None:
        self.released.append(handle[1])

    def new_group(self, store: Any, rank: int, size: int, device: int, timeout: timedelta) -> Any:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        return _FakeNCCL(gloo(store, rank, size, options))


class _Averaged:
    def __init__(self, work: Any, outputs: list[Tensor], size: int) -> None:
        self._work, self._outputs, self._size = work, outputs, size

    def wait(self) -> None:
        self._work.wait()
        for output in self._outputs:
            output.div_(self._size)


class _FakeNCCL:
    """Gloo with what NCCL has beyond it. It keeps memory until it is aborted."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._memory = os.memfd_create(GROUP_MEMORY)

    def abort(self) -> None:
        os.close(self._memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def _averaged(self, call: str, outputs: list[Tensor], *args: Any) -> Any:
        *tensors, options = args
        if options.reduceOp != ReduceOp.AVG:
            return getattr(self._gloo, call)(*args)
        options.reduceOp = ReduceOp.SUM
        return _Averaged(getattr(self._gloo, call)(*tensors, options), outputs, self._gloo.size())

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        return self._averaged("allreduce", tensors, tensors, options)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any) -> Any:
        return self._averaged("_reduce_scatter_base", [output], output, source, options)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any) -> Any:
        return self._averaged("reduce_scatter", outputs, outputs, inputs, options)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> Any:
        work, unpack = TABLE["all_to_all"].issue(self._gloo, Collective("all_to_all", tuple(outputs), tuple(inputs)))
        return work.get_future().then(lambda future: unpack and unpack())


class FakeProcess(NCCLCommProcess):
    target = "tests.integration.fake_cuda:main"

    def sending(self) -> contextlib.AbstractContextManager[object]:
        """While a message is sent, as if it took so long."""
        return self._send_lock

    @property
    def num_shared(self) -> int:
        """The storages that the process has open."""
        return len(self._shared)

    @property
    def num_free_events(self) -> int:
        """The events that no work has. A work gives its own back after it has woken who waits for it."""
        return len(self._free_events)


class IsolatedFake(ProcessGroupIsolatedNCCL):
    """`cuda` is this group's own, so that a test sees what it was asked for."""

    def __init__(self, timeout: float, *, reuse: bool = True) -> None:
        self._cuda = FakeCuda()
        super().__init__(timeout, reuse=reuse)

    @property
    def cuda(self) -> FakeCuda:
        assert isinstance(self._cuda, FakeCuda)
        return self._cuda

    def _check_available(self) -> None: ...

    def _process_kind(self) -> type[NCCLCommProcess]:
        return FakeProcess


def main(args: dict[str, Any], fds: list[int]) -> int:
    return worker.run(lambda sock, block: NCCLWorker(sock, args, block, FakeCuda()), args, fds)
