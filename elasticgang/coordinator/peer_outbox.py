"""What agents tell each other, on its way through the coordinator.

SERVE-PEERS  What agents tell each other in one turn of the event loop is sent together, and hashed once. All agents of
             a job may tell something at once, as when a rank hangs: the number of messages would be the square of
             theirs. It is sent before any later message of the coordinator, but for those about one session alone.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticgang.protocol.batches import in_batches
from elasticgang.protocol.coordinator_messages import Broadcast, PeerMessages


class PeerOutbox:
    """`plan_flush`: bring `take` about, soon."""

    def __init__(self, plan_flush: Callable[[], object]) -> None:
        self._plan_flush = plan_flush
        self._unsent: list[Broadcast] = []

    def add(self, broadcast: Broadcast) -> None:
        if not self._unsent:
            self._plan_flush()
        self._unsent.append(broadcast)

    def take(self) -> tuple[list[PeerMessages], int | None]:
        """What is to be sent, in messages of a bounded size, and the session that does not get it: that of the sender,
        if there is one alone."""
        unsent, self._unsent = self._unsent, []
        sources = {broadcast.source for broadcast in unsent}
        told = [broadcast.message for broadcast in unsent]
        messages = [PeerMessages(batch) for batch in in_batches(told, lambda message: len(message.data))]
        return messages, sources.pop() if len(sources) == 1 else None
