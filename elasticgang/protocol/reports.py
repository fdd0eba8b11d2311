"""The reports of agents that are ready for the next record, and which of them count. Pure.

REPORT   A report counts while the session by which it came is up, and its agent has promised the present term. One
         that crosses a record which the agent is sent does not: the ranks may run in that record by now.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from elasticgang.protocol.coordinator_sessions import Sessions
from elasticgang.protocol.newest_decision import NewestDecision
from elasticgang.protocol.record import NO_RECORD, Record, Report


@dataclass
class Reports:
    """`first_s`: when the first one came. `num_founders`: the most agents for which a report wants the first record to
    wait."""

    newest: NewestDecision
    sessions: Sessions
    first_s: float | None = None
    num_founders: int = 1
    _by_agent: dict[str, Report] = field(default_factory=dict)

    def __len__(self) -> int:
        """Of all that have come, whether they count or not."""
        return len(self._by_agent)

    def add(self, report: Report, now_s: float) -> None:
        self._by_agent[report.agent] = report
        self.num_founders = max(self.num_founders, report.min_agents)
        if self.first_s is None:
            self.first_s = now_s

    def withdraw(self, agent: str) -> None:
        self._by_agent.pop(agent, None)

    def counting(self) -> dict[str, Report]:
        """REPORT: those that count."""
        return {agent: report for agent, report in self._by_agent.items() if self._counts(agent, report)}

    def _counts(self, agent: str, report: Report) -> bool:
        session, record = self.sessions.of(agent), self.newest.record
        if session is None or not session.promised:
            return False
        if record is not None and record.has_agent(agent):
            return report.newest_record == record.ref
        if report.newest_record.generation < session.pushed:
            return False
        return report.newest_record == NO_RECORD or (record is not None and record.builds_on(report.newest_record))

    def missing(self, record: Record, lost: Container[str]) -> list[str]:
        """Agents of the record that are neither ready nor lost."""
        reports = self.counting()
        return [agent for agent in record.agents if agent not in reports and agent not in lost]

    def have_joiner(self, agents: Iterable[str] | None = None) -> bool:
        """Whether a member of these agents, or of all, waits to join the present generation."""
        record = self.newest.record
        for agent in self._by_agent if agents is None else agents:
            report = self._by_agent.get(agent)
            if record is None or report is None or not self._counts(agent, report):
                continue
            if any(record.seat(member.id) is None for member in report.members):
                return True
        return False

    def why_not_its_own(self, agent: str, report: Report) -> str | None:
        """SENDER. None: `agent` speaks for itself alone."""
        if report.agent != agent:
            return f"agent {agent} reports as agent {report.agent}"
        record = self.newest.record
        for member in report.members:
            seat = None if record is None else record.seat(member.id)
            if seat is not None and seat.agent != agent:
                return f"agent {agent} reports member {member.id} of agent {seat.agent}"
        return None
