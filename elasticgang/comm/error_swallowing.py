"""Process groups that swallow the errors of every collective, as torchft's `ErrorSwallowingProcessGroupWrapper` does.

SWALLOW-1  After the first error, nothing is sent until the next `configure`. An error counts only for the configuration
    in which its collective was started. Misuse (ValueError, TypeError, InvalidOperationError, NotSupportedError) is
    raised.
SWALLOW-2  After an error the outputs are finite and deterministic. A pure output is zero. An in-place tensor keeps its
    values, or is zero if the group may have written to it.
SWALLOW-3  If only the true result is acceptable, `StepAborted` is raised. This holds for barriers, and for collectives
    that move integers without reducing them, which torch's object collectives consist of.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torchft.process_group import ProcessGroup

from elasticgang.collectives.collective import Collective, writing
from elasticgang.collectives.table import TABLE
from elasticgang.collectives.torch_calls import Call
from elasticgang.collectives.torch_methods import CollectiveMethods, TorchWork, adapted
from elasticgang.collectives.work import Work
from elasticgang.errors import GangError, InvalidOperationError, NotSupportedError, StepAborted
from elasticgang.torch_private import device_types

MISUSE = (ValueError, TypeError, InvalidOperationError, NotSupportedError)


class Swallower(Protocol):
    """A group that swallows errors, as its works use it."""

    @property
    def parent(self) -> ProcessGroup: ...

    def _report(self, configuration: object, error: Exception) -> None: ...


class Outcome:
    """The result of one failed call. It does not keep the group alive, because futures refer to it."""

    def __init__(self, pg: Swallower, configuration: object, call: Call, why: Exception | None = None) -> None:
        """`why`: the error for which the call was not sent; None if it was sent."""
        self._pg, self._configuration, self._call = weakref.ref(pg), configuration, call
        self._keeps_in_place = why is not None or getattr(pg.parent, "keeps_in_place", False)
        self._lock = threading.Lock()
        self._is_resolved = False

    def report(self, error: Exception) -> None:
        """Record the error in the group, if the group has still the call's configuration (SWALLOW-1)."""
        pg = self._pg()
        if pg is not None:
            pg._report(self._configuration, error)

    def resolve(self) -> None:
        """Write the outputs (SWALLOW-2), once."""
        with self._lock:
            first, self._is_resolved = not self._is_resolved, True
            if first:
                for part in self._call.parts:
                    if not (TABLE[part.call].is_in_place and self._keeps_in_place):
                        neutral_outputs(part)


def swallowing(pg: Swallower, configuration: object, call: Call, work: Any, why: Exception | None) -> TorchWork:
    """The work of `call`, which was sent as `work`, with its errors swallowed. `why`: the error for which it was not
    sent.

    Raises:
        StepAborted: it was not sent, and its result has to be exact (SWALLOW-3).
    """
    outcome = Outcome(pg, configuration, call, why)
    if why is None:
        return adapted(work, call, pg, outcome=outcome)
    outcome.resolve()
    if call.is_exact:
        raise StepAborted(f"the process group failed before: {why}")
    return TorchWork([Work(str(why))], call, pg)


def neutral_outputs(collective: Collective) -> None:
    """Set all outputs to zero."""
    for output in collective.outputs:
        with writing(output):
            output.zero_()


class Owner(Protocol):
    """The owner of several groups, which end together."""

    @property
    def error(self) -> Exception | None: ...

    def fail(self, error: GangError) -> None:
        """End all groups, and wait until none of their works accesses a tensor."""

    def check(self) -> None:
        """The device has done what was started: end all groups if a collective has failed although its `wait` has
        returned."""


class SwallowingProcessGroup(CollectiveMethods, ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """`pg` with its errors swallowed (SWALLOW-1 to SWALLOW-3). Thread-safe where `pg` is."""

    def __init__(
        self, pg: ProcessGroup, *, start: Callable[[Collective], Work] | None = None, owner: Owner | None = None
    ) -> None:
        """For a gang of one generation: `start` starts a collective of `pg`; its first error ends `owner`, whose error
        counts as the group's."""
        super().__init__(0, 1)
        self._pg, self._start_on_pg, self._owner = pg, start, owner
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._configuration = object()

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Configure `pg`, and clear the error. Later failures of works of an earlier configuration, or that another
        thread has started meanwhile, are not errors of this one (SWALLOW-1). Raises the errors of `pg.configure`."""
        with self._lock:
            before, self._configuration = self._configuration, object()
        try:
            self._pg.configure(*args, **kwargs)
        except ValueError:  # nothing has changed
            self._configuration = before
            raise
        except Exception as error:
            self.report_error(error)
            raise
        with self._lock:
            self._error, self._configuration = None, object()

    def error(self) -> Exception | None:
        """The first error since `configure`."""
        return self._error

    def report_error(self, e: Exception) -> None:
        """Set the group's error, unless it has one: nothing is sent until the next `configure`."""
        with self._lock:
            self._error = self._error or e

    def _report(self, configuration: object, error: Exception) -> None:
        with self._lock:
            if configuration is self._configuration:
                self._error = self._error or error
        if self._owner is not None and isinstance(error, GangError):
            self._owner.fail(error)

    def errored(self) -> Exception | None:
        if self._owner is not None:
            return self._error or self._owner.error
        return self._error or self._pg.errored()

    @property
    def is_poisoned(self) -> bool:
        return self.errored() is not None

    def check(self) -> None:
        """See `Owner.check`."""
        if self._owner is not None:
            self._owner.check()

    def start(self, collective: Collective) -> Work:
        """Start a checked collective of a gang. Misuse is raised; after any other error the work's `wait` returns
        False."""
        assert self._start_on_pg is not None
        configuration, why = self._configuration, self.errored()
        if why is None:
            try:
                work = self._start_on_pg(collective)
            except GangError as error:
                self._report(configuration, error)
                why = self.errored() or error
            else:
                return work.swallowing(functools.partial(self._outcome, configuration, collective))
        self._outcome(configuration, collective, why).resolve()
        return Work(str(why))

    def _outcome(self, configuration: object, collective: Collective, why: Exception | None = None) -> Outcome:
        return Outcome(self, configuration, Call((collective,), []), why)

    @property
    def parent(self) -> ProcessGroup:
        """The group that is wrapped."""
        return self._pg

    def abort(self, errored: bool = True) -> None:
        self._pg.abort()

    def shutdown(self) -> None:
        self._pg.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self._pg.set_timeout(timeout)

    def rank(self) -> int:
        return int(self._pg.rank())

    def size(self) -> int:
        return int(self._pg.size())

    getRank = rank
    getSize = size

    def getBackendName(self) -> str:
        return str(self._pg.getBackendName())

    def _served(self) -> Sequence[str]:
        return device_types(self._pg)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """See `CollectiveMethods.monitored_barrier`. Raises StepAborted, which names the absent ranks (SWALLOW-3)."""
        _, _, why = self._attempt(lambda: self._pg.monitored_barrier(timeout, wait_all_ranks))
        if why is not None:
            raise StepAborted(f"the process group failed before: {why}") from why

    def __repr__(self) -> str:
        return f"SwallowingProcessGroup({self._pg!r})"

    def _perform(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchWork:
        def perform() -> Any:
            method = getattr(self._pg, name)
            if getattr(method, "__func__", None) is getattr(CollectiveMethods, name):
                return method.__self__._perform(name, call, args, kwargs)  # without checking the call again
            return method(*args, **kwargs)

        configuration, work, why = self._attempt(perform)
        return swallowing(self, configuration, call, work, why)

    def _check_dtype(self, part: Collective) -> None:
        if isinstance(self._pg, CollectiveMethods):
            self._pg._check_dtype(part)
        else:
            super()._check_dtype(part)

    def _attempt(self, perform: Callable[[], Any]) -> tuple[object, Any, Exception | None]:
        """The present configuration, the result of `perform`, and the error for which there is none. The error is
        reported. Raises misuse."""
        with self._lock:
            configuration, why = self._configuration, self._error
        if why is None:
            try:
                return configuration, perform(), None
            except MISUSE:  # nothing was sent
                raise
            except Exception as error:
                self._report(configuration, error)
                why = error
        return configuration, None, why
