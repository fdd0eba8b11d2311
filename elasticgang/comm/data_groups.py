"""The torchft process groups that carry a job's data, over successive configurations.

Uses only torchft's interface: `configure`, `abort`, `errored`, and the collectives that every torchft process group
has. All other collectives are composed of these.

DATA-1  Every rank configures its groups in the same order, one after another.
DATA-2  The first error ends the configuration: every group is aborted, and every collective has ended before its
        tensors are used again.
DATA-3  All groups are aborted at once, each on a thread of its own: a kernel of one communicator may hold the abort of
        another one up. If a group within this process has not ended `ABORT_TIMEOUT_S` after its abort began, on CUDA
        `DEVICE_ABORT_TIMEOUT_S`, the rank is ended: the group's threads or kernels may still write to tensors. On CUDA
        that holds for the abort itself, because a work may count as ended while its kernel runs. An abort of NCCL is an
        exception (DATA-7).
DATA-4  Nothing refers to the works of an ended configuration. Works keep connections open, and peers notice the end by
        the closed connections.
DATA-5  What a device has done counts only if no group has an error afterwards: torch's watchdog, and torchft's timeout
        of a stream, abort a communicator by themselves, and the streams that wait for it then go on.
DATA-6  A configuration keeps no work that is over: torch's works keep their outputs, which would fill a device.
DATA-7  NCCL aborts its kernels at once, and then needs a second for its own threads. So a configuration of such groups
        has ended once all aborts have begun and the device has drained. The aborts go on beside the next configuration,
        which has new groups, with the same deadline. They have returned before the aborts of that one begin, and before
        the rank's end.
DATA-8  A collective that a device has not passed in its timeout ends the configuration (PASSED-2). torch would give
        those of NCCL 10 minutes, whatever the call says.
DATA-9  The tensors of a collective, also those that were made for it, are kept until the stream that has waited for it
        is past it. It may be another stream than theirs: a future's callbacks have one of their own.
DATA-10  Where the host has no further thread, a group is not configured, which costs the generation, and aborts run on
         the thread that calls for them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torchft.process_group as torchft
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWorkBase
from torch.futures import Future

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.description import Description, describe
from elasticgang.collectives.preparation import start_prepared
from elasticgang.collectives.table import TABLE, compose
from elasticgang.collectives.work import Work, follow, waited_for
from elasticgang.comm.comm_process import GroupSpec, translated
from elasticgang.comm.cuda import Cuda
from elasticgang.comm.device_progress import DeviceProgress
from elasticgang.comm.isolated import ProcessGroupIsolated
from elasticgang.errors import (
    CollectiveTimeoutError,
    GangError,
    NotSupportedError,
    OperationalError,
    PeerLostError,
    StaleGenerationError,
)
from elasticgang.process.late_signals import LONGEST_WAIT_S
from elasticgang.process.status_page import CommBlock
from elasticgang.torch_private import baby_process, unreported_error

ABORT_TIMEOUT_S = 1.0
DEVICE_ABORT_TIMEOUT_S = 10.0  # NCCL waits for its kernels and frees its memory, and all survivors abort at once
_WAIT_MARGIN_S = 2.0  # so that the group's own timeout comes first: it ends the collective, this one only the wait
_POLL_S = 0.005
_MOST_UNCHECKED = 64

MakeGroup = Callable[[], torchft.ProcessGroup]


class DataWork(Work):
    """A collective of one configuration, in a torchft group."""

    def __init__(
        self, configuration: DataConfiguration, group: str, description: Description, timeout: float, work: Any
    ) -> None:
        """`timeout`: seconds, on a device (DATA-8)."""
        self._configuration, self.group, self.description, self._work = configuration, group, description, work
        self._call = description.call
        self._timeout = timeout
        self.is_over = self.is_awaited = False

    def _wait(self, timeout: float | None) -> bool:
        reason = self._failure(timeout)
        if reason is not None:
            self._work = None  # DATA-4
            raise translated(self._call, reason)
        return True

    def _future(self) -> Future[bool]:
        if self._configuration.device.type == "cpu":
            return waited_for(lambda: self._wait(None))
        future = self._work.get_future()

        def finish(future: Future[Any]) -> bool:
            try:
                future.value()
            except Exception as error:
                reason = str(error) or type(error).__name__
            else:
                self._complete(None)
                return True
            self._work = None
            raise translated(self._call, reason)

        return follow(future, finish)

    def has_ended(self) -> bool:
        """Whether the collective has ended. A work without `is_completed` counts as ended after its group's abort."""
        work = self._work
        if work is None or self.is_over:
            return True
        if type(work) is TorchWorkBase or type(work).is_completed is not TorchWorkBase.is_completed:
            return bool(work.is_completed())
        return self._configuration.is_aborted

    def drop(self) -> None:
        self._work = None

    def _failure(self, timeout: float | None) -> str | None:
        """Wait, and return why the collective failed; None on success. It raises no error: the frames of an error
        would refer to the work (DATA-4)."""
        work, configuration = self._work, self._configuration
        if work is None:
            return str(configuration.error)
        self.is_awaited = True
        configuration.num_waiting += 1
        try:
            if configuration.device.type == "cpu":
                work.wait(timedelta(seconds=(timeout or configuration.timeout) + _WAIT_MARGIN_S))
            else:  # without a timeout, a wait orders streams and does not block this thread
                work.wait()
        except Exception as error:
            return str(error) or type(error).__name__
        finally:
            configuration.num_waiting -= 1
        self._complete(timeout)
        return None

    def _complete(self, timeout: float | None) -> None:
        if not self.is_over:
            self.is_over = True
            self._configuration.follow(self.group, self._call, timeout or self._timeout)
            self._configuration.let_go(self)


class DataConfiguration:
    """The data groups of one generation."""

    def __init__(self, groups: DataGroups, block: CommBlock | None) -> None:
        """`block`: where the hang detector reads the progress of each group."""
        self._groups, self._block = groups, block
        self.device, self.timeout = groups.device, groups.timeout
        self.error: GangError | None = None
        self.num_waiting = 0  # threads inside a group's wait
        self.is_aborted = False  # every group's abort has returned
        self._pgs: dict[str, torchft.ProcessGroup] = {}
        self._connected: dict[str, tuple[torchft.ProcessGroup, GroupSpec]] = {}
        self._works: dict[DataWork, None] = {}  # in the order of their start
        self._over: weakref.WeakSet[DataWork] = weakref.WeakSet()  # DATA-6
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ender: threading.Thread | None = None
        self._has_ended = threading.Event()
        is_on_device = self.device.type == "cuda"
        self._progress = DeviceProgress(self.device.index or 0, groups.cuda) if is_on_device else None

    def connect(self, name: str, address: str, member: str, spec: GroupSpec, generation: int) -> torchft.ProcessGroup:
        """Configure the group of the gang `name` as `spec`. Blocks until all ranks have connected or the configuration
        has ended. `address`: "host:port/prefix" of the store.

        Raises:
            GangError: a peer did not connect, or the configuration has ended.
        """
        pg = self._pgs[name] = self._groups.take(name)
        failures: list[Exception] = []

        def configure() -> None:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                pg.configure(address, member, spec.rank, spec.size, quorum_id=generation)
            except Exception as error:
                failures.append(error)
            if self.error is not None:  # the caller no longer waits
                _abort(pg)
            self._changed.set()

        try:
            threading.Thread(target=configure, name="data-configure", daemon=True).start()
        except RuntimeError as exc:  # DATA-10
            raise PeerLostError(f"could not configure the process group of {name}: {exc}") from exc
        while not self._changed.wait(LONGEST_WAIT_S):  # SIGNAL-LATE; the group's own timeout ends `configure`
            pass
        self._changed.clear()
        if self.error is not None:
            self._groups.forget(name)  # its `configure` may still run and cannot be cancelled
            raise PeerLostError(f"the generation ended while the process group of {name} was configured")
        for failure in failures:
            if isinstance(failure, RuntimeError | OSError | EOFError):
                # The cause has the text of a device fault, but no traceback, which would keep the group's sockets open.
                cause = RuntimeError(str(failure))
                raise translated(f"could not configure the process group of {name}", str(failure)) from cause
            raise failure
        if self._block is not None:
            self._block.add(spec.name, spec.shown)
        self._connected[spec.name] = pg, spec
        return pg

    def group(self, name: str) -> torchft.ProcessGroup:
        """The connected group of that name."""
        pg, _ = self._connected[name]
        return pg

    def start(self, group: str, collective: Collective) -> Work:
        """Start a checked collective. Raises GangError."""
        if self.error is not None:
            raise StaleGenerationError(f"the generation has ended: {self.error}")
        pg, spec = self._connected[group]
        basic, last = compose(collective, spec.rank, spec.size)
        if not TABLE[basic.call].is_basic:
            raise NotSupportedError(f"{type(pg).__name__} has no `{collective.call}`; isolated-gloo has it.")
        return start_prepared(basic, self.device, lambda taken: self._issue(group, taken)).then(last)

    def stamp_begin(self, group: str, call: str) -> None:
        """Show the hang detector that a collective was submitted."""
        if self._block is not None:
            self._block.submitted(group, TABLE[call].is_message)

    def stamp_end(self, group: str, call: str) -> None:
        """Show the hang detector that a collective has completed."""
        if self._block is not None:
            self._block.completed(group, TABLE[call].is_message)

    def follow(self, group: str, call: str, timeout: float) -> None:
        """A collective has completed; on a device, the current stream waits for it."""
        if self._progress is None:
            self.stamp_end(group, call)
            return

        def on_late() -> None:  # DATA-8
            self.kill(CollectiveTimeoutError(f"{call} timed out after {timeout:g} seconds"))

        self._progress.follow(timeout, lambda: self.stamp_end(group, call), on_late)

    def let_go(self, work: DataWork) -> None:
        """The work is over (DATA-6)."""
        with self._lock:
            self._works.pop(work, None)
            self._over.add(work)

    def _issue(self, group: str, collective: Collective) -> Work:
        issued, last = None, None
        pg, _ = self._connected[group]
        try:
            issued, last = TABLE[collective.call].issue(pg, collective)
        except (ValueError, TypeError, NotSupportedError):
            raise
        except Exception as error:
            reason = str(error) or type(error).__name__
        if issued is None:
            raise translated(collective.call, reason)
        self.stamp_begin(group, collective.call)
        work = DataWork(self, group, describe(collective), collective.timeout_s or self.timeout, issued)
        with self._lock:
            if len(self._works) >= _MOST_UNCHECKED:
                self._works = {work: None for work in self._works if not work.has_ended()}
            self._works[work] = None
        if self.device.type != "cpu":
            work.then(functools.partial(self._keep_tensors, (*collective.outputs, *collective.inputs)))
        return work.then(last)

    def _keep_tensors(self, tensors: Sequence[Tensor]) -> None:
        """DATA-9."""
        for tensor in tensors:
            self._groups.cuda.keep_for_current_stream(tensor)

    def under_way(self) -> list[tuple[str, Description]]:
        """The collectives whose end nobody has waited for, the oldest first, each with the name of its group. One that
        has failed while somebody waited has not ended. Never blocks."""
        with self._lock:
            works = list(self._works)
        is_on_cpu = self.device.type == "cpu"
        return [
            (work.group, work.description._replace(has_ended=is_on_cpu and not work.is_awaited and work.has_ended()))
            for work in works
        ]

    def failure(self) -> GangError | None:
        """Call it once the device has done what was started. Why a collective has failed although its `wait` has
        returned (DATA-5, DATA-8); None: none has."""
        if self.error is not None:
            return self.error
        if self._progress is not None:
            self._progress.look()
        for name, (pg, _) in list(self._connected.items()):
            error = unreported_error(pg)
            if error is not None:
                return translated(f"the process group {name}", str(error) or type(error).__name__)
        return None

    def check(self) -> None:
        """End the configuration if there is a `failure`. Call it as that."""
        error = self.failure() if self.error is None else None
        if error is not None:
            self.fail(error)

    def kill(self, error: GangError) -> None:
        """End the configuration. Does not block (but see DATA-10); `fail` waits for the end."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        self._changed.set()
        try:
            threading.Thread(target=self._end, name="data-abort", daemon=True).start()
        except RuntimeError:  # DATA-10
            self._end()

    def fail(self, error: GangError) -> None:
        """`kill`, and wait until every collective has ended and accesses no tensor (DATA-2, DATA-3)."""
        self.kill(error)
        if self._ender is not threading.current_thread():
            self._has_ended.wait()

    def _end(self) -> None:
        self._ender = threading.current_thread()
        try:
            self._abort_all()
        finally:
            self._has_ended.set()

    def _abort_all(self) -> None:
        """DATA-3."""
        if self._progress is not None:
            self._progress.close()
        must_return = self.device.type == "cuda"
        self._groups.await_aborts()
        limit_s = DEVICE_ABORT_TIMEOUT_S if must_return else ABORT_TIMEOUT_S
        deadline = time.monotonic() + limit_s
        aborts = [_Abort(name, pg) for name, pg in list(self._pgs.items())]
        for abort in aborts:
            abort.begin()
        has_drained = self._await_drain(aborts, deadline)
        late = [] if has_drained else [abort for abort in aborts if not abort.has_returned(deadline)]
        self.is_aborted = not late
        with self._lock:
            works = list(self._works)
        while (must_return and late) or self.num_waiting or not all(work.has_ended() for work in works):
            if time.monotonic() > deadline:
                self._groups.on_stuck(_stuck(limit_s))
                return
            time.sleep(_POLL_S)
        if has_drained:
            self._groups.abort_beside([abort for abort in aborts if abort.is_alive()], deadline, limit_s)
        for stuck in (abort.stuck for abort in aborts if abort.stuck is not None):
            self._groups.on_stuck(stuck)
            return
        with self._lock:
            works += self._over
            self._works.clear()
            self._over.clear()
        for work in works:
            work.drop()
        for abort in late:
            self._groups.forget(abort.group)

    def _await_drain(self, aborts: Sequence[_Abort], deadline: float) -> bool:
        """DATA-7. False: an abort has to return itself, or the device has not drained by the deadline."""
        if self.device.type != "cuda" or not aborts or not all(abort.outlasts_kernels for abort in aborts):
            return False
        drain = threading.Thread(target=_drain, args=(self.device,), name="data-drain", daemon=True)
        try:
            drain.start()
        except RuntimeError:  # DATA-10
            return False
        drain.join(max(0.0, deadline - time.monotonic()))
        return not drain.is_alive()


class DataGroups:
    """The data groups of one rank, over all generations: one torchft process group per gang."""

    def __init__(
        self,
        make: MakeGroup,
        device: torch.device,
        timeout: float,
        on_stuck: Callable[[OperationalError], None],
        cuda: Cuda | None = None,
    ) -> None:
        """`make` is called once per gang. `timeout`: seconds for a collective without its own. `on_stuck`: ends the
        rank (DATA-3)."""
        self.device, self.timeout, self.on_stuck = device, timeout, on_stuck
        self.cuda = cuda or Cuda()
        self._make = make
        self._pgs: dict[str, torchft.ProcessGroup] = {}
        self._aborts: threading.Thread | None = None  # waits for those of the last configuration (DATA-7)
        self.present: DataConfiguration | None = None

    def take(self, name: str) -> torchft.ProcessGroup:
        """The group of the gang `name`. Raises TypeError: `make` returned something else than a torchft process
        group."""
        if name not in self._pgs:
            pg: object = self._make()
            if not isinstance(pg, torchft.ProcessGroup):
                raise TypeError(
                    f"`process_group` must return a torchft.process_group.ProcessGroup, but returned {pg!r} instead."
                )
            self._pgs[name] = pg
        return self._pgs[name]

    def forget(self, name: str) -> None:
        """Drop the group of the gang `name`: the next `take` makes another one."""
        self._pgs.pop(name, None)

    def abort_beside(self, aborts: Sequence[_Abort], deadline: float, limit_s: float) -> None:
        """Let aborts go on beside the next configuration (DATA-7)."""
        for abort in aborts:
            self.forget(abort.group)

        def watch() -> None:
            if not all(abort.has_returned(deadline) for abort in aborts):
                self.on_stuck(_stuck(limit_s))

        if aborts:
            self._aborts = threading.Thread(target=watch, name="data-aborts", daemon=True)
            self._aborts.start()

    def await_aborts(self) -> None:
        """Wait until they have returned, at most until their deadline."""
        if self._aborts is not None:
            self._aborts.join()

    def open(self, block: CommBlock | None = None) -> DataConfiguration:
        """Begin a configuration without groups. The one before must have ended (`leave`)."""
        self.present = DataConfiguration(self, block)
        return self.present

    def leave(self) -> None:
        """End the present configuration, if there is one."""
        present, self.present = self.present, None
        if present is not None:
            present.fail(StaleGenerationError("the process groups are configured anew"))

    def close(self) -> None:
        """End the present configuration and shut all groups down."""
        self.leave()
        self.await_aborts()
        for pg in self._pgs.values():
            pg.shutdown()
        self._pgs.clear()


def _drain(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # a device that has failed does nothing more
        torch.cuda.synchronize(device)


def _stuck(limit_s: float) -> OperationalError:
    return OperationalError(f"a process group that runs in this process could not be aborted within {limit_s:g} s")


class _Abort(threading.Thread):
    """The abort of one group. `stuck`: why a group in another process could not be ended."""

    def __init__(self, group: str, pg: torchft.ProcessGroup) -> None:
        super().__init__(name="data-abort", daemon=True)
        self.group, self._pg = group, pg
        self.outlasts_kernels = bool(getattr(pg, "abort_outlasts_kernels", False))
        self.stuck: OperationalError | None = None

    def begin(self) -> None:
        """Start, or do it on this thread where no other can be started (DATA-10)."""
        try:
            self.start()
        except RuntimeError:
            self.run()

    def run(self) -> None:
        try:
            _abort(self._pg)
        except OperationalError as stuck:
            self.stuck = stuck

    def has_returned(self, deadline: float) -> bool:
        """Wait until `deadline`; for an isolated group until it has ended, because its abort has a limit of its own: a
        process with memory on a device may take longer to die."""
        if self.ident is None:  # it has run on another thread
            return True
        is_isolated = isinstance(self._pg, ProcessGroupIsolated)
        self.join(None if is_isolated else max(0.0, deadline - time.monotonic()))
        return not self.is_alive()


def _abort(pg: torchft.ProcessGroup) -> None:
    """Abort a group. torchft's groups in a subprocess have no abort, and their `shutdown` waits for threads that read
    from the subprocess: killing it ends these threads at once."""
    process = baby_process(pg)
    if isinstance(pg, torchft.ProcessGroupBaby) and process is not None:
        process.kill()
        process.join(ABORT_TIMEOUT_S)
        pg.shutdown()
    pg.abort()
