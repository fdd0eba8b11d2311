"""The process groups of one rank in a comm process, from one configuration to the next.

GROUPS-1  A configuration has ended before the next one begins. After a clean end its process is used again; after an
          error, or with works under way, it is killed, and the standby takes over. Either way no work of an earlier
          configuration reaches the new groups.
GROUPS-2  The first error ends the configuration: it is kept, the process is killed, every work has ended, and later
          works fail at once.
GROUPS-3  One owner opens, connects and leaves; any number of threads start works, kill and fail.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as ProcessFuture
from typing import Any

from elasticgang.collectives.collective import Collective
from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.standby_pool import StandbyPool
from elasticgang.comm.work import CommWork
from elasticgang.errors import GangError, OperationalError, StaleGenerationError

_CLOSE_TIMEOUT_S = 2.0


def _reraise(stuck: OperationalError) -> None:
    raise stuck


class Configuration:
    """The groups under one prefix, in one comm process. `fail_weakly` is `fail` for holders that must keep neither the
    process nor the groups alive: works, their futures, and the process itself."""

    def __init__(self, comm: CommProcess, on_stuck: Callable[[OperationalError], None] = _reraise) -> None:
        """`on_stuck`: called instead of raising when the process cannot be reaped in time."""
        self.comm = comm
        self.error: GangError | None = None
        self.on_end: Callable[[GangError], None] | None = None  # called with the first error; must not block
        self.has_died = False  # the process, by itself, before or while it connected
        self._on_stuck = on_stuck
        self._is_left = False
        self._lock = threading.Lock()
        present = weakref.ref(self)

        def fail_weakly(error: GangError) -> None:
            configuration = present()
            if configuration is not None:  # otherwise its owner has ended the process
                configuration.fail(error)

        self.fail_weakly = fail_weakly

    def connect(self, prefix: str, groups: Sequence[GroupSpec], **options: Any) -> None:
        """Make the groups: see `CommProcess.configure`. Raises GangError, which has ended the configuration."""
        with self._ending():
            self.comm.configure(prefix, groups, self.fail_weakly, **options)

    def add(self, prefix: str, group: GroupSpec, **options: Any) -> None:
        """Make one more group: see `CommProcess.add_group`. Raises GangError, which has ended the configuration."""
        with self._ending():
            self.comm.add_group(prefix, group, **options)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except GangError as error:
            self.has_died = self.comm.has_died
            self.fail(error)
            raise

    def start(self, group: str, collective: Collective, timeout: float | None = None) -> CommWork:
        """Start a checked collective. `timeout`: seconds, where it has none of its own; None is the configuration's. A
        deadline that passes ends the configuration."""
        return self.comm.submit(group, collective, timeout, self.fail_weakly)

    def kill(self, error: GangError) -> None:
        """End the configuration: mark it and kill the process, so that the peers notice at once. Never blocks; `fail`
        waits for the death. Nothing once the configuration was left."""
        with self._lock:
            if self._is_left:
                return
            is_first, self.error = self.error is None, self.error or error
            self.comm.kill(error)
        if is_first and self.on_end is not None:
            self.on_end(error)

    def fail(self, error: GangError) -> None:
        """`kill`, and wait until every work has ended and nothing of this configuration touches a tensor any more.

        Raises:
            OperationalError: the process cannot be reaped in time, unless `on_stuck` handles that.
        """
        self.kill(error)
        if self._is_left:
            return
        try:
            self.comm.abort(error)
        except OperationalError as stuck:
            self._on_stuck(stuck)

    def leave(self) -> bool:
        """End the groups and keep the process. False when only a kill can end them."""
        if self.error is None and not self.comm.ended:
            with contextlib.suppress(GangError), self._ending():
                self.comm.close_groups(_CLOSE_TIMEOUT_S)
                with self._lock:
                    self._is_left = self.error is None
        return self._is_left


class GroupSet(StandbyPool):
    """One rank's configurations, one after another, and the comm processes for them."""

    def __init__(
        self,
        start: Callable[[], ProcessFuture[CommProcess]],
        *,
        reuse: bool = True,
        on_stuck: Callable[[OperationalError], None] = _reraise,
    ) -> None:
        """`reuse=False`: a new process for each configuration. `on_stuck`: of `Configuration`."""
        super().__init__(start)
        self._reuse, self._on_stuck = reuse, on_stuck
        self.present: Configuration | None = None
        self._kept: CommProcess | None = None  # its groups are closed

    def leave(self) -> None:
        """GROUPS-1: end the present configuration, if there is one."""
        present, self.present = self.present, None
        if present is None:
            return
        if self._reuse and present.leave():
            self._kept = present.comm
        else:
            present.fail(StaleGenerationError("the process group was configured anew"))
            present.comm.close()

    def open(self, timeout: float) -> Configuration:
        """Begin a configuration that has no groups yet, in the process that was left, or in the standby once it is
        ready, at most `timeout` seconds. Raises as `StandbyPool.take`."""
        comm, self._kept = self._kept, None
        if comm is not None and (comm.ended or comm.has_died):
            comm.close()
            comm = None
        self.present = Configuration(comm or self.take(timeout), self._on_stuck)
        return self.present

    def close(self) -> None:
        """End everything. Idempotent."""
        present, kept, self.present, self._kept = self.present, self._kept, None, None
        for comm in (None if present is None else present.comm, kept):
            if comm is not None:
                comm.close()
        super().close()
