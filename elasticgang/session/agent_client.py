"""An agent's session with its coordinator, over asyncio: connects, reconnects, and drives the `AgentSession`.

CLIENT-LEASE   The client sets the lease before the agent's state machine gets the event that the lease permits. Both
               have the clock of the lease (LEASE-4).
CLIENT-RETRY   An attempt to connect ends after `CONNECT_S`, and the next one begins `RETRY_S` later. While something
               listens at the address and does not welcome the agent, the pause is a random one from 0 to a limit that
               doubles up to `MAX_RETRY_S`: agents that failed together do not come back together. The client never
               gives up: its owner decides how long to wait for the coordinator.
CLIENT-REFUSED Only a refused connection counts as refused. A connection that times out does not.
CLIENT-STOP    A client that is stopped opens no session, and closes the connection that is made meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any, Protocol

from elasticgang.process.lease import now_s
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.coordinator_messages import (
    AddressLost,
    Answer,
    CollectReport,
    Connected,
    ConnectionRefused,
    Disconnected,
    HangUp,
    Inform,
    KillRanks,
    Notify,
    ReportCollected,
    ReportRequested,
    SendToCoordinator,
    SessionEvent,
    SessionInstruction,
    SetLease,
    Ticked,
    Welcome,
)
from elasticgang.protocol.record import PROTOCOL, Report
from elasticgang.protocol.rendezvous_keys import RendezvousKeys
from elasticgang.session.connection import ClientConnection, Connection, client_of, connect
from elasticgang.session.credentials import Credentials
from elasticgang.session.handshake import AGENT, Identity
from elasticgang.session.messages import decode_from_coordinator, encode

CONNECT_S = 2.0
RETRY_S = 0.2
MAX_RETRY_S = 3.2
_MAX_DOUBLINGS = 8  # a float has no 2**1024
_TICK_S = 0.2
_CLOSE_S = 0.5


def pause_s(num_failed: int, draw: float) -> float:
    """CLIENT-RETRY. `num_failed`: attempts since the last welcome, or since nothing listened at the address. `draw`: a
    random number from 0 to 1."""
    return draw * min(2 * RETRY_S * 2**num_failed, MAX_RETRY_S) if num_failed else RETRY_S


class SessionOwner(Protocol):
    """What the client calls on its agent. No method may block."""

    def set_lease(self, until_s: float) -> None: ...

    def collect_report(self) -> Report | None:
        """The report of the host's members; None unless every live rank waits for the next record."""

    def inform(self, event: Any) -> None:
        """Take an event of `agent_events.py`, `JobFacts` or a `Notice`."""

    def kill_ranks(self, reason: str) -> None: ...

    def welcomed(self, welcome: Welcome, host: str) -> None:
        """The coordinator has accepted the session. `host`: the address of this end of its connection."""

    def receive_keys(self, message: RendezvousKeys) -> None:
        """Raises WireError to end the session."""

    def disconnected(self, reason: str) -> None:
        """The session has ended, or an attempt to open one has failed."""


class AgentClient:
    """Keeps one session open with the coordinator at `address`. Runs on the event loop; not thread-safe."""

    def __init__(
        self,
        session: AgentSession,
        owner: SessionOwner,
        address: tuple[str, int],
        job: str,
        credentials: Credentials,
    ) -> None:
        self._session, self._owner = session, owner
        self._host, self._port = address
        self._identity = Identity(job, AGENT, PROTOCOL)
        self._credentials = credentials
        self._connection: ClientConnection | None = None
        self._dialer: asyncio.Task[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._lost = asyncio.Event()
        self._is_stopped = False
        self._num_failed = 0  # attempts since the last welcome, or since nothing listened at the address
        self.has_connected = False  # a connection was accepted at the address, by a coordinator or not
        self._was_answered = False  # on a connection that is over
        self.is_explained = False  # why the newest one is over: its reason names the cause

    @property
    def was_answered(self) -> bool:
        """Something has come from the address, from a coordinator or not."""
        return self._was_answered or (self._connection is not None and self._connection.has_data)

    def start(self) -> None:
        self._tick()
        self._dialer = asyncio.ensure_future(self._dial())

    async def stop(self) -> None:
        self._is_stopped = True
        if self._ticker is not None:
            self._ticker.cancel()
        if self._dialer is not None:
            self._dialer.cancel()
            await asyncio.wait([self._dialer])
        if self._connection is not None:
            self._connection.close()
            with contextlib.suppress(asyncio.TimeoutError):  # what was sent last is on its way
                await asyncio.wait_for(self._lost.wait(), _CLOSE_S)

    def request_report(self) -> None:
        """Collect and send a report, if every live rank waits. Call it when a rank has begun to wait."""
        self._handle(ReportRequested())

    def notify(self, notify: Notify) -> None:
        self._handle(notify)

    def lose_address(self, reason: str) -> None:
        self._handle(AddressLost(reason))

    def send_keys(self, message: RendezvousKeys) -> None:
        """Send rendezvous keys. Without an open session they are dropped: the owner sends all keys in each new
        session."""
        if self._connection is not None and self._session.is_welcome:
            self._connection.send(encode(message))

    # -- the connection's `SessionUser`

    def opened(self, connection: Connection) -> None:
        self._handle(Connected(self._address))

    def received(self, connection: Connection, payload: bytes) -> None:
        if connection is self._connection:
            known = self._session.decision
            message = decode_from_coordinator(payload, None if known is None else known.record)
            if isinstance(message, RendezvousKeys):
                self._owner.receive_keys(message)
                return
            self._handle(Answer(message))
            if isinstance(message, Welcome) and self._session.is_welcome:
                self._num_failed = 0
                self._owner.welcomed(message, connection.host)

    def closed(self, connection: Connection, reason: str) -> None:
        self._was_answered = self._was_answered or connection.has_data
        self.is_explained = connection.is_explained
        if connection is not self._connection:
            return
        self._connection = None
        if self._session.is_connected:
            self._handle(Disconnected())
        self._lost.set()
        if not self._is_stopped:
            self._owner.disconnected(
                f"the session with the coordinator at {self._address} ended: {reason or 'it was closed'}"
            )

    # -- internal

    @property
    def _address(self) -> str:
        return f"{self._host}:{self._port}"

    async def _dial(self) -> None:
        while not self._is_stopped and not self._session.is_ended:
            self._lost.clear()
            began_s = now_s()
            try:
                await asyncio.wait_for(connect(self._connect, self._host, self._port), CONNECT_S)
                if self._is_stopped:  # CLIENT-STOP: before Python 3.12 `wait_for` drops a cancellation that comes now
                    return
                self._count_failure()  # until it is welcomed
                self.has_connected = True
                await self._lost.wait()
            except ConnectionRefusedError as error:
                self._connection, self._num_failed = None, 0
                every = f" ({error})" if error.errno is None else ""  # of several addresses
                self._owner.disconnected(f"nothing listens at {self._address}{every}")
                self._handle(ConnectionRefused(self._address, began_s))
            except (OSError, asyncio.TimeoutError) as error:
                self._connection = None
                self._count_failure()
                self._owner.disconnected(f"the coordinator at {self._address} cannot be reached: {error!r}")
            await asyncio.sleep(pause_s(self._num_failed, random.random()))

    def _count_failure(self) -> None:
        self._num_failed = min(self._num_failed + 1, _MAX_DOUBLINGS)

    def _connect(self) -> ClientConnection:
        self._connection = client_of(self, self._identity, self._credentials, self._host)
        return self._connection

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self._handle(Ticked())

    def _handle(self, event: SessionEvent) -> None:
        for instruction in self._session.handle(event, now_s()):
            self._carry_out(instruction)

    def _carry_out(self, instruction: SessionInstruction) -> None:
        match instruction:
            case SendToCoordinator(message):
                if self._connection is not None:
                    self._connection.send(encode(message))
            case HangUp(reason):
                if self._connection is not None:
                    self._connection.abort(reason)
            case SetLease(until_s):
                self._owner.set_lease(until_s)
            case CollectReport():
                report = self._owner.collect_report()
                if report is not None:
                    self._handle(ReportCollected(report))
            case Inform(event):
                self._owner.inform(event)
            case KillRanks(reason):
                self._owner.kill_ranks(reason)
