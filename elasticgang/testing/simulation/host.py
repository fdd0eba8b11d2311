"""An agent of the simulation: what `agent.py` does between its ranks and the coordinator, over the real `Roster`.

It is cut off, or dies, with its host. Cut off for long, it ends itself and its ranks, and comes back under a new id
(here as a new host). Only then can another agent find it lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elasticgang.quorum import decide
from elasticgang.quorum.decide import PROTOCOL, Lost, Record, Report, Void
from elasticgang.quorum.happenings import (
    Abort,
    Answered,
    Ask,
    Asked,
    Committed,
    Deliver,
    Dismiss,
    Event,
    Exited,
    Fail,
    Finished,
    HostLost,
    Instruction,
    Left,
    Noticed,
    NoticeJoin,
    Restart,
    Started,
)
from elasticgang.quorum.restarts import Restarts
from elasticgang.quorum.roster import Roster
from elasticgang.testing.simulation.rank import KILLED, Rank
from elasticgang.testing.simulation.truth import Violation

if TYPE_CHECKING:
    from elasticgang.testing.simulation.world import World

OPEN, ANSWERED, WRITING, CLOSED = "open", "answered", "writing", "closed"

HICCUPS = frozenset({"fences itself", "gives up", "gives up late", "writes unheard", "writes unheard late"})


class Call:
    """One question to the lighthouse, and what becomes of it. `seen` is the record it found, `wanted` what it writes in
    its place. Closed, it is a ghost: nobody waits for the answer."""

    __slots__ = ("host", "phase", "proposal", "report", "seen", "wanted")

    def __init__(self, host: Host, report: Report) -> None:
        self.host = host
        self.report = report
        self.phase = OPEN
        self.proposal: list[Report] = []
        self.seen: Record | None = None
        self.wanted: Record | None = None


class Host:
    """`incarnation`: of the coordinator it is connected to."""

    def __init__(self, world: World, name: str, num_ranks: int, stranger: str = "") -> None:
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
        self.restarts: list[int] = []
        self.wants_to_ask = False
        self.has_asked = False
        self.calls: list[Call] = []  # oldest first
        self.noticed: set[tuple[int, bool]] = set()
        self.roster = Roster(
            agent=name,
            host=name,
            job="another job" if stranger == "job" else "job",
            coordinator=f"c{world.incarnation}",
            restarts=Restarts(1_000_000),
            num_ranks=num_ranks - num_spares,
            num_spares=num_spares,
            min_agents=world.setting.min_hosts,
            max_agents=world.setting.max_hosts,
        )
        self.found_lost: set[str] = set()
        self.num_exited = 0
        self.num_started = [0] * num_ranks
        for local_rank in range(num_ranks):
            self._start(world, local_rank)

    @property
    def is_connected(self) -> bool:
        return self.alive and not self.is_cut

    @property
    def num_heirs(self) -> int:
        return self.roster.num_heirs([rank.name for rank in self.ranks if rank.goes])

    # -- what it can do

    def moves(self, world: World) -> list[str]:
        moves = [f"restarts {local_rank}" for local_rank in self.restarts]
        if not self.ranks and not self.restarts:
            moves.append("ends")
        if self.is_cut:
            moves.append("fences itself")
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
        if self.has_asked and self.name not in world.lighthouse.healthy:
            moves.append("heartbeats")
        if self.calls and self._has_joiner(world):
            moves.append("posts a joiner")
        record = self.roster.record
        if record is not None and world.notices:
            for over in (True, False):
                notice = (record.generation, over)
                if notice in world.notices and notice not in self.noticed:
                    moves.append("notices an end" if over else "notices a joiner")
        if world.num_dead_hosts:
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
                if not world.hosts[name].alive and name not in self.found_lost:
                    yield name

    # -- doing it

    def perform(self, world: World, verb: str) -> None:
        what, *about = verb.split()
        match what:
            case "fences" | "ends":
                world.end_host(self, "")
            case "finds":
                self.found_lost.add(about[0])
                self.handle(world, HostLost(about[0]))
            case "restarts":
                self.restarts.remove(int(about[0]))
                self._start(world, int(about[0]))
            case "reconnects":
                self.incarnation = world.incarnation
                self.roster.coordinator = f"c{self.incarnation}"
            case "heartbeats":
                world.lighthouse.healthy.add(self.name)
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

    def _start(self, world: World, local_rank: int) -> None:
        self.num_started[local_rank] += 1
        number = self.num_started[local_rank]
        name = f"{self.name}{local_rank}" + (f".{number}" if number > 1 else "")
        rank = Rank(name, self.name, local_rank)
        self.ranks.append(rank)
        world.ranks[name] = rank
        world.actors.append(rank)
        self.handle(world, Started(name, local_rank))

    def hear(self, world: World, rank: Rank) -> None:
        """The next message of `rank`."""
        kind, what = rank.told.popleft()
        event: Event
        if kind == "ask":
            report, layout, broken = what
            event = Asked(rank.name, report, layout, broken)
        elif kind == "committed":
            event = Committed(rank.name, what)
        else:
            event = Left(rank.name, *what)
        self.handle(world, event)

    def bury(self, world: World, rank: Rank) -> None:
        self.ranks.remove(rank)
        self.num_exited += 1
        self.roster.restarts.committed(rank.local_rank)  # no failure ends the job here: each is in a step of its own
        self.handle(world, Exited(rank.name, rank.status, goes=rank.goes, step=self.num_exited))

    def handle(self, world: World, event: Event) -> None:
        before = self.roster.record
        for instruction in self.roster.handle(event):
            if self.alive:
                self._follow(world, instruction)
        world.finished = world.finished or (self.roster.finished and self.is_connected)
        record = self.roster.record
        if before is not None and record is not before and (record is None or record.generation <= before.generation):
            raise Violation(f"R2: {self.name} goes back from generation {before.generation}")

    def _follow(self, world: World, instruction: Instruction) -> None:
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
            case Restart(local_rank, _):
                self.restarts.append(local_rank)
            case Dismiss(members, _):
                for rank in self.ranks:
                    if rank.name in members and rank.alive:
                        rank.end(KILLED)
            case Fail(_, reason):
                world.end_host(self, reason)

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
