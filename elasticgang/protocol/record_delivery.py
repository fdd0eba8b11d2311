"""What the session of each agent is owed: the newest record, and whether this coordinator is in office. Pure.

UNACCEPTED  An agent that was sent the newest record is not heard until it has accepted it, whatever it sends, and gets
         no answer that renews a lease. So it is lost in the end (LOST), also if it opens one session after the other,
         for example because its network loses large packets. It stays lost until it accepts the record.
REJOIN   An agent that was declared lost may come back, as a joiner that may bring state, if the newest record it knows
         is an ancestor of the present one; else it is evicted, before it learns that the coordinator is in office. One
         of the record that comes back may hold what was given up for lost: the coordinator decides again.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from elasticgang.protocol.absences import Absences
from elasticgang.protocol.coordinator_messages import CoordinatorInstruction, Evicted, Push, Send, Welcome
from elasticgang.protocol.coordinator_sessions import Session, Sessions
from elasticgang.protocol.newest_decision import NewestDecision
from elasticgang.protocol.office import Office
from elasticgang.protocol.reports import Reports


@dataclass
class RecordDelivery:
    """`everywhere`: as of `Welcome`."""

    newest: NewestDecision
    office: Office
    sessions: Sessions
    absences: Absences
    reports: Reports
    everywhere: bool

    def is_due(self, session: Session) -> bool:
        """UNACCEPTED: it owes an acceptance."""
        return self.newest.is_owed_to(session.agent, session.seen) and self.office.is_held

    def hear(self, session: Session) -> bool:
        """UNACCEPTED: False if it owes an acceptance."""
        if self.is_due(session):
            self.newest.owing.add(session.agent)
            return False
        self.absences.hear(session.agent)
        return True

    def welcome(self, number: int) -> Send:
        return Send(number, self._welcome(self.sessions.begun[number]))

    def _welcome(self, session: Session) -> Welcome:
        newest, in_office = self.newest, self.office.is_held
        session.is_denied = in_office and self.is_due(session)
        leads = in_office and not session.is_denied
        return Welcome(self.office.term, leads, newest.over, newest.joining, newest.finished, self.everywhere)

    def welcome_again(self) -> list[CoordinatorInstruction]:
        """UNACCEPTED: agents that owe nothing any more."""
        begun = self.sessions.begun
        return [self.welcome(n) for n, session in begun.items() if session.is_denied and not self.is_due(session)]

    def enter_office(self) -> list[CoordinatorInstruction]:
        out: list[CoordinatorInstruction] = []
        for number in self.sessions.begun:
            out += self.evict(number) or [self.welcome(number), *self.send(number)]
        return out

    def evict(self, number: int) -> list[CoordinatorInstruction]:
        """REJOIN: nothing if it may take part."""
        record, seen = self.newest.record, self.sessions.begun[number].seen
        if record is None or seen is None or record.builds_on(seen):
            return []
        return [Send(number, Evicted(f"its generation {seen.generation} is not one that the job builds on"))]

    def send(self, number: int) -> list[CoordinatorInstruction]:
        """In office: bring the agent to the present record."""
        decision, session = self.newest.decision, self.sessions.begun[number]
        if decision is None or not self.newest.is_owed_to(session.agent, session.seen):
            return []
        return [self._push(number, Push(decision, self.newest.over, self.newest.joining))]

    def send_to_all(self, but: Container[str] = ()) -> list[CoordinatorInstruction]:
        return [each for n, session in self.sessions.begun.items() if session.agent not in but for each in self.send(n)]

    def push(self) -> list[CoordinatorInstruction]:
        """The decision has just been made."""
        assert self.newest.decision is not None
        push = Push(self.newest.decision)
        begun = self.sessions.begun
        pushed = [self._push(n, push) for n, session in begun.items() if self.newest.may_be_sent(session.agent)]
        return [*pushed, *self.welcome_again()]

    def _push(self, number: int, push: Push) -> Send:
        """Only reports of agents that are sent no record stand: it may never reach the others."""
        session = self.sessions.begun[number]
        self.reports.withdraw(session.agent)
        session.pushed = push.decision.record.generation
        return Send(number, push)
