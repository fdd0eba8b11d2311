"""A simulated host: drives the real `AgentLifecycle` and `AgentSession` like `agent.py` and `control_plane.py`.

The lease is a word in memory that the ranks read: it binds them also while the agent is stopped. The agent's timers
expire when the clock passes, or in a move of their own: its own time may run ahead of the session's.

SIMHOST-1  An agent exits once: when none of its ranks runs, starts or waits for a restart, when it has failed, or when
    a signal's grace period is over. The code is 128 + N after signal N, and not 0 after a failure. It is 0 only if the
    job has finished, or every rank has exited with code 0 or was asked to leave.
SIMHOST-2  An agent whose ranks cannot be started fails after the budget of one id at the latest.
SIMHOST-3  A record is given only to hosts whose ranks have the seats that it gives to their agents.
SIMHOST-4  A rank that begins to exit is killed at once, and its generation ends for all others. It is in no report, and
    its successor starts only once it is gone (AGENT-8).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elasticgang.protocol import agent_events as events
from elasticgang.protocol.agent_lifecycle import AgentLifecycle, AgentOptions
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.coordinator_messages import (
    AddressLost,
    ConnectionRefused,
    Decision,
    Disconnected,
    EndGeneration,
    Finished,
    Goodbye,
    JoinRequest,
    Notify,
    Push,
    ReportRequested,
)
from elasticgang.protocol.job_facts import MAX_FAILURES, AgentFacts, JobFacts, KnownSuccessors, ScriptFailure
from elasticgang.simulation import host_session, promises
from elasticgang.simulation.coordinator_process import TIMEOUTS, CoordinatorProcess, SimulatedSession, clock_rate
from elasticgang.simulation.held_runs import HeldRuns
from elasticgang.simulation.host_moves import SIGNALS, TIMER, faults, moves
from elasticgang.simulation.invariants import Violation
from elasticgang.simulation.rank import KILLED, Rank
from elasticgang.simulation.rank_script import REQUESTING, STARTING

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster

_MAX_NOT_STARTED = 12


class Host:
    """`mismatch`: what about it is not as the job is: "job", "layout" or "protocol". `num_seats`: how many it requests;
    None: one for each of its ranks. `zone`: its part of a parted network. `is_frozen`: the whole host stands still;
    `is_stopped`: the agent alone. `is_slow`: its sessions carry nothing while time passes. `is_narrow`: they carry
    no record to it, and nothing after one, since its network loses large packets. `lease_until_s`: what the
    ranks read. `forks_late`: a fork is a move of its own; `is_exhausted`: and fails. `has_begun`: its agent was
    welcomed under its present id; `is_watched`: under whichever, since when it looks after its ranks again and again.
    `facts`: of the job, as of the present session; none without one. `num_known_successors`: what its ranks vote on."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        num_ranks: int,
        mismatch: str = "",
        agent: str = "",
        *,
        forks_late: bool = False,
    ) -> None:
        self.name = self.home = name
        self.mismatch = mismatch
        self.job = "another job" if mismatch == "job" else "job"
        self.layout = cluster.layout if mismatch != "layout" else replace(cluster.layout, min_replicas=2)
        self.num_ranks = num_ranks
        self.num_spares = min(cluster.setting.num_spares, num_ranks - 1)
        self.num_seats = num_ranks - self.num_spares if self.num_spares else None
        self.alive = True
        self.ranks: list[Rank] = []
        self.num_started = [0] * num_ranks
        self.is_duplicate = agent != ""
        self.rate = clock_rate(len(cluster.hosts))
        self.is_frozen = self.is_stopped = self.is_slow = self.is_narrow = False
        self.zone = ""
        self.said_goodbye = False
        self.forks_late = forks_late
        self.is_exhausted = self.is_fenced = False
        self.forking: tuple[int, str] | None = None  # the rank, and the agent's id when the fork began
        self.num_not_started = 0  # in a row
        self.signal = 0
        self.reason = ""  # why it failed
        self.ended: dict[int, bool] = {}  # by rank: whether its last process needs no restart
        self.ahead_s = 0.0  # of the agent's own time
        self.has_begun = self.is_watched = False
        self.former = ""  # its id before it was fenced, until it has rejoined
        self.early: list[Any] = []
        self.tries: deque[events.TryHosts] = deque()
        self.facts = JobFacts()
        self.successors = KnownSuccessors()
        self.num_known_successors = 0
        self.newest_over = self.newest_join = 0
        self.connection: SimulatedSession | None = None
        self.session = AgentSession(agent or name, incarnation=name, timeouts=TIMEOUTS)
        self.lease_until_s: float | None = None
        self.lease_holder: CoordinatorProcess | None = None
        self.agent = AgentLifecycle(
            agent or name,
            AgentOptions(
                job=self.job,
                num_ranks=num_ranks - self.num_spares,
                num_spares=self.num_spares,
                min_agents=cluster.setting.min_hosts,
                max_agents=cluster.setting.max_hosts,
                max_restarts=1_000_000,
            ),
        )

    @property
    def agent_state(self) -> AgentState:
        return self.agent.state

    @property
    def known_decision(self) -> Decision | None:
        """The newest that the process has accepted, under whichever id."""
        return self.session.decision or self.session.former_decision

    @property
    def id(self) -> str:
        """The agent's."""
        return self.agent.agent

    def clock_s(self, cluster: Cluster) -> float:
        return cluster.now_s * self.rate

    @property
    def is_cut(self) -> bool:
        return self.zone != "" or self.is_frozen or self.is_narrow

    @property
    def num_successors(self) -> int:
        return self.agent_state.num_successors([rank.name for rank in self.ranks if rank.draining])

    def stamp_successors(self, cluster: Cluster) -> int:
        """Returns how many of them are its own."""
        num_own = self.num_successors
        self.num_known_successors = num_own + self.successors.any(self.clock_s(cluster))
        return num_own

    @property
    def is_inert(self) -> bool:
        return all(not rank.alive or rank.phase in (REQUESTING, STARTING) for rank in self.ranks)

    def is_lease_over(self, cluster: Cluster) -> bool:
        return self.lease_until_s is None or self.clock_s(cluster) >= self.lease_until_s

    # -- what it can do

    @property
    def may_receive(self) -> bool:
        """Something waits for it in its session, and its network carries that."""
        connection = self.connection
        if connection is None or not connection.to_agent or connection.coordinator.zone != self.zone:
            return False
        return not (self.is_narrow and isinstance(connection.to_agent[0], Push))

    moves, faults = moves, faults

    def hang_up(self, cluster: Cluster) -> None:
        assert self.connection is not None
        self.connection.is_agent_open = False
        self.connection.to_agent.clear()
        self.connection = None
        self.successors.lose_session(self.clock_s(cluster))
        host_session.take(self, cluster, JobFacts())

    def may_dial(self, coordinator: CoordinatorProcess) -> bool:
        """A process with the id of another reaches only coordinators that know that one (see SENDER)."""
        return not self.is_duplicate or coordinator.has_heard(self.session.agent)

    def perform(self, cluster: Cluster, verb: str) -> None:
        what, *about = verb.split()
        match what:
            case "restarts":
                self._time_out(cluster, f"restart {about[0]}")
            case "times":
                cluster.seen.add(f"timed out: {about[1]}")
                self._time_out(cluster, verb.removeprefix(TIMER))
            case "starts":
                self._start(cluster)
            case "tries":
                self.try_hosts(cluster)
            case "fails" | "cannot":
                self._fail_to_start(cluster)
            case "rejoins":
                host_session.rejoin(self, cluster)
            case "dials":
                host_session.dial(self, cluster, cluster.coordinators[about[0]])
            case "finds":
                host_session.do(self, cluster, ConnectionRefused(about[-1], self.clock_s(cluster)))
            case "receives":
                host_session.receive(self, cluster)
            case "loses" | "hangs":
                self.hang_up(cluster)
                host_session.do(self, cluster, Disconnected())
            case _:
                raise ValueError(verb)

    def inject(self, cluster: Cluster, verb: str) -> None:
        """One of `faults`."""
        match verb:
            case "is exhausted":
                self.is_exhausted = self.forks_late = True
            case "recovers":
                self.is_exhausted = False
            case "forks late":
                self.forks_late = True
            case "loses its address":
                cluster.seen.add("address lost")
                host_session.do(self, cluster, AddressLost("this host has lost its address"))
            case _:
                self.signal = SIGNALS[verb]
                self.handle(cluster, events.SignalReceived(self.signal))

    # -- its processes

    def _time_out(self, cluster: Cluster, name: str) -> None:
        """The timer `name` expires, and all earlier ones."""
        self.ahead_s = max(self.ahead_s, self.agent.timers()[name] - self.clock_s(cluster))
        self.handle(cluster, events.TimePassed())

    def _start(self, cluster: Cluster) -> None:
        assert self.forking is not None
        (local_rank, agent), self.forking = self.forking, None
        self.num_not_started = 0
        self.ended.pop(local_rank, None)
        rank = self.add_rank(cluster, local_rank, agent)
        self.handle(cluster, events.Started(rank.name, local_rank))
        if rank.alive and (self.is_fenced or agent != self.id):
            raise Violation(f"RULE-3: {self.name} starts {rank.name} of agent {agent}, which may be held to be lost")

    def _fail_to_start(self, cluster: Cluster) -> None:
        assert self.forking is not None
        (local_rank, _), self.forking = self.forking, None
        self.num_not_started += 1
        cluster.seen.add("failed start")
        self.handle(cluster, events.NotStarted(local_rank, "no memory"))
        if self.alive and not self.ranks and not self.is_fenced and self.num_not_started > _MAX_NOT_STARTED:
            raise Violation(
                f"SIMHOST-2: {self.name} goes on although {self.num_not_started} starts in a row have failed"
            )

    def receive_from(self, cluster: Cluster, rank: Rank) -> None:
        self.handle(cluster, self.next_event(rank))

    def on_exit_began(self, cluster: Cluster, rank: Rank) -> None:
        """SIMHOST-4."""
        state, record = self.agent_state, self.agent_state.record
        takes_part = state.takes_part(rank.name)
        is_seated = takes_part and rank.name not in {member.id for member in state.report().members}
        rank.is_noticed = True
        cluster.seen.add("exit noticed early")
        if takes_part and rank.alive:
            cluster.seen.add("notice of a living rank")
        self.handle(cluster, events.ExitBegan(rank.name))
        rank.is_exiting = takes_part and not state.takes_part(rank.name)
        if takes_part and rank.alive:
            raise Violation(f"SIMHOST-4: {rank.name} runs on, although its exit has begun")
        if is_seated and record is not None and state.record is record:
            promises.check_ended(self, record)

    def on_exit(self, cluster: Cluster, rank: Rank) -> None:
        self.ended[rank.local_rank] = rank.status == 0 or rank.draining
        self.agent_state.restarts.committed(rank.local_rank)  # no failure ends the job here: each is in another step
        self.handle(cluster, self.remove_rank(cluster, rank, self.clock_s(cluster) + self.ahead_s))

    def kill_ranks(self, members: Collection[str] | None = None, status: int = KILLED) -> None:
        for rank in self.ranks:
            if rank.alive and (members is None or rank.name in members):
                rank.end(status)

    # -- its agent

    def handle(self, cluster: Cluster, event: events.AgentEvent) -> None:
        agent_state, before = self.agent_state, self.agent_state.record
        instructions = self.agent.handle(event, self.clock_s(cluster) + self.ahead_s)
        num_successors = self.stamp_successors(cluster)  # before anybody votes in a generation that is begun now
        if instructions:
            self._check_starts(instructions)
        for instruction in instructions:
            if self.alive:
                self._follow(cluster, instruction)
        # After what ranks wait for.
        self.tell(cluster, has_successors=(self.num_successors if instructions else num_successors) > 0)
        cluster.finished = cluster.finished or agent_state.finished
        record = agent_state.record
        if before is not None and record is not before and (record is None or record.generation <= before.generation):
            raise Violation(f"RULE-2: {self.name} goes back from generation {before.generation}")

    def _check_starts(self, instructions: list[events.AgentInstruction]) -> None:
        """When they are decided: to carry out one may bring the end of the lease before the next."""
        starts = [one for one in instructions if isinstance(one, events.StartRank)]
        if starts and (len(starts) > 1 or self.forking is not None or self.signal or self.is_fenced):
            raise Violation(f"SIMHOST-1: {self.name} starts {starts}, but ends, is fenced, or forks another")
        for rank in self.ranks:
            if any(rank.local_rank == start.local_rank for start in starts):
                raise Violation(f"SIMHOST-4: {self.name} starts {starts[0]}, but {rank.name} is not gone")

    def _follow(self, cluster: Cluster, instruction: events.AgentInstruction) -> None:
        match instruction:
            case events.Abort(members, generation, cause):
                self.send_to_ranks(members, "abort", generation)
                self._broadcast_over(cluster, EndGeneration(generation, cause))
            case events.AnnounceJoin(members, generation):
                self.send_to_ranks(members, "join", generation)
                if generation > self.newest_join:
                    self.newest_join = generation
                    host_session.do(self, cluster, Notify(JoinRequest(generation)))
            case events.DeliverRecord(members, record):
                self.send_to_ranks(members, "record", record)
            case events.TryHosts():
                self.tries.append(instruction)
            case events.TellUnreached(agents):
                cluster.seen.add("unreached host" if agents else "all hosts reached again")
                self._tell(cluster, replace(self.session.facts, unreached=agents))
            case events.RequestRecord():
                host_session.do(self, cluster, ReportRequested())
            case events.NotifyOver(generation, cause):
                self._broadcast_over(cluster, EndGeneration(generation, cause))
            case events.NotifyFinished(generation):
                host_session.do(self, cluster, Notify(Finished(generation)))
            case events.BroadcastFailure(member, local_rank, step):
                failures = (*self.session.facts.failures, ScriptFailure(member, local_rank, step))
                self._tell(cluster, replace(self.session.facts, failures=failures[-MAX_FAILURES:]))
            case events.RetireMembers(members, _):
                self.send_to_ranks(members, "over", None)
            case events.Warn():
                cluster.seen.add("warned")
            case events.End(reason) | events.Fail(_, reason):
                cluster.seen.add("ended" if isinstance(instruction, events.End) else "failed")
                self.reason = reason if isinstance(instruction, events.Fail) else ""
                cluster.log.append(f"{self.name} ends: {reason}")
            case _:
                self._follow_processes(cluster, instruction)

    def try_hosts(self, cluster: Cluster) -> None:
        wanted = self.tries.popleft()
        found = {agent: self._reaches(cluster, agent) for agent, _ in wanted.others}
        reached = tuple(agent for agent, is_reached in found.items() if is_reached)
        unreached = tuple((agent, "no answer") for agent, is_reached in found.items() if not is_reached)
        at_s = self.clock_s(cluster) + self.ahead_s
        self.handle(cluster, events.HostsTried(wanted.agent, wanted.number, reached, unreached, at_s))

    def _reaches(self, cluster: Cluster, agent: str) -> bool:
        """One that stands still is reached: its system accepts connections."""
        return any(cluster.reaches(self.name, host.name) for host in cluster.hosts_of(agent))

    def tell(self, cluster: Cluster, *, has_successors: bool) -> None:
        is_stopping = self.agent.is_stopping
        self._tell(cluster, replace(self.session.facts, has_successors=has_successors, is_stopping=is_stopping))

    def _tell(self, cluster: Cluster, facts: AgentFacts) -> None:
        if facts != self.session.facts:
            host_session.do(self, cluster, Notify(facts))

    def _broadcast_over(self, cluster: Cluster, end: EndGeneration) -> None:
        if end.generation > self.newest_over:
            self.newest_over = end.generation
            host_session.do(self, cluster, Notify(end))

    def _follow_processes(self, cluster: Cluster, instruction: events.AgentInstruction) -> None:
        match instruction:
            case events.StartRank(local_rank):
                self.forking = (local_rank, self.id)
                if not self.forks_late:
                    self._start(cluster)
            case events.KillRanks(members):
                self.kill_ranks(members)
            case events.SignalRanks(members, number, drains):
                cluster.seen.add("drained" if drains else "signalled")
                for rank in self.ranks:
                    rank.draining = rank.draining or (drains and rank.name in members)
                if not drains:
                    self.kill_ranks(members, -number)
            case events.Fence(members):
                self.is_fenced = True
                self.kill_ranks(members)
                if any(rank.alive for rank in self.ranks):
                    raise Violation(f"RULE-3: {self.name} is fenced, but its ranks run on")
                cluster.seen.add("fenced")
            case events.Rejoin(agent, former):
                self._check_empty(f"rejoins as {agent}")
                cluster.log.append(f"{self.name} rejoins as {agent}")
                cluster.agents[agent] = self
                self.former = former
            case events.Exit(code):
                self._exit(cluster, code)

    def _check_empty(self, what: str) -> None:
        for rank in self.ranks:
            if rank.alive:
                raise Violation(f"RULE-3: {self.name} {what} while {rank.name} runs")
        if self.forking is not None:
            raise Violation(f"RULE-3: {self.name} {what} while rank {self.forking[0]} is forked")

    def _exit(self, cluster: Cluster, code: int) -> None:
        """SIMHOST-1."""
        is_good = self.agent_state.finished or (len(self.ended) == self.num_ranks and all(self.ended.values()))
        expected = 128 + self.signal if self.signal else self.agent_state.exit_code
        if code != expected and (self.signal or not self.reason):
            raise Violation(f"SIMHOST-1: {self.name} exits with code {code}, not {expected}")
        if code == 0 and (self.ranks or self.reason or not is_good):
            raise Violation(f"SIMHOST-1: {self.name} exits with code 0, but {self.reason or self.ranks or self.ended}")
        if "state is lost" in self.reason:
            cluster.lose_state(self, self.reason)
        self.kill_ranks()
        self.said_goodbye = True
        if not self.former:
            host_session.do(self, cluster, Notify(Goodbye("the agent ends")))
        cluster.end_host(self)

    # -- its ranks

    def add_rank(self, cluster: Cluster, local_rank: int, agent: str) -> Rank:
        self.num_started[local_rank] += 1
        number = self.num_started[local_rank]
        name = f"{self.name}{local_rank}" + (f".{number}" if number > 1 else "")
        rank = Rank(name, self.name, local_rank, agent)
        rank.lifecycle.saves_last = cluster.setting.saves_last
        if cluster.setting.keeps:
            rank.held = HeldRuns()
        self.ranks.append(rank)
        cluster.ranks[name] = rank
        cluster.actors.append(rank)
        return rank

    @staticmethod
    def next_event(rank: Rank) -> events.AgentEvent:
        """The next message of `rank`, as its agent reads it."""
        kind, what = rank.sent.popleft()
        if kind == "ask":
            report, layout, broken, connected = what
            return events.RecordRequested(rank.name, report, layout, broken, connected=connected)
        if kind == "committed":
            return events.Committed(rank.name, what)
        if kind == "raised":
            return events.ScriptRaised(rank.name)
        if kind == "entered":
            return events.RankEntered()
        return events.MemberLeft(rank.name, *what)

    def remove_rank(self, cluster: Cluster, rank: Rank, at_s: float) -> events.Exited:
        self.ranks.remove(rank)
        cluster.num_exited += 1
        return events.Exited(
            rank.name,
            rank.status,
            draining=rank.draining,
            joined=True,
            raised=rank.raised,
            step=cluster.num_exited,
            at_s=at_s,
        )

    def send_to_ranks(self, members: Collection[str], kind: str, what: Any) -> None:
        for rank in self.ranks:
            if rank.alive and rank.name in members:
                rank.received.append((kind, what))
