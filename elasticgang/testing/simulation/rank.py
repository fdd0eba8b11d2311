"""A rank of the simulation: what `manager.py` and `membership.py` do, one move at a time, over the real `Ledger`.

A move that waits for something is possible once that is there. Faults, and what is in `HICCUPS`, need not happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from elasticgang.errors import InternalError, StateLostError
from elasticgang.quorum.commit import Action, Attempt
from elasticgang.quorum.decide import ACTIVE, SPARE, Record
from elasticgang.quorum.ledger import Ledger
from elasticgang.testing.simulation.generation import Generation, Part
from elasticgang.testing.simulation.truth import Model, State, Violation

if TYPE_CHECKING:
    from elasticgang.testing.simulation.world import World

STARTING, ASKING, CONFIGURING, BETWEEN, REDUCING, VOTING, APPLYING = (
    "starting",
    "asking",
    "configuring",
    "between steps",
    "reducing",
    "voting",
    "applying",
)
_BEFORE = (CONFIGURING, BETWEEN)  # a step begins

HICCUPS = frozenset({"misses", "prepares not", "reports an error"})

_MAX_LOST = 20

KILLED, FAILED, DONE = -9, 1, 0


class Rank:
    """`state`, `gradient` and `model` are what it really has; `ledger` is what it says. `told` and `heard` are its
    socket to the agent. `round`: how many tries at a step it has begun in its generation."""

    def __init__(self, name: str, host: str, local_rank: int, agent: str) -> None:
        self.name = name
        self.agent = agent
        self.host = self.home = host
        self.local_rank = local_rank
        self.ledger = Ledger(name)
        self.phase = STARTING
        self.alive = True
        self.status = 0
        self.generation: Generation | None = None
        self.poisoned = False
        self.regroup = True
        self.round = 0
        self.missed = False
        self.goes = False  # it was asked to leave
        self.hangs = False  # and never does anything more
        self.raised = False  # its script has, and the process has not exited
        self.by_script = False  # it was its own script that asked
        self.is_dismissed = False
        self.says_so = self.told_all = False  # in the vote under way; in one that all have counted
        self.had_part = False  # in the generation before it asked
        self.num_lost = 0  # tries at a step, in a row
        self.aborted = 0
        self.joining = 0
        self.promised = 0  # the newest generation that was over when it asked
        self.serving: Attempt | None = None
        self.told: deque[tuple[str, Any]] = deque()
        self.heard: deque[tuple[str, Any]] = deque()
        self.records: deque[Record] = deque()
        self.state: State | None = None
        self.prepared: State | None = None  # what applying makes of `state`
        self.model: Model | None = None

    def __repr__(self) -> str:
        return self.name

    # -- what it can do

    def moves(self, world: World) -> list[str]:
        moves = []
        if self.told:
            moves.append("is heard")
        elif not self.alive:
            moves.append("is buried")
        if not self.alive:
            return moves
        if self.heard:
            moves.append("hears")
        if self.raised or (self.hangs and not self.goes):
            return moves
        phase = self.phase
        if phase is STARTING:
            moves.append("goes" if self.goes else "asks")
        elif phase is ASKING:
            if self.is_dismissed:
                moves.append("ends")
            elif self.goes and not self.had_part:
                moves.append("goes")
            elif self.records:
                moves.append("acts")
        elif phase is BETWEEN:
            moves += self._between(world)
        elif phase is APPLYING:
            moves.append("applies")
        else:
            moves += self._waiting(world)
        return moves

    def _between(self, world: World) -> Sequence[str]:
        ledger = self.ledger
        if ledger.committed.step >= world.num_steps:
            return ("finishes",) if ledger.tip is not None else ("asks",)
        if self.goes and self.told_all:
            return ("goes",)
        if self.poisoned or self.regroup:
            return ("asks",)
        if self.num_lost > _MAX_LOST:
            return ("leaves",)
        return ("begins", "reports an error")

    def _waiting(self, world: World) -> Iterator[str]:
        generation = self.generation
        assert generation is not None
        if self.poisoned or generation.broken:
            yield "fails"
        if self.phase is CONFIGURING:
            if generation.is_gathered and not self.poisoned:
                yield "configures"
        elif self.phase is REDUCING:
            if self.ledger.tip is None and not self.missed and not self.poisoned:
                sources = self._sources(world)
                if any(source.serving == self.ledger.committed for source in sources):
                    yield "heals"
                # One that has a source to wait for gives it up only after a while.
                yield "misses" if sources else "misses all"
            elif generation.reduction(self.round).is_complete:
                yield "prepares"
                if self.ledger.tip is not None and not self.ledger.is_active:
                    yield "prepares not"
        elif generation.vote(self.round).is_complete:
            yield "counts"

    def faults(self) -> list[str]:
        faults = ["dies"]
        if self.raised:
            return faults
        if self.generation is not None and not self.poisoned:
            faults.append("breaks")
        if not self.goes:
            faults.append("is to go")
            faults.append("leaves by its script")
        if self.phase is STARTING:
            faults.append("hangs")
        else:
            faults += ["leaves", "exits early", "raises"]
        if self.phase is APPLYING:
            faults.append("tears")
        return faults

    # -- doing it

    def perform(self, world: World, verb: str) -> None:
        match verb:
            case "hears":
                self._hear(*self.heard.popleft())
            case "asks":
                self._ask(world)
            case "acts":
                self._act(world, self.records.popleft())
            case "configures":
                self._configure(world)
            case "fails":
                self.poison()
                self.phase = BETWEEN
            case "begins" | "reports an error":
                self._begin(failed=verb != "begins")
            case "heals":
                self._heal(world)
            case "misses" | "misses all":
                self.missed = True
            case "prepares":
                self._prepare(world, whole=True)
            case "prepares not":
                self._prepare(world, whole=False)
            case "counts":
                self._count(world)
            case "applies":
                self._apply(world)
                self.phase = BETWEEN
            case "finishes":
                self.told.append(("left", (True, False)))
                self.end(DONE)
            case "is to go":
                self.goes = True
            case "leaves by its script":
                self.goes = self.by_script = True
            case "hangs":
                self.hangs = True
            case "raises":
                self.raised = True
                self.told.append(("raised", None))
            case "exits early":
                self.end(DONE)
            case "ends":
                self.end(DONE)
            case "goes":
                if self.phase is not STARTING:
                    self.told.append(("left", (False, self.told_all, self.by_script)))
                self.end(DONE)
            case "tears":  # and the script goes on
                self.ledger.begin_apply()
                self.state = self.prepared = self.model = None
                self.phase = BETWEEN
            case "leaves":
                self.told.append(("left", (False, False)))
                self.end(FAILED)
            case "breaks":
                self.poison()
            case "dies":
                self.end(KILLED)
        ledger = self.ledger
        if ledger.tip is not None and (self.state is None or self.state.attempt != ledger.tip or ledger.torn):
            raise Violation(f"R10: {self.name} says it holds {ledger.tip}, but has {self.state}, torn {ledger.torn}")
        if ledger.tip is not None and ledger.holds != self.model:
            raise Violation(f"R6: {self.name} says it holds the part {ledger.holds}, but has {self.model}")
        if (ledger.pending is None) != (self.prepared is None):
            raise Violation(f"R4: {self.name} says it has prepared {ledger.pending}, but has {self.prepared}")

    def end(self, status: int) -> None:
        self.alive = False
        self.status = status
        self.leave_generation()
        self.heard.clear()

    def poison(self) -> None:
        """Its comm process is killed."""
        self.poisoned = True
        if self.generation is not None:
            self.generation.broken = True

    def leave_generation(self) -> None:
        if self.generation is not None:
            self.generation.broken = True
            self.promised = self.generation.record.generation
            self.generation = None

    def _hear(self, kind: str, what: Any) -> None:
        if kind == "record":
            self.records.append(what)
        elif kind == "over":
            self.is_dismissed = True
        elif kind == "join":
            self.joining = what
        else:
            self.aborted = what
            if self.generation is not None and self.generation.record.generation <= what:
                self.poison()

    def _ask(self, world: World) -> None:
        broken, self.poisoned, self.regroup = self.poisoned, False, False
        self.had_part = self.generation is not None
        self.leave_generation()
        report = self.ledger.report(self.local_rank, f"{self.name}:1", self.goes)
        self.told.append(("ask", (report, world.hosts[self.host].layout, broken)))
        self.phase = ASKING

    def _act(self, world: World, record: Record) -> None:
        seat = record.seat(self.name)
        if seat is None:
            raise Violation(f"R9: {self.name} is given generation {record.generation}, which has no seat for it")
        if record.generation <= self.ledger.entered:
            raise Violation(f"R2: {self.name} enters {record.generation} after {self.ledger.entered}")
        truth = world.truth.of[record.digest]
        try:
            if self.ledger.todo(record) is Action.APPLY:
                self._apply(world)
            self.ledger.enter(record, seat)
        except StateLostError:
            self.told.append(("left", (False, False)))
            self.end(FAILED)
            return
        self.prepared = None
        if self.ledger.tip is None:
            self.state = self.model = None
            if seat.status == ACTIVE:
                raise Violation(f"D3: {self.name} is active in generation {record.generation}, but has to heal")
        elif record.committed == Attempt(0, record.generation):
            self.state, self.model = truth, self.ledger.holds
        if self.state is not None and self.state is not truth:
            raise Violation(f"R4: {self.name} holds {self.state} for {truth} in generation {record.generation}")
        if self.state is not None and seat.status == ACTIVE and self.model != record.model_coordinates(self.name):
            raise Violation(f"R6: {self.name} holds {self.model}, but is seated elsewhere")
        if seat.status == SPARE:
            self.had_part = False
            return
        generation = world.generation(record)
        self.generation, self.phase, self.round = generation, CONFIGURING, 0
        if self.aborted >= record.generation:
            self.poison()
        else:
            generation.arrived.add(self.name)

    def _configure(self, world: World) -> None:
        generation = self.generation
        assert generation is not None
        if generation.record.digest not in world.written:
            raise Violation(f"R1: {self.name} runs in a generation that was never agreed")
        generation.has_begun = True
        self.phase = BETWEEN

    def _begin(self, failed: bool) -> None:
        generation, ledger = self.generation, self.ledger
        assert generation is not None
        if generation.record.generation <= self.promised:
            raise Violation(f"R9: {self.name} takes part in {generation.record.generation} after it asked")
        self.round += 1
        self.missed = False
        self.serving = ledger.tip
        self.phase = REDUCING
        ledger.begin()
        share = ledger.share(generation.record.layout)
        generation.reduction(self.round).parts[self.name] = Part(
            ledger.attempt(),
            self.state if ledger.tip is not None else None,
            frozenset(ledger.active),
            None if share is None else (share.index, share.count),
            ledger.fails or (failed and ledger.is_active),
        )

    def _sources(self, world: World) -> list[Rank]:
        """Who may serve this rank's part of the state, now or soon."""
        assert self.generation is not None
        record, ledger = self.generation.record, self.ledger
        return [
            peer
            for member in sorted(ledger.active)
            if member != self.name
            and record.model_coordinates(member) == ledger.holds
            and (peer := world.ranks[member]).alive
            and world.reaches(self.host, peer.host)
            and (peer.serving == ledger.committed or (peer.generation is self.generation and peer.phase in _BEFORE))
        ]

    def _heal(self, world: World) -> None:
        generation = self.generation
        assert generation is not None
        source = next(peer for peer in self._sources(world) if peer.serving == self.ledger.committed)
        self.state, self.model = source.state, self.ledger.holds
        self.ledger.healed()
        if source.model != self.model or self.state is None:
            raise Violation(f"R6: {self.name} is at {self.model}, but heals from {source.name} at {source.model}")
        peers = [part.state for part in generation.reduction(self.round).parts.values() if part.state is not None]
        if any(state is not self.state for state in peers):
            raise Violation(f"R6: {self.name} heals to {self.state}, but the others are at {peers}")

    def _prepare(self, world: World, whole: bool) -> None:
        generation, ledger = self.generation, self.ledger
        assert generation is not None
        round_ = generation.reduction(self.round)
        parts = list(round_.parts.values())
        if any(part.failed for part in parts) and not ledger.only_heals:
            self.num_lost += 1
            self.phase = BETWEEN
            return
        self.num_lost = 0
        if not ledger.only_heals:
            world.check_step(generation, parts)
        attempt = ledger.attempt()
        if ledger.tip is not None and whole and not ledger.only_heals:
            assert self.state is not None
            world.truth.reduce(generation.record, self.state, attempt, self.round)
            self.prepared = self.state.after(attempt, (generation.record.digest, self.round))
            ledger.prepare(attempt)
        self.phase = VOTING
        if not self.poisoned:
            noticed = self.joining == generation.record.generation
            self.says_so = self.goes
            generation.vote(self.round).parts[self.name] = (
                attempt,
                ledger.ballot(attempt, noticed, self.goes, world.num_heirs(self.host)),
            )

    def _count(self, world: World) -> None:
        generation, ledger = self.generation, self.ledger
        assert generation is not None
        attempt = ledger.attempt()
        votes = generation.vote(self.round).parts.values()
        only_heals = ledger.only_heals
        sums = [sum(column) for column in zip(*(ballot for _, ballot in votes), strict=True)]
        try:
            count = ledger.count(attempt, sums, self.says_so)
        except InternalError as error:
            raise Violation(f"R4: {error}") from error
        self.regroup = self.regroup or count.regroups
        self.told_all = count.leaves
        self.phase = BETWEEN
        if not count.passed:
            world.num_only_healed += only_heals
            self.prepared = None
            return
        applies = ledger.passed(attempt)
        self.told.append(("committed", attempt))
        if applies:
            self.phase, self.serving = APPLYING, None
        else:
            self.state = self.model = None

    def _apply(self, world: World) -> None:
        assert self.prepared is not None
        attempt = self.prepared.attempt
        self.state, self.prepared, self.serving = self.prepared, None, None
        world.truth.apply(self, self.state)
        self.ledger.begin_apply()
        self.ledger.end_apply(attempt)
