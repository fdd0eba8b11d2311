"""Coordinators of the simulation: the real `CoordinatorState` between simulated sockets and a simulated disk.

Messages travel in order in each session, and arbitrarily late. A session breaks at either end at any time. A
coordinator may crash between any two messages that it sends, and before and after it has written its directory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticgang.protocol.coordinator_messages import (
    NO_TERM,
    AgentExited,
    AgentMessage,
    CloseSession,
    CoordinatorEvent,
    CoordinatorMessage,
    Decision,
    OfficeGranted,
    Persist,
    Persisted,
    Push,
    Received,
    Send,
    SessionClosed,
    Term,
    Ticked,
    Timeouts,
)
from elasticgang.protocol.coordinator_state import CoordinatorState
from elasticgang.simulation.invariants import Violation

if TYPE_CHECKING:
    from elasticgang.simulation.coordinated_cluster import CoordinatedCluster
    from elasticgang.simulation.coordinated_host import CoordinatedHost

TIMEOUTS = Timeouts(fenced_limit_s=90.0, dead_after_s=120.0, founding_s=20.0)


def clock_rate(number: int) -> float:
    """The clocks of the simulation run as unlike as `Timeouts.drift` allows."""
    return 1 + TIMEOUTS.drift * (1 if number % 2 else -1)


class SimulatedSession:
    """One connection. An end that is closed receives nothing more; the other end sees the end of the stream after what
    was sent."""

    def __init__(self, number: int, host: CoordinatedHost, coordinator: CoordinatorProcess) -> None:
        self.number, self.host, self.coordinator = number, host, coordinator
        self.to_coordinator: deque[AgentMessage] = deque()
        self.to_agent: deque[CoordinatorMessage] = deque()
        self.is_agent_open = self.is_coordinator_open = True


@dataclass
class Disk:
    """A state directory, and who holds its lock. `is_stuck`: nothing that is written to it is done."""

    term: Term = NO_TERM
    decision: Decision | None = None
    holder: CoordinatorProcess | None = None
    is_stuck: bool = False


class CoordinatorProcess:
    """`zone`: its part of a parted network. `is_stopped`: by SIGSTOP."""

    def __init__(
        self, cluster: CoordinatedCluster, number: int, disk: Disk | None, zone: str, address: str, is_founder: bool
    ) -> None:
        self.name = self.home = f"coordinator{number}"
        self.rate = clock_rate(number)
        self.is_alive, self.is_stopped = True, False
        self.zone, self.address = zone, address
        self.disk = disk
        self.outbox: deque[Send | CloseSession] = deque()
        self.writing: deque[Persist] = deque()
        self.sessions: dict[int, SimulatedSession] = {}
        self.state = CoordinatorState(self.name, has_directory=disk is not None, timeouts=TIMEOUTS)
        if disk is not None:
            disk.holder = self
            self.state.number = disk.term.number + 1
            self.state.decision = disk.decision
            disk.term = self.state.term
        self.state.granted = disk is not None or is_founder
        self.do(cluster, Ticked())

    # -- what it can do

    def moves(self, cluster: CoordinatedCluster) -> list[str]:
        if self.is_stopped:
            return []
        moves = []
        for number, session in self.sessions.items():
            if not self.reaches(session):
                moves.append(f"resets {number}")
            elif session.to_coordinator:
                moves += [f"receives {number}", f"resets {number}"]
            elif not session.is_agent_open:
                moves.append(f"loses {number}")
        if self.outbox:
            moves.append("sends")
        if self.may_write:
            moves.append("writes")
        record = self.state.record
        if record is not None:
            moves += [f"misses {a}" for a in record.agents if not cluster.hosts[a].alive and a not in self.state.dead]
        elif not self.state.granted and self.state.sessions and cluster.may_found(self):
            moves.append("founds")
        return moves

    @property
    def may_write(self) -> bool:
        return bool(self.writing) and self.disk is not None and not self.disk.is_stuck

    def reaches(self, session: SimulatedSession) -> bool:
        host = session.host
        return host.zone == self.zone and (host.alive or (host.said_goodbye and bool(session.to_coordinator)))

    # -- doing it

    def perform(self, cluster: CoordinatedCluster, verb: str) -> None:
        what, *about = verb.split()
        match what:
            case "receives":
                self.receive(cluster, self.sessions[int(about[0])])
            case "loses" | "resets":
                self.lose(cluster, int(about[0]))
            case "sends":
                self.send(self.outbox.popleft())
            case "writes":
                self.write(cluster, self.writing.popleft())
            case "misses":
                self.do(cluster, AgentExited(about[0]))
            case "founds" | "is":
                if self.state.record is None and cluster.record is not None:  # every agent that knew it is dead
                    cluster.begin_anew()
                self.do(cluster, OfficeGranted())
            case _:
                raise ValueError(verb)

    def do(self, cluster: CoordinatedCluster, event: CoordinatorEvent) -> None:
        lost, dead = set(self.state.lost), set(self.state.dead)
        instructions = self.state.handle(event, cluster.now_s * self.rate)
        if not isinstance(event, AgentExited):
            cluster.check_lost(self, self.state.lost - lost, self.state.dead - dead)
        for instruction in instructions:
            match instruction:
                case Persist(_, Decision() as decision) | Send(_, Push(decision)):
                    cluster.note_decision(decision, self.state.proposal)
            if isinstance(instruction, Persist):
                if self.disk is None:
                    raise Violation("PERSIST-1: a coordinator without a directory writes")
                self.writing.append(instruction)
            else:
                self.outbox.append(instruction)

    def receive(self, cluster: CoordinatedCluster, session: SimulatedSession) -> None:
        self.do(cluster, Received(session.number, session.to_coordinator.popleft()))

    def lose(self, cluster: CoordinatedCluster, number: int) -> None:
        session = self.sessions.pop(number)
        session.is_coordinator_open = False
        session.to_coordinator.clear()
        self.do(cluster, SessionClosed(number))

    def send(self, instruction: Send | CloseSession) -> None:
        session = self.sessions.get(instruction.session)
        if session is None:
            return
        if isinstance(instruction, CloseSession):
            del self.sessions[session.number]
            session.is_coordinator_open = False
            session.to_coordinator.clear()
        elif session.is_agent_open:
            session.to_agent.append(instruction.message)

    def write(self, cluster: CoordinatedCluster, persist: Persist) -> None:
        assert self.disk is not None
        if persist.decision is not None:
            cluster.make_effective(persist.decision)
        self.disk.term, self.disk.decision = persist.term, persist.decision
        if persist.decision is not None:
            self.do(cluster, Persisted(persist.decision.record.digest))

    def crash(self) -> None:
        self.is_alive = False
        self.outbox.clear()
        self.writing.clear()
        for session in self.sessions.values():
            session.is_coordinator_open = False
            session.to_coordinator.clear()
        self.sessions.clear()
        if self.disk is not None and self.disk.holder is self:
            self.disk.holder = None
