"""The agent's client of the coordinator: one session after the other, the lease, and which other agents are dead.

It runs on the agent's loop, and calls `callbacks` there.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elasticgang.coordinator.endpoint import Endpoint, reach, refuses
from elasticgang.coordinator.session import CoordinatorSession, SessionCallbacks
from elasticgang.errors import OperationalError
from elasticgang.process.lease import LEASE_S, MARGIN_S, Lease
from elasticgang.protocol.failure_detector import FailureDetector
from elasticgang.protocol.record import Record

_PROBE_TIMEOUT_S = 0.5
_REACH_TIMEOUT_S = 2.0
_RETRY_S = 0.1
_TICK_S = 0.1
_STUCK_S = 3.0
_DETECT_INTERVAL_S = 0.2
_CALM_S = 1.0


@dataclass(frozen=True)
class ClientCallbacks:
    """What the line tells its agent. `lease_expired`: the members must be ended before anything else happens."""

    notice: Callable[[dict[str, Any], bool], None]
    disconnected: Callable[[str], None]
    reconnected: Callable[[CoordinatorSession], None]
    lease_expired: Callable[[], None]


@dataclass(frozen=True)
class WatchedAgents:
    """Agents that may live. `exited`: those whose process is known not to. `are_suspect`: somebody is missed."""

    names: Sequence[str]
    exited: Sequence[str]
    are_suspect: bool


class CoordinatorClient:
    """`session`: None while the coordinator is away, since `disconnected_since`."""

    def __init__(self, address: str, job: str, timeout: float, lease: Lease | None, callbacks: ClientCallbacks) -> None:
        """`lease`: None for an agent whose coordinator is its own, and ends with it."""
        self.address = address
        self.session: CoordinatorSession | None = None
        self.disconnected_since = time.monotonic()
        self._job, self._timeout = job, timeout
        self._lease, self._callbacks = lease, callbacks
        self._loop = asyncio.get_running_loop()
        self._answered_at = time.monotonic()
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._next: asyncio.Future[CoordinatorSession] = self._loop.create_future()  # the next one after `disconnect`

    async def open(self, endpoint: Endpoint, agent: str) -> None:
        """The first session. Raises OperationalError."""
        self._adopt(await in_daemon_thread(CoordinatorSession, endpoint, self._job, agent, None, self._timeout))

    async def keep_connected(self, agent: Callable[[], str], record: Callable[[], Record | None]) -> None:
        """Make a new session whenever one is lost; for ever."""
        while True:
            reason = await self._lost
            if self.session is not None:
                self.session.close()
            self.session, self.disconnected_since = None, time.monotonic()
            self._callbacks.disconnected(reason)
            while (session := await self._try(agent(), record())) is None or session.agent != agent():
                await asyncio.sleep(_RETRY_S)
            self._adopt(session)
            self._callbacks.reconnected(session)
            if not self._next.done():
                self._next.set_result(session)

    def disconnect(self, reason: str) -> None:
        """Give up the present session, for another one."""
        if not self._lost.done():
            self._lost.set_result(reason)
        if self._next.done():
            self._next = self._loop.create_future()

    async def next_session(self, limit_s: float) -> CoordinatorSession | None:
        """The session after the one that was given up. None: there is none within so long."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._next), limit_s)
        except asyncio.TimeoutError:
            return None

    def begin_lease(self) -> None:
        """For new members, once those of before have ended."""
        if self._lease is not None:
            self._lease.begin(self._answered_at)

    async def until_lost(self, waited: asyncio.Future[Any], limit_s: float | None = None) -> bool:
        """Wait for `waited`. False: the session was lost before, or `limit_s` has passed."""
        either: list[asyncio.Future[Any]] = [waited, self._lost]
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return waited.done()

    async def watch_coordinator(self) -> None:
        """See that the coordinator answers, and that the lease is not over; for ever."""
        while True:
            until_stuck = self._answered_at + _STUCK_S - time.monotonic()
            until_over = until_stuck if self._lease is None else self._lease.remaining_s
            await asyncio.sleep(max(_TICK_S, min(until_stuck, until_over, _CALM_S)))
            if self._lease is not None and self._lease.is_expired:
                self._callbacks.lease_expired()
            if self.session is not None and time.monotonic() - self._answered_at > _STUCK_S:
                self.disconnect(f"the coordinator at {self.address} does not answer")

    async def watch_agents(self, others: Callable[[], WatchedAgents], lost: Callable[[list[str]], None]) -> None:
        """Tell of those of the `others` of then that are lost; for ever."""
        detector = FailureDetector(LEASE_S + MARGIN_S)
        looked_at = 0.0
        while True:
            await asyncio.sleep(_DETECT_INTERVAL_S)
            session, found = self.session, others()
            names = found.names
            if session is None or not (found.are_suspect or time.monotonic() - looked_at > _CALM_S):
                continue
            looked_at = time.monotonic()
            counting = in_daemon_thread(session.heartbeat_counts, names) if names else _now({})
            if not await self.until_lost(counting, _STUCK_S):
                if session is self.session and not self._lost.done():
                    self.disconnect(f"the coordinator at {self.address} does not answer the failure detector")
                continue
            with contextlib.suppress(OperationalError):
                incarnation, counts = session.endpoint.incarnation, counting.result()
                if missing := detector.detect(incarnation, counts, found.exited, looked_at, time.monotonic()):
                    lost(missing)

    def _adopt(self, session: CoordinatorSession) -> None:
        self.session, self._answered_at = session, time.monotonic()
        lost = self._lost = self._loop.create_future()

        def on_lost(reason: str) -> None:
            if not lost.done():
                lost.set_result(reason)

        session.start(
            SessionCallbacks(
                beat=lambda began: self._call(self._on_heartbeat, session, began),
                notice=lambda notice, is_old: self._call(self._callbacks.notice, notice, is_old),
                lost=lambda reason: self._call(on_lost, reason),
            )
        )

    def _on_heartbeat(self, session: CoordinatorSession, began: float) -> None:
        if session is self.session:
            self._answered_at = max(self._answered_at, began)
            self._renew(began)

    def _renew(self, began: float) -> None:
        if self._lease is not None and not self._lease.renew(began):
            self._callbacks.lease_expired()

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    async def _try(self, agent: str, record: Record | None) -> CoordinatorSession | None:
        began = time.monotonic()
        try:
            if await in_daemon_thread(refuses, self.address, _PROBE_TIMEOUT_S):
                self._renew(began)
                return None
            endpoint = await in_daemon_thread(reach, self.address, _REACH_TIMEOUT_S)
            making = in_daemon_thread(CoordinatorSession, endpoint, self._job, agent, record, _REACH_TIMEOUT_S)
            session: CoordinatorSession = await asyncio.wait_for(making, 2 * _REACH_TIMEOUT_S)
            return session
        except (OperationalError, asyncio.TimeoutError):
            return None


def in_daemon_thread(function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """In a thread that the end of this process does not wait for."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def resolve(result: Any, error: Exception | None) -> None:
        if not ended.done():
            ended.set_result(result) if error is None else ended.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except Exception as exc:
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve, result, error)

    ended.add_done_callback(lambda _: ended.cancelled() or ended.exception())  # it may be waited for by nobody
    _daemons.run(run)
    return ended


class _DaemonThreads:
    """Threads that are used again, since starting one may take longer than what it is for. One that hangs is left
    behind, and another takes its place."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def run(self, function: Callable[[], None]) -> None:
        try:
            orders = self._idle.pop()
        except IndexError:
            orders = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(orders,), name="aside", daemon=True).start()
        orders.put(function)

    def _serve(self, orders: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            orders.get()()
            self._idle.append(orders)


_daemons = _DaemonThreads()


def _now(result: Any) -> asyncio.Future[Any]:
    done = asyncio.get_running_loop().create_future()
    done.set_result(result)
    return done
