"""Reconfigurable process groups in a comm process. They replace torchft's `ProcessGroupBaby*`.

Each is the one group of a `GroupSet`, whose rules apply: the first error ends a configuration (GROUPS-2) and is the
result of `errored`; one owner configures, aborts and shuts down (GROUPS-3).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as ProcessFuture
from dataclasses import replace
from datetime import timedelta

import torch
from torchft.process_group import ProcessGroup

from elasticgang.collectives.collective import Collective, ReduceOperation
from elasticgang.collectives.table import start_mean
from elasticgang.collectives.torch_calls import Call
from elasticgang.collectives.torch_methods import CollectiveMethods, TorchWork
from elasticgang.collectives.work import Work
from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.group_set import Configuration, GroupSet
from elasticgang.comm.standby_pool import local_launcher
from elasticgang.errors import (
    ClosedError,
    CollectiveTimeoutError,
    GangError,
    InvalidOperationError,
    NotSupportedError,
    PeerLostError,
    StaleGenerationError,
)
from elasticgang.integers import integer

_GROUP = "all"
_CLOSE_TIMEOUT_S = 2.0
_LARGEST_PORT = (1 << 16) - 1
_MOST_TOGETHER = 1000  # tensors whose descriptions fit into one message
_LONGEST_TIMEOUT_S = 1e9  # 30 years, which fits into 64-bit nanoseconds
_START_TIMEOUT_S = 240.0  # longer than the deadlines of the fork server and of the process


class IsolatedCollectives(CollectiveMethods):
    """The collectives of a group in a comm process."""

    keeps_in_place = True  # after an error, a tensor reduced in place has its old values or zeros
    has_mean = False  # whether the backend has MEAN; otherwise it is a sum and a division
    _group = _GROUP  # its name in the configuration
    _timeout: float | None = None  # of collectives without their own; None for the configuration's

    def _present(self) -> Configuration:
        """The present configuration. Raises InvalidOperationError: there is none."""
        raise NotImplementedError

    def _submit(self, call: Call) -> TorchWork:
        return TorchWork([self.start(part) for part in _together(call.parts)], call, owner=self)

    def start(self, collective: Collective) -> Work:
        """Start a checked collective."""
        if collective.op is ReduceOperation.MEAN and not self.has_mean:
            return start_mean(self.start, collective, self.size())
        return self._present().start(self._group, collective, self._timeout)


class ProcessGroupIsolated(IsolatedCollectives, ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """The common base; use `ProcessGroupIsolatedGloo` or `ProcessGroupIsolatedNCCL`."""

    backend = "gloo"
    _timeout: float
    _was_configured = False
    _owner = 0  # the pid of the process that made the group (COMM-7)

    def __init__(self, timeout: float | timedelta = 60.0, *, reuse: bool = True) -> None:
        """`timeout`: seconds, or a timedelta, for `configure` and for each collective. `reuse=False`: start a new
        process for each configuration, as torchft does.

        Raises:
            ValueError: `timeout` is not a number of seconds above 0.
            NotSupportedError: the backend is not available on this machine.
        """
        super().__init__(0, 1)
        self._timeout = _seconds(timeout)
        self._check_available()
        self._rank, self._size = 0, 1
        self._closed = False
        self._groups = GroupSet(self._starter(), reuse=reuse)
        self._owner = os.getpid()

    def _starter(self) -> Callable[[], ProcessFuture[CommProcess]]:
        return local_launcher().start

    def _check_available(self) -> None:
        if not torch.distributed.is_gloo_available():
            raise NotSupportedError("Gloo is not available: torch was built without it.")

    # -- torchft's ProcessGroup

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Become rank `rank` of `world_size`. Blocks until all ranks have connected, at most the timeout. The start of
        the first comm process does not count. Any rank may leave or exit as soon as this returns.

        `store_addr`: "host:port/prefix" of a `TCPStore`; no other configuration may use the prefix. `replica_id`,
        `quorum_id` and the further ranks are those of torchft's logs, and ignored.

        Raises:
            ValueError: an argument is invalid. Nothing has changed.
            TypeError: `rank` or `world_size` is not an integer. Nothing has changed.
            InvalidOperationError: this is a forked child of the process that made the group. Nothing has changed.
            GangError: a peer did not connect (`CollectiveTimeoutError`), or failed. The group is not configured.
        """
        address, _, prefix = str(store_addr).partition("/")
        port = address.rpartition(":")[2]
        if not prefix or not port.isdecimal() or int(port) > _LARGEST_PORT:
            raise ValueError(f"`store_addr` must be host:port/prefix, but is {store_addr!r} instead.")
        rank, world_size = _integer("rank", rank), _integer("world_size", world_size)  # the comm process gets JSON
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"`rank` must be at least 0 and less than `world_size` ({world_size}), but is {rank} instead."
            )
        if self._owner != os.getpid():
            raise InvalidOperationError(
                "the process group belongs to the parent of this process; make another one here"
            )
        self._was_configured = True
        self._groups.leave()
        self._rank, self._size = rank, world_size
        try:
            try:
                self._connect(address, prefix)
            except GangError:
                failed = self._groups.present
                if failed is None or not failed.has_died:
                    raise
                self._groups.leave()  # its process had died unnoticed: try again with the standby
                self._connect(address, prefix)
        finally:
            self._groups.prepare()

    def _connect(self, address: str, prefix: str) -> None:
        configuration = self._groups.open(_START_TIMEOUT_S)
        self._closed = False
        spec = GroupSpec(_GROUP, self._rank, self._size)
        configuration.connect(prefix, [spec], store=address, timeout=self._timeout, handshake=True)

    def abort(self, errored: bool = True) -> None:
        """End the present configuration. When this returns, every pending work has failed, and no caller's tensor is
        accessed. Idempotent. A later `configure` works."""
        configuration = self._groups.present
        if configuration is not None:
            configuration.fail(PeerLostError("the process group was aborted"))

    def shutdown(self) -> None:
        """End all comm processes. Later calls raise `ClosedError` until the next `configure`. Idempotent."""
        self._closed = True
        if self._owner == os.getpid():
            self._groups.close()

    def errored(self) -> Exception | None:
        """The error that ended the present configuration; None without one."""
        error = self._groups.present and self._groups.present.error
        if error is None:
            return None
        kind = CollectiveTimeoutError if isinstance(error, CollectiveTimeoutError) else PeerLostError
        return kind(f"the process group was aborted: {error}")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives and of `configure`."""
        self._timeout = _seconds(timeout)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank = rank
    getSize = size

    def getBackendName(self) -> str:
        return f"elasticgang-isolated-{self.backend}"

    @property
    def comm_process(self) -> CommProcess | None:
        """The process of the present configuration."""
        return None if self._groups.present is None else self._groups.present.comm

    def wait_standby(self, timeout_s: float) -> CommProcess:
        """Wait until the standby, which takes over after an abort, is ready. Raises as `StandbyPool.take`."""
        return self._groups.wait_standby(timeout_s)

    def num_active_work(self) -> int:
        """The number of pending collectives."""
        return 0 if self.comm_process is None else self.comm_process.num_works

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self._rank}, size={self._size})"

    def __del__(self) -> None:
        """Close the comm processes, on another thread, because the garbage collector may run at any point of any
        thread. When the interpreter exits, do nothing: the processes exit with this one, and new threads do not run.
        Nor in a forked child (COMM-7)."""
        if sys.is_finalizing() or self._owner != os.getpid():
            return
        groups = getattr(self, "_groups", None)
        if groups is not None and not self._closed:
            with contextlib.suppress(RuntimeError):  # no thread can be started
                threading.Thread(target=groups.close, name="comm-end", daemon=True).start()

    def _present(self) -> Configuration:
        configuration = self._groups.present
        if self._closed:
            raise ClosedError("the process group's handle is closed: it was shut down")
        if configuration is not None and configuration.is_connected:
            return configuration
        if self._was_configured:  # GROUPS-5
            error = None if configuration is None else configuration.error
            raise StaleGenerationError(
                f"the process group is not configured: {error or '`configure` has not returned'}"
            )
        raise InvalidOperationError("the process group is not configured; call `configure` first")


class SharedProcessGroup(IsolatedCollectives, ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """One of the groups of a configuration. The owner of the configuration connects and leaves it."""

    def __init__(self, configuration: Configuration, spec: GroupSpec) -> None:
        super().__init__(spec.rank, spec.size)
        self._configuration, self._spec, self._group = configuration, spec, spec.name

    def rank(self) -> int:
        return self._spec.rank

    def size(self) -> int:
        return self._spec.size

    getRank = rank
    getSize = size

    def getBackendName(self) -> str:
        return "elasticgang-isolated-gloo"

    def errored(self) -> Exception | None:
        """The error that ended the configuration; None without one."""
        return self._configuration.error

    def abort(self, errored: bool = True) -> None:
        """End the configuration with all of its groups."""
        self._configuration.fail(PeerLostError("the process group was aborted"))

    def _present(self) -> Configuration:
        return self._configuration


def _together(parts: Sequence[Collective]) -> Iterator[Collective]:
    """Merge consecutive all-reduces of one kind into one, which Gloo flattens. Each saves a round trip to the comm
    process."""

    def kind(part: Collective) -> tuple[object, ...]:
        merges = part.call == "all_reduce" and part.op is not ReduceOperation.MEAN and part.outputs[0].numel() > 0
        return merges, part.call, part.op, part.outputs[0].dtype if merges else None, part.timeout_s

    for (merges, *_), run in itertools.groupby(parts, kind):
        row = list(run)
        for first in range(0, len(row), _MOST_TOGETHER) if merges else ():
            tensors = tuple(part.outputs[0] for part in row[first : first + _MOST_TOGETHER])
            yield replace(row[0], outputs=tensors, inputs=tensors)
        if not merges:
            yield from row


class ProcessGroupIsolatedGloo(ProcessGroupIsolated):
    """Gloo in a comm process, for CPU tensors. Replaces torchft's `ProcessGroupBabyGloo`."""


def _integer(name: str, value: object) -> int:
    number = integer(value)
    if number is None:
        raise TypeError(f"`{name}` must be an integer, but is {value!r} instead.")
    return number


def _seconds(timeout: float | timedelta) -> float:
    given: object = timeout
    if not isinstance(given, timedelta | int | float):
        raise ValueError(f"`timeout` must be seconds or a timedelta, but is {given!r} instead.")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds <= _LONGEST_TIMEOUT_S:
        raise ValueError(
            f"`timeout` must be above 0 seconds and at most {_LONGEST_TIMEOUT_S:g}, but is {seconds:g} instead."
        )
    return seconds
