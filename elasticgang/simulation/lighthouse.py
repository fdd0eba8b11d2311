"""The simulated lighthouse: torchft's quorum rule, with its weaknesses.

- A request stays after its sender has timed out or died, until a quorum contains it: a ghost.
- A sender of a request is healthy. A dead or cut-off agent stays healthy for a while.
- The lighthouse answers a quorum when all agents of the last one have sent a request; otherwise when more than half of
  the healthy agents have, and either all of them have or the join timeout has passed (`decides early`). So a quorum may
  consist of joiners alone.
- After a restart it knows no agents: the first request forms a quorum alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from elasticgang.simulation.host import ANSWERED, OPEN, Call

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster

RARE_MOVES = frozenset({"decides early", "handles a late call"})


class Lighthouse:
    name = "lighthouse"
    home = ""

    def __init__(self) -> None:
        self.healthy: set[str] = set()
        self.pending: list[Call] = []
        self.participants: dict[str, Call] = {}
        self.previous: frozenset[str] | None = None

    def has(self, call: Call) -> bool:
        """Whether the call can still be answered."""
        return call in self.pending or call in self.participants.values()

    def moves(self, cluster: Cluster) -> list[str]:
        moves = []
        if self.pending:
            moves.append("handles")
            if len(self.pending) > 1:
                moves.append("handles a late call")
        if self.participants:
            present = self._present()
            if self.previous is not None and present.keys() >= self.previous:
                moves.append("decides")
            elif len(present) > len(self.healthy) // 2:
                moves.append("decides" if len(present) == len(self.healthy) else "decides early")
        silent = [name for name in self.healthy if not cluster.hears_of(name)]
        return moves + [f"forgets {name}" for name in sorted(silent)] if silent else moves

    def _present(self) -> dict[str, Call]:
        return {name: call for name, call in self.participants.items() if name in self.healthy}

    def perform(self, cluster: Cluster, verb: str) -> None:
        match verb.split():
            case ["handles", *late]:
                call = self.pending.pop(-1 if late else 0)
                self.participants[call.agent] = call
                self.healthy.add(call.agent)
            case ["forgets", name]:
                self.healthy.discard(name)
            case ["decides", *_]:
                self._decide()

    def _decide(self) -> None:
        present = self._present()
        self.previous = frozenset(present)
        self.participants = {name: call for name, call in self.participants.items() if name not in present}
        proposal = [call.report for call in present.values()]
        for call in self._answered(present):
            if call.phase is OPEN and call.host.is_connected:
                call.proposal, call.phase = proposal, ANSWERED

    def _answered(self, present: Mapping[str, Call]) -> Iterator[Call]:
        """The calls that a quorum answers: also older ones of its agents."""
        for call in present.values():
            mine = (other for other in call.host.calls if other.agent == call.agent)
            yield from (other for other in mine if other is call or not self.has(other))
