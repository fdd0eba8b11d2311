"""An agent of the simulation under a coordinator that decides, with its ranks: the real `AgentSession`, `AgentState`.

The lease is a word in memory that the ranks read: it binds them also while the agent is stopped.
"""

from __future__ import annotations

from collections.abc import Collection
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
    Notice,
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
from elasticgang.protocol.record import PROTOCOL, Record, Undecided
from elasticgang.protocol.restarts import Restarts
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


class CoordinatedHost:
    """`zone`: its part of a parted network. `is_frozen`: the whole host stands still; `is_stopped`: the agent alone.
    `is_slow`: its sessions carry nothing while time passes. `lease_until_s`: what the ranks read."""

    def __init__(self, cluster: CoordinatedCluster, name: str, num_ranks: int, mismatch: str = "") -> None:
        self.name = self.home = name
        self.rate = clock_rate(len(cluster.hosts))
        self.mismatch = mismatch
        self.layout = cluster.layout if mismatch != "layout" else replace(cluster.layout, min_replicas=2)
        self.protocol = PROTOCOL + (mismatch == "protocol")
        num_spares = min(cluster.setting.num_spares, num_ranks - 1)
        self.num_seats = num_ranks - num_spares if num_spares else None
        self.alive = True
        self.is_frozen = self.is_stopped = self.is_slow = False
        self.zone = ""
        self.said_goodbye = False
        self.ranks: list[Rank] = []
        self.restarts: list[int] = []
        self.connection: SimulatedSession | None = None
        self.session = AgentSession(name, incarnation=name, timeouts=TIMEOUTS)
        self.lease_until_s: float | None = None
        self.lease_holder: CoordinatorProcess | None = None
        self.is_report_due = False
        self.num_fences = 0
        self.num_exited = 0
        self.roster = AgentState(
            agent=name,
            host=name,
            job="another job" if mismatch == "job" else "job",
            coordinator="",
            restarts=Restarts(1_000_000),
            num_ranks=num_ranks - num_spares,
            num_spares=num_spares,
            min_agents=cluster.setting.min_hosts,
            max_agents=cluster.setting.max_hosts,
        )
        self.num_started = [0] * num_ranks
        for local_rank in range(num_ranks):
            self._start(cluster, local_rank)

    def clock_s(self, cluster: CoordinatedCluster) -> float:
        return cluster.now_s * self.rate

    @property
    def is_cut(self) -> bool:
        return self.zone != "" or self.is_frozen

    @property
    def num_successors(self) -> int:
        return self.roster.num_successors([rank.name for rank in self.ranks if rank.draining])

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
            and (self.session.coordinator_knows_finished or not self.roster.finished)
        ):
            moves.append("ends")
        if self.session.is_fenced and not self.is_inert:
            moves.append("kills a fenced rank")
        connection = self.connection
        if connection is None:
            moves += [f"dials {c.name}" for c in cluster.listening(self.zone)]
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
        self.num_started[local_rank] += 1
        number = self.num_started[local_rank]
        name = f"{self.name}{local_rank}" + (f".{number}" if number > 1 else "")
        rank = Rank(name, self.name, local_rank, self.name)
        self.ranks.append(rank)
        cluster.ranks[name] = rank
        cluster.actors.append(rank)
        self.handle(cluster, agent_events.Started(name, local_rank))

    def hear(self, cluster: CoordinatedCluster, rank: Rank) -> None:
        kind, what = rank.sent.popleft()
        event: agent_events.Event
        if kind == "ask":
            report, layout, broken = what
            event = agent_events.RecordRequested(rank.name, report, layout, broken)
        elif kind == "committed":
            event = agent_events.Committed(rank.name, what)
        else:
            event = agent_events.MemberLeft(rank.name, *what)
        self.handle(cluster, event)

    def bury(self, cluster: CoordinatedCluster, rank: Rank) -> None:
        self.ranks.remove(rank)
        self.num_exited += 1
        self.roster.restarts.committed(rank.local_rank)  # no failure ends the job here: each is in a step of its own
        self.handle(
            cluster,
            agent_events.Exited(
                rank.name,
                rank.status,
                draining=rank.draining,
                joined=True,
                raised=rank.raised,
                step=self.num_exited,
                at_s=cluster.now_s,
            ),
        )

    # -- its session

    def dial(self, cluster: CoordinatedCluster, coordinator: CoordinatorProcess) -> None:
        cluster.num_sessions += 1
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
        if not self.roster.may_request():
            return
        for rank in self.ranks:
            if rank.generation is not None:
                generation = rank.generation.record.generation
                raise Violation(f"RULE-3: {self.name} is ready while {rank.name} runs in {generation}")
        report = self.roster.report()
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
                    if self.connection is not None:
                        self.lease_holder = self.connection.coordinator
                case Fence():
                    self.num_fences += 1
                case Unfence():
                    pass
                case CollectReport():
                    self.is_report_due = True
                case Inform(inner):
                    if not isinstance(inner, PeerMessage | Notice):
                        self._inform(cluster, inner)
                case KillRanks(reason):
                    cluster.end_host(self, reason)
        decision = self.session.decision
        if decision is not None and decision is not known and self.alive:
            cluster.make_effective(decision)

    def _inform(self, cluster: CoordinatedCluster, event: Any) -> None:
        if isinstance(event, agent_events.QuorumAnswered) and isinstance(event.answer, Record):
            record = event.answer
            known = self.roster.record
            if known is None or record.generation > known.generation:
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

    # -- the roster

    def handle(self, cluster: CoordinatedCluster, event: agent_events.Event) -> None:
        before = self.roster.record
        for instruction in self.roster.handle(event):
            if self.alive:
                self._follow(cluster, instruction)
        if self.roster.finished:
            cluster.finished = True
            if not self.session.finished:
                self.do(cluster, Notify(Finished()))
        record = self.roster.record
        if before is not None and record is not before and (record is None or record.generation <= before.generation):
            raise Violation(f"RULE-2: {self.name} goes back from generation {before.generation}")

    def _follow(self, cluster: CoordinatedCluster, instruction: agent_events.Instruction) -> None:
        match instruction:
            case agent_events.Abort(members, generation, reason):
                self._tell(members, "abort", generation)
                self.do(cluster, Notify(EndGeneration(generation, reason)))
            case agent_events.AnnounceJoin(members, generation):
                self._tell(members, "join", generation)
                self.do(cluster, Notify(JoinRequest(generation)))
            case agent_events.DeliverRecord(members, record):
                self._tell(members, "record", record)
            case agent_events.RequestQuorum():
                self.do(cluster, ReportRequested())
            case agent_events.Restart(local_rank, _):
                self.restarts.append(local_rank)
            case agent_events.RetireMembers(members, _):
                self._tell(members, "over", None)
            case agent_events.Fail(_, reason):
                cluster.end_host(self, reason)

    def _tell(self, members: Collection[str], kind: str, what: Any) -> None:
        for rank in self.ranks:
            if rank.alive and rank.name in members:
                rank.received.append((kind, what))

    def give_up_last_step(self, cluster: CoordinatedCluster) -> None:
        """Others have finished, and here the last step stays in doubt for long."""
        for _ in range(_PATIENCE_AT_END):
            if self.alive and self.roster.finished:
                self.handle(cluster, agent_events.QuorumAnswered(Undecided("the coordinator decides nothing")))
