"""The rank's side of a collective in its comm process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from elasticgang.collectives.description import Description
from elasticgang.collectives.work import Work
from elasticgang.comm import deadlines
from elasticgang.errors import CollectiveTimeoutError, GangError, InvalidOperationError
from elasticgang.torch_private import has_modes, without_modes


class Awaiting(Protocol):
    """The `ReplyReader` of the process, as a work uses it."""

    def add_listeners(self, number: int) -> None: ...

    def call_back(self, callback: Callable[[], None]) -> None: ...

    def wait_for(self, work: CommWork, timeout: float) -> bool: ...


class CommWork(Work):
    """The work of one collective. `future` resolves to the output tensors, or to a `GangError`."""

    def __init__(
        self,
        reply_reader: Awaiting,
        group: str,
        description: Description,
        outputs: Sequence[Tensor],
        timeout: float,
        fail: Callable[[GangError], None] | None = None,
    ) -> None:
        """`timeout`: seconds until the work fails. `fail`: called with the error, also with that of the timeout. It
        must not refer to a group, because futures refer to it. None: a timeout only raises in `wait`."""
        self.group, self.description, self.name = group, description, description.call
        self.fail = fail
        self._timeout = timeout
        self.staged: list[Any] = []  # the outputs first; inputs too, whose memory may be shared
        self.is_sent = False
        self.error: GangError | InvalidOperationError | None = None
        self._reply_reader = reply_reader
        self._outputs = list(outputs)
        self._is_ended = False
        self._wakes: list[threading.Event] = []  # events of threads that wait while another thread reads
        self._resolving: torch.futures.Future[list[Tensor]] | None = None
        self._lock = threading.RLock()  # REPLY-7

    @property
    def future(self) -> torch.futures.Future[list[Tensor]]:
        with self._lock:
            if self._resolving is None:
                future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
                if self._is_ended:
                    self._resolve(future)
                    return future
                self._reply_reader.add_listeners(1)
                self._resolving = future
            return self._resolving

    def end(self, error: GangError | None) -> None:
        """End the work. Called by the thread that learned of the end. It writes the outputs first (COMM-4) and leaves
        the future to the reply reader's threads (COMM-5). Called again only if a signal's handler has interrupted it
        before the work had ended (REPLY-6)."""
        if has_modes():  # STAGING-5
            with without_modes():
                return self.end(error)
        for staged_tensor in self.staged[: len(self._outputs)]:
            if error is None:
                staged_tensor.copy_out()
            elif self.is_sent:
                staged_tensor.discard()
        self.error = error
        with self._lock:
            self._is_ended = True
            future, self._resolving = self._resolving, None
            for wake in self._wakes:
                wake.set()
        if future is not None:
            resolved = future
            self._reply_reader.call_back(lambda: self._resolve(resolved))
            self._reply_reader.add_listeners(-1)

    def abandon(self, error: InvalidOperationError) -> None:
        """End the work in a forked child, which gets no result: `wait` raises `error`. Accesses no tensor (COMM-7)."""
        self._lock = threading.RLock()  # a thread of the parent may have held the old one
        self.error, self.fail, self._resolving = error, None, None
        self._is_ended = True

    def _resolve(self, future: torch.futures.Future[list[Tensor]]) -> None:
        """Complete `future`, with a copy of the error: the frames of a raised error refer to works and futures, and the
        garbage collector cannot see what a future refers to."""
        if self.error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(copy.copy(self.error))  # type: ignore[arg-type]  # torch's annotation is wrong

    def wake_at_end(self, wake: threading.Event) -> None:
        with self._lock:
            self._wakes.append(wake)
            if self._is_ended:
                wake.set()

    def forget_wake(self, wake: threading.Event) -> None:
        with self._lock:
            if wake in self._wakes:
                self._wakes.remove(wake)

    def done(self) -> bool:
        return self._is_ended

    def _wait(self, timeout: float | None) -> bool:
        """See `Work`. After a `CollectiveTimeoutError` without `fail`, the collective still runs: abort the process
        before using its tensors."""
        within = timeout or self._timeout
        if self._is_ended or self._reply_reader.wait_for(self, within):
            error = self.error
        else:
            error = self._late(within)
        if error is None:
            return True
        if self.fail is not None and isinstance(error, GangError):
            self.fail(error)
        raise error

    def _late(self, seconds: float) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(f"{self.name} timed out after {seconds:g} seconds")

    def _future(self) -> torch.futures.Future[Any]:
        future, fail = self.future, self.fail
        if fail is not None and not self._is_ended:
            late = self._late(self._timeout)
            deadlines.deadlines.add(self, self._timeout, lambda: fail(late))
        return future
