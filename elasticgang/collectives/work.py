"""A collective under way, whatever runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.futures import Future

from elasticgang.errors import GangError

_S = TypeVar("_S")
_T = TypeVar("_T")


class Outcome(Protocol):
    """What becomes of a collective that has failed, where errors are swallowed."""

    def report(self, error: Exception) -> None: ...

    def resolve(self) -> None:
        """Write what the outputs hold instead of a result."""


class _Ending:
    """What happens once when a collective ends. It keeps no work alive: futures have it until their end."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.swallow: Callable[[], Outcome] | None = None
        self.reason: str | None = None
        self._lock = threading.Lock()

    def complete(self) -> None:
        if self.steps:
            with self._lock:  # the second thread waits until the steps are done
                try:
                    for step in self.steps:
                        step()
                finally:
                    self.steps = []

    def fail(self, error: GangError) -> None:
        """Raises `error` unless it is swallowed."""
        if self.swallow is None:
            raise error
        outcome = self.swallow()
        outcome.report(error)  # without the lock: it may wait for callbacks of this very work
        with self._lock:
            if self.reason is None:
                outcome.resolve()
                self.reason = str(error)


class Work:
    """A collective under way.

    This class itself is one that has ended before it was sent. What runs collectives overrides `_wait` and `_future`.
    """

    _ending: _Ending | None = None
    _reason: str | None = None

    def __init__(self, reason: str | None = None) -> None:
        """`reason`: why it was not sent, in a gang that was poisoned; None: there was nothing to send."""
        self._reason = reason

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended (on CUDA: until the current stream waits for it), at most `timeout` seconds (None:
        the gang's own). False when the gang was poisoned.

        Raises GangError as the call itself would have.
        """
        ending = self._ending
        if ending is None:
            return self._wait(timeout)
        if ending.reason is not None:
            return False
        try:
            completed = self._wait(timeout)
        except GangError as error:
            ending.fail(error)
            return False
        if completed:
            ending.complete()
        return completed

    def get_future(self) -> Future[bool]:
        """What `wait` returns, once it has ended; or its error."""
        ending = self._ending

        def finish(future: Future[Any]) -> bool:
            try:
                completed = future.value() is not False
            except GangError as error:
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
        """Why it has failed, where errors are swallowed."""
        return self._reason or (None if self._ending is None else self._ending.reason)

    def then(self, step: Callable[[], None] | None) -> Work:
        """This work with a last step (None: with no other). Whoever learns first that the work has completed performs
        it, once."""
        if step is not None:
            self._end_with().steps.append(step)
        return self

    def swallowing(self, outcome: Callable[[], Outcome]) -> Work:
        """This work with its errors swallowed: `wait` gives False for them. `outcome` is asked for at the first."""
        self._end_with().swallow = outcome
        return self

    def _end_with(self) -> _Ending:
        """Only before the work is given to its user."""
        if self._ending is None:
            self._ending = _Ending()
        return self._ending

    def _wait(self, timeout: float | None) -> bool:
        """False: it was not sent. Raises GangError."""
        return self._reason is None

    def _future(self) -> Future[Any]:
        """Resolves to anything but False when the work has completed."""
        future: Future[Any] = Future()
        future.set_result(self._reason is None)
        return future


def waited_for(wait: Callable[[], _T]) -> Future[_T]:
    """A future of what `wait` returns or raises, whose callbacks may block for other collectives.

    A thread of its own waits and runs them: torch's Gloo would run them on its two threads, which perform the
    collectives, and torchft's groups in a subprocess on the one thread that reads the replies."""
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
    """As `future.then(finish)`, but an error keeps its type. Only for Python: C++ takes the error for a value.

    The error has no traceback: frames have futures, and futures errors, in circles that no collection sees."""
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
