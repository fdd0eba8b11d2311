"""A host of the simulation: what `agent.py` and `outside.py` execute for the real `AgentLifecycle`, one move at a time.

It dies with its agent, or is cut off. Only an agent that is dead, or whose lease is over, can be found lost. The clock
of a host stands still but for its agent's timers: each may end whenever nothing that ends before it is left.

E1  An agent exits once, when no rank of it runs, starts or waits for its restart, or when it has failed, or a signal's
    grace period is over. The code is 128 + N after signal N, another than 0 after a failure, and 0 only if the job has
    finished or each rank has ended well or was told to go.
E2  It gives up when its ranks cannot be started, no later than after the roster's budget.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elasticgang.quorum import decide
from elasticgang.quorum.decide import PROTOCOL, Lost, Record, Report, Void
from elasticgang.quorum.happenings import (
    Abort,
    AgentEvent,
    AgentInstruction,
    Answered,
    Ask,
    Asked,
    Committed,
    CoordinatorConnected,
    CoordinatorReturned,
    Deliver,
    Dismiss,
    End,
    Exit,
    Exited,
    Fail,
    Fence,
    Finished,
    HostLost,
    KillRanks,
    LeaseExpired,
    Left,
    Noticed,
    NoticeJoin,
    NotifyFinished,
    NotifyOver,
    NotStarted,
    Rejoin,
    ScriptRaised,
    SignalRanks,
    SignalReceived,
    Started,
    StartRank,
    TimePassed,
    Warn,
)
from elasticgang.quorum.lifecycle import AgentLifecycle, AgentOptions
from elasticgang.quorum.roster import Roster
from elasticgang.testing.simulation.rank import KILLED, Rank
from elasticgang.testing.simulation.truth import Violation

if TYPE_CHECKING:
    from elasticgang.testing.simulation.world import World

OPEN, ANSWERED, WRITING, CLOSED = "open", "answered", "writing", "closed"

HICCUPS = frozenset(
    {"fences itself", "fails to start a rank", "gives up", "gives up late", "writes unheard", "writes unheard late"}
)

_MAX_NOT_STARTED = 12
_SIGNALS = {"gets SIGTERM": signal.SIGTERM, "gets SIGINT": signal.SIGINT}


class Call:
    """One question to the lighthouse, and what becomes of it. `seen` is the record it found, `wanted` what it writes in
    its place. Closed, it is a ghost: nobody waits for the answer."""

    __slots__ = ("agent", "host", "phase", "proposal", "report", "seen", "wanted")

    def __init__(self, host: Host, report: Report) -> None:
        self.host, self.agent = host, report.agent
        self.report = report
        self.phase = OPEN
        self.proposal: list[Report] = []
        self.seen: Record | None = None
        self.wanted: Record | None = None


class Host:
    """`incarnation`: of the coordinator it is connected to. `is_fenced`: until its agent rejoins. `forks_late`: a fork
    is a move of its own; `is_exhausted`: and fails."""

    def __init__(
        self, world: World, name: str, num_ranks: int, stranger: str = "", *, forks_late: bool = False
    ) -> None:
        """`stranger`: what about it is not as the job is: "job", "layout" or "protocol"."""
        self.name = self.home = name
        self.stranger = stranger
        self.layout = world.layout if stranger != "layout" else replace(world.layout, min_replicas=2)
        self.protocol = PROTOCOL + (stranger == "protocol")
        self.num_ranks = num_ranks
        num_spares = min(world.setting.num_spares, num_ranks - 1)
        self.num_seats = num_ranks - num_spares if num_spares else None  # that it asks for; None: for all it has
        self.alive = True
        self.is_cut = False
        self.incarnation = world.incarnation
        self.ranks: list[Rank] = []
        self.now_s = 0.0
        self.forks_late = forks_late
        self.is_exhausted = self.is_fenced = self.rejoins = False
        self.forking: tuple[int, str] | None = None  # the rank, and the agent's id of then
        self.num_not_started = 0  # in a row
        self.signal = 0
        self.reason = ""  # why it failed
        self.ended: dict[int, bool] = {}  # each rank's last process: whether it may stay away
        self.wants_to_ask = False
        self.has_asked = False
        self.calls: list[Call] = []  # oldest first
        self.noticed: set[tuple[int, bool]] = set()
        self.agent = AgentLifecycle(
            name,
            AgentOptions(
                job="another job" if stranger == "job" else "job",
                num_ranks=num_ranks - num_spares,
                num_spares=num_spares,
                min_agents=world.setting.min_hosts,
                max_agents=world.setting.max_hosts,
                max_restarts=1_000_000,
            ),
        )
        self.found_lost: set[str] = set()
        self.num_exited = 0
        self.num_started = [0] * num_ranks

    def connect(self, world: World) -> None:
        """It has reached the coordinator, for the first time or under a new id."""
        if self.rejoins:
            world.seen.add("rejoined")
        self.found_lost.clear()
        self.noticed.clear()
        self.is_fenced = self.rejoins = False
        self.incarnation = world.incarnation
        self.handle(world, CoordinatorConnected(self.name, f"c{self.incarnation}", ""))

    @property
    def roster(self) -> Roster:
        return self.agent.roster

    @property
    def id(self) -> str:
        """The agent's."""
        return self.agent.agent

    @property
    def is_connected(self) -> bool:
        return self.alive and not self.is_cut

    @property
    def num_heirs(self) -> int:
        return 0 if self.is_fenced else self.roster.num_heirs([rank.name for rank in self.ranks if rank.goes])

    # -- what it can do

    def moves(self, world: World) -> list[str]:
        timers = self.agent.timers()
        moves = [f"{kind}s {what}" for kind, _, what in map(_split, timers) if kind == "restart"]
        if self.forking is not None:
            moves += ["cannot start a rank"] if self.is_exhausted else ["starts a rank", "fails to start a rank"]
        moves += self._moves_by_word(world)
        return moves + [f"times out: {name}" for name in timers if _split(name)[0] != "restart"]

    def _moves_by_word(self, world: World) -> list[str]:
        """What comes from the coordinator and the other agents."""
        if self.is_fenced:
            return ["rejoins"] if self.rejoins and not self.is_cut else []
        moves = ["fences itself"] if self.is_cut else []
        if self.calls:
            moves += self._moves_of(world, self.calls[-1], "")
            if len(self.calls) > 1:
                moves += self._moves_of(world, self.calls[0], " late")
        if self.is_cut:
            return moves
        if self.incarnation != world.incarnation:
            return [*moves, "reconnects"]
        if self.wants_to_ask:
            moves.append("asks")
        if world.finished and not self.roster.finished:
            moves.append("hears of the end")
        if self.has_asked and self.id not in world.lighthouse.healthy:
            moves.append("heartbeats")
        if self.calls and self._has_joiner(world):
            moves.append("posts a joiner")
        record = self.roster.record
        if record is not None and world.notices:
            for over in (True, False):
                notice = (record.generation, over)
                if notice in world.notices and notice not in self.noticed:
                    moves.append("notices an end" if over else "notices a joiner")
        if world.num_lost_agents:
            moves += [f"finds {name} lost" for name in self._absent(world)]
        return moves

    def _moves_of(self, world: World, call: Call, late: str) -> Sequence[str]:
        is_away = self.is_cut or self.incarnation != world.incarnation
        if is_away or (call.phase is OPEN and not world.lighthouse.has(call)):
            return ("loses a call" + late,)
        if call.phase is OPEN:
            return ("gives up" + late,)
        if call.phase is ANSWERED:
            return ("reads" + late,)
        return ("writes" + late, "writes unheard" + late)

    def _has_joiner(self, world: World) -> bool:
        """Whether it brings somebody who waits to join the present generation, and nobody has said so."""
        record = world.record
        if record is None or (record.generation, False) in world.notices:
            return False
        return any(record.seat(member.id) is None for call in self.calls for member in call.report.members)

    def _absent(self, world: World) -> Iterator[str]:
        """Agents of the record whose lease is over, and that it has not found lost."""
        if world.record is not None:
            for name in (*world.record.agents, *world.record.away):
                if world.is_lost(name) and name not in self.found_lost:
                    yield name

    # -- doing it

    def perform(self, world: World, verb: str) -> None:
        what, *about = verb.split()
        match what:
            case "fences":
                self.handle(world, LeaseExpired())
            case "rejoins":
                self.connect(world)
            case "starts":
                self._start(world)
            case "fails" | "cannot":
                self._fail_to_start(world)
            case "times":
                self._wait(world, verb.removeprefix("times out: "))
            case "finds":
                self.found_lost.add(about[0])
                self.handle(world, HostLost(about[0]))
            case "restarts":
                self._wait(world, f"restart {about[0]}")
            case "reconnects":
                self.incarnation = world.incarnation
                self.handle(world, CoordinatorReturned(f"c{self.incarnation}"))
            case "heartbeats":
                world.lighthouse.healthy.add(self.id)
            case "asks":
                self._ask(world)
            case "hears":
                self.handle(world, Finished())
            case "posts":
                assert world.record is not None
                world.notices.add((world.record.generation, False))
            case "notices":
                self._notice(world, over=about[-1] == "end")
            case _:
                call = self.calls[0 if "late" in about else -1]
                if what == "reads":
                    self._read(world, call)
                elif what == "writes":
                    self._write(world, call, unheard="unheard" in about)
                else:
                    self._answer(world, call, Void("no answer"))

    def harm(self, world: World, verb: str) -> None:
        """A fault of `faults`."""
        match verb:
            case "is exhausted":
                self.is_exhausted = self.forks_late = True
            case "recovers":
                self.is_exhausted = False
            case "forks late":
                self.forks_late = True
            case _:
                self.signal = _SIGNALS[verb]
                self.handle(world, SignalReceived(self.signal))

    def faults(self) -> list[str]:
        return [
            *_SIGNALS,
            "recovers" if self.is_exhausted else "is exhausted",
            *([] if self.forks_late else ["forks late"]),
        ]

    def _wait(self, world: World, name: str) -> None:
        """Until the timer `name` ends, and those that end before."""
        world.seen.add(f"timed out: {_split(name)[0]}")
        self.now_s = max(self.now_s, self.agent.timers()[name])
        self.handle(world, TimePassed())

    def _start(self, world: World) -> None:
        assert self.forking is not None
        (local_rank, agent), self.forking = self.forking, None
        self.num_not_started = 0
        self.ended.pop(local_rank, None)
        self.num_started[local_rank] += 1
        number = self.num_started[local_rank]
        name = f"{self.name}{local_rank}" + (f".{number}" if number > 1 else "")
        rank = Rank(name, self.name, local_rank, agent)
        self.ranks.append(rank)
        world.ranks[name] = rank
        world.actors.append(rank)
        self.handle(world, Started(name, local_rank))
        if rank.alive and world.is_lost(agent):
            raise Violation(f"R3: {self.name} starts {name} of agent {agent}, which may be held to be lost")

    def _fail_to_start(self, world: World) -> None:
        assert self.forking is not None
        (local_rank, _), self.forking = self.forking, None
        self.num_not_started += 1
        world.seen.add("failed start")
        self.handle(world, NotStarted(local_rank, "no memory"))
        if self.alive and not self.ranks and not self.is_fenced and self.num_not_started > _MAX_NOT_STARTED:
            raise Violation(f"E2: {self.name} goes on although {self.num_not_started} starts in a row have failed")

    def hear(self, world: World, rank: Rank) -> None:
        """The next message of `rank`."""
        kind, what = rank.told.popleft()
        event: AgentEvent
        if kind == "ask":
            report, layout, broken = what
            event = Asked(rank.name, report, layout, broken)
        elif kind == "committed":
            event = Committed(rank.name, what)
        elif kind == "raised":
            event = ScriptRaised(rank.name)
        else:
            event = Left(rank.name, *what)
        self.handle(world, event)

    def bury(self, world: World, rank: Rank) -> None:
        self.ranks.remove(rank)
        self.num_exited += 1
        self.ended[rank.local_rank] = rank.status == 0 or rank.goes
        self.roster.restarts.committed(rank.local_rank)  # no failure ends the job here: each is in a step of its own
        event = Exited(
            rank.name,
            rank.status,
            goes=rank.goes,
            joined=True,
            raised=rank.raised,
            step=self.num_exited,
            at_s=self.now_s,
        )
        self.handle(world, event)

    def handle(self, world: World, event: AgentEvent) -> None:
        roster, before = self.roster, self.roster.record
        for instruction in self.agent.handle(event, self.now_s):
            if self.alive:
                self._follow(world, instruction)
        record = self.roster.record
        is_older = record is None or before is None or record.generation <= before.generation
        if roster is self.roster and before is not None and record is not before and is_older:
            raise Violation(f"R2: {self.name} goes back from generation {before.generation}")

    def _follow(self, world: World, instruction: AgentInstruction) -> None:
        match instruction:
            case Abort(members, generation, _):
                self._tell(members, "abort", generation)
                self._post(world, generation, over=True)
            case NoticeJoin(members, generation):
                self._tell(members, "join", generation)
                self._post(world, generation, over=False)
            case Deliver(members, record):
                self._tell(members, "record", record)
            case Ask():
                self.wants_to_ask = True
            case NotifyOver(generation, _):
                self._post(world, generation, over=True)
            case NotifyFinished():
                world.finished = world.finished or not self.is_cut
            case Dismiss(members, _):
                self._tell(members, "over", None)
            case Warn():
                world.seen.add("warned")
            case End(reason) | Fail(_, reason):
                world.seen.add("ended" if isinstance(instruction, End) else "failed")
                self.reason = reason if isinstance(instruction, Fail) else ""
                world.told.append(f"{self.name} ends: {reason}")
            case _:
                self._follow_processes(world, instruction)

    def _follow_processes(self, world: World, instruction: AgentInstruction) -> None:
        match instruction:
            case StartRank(local_rank):
                if self.forking is not None or self.signal or self.is_fenced:
                    raise Violation(f"E1: {self.name} starts rank {local_rank}, but ends, is fenced, or forks another")
                self.forking = (local_rank, self.id)
                if not self.forks_late:
                    self._start(world)
            case KillRanks(members):
                self._end_ranks(members, KILLED)
            case SignalRanks(members, number, drains):
                world.seen.add("drained" if drains else "signalled")
                for rank in self.ranks:
                    rank.goes = rank.goes or (drains and rank.name in members)
                self._end_ranks(() if drains else members, -number)
            case Fence(members):
                self._end_ranks(members, KILLED)
                self.is_fenced, self.wants_to_ask, self.has_asked = True, False, False
                for call in self.calls:
                    call.phase = CLOSED
                self.calls.clear()
                world.num_lost_agents += 1
                world.seen.add("fenced")
            case Rejoin(agent):
                self._check_empty(f"rejoins as {agent}")
                self.rejoins = True
                world.agents[agent] = self
            case Exit(code):
                self._exit(world, code)

    def _end_ranks(self, members: Collection[str], status: int) -> None:
        for rank in self.ranks:
            if rank.alive and rank.name in members:
                rank.end(status)

    def _check_empty(self, what: str) -> None:
        for rank in self.ranks:
            if rank.alive:
                raise Violation(f"R3: {self.name} {what} while {rank.name} runs")
        if self.forking is not None:
            raise Violation(f"R3: {self.name} {what} while rank {self.forking[0]} is forked")

    def _exit(self, world: World, code: int) -> None:
        """E1."""
        is_good = self.roster.finished or (len(self.ended) == self.num_ranks and all(self.ended.values()))
        expected = 128 + self.signal if self.signal else 0
        if code != expected and (self.signal or not self.reason):
            raise Violation(f"E1: {self.name} exits with code {code}, not {expected}")
        if code == 0 and (self.ranks or self.reason or not is_good):
            raise Violation(f"E1: {self.name} exits with code 0, but {self.reason or self.ranks or self.ended}")
        world.end_host(self, self.reason)
        self._report_last(world)

    def _report_last(self, world: World) -> None:
        """What the agent stamped on the way out: its ranks' commits are on their pages, and all of them end."""
        for rank in self.ranks:
            for kind, what in rank.told:
                if kind == "committed":
                    self.agent.handle(Committed(rank.name, what), self.now_s)
        report = self.agent.last_report()
        if report is not None and not self.is_cut and self.incarnation == world.incarnation:
            world.lighthouse.inbox.append(Call(self, report))

    def _tell(self, members: Collection[str], kind: str, what: Any) -> None:
        for rank in self.ranks:
            if rank.alive and rank.name in members:
                rank.heard.append((kind, what))

    def _post(self, world: World, generation: int, over: bool) -> None:
        if not self.is_cut and self.incarnation == world.incarnation:
            world.notices.add((generation, over))

    def _ask(self, world: World) -> None:
        self.wants_to_ask = False
        if not self.roster.may_ask():
            return
        self.has_asked = True
        for rank in self.ranks:
            if rank.generation is not None:
                raise Violation(f"R3: {self.name} asks while {rank.name} runs in {rank.generation.record.generation}")
        report = self.roster.report()
        call = Call(self, report if self.protocol == PROTOCOL else replace(report, protocol=self.protocol))
        self.calls.append(call)
        if world.record is not None and decide.is_for(world.record, call.report):
            self._answer(world, call, world.record)  # it was agreed by a call that was given up
        else:
            world.lighthouse.inbox.append(call)

    def _answer(self, world: World, call: Call, answer: Record | Void | Lost) -> None:
        is_newest = call is self.calls[-1] and not self.wants_to_ask
        self.calls.remove(call)
        call.phase = CLOSED
        world.answered(answer)
        self.handle(world, Answered(answer, is_newest))

    def _read(self, world: World, call: Call) -> None:
        answer = world.follow(call.report, call.proposal)
        if isinstance(answer, Record) and answer is not world.record:
            call.seen, call.wanted, call.phase = world.record, answer, WRITING
        else:
            self._answer(world, call, answer)

    def _write(self, world: World, call: Call, unheard: bool) -> None:
        """Compare and set."""
        wanted = call.wanted
        assert wanted is not None
        if world.record is call.seen:
            world.write(wanted, call.proposal)
        written = world.record
        assert written is not None
        if unheard:
            self._answer(world, call, Void("no answer of the store"))
        elif written.digest == wanted.digest or decide.is_for(written, call.report):
            self._answer(world, call, written)
        else:
            self._answer(world, call, Void("a generation was agreed without this agent"))

    def _notice(self, world: World, over: bool) -> None:
        record = self.roster.record
        assert record is not None
        self.noticed.add((record.generation, over))
        self.handle(world, Noticed(record.generation, over))


def _split(timer: str) -> tuple[str, str, str]:
    return timer.partition(" ")
