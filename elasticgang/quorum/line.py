"""The agent's line to the coordinator: one contact after the other, the lease, and who else is lost.

It runs on the agent's loop; `hooks` are called there.
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

from elasticgang.errors import OperationalError
from elasticgang.quorum.contact import Contact, Heard
from elasticgang.quorum.coordinator import Endpoint, reach, refuses
from elasticgang.quorum.decide import Record
from elasticgang.quorum.lease import LEASE_S, MARGIN_S, Lease
from elasticgang.quorum.vigil import Vigil

_PROBE_TIMEOUT_S = 0.5
_REACH_TIMEOUT_S = 2.0
_RETRY_S = 0.1
_TICK_S = 0.1
_STUCK_S = 3.0
_VIGIL_S = 0.2
_CALM_S = 1.0


@dataclass(frozen=True)
class Hooks:
    """What the line tells its agent. `lease_over`: the members must be ended before anything else happens."""

    notice: Callable[[dict[str, Any], bool], None]
    away: Callable[[str], None]
    back: Callable[[Contact], None]
    lease_over: Callable[[], None]


@dataclass(frozen=True)
class Others:
    """Agents that may live. `gone`: those whose process is known not to. `are_suspect`: somebody is missed."""

    names: Sequence[str]
    gone: Sequence[str]
    are_suspect: bool


class Line:
    """`contact`: None while the coordinator is away, since `away_since`."""

    def __init__(self, address: str, job: str, timeout: float, lease: Lease | None, hooks: Hooks) -> None:
        """`lease`: None for an agent whose coordinator is its own, and ends with it."""
        self.address = address
        self.contact: Contact | None = None
        self.away_since = time.monotonic()
        self._job, self._timeout = job, timeout
        self._lease, self._hooks = lease, hooks
        self._loop = asyncio.get_running_loop()
        self._answered_at = time.monotonic()
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._next: asyncio.Future[Contact] = self._loop.create_future()  # the next one after `hang_up`

    async def open(self, endpoint: Endpoint, agent: str) -> None:
        """The first contact. Raises OperationalError."""
        self._use(await in_daemon(Contact, endpoint, self._job, agent, None, self._timeout))

    async def keep(self, agent: Callable[[], str], record: Callable[[], Record | None]) -> None:
        """Make a new contact whenever one is lost; for ever."""
        while True:
            reason = await self._lost
            if self.contact is not None:
                self.contact.close()
            self.contact, self.away_since = None, time.monotonic()
            self._hooks.away(reason)
            while (contact := await self._try(agent(), record())) is None or contact.agent != agent():
                await asyncio.sleep(_RETRY_S)
            self._use(contact)
            self._hooks.back(contact)
            if not self._next.done():
                self._next.set_result(contact)

    def hang_up(self, reason: str) -> None:
        """Give up the present contact, for another one."""
        if not self._lost.done():
            self._lost.set_result(reason)
        if self._next.done():
            self._next = self._loop.create_future()

    async def next_contact(self, limit_s: float) -> Contact | None:
        """The contact after the one that was given up. None: there is none within so long."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._next), limit_s)
        except asyncio.TimeoutError:
            return None

    def begin_lease(self) -> None:
        """For new members, once those of before have ended."""
        if self._lease is not None:
            self._lease.begin(self._answered_at)

    async def until_lost(self, waited: asyncio.Future[Any], limit_s: float | None = None) -> bool:
        """Wait for `waited`. False: the contact was lost before, or `limit_s` has passed."""
        either: list[asyncio.Future[Any]] = [waited, self._lost]
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return waited.done()

    async def watch(self) -> None:
        """See that the coordinator answers, and that the lease is not over; for ever."""
        while True:
            until_stuck = self._answered_at + _STUCK_S - time.monotonic()
            until_over = until_stuck if self._lease is None else self._lease.remaining_s
            await asyncio.sleep(max(_TICK_S, min(until_stuck, until_over, _CALM_S)))
            if self._lease is not None and self._lease.is_over:
                self._hooks.lease_over()
            if self.contact is not None and time.monotonic() - self._answered_at > _STUCK_S:
                self.hang_up(f"the coordinator at {self.address} does not answer")

    async def watch_others(self, others: Callable[[], Others], lost: Callable[[list[str]], None]) -> None:
        """Tell of those of the `others` of then that are lost; for ever."""
        vigil = Vigil(LEASE_S + MARGIN_S)
        looked_at = 0.0
        while True:
            await asyncio.sleep(_VIGIL_S)
            contact, found = self.contact, others()
            names = found.names
            if contact is None or not (found.are_suspect or time.monotonic() - looked_at > _CALM_S):
                continue
            looked_at = time.monotonic()
            counting = in_daemon(contact.counts, names) if names else _now({})
            if not await self.until_lost(counting, _STUCK_S):
                if contact is self.contact and not self._lost.done():
                    self.hang_up(f"the coordinator at {self.address} does not answer the failure detector")
                continue
            with contextlib.suppress(OperationalError):
                incarnation, counts = contact.endpoint.incarnation, counting.result()
                if missing := vigil.look(incarnation, counts, found.gone, looked_at, time.monotonic()):
                    lost(missing)

    def _use(self, contact: Contact) -> None:
        self.contact, self._answered_at = contact, time.monotonic()
        lost = self._lost = self._loop.create_future()

        def on_lost(reason: str) -> None:
            if not lost.done():
                lost.set_result(reason)

        contact.start(
            Heard(
                beat=lambda began: self._call(self._answer, contact, began),
                notice=lambda notice, is_old: self._call(self._hooks.notice, notice, is_old),
                lost=lambda reason: self._call(on_lost, reason),
            )
        )

    def _answer(self, contact: Contact, began: float) -> None:
        if contact is self.contact:
            self._answered_at = max(self._answered_at, began)
            self._renew(began)

    def _renew(self, began: float) -> None:
        if self._lease is not None and not self._lease.renew(began):
            self._hooks.lease_over()

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    async def _try(self, agent: str, record: Record | None) -> Contact | None:
        began = time.monotonic()
        try:
            if await in_daemon(refuses, self.address, _PROBE_TIMEOUT_S):
                self._renew(began)
                return None
            endpoint = await in_daemon(reach, self.address, _REACH_TIMEOUT_S)
            making = in_daemon(Contact, endpoint, self._job, agent, record, _REACH_TIMEOUT_S)
            contact: Contact = await asyncio.wait_for(making, 2 * _REACH_TIMEOUT_S)
            return contact
        except (OperationalError, asyncio.TimeoutError):
            return None


def in_daemon(function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """In a thread that the end of this process does not wait for."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not ended.done():
            ended.set_result(result) if error is None else ended.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except Exception as exc:
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    ended.add_done_callback(lambda _: ended.cancelled() or ended.exception())  # it may be waited for by nobody
    _daemons.run(run)
    return ended


class _Daemons:
    """Threads that are used again, since starting one may take longer than what it is for. One that hangs is left
    behind, and another takes its place."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def run(self, function: Callable[[], None]) -> None:
        try:
            orders = self._idle.pop()
        except IndexError:
            orders = queue.SimpleQueue()
            threading.Thread(target=self._obey, args=(orders,), name="aside", daemon=True).start()
        orders.put(function)

    def _obey(self, orders: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            orders.get()()
            self._idle.append(orders)


_daemons = _Daemons()


def _now(result: Any) -> asyncio.Future[Any]:
    done = asyncio.get_running_loop().create_future()
    done.set_result(result)
    return done
