"""Who is silent, and who is lost, by one coordinator's clock. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field


@dataclass
class Absences:
    """Silence is what an agent was silent, less what the coordinator stood still (LOST). `lost`: agents that are
    declared lost, and not back. `exited`: of these, those that are known to have exited."""

    standstill_s: float
    lost: set[str] = field(default_factory=set)
    exited: set[str] = field(default_factory=set)
    _heard_s: dict[str, float] = field(default_factory=dict)
    _now_s: float | None = None

    def advance(self, now_s: float) -> None:
        gap_s = 0.0 if self._now_s is None else now_s - self._now_s
        self._now_s = now_s
        if gap_s > self.standstill_s:
            for agent in self._heard_s:
                self._heard_s[agent] += gap_s

    def expect(self, agents: Iterable[str]) -> None:
        """Silence counts from now on, unless it counts already."""
        now_s, heard_s = self._now_s or 0.0, self._heard_s
        for agent in agents:
            if agent not in heard_s:
                heard_s[agent] = now_s

    def hear(self, agent: str) -> None:
        self._heard_s[agent] = self._now_s or 0.0

    def forget(self, agent: str) -> None:
        self._heard_s.pop(agent, None)

    def keep(self, agents: Container[str]) -> None:
        """Forget the silence of all others."""
        self._heard_s = {agent: at_s for agent, at_s in self._heard_s.items() if agent in agents}

    def forget_lost(self) -> None:
        self.lost.clear()
        self.exited.clear()

    def beyond(self, limit_s: float, agents: Iterable[str]) -> list[str]:
        """Those of `agents` that were silent for longer than `limit_s`."""
        now_s, heard_s = self._now_s or 0.0, self._heard_s
        return [agent for agent in agents if now_s - heard_s.get(agent, now_s) > limit_s]
