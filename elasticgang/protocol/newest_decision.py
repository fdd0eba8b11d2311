"""The newest decision of a job that one coordinator knows, and who has accepted it. Pure.

ACCEPT   Without a state directory, a joiner is sent a record only after an agent of the record before has accepted it.
BACK     A record that was decided without a state directory is dropped if, as far as the coordinator knows, no agent of
         the record before has accepted it, and: the coordinator leaves its office, since another one may have decided,
         or may decide, another record; or all that were to accept it have left (LEFT), if need be by the operator's
         word; or a state would be given up for lost with it. The record before is the newest again. Until the next
         decision, any agent that has accepted the dropped one brings it back. So office is always over all agents of a
         record that somebody has. The next record has `rolled_back`, unless every agent that may have accepted the
         dropped one is present.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elasticgang.protocol.coordinator_messages import Decision, DecisionRef, EndGeneration
from elasticgang.protocol.record import Record, RecordRef


@dataclass
class NewestDecision:
    """`decision`: from the state directory, from agents, or made here. `own`: as of `Persist`. `parents`: unless there
    are none, one of these has yet to accept the record (ACCEPT). `before`: the decision before, until an agent has
    accepted the newest; `given_up`: the newest that was dropped (BACK). `owing`: agents that were here without having
    accepted the record (UNACCEPTED). `finished`, `over`, `joining`: as of `Welcome`."""

    has_directory: bool = False
    decision: Decision | None = None
    own: bool = False
    finished: bool = False
    parents: frozenset[str] = frozenset()
    before: Decision | None = None
    given_up: Decision | None = None
    owing: set[str] = field(default_factory=set)
    over: int = 0
    joining: int = 0
    _finished_in: int = 0  # the newest generation in which an agent says that it has finished
    _timed_out: int = 0  # the newest generation in which a collective has timed out

    @property
    def record(self) -> Record | None:
        return None if self.decision is None else self.decision.record

    @property
    def is_by_directory(self) -> bool:
        """OFFICE (a): the directory alone decides what follows the record."""
        return self.has_directory and (self.decision is None or self.own)

    def has_agent(self, agent: str) -> bool:
        return self.decision is not None and self.decision.record.has_agent(agent)

    def is_news(self, ref: DecisionRef) -> bool:
        return self.decision is None or self._is_newer(ref, self.decision.ref)

    @staticmethod
    def _is_newer(ref: DecisionRef, than: DecisionRef) -> bool:
        return ref.order > than.order

    # -- another decision

    def learn(self, decision: Decision) -> None:
        """Another coordinator has made it."""
        self._replace(decision, own=False)

    def adopt(self, decision: Decision) -> None:
        """It was made here, and follows the newest."""
        known, before = self.decision, self.record
        self._replace(decision, own=self.is_by_directory)
        if not self.own:
            self.parents, self.before = self._must_accept(before, decision.record), known

    def go_back(self) -> None:
        """BACK."""
        assert self.before is not None
        dropped, before = self.decision, self.before
        self._replace(before, own=False, known=before.record.generation)
        self.given_up = dropped

    def _replace(self, decision: Decision, *, own: bool, known: int | None = None) -> None:
        """`known`: the newest generation of which the end, and those that join, are known."""
        self.decision, self.own = decision, own
        self.parents, self.before, self.given_up = frozenset(), None, None
        self.owing.clear()
        if known is None:
            known = decision.record.generation - 1  # what is known of the next one may be of another of that number
        self.over, self.joining = min(self.over, known), min(self.joining, known)

    # -- who has accepted it

    def may_be_sent(self, agent: str) -> bool:
        """ACCEPT."""
        return self.has_agent(agent) and (not self.parents or agent in self.parents)

    def is_owed_to(self, agent: str, seen: RecordRef | None) -> bool:
        """`seen`: the newest record of the agent."""
        record = self.record
        return record is not None and (seen is None or seen.digest != record.digest) and self.may_be_sent(agent)

    def accept(self) -> bool:
        """By an agent. True: it was decided here, and is to be written now (PERSIST)."""
        is_first, self.before = self.before is not None, None
        self.own |= is_first and self.has_directory
        return is_first and self.has_directory

    def lift(self) -> frozenset[str]:
        """ACCEPT is met. Those that had to accept the record."""
        parents, self.parents = self.parents, frozenset()
        return parents

    def may_be_undone(self, present: Iterable[str]) -> bool:
        """BACK: whether an agent that is not present may have accepted the record that was given up."""
        return self.given_up is not None and not self._must_accept(self.record, self.given_up.record).issubset(present)

    def _must_accept(self, before: Record | None, record: Record) -> frozenset[str]:
        """ACCEPT."""
        return frozenset() if before is None else frozenset(before.agents) & frozenset(record.agents)

    # -- its generation

    def end(self, end: EndGeneration) -> bool:
        """Whether that is news."""
        if self.record is None or end.generation != self.record.generation:
            return False
        if end.generation <= self.over and (not end.cause.timed_out or end.generation <= self._timed_out):
            return False
        self.over = end.generation
        self._timed_out = end.generation if end.cause.timed_out else self._timed_out
        return True

    def join(self, generation: int) -> bool:
        """Whether it is news that members wait to join the generation."""
        if self.record is None or generation != self.record.generation or generation <= self.joining:
            return False
        self.joining = generation
        return True

    def finish(self, generation: int) -> bool:
        """An agent has finished the job in that generation. Whether it is news that the job has finished."""
        self._finished_in = max(self._finished_in, generation)
        is_news, self.finished = not self.finished, True
        return is_news

    @property
    def has_finished_in_it(self) -> bool:
        return self.record is not None and self.record.generation == self._finished_in
