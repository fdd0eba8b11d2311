"""The process groups of one rank in its comm process, over successive configurations.

GROUPS-1  A configuration has ended before the next one begins. If it ended without an error and without pending works,
          the next one reuses its process. Otherwise the process is killed, and the next one takes the standby. In both
          cases no work of an earlier configuration reaches the new groups.
GROUPS-2  The first error ends the configuration: it is stored, the process is killed, every pending work ends, and
          later works fail at once.
GROUPS-3  One owner calls `open`, `connect` and `leave`. Any thread may call `start`, `kill` and `fail`.
GROUPS-4  At most one process of a former configuration is halted (COMM-6). `end_halted` kills it, and so do the end of
          the next configuration and `close`.
GROUPS-5  A configuration takes collectives once `connect` has returned, and until it has ended. What another thread
          starts before or after that fails, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as ProcessFuture
from typing import Any

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.description import Description
from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.standby_pool import StandbyPool
from elasticgang.comm.work import CommWork
from elasticgang.errors import GangError, OperationalError, StaleGenerationError

_CLOSE_TIMEOUT_S = 2.0


def _reraise(stuck: OperationalError) -> None:
    raise stuck


class Configuration:
    """The groups under one prefix, in one comm process.

    `fail_weakly` is `fail` without a reference to the configuration, for holders that must not keep it alive: works,
    their futures, and the comm process.
    """

    def __init__(self, comm: CommProcess, on_stuck: Callable[[OperationalError], None] = _reraise) -> None:
        """`on_stuck`: called if the process cannot be reaped in time; by default it raises."""
        self.comm = comm
        self.error: GangError | None = None
        self.on_end: Callable[[GangError], None] | None = None  # called with the first error; must not block
        self.has_died = False  # the process died by itself, before or during `connect`
        self.is_connected = False  # `connect` has returned
        self.under_way: list[tuple[str, Description]] = []  # as of `CommProcess`, when the configuration ended
        self._on_stuck = on_stuck
        self._number: int | None = None  # of the groups that `connect` has made, in the process (COMM-8)
        self._is_left = False
        self._has_error = threading.Event()
        self._lock = threading.Lock()
        present = weakref.ref(self)

        def fail_weakly(error: GangError) -> None:
            configuration = present()
            if configuration is not None:  # otherwise its owner has closed the process
                configuration.fail(error)

        self.fail_weakly = fail_weakly

    def connect(self, prefix: str, groups: Sequence[GroupSpec], **options: Any) -> None:
        """Make the groups (see `CommProcess.configure`). Raises GangError; the configuration has then ended."""
        with self._ending():
            self._number = self.comm.configure(prefix, groups, self.fail_weakly, **options)
        self.is_connected = True

    def add(self, prefix: str, group: GroupSpec, **options: Any) -> None:
        """Add a group (see `CommProcess.add_group`). Raises GangError; the configuration has then ended."""
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
        """Start a checked collective. `timeout`: seconds, if the collective has none; None for the configuration's. A
        timeout ends the configuration."""
        return self.comm.submit(group, collective, timeout, self.fail_weakly, self._number)

    def kill(self, error: GangError, *, halt: bool = False) -> None:
        """End the configuration: store `error` and kill the process, which peers notice at once. Never blocks; `fail`
        waits for the death. Does nothing after `leave` returned True. `halt`: all peers are told of the end otherwise:
        halt the process (COMM-6)."""
        with self._lock:
            if self._is_left:
                return
            is_first, self.error = self.error is None, self.error or error
            if is_first:
                self.under_way = self.comm.under_way()
            self.comm.kill(error, halt=halt)
        self._has_error.set()
        if is_first and self.on_end is not None:
            self.on_end(error)

    def wait_error(self, timeout: float) -> GangError | None:
        """The error with which the configuration has ended, or ends within `timeout` seconds."""
        self._has_error.wait(timeout)
        return self.error

    def fail(self, error: GangError) -> None:
        """`kill`, and wait until every work has ended. No caller's tensor is accessed after that.

        Raises:
            OperationalError: the process cannot be reaped in time, unless `on_stuck` handles it.
        """
        self.kill(error)
        if self._is_left:
            return
        try:
            self.comm.abort(error)
        except OperationalError as stuck:
            self._on_stuck(stuck)

    def check(self) -> None:
        """Does nothing: a collective in a comm process has failed or succeeded once its `wait` has returned."""

    def leave(self) -> bool:
        """Close the groups and keep the process. False: only a kill can end the configuration."""
        if self.error is None and not self.comm.ended:
            with contextlib.suppress(GangError), self._ending():
                self.comm.close_groups(_CLOSE_TIMEOUT_S)
                with self._lock:
                    self._is_left = self.error is None
        return self._is_left


class GroupSet(StandbyPool):
    """The successive configurations of one rank, and its comm processes."""

    def __init__(
        self,
        start: Callable[[], ProcessFuture[CommProcess]],
        *,
        reuse: bool = True,
        on_stuck: Callable[[OperationalError], None] = _reraise,
    ) -> None:
        """`reuse=False`: take a new process for each configuration. `on_stuck`: see `Configuration`."""
        super().__init__(start)
        self._reuse, self._on_stuck = reuse, on_stuck
        self.present: Configuration | None = None
        self._kept: CommProcess | None = None  # a process with closed groups, to reuse
        self._halted_end: threading.Event | None = None  # GROUPS-4

    def leave(self) -> None:
        """End the present configuration, if there is one (GROUPS-1)."""
        present, self.present = self.present, None
        if present is None:
            return
        self.end_halted()
        if self._reuse and present.leave():
            self._kept = present.comm
        else:
            present.fail(StaleGenerationError("the process group was configured anew"))
            present.comm.close(wait=False)
            self._halted_end = present.comm.halted_end

    def end_halted(self) -> None:
        """Kill the process of a former configuration, if there is one. Never blocks."""
        halted_end, self._halted_end = self._halted_end, None
        if halted_end is not None:
            halted_end.set()

    def open(self, timeout: float) -> Configuration:
        """Begin a configuration without groups: in the process that was left, otherwise in the standby, for which it
        waits up to `timeout` seconds. Raises as `StandbyPool.take`."""
        comm, self._kept = self._kept, None
        if comm is not None and (comm.ended or comm.has_died):
            comm.close()
            comm = None
        self.present = Configuration(comm or self.take(timeout), self._on_stuck)
        return self.present

    def close(self) -> None:
        """End the configuration and close all comm processes. Idempotent."""
        self.end_halted()
        present, kept, self.present, self._kept = self.present, self._kept, None, None
        for comm in (None if present is None else present.comm, kept):
            if comm is not None:
                comm.close()
        super().close()
