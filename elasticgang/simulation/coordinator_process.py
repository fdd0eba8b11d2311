"""Coordinators of the simulation: the real `CoordinatorState` between simulated sockets and a simulated disk.

Messages travel in order in each session, and arbitrarily late. A session breaks at either end at any time. A
coordinator may crash between any two messages that it sends, and before and after it has written its directory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elasticgang.protocol.coordinator_messages import (
    JOB_TIMEOUTS,
    NO_TERM,
    Accepted,
    AgentExited,
    AgentMessage,
    CloseSession,
    CoordinatorEvent,
    CoordinatorInstruction,
    CoordinatorMessage,
    Decision,
    Hello,
    JobUnrecoverable,
    OfficeGranted,
    Persist,
    Persisted,
    Promise,
    Push,
    Ready,
    Received,
    Refused,
    Send,
    SessionClosed,
    Term,
    Ticked,
)
from elasticgang.protocol.coordinator_state import CoordinatorState
from elasticgang.simulation import fact_checks, promises
from elasticgang.simulation.invariants import Violation

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster
    from elasticgang.simulation.host import Host

TIMEOUTS = replace(JOB_TIMEOUTS, founding_s=20.0)

_NOBODY: frozenset[str] = frozenset()


def clock_rate(number: int) -> float:
    """The clocks of the simulation run as unlike as `Timeouts.drift` allows."""
    return 1 + TIMEOUTS.drift * (1 if number % 2 else -1)


class SimulatedSession:
    """One connection. An end that is closed receives nothing more; the other end sees the end of the stream after what
    was sent. `accepted`: the digest of the newest record that the coordinator knows the agent to have accepted."""

    def __init__(self, number: int, host: Host, coordinator: CoordinatorProcess) -> None:
        self.number, self.host, self.coordinator = number, host, coordinator
        self.agent, self.agent_session = host.session.agent, host.session
        self.to_coordinator: deque[AgentMessage] = deque()
        self.to_agent: deque[CoordinatorMessage] = deque()
        self.is_agent_open = self.is_coordinator_open = True
        self.accepted = ""


@dataclass
class Disk:
    """A state directory, and who holds its lock. `is_stuck`: nothing that is written to it is done."""

    term: Term = NO_TERM
    decision: Decision | None = None
    finished: bool = False
    addresses: frozenset[str] = frozenset()
    own: bool = False
    holder: CoordinatorProcess | None = None
    is_stuck: bool = False


class CoordinatorProcess:
    """`zone`: its part of a parted network. `is_stopped`: by SIGSTOP. `is_granted`: it has its directory, to which
    agents brought no record, or founded the job, and has seen no other's decision since, nor, without a
    directory, another's term. `promises`: the agents that have promised its present term. `excused`: the agents of its
    record that were absent when the operator gave their word for it, and have not come since."""

    def __init__(
        self, cluster: Cluster, number: int, disk: Disk | None, zone: str, address: str, is_founder: bool
    ) -> None:
        self.name = self.home = f"coordinator{number}"
        self.rate = clock_rate(number)
        self.began_s = cluster.now_s
        self.is_alive, self.is_stopped = True, False
        self.zone, self.address = zone, address
        self.disk = disk
        self.is_granted = is_founder or (disk is not None and (disk.decision is None or disk.own))
        self.excused: set[str] = set()
        self.promises: set[str] = set()
        self.heard_s: dict[str, float] = {}  # by agent: when it was heard, by a clock that stops with this process
        self.idle_s = 0.0  # for how long it was stopped
        self.stopped_at_s = 0.0
        self.num_pushed = 0  # of the newest decision
        self.outbox: deque[Send | CloseSession] = deque()
        self.writing: deque[Persist] = deque()
        self.sessions: dict[int, SimulatedSession] = {}
        kept = Disk() if disk is None else disk
        self.state = CoordinatorState(
            self.name,
            number=kept.term.number + 1,
            has_directory=disk is not None,
            decision=kept.decision,
            own=kept.own,
            address=address,
            addresses=kept.addresses,
            finished=kept.finished,
            granted=is_founder,
            timeouts=TIMEOUTS,
        )
        if disk is not None:
            disk.holder = self
            disk.term, disk.addresses = self.state.office.term, self.state.office.addresses
        self.do(cluster, Ticked())

    # -- what it can do

    def moves(self, cluster: Cluster) -> list[str]:
        if self.is_stopped:
            return []
        moves = []
        for number, session in self.sessions.items():
            if not session.to_coordinator and session.is_agent_open and session.host.zone == self.zone:
                continue  # idle: an open end is that of a living agent
            if not self.reaches(session):
                moves.append(f"resets {number}")
            elif session.to_coordinator:
                moves += [f"receives {number}", f"resets {number}"]
            else:
                moves.append(f"loses {number}")
        if self.outbox:
            moves.append("sends")
        if self.may_write:
            moves.append("writes")
        record = self.state.record
        if record is not None:
            if cluster.num_dead_hosts:  # whose address refuses connections
                absent = self.state.absent_agents()
                moves += [f"misses {agent}" for agent, at in absent.items() if not cluster.hosts[at].alive]
        elif not self.state.office.granted and self.state.sessions.begun and promises.may_found(cluster, self):
            moves.append("founds")
        return moves

    def has_heard(self, agent: str) -> bool:
        return agent in self.heard_s

    def silent_s(self, cluster: Cluster, agent: str) -> float:
        """For how long this process has run since it heard `agent`, or could have first, by its clock."""
        return (cluster.now_s - self.idle_s - self.heard_s.get(agent, self.began_s)) * self.rate

    def stop(self, cluster: Cluster) -> None:
        self.is_stopped, self.stopped_at_s = True, cluster.now_s

    def go_on(self, cluster: Cluster) -> float:
        """Returns for how long it was stopped. It need not notice that it was for less than `standstill_s`."""
        self.is_stopped = False
        paused_s = cluster.now_s - self.stopped_at_s
        self.idle_s += paused_s if paused_s * self.rate > TIMEOUTS.standstill_s else 0.0
        return paused_s

    @property
    def may_write(self) -> bool:
        return bool(self.writing) and self.disk is not None and not self.disk.is_stuck

    def reaches(self, session: SimulatedSession) -> bool:
        host = session.host
        return host.zone == self.zone and (host.alive or (host.said_goodbye and bool(session.to_coordinator)))

    # -- doing it

    def perform(self, cluster: Cluster, verb: str) -> None:
        what, *about = verb.split()
        match what:
            case "receives":
                self.receive(cluster, self.sessions[int(about[0])])
            case "loses" | "resets":
                self.lose(cluster, int(about[0]))
            case "sends":
                self.send(cluster, self.outbox.popleft())
            case "writes":
                self.write(cluster, self.writing.popleft())
            case "misses":
                self.do(cluster, AgentExited(about[0]))
            case "founds" | "is":
                if self.state.record is None and cluster.chain.record is not None:  # every agent that knew it is dead
                    cluster.chain.begin_anew()
                cluster.seen.add("founded anew" if self.state.record is None else "operator's word")
                if self.state.record is None:
                    self.is_granted = True
                else:
                    present = {session.agent for session in self.state.sessions.begun.values()}
                    self.excused |= {*self.state.record.agents} - present
                self.do(cluster, OfficeGranted())
            case _:
                raise ValueError(verb)

    def do(self, cluster: Cluster, event: CoordinatorEvent) -> None:
        state = self.state
        number, known = state.office.number, state.newest.decision
        lost = frozenset(state.absences.lost) if state.absences.lost else _NOBODY
        instructions = state.handle(event, cluster.now_s * self.rate)
        if state.office.number != number:
            self._note_all(cluster, instructions, number)  # decided before it took another term, at the same event
            self.promises.clear()
            self.is_granted = self.is_granted and self.disk is not None
        declared = state.absences.lost
        is_new = state.newest.decision is not None and (
            known is None or state.newest.decision.record.digest != known.record.digest
        )
        if is_new and state.newest.decision is not None and state.newest.decision.term == state.office.term:
            declared = declared.union(state.newest.decision.record.dead_agents)  # it has decided without them at once
        if declared and not isinstance(event, AgentExited):
            promises.check_lost(cluster, self, declared - lost, silent=isinstance(event, Ticked))
        if instructions:
            self._note_all(cluster, instructions, state.office.number)
            for instruction in instructions:
                if isinstance(instruction, Send) and isinstance(instruction.message, JobUnrecoverable):
                    cluster.note_lost_state()
                if not isinstance(instruction, Persist):
                    self.outbox.append(instruction)
                elif self.disk is None:
                    raise Violation("PERSIST-1: a coordinator without a directory writes")
                else:
                    self.writing.append(instruction)
        if state.newest.decision is not None and state.newest.decision is not known:
            is_learned = state.newest.decision.term.name != self.name
            if is_new or is_learned:
                self.excused.clear()
            self.is_granted = self.is_granted and not is_learned  # another coordinator has decided

    def _note_all(self, cluster: Cluster, instructions: list[CoordinatorInstruction], number: int) -> None:
        """Decisions of this coordinator under the term `number`."""
        for instruction in instructions:
            if isinstance(instruction, Send):
                message = instruction.message
                decision = message.decision if isinstance(message, Push) else None
            else:
                decision = instruction.decision if isinstance(instruction, Persist) else None
            if decision is not None and decision.term == Term(number, self.name):
                self._note(cluster, decision)

    def _note(self, cluster: Cluster, decision: Decision) -> None:
        if decision.record.digest in cluster.chain.decided:
            return
        promises.check_decision(cluster, self, decision)
        promises.check_cut_off(self.state, decision.record)
        cluster.chain.note_decision(decision, self.state.next_decision.proposal)
        self.num_pushed = 0

    def receive(self, cluster: Cluster, session: SimulatedSession) -> None:
        message, host = session.to_coordinator.popleft(), session.host
        if isinstance(message, Ready) and not (host.alive and session.is_agent_open):
            cluster.seen.add("ghost")
        if isinstance(message, Hello) and (host.name, session.agent) in cluster.chain.declared_lost:
            cluster.seen.add("lost agent came back")
        if (
            isinstance(message, Promise)
            and message.term == self.state.office.term
            and session.number in self.state.sessions.begun
        ):
            self.promises.update({session.agent, session.agent_session.former} - {""})
        self.do(cluster, Received(session.number, message))
        if isinstance(message, (Hello, Accepted)):
            ref = message.decision if isinstance(message, Hello) else message
            session.accepted = "" if ref is None else ref.digest
        if session.number in self.state.sessions.begun:
            self.excused.discard(session.agent)
            record = self.state.record
            if record is None or session.agent not in record.agents or session.accepted == record.digest:
                self.heard_s[session.agent] = cluster.now_s - self.idle_s
        fact_checks.check_session(host)

    def lose(self, cluster: Cluster, number: int) -> None:
        session = self.sessions.pop(number)
        session.is_coordinator_open = False
        session.to_coordinator.clear()
        self.do(cluster, SessionClosed(number))

    def send(self, cluster: Cluster, instruction: Send | CloseSession) -> None:
        session = self.sessions.get(instruction.session)
        if session is None:
            return
        if isinstance(instruction, CloseSession):
            del self.sessions[session.number]
            session.is_coordinator_open = False
            session.to_coordinator.clear()
        elif session.is_agent_open:
            message = instruction.message
            if isinstance(message, Push):
                promises.check_push(cluster, self, session, message.decision)
                self.num_pushed += 1
            elif isinstance(message, Refused) and session.host.is_duplicate:
                cluster.seen.add("duplicate id")
            session.to_agent.append(message)

    def write(self, cluster: Cluster, persist: Persist) -> None:
        assert self.disk is not None
        if persist.decision is not None:
            cluster.chain.make_effective(persist.decision)
        self.disk.term, self.disk.decision = persist.term, persist.decision
        self.disk.finished, self.disk.addresses, self.disk.own = persist.finished, persist.addresses, persist.own
        if persist.decision is not None:
            self.do(cluster, Persisted(persist.decision.record.digest))

    def crash(self) -> list[str]:
        """Returns what it was at."""
        num_waiting = sum(isinstance(one, Send) and isinstance(one.message, Push) for one in self.outbox)
        at = []
        if self.state.is_deciding:
            at.append("crashed before it had written")
        elif num_waiting and self.num_pushed:
            at.append("crashed in mid-push")
        elif num_waiting and self.disk is not None:
            at.append("crashed before it pushed what it had written")
        self.is_alive = False
        self.outbox.clear()
        self.writing.clear()
        for session in self.sessions.values():
            session.is_coordinator_open = False
            session.to_coordinator.clear()
        self.sessions.clear()
        if self.disk is not None and self.disk.holder is self:
            self.disk.holder = None
        return at
