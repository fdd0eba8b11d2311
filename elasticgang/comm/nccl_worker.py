"""The comm process of a rank on CUDA: runs NCCL's groups on the rank's device memory, by IPC handles.

NCCLWORKER-1  It creates its CUDA context at its start, because the fork server has none.
NCCLWORKER-2  Each pair of a caller's stream and a group has its own stream here, so that works of two groups do not
    wait for each other. A thread of each stream tells the rank that a collective has ended, once it has passed on the
    device and its group has no error.
NCCLWORKER-3  A closed group is aborted, since its destructor would leave 66 MB on the device: beside the next
    configuration, and before the one after that.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, Store

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.table import TABLE, Issued, options_of
from elasticgang.comm.cuda import Cuda
from elasticgang.comm.worker import Worker, decoded, run
from elasticgang.process.status_page import CommBlock


def main(args: dict[str, Any], fds: list[int]) -> int:
    """See `worker.main`; `args` also has `device`, the device's index."""
    return run(lambda sock, block: NCCLWorker(sock, args, block, Cuda()), args, fds)


def _issue(pg: Any, c: Collective) -> Issued:
    if c.call == "all_to_all":  # NCCL has an all-to-all of lists, without copies
        return pg.alltoall(list(c.outputs), list(c.inputs), options_of(AllToAllOptions, c)), None
    return TABLE[c.call].issue(pg, c)


class _IssuedWork(NamedTuple):
    """`name`: of the `group`. `passed`: the event behind the collective, whose tensors it keeps."""

    id: int
    name: str
    group: Any
    collective: Collective
    passed: Any


class _Stream(NamedTuple):
    stream: Any
    issued: queue.SimpleQueue[_IssuedWork]


class NCCLWorker(Worker):
    def __init__(self, sock: socket.socket, args: dict[str, Any], block: CommBlock, cuda: Cuda) -> None:
        self._cuda = cuda
        self._device = int(args["device"])
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._events: dict[int, Any] = {}
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._queue: dict[bytes, tuple[str, Collective, int, int]] = {}
        self._ends: list[Future[None]] = []  # of the groups that were closed last
        cuda.begin(self._device)  # NCCLWORKER-1
        super().__init__(sock, args, block)

    def _learn(self, command: dict[str, Any]) -> None:
        if command["kind"] == "share":
            self._storages[command["id"]] = self._cuda.open(decoded_handle(command["handle"]))
        elif command["kind"] == "event":
            self._events[command["id"]] = self._cuda.open_event(self._device, bytes.fromhex(command["handle"]))
        elif command["kind"] == "forget":
            self._queue.clear()
            for id in command["ids"]:
                self._storages.pop(id, None)
        else:
            super()._learn(command)

    def _create(self, store: Store, group: dict[str, Any], timeout: timedelta) -> Any:
        return self._cuda.new_group(store, group["rank"], group["size"], self._device, timeout)

    def _made(self, making: Future[Any], until_s: float) -> Any:
        """`new_group` has its own timeout."""
        return making.result()

    def _close(self, command: dict[str, Any]) -> None:
        """NCCLWORKER-3."""
        ended, self._groups = self._groups, {}
        if not ended:  # a configuration closes what a rank has closed before
            return
        for end in self._ends:
            end.result()
        self._ends = [self._threads.submit(self._cuda.end_group, group) for group in ended.values()]

    def _remove(self, name: str) -> None:
        """NCCLWORKER-3."""
        if (group := self._groups.pop(name, None)) is not None:
            self._cuda.end_group(group)

    def _warm_up(self) -> None:
        """Does nothing: its groups are of NCCL."""

    def _handshake(self, group: Any) -> None:
        """Does nothing: `new_group` has connected."""

    def _run(self, id: int, body: bytes) -> None:
        """NCCLWORKER-2."""
        try:
            name, collective, caller, event = self._queue.get(body) or self._read(body)
            if (name, caller) not in self._streams:
                self._streams[name, caller] = self._new_stream()
            stream, group = self._streams[name, caller], self._groups[name]
            with self._cuda.on(stream.stream):
                stream.stream.wait_event(self._events[event])
                work, last = _issue(group, collective)
                work.wait()  # makes the stream wait, not this thread
                if last is not None:
                    last()
                passed = self._cuda.new_event(self._device, shared=False)
        except Exception as exc:
            self._end(id, exc)
        else:
            stream.issued.put(_IssuedWork(id, name, group, collective, passed))

    def _new_stream(self) -> _Stream:
        made = _Stream(self._cuda.new_stream(self._device), queue.SimpleQueue())
        threading.Thread(target=self._await_ends, args=(made.issued,), name="nccl-ends", daemon=True).start()
        return made

    def _await_ends(self, issued: queue.SimpleQueue[_IssuedWork]) -> None:
        while True:
            self._await_end(issued.get())

    def _await_end(self, issued: _IssuedWork) -> None:
        error: Exception | None = None
        try:
            issued.passed.synchronize()
            if (failure := self._cuda.failure(issued.group)) is not None:
                error = RuntimeError(failure)
        except Exception as exc:
            error = exc
        if error is None:
            self._block.completed(issued.name, TABLE[issued.collective.call].is_message)
        self._end(issued.id, error)

    def _read(self, body: bytes) -> tuple[str, Collective, int, int]:
        call, caller, event = json.loads(body)
        if len(self._queue) >= 4096:
            self._queue.clear()
        self._queue[body] = found = (*decoded(call, self._tensor), caller, event)
        return found

    def _tensor(self, id: int, offset: int, shape: list[int], name: str) -> Tensor:
        dtype: torch.dtype = getattr(torch, name)
        empty = torch.empty(0, dtype=dtype, device=torch.device(self._cuda.kind, self._device))
        if id == 0:
            return empty.view(shape)
        size = torch.Size(shape)
        return empty.set_(self._storages[id], offset // dtype.itemsize, size, _strides(size))


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    return tuple(strides[: len(shape)])


def encoded_handle(handle: list[Any]) -> list[Any]:
    """`handle` as JSON values."""
    return [{"hex": part.hex()} if isinstance(part, bytes) else part for part in handle]


def decoded_handle(handle: list[Any]) -> list[Any]:
    return [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in handle]
