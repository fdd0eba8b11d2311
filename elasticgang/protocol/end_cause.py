"""Why a generation ends, as a value that each agent puts in its own words. Pure."""

from __future__ import annotations

from elasticgang.protocol.values import value


@value(frozen=True)
class EndCause:
    """`what`: in words, such as "was killed by SIGKILL", of the local `ranks` of one agent, or of `agents` themselves.
    Without agents, it says all. `is_effect`: a rank has only noticed that the generation is over; the cause is another
    one (CHANGE-3). `timed_out`: a collective has timed out, and no peer is known to be dead."""

    what: str
    agents: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    is_effect: bool = False
    timed_out: bool = False

    @property
    def explains(self) -> bool:
        """Whether it says by itself why the generation ended."""
        return not (self.is_effect or self.timed_out)

    def is_elsewhere(self, reader: str) -> bool:
        """Whether it explains the end, by what other agents than `reader` or their ranks did."""
        return self.explains and bool(self.agents) and reader not in self.agents

    @property
    def ended_agents(self) -> tuple[str, ...]:
        """Agents whose own end it is."""
        return () if self.ranks else self.agents

    def text(self, reader: str) -> str:
        """In the words of the agent `reader`, whose ranks need no agent."""
        agents = ", ".join(self.agents)
        if self.ranks:
            of = "" if self.agents == (reader,) else f" of agent {agents}"
            return f"rank {', '.join(map(str, self.ranks))}{of} {self.what}"
        return f"agent {agents} {self.what}" if agents else self.what
