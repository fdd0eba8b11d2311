"""Copies training state between a device and the host in chunks, through pinned memory.

PINNED-1  A copy has `NUM_BUFFERS` pinned buffers of `CHUNK_BYTES`, however large the state is. On the device it
    allocates nothing, but for a tensor that is not contiguous: one such tensor at a time.
PINNED-2  A reader copies on a stream of its own, after what the training stream had queued at a mark: beside forward
    and backward. It waits on the host for each chunk, so that nothing of the copy is under way once it has returned.
PINNED-3  A writer copies on the current stream: what is queued later sees the new state.
PINNED-4  What writes chunks as they arrive copies on a stream of its own, into tensors that nothing uses. The copies
    have ended when `finish` returns.
PINNED-5  The buffers of a heal and of a checkpoint are pinned when the state is registered: pinning memory waits for
    all that the device has queued, so that the first copy would stand behind the training.

The tests run it over a stand-in for `Device` too, whose copies happen when somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from elasticgang.state.serialization import as_bytes

CHUNK_BYTES = 4 << 20
NUM_BUFFERS = 2

_cuda: Any = torch.cuda  # much of it is untyped


class Device:
    """torch.cuda, as far as copies need it."""

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def mark(self, on: torch.device | None = None) -> Any:
        """An event behind all that the current stream of the device `on` has queued; None if this process has not
        initialized CUDA. Without `on`: of the thread's current device, which is the rank's own on its training thread
        alone. On any other device a mark would create a context."""
        if not _cuda.is_initialized():
            return None
        event = _cuda.Event()
        event.record(_cuda.current_stream(on))
        return event

    def new_stream(self, tensor: Tensor) -> Any:
        return _cuda.Stream(tensor.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        on: AbstractContextManager[Any] = _cuda.stream(stream)
        return on

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


device = Device()  # tests without a GPU replace it


def prepare() -> None:
    """PINNED-5. torch keeps what it has pinned, and gives it out again."""
    _ = [device.pinned(CHUNK_BYTES) for _ in range(2 * NUM_BUFFERS)]


class Reader:
    """Reads tensors as bytes. One thread uses it. `after`: a mark; None for tensors on the CPU alone. `stream`: the one
    on which it copies; None before the first copy."""

    def __init__(self, after: Any) -> None:
        self._after = after
        self.stream: Any = None
        self._buffers: list[Tensor] = []
        self._flat: tuple[Tensor, Tensor] | None = None  # the tensor read last, and its bytes

    def read(self, tensor: Tensor, start: int, end: int) -> memoryview:
        """The bytes from `start` to `end`, at most `CHUNK_BYTES`. They are valid until the next read."""
        flat = self._bytes_of(tensor)
        if not device.holds(tensor):
            return as_bytes(flat[start:end])
        copied = self._start_copy(flat, start, end, 0)
        return self._finish_copy(copied, 0, end - start)

    def chunks(self, tensor: Tensor) -> Iterator[memoryview]:
        """All bytes in order, in chunks of `CHUNK_BYTES`. Each is valid until the next one is taken. The device copies
        one chunk while the caller has the one before."""
        flat = self._bytes_of(tensor)
        places = [(start, min(start + CHUNK_BYTES, flat.numel())) for start in range(0, flat.numel(), CHUNK_BYTES)]
        if not device.holds(tensor):
            yield from (as_bytes(flat[start:end]) for start, end in places)
            return
        copies = (
            (self._start_copy(flat, start, end, number % NUM_BUFFERS), number % NUM_BUFFERS, end - start)
            for number, (start, end) in enumerate(places)
        )
        present = next(copies, None)
        while present is not None:
            following = next(copies, None)
            try:
                yield self._finish_copy(*present)
            finally:
                if following is not None:  # also if the caller takes no more chunks
                    following[0].synchronize()
            present = following

    def _bytes_of(self, tensor: Tensor) -> Tensor:
        if self._flat is not None and self._flat[0] is tensor:
            return self._flat[1]
        self._flat = None  # PINNED-1
        if not device.holds(tensor):
            flat = flat_bytes(tensor)
        else:
            with device.on(self._ordered_stream(tensor)):
                flat = flat_bytes(tensor)
        self._flat = tensor, flat
        return flat

    def _ordered_stream(self, tensor: Tensor) -> Any:
        """PINNED-2."""
        if self.stream is None:
            self.stream = device.new_stream(tensor)
            if self._after is not None:
                self.stream.wait_event(self._after)
            self._buffers = [device.pinned(CHUNK_BYTES) for _ in range(NUM_BUFFERS)]
        return self.stream

    def _start_copy(self, flat: Tensor, start: int, end: int, number: int) -> Any:
        """Queue the copy of a chunk into a buffer. Returns the mark of its end."""
        with device.on(self.stream):
            self._buffers[number][: end - start].copy_(flat[start:end], non_blocking=True)
            return device.mark()

    def _finish_copy(self, copied: Any, number: int, length: int) -> memoryview:
        copied.synchronize()
        return as_bytes(self._buffers[number][:length])


class Chunks(Sequence[memoryview]):
    """The bytes of `tensors`, each in chunks of `CHUNK_BYTES`, by their numbers. A chunk is valid until the next one is
    taken. One thread uses it. `after`: as of `Reader`."""

    def __init__(self, tensors: Sequence[Tensor], after: Any) -> None:
        self._places = [
            (tensor, start, min(start + CHUNK_BYTES, tensor.nbytes))
            for tensor in tensors
            for start in range(0, tensor.nbytes, CHUNK_BYTES)
        ]
        self._reader = Reader(after)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: Any) -> Any:
        return self._reader.read(*self._places[number])


class Writer:
    """Copies tensors of the host into training state (PINNED-3). One thread uses it."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, Any]] = []  # the next one to use first, with the mark of its last copy

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` into `target`, which may be on a device."""
        has_own_bytes = target.is_contiguous() and not (target.is_conj() or target.is_neg())  # else `flat_bytes` copies
        is_staged = device.holds(target) and has_own_bytes and source.dtype == target.dtype
        if not is_staged or source.nbytes <= CHUNK_BYTES:
            target.copy_(source)
            return
        read, written = flat_bytes(source), flat_bytes(target)
        for start in range(0, read.numel(), CHUNK_BYTES):
            part = read[start : start + CHUNK_BYTES]
            buffer = self._free_buffer()[: part.numel()]
            buffer.copy_(part)
            written[start : start + CHUNK_BYTES].copy_(buffer, non_blocking=True)
            self._buffers[-1] = self._buffers[-1][0], device.mark()

    def _free_buffer(self) -> Tensor:
        """A buffer whose last copy has ended. It is the last one of the list from now on."""
        if len(self._buffers) < NUM_BUFFERS:
            self._buffers.append((device.pinned(CHUNK_BYTES), None))
            return self._buffers[-1][0]
        buffer, copied = self._buffers.pop(0)
        copied.synchronize()
        self._buffers.append((buffer, None))
        return buffer

    def finish(self) -> None:
        """Wait until the device has all of it."""
        for _, copied in self._buffers:
            copied.synchronize()
        self._buffers.clear()


class ChunkWriter:
    """Writes chunks of the host into tensors on a device (PINNED-4). One thread uses it."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._buffers: list[tuple[Tensor, Any]] = []  # the next one to use first, with the mark of its last copy

    def buffer(self, length: int) -> Tensor:
        """Memory for the next chunk, until `write`."""
        if len(self._buffers) < NUM_BUFFERS:
            self._buffers.insert(0, (device.pinned(CHUNK_BYTES), None))
        buffer, copied = self._buffers[0]
        if copied is not None:
            copied.synchronize()
        return buffer[:length]

    def write(self, target: Tensor, start: int, length: int) -> None:
        """Copy what is in the buffer into the bytes of `target`, which is contiguous, from `start` on."""
        if self._stream is None:
            self._stream = device.new_stream(target)
        buffer, _ = self._buffers.pop(0)
        with device.on(self._stream):
            flat_bytes(target)[start : start + length].copy_(buffer[:length], non_blocking=True)
            self._buffers.append((buffer, device.mark()))

    def finish(self) -> None:
        """Wait until the devices have all of it."""
        for _, copied in self._buffers:
            if copied is not None:
                copied.synchronize()


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not device.holds(tensor)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as a vector, without a copy if it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
