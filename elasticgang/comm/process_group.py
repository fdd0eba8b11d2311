"""torchft's reconfigurable process groups, isolated in a comm process: the places of `ProcessGroupBaby*`.

I1  A configuration's process is used again after a clean end; after an error, or with works under way, it is killed,
    and the standby takes over. Either way no work of an earlier configuration reaches the new groups.
I2  The first error ends the configuration: it is kept for `errored`, the process is killed, every work has ended, and
    later calls fail at once, until the next `configure`.
I3  One owner configures, aborts and shuts down; any number of threads issue collectives.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as ProcessFuture
from dataclasses import replace
from datetime import timedelta

import torch
from torch.futures import Future
from torchft.process_group import ProcessGroup

from elasticgang.comm import deadlines
from elasticgang.comm.client import CommProcess, GroupSpec
from elasticgang.comm.supply import CommSupply, own_forks
from elasticgang.comm.work import CommWork
from elasticgang.errors import (
    ClosedError,
    CollectiveTimeoutError,
    GangError,
    InvalidOperationError,
    NotSupportedError,
    PeerLostError,
    StaleGenerationError,
)
from elasticgang.gang.base import REDUCING, Collective, ReduceOperation, Work, check_mean, follow, start_mean
from elasticgang.gang.calls import Call
from elasticgang.gang.dtypes import reduced_dtype
from elasticgang.gang.elastic import group_call
from elasticgang.gang.torch_group import CollectiveMethods, TorchWork

_GROUP = "all"
_CLOSE_TIMEOUT_S = 2.0
_MOST_TOGETHER = 1000  # tensors: what is said of them fits into one message
_LONGEST_TIMEOUT_S = 1e9  # 30 years; what counts in nanoseconds has room for it
_START_TIMEOUT_S = 240.0  # the fork server's and the process's own deadlines come before


class _Died(PeerLostError):
    """The comm process ended by itself while it was configured."""


class IsolatedWork:
    """A collective of one configuration. A deadline that passes ends the configuration."""

    def __init__(self, work: CommWork, timeout: float, fail: Callable[[GangError], None]) -> None:
        """`fail` keeps no group: a future has it until its end."""
        self.comm_work = self._work = work
        self._timeout, self._fail = timeout, fail

    def wait(self, timeout: float | None = None) -> bool:
        try:
            self._work.wait(timeout or self._timeout)
        except GangError as error:
            self._fail(error)
            raise
        return True

    def get_future(self) -> Future[bool]:
        work, timeout, fail = self._work, self._timeout, self._fail
        future = work.future
        if not work.done():
            late = CollectiveTimeoutError(f"{work.name} timed out after {timeout:g} seconds")
            deadlines.deadlines.add(work, timeout, lambda: fail(late))
        return follow(future, lambda future: future.value() is not None)


class ProcessGroupIsolated(CollectiveMethods, ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """What all backends share; use `ProcessGroupIsolatedGloo` or `ProcessGroupIsolatedNCCL`."""

    backend = "gloo"
    keeps_in_place = True  # after an error: a tensor reduced in place is as it was, or zeros
    has_mean = False  # of its own: a sum and a division otherwise

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
        self._reuse = reuse
        self._lock = threading.Lock()
        self._rank, self._size = 0, 1
        self._comm: CommProcess | None = None
        self._error: GangError | None = None
        self._closed = False
        self._supply = CommSupply(self._starter())

    def _starter(self) -> Callable[[], ProcessFuture[CommProcess]]:
        return own_forks().start

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
        comm = self._leave()
        self._rank, self._size = rank, world_size
        try:
            try:
                self._enter(comm or self._supply.take(_START_TIMEOUT_S), address, prefix)
            except _Died:  # killed before, and nobody had noticed
                self._enter(self._supply.take(_START_TIMEOUT_S), address, prefix)
        finally:
            self._supply.prepare()

    def _enter(self, comm: CommProcess, address: str, prefix: str) -> None:
        with self._lock:
            self._comm, self._error, self._closed = comm, None, False
        spec = GroupSpec(_GROUP, self._rank, self._size)
        try:
            fail = self._error_sink(comm)
            comm.configure(prefix, [spec], fail, store=address, timeout=self._timeout, handshake=True)
        except GangError as error:
            has_died = comm.has_died
            self._fail(comm, error)
            if has_died:
                comm.close()
                raise _Died(str(error)) from error
            raise

    def abort(self, errored: bool = True) -> None:
        """End the present configuration: every work under way has failed when this returns, and none of its memory is
        touched any more. Idempotent; the next `configure` works."""
        comm = self._comm
        if comm is not None:
            self._fail(comm, PeerLostError("the process group was aborted"))

    def shutdown(self) -> None:
        """End everything. Later calls raise `ClosedError`, until the next `configure`. Idempotent."""
        with self._lock:
            self._closed = True
            comm, self._comm = self._comm, None
        _end(comm, self._supply)

    def errored(self) -> Exception | None:
        """The error that ended the present configuration; None while it is sound."""
        if self._error is None:
            return None
        kind = CollectiveTimeoutError if isinstance(self._error, CollectiveTimeoutError) else PeerLostError
        return kind(f"the process group was aborted: {self._error}")

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

    def num_active_work(self) -> int:
        """Collectives under way."""
        comm = self._comm
        return 0 if comm is None else comm.num_works

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self._rank}, size={self._size})"

    def __del__(self) -> None:
        """End what nobody can reach any more; elsewhere, since a collection may come at any point of any thread. At the
        interpreter's end nothing: the processes end with this one, and a thread that is started then never runs."""
        if sys.is_finalizing():
            return
        comm, supply = getattr(self, "_comm", None), getattr(self, "_supply", None)
        if supply is not None and not (comm is None and self._closed):
            with contextlib.suppress(RuntimeError):  # no thread can be started any more
                threading.Thread(target=_end, args=(comm, supply), name="comm-end", daemon=True).start()

    # -- collectives

    def _submit(self, call: Call) -> TorchWork:
        check_dtypes(call)
        return TorchWork([self._start(part) for part in _together(call.parts)], call, owner=self)

    def _start(self, collective: Collective) -> Work:
        if collective.op is ReduceOperation.MEAN:
            if not self.has_mean:
                return start_mean(self._start, collective, self._size)
            check_mean(collective.outputs[0])
        with self._lock:
            comm, closed = self._comm, self._closed
        if closed:
            raise ClosedError("the process group's handle is closed: it was shut down")
        if comm is None:
            raise InvalidOperationError("the process group is not configured; call `configure` first")
        timeout = collective.timeout_s or self._timeout  # which may be another than the configuration's
        name, options = group_call(replace(collective, timeout_s=timeout))
        work = comm.submit(_GROUP, name, collective.outputs, collective.inputs, **options)
        return IsolatedWork(work, timeout + collective.grace_s, self._error_sink(comm))

    # -- one configuration

    def _error_sink(self, comm: CommProcess) -> Callable[[GangError], None]:
        """What the comm process and its works may keep: it keeps neither process nor group."""
        group, process = weakref.ref(self), weakref.ref(comm)

        def fail(error: GangError) -> None:
            present, comm = group(), process()
            if comm is not None and present is not None:
                present._fail(comm, error)
            elif comm is not None:
                comm.abort(error)

        return fail

    def _fail(self, comm: CommProcess, error: GangError) -> None:
        """I2. Of an earlier configuration: nothing of this one changes."""
        with self._lock:
            if self._comm is comm and self._error is None:
                self._error = error
        comm.abort(error)

    def _leave(self) -> CommProcess | None:
        """I1. The process to use again, if that can be."""
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is None:
            return None
        if self._reuse and self._error is None and not comm.ended:
            try:
                comm.close_groups(_CLOSE_TIMEOUT_S)
                return comm
            except GangError:
                pass
        comm.abort(StaleGenerationError("the process group was configured anew"))
        comm.close()
        return None


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


def check_dtypes(call: Call, reduced: Callable[[str, object, torch.dtype], torch.dtype] = reduced_dtype) -> None:
    """Of a call with parts, of which some would be sent before another is refused.

    Raises:
        ValueError: a part reduces, and its dtype cannot be.
    """
    if len(call.parts) < 2:
        return
    for part in call.parts:
        if part.op is ReduceOperation.MEAN:
            check_mean(part.outputs[0])
        if part.call in REDUCING:
            reduced(part.call, part.op.name.lower(), part.outputs[0].dtype)


def _end(comm: CommProcess | None, supply: CommSupply) -> None:
    if comm is not None:
        comm.close()
    supply.close()


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
