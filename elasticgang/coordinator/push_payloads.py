"""The payloads of the records that a coordinator sends, each made once for all sessions.

PUSH-ONCE  A record with the same notices is encoded, compressed and hashed once for all agents that know the same
           record, whenever they are sent it: as it is decided, when the coordinator takes office again, or when joiners
           need wait no longer (ACCEPT). A state machine makes a `Push` for each of these sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from elasticgang.protocol.coordinator_messages import Push, Term
from elasticgang.protocol.record import Record
from elasticgang.session.frames import Payload
from elasticgang.session.messages import encode, encode_delta, pack

MIN_DELTA_BYTES = 8 << 10  # smaller records are sent whole, which is faster
MAX_KEPT = 8  # of one job: whole and as deltas, with the notices of the moment

_Key: TypeAlias = "tuple[Term, str, bool, int, int, str]"


class PushPayloads:
    """The payloads of one job."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Key, Payload] = OrderedDict()  # the one that was used last, last

    def payload(self, push: Push, before: Record | None) -> Payload:
        """`push` for an agent that has `before`. Raises WireError: it is over the limit of a message."""
        decision = push.decision
        if before is not None and len(decision.record.text) < MIN_DELTA_BYTES:
            before = None
        known = "" if before is None else before.digest
        key = decision.term, decision.record.digest, decision.durable, push.over, push.joining, known
        found = self._kept.pop(key, None)
        if found is None:
            delta = None if before is None else encode_delta(before, push)
            found = Payload(pack(encode(push) if delta is None else delta))
        self._kept[key] = found
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return found
