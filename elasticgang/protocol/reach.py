"""Which other agents' hosts an agent reaches, as far as it has tried. Pure: the driver opens the connections.

REACH-1  An agent tries to reach all others of its record once a collective of its generation has timed out, or a rank
    of its own has not connected, and reports only then that its ranks are ready. So the next record can leave out a
    host that does not reach the others (NEXT-10). It does so once in each generation.
REACH-2  It tries those that it does not reach again every `RETRY_S`. One counts as reached once it was for `SETTLE_S`
    without a break, and for twice as long for each further time that it was lost within `WINDOW_S`, up to
    `MAX_SETTLE_S`. Otherwise each moment in which a broken path works would begin a generation that cannot connect.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

RETRY_S = 2.0
SETTLE_S = 10.0
MAX_SETTLE_S = 640.0
WINDOW_S = 3600.0
_MAX_LOST = 7  # times that count: `SETTLE_S` doubled as often is `MAX_SETTLE_S`


@dataclass
class Reach:
    """`next_try_s`: when to try the unreached ones again; None: all are reached, or a try is under way."""

    next_try_s: float | None = None
    _reached_s: dict[str, float | None] = field(default_factory=dict)  # of unreached ones: since when they are again
    _lost_s: dict[str, tuple[float, ...]] = field(default_factory=dict)  # when each one has become unreached

    @property
    def unreached(self) -> tuple[str, ...]:
        return tuple(sorted(self._reached_s))

    def tried(self, reached: Collection[str], unreached: Collection[str], now_s: float) -> None:
        """REACH-2. A try has ended at `now_s`. Agents that are in neither were not tried."""
        for agent in unreached:
            if agent not in self._reached_s:
                recent = [at_s for at_s in self._lost_s.get(agent, ()) if now_s - at_s < WINDOW_S]
                self._lost_s[agent] = (*recent, now_s)[-_MAX_LOST:]
            self._reached_s[agent] = None
        for agent in [agent for agent in reached if agent in self._reached_s]:
            since_s = self._reached_s[agent]
            if since_s is None:
                self._reached_s[agent] = now_s
            elif now_s - since_s >= min(MAX_SETTLE_S, SETTLE_S * 2 ** (len(self._lost_s[agent]) - 1)):
                del self._reached_s[agent]
        self.next_try_s = now_s + RETRY_S if self._reached_s else None

    def keep(self, agents: Collection[str]) -> None:
        """The others take part no more."""
        for agent in self._lost_s.keys() - agents:
            del self._lost_s[agent]
            self._reached_s.pop(agent, None)
        if not self._reached_s:
            self.next_try_s = None
