"""The office of one coordinator: its term, who has promised it, and for whom an operator has given their word. Pure.

OFFICE   A coordinator decides only in office. It takes office (a) from its state directory, which it holds under a
         lock, unless agents have brought the record there; (b) for a job whose last record was decided without one,
         once every agent of that record has promised its term; (c) because the job is new and it was started to found
         it, or the operator says so. It leaves office when it learns of a newer record or, without a directory, of a
         term that is not lower than its own. Out of office it holds no state for lost: another coordinator may lead
         agents that it could not reach.
WORD     The operator's word is that the agents of the record that have no session here have exited, and that no
         directory has a newer record. It counts as the promises of these agents, until they come back or the record is
         followed by another. It stands for no agent that has a session: that one may go to another coordinator.
MOVED    After a restart from its state directory at another address, a coordinator declares no agent lost for its
         silence that has not promised its term: a connection refused at the old address renews that agent's lease.
LEFT     An agent has left for good if it has said so in its session, which began with all that it had accepted; or if
         its process speaks for it under another id. One whose host refuses connections has exited, but may have
         accepted a record of another coordinator before.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from elasticgang.protocol.coordinator_messages import Decision, Term
from elasticgang.protocol.newest_decision import NewestDecision
from elasticgang.protocol.record import Record


@dataclass
class Office:
    """`granted`: by (a), which is found out here, as a founder, or by the coordinator's own last decision. `addresses`:
    of the coordinators that have used the state directory since the newest decision, from where agents may have leases;
    `address` is this one's. `was_held`: as far as its sessions know. `left`: agents that have left (LEFT), whichever
    the record."""

    newest: NewestDecision
    name: str
    number: int = 1
    address: str = ""
    addresses: frozenset[str] = frozenset()
    granted: bool = False
    was_held: bool = False
    left: set[str] = field(default_factory=set)
    _promises: set[str] = field(default_factory=set)  # agents that have promised the present term
    _excused: frozenset[str] = frozenset()  # WORD: agents of the record that have exited
    _is_waived: bool = False  # WORD: no directory is needed to follow the record

    def __post_init__(self) -> None:
        self.addresses |= {self.address}
        self.granted |= self.newest.is_by_directory

    @property
    def term(self) -> Term:
        return Term(self.number, self.name)

    @property
    def is_held(self) -> bool:
        return self.granted or self._has_all_promises()

    def _has_all_promises(self) -> bool:
        """OFFICE (b), WORD."""
        decision = self.newest.decision
        if decision is None or self._needs_directory(decision):
            return False
        agents = decision.record.agents
        return self._promises.issuperset(agents) or (bool(self._excused) and not self._unpromised(agents))

    def _needs_directory(self, decision: Decision) -> bool:
        return decision.durable and not self._is_waived

    def _unpromised(self, agents: Iterable[str]) -> list[str]:
        """Those whose promise is missing for an office."""
        return [agent for agent in agents if agent not in self._promises and agent not in self._excused]

    def why_not(self, present: Container[str]) -> str:
        """Out of office. `present`: agents that have a session here."""
        decision = self.newest.decision
        if decision is None:
            return "this coordinator knows nothing of the job, and was not started to found it"
        if self._needs_directory(decision):
            return "the last record was decided with a state directory, which this coordinator does not have"
        missing = self._unpromised(decision.record.agents)
        absent = [agent for agent in missing if agent not in present]
        return f"agent {', '.join(absent or missing)} of the last record has not come back"

    # -- how it is taken, and left

    def promise(self, *agents: str) -> None:
        self._promises.update(agents)

    def grant(self, present: Container[str]) -> None:
        """OFFICE (c), WORD."""
        record = self.newest.record
        if record is None:
            self.granted = True
        else:
            self._excused |= self._absent(record, present)
            self._is_waived = True
        self.addresses = frozenset([self.address])

    @staticmethod
    def _absent(record: Record, present: Container[str]) -> frozenset[str]:
        return frozenset(agent for agent in record.agents if agent not in present)

    def take_back_word(self) -> None:
        self._excused, self._is_waived = frozenset(), False

    def recall(self, agent: str) -> None:
        """WORD: it has come back, so that its own promise is needed."""
        self._excused -= {agent}

    def decide(self) -> None:
        """The newest decision is its own."""
        self.granted = True
        self.take_back_word()
        self.addresses = frozenset([self.address])

    def leave(self) -> None:
        self.granted = self.was_held = False

    def raise_term(self, above: Term) -> bool:
        """Another coordinator has, or had, a term that is not lower. True: this one is to leave its office."""
        self.number = above.number + 1
        self._promises.clear()
        self._is_waived = False  # somebody may have the directory
        return not self.newest.is_by_directory or not self.is_held

    # -- agents that have gone, or may have another coordinator

    def remaining(self, agents: Iterable[str]) -> list[str]:
        """Those of `agents` that have not left, not even by the operator's word."""
        return [agent for agent in agents if agent not in self.left and agent not in self._excused]

    @property
    def parents_have_left(self) -> bool:
        """BACK: nobody has the record, nor will."""
        return bool(self.newest.parents) and not self.remaining(self.newest.parents)

    @property
    def has_moved(self) -> bool:
        return len(self.addresses) > 1

    def may_be_led_elsewhere(self, agent: str) -> bool:
        """MOVED."""
        return self.has_moved and agent not in self._promises

    def keep(self, agents: Container[str]) -> None:
        """FORMER: forget all others."""
        self._promises = {agent for agent in self._promises if agent in agents}
        self.left = {agent for agent in self.left if agent in agents}
