"""When a coordinator in office makes the next decision, and why it does not yet. Pure.

`next_record` decides what is in the record.

PRESENT  Every agent of the record is ready, or declared lost, before the next record is decided.
ALONE    A record that was decided without a state directory is followed by one without any of its agents only if all of
         these have left (LEFT), if need be by the operator's word: others may be, or may have been, led by another
         coordinator.
OVER     Once a rank has done all steps, no record follows without a member that has a seat in the newest one: what
         spares hold is older than the last step, and they would take steps again that are committed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace

from elasticgang.protocol.absences import Absences
from elasticgang.protocol.coordinator_messages import Timeouts
from elasticgang.protocol.coordinator_sessions import Sessions
from elasticgang.protocol.job_facts import GatheredFacts
from elasticgang.protocol.newest_decision import NewestDecision
from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.office import Office
from elasticgang.protocol.overdue import Overdue
from elasticgang.protocol.record import SPARE, Record, Report, Undecided, Unrecoverable
from elasticgang.protocol.reports import Reports
from elasticgang.protocol.shortened import shortened

_MAX_NAMED = 4  # in a notice


@dataclass
class NextDecision:
    """`reason`: why there is none yet. `awaits_word`: it takes an operator (ALONE, MOVED, ACCEPT). `proposal`: what the
    last decision here was made from."""

    newest: NewestDecision
    office: Office
    sessions: Sessions
    absences: Absences
    reports: Reports
    facts: GatheredFacts
    timeouts: Timeouts
    reason: str = "no agent is ready"
    awaits_word: bool = False
    proposal: list[Report] = field(default_factory=list)
    _is_founding_due: bool = False  # the next tick looks whether there are enough
    _overdue: Overdue = field(init=False)  # NOTICE

    def __post_init__(self) -> None:
        self._overdue = Overdue(self.timeouts.notice_s)

    def look(self, now_s: float, *, on_tick: bool) -> Record | Undecided | Unrecoverable | None:
        """In office. `Unrecoverable` with a decision before the newest: that one is to be the newest again (BACK)."""
        record = self.newest.record
        if record is None and not self._may_found(on_tick):
            return None
        if record is not None and (waits := self._waits(record)) is not None:
            needs_word = self._away(record) or self._unaccepted()
            self.awaits_word = bool(needs_word)
            self._note_reason(needs_word or waits, now_s, is_proposal=False)
            return None
        reports = self.reports.counting()
        if record is None and not self._is_founding_over(now_s) and len(reports) < len(self.sessions.begun):
            return None
        if not reports or (record is not None and self._is_over(record, reports.values())):
            return None
        answer = next_record(record, [*reports.values()], self.absences.lost, self.facts.unreached)
        if isinstance(answer, Undecided):
            self._note_reason(answer.reason, now_s, is_proposal=True)
            return answer
        if isinstance(answer, Unrecoverable) and self.newest.before is None:
            return answer
        self.awaits_word = record is not None and self._is_alone(record, reports)
        if record is not None and self.awaits_word:
            self._note_reason(f"{self._gone(record.agents)}: this takes an operator", now_s, is_proposal=True)
            return None
        if isinstance(answer, Unrecoverable):
            return answer
        self.proposal = [*reports.values()]
        return replace(answer, rolled_back=True) if self.newest.may_be_undone(reports) else answer

    def note_made(self, now_s: float) -> None:
        self._note_reason("", now_s, is_proposal=False)

    def _note_reason(self, reason: str, now_s: float, *, is_proposal: bool) -> None:
        """`is_proposal`: the reports are there, so that it is to be told (NOTICE)."""
        self.reason = reason
        self._overdue.note("undecided", reason if is_proposal else "", now_s)

    # -- what is told

    def overdue_reason(self, now_s: float) -> str:
        """NOTICE."""
        return self._overdue.reason("undecided", now_s)

    def overdue_agents(self, now_s: float, *, is_ended: bool) -> str:
        """NOTICE: for whom the ready agents of a generation that is over wait. `is_ended`: the job is."""
        record = self.newest.record
        if record is None:
            return ""
        waits = self.newest.over >= record.generation and len(self.reports) > 0 and not is_ended
        waits = waits and self._waits(record) is not None
        self._overdue.note("ready agents", "others" if waits else "", now_s)
        return f"waiting for agent {self._awaited(record)}" if self._overdue.reason("ready agents", now_s) else ""

    def _awaited(self, record: Record) -> str:
        """PRESENT: the first few of them, with their hosts."""
        hosts = dict(zip(record.agents, (a.rpartition(":")[0] for a in record.addresses), strict=False))
        missing = self.reports.missing(record, self.absences.lost)
        return shortened(
            [f"{agent} (at {hosts[agent]})" if hosts.get(agent) else agent for agent in missing], _MAX_NAMED
        )

    # -- the first record

    def is_founding_due(self, now_s: float) -> bool:
        """Whether a tick is to look."""
        return self.newest.record is None and (self._is_founding_due or self._is_founding_over(now_s))

    def _may_found(self, on_tick: bool) -> bool:
        """Whether to look at the reports before the first record. Too few for it are looked at on a tick, not whenever
        an agent comes: a thousand that come at once would wait for a thousand looks at all of them."""
        self._is_founding_due = not on_tick and len(self.reports) < self.reports.num_founders
        return not self._is_founding_due

    def _is_founding_over(self, now_s: float) -> bool:
        first_s = self.reports.first_s
        return first_s is not None and now_s - first_s >= self.timeouts.founding_s

    # -- agents that are not here

    def _waits(self, record: Record) -> str | None:
        """PRESENT: for which agents; None for none."""
        if len(self.reports) + len(self.absences.lost) < len(record.agents):  # without a look at each
            return f"{len(self.reports)} of {len(record.agents)} agents are ready"
        missing = self.reports.missing(record, self.absences.lost)
        return f"waiting for agent {', '.join(missing)}" if missing else None

    def _is_over(self, record: Record, reports: Iterable[Report]) -> bool:
        """OVER."""
        return self.newest.finished and not any(self._has_seated(record, report) for report in reports)

    @staticmethod
    def _has_seated(record: Record, report: Report) -> bool:
        """Whether a member has a seat in `record`, and is no spare there."""
        seats = [record.seat(member.id) for member in report.members]
        return any(seat is not None and seat.status != SPARE for seat in seats)

    def _unaccepted(self) -> str:
        """ACCEPT: why the operator's word is needed; empty when it is not."""
        if not self.newest.parents or not self.newest.parents <= self.absences.lost:
            return ""
        return f"{self._gone(sorted(self.newest.parents))}; it has not accepted the record: this takes an operator"

    def _away(self, record: Record) -> str:
        """MOVED: why the operator's word is needed; empty when it is not."""
        if not self.office.has_moved:  # without a look at each agent, for each report
            return ""
        limit_s = self.timeouts.lost_after_s
        away = [a for a in self.absences.beyond(limit_s, record.agents) if self.office.may_be_led_elsewhere(a)]
        if not away:
            return ""
        others = ", ".join(sorted(self.office.addresses - {self.office.address}))
        return (
            f"agent {', '.join(away)} has not come to this coordinator at {self.office.address}, and may still train "
            f"if it dials the one before, at {others}: this takes an operator"
        )

    def _is_alone(self, record: Record, reports: Container[str]) -> bool:
        """ALONE."""
        if self.newest.own or any(agent in reports for agent in record.agents):
            return False
        return bool(self.office.remaining(record.agents))

    def _gone(self, agents: Iterable[str]) -> str:
        """Which of `agents` may have, or may have had, another coordinator."""
        gone = self.office.remaining(agents)
        silent = [agent for agent in gone if agent not in self.absences.exited]
        if silent:
            return f"agent {', '.join(silent)} of the record is silent, and may have another coordinator"
        return f"agent {', '.join(gone)} of the record has exited, and another coordinator may have led it before"
