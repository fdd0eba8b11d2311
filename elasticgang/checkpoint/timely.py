"""Calls of a storage with a time limit.

TIMELY-1  A mount whose server is away, or a device that hangs, may block a call for ever, and no signal ends that. A
    call with a limit runs on a thread of its own, which stays behind when the limit is over. While it does, further
    calls fail at once: each would block too.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

_T = TypeVar("_T")


class TimelyCalls:
    """Belongs to one thread. `place`: of the storage, for messages."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._late: Future[Any] | None = None

    def within(self, limit_s: float, call: Callable[[], _T]) -> _T:
        """What `call` returns or raises. Raises TimeoutError: it has not ended, or an earlier one still has not."""
        if self._late is not None and not self._late.done():
            raise self._error()
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as exc:
                future.set_exception(exc)

        try:
            threading.Thread(target=run, name="storage", daemon=True).start()
        except RuntimeError:  # no thread is left
            return call()
        if not wait([future], limit_s).done:
            self._late = future
            raise self._error()
        return future.result()

    def _error(self) -> TimeoutError:
        return TimeoutError(errno.ETIMEDOUT, "it does not answer", self._place)
