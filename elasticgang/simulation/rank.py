"""A rank of the simulation: what `manager.py` and `rendezvous.py` do, one move at a time, over the real `MemberState`.

A move that waits for something is possible once that is there. Faults, and what is in `RARE_MOVES`, need not happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from elasticgang.errors import InternalError, StateLostError
from elasticgang.protocol.commit import Action, Attempt
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import ACTIVE, SPARE, Record
from elasticgang.simulation.generation import Part, SimulatedGeneration
from elasticgang.simulation.invariants import Model, State, Violation

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster

STARTING, REQUESTING, CONFIGURING, BETWEEN, REDUCING, VOTING, APPLYING = (
    "starting",
    "asking",
    "configuring",
    "between steps",
    "reducing",
    "voting",
    "applying",
)
_BEFORE = (CONFIGURING, BETWEEN)  # a step begins

RARE_MOVES = frozenset({"misses", "prepares not", "reports an error"})

_MAX_LOST = 20

KILLED, FAILED, DONE = -9, 1, 0


class Rank:
    """`state`, `gradient` and `model` are what it really has; `member_state` is what it says. `sent` and `received` are
    its socket to the agent. `round`: how many tries at a step it has begun in its generation."""

    def __init__(self, name: str, host: str, local_rank: int, agent: str) -> None:
        self.name = name
        self.agent = agent
        self.host = self.home = host
        self.local_rank = local_rank
        self.member_state = MemberState(name)
        self.phase = STARTING
        self.alive = True
        self.status = 0
        self.generation: SimulatedGeneration | None = None
        self.poisoned = False
        self.regroup = True
        self.round = 0
        self.missed = False
        self.draining = False  # it was asked to leave
        self.hangs = False  # and never does anything more
        self.raised = False  # its script has, and the process has not exited
        self.by_script = False  # it was its own script that asked
        self.is_retired = False
        self.announces = self.has_sent_all = False  # in the vote under way; in one that all have counted
        self.had_part = False  # in the generation before it asked
        self.num_lost = 0  # tries at a step, in a row
        self.aborted = 0
        self.joining = 0
        self.promised = 0  # the newest generation that was over when it asked
        self.serving: Attempt | None = None
        self.sent: deque[tuple[str, Any]] = deque()
        self.received: deque[tuple[str, Any]] = deque()
        self.records: deque[Record] = deque()
        self.state: State | None = None
        self.prepared: State | None = None  # what applying makes of `state`
        self.model: Model | None = None

    def __repr__(self) -> str:
        return self.name

    # -- what it can do

    def moves(self, cluster: Cluster) -> list[str]:
        moves = []
        if self.sent:
            moves.append("is received")
        elif not self.alive:
            moves.append("is reaped")
        if not self.alive:
            return moves
        if self.received:
            moves.append("receives")
        if self.raised or (self.hangs and not self.draining):
            return moves
        phase = self.phase
        if phase is STARTING:
            moves.append("drains" if self.draining else "requests")
        elif phase is REQUESTING:
            if self.is_retired:
                moves.append("ends")
            elif self.draining and not self.had_part:
                moves.append("drains")
            elif self.records:
                moves.append("acts")
        elif phase is BETWEEN:
            moves += self._between(cluster)
        elif phase is APPLYING:
            moves.append("applies")
        else:
            moves += self._waiting(cluster)
        return moves

    def _between(self, cluster: Cluster) -> Sequence[str]:
        member_state = self.member_state
        if member_state.committed.step >= cluster.num_steps:
            return ("finishes",) if member_state.tip is not None else ("requests",)
        if self.draining and self.has_sent_all:
            return ("drains",)
        if self.poisoned or self.regroup:
            return ("requests",)
        if self.num_lost > _MAX_LOST:
            return ("leaves",)
        return ("begins", "reports an error")

    def _waiting(self, cluster: Cluster) -> Iterator[str]:
        generation = self.generation
        assert generation is not None
        if self.poisoned or generation.broken:
            yield "fails"
        if self.phase is CONFIGURING:
            if generation.is_gathered and not self.poisoned:
                yield "configures"
        elif self.phase is REDUCING:
            if self.member_state.tip is None and not self.missed and not self.poisoned:
                sources = self._sources(cluster)
                if any(source.serving == self.member_state.committed for source in sources):
                    yield "heals"
                # One that has a source to wait for gives it up only after a while.
                yield "misses" if sources else "misses all"
            elif generation.reduction(self.round).is_complete:
                yield "prepares"
                if self.member_state.tip is not None and not self.member_state.is_active:
                    yield "prepares not"
        elif generation.vote(self.round).is_complete:
            yield "counts"

    def faults(self) -> list[str]:
        faults = ["dies"]
        if self.raised:
            return faults
        if self.generation is not None and not self.poisoned:
            faults.append("breaks")
        if not self.draining:
            faults.append("is to drain")
            faults.append("leaves by its script")
        if self.phase is STARTING:
            faults.append("hangs")
        else:
            faults += ["leaves", "exits early", "raises"]
        if self.phase is APPLYING:
            faults.append("tears")
        return faults

    # -- doing it

    def perform(self, cluster: Cluster, verb: str) -> None:
        match verb:
            case "receives":
                self._receive(*self.received.popleft())
            case "requests":
                self._request(cluster)
            case "acts":
                self._act(cluster, self.records.popleft())
            case "configures":
                self._configure(cluster)
            case "fails":
                self.poison()
                self.phase = BETWEEN
            case "begins" | "reports an error":
                self._begin(failed=verb != "begins")
            case "heals":
                self._heal(cluster)
            case "misses" | "misses all":
                self.missed = True
            case "prepares":
                self._prepare(cluster, whole=True)
            case "prepares not":
                self._prepare(cluster, whole=False)
            case "counts":
                self._count(cluster)
            case "applies":
                self._apply(cluster)
                self.phase = BETWEEN
            case "finishes":
                self.sent.append(("left", (True, False)))
                self.end(DONE)
            case "is to drain":
                self.draining = True
            case "leaves by its script":
                self.draining = self.by_script = True
            case "hangs":
                self.hangs = True
            case "raises":
                self.raised = True
                self.sent.append(("raised", None))
            case "exits early":
                self.end(DONE)
            case "ends":
                self.end(DONE)
            case "drains":
                if self.phase is not STARTING:
                    self.sent.append(("left", (False, self.has_sent_all, self.by_script)))
                self.end(DONE)
            case "tears":  # and the script goes on
                self.member_state.begin_apply()
                self.state = self.prepared = self.model = None
                self.phase = BETWEEN
            case "leaves":
                self.sent.append(("left", (False, False)))
                self.end(FAILED)
            case "breaks":
                self.poison()
            case "dies":
                self.end(KILLED)
        member_state = self.member_state
        if member_state.tip is not None and (
            self.state is None or self.state.attempt != member_state.tip or member_state.torn
        ):
            raise Violation(
                f"RULE-10: {self.name} says it holds {member_state.tip}, but has {self.state}, torn {member_state.torn}"
            )
        if member_state.tip is not None and member_state.holds != self.model:
            raise Violation(f"RULE-6: {self.name} says it holds the part {member_state.holds}, but has {self.model}")
        if (member_state.pending is None) != (self.prepared is None):
            raise Violation(f"RULE-4: {self.name} says it has prepared {member_state.pending}, but has {self.prepared}")

    def end(self, status: int) -> None:
        self.alive = False
        self.status = status
        self.leave_generation()
        self.received.clear()

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

    def _receive(self, kind: str, what: Any) -> None:
        if kind == "record":
            self.records.append(what)
        elif kind == "over":
            self.is_retired = True
        elif kind == "join":
            self.joining = what
        else:
            self.aborted = what
            if self.generation is not None and self.generation.record.generation <= what:
                self.poison()

    def _request(self, cluster: Cluster) -> None:
        broken, self.poisoned, self.regroup = self.poisoned, False, False
        self.had_part = self.generation is not None
        self.leave_generation()
        report = self.member_state.report(self.local_rank, f"{self.name}:1", self.draining)
        self.sent.append(("ask", (report, cluster.hosts[self.host].layout, broken)))
        self.phase = REQUESTING

    def _act(self, cluster: Cluster, record: Record) -> None:
        seat = record.seat(self.name)
        if seat is None:
            raise Violation(f"RULE-9: {self.name} is given generation {record.generation}, which has no seat for it")
        if record.generation <= self.member_state.entered:
            raise Violation(f"RULE-2: {self.name} enters {record.generation} after {self.member_state.entered}")
        truth = cluster.invariants.of[record.digest]
        try:
            if self.member_state.action_for(record) is Action.APPLY:
                self._apply(cluster)
            self.member_state.enter(record, seat)
        except StateLostError:
            self.sent.append(("left", (False, False)))
            self.end(FAILED)
            return
        self.prepared = None
        if self.member_state.tip is None:
            self.state = self.model = None
            if seat.status == ACTIVE:
                raise Violation(f"RECOVERY-2: {self.name} is active in generation {record.generation}, but has to heal")
        elif record.committed == Attempt(0, record.generation):
            self.state, self.model = truth, self.member_state.holds
        if self.state is not None and self.state is not truth:
            raise Violation(f"RULE-4: {self.name} holds {self.state} for {truth} in generation {record.generation}")
        if self.state is not None and seat.status == ACTIVE and self.model != record.model_coordinates(self.name):
            raise Violation(f"RULE-6: {self.name} holds {self.model}, but is seated elsewhere")
        if seat.status == SPARE:
            self.had_part = False
            return
        generation = cluster.generation(record)
        self.generation, self.phase, self.round = generation, CONFIGURING, 0
        if self.aborted >= record.generation:
            self.poison()
        else:
            generation.arrived.add(self.name)

    def _configure(self, cluster: Cluster) -> None:
        generation = self.generation
        assert generation is not None
        if generation.record.digest not in cluster.written:
            raise Violation(f"RULE-1: {self.name} runs in a generation that was never agreed")
        generation.has_begun = True
        self.phase = BETWEEN

    def _begin(self, failed: bool) -> None:
        generation, member_state = self.generation, self.member_state
        assert generation is not None
        if generation.record.generation <= self.promised:
            raise Violation(f"RULE-9: {self.name} takes part in {generation.record.generation} after it asked")
        self.round += 1
        self.missed = False
        self.serving = member_state.tip
        self.phase = REDUCING
        member_state.begin()
        share = member_state.share(generation.record.layout)
        generation.reduction(self.round).parts[self.name] = Part(
            member_state.attempt(),
            self.state if member_state.tip is not None else None,
            frozenset(member_state.active),
            None if share is None else (share.index, share.count),
            member_state.fails or (failed and member_state.is_active),
        )

    def _sources(self, cluster: Cluster) -> list[Rank]:
        """Who may serve this rank's part of the state, now or soon."""
        assert self.generation is not None
        record, member_state = self.generation.record, self.member_state
        return [
            peer
            for member in sorted(member_state.active)
            if member != self.name
            and record.model_coordinates(member) == member_state.holds
            and (peer := cluster.ranks[member]).alive
            and cluster.reaches(self.host, peer.host)
            and (
                peer.serving == member_state.committed or (peer.generation is self.generation and peer.phase in _BEFORE)
            )
        ]

    def _heal(self, cluster: Cluster) -> None:
        generation = self.generation
        assert generation is not None
        source = next(peer for peer in self._sources(cluster) if peer.serving == self.member_state.committed)
        self.state, self.model = source.state, self.member_state.holds
        self.member_state.healed()
        if source.model != self.model or self.state is None:
            raise Violation(f"RULE-6: {self.name} is at {self.model}, but heals from {source.name} at {source.model}")
        peers = [part.state for part in generation.reduction(self.round).parts.values() if part.state is not None]
        if any(state is not self.state for state in peers):
            raise Violation(f"RULE-6: {self.name} heals to {self.state}, but the others are at {peers}")

    def _prepare(self, cluster: Cluster, whole: bool) -> None:
        generation, member_state = self.generation, self.member_state
        assert generation is not None
        round_ = generation.reduction(self.round)
        parts = list(round_.parts.values())
        if any(part.failed for part in parts) and not member_state.only_heals:
            self.num_lost += 1
            self.phase = BETWEEN
            return
        self.num_lost = 0
        if not member_state.only_heals:
            cluster.check_step(generation, parts)
        attempt = member_state.attempt()
        if member_state.tip is not None and whole and not member_state.only_heals:
            assert self.state is not None
            cluster.invariants.reduce(generation.record, self.state, attempt, self.round)
            self.prepared = self.state.after(attempt, (generation.record.digest, self.round))
            member_state.prepare(attempt)
        self.phase = VOTING
        if not self.poisoned:
            noticed = self.joining == generation.record.generation
            self.announces = self.draining
            generation.vote(self.round).parts[self.name] = (
                attempt,
                member_state.ballot(attempt, noticed, self.draining, cluster.num_heirs(self.host)),
            )

    def _count(self, cluster: Cluster) -> None:
        generation, member_state = self.generation, self.member_state
        assert generation is not None
        attempt = member_state.attempt()
        votes = generation.vote(self.round).parts.values()
        only_heals = member_state.only_heals
        sums = [sum(column) for column in zip(*(ballot for _, ballot in votes), strict=True)]
        try:
            count = member_state.count(attempt, sums, self.announces)
        except InternalError as error:
            raise Violation(f"RULE-4: {error}") from error
        self.regroup = self.regroup or count.regroups
        self.has_sent_all = count.leaves
        self.phase = BETWEEN
        if not count.passed:
            cluster.num_only_healed += only_heals
            self.prepared = None
            return
        applies = member_state.passed(attempt)
        self.sent.append(("committed", attempt))
        if applies:
            self.phase, self.serving = APPLYING, None
        else:
            self.state = self.model = None

    def _apply(self, cluster: Cluster) -> None:
        assert self.prepared is not None
        attempt = self.prepared.attempt
        self.state, self.prepared, self.serving = self.prepared, None, None
        cluster.invariants.apply(self, self.state)
        self.member_state.begin_apply()
        self.member_state.end_apply(attempt)
