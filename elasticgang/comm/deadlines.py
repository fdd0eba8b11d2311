"""Deadlines of works whose futures are used. Without one, a future would wait forever for a stopped process.

One thread serves the whole process. It starts with the first deadline.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol


class Timed(Protocol):
    """A work with a deadline."""

    def done(self) -> bool: ...


class Deadlines:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count()  # callbacks are not compared
        self._pending: list[tuple[float, int, weakref.ref[Timed], Callable[[], None]]] = []
        self._thread: threading.Thread | None = None
        self.was_used = False

    def add(self, work: Timed, seconds: float, late: Callable[[], None]) -> None:
        """Call `late` on a new thread after `seconds`, unless `work` is done or garbage-collected by then."""
        self.was_used = True
        entry = (time.monotonic() + seconds, next(self._numbers), weakref.ref(work), late)
        with self._changed:
            while self._pending and not _is_pending(self._pending[0][2]):
                heapq.heappop(self._pending)
            heapq.heappush(self._pending, entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="comm-deadlines", daemon=True)
                self._thread.start()
            elif self._pending[0] is entry:
                self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._pending or self._pending[0][0] > time.monotonic():
                    left = self._pending[0][0] - time.monotonic() if self._pending else None
                    self._changed.wait(left)
                _, _, work, late = heapq.heappop(self._pending)
            if _is_pending(work):
                threading.Thread(target=late, name="comm-late", daemon=True).start()  # an abort may block


def _is_pending(work: weakref.ref[Timed]) -> bool:
    found = work()
    return found is not None and not found.done()


deadlines = Deadlines()


def _forget_parents() -> None:
    global deadlines
    if deadlines.was_used:
        deadlines = Deadlines()  # a forked child has no thread


os.register_at_fork(after_in_child=_forget_parents)
