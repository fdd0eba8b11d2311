"""The functions of torch.cuda that involve two processes, in one class. Tests without a GPU replace it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from elasticgang.comm.nccl_settings import apply_nccl_settings
from elasticgang.torch_private import backend_failure, new_nccl, open_cuda, release_cuda, share_cuda

_cuda: Any = torch.cuda  # much of it is untyped

# torch aborts a group itself after its timeout. The rank notices before, with an error that says more.
_TORCHS_TIMES = 2

_CAPTURE_THREAD_LOCAL = 1  # of CUstreamCaptureMode

Handle = list[Any]  # JSON values and bytes


class Cuda:
    """The real torch.cuda. Neither the import nor the constructor initializes CUDA."""

    kind = "cuda"

    def begin(self, device: int) -> None:
        """Create this process's CUDA context, and make `device` the current device of the calling thread."""
        _cuda.set_device(device)
        _cuda.init()

    def query_beside_captures(self, device: int) -> None:
        """Make `device` the calling thread's, and let the thread query events while another thread captures a CUDA
        graph. CUDA would otherwise end that capture with an error."""
        _cuda.set_device(device)
        mode = ctypes.c_int(_CAPTURE_THREAD_LOCAL)
        with contextlib.suppress(OSError, AttributeError):  # no driver that has it: then nobody captures
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def current_device(self) -> int:
        return int(_cuda.current_device())

    def current_stream(self, device: int) -> Any:
        return _cuda.current_stream(device)

    def new_stream(self, device: int) -> Any:
        return _cuda.Stream(device)

    def key(self, stream: Any) -> int:
        return int(stream.stream_id)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        on: AbstractContextManager[Any] = _cuda.stream(stream)
        return on

    def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
        """Once `tensor` is freed, its memory is given out again only after what the current stream has queued."""
        if tensor.is_cuda:
            tensor.record_stream(_cuda.current_stream(tensor.device))

    def new_event(self, device: int, *, shared: bool) -> Any:
        """A recorded event. `shared`: another process can open it by `event_handle`. Waiting for one that is not shared
        takes no core."""
        with _cuda.device(device):
            event = _cuda.Event(interprocess=shared, blocking=not shared)
            event.record(_cuda.current_stream(device))
            return event

    def event_handle(self, event: Any) -> bytes:
        return bytes(event.ipc_handle())

    def open_event(self, device: int, handle: bytes) -> Any:
        return _cuda.Event.from_ipc_handle(torch.device("cuda", device), handle)

    def share(self, storage: torch.UntypedStorage) -> Handle:
        """The IPC handle of a storage. Call it once for each process that opens the storage. The memory stays allocated
        until that process drops the storage, or until `release` is called."""
        return share_cuda(storage)

    def open(self, handle: Handle) -> torch.UntypedStorage:
        return open_cuda(handle)

    def release(self, handle: Handle) -> None:
        """Release the storage on behalf of a dead process, whether that process had opened it or not."""
        release_cuda(handle)

    def new_group(self, store: Any, rank: int, size: int, device: int, timeout: timedelta) -> Any:
        """An NCCL group. It connects now: connecting in the first collective would block the command loop."""
        apply_nccl_settings(os.environ)  # SURVIVE-1
        _cuda.set_device(device)  # it is per thread
        group = new_nccl(store, rank, size, _TORCHS_TIMES * timeout)
        group.eager_connect_single_device(torch.device("cuda", device))
        return group

    def failure(self, group: Any) -> str | None:
        """Why torch has aborted the group. What had not passed on the device then passes, with any result."""
        return backend_failure(group)

    def end_group(self, group: Any) -> None:
        """End an NCCL group whose works have passed. Its destructor would keep its memory on the device."""
        group.abort()
