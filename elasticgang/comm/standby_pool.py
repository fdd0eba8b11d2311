"""Starts comm processes, and keeps a standby.

STANDBY-1  Comm processes start on a separate thread. Only `take` waits for one.
STANDBY-2  A process without an agent starts one fork server with its first comm process. The fork server exits with
    that process.
STANDBY-3  Where a rank that has died is restarted, the next standby starts `STANDBY_S` after one was taken, and after
    the first commit: until then the rank that starts needs the fork server and the cores. If the commit is earlier, a
    timer starts it, because the next step may take long.
STANDBY-4  At a commit, a standby that has died or could not be started is replaced, but no earlier than
    `STANDBY_RETRY_S` after its start began.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch
from torch import Tensor

from elasticgang.comm.arena import Arena
from elasticgang.comm.comm_process import CommProcess
from elasticgang.comm.staging import Staging
from elasticgang.errors import CollectiveTimeoutError, GangError, OperationalError
from elasticgang.process.forkserver import ForkServer, ForkServerClient

PRELOAD = ("torch", "torch.distributed", "elasticgang.comm.worker")
_MAX_STARTS = 20
CLOSE_TIMEOUT_S = 5.0
STANDBY_S = 0.3
STANDBY_RETRY_S = 60.0


class StandbyPool:
    """Keeps one comm process ready: the standby. Not thread-safe, but for its own timer."""

    def __init__(self, start: Callable[[], Future[CommProcess]]) -> None:
        """`start` begins to start a process; the future completes when that is ready."""
        self._start = start
        self._standby: Future[CommProcess] | None = start()
        self._taken_s, self._started_s = 0.0, time.monotonic()
        self._lock = threading.Lock()  # between a timer and the others
        self._timer: threading.Timer | None = None

    def take(self, timeout: float | None = None) -> CommProcess:
        """Wait for the standby and return it. A dead one is replaced.

        Raises:
            CollectiveTimeoutError: it is not ready within `timeout` seconds. It is still starting.
            OperationalError: no process could be started, or `_MAX_STARTS` in a row died while they started.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for _ in range(_MAX_STARTS):
            is_new = self._standby is None
            self.prepare()
            assert self._standby is not None
            try:
                comm = self._standby.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except GangError:  # it died, or was not ready within its own deadline
                self._standby = None
                continue
            except FutureTimeoutError:
                raise CollectiveTimeoutError(f"starting a comm process timed out after {timeout:g} seconds") from None
            except OperationalError:
                self._standby = None
                if is_new:
                    raise
                continue  # an earlier start failed; try again now
            with self._lock:
                self._cancel_timer()
                self._standby, self._taken_s = None, time.monotonic()
            if not (comm.ended or comm.has_died):
                return comm
            comm.close()
        raise OperationalError(f"{_MAX_STARTS} comm processes in a row died while they started")

    def prepare(self) -> None:
        """Begin to start a standby if there is none."""
        with self._lock:
            self._cancel_timer()
            self._start_missing()

    def _start_missing(self) -> None:
        if self._standby is None:
            self._standby, self._started_s = self._start(), time.monotonic()

    def _drop_lost(self) -> None:
        """STANDBY-4."""
        standby = self._standby
        if standby is None or not standby.done() or time.monotonic() < self._started_s + STANDBY_RETRY_S:
            return
        if standby.exception() is None:
            comm = standby.result()
            if not (comm.ended or comm.has_died):
                return
            comm.close()
        self._standby = None

    def prepare_when_due(self) -> None:
        """`prepare`, now or once it is due (STANDBY-3). A lost standby counts as none (STANDBY-4)."""
        self._drop_lost()
        early_s = self._taken_s + STANDBY_S - time.monotonic()
        if early_s <= 0:
            self.prepare()
            return
        with self._lock:
            if self._standby is not None or self._timer is not None:
                return
            timer = threading.Timer(early_s, lambda: self._prepare_by(timer))
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # no thread is left: the next commit does it
                timer.start()
                self._timer = timer

    def _prepare_by(self, timer: threading.Timer) -> None:
        with self._lock:
            if self._timer is timer:  # it was not cancelled as it fired
                self._timer = None
                with contextlib.suppress(RuntimeError):  # the process exits
                    self._start_missing()

    def _cancel_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def wait_standby(self, timeout: float) -> CommProcess:
        """The standby, once it is ready; it stays the standby. Raises as `take`."""
        self.prepare()
        assert self._standby is not None
        try:
            return self._standby.result(timeout)
        except FutureTimeoutError:
            raise CollectiveTimeoutError(f"starting a comm process timed out after {timeout:g} seconds") from None

    def close(self) -> None:
        with self._lock:
            self._cancel_timer()
            standby, self._standby = self._standby, None
        if standby is None or standby.cancel():
            return
        try:
            standby.result(CLOSE_TIMEOUT_S).close()
        except FutureTimeoutError:  # close it when it is ready
            standby.add_done_callback(_close)
        except (GangError, OperationalError):  # it did not start
            pass


def _close(started: Future[CommProcess]) -> None:
    with contextlib.suppress(GangError, OperationalError):
        started.result().close()


MakeProcess = Callable[[ForkServerClient, Arena], CommProcess]


def _make_process(forks: ForkServerClient, arena: Arena) -> CommProcess:
    return CommProcess(forks, arena, timeout=60.0)


class CommLauncher:
    """Starts comm processes, on its own thread (STANDBY-1)."""

    def __init__(self, client: ForkServerClient | None = None) -> None:
        """`client`: a connection to the agent's fork server. Without one, or after that server has died, this process
        starts its own fork server."""
        self._client = client
        self._arena = Arena()
        self._newest: CommProcess | None = None
        self._thread = ThreadPoolExecutor(1, "comm-start")

    def start(self, make: MakeProcess = _make_process) -> Future[CommProcess]:
        return self._thread.submit(self._start, make)

    def empty(self, num: int, dtype: torch.dtype) -> Tensor:
        """See `Staging.empty`. All comm processes of this launcher share the memory, one after another."""
        return Staging.of(self._arena).empty(num, dtype)

    def close(self) -> None:
        """End the connection, and a fork server of this process's own. Comm processes go on."""
        if self._client is not None:
            self._client.close()

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close. Takes no lock, because a forked child calls it, where another
        thread's lock would never be released."""
        client, newest = self._client, self._newest
        return [*([] if client is None else [client.fileno()]), *([] if newest is None else newest.descriptors())]

    def _start(self, make: MakeProcess) -> CommProcess:
        if self._client is not None and not isinstance(self._client, ForkServer):
            try:
                return self._start_from(self._client, make)
            except OperationalError:
                self._client.close()
                self._client = None
        if not isinstance(self._client, ForkServer) or self._client.process.poll() is not None:
            self._client = _new_fork_server()  # STANDBY-2
        return self._start_from(self._client, make)

    def _start_from(self, client: ForkServerClient, make: MakeProcess) -> CommProcess:
        comm = self._newest = make(client, self._arena)
        try:
            comm.wait_ready()
        except GangError:
            comm.close()
            raise
        return comm


def _new_fork_server() -> ForkServer:
    try:
        server = ForkServer(PRELOAD, new_session=False)  # so that comm processes can join this process's group
    except OSError as exc:  # no descriptor is left, for example
        raise OperationalError(f"the fork server could not be started: {exc}") from exc
    try:
        server.wait_ready()
    except OperationalError:
        server.close()
        raise
    return server


_lock = threading.Lock()
_launchers: dict[int, CommLauncher] = {}


def local_launcher() -> CommLauncher:
    """The launcher of this process; a forked child has its own."""
    with _lock:
        return _launchers.setdefault(os.getpid(), CommLauncher())


@atexit.register
def _close_launcher() -> None:
    launcher = _launchers.get(os.getpid())
    if launcher is not None:
        launcher.close()


def _forget_parents() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held the parent's at the fork
    _launchers.clear()


os.register_at_fork(after_in_child=_forget_parents)
