"""A simulated host: drives the real `AgentLifecycle` like `agent.py` and `control_plane.py`, one move at a time.

A host dies with its agent, or is cut off. An agent can be declared lost only if it is dead or its lease has expired.
Only the agent's timers advance a host's clock: a timer may expire once all earlier ones have.

SIMHOST-1  An agent exits once: when none of its ranks runs, starts or waits for a restart, when it has failed, or when
    a signal's grace period is over. The code is 128 + N after signal N, and not 0 after a failure. It is 0 only if the
    job has finished, or every rank has exited with code 0 or was asked to leave.
SIMHOST-2  An agent whose ranks cannot be started fails after the budget of one id at the latest.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from elasticgang.protocol import next_record
from elasticgang.protocol.agent_events import (
    Abort,
    AgentEvent,
    AgentInstruction,
    AnnounceJoin,
    Committed,
    CoordinatorConnected,
    CoordinatorReturned,
    DeliverRecord,
    End,
    Exit,
    Fail,
    Fence,
    Finished,
    HostLost,
    KillRanks,
    LeaseExpired,
    NotifyFinished,
    NotifyOver,
    NotStarted,
    PeerNotice,
    QuorumAnswered,
    Rejoin,
    RequestQuorum,
    RetireMembers,
    SignalRanks,
    SignalReceived,
    Started,
    StartRank,
    TimePassed,
    Warn,
)
from elasticgang.protocol.agent_lifecycle import AgentLifecycle, AgentOptions
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.record import PROTOCOL, Record, Report, Undecided, Unrecoverable
from elasticgang.simulation.base_host import BaseHost
from elasticgang.simulation.invariants import Violation
from elasticgang.simulation.rank import KILLED, Rank

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster

OPEN, ANSWERED, WRITING, CLOSED = "open", "answered", "writing", "closed"

RARE_MOVES = frozenset(
    {"fences itself", "fails to start a rank", "gives up", "gives up late", "writes unheard", "writes unheard late"}
)

_MAX_NOT_STARTED = 12
_SIGNALS = {"gets SIGTERM": signal.SIGTERM, "gets SIGINT": signal.SIGINT}


class Call:
    """One request to the lighthouse. `seen`: the record in the store when the answer was read. `wanted`: the record to
    write in its place. A closed call is a ghost: its report may still count, but no agent waits for the answer."""

    __slots__ = ("agent", "host", "phase", "proposal", "report", "seen", "wanted")

    def __init__(self, host: Host, report: Report) -> None:
        self.host, self.agent = host, report.agent
        self.report = report
        self.phase = OPEN
        self.proposal: list[Report] = []
        self.seen: Record | None = None
        self.wanted: Record | None = None


class Host(BaseHost):
    """`incarnation`: of the coordinator it is connected to. `is_fenced`: until its agent rejoins. `forks_late`: a fork
    is a move of its own; `is_exhausted`: and fails."""

    def __init__(
        self, cluster: Cluster, name: str, num_ranks: int, mismatch: str = "", *, forks_late: bool = False
    ) -> None:
        super().__init__(cluster, name, num_ranks, mismatch)
        self.is_cut = False
        self.incarnation = cluster.incarnation
        self.now_s = 0.0
        self.forks_late = forks_late
        self.is_exhausted = self.is_fenced = self.rejoins = False
        self.forking: tuple[int, str] | None = None  # the rank, and the agent's id when the fork began
        self.num_not_started = 0  # in a row
        self.signal = 0
        self.reason = ""  # why it failed
        self.ended: dict[int, bool] = {}  # by rank: whether its last process needs no restart
        self.wants_to_request = False
        self.has_requested = False
        self.calls: list[Call] = []  # oldest first
        self.noticed: set[tuple[int, bool]] = set()
        self.agent = AgentLifecycle(
            name,
            AgentOptions(
                job=self.job,
                num_ranks=num_ranks - self.num_spares,
                num_spares=self.num_spares,
                min_agents=cluster.setting.min_hosts,
                max_agents=cluster.setting.max_hosts,
                max_restarts=1_000_000,
            ),
        )
        self.found_lost: set[str] = set()

    def connect(self, cluster: Cluster) -> None:
        """Connect to the coordinator, for the first time or under a new id."""
        if self.rejoins:
            cluster.seen.add("rejoined")
            self.num_not_started = 0  # each id has its own budget
        self.found_lost.clear()
        self.noticed.clear()
        self.is_fenced = self.rejoins = False
        self.incarnation = cluster.incarnation
        self.handle(cluster, CoordinatorConnected(self.name, f"c{self.incarnation}", ""))

    @property
    def agent_state(self) -> AgentState:
        return self.agent.state

    @property
    def id(self) -> str:
        """The agent's."""
        return self.agent.agent

    @property
    def is_connected(self) -> bool:
        return self.alive and not self.is_cut

    @property
    def num_successors(self) -> int:
        return (
            0
            if self.is_fenced
            else self.agent_state.num_successors([rank.name for rank in self.ranks if rank.draining])
        )

    # -- possible moves

    def moves(self, cluster: Cluster) -> list[str]:
        timers = self.agent.timers()
        moves = [f"{kind}s {what}" for kind, _, what in map(_split, timers) if kind == "restart"]
        if self.forking is not None:
            moves += ["cannot start a rank"] if self.is_exhausted else ["starts a rank", "fails to start a rank"]
        moves += self._moves_by_word(cluster)
        return moves + [f"times out: {name}" for name in timers if _split(name)[0] != "restart"]

    def _moves_by_word(self, cluster: Cluster) -> list[str]:
        """Moves that involve the coordinator or the other agents."""
        if self.is_fenced:
            return ["rejoins"] if self.rejoins and not self.is_cut else []
        moves = ["fences itself"] if self.is_cut else []
        if self.calls:
            moves += self._moves_of(cluster, self.calls[-1], "")
            if len(self.calls) > 1:
                moves += self._moves_of(cluster, self.calls[0], " late")
        if self.is_cut:
            return moves
        if self.incarnation != cluster.incarnation:
            return [*moves, "reconnects"]
        if self.wants_to_request:
            moves.append("requests")
        if cluster.finished and not self.agent_state.finished:
            moves.append("receives the end")
        if self.has_requested and self.id not in cluster.lighthouse.healthy:
            moves.append("heartbeats")
        if self.calls and self._has_joiner(cluster):
            moves.append("posts a joiner")
        record = self.agent_state.record
        if record is not None and cluster.notices:
            for over in (True, False):
                notice = (record.generation, over)
                if notice in cluster.notices and notice not in self.noticed:
                    moves.append("notices an end" if over else "notices a joiner")
        if cluster.num_lost_agents:
            moves += [f"finds {name} lost" for name in self._absent(cluster)]
        return moves

    def _moves_of(self, cluster: Cluster, call: Call, late: str) -> Sequence[str]:
        is_away = self.is_cut or self.incarnation != cluster.incarnation
        if is_away or (call.phase is OPEN and not cluster.lighthouse.has(call)):
            return ("loses a call" + late,)
        if call.phase is OPEN:
            return ("gives up" + late,)
        if call.phase is ANSWERED:
            return ("reads" + late,)
        return ("writes" + late, "writes unheard" + late)

    def _has_joiner(self, cluster: Cluster) -> bool:
        """Whether a member here waits to join the present generation, and no notice about it was posted."""
        record = cluster.record
        if record is None or (record.generation, False) in cluster.notices:
            return False
        return any(record.seat(member.id) is None for call in self.calls for member in call.report.members)

    def _absent(self, cluster: Cluster) -> Iterator[str]:
        """Agents of the record that are lost, and that this one has not declared lost yet."""
        if cluster.record is not None:
            for name in (*cluster.record.agents, *cluster.record.absent_agents):
                if cluster.is_lost(name) and name not in self.found_lost:
                    yield name

    # -- performing moves

    def perform(self, cluster: Cluster, verb: str) -> None:
        what, *about = verb.split()
        match what:
            case "fences":
                self.handle(cluster, LeaseExpired())
            case "rejoins":
                self.connect(cluster)
            case "starts":
                self._start(cluster)
            case "fails" | "cannot":
                self._fail_to_start(cluster)
            case "times":
                self._wait(cluster, verb.removeprefix("times out: "))
            case "finds":
                self.found_lost.add(about[0])
                self.handle(cluster, HostLost(about[0]))
            case "restarts":
                self._wait(cluster, f"restart {about[0]}")
            case "reconnects":
                self.incarnation = cluster.incarnation
                self.handle(cluster, CoordinatorReturned(f"c{self.incarnation}"))
            case "heartbeats":
                cluster.lighthouse.healthy.add(self.id)
            case "requests":
                self._request(cluster)
            case "receives":
                self.handle(cluster, Finished())
            case "posts":
                assert cluster.record is not None
                cluster.notices.add((cluster.record.generation, False))
            case "notices":
                self._notice(cluster, over=about[-1] == "end")
            case _:
                call = self.calls[0 if "late" in about else -1]
                if what == "reads":
                    self._read(cluster, call)
                elif what == "writes":
                    self._write(cluster, call, unheard="unheard" in about)
                else:
                    self._answer(cluster, call, Undecided("no answer"))

    def inject(self, cluster: Cluster, verb: str) -> None:
        """Perform one of `faults`."""
        match verb:
            case "is exhausted":
                self.is_exhausted = self.forks_late = True
            case "recovers":
                self.is_exhausted = False
            case "forks late":
                self.forks_late = True
            case _:
                self.signal = _SIGNALS[verb]
                self.handle(cluster, SignalReceived(self.signal))

    def faults(self) -> list[str]:
        return [
            *_SIGNALS,
            "recovers" if self.is_exhausted else "is exhausted",
            *([] if self.forks_late else ["forks late"]),
        ]

    def _wait(self, cluster: Cluster, name: str) -> None:
        """Let the timer `name` expire, and all earlier ones."""
        cluster.seen.add(f"timed out: {_split(name)[0]}")
        self.now_s = max(self.now_s, self.agent.timers()[name])
        self.handle(cluster, TimePassed())

    def _start(self, cluster: Cluster) -> None:
        assert self.forking is not None
        (local_rank, agent), self.forking = self.forking, None
        self.num_not_started = 0
        self.ended.pop(local_rank, None)
        rank = self.add_rank(cluster, local_rank, agent)
        self.handle(cluster, Started(rank.name, local_rank))
        if rank.alive and cluster.is_lost(agent):
            raise Violation(f"RULE-3: {self.name} starts {rank.name} of agent {agent}, which may be held to be lost")

    def _fail_to_start(self, cluster: Cluster) -> None:
        assert self.forking is not None
        (local_rank, _), self.forking = self.forking, None
        self.num_not_started += 1
        cluster.seen.add("failed start")
        self.handle(cluster, NotStarted(local_rank, "no memory"))
        if self.alive and not self.ranks and not self.is_fenced and self.num_not_started > _MAX_NOT_STARTED:
            raise Violation(
                f"SIMHOST-2: {self.name} goes on although {self.num_not_started} starts in a row have failed"
            )

    def receive(self, cluster: Cluster, rank: Rank) -> None:
        """The next message of `rank`."""
        self.handle(cluster, self.next_event(rank))

    def on_exit(self, cluster: Cluster, rank: Rank) -> None:
        self.ended[rank.local_rank] = rank.status == 0 or rank.draining
        self.agent_state.restarts.committed(rank.local_rank)  # no failure ends the job here: each is in another step
        self.handle(cluster, self.remove_rank(rank, self.now_s))

    def handle(self, cluster: Cluster, event: AgentEvent) -> None:
        agent_state, before = self.agent_state, self.agent_state.record
        for instruction in self.agent.handle(event, self.now_s):
            if self.alive:
                self._follow(cluster, instruction)
        record = self.agent_state.record
        is_older = record is None or before is None or record.generation <= before.generation
        if agent_state is self.agent_state and before is not None and record is not before and is_older:
            raise Violation(f"RULE-2: {self.name} goes back from generation {before.generation}")

    def _follow(self, cluster: Cluster, instruction: AgentInstruction) -> None:
        match instruction:
            case Abort(members, generation, _):
                self.send_to_ranks(members, "abort", generation)
                self._post(cluster, generation, over=True)
            case AnnounceJoin(members, generation):
                self.send_to_ranks(members, "join", generation)
                self._post(cluster, generation, over=False)
            case DeliverRecord(members, record):
                self.send_to_ranks(members, "record", record)
            case RequestQuorum():
                self.wants_to_request = True
            case NotifyOver(generation, _):
                self._post(cluster, generation, over=True)
            case NotifyFinished():
                cluster.finished = cluster.finished or not self.is_cut
            case RetireMembers(members, _):
                self.send_to_ranks(members, "over", None)
            case Warn():
                cluster.seen.add("warned")
            case End(reason) | Fail(_, reason):
                cluster.seen.add("ended" if isinstance(instruction, End) else "failed")
                self.reason = reason if isinstance(instruction, Fail) else ""
                cluster.log.append(f"{self.name} ends: {reason}")
            case _:
                self._follow_processes(cluster, instruction)

    def _follow_processes(self, cluster: Cluster, instruction: AgentInstruction) -> None:
        match instruction:
            case StartRank(local_rank):
                if self.forking is not None or self.signal or self.is_fenced:
                    raise Violation(
                        f"SIMHOST-1: {self.name} starts rank {local_rank}, but ends, is fenced, or forks another"
                    )
                self.forking = (local_rank, self.id)
                if not self.forks_late:
                    self._start(cluster)
            case KillRanks(members):
                self._end_ranks(members, KILLED)
            case SignalRanks(members, number, drains):
                cluster.seen.add("drained" if drains else "signalled")
                for rank in self.ranks:
                    rank.draining = rank.draining or (drains and rank.name in members)
                self._end_ranks(() if drains else members, -number)
            case Fence(members):
                self._end_ranks(members, KILLED)
                self.is_fenced, self.wants_to_request, self.has_requested = True, False, False
                for call in self.calls:
                    call.phase = CLOSED
                self.calls.clear()
                cluster.num_lost_agents += 1
                cluster.seen.add("fenced")
            case Rejoin(agent, _):
                self._check_empty(f"rejoins as {agent}")
                self.rejoins = True
                cluster.agents[agent] = self
            case Exit(code):
                self._exit(cluster, code)

    def _end_ranks(self, members: Collection[str], status: int) -> None:
        for rank in self.ranks:
            if rank.alive and rank.name in members:
                rank.end(status)

    def _check_empty(self, what: str) -> None:
        for rank in self.ranks:
            if rank.alive:
                raise Violation(f"RULE-3: {self.name} {what} while {rank.name} runs")
        if self.forking is not None:
            raise Violation(f"RULE-3: {self.name} {what} while rank {self.forking[0]} is forked")

    def _exit(self, cluster: Cluster, code: int) -> None:
        """SIMHOST-1."""
        is_good = self.agent_state.finished or (len(self.ended) == self.num_ranks and all(self.ended.values()))
        expected = 128 + self.signal if self.signal else 0
        if code != expected and (self.signal or not self.reason):
            raise Violation(f"SIMHOST-1: {self.name} exits with code {code}, not {expected}")
        if code == 0 and (self.ranks or self.reason or not is_good):
            raise Violation(f"SIMHOST-1: {self.name} exits with code 0, but {self.reason or self.ranks or self.ended}")
        cluster.end_host(self, self.reason)
        self._report_last(cluster)

    def _report_last(self, cluster: Cluster) -> None:
        """Send the agent's last report, after reading the commits on its ranks' pages."""
        for rank in self.ranks:
            for kind, what in rank.sent:
                if kind == "committed":
                    self.agent.handle(Committed(rank.name, what), self.now_s)
        report = self.agent.last_report()
        if report is not None and not self.is_cut and self.incarnation == cluster.incarnation:
            cluster.lighthouse.pending.append(Call(self, report))

    def _post(self, cluster: Cluster, generation: int, over: bool) -> None:
        if not self.is_cut and self.incarnation == cluster.incarnation:
            cluster.notices.add((generation, over))

    def _request(self, cluster: Cluster) -> None:
        self.wants_to_request = False
        if not self.agent_state.may_request():
            return
        self.has_requested = True
        for rank in self.ranks:
            if rank.generation is not None:
                raise Violation(
                    f"RULE-3: {self.name} asks while {rank.name} runs in {rank.generation.record.generation}"
                )
        report = self.agent_state.report()
        call = Call(self, report if self.protocol == PROTOCOL else replace(report, protocol=self.protocol))
        self.calls.append(call)
        if cluster.record is not None and next_record.is_for(cluster.record, call.report):
            self._answer(cluster, call, cluster.record)  # an earlier call, which timed out, led to this record
        else:
            cluster.lighthouse.pending.append(call)

    def _answer(self, cluster: Cluster, call: Call, answer: Record | Undecided | Unrecoverable) -> None:
        is_newest = call is self.calls[-1] and not self.wants_to_request
        self.calls.remove(call)
        call.phase = CLOSED
        cluster.answered(answer)
        self.handle(cluster, QuorumAnswered(answer, is_newest))

    def _read(self, cluster: Cluster, call: Call) -> None:
        answer = cluster.follow(call.report, call.proposal)
        if isinstance(answer, Record) and answer is not cluster.record:
            call.seen, call.wanted, call.phase = cluster.record, answer, WRITING
        else:
            self._answer(cluster, call, answer)

    def _write(self, cluster: Cluster, call: Call, unheard: bool) -> None:
        """Compare and set."""
        wanted = call.wanted
        assert wanted is not None
        if cluster.record is call.seen:
            cluster.write(wanted, call.proposal)
        written = cluster.record
        assert written is not None
        if unheard:
            self._answer(cluster, call, Undecided("no answer of the store"))
        elif written.digest == wanted.digest or next_record.is_for(written, call.report):
            self._answer(cluster, call, written)
        else:
            self._answer(cluster, call, Undecided("a generation was agreed without this agent"))

    def _notice(self, cluster: Cluster, over: bool) -> None:
        record = self.agent_state.record
        assert record is not None
        self.noticed.add((record.generation, over))
        self.handle(cluster, PeerNotice(record.generation, over))


def _split(timer: str) -> tuple[str, str, str]:
    return timer.partition(" ")
