"""The sessions that agents have with one coordinator, and the process behind each id. Pure.

NEWEST   An agent has one session here: the newest that it has opened. An older one is closed, whether it has begun or
         the agent has yet to send the decision that its hello names.
SENDER   An agent speaks for itself alone: of its own members, and of a generation that it is in. Its id belongs to the
         first process that has used it here.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from elasticgang.protocol.coordinator_messages import (
    CoordinatorInstruction,
    CoordinatorMessage,
    Hello,
    Notice,
    Send,
)
from elasticgang.protocol.record import RecordRef


@dataclass
class Session:
    agent: str
    number: int
    seen: RecordRef | None
    promised: bool = False
    former: str = ""  # the id for which it speaks too (PROMISE)
    is_denied: bool = False  # UNACCEPTED: its newest `Welcome` does not say that this coordinator is in office
    told: str = ""  # NOTICE: the newest reason
    pushed: int = 0  # REPORT: the newest generation that it was sent
    has_told: bool = False  # REACHED: its facts


@dataclass
class Sessions:
    """By the number of the connection. `waiting`: their hello waits until `KnownDecision` comes. `number_of`: by agent:
    the one that has begun."""

    begun: dict[int, Session] = field(default_factory=dict)
    waiting: dict[int, Hello] = field(default_factory=dict)
    number_of: dict[str, int] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)  # by agent: the newest connection that was put there
    _incarnations: dict[str, str] = field(default_factory=dict)

    def of(self, agent: str) -> Session | None:
        number = self.number_of.get(agent)
        return None if number is None else self.begun[number]

    def opened_by(self, agent: str) -> dict[int, int]:
        """The sessions that the agent has here, begun or not, and their numbers there."""
        found = {}
        begun, asked = self.number_of.get(agent), self._asked.get(agent)
        if begun is not None:
            found[begun] = self.begun[begun].number
        if asked is not None and (waiting := self.waiting.get(asked)) is not None:
            found[asked] = waiting.session
        return found

    def is_duplicate(self, hello: Hello) -> bool:
        """SENDER."""
        return self._incarnations.setdefault(hello.agent, hello.incarnation) != hello.incarnation

    def speaks_for_former(self, hello: Hello) -> bool:
        """SENDER: the agent of that id was the same process."""
        return bool(hello.former) and self._incarnations.get(hello.former, hello.incarnation) == hello.incarnation

    def begin(self, number: int, hello: Hello) -> Session:
        seen = None if hello.decision is None else RecordRef(hello.decision.generation, hello.decision.digest)
        session = self.begun[number] = Session(hello.agent, hello.session, seen)
        session.has_told = hello.session == 1  # RESEND: else it tells its facts, whatever they are
        self.number_of[hello.agent] = number
        return session

    def await_decision(self, number: int, hello: Hello) -> None:
        self.waiting[number], self._asked[hello.agent] = hello, number

    def take_waiting(self, number: int) -> Hello | None:
        """The hello of a session that waits for a decision. It waits no more."""
        waiting = self.waiting.pop(number, None)
        if waiting is not None and self._asked.get(waiting.agent) == number:
            del self._asked[waiting.agent]
        return waiting

    def end(self, number: int) -> Session | None:
        self.take_waiting(number)
        session = self.begun.pop(number, None)
        if session is not None:
            del self.number_of[session.agent]
        return session

    def named_agents(self) -> set[str]:
        """Those that have a session, or are about to, and those for which these speak."""
        formers = {session.former for session in self.begun.values()}
        return formers.union(self.number_of, [waiting.agent for waiting in self.waiting.values()])

    def keep(self, agents: Container[str]) -> None:
        """FORMER: forget the processes of all others."""
        self._incarnations = {agent: process for agent, process in self._incarnations.items() if agent in agents}

    def broadcast(self, message: CoordinatorMessage, source: int | None = None) -> list[CoordinatorInstruction]:
        return [Send(number, message) for number in self.begun if number != source]

    def tell(self, kind: str, reason: str) -> list[CoordinatorInstruction]:
        """NOTICE: in each session once; nothing if there is no reason."""
        untold = [number for number, session in self.begun.items() if session.told != reason] if reason else []
        for number in untold:
            self.begun[number].told = reason
        return [Send(number, Notice(kind, reason)) for number in untold]
