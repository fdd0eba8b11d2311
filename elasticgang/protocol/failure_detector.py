"""Failure detector over the agents' counters in the store: which agents are dead, with all of their members.

Pure. An agent is alive while its counter grows. One that is cut off for long enough has killed its members.

DETECTOR-1  An agent is declared dead only after its counter stood still for `LEASE_S + MARGIN_S` while the coordinator
    was reachable. If its process is known to have exited, `EXITED_S` is enough: within it, all that the agent had
    started has ended.
DETECTOR-2  A new incarnation of the coordinator has seen no counter grow yet, so all intervals start again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

EXITED_S = 1.2


@dataclass
class FailureDetector:
    """`silence_s`: how long a counter may stand still (DETECTOR-1)."""

    silence_s: float
    _incarnation: str = ""
    _since: dict[str, tuple[int, float]] = field(default_factory=dict)  # count, and when it was first seen
    _exited: dict[str, float] = field(default_factory=dict)

    def detect(
        self, incarnation: str, counts: Mapping[str, int], exited: Collection[str], asked_s: float, now_s: float
    ) -> list[str]:
        """The dead agents by `counts`, which were requested at `asked_s` and read at `now_s`. `exited`: agents whose
        process is known to have exited."""
        if incarnation != self._incarnation:  # DETECTOR-2
            self._incarnation = incarnation
            self._since, self._exited = {}, {}
        self._exited = {agent: self._exited.get(agent, now_s) for agent in exited}
        self._since = {
            agent: self._since[agent] if self._since.get(agent, (-1, 0.0))[0] == count else (count, now_s)
            for agent, count in counts.items()
        }
        return [agent for agent, (_, since) in self._since.items() if asked_s >= self._dead_at(agent, since)]

    def _dead_at(self, agent: str, since: float) -> float:
        """DETECTOR-1: when to declare the agent dead."""
        exited = self._exited.get(agent)
        by_silence = since + self.silence_s
        return by_silence if exited is None else min(by_silence, max(since, exited) + EXITED_S)
