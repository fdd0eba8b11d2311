"""The work of a collective, for every kind of backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch.futures import Future

from elasticgang.torch_private import outside_graphs

_S = TypeVar("_S")
_T = TypeVar("_T")


class Outcome(Protocol):
    """The result of a failed collective, where errors are swallowed."""

    def report(self, error: Exception) -> None:
        """Record the error in the group."""

    def resolve(self) -> None:
        """Write defined values to the outputs."""


class _Ending:
    """The actions at the end of a collective, each performed once. Futures refer to it, so it refers to no work."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.swallow: Callable[[], Outcome] | None = None
        self.reason: str | None = None
        self._lock = threading.Lock()

    def complete(self) -> None:
        if self.steps:
            with self._lock:  # a second thread waits until the steps are done
                try:
                    for step in self.steps:
                        step()
                finally:
                    self.steps = []

    def fail(self, error: Exception) -> None:
        """Raises `error` unless it is swallowed."""
        if self.swallow is None:
            raise error
        outcome = self.swallow()
        outcome.report(error)  # without the lock: it may wait for callbacks of this work
        with self._lock:
            if self.reason is None:
                outcome.resolve()
                self.reason = str(error)


class Work:
    """The work of one collective. Backends override `_wait` and `_future`.

    This class itself is the work of a collective that was never sent: there was nothing to send, or the gang was
    poisoned.
    """

    _ending: _Ending | None = None
    _reason: str | None = None
    _polled: Future[bool] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("_wait", "_future"):  # GANG-5
            if name in vars(cls):
                outside_graphs(vars(cls)[name])

    def __init__(self, reason: str | None = None) -> None:
        """`reason`: why the collective of a poisoned gang was not sent; None: there was nothing to send."""
        self._reason = reason

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the collective has ended; on CUDA, until the current stream waits for it. `timeout`: seconds;
        None for the gang's. Returns False if the gang was poisoned: the outputs have defined values but no result.

        Raises:
            GangError: the collective failed. The outputs are undefined.
        """
        ending = self._ending
        if ending is None:
            return self._wait(timeout)
        if ending.reason is not None:
            return False
        try:
            completed = self._wait(timeout)
        except Exception as error:
            ending.fail(error)
            return False
        if completed:
            ending.complete()
        return completed

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        if self._polled is None:
            self._polled = self.get_future()
        return self._polled.done()

    def get_future(self) -> Future[bool]:
        """A future of the value or error of `wait`."""
        ending = self._ending

        def finish(future: Future[Any]) -> bool:
            try:
                completed = future.value() is not False
            except Exception as error:
                if ending is None:
                    raise
                ending.fail(error.with_traceback(None))
                return False
            if completed and ending is not None:
                ending.complete()
            return completed

        return follow(self._future(), finish)

    @property
    def reason(self) -> str | None:
        """Why the collective failed, where errors are swallowed; None if it has not failed."""
        return self.find_reason()()

    def find_reason(self) -> Callable[[], str | None]:
        """A function that returns `reason` and does not refer to this work, for futures."""
        reason, ending = self._reason, self._ending
        return lambda: reason or (None if ending is None else ending.reason)

    def then(self, step: Callable[[], None] | None) -> Work:
        """Add a step to run after completion (None: no step), and return this work. The first thread that learns of the
        completion runs it, once."""
        if step is not None:
            self._end_with().steps.append(step)
        return self

    def swallowing(self, outcome: Callable[[], Outcome]) -> Work:
        """Swallow errors, and return this work: `wait` returns False after one. `outcome` is called at the first
        error."""
        self._end_with().swallow = outcome
        return self

    def _end_with(self) -> _Ending:
        """Call it only before another thread has the work."""
        if self._ending is None:
            self._ending = _Ending()
        return self._ending

    def _wait(self, timeout: float | None) -> bool:
        """Block until the backend has ended the collective. False: it was not sent. Raises GangError."""
        return self._reason is None

    def _future(self) -> Future[Any]:
        """The backend's future. It resolves to a value other than False when the collective has completed."""
        future: Future[Any] = Future()
        future.set_result(self._reason is None)
        return future


class TorchsWork(Work):
    """A work of torch or torchft, of any process group. Its errors are those of torch."""

    def __init__(self, work: Any, *, waits_in_thread: bool = False) -> None:
        """`waits_in_thread`: of works without a future, or whose future's callbacks must not block (`waited_for`)."""
        self._work, self._waits_in_thread = work, waits_in_thread

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def _wait(self, timeout: float | None) -> bool:
        _ = self._work.wait() if timeout is None else self._work.wait(timedelta(seconds=timeout))
        return True

    def _future(self) -> Future[Any]:
        if self._waits_in_thread:
            return waited_for(self._work.wait)
        future: Future[Any] = self._work.get_future()
        return future


def waited_for(wait: Callable[[], _T]) -> Future[_T]:
    """A future of the value or error of `wait`, whose callbacks may wait for other collectives.

    A new thread waits and runs the callbacks. torch's Gloo would run them on the two threads that perform its
    collectives, and torchft's groups in a subprocess on the one thread that reads the replies.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            result = wait()
        except Exception as error:
            future.set_exception(error.with_traceback(None))  # type: ignore[arg-type]  # torch's annotation is wrong
        else:
            future.set_result(result)

    threading.Thread(target=run, name="collective-future", daemon=True).start()
    return future


def follow(future: Future[_T], finish: Callable[[Future[_T]], _S]) -> Future[_S]:
    """As `future.then(finish)`, but an error keeps its type. For Python callers only: C++ takes the error for a value.

    The error gets no traceback. Its frames refer to futures and futures refer to errors, in cycles that the garbage
    collector cannot see.
    """
    following: Future[_S] = Future()

    def finished(future: Future[_T]) -> None:
        try:
            result = finish(future)
        except Exception as error:
            following.set_exception(error.with_traceback(None))  # type: ignore[arg-type]  # torch's annotation is wrong
        else:
            following.set_result(result)

    future.add_done_callback(finished)
    return following
