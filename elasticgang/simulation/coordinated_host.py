"""An agent of the simulation under a coordinator that decides, with its ranks: the real `AgentSession`, `AgentState`.

The lease is a word in memory that the ranks read: it binds them also while the agent is stopped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elasticgang.protocol import agent_events
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.coordinator_messages import (
    Answer,
    CollectReport,
    Connected,
    ConnectionRefused,
    Disconnected,
    EndGeneration,
    Fence,
    Finished,
    Goodbye,
    HangUp,
    Inform,
    JoinRequest,
    KillRanks,
    Notify,
    PeerMessage,
    ReportCollected,
    ReportRequested,
    SendToCoordinator,
    SessionEvent,
    SetLease,
    Ticked,
    Unfence,
)
from elasticgang.protocol.record import Record, Undecided
from elasticgang.protocol.restarts import Restarts
from elasticgang.simulation.base_host import BaseHost
from elasticgang.simulation.coordinator_process import (
    TIMEOUTS,
    CoordinatorProcess,
    SimulatedSession,
    clock_rate,
)
from elasticgang.simulation.invariants import Violation
from elasticgang.simulation.rank import KILLED, REQUESTING, STARTING, Rank

if TYPE_CHECKING:
    from elasticgang.simulation.coordinated_cluster import CoordinatedCluster

_PATIENCE_AT_END = 60
_MAX_ABORT_MOVES = 20


class CoordinatedHost(BaseHost):
    """`zone`: its part of a parted network. `is_frozen`: the whole host stands still; `is_stopped`: the agent alone.
    `is_slow`: its sessions carry nothing while time passes. `lease_until_s`: what the ranks read."""

    def __init__(
        self, cluster: CoordinatedCluster, name: str, num_ranks: int, mismatch: str = "", agent: str = ""
    ) -> None:
        super().__init__(cluster, name, num_ranks, mismatch)
        self.id = agent or name
        self.rate = clock_rate(len(cluster.hosts))
        self.is_frozen = self.is_stopped = self.is_slow = False
        self.zone = ""
        self.said_goodbye = False
        self.restarts: list[int] = []
        self.connection: SimulatedSession | None = None
        self.session = AgentSession(self.id, incarnation=name, timeouts=TIMEOUTS)
        self.lease_until_s: float | None = None
        self.lease_holder: CoordinatorProcess | None = None
        self.is_report_due = False
        self.agent_state = AgentState(
            agent=self.id,
            host=name,
            job=self.job,
            coordinator="",
            restarts=Restarts(1_000_000),
            num_ranks=num_ranks - self.num_spares,
            num_spares=self.num_spares,
            min_agents=cluster.setting.min_hosts,
            max_agents=cluster.setting.max_hosts,
        )
        for local_rank in range(num_ranks):
            self._start(cluster, local_rank)

    def clock_s(self, cluster: CoordinatedCluster) -> float:
        return cluster.now_s * self.rate

    @property
    def is_cut(self) -> bool:
        return self.zone != "" or self.is_frozen

    @property
    def num_successors(self) -> int:
        return self.agent_state.num_successors([rank.name for rank in self.ranks if rank.draining])

    @property
    def is_inert(self) -> bool:
        return all(not rank.alive or rank.phase in (REQUESTING, STARTING) for rank in self.ranks)

    def is_lease_over(self, cluster: CoordinatedCluster) -> bool:
        return self.lease_until_s is None or self.clock_s(cluster) >= self.lease_until_s

    # -- what it can do

    def moves(self, cluster: CoordinatedCluster) -> list[str]:
        if self.is_frozen or self.is_stopped:
            return []
        moves = [f"restarts {local_rank}" for local_rank in self.restarts]
        if (
            not self.ranks
            and not self.restarts
            and (self.session.coordinator_knows_finished or not self.agent_state.finished)
        ):
            moves.append("ends")
        if self.session.is_fenced and not self.is_inert:
            moves.append("kills a fenced rank")
        connection = self.connection
        if connection is None:
            moves += [f"dials {c.name}" for c in cluster.listening(self.zone) if self.may_dial(c)]
            moves += [f"finds nobody at {address}" for address in cluster.refusing(self.zone)]
            return moves
        if connection.to_agent and connection.coordinator.zone == self.zone:
            moves.append("receives")
        elif not connection.is_coordinator_open or connection.coordinator.zone != self.zone:
            moves.append("loses its session")
        if self.is_report_due:
            moves.append("reports")
        moves.append("hangs up")
        return moves

    def perform(self, cluster: CoordinatedCluster, verb: str) -> None:
        what, *about = verb.split()
        match what:
            case "ends":
                self.said_goodbye = True
                self.do(cluster, Notify(Goodbye("all ranks have ended")))
                cluster.end_host(self, "")
            case "restarts":
                self.restarts.remove(int(about[0]))
                self._start(cluster, int(about[0]))
            case "dials":
                self.dial(cluster, cluster.coordinators[about[0]])
            case "finds":
                self.do(cluster, ConnectionRefused(about[-1], self.clock_s(cluster)))
            case "receives":
                self.receive(cluster)
            case "loses" | "hangs":
                self.hang_up()
                self.do(cluster, Disconnected())
            case "reports":
                self.report(cluster)
            case "kills":
                next(rank for rank in self.ranks if rank.alive and rank.phase not in (REQUESTING, STARTING)).end(KILLED)
            case _:
                raise ValueError(verb)

    def _start(self, cluster: CoordinatedCluster, local_rank: int) -> None:
        rank = self.add_rank(cluster, local_rank, self.id)
        self.handle(cluster, agent_events.Started(rank.name, local_rank))

    def receive_from(self, cluster: CoordinatedCluster, rank: Rank) -> None:
        event = self.next_event(rank)
        assert not isinstance(event, agent_events.ScriptRaised)
        self.handle(cluster, event)

    def on_exit(self, cluster: CoordinatedCluster, rank: Rank) -> None:
        self.agent_state.restarts.committed(rank.local_rank)  # no failure ends the job here: each is in another step
        self.handle(cluster, self.remove_rank(rank, cluster.now_s))

    # -- its session

    def may_dial(self, coordinator: CoordinatorProcess) -> bool:
        """A process with the id of another reaches only coordinators that know that one (see SENDER)."""
        return self.id == self.name or coordinator.has_heard(self.id)

    def dial(self, cluster: CoordinatedCluster, coordinator: CoordinatorProcess) -> None:
        cluster.num_sessions += 1
        if any(session.host is self for c in cluster.living() for session in c.sessions.values()):
            cluster.seen.add("half-open session")
        connection = SimulatedSession(cluster.num_sessions, self, coordinator)
        self.connection = coordinator.sessions[connection.number] = connection
        self.do(cluster, Connected(coordinator.address))

    def hang_up(self) -> None:
        assert self.connection is not None
        self.connection.is_agent_open = False
        self.connection.to_agent.clear()
        self.connection = None

    def receive(self, cluster: CoordinatedCluster) -> None:
        assert self.connection is not None
        self.do(cluster, Answer(self.connection.to_agent.popleft()))

    def report(self, cluster: CoordinatedCluster) -> None:
        self.is_report_due = False
        if not self.agent_state.may_request():
            return
        for rank in self.ranks:
            if rank.generation is not None:
                generation = rank.generation.record.generation
                raise Violation(f"RULE-3: {self.name} is ready while {rank.name} runs in {generation}")
        report = self.agent_state.report()
        self.do(cluster, ReportCollected(replace(report, protocol=self.protocol)))

    def tick(self, cluster: CoordinatedCluster) -> None:
        self.do(cluster, Ticked())

    def do(self, cluster: CoordinatedCluster, event: SessionEvent) -> None:
        known = self.session.decision
        for instruction in self.session.handle(event, self.clock_s(cluster)):
            if not self.alive:
                return
            match instruction:
                case SendToCoordinator(message):
                    if self.connection is not None and self.connection.is_coordinator_open:
                        self.connection.to_coordinator.append(message)
                case HangUp():
                    self.hang_up()
                case SetLease(until_s):
                    self.lease_until_s = until_s
                    if isinstance(event, ConnectionRefused):
                        cluster.seen.add("lease renewed by a refusal")
                    if self.connection is not None:
                        self.lease_holder = self.connection.coordinator
                case Fence():
                    cluster.seen.add("fenced")
                case Unfence():
                    cluster.seen.add("unfenced")
                case CollectReport():
                    self.is_report_due = True
                case Inform(inner):
                    if not isinstance(inner, PeerMessage):
                        self._inform(cluster, inner)
                case KillRanks(reason):
                    cluster.end_host(self, reason)
        decision = self.session.decision
        if decision is not None and decision is not known and self.alive:
            cluster.make_effective(decision)

    def _inform(self, cluster: CoordinatedCluster, event: Any) -> None:
        if isinstance(event, agent_events.QuorumAnswered) and isinstance(event.answer, Record):
            record = event.answer
            known = self.agent_state.record
            if known is None or record.generation > known.generation:
                if self.is_lease_over(cluster):
                    raise Violation(f"FENCE-1: {self.name} is given {record.generation} while its lease is over")
                if any(rank.alive and rank.generation is not None for rank in self.ranks):
                    raise Violation(f"RULE-3: {self.name} is given {record.generation} while its ranks run")
                assert self.session.decision is not None
                cluster.make_effective(self.session.decision)
        self.handle(cluster, event)

    def watch(self, cluster: CoordinatedCluster) -> None:
        """What each rank does by itself when it reads the lease: it aborts its generation; one that is too slow for
        that is killed."""
        if self.lease_until_s is None:
            return
        over_s = self.clock_s(cluster) - self.lease_until_s
        if over_s >= 0 and not self.is_slow:
            for rank in self.ranks:
                if rank.alive and rank.generation is not None:
                    self._abort(cluster, rank)
        if over_s >= TIMEOUTS.fenced_limit_s + TIMEOUTS.grace_s:
            cluster.end_host(self, "its ranks were fenced for too long")
        elif over_s >= TIMEOUTS.grace_s:
            for rank in self.ranks:
                if rank.alive and rank.phase not in (REQUESTING, STARTING):
                    rank.end(KILLED)

    @staticmethod
    def _abort(cluster: CoordinatedCluster, rank: Rank) -> None:
        if not rank.poisoned:
            rank.poison()
        for _ in range(_MAX_ABORT_MOVES):
            moves = rank.moves(cluster)
            verb = next((verb for verb in ("receives", "applies", "fails", "requests") if verb in moves), None)
            if verb is None or rank.phase in (REQUESTING, STARTING):
                return
            rank.perform(cluster, verb)

    # -- its ranks

    def handle(self, cluster: CoordinatedCluster, event: agent_events.Event) -> None:
        before = self.agent_state.record
        for instruction in self.agent_state.handle(event):
            if self.alive:
                self._follow(cluster, instruction)
        if self.agent_state.finished:
            cluster.finished = True
            if not self.session.finished:
                self.do(cluster, Notify(Finished()))
        record = self.agent_state.record
        if before is not None and record is not before and (record is None or record.generation <= before.generation):
            raise Violation(f"RULE-2: {self.name} goes back from generation {before.generation}")

    def _follow(self, cluster: CoordinatedCluster, instruction: agent_events.Instruction) -> None:
        match instruction:
            case agent_events.Abort(members, generation, reason):
                self.send_to_ranks(members, "abort", generation)
                self.do(cluster, Notify(EndGeneration(generation, reason)))
            case agent_events.AnnounceJoin(members, generation):
                self.send_to_ranks(members, "join", generation)
                self.do(cluster, Notify(JoinRequest(generation)))
            case agent_events.DeliverRecord(members, record):
                self.send_to_ranks(members, "record", record)
            case agent_events.RequestQuorum():
                self.do(cluster, ReportRequested())
            case agent_events.Restart(local_rank, _):
                self.restarts.append(local_rank)
            case agent_events.RetireMembers(members, _):
                self.send_to_ranks(members, "over", None)
            case agent_events.Fail(_, reason):
                cluster.end_host(self, reason)

    def give_up_last_step(self, cluster: CoordinatedCluster) -> None:
        """Others have finished, and here the last step stays in doubt for long."""
        for _ in range(_PATIENCE_AT_END):
            if self.alive and self.agent_state.finished:
                self.handle(cluster, agent_events.QuorumAnswered(Undecided("the coordinator decides nothing")))
