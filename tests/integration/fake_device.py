"""A stand-in for the device of `state/staging.py`: memory of the CPU, and streams that copy when somebody waits.

A copy that is queued without blocking happens at the first wait for a mark behind it, and no sooner. So whoever reads a
buffer before that finds what it held before, and whoever writes to it too early copies the wrong bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from elasticgang.state.staging import Device


class Mark:
    """An event behind what `stream` had queued."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._number = stream, stream.num_queued

    def synchronize(self) -> None:
        self._stream.run_until(self._number)


class Stream(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which copies without blocking are queued here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._queued: list[Callable[[], object]] = []
        self.num_queued = self.num_done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and len(args) > 2 and args[2]:
            self.queue(lambda: func(*args))
            return args[0]
        return func(*args, **(kwargs or {}))

    def queue(self, work: Callable[[], object]) -> None:
        self._queued.append(work)
        self.num_queued += 1

    def wait_event(self, mark: Mark) -> None:
        self.queue(mark.synchronize)

    def run_until(self, number: int) -> None:
        while self.num_done < number:
            self.num_done += 1
            with _disable_current_modes():  # otherwise a copy would be queued again
                self._queued.pop(0)()


class FakeDevice(Device):
    """`put` says which tensors are on the device. `present`: the stream of the training thread."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()
        self._local = threading.local()
        self.present = Stream()
        self.num_pinned_bytes = 0

    def put(self, *tensors: Tensor) -> None:
        self._addresses.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def put_none(self) -> None:
        """All tensors are on the CPU."""
        self._addresses.clear()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._addresses

    @property
    def _entered(self) -> list[Stream]:
        """The streams of the calling thread, the current one last."""
        if not hasattr(self._local, "entered"):
            self._local.entered = []
        entered: list[Stream] = self._local.entered
        return entered

    def mark(self, on: torch.device | None = None) -> Mark:
        is_chosen = self._entered or on is not None or threading.current_thread() is threading.main_thread()
        assert is_chosen, "the current device of another thread is device 0, whichever the rank's is"
        return Mark(self._entered[-1] if self._entered else self.present)

    def new_stream(self, tensor: Tensor) -> Stream:
        return Stream()

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return _On(self._entered, stream)

    def pinned(self, num_bytes: int) -> Tensor:
        self.num_pinned_bytes += num_bytes
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)


class _On:
    def __init__(self, entered: list[Stream], stream: Stream) -> None:
        self._entered, self._stream = entered, stream

    def __enter__(self) -> None:
        self._entered.append(self._stream)
        self._stream.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.pop()
