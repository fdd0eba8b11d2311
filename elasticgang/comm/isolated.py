"""torchft's reconfigurable process groups, isolated in a comm process: the places of `ProcessGroupBaby*`.

Each is one group of a `GroupSet`, whose rules hold: the first error, which `errored` gives, ends a configuration
(GROUPS-2), and one owner configures, aborts and shuts down (GROUPS-3).
"""

from __future__ import annotations

import contextlib
import itertools
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
)

_GROUP = "all"
_CLOSE_TIMEOUT_S = 2.0
_MOST_TOGETHER = 1000  # tensors: what is said of them fits into one message
_LONGEST_TIMEOUT_S = 1e9  # 30 years; what counts in nanoseconds has room for it
_START_TIMEOUT_S = 240.0  # the fork server's and the process's own deadlines come before


class IsolatedCollectives(CollectiveMethods):
    """The collectives of a group in a comm process."""

    keeps_in_place = True  # after an error: a tensor reduced in place is as it was, or zeros
    has_mean = False  # of its own: a sum and a division otherwise
    _group = _GROUP  # its name in the configuration
    _timeout: float | None = None  # of a collective without one of its own; None is the configuration's

    def _present(self) -> Configuration:
        """Raises InvalidOperationError when there is none."""
        raise NotImplementedError

    def _submit(self, call: Call) -> TorchWork:
        return TorchWork([self.start(part) for part in _together(call.parts)], call, owner=self)

    def start(self, collective: Collective) -> Work:
        """Start a checked collective."""
        if collective.op is ReduceOperation.MEAN and not self.has_mean:
            return start_mean(self.start, collective, self.size())
        return self._present().start(self._group, collective, self._timeout)


class ProcessGroupIsolated(IsolatedCollectives, ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """What all backends share; use `ProcessGroupIsolatedGloo` or `ProcessGroupIsolatedNCCL`."""

    backend = "gloo"
    _timeout: float

    def __init__(self, timeout: float | timedelta = 60.0, *, reuse: bool = True) -> None:
        """`timeout`: seconds (or a timedelta) for `configure` and for each collective. `reuse=False`: a new process for
        each configuration, as torchft has it.

        Raises:
            ValueError: `timeout` is not above 0, or no number of seconds.
            NotSupportedError: the backend is not available here.
        """
        super().__init__(0, 1)
        self._timeout = _seconds(timeout)
        self._check_available()
        self._rank, self._size = 0, 1
        self._closed = False
        self._groups = GroupSet(self._starter(), reuse=reuse)

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
        """Become rank `rank` of `world_size`. Blocks until all have met, at most the timeout, which does not count how
        long the first comm process takes to start. Any of them may leave or end as soon as it returns.

        `store_addr`: "host:port/prefix", of a `TCPStore`; no other configuration may use the prefix. The ids and ranks
        beyond `rank` and `world_size` are torchft's for its logs, and not needed here.

        Raises:
            ValueError: an argument does not fit. Nothing has changed.
            GangError: a peer did not come (`CollectiveTimeoutError`), or failed. The group is unconfigured.
        """
        address, _, prefix = store_addr.partition("/")
        if not prefix or not address.rpartition(":")[2].isdecimal():
            raise ValueError(f"`store_addr` must be host:port/prefix, but is {store_addr!r} instead.")
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"`rank` must be at least 0 and less than `world_size` ({world_size}), but is {rank} instead."
            )
        self._groups.leave()
        self._rank, self._size = rank, world_size
        try:
            try:
                self._connect(address, prefix)
            except GangError:
                failed = self._groups.present
                if failed is None or not failed.has_died:
                    raise
                self._groups.leave()  # it was killed before, and nobody had noticed
                self._connect(address, prefix)
        finally:
            self._groups.prepare()

    def _connect(self, address: str, prefix: str) -> None:
        configuration = self._groups.open(_START_TIMEOUT_S)
        self._closed = False
        spec = GroupSpec(_GROUP, self._rank, self._size)
        configuration.connect(prefix, [spec], store=address, timeout=self._timeout, handshake=True)

    def abort(self, errored: bool = True) -> None:
        """End the present configuration: every work under way has failed when this returns, and none of its memory is
        touched any more. Idempotent; the next `configure` works."""
        configuration = self._groups.present
        if configuration is not None:
            configuration.fail(PeerLostError("the process group was aborted"))

    def shutdown(self) -> None:
        """End everything. Later calls raise `ClosedError`, until the next `configure`. Idempotent."""
        self._closed = True
        self._groups.close()

    def errored(self) -> Exception | None:
        """The error that ended the present configuration; None while it is sound."""
        error = self._groups.present and self._groups.present.error
        if error is None:
            return None
        kind = CollectiveTimeoutError if isinstance(error, CollectiveTimeoutError) else PeerLostError
        return kind(f"the process group was aborted: {error}")

    def set_timeout(self, timeout: timedelta) -> None:
        """For collectives that are waited for from now on, and for `configure`."""
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
        """Wait until the process that takes over after an abort is ready. Raises as `StandbyPool.take`."""
        return self._groups.wait_standby(timeout_s)

    def num_active_work(self) -> int:
        """Collectives under way."""
        return 0 if self.comm_process is None else self.comm_process.num_works

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self._rank}, size={self._size})"

    def __del__(self) -> None:
        """End what nobody can reach any more; elsewhere, since a collection may come at any point of any thread. At the
        interpreter's end nothing: the processes end with this one, and a thread that is started then never runs."""
        if sys.is_finalizing():
            return
        groups = getattr(self, "_groups", None)
        if groups is not None and not self._closed:
            with contextlib.suppress(RuntimeError):  # no thread can be started any more
                threading.Thread(target=groups.close, name="comm-end", daemon=True).start()

    def _present(self) -> Configuration:
        configuration = self._groups.present
        if self._closed:
            raise ClosedError("the process group's handle is closed: it was shut down")
        if configuration is None:
            raise InvalidOperationError("the process group is not configured; call `configure` first")
        return configuration


class SharedProcessGroup(IsolatedCollectives, ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """One of the groups of a configuration, which its owner has connected and will leave."""

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
        """The error that ended the configuration; None while it is sound."""
        return self._configuration.error

    def abort(self, errored: bool = True) -> None:
        """End the configuration, with all groups that share it."""
        self._configuration.fail(PeerLostError("the process group was aborted"))

    def _present(self) -> Configuration:
        return self._configuration


def _together(parts: Sequence[Collective]) -> Iterator[Collective]:
    """Reductions of one kind in a row as one, which Gloo flattens: each costs a way to the comm process and back."""

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
    """Gloo in a comm process: takes the place of torchft's `ProcessGroupBabyGloo`. For CPU tensors."""


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
