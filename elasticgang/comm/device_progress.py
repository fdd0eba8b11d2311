"""What a rank's device has passed of the collectives for which its streams wait.

On a device, the wait for a collective returns at once. Nobody else notices whether the device passes it.

PASSED-1  A collective counts as completed once the device has passed it, so that the hang detector sees who waits.
PASSED-2  One that the device has not passed in its timeout is late. The time counts from its wait, or from when the
    device has passed the one before: a device that has much to do is not late.
PASSED-3  The events are queried on a thread that disturbs no capture of a CUDA graph on another thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from elasticgang.comm.cuda import Cuda

POLL_S = 0.2


class _Awaited(NamedTuple):
    """`since_s`: when it was waited for."""

    event: Any
    since_s: float
    timeout_s: float
    on_passed: Callable[[], None]
    on_late: Callable[[], None]


class DeviceProgress:
    """Of one configuration. Thread-safe. Its thread starts with the first collective and ends with `close`."""

    def __init__(self, device: int, cuda: Cuda, clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._cuda, self._clock = device, cuda, clock
        self._lock = threading.Lock()
        self._awaited: list[_Awaited] = []
        self._passed_s = float("-inf")  # when one was last seen to have passed
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def follow(self, timeout_s: float, on_passed: Callable[[], None], on_late: Callable[[], None]) -> None:
        """The current stream waits for a collective. Call `on_passed` once the device has passed that wait, or
        `on_late` once if it is late (PASSED-2). Both are called on any thread, and must not block."""
        event = self._cuda.new_event(self._device, shared=False)
        with self._lock:
            self._awaited.append(_Awaited(event, self._clock(), timeout_s, on_passed, on_late))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="device-progress", daemon=True)
                self._thread.start()

    def look(self) -> None:
        """Call `on_passed` of all that the device has passed by now, and `on_late` of what is late."""
        passed: list[_Awaited] = []
        waiting: list[_Awaited] = []
        late: list[_Awaited] = []
        with self._lock:
            for awaited in self._awaited:
                (passed if awaited.event.query() else waiting).append(awaited)  # PASSED-1
            now_s, self._awaited = self._clock(), []
            if passed:
                self._passed_s = now_s
            for awaited in waiting:
                (late if self._is_late(awaited, now_s) else self._awaited).append(awaited)
        for awaited in passed:
            awaited.on_passed()
        for awaited in late:
            awaited.on_late()

    def close(self) -> None:
        """Forget all collectives: their configuration has ended."""
        self._closed.set()
        with self._lock:
            self._awaited.clear()

    def _is_late(self, awaited: _Awaited, now_s: float) -> bool:
        """PASSED-2."""
        return now_s - max(awaited.since_s, self._passed_s) > awaited.timeout_s

    def _watch(self) -> None:
        self._cuda.query_beside_captures(self._device)  # PASSED-3
        while not self._closed.wait(POLL_S):
            try:
                self.look()
            except RuntimeError:  # a fault of the device, which the training thread meets too
                return
