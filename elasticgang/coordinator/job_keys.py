"""The exchange of rendezvous keys among the sessions of one job.

SERVE-KEYS  In office, agents of the newest record exchange the rendezvous keys of its generation until it is over. An
            agent without a seat in it may not put a key. Out of office, keys are dropped: agents send all of them again
            to a coordinator that takes office.
SERVE-TURN  What comes for an agent in one turn of the event loop is sent to it together. All agents put their keys at
            the same time, and most get keys of many others: the number of messages would be that of pairs of agents.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from elasticgang.errors import WireError
from elasticgang.protocol.coordinator_state import CoordinatorState
from elasticgang.protocol.record import Record
from elasticgang.protocol.rendezvous_keys import Key, KeyExchange, RendezvousKeys, batches
from elasticgang.testing import reached


class JobKeys:
    """Belongs to the event loop. `send`: to the agent of a session, unless it is closed."""

    def __init__(self, state: CoordinatorState, send: Callable[[int, RendezvousKeys], None]) -> None:
        self._state, self._send = state, send
        self._exchange: KeyExchange[int] = KeyExchange("")  # of the present generation; the parties are sessions
        self._outbox: dict[int, list[Key]] = defaultdict(list)
        self._flushing: asyncio.Handle | None = None

    def exchange_keys(self, session: int, message: RendezvousKeys) -> None:
        """Keys of another generation are dropped: they may have been sent before its end was known.

        Raises:
            WireError: end the session.
        """
        record, sender = self._record(), self._state.sessions.begun.get(session)
        if record is None or message.prefix != record.prefix:
            return
        if sender is None or not record.has_agent(sender.agent):
            raise WireError("an agent puts rendezvous keys of a generation that it is not in")
        reached("keys_received")
        if self._exchange.prefix != record.prefix:
            self._exchange = KeyExchange(record.prefix)
        for other, keys in self._exchange.take(session, message.groups, message.keys, message.asked).items():
            self._outbox[other] += keys
        if self._outbox and self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def leave(self, session: int) -> None:
        self._exchange.leave(session)
        self._outbox.pop(session, None)

    def drop_former(self) -> None:
        """To be called when the state has changed."""
        if self._exchange.prefix and ((record := self._record()) is None or record.prefix != self._exchange.prefix):
            self._exchange = KeyExchange("")
            self._outbox.clear()

    def _record(self) -> Record | None:
        """The one whose agents exchange keys now."""
        record, state = self._state.record, self._state
        return record if record is not None and state.in_office and state.newest.over < record.generation else None

    def _flush(self) -> None:
        """SERVE-TURN"""
        self._flushing = None
        outbox, self._outbox = self._outbox, defaultdict(list)
        for session, keys in outbox.items():
            for batch in batches(keys):
                self._send(session, RendezvousKeys(self._exchange.prefix, (), batch))
