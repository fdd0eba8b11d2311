"""A rank of the simulation: the driver of a `MemberLifecycle`, whose instructions it carries out on symbols.

It pauses at an instruction that takes time, and goes on with a move; one that waits for something is possible once that
is there. Faults, and what is in `RARE_MOVES`, need not happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from elasticgang.errors import GangError, InternalError, OperationalError, PeerLostError, StateLostError
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_instructions import AbortNotice, Do, Instruction, Observed
from elasticgang.protocol.member_lifecycle import MemberLifecycle, Next, Routine
from elasticgang.protocol.record import ACTIVE, Record, Seat
from elasticgang.simulation import promises
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


class _Boundary(Instruction):
    """A pause between two steps, of the script's own."""


_BOUNDARY = _Boundary()
_LOST = PeerLostError("a peer is lost")


class _Torn(Exception):
    """An optimizer has raised in the midst of an apply."""


class Rank:
    """`state`, `gradient` and `model` are what it really has; `member_state` is what it says. `sent` and `received` are
    its socket to the agent. `round`: how many tries at a step it has begun in its generation."""

    def __init__(self, name: str, host: str, local_rank: int, agent: str) -> None:
        self.name = name
        self.agent = agent
        self.host = self.home = host
        self.local_rank = local_rank
        self.lifecycle = MemberLifecycle(name, local_rank, f"{name}:1")
        self.lifecycle.max_lost_steps = _MAX_LOST
        self.member_state = self.lifecycle.state
        self._script: Routine[None] | None = None
        self._paused: Instruction | None = None  # what it is at
        self.phase = STARTING
        self.alive = True
        self.status = 0
        self.generation: SimulatedGeneration | None = None
        self.poisoned = False
        self.round = 0
        self.draining = False  # it was asked to leave
        self.hangs = False  # and never does anything more
        self.raised = False  # its script has, and the process has not exited
        self.is_noticed = False  # its agent knows that it exits
        self.by_script = False  # it was its own script that asked
        self.is_retired = False
        self.reports_error = False  # in the step that begins
        self.has_forward = True  # of a step, as a learner
        self.votes = False  # the sum that it has started last is of a vote
        self.aborted = AbortNotice()
        self.joining = 0
        self.promised = 0  # the newest generation that was over when it asked
        self.serving: Attempt | None = None
        self.sent: deque[tuple[str, Any]] = deque()
        self.received: deque[tuple[str, Any]] = deque()
        self.records: deque[Record] = deque()
        self.state: State | None = None
        self.prepared: State | None = None  # what applying makes of `state`
        self.reported = Attempt(0, 0)  # as committed
        self.model: Model | None = None

    def __repr__(self) -> str:
        return self.name

    # -- what it can do

    def moves(self, cluster: Cluster) -> list[str]:
        moves = []
        if self.sent:
            moves.append("is received")
        elif not self.alive:
            moves += ["is reaped"] if self.is_noticed else ["is reaped", "is noticed"]
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
            elif self.draining and not self.lifecycle.has_seat:
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
        if self._paused is Do.LEAVE_GENERATION:
            return ("requests",)
        self.lifecycle.observed = self._observe()
        match self.lifecycle.at_boundary(cluster.num_steps):
            case Next.REGROUP:
                return ("requests",)
            case Next.GIVE_UP:
                return ("stops trying",)
            case Next.LEAVE:
                return ("finishes" if self.member_state.committed.step >= cluster.num_steps else "drains",)
        return ("begins", "reports an error")

    def _waiting(self, cluster: Cluster) -> Iterator[str]:
        generation = self.generation
        assert generation is not None
        if self.poisoned or generation.broken:
            yield "fails"
        if self.phase is CONFIGURING:
            if generation.is_gathered and not self.poisoned:
                yield "configures"
        elif isinstance(self._paused, do.Heal):
            if not self.poisoned:
                sources = self._sources(cluster, self._paused)
                if any(source.serving == self.member_state.committed for source in sources):
                    yield "heals"
                # One that has a source to wait for gives it up only after a while.
                yield "misses" if sources else "misses all"
        elif self.phase is REDUCING:
            if generation.reduction(self.round).is_complete and (
                self.member_state.only_heals or generation.totals(self.round).is_complete
            ):
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
                self._go_on(cluster, through=Do.LEAVE_GENERATION)
            case "acts":
                self._act(cluster, self.records.popleft())
            case "configures":
                self._configure(cluster)
            case "fails":
                self.poison()
                if self.phase is REDUCING:  # that raises nothing
                    self._go_on(cluster, (False, 0))
                else:
                    self._go_on(cluster, error=_LOST)
            case "begins" | "reports an error":
                self.reports_error = verb != "begins"
                self._go_on(cluster)
            case "heals":
                self._heal(cluster)
            case "misses" | "misses all":
                self._go_on(cluster, (False, 0))
            case "prepares" | "prepares not":
                # The generation may be over, and this rank not have seen it: then its vote cannot begin.
                self.has_forward = verb == "prepares"
                self._go_on(cluster, is_blind=True)
            case "counts":
                assert self.generation is not None
                cluster.num_only_healed += self.member_state.only_heals
                self._go_on(cluster, self.generation.vote(self.round).sums())
            case "applies":
                if self.prepared is not None and self.reported != self.prepared.attempt:
                    raise Violation(f"MANAGER-8: {self.name} applies {self.prepared}, but has reported {self.reported}")
                self._go_on(cluster, through=Do.APPLY)
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
            case "finishes" | "drains" | "ends" | "stops trying":
                if self.phase is STARTING:  # the signal's handler ends it
                    self.end(DONE)
                else:
                    self._go_on(cluster)
                    if verb == "drains" and self.alive:  # it comes to the boundary at once
                        self._go_on(cluster)
            case "tears":  # and the script goes on
                self.prepared = None
                self._go_on(cluster, error=_Torn())
            case "leaves":
                self._script = self._fail(cluster.num_steps)
                self._go_on(cluster)
            case "breaks":
                self.poison()
            case "dies":
                self.end(KILLED)
        self._check_words(knows_fate=verb in ("acts", "counts", "tears"))

    def _check_words(self, knows_fate: bool) -> None:
        """What it says is what it has. `knows_fate`: of what it had prepared."""
        member_state = self.member_state
        if self.phase is not APPLYING:
            if member_state.tip is None:
                self.state = self.model = None
            if member_state.pending is None:
                if self.prepared is not None and not knows_fate and self.alive:
                    raise Violation(f"MEMBER-2: {self.name} drops {self.prepared}, and does not know its fate")
                self.prepared = None
            elif self.prepared is None:
                raise Violation(f"MANAGER-5: {self.name} says it has prepared {member_state.pending}, but has not")
        if member_state.tip is not None and (
            self.state is None or self.state.attempt != member_state.tip or member_state.torn
        ):
            raise Violation(
                f"RULE-10: {self.name} says it holds {member_state.tip}, but has {self.state}, torn {member_state.torn}"
            )
        if member_state.tip is not None and member_state.holds != self.model:
            raise Violation(f"RULE-6: {self.name} says it holds the part {member_state.holds}, but has {self.model}")

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
            self.aborted = AbortNotice(what)
            if self.generation is not None and self.aborted.ends(self.generation.record.generation):
                self.poison()

    # -- the script, and its manager's driver

    def _train(self, num_steps: int) -> Routine[None]:
        """A loop over `manager.steps`."""
        lifecycle = self.lifecycle
        try:
            while True:
                yield _BOUNDARY
                what = yield from lifecycle.pass_boundary(num_steps)
                if what is Next.LEAVE:
                    break
                if what is not Next.STEP:
                    continue
                yield from lifecycle.begin()
                if self.reports_error:
                    lifecycle.report_error()
                error = None
                try:
                    yield from lifecycle.commit(1.0, measures=False)
                except _Torn:  # the script has caught it
                    pass
                except GangError as aborted:
                    error = aborted
                yield from lifecycle.end(error)
        except (StateLostError, OperationalError):
            yield from self._fail(num_steps)
        yield from lifecycle.leave(num_steps, returned=True)

    def _fail(self, num_steps: int) -> Routine[None]:
        """An exception ends the loop and the process."""
        yield from self.lifecycle.leave(num_steps, returned=False)
        raise OperationalError

    def _go_on(
        self,
        cluster: Cluster,
        outcome: object = None,
        *,
        error: Exception | None = None,
        through: Instruction | None = None,
        is_blind: bool = False,
    ) -> None:
        """Carry out instructions up to one that takes time, other than `through`. `outcome`, `error`: of the one that
        it has paused at. `is_blind`: to the end of its generation, until an instruction fails."""
        if self._script is None:
            self._script = self._train(cluster.num_steps)
            next(self._script)
        if through is not None and self._paused is through:
            outcome = self._carry_out(cluster, through)
        is_voting = self.phase is REDUCING  # the only phase in which it reads how many successors there are
        self.lifecycle.observed = self._observe(cluster.num_successors(self.host) if is_voting else 0, is_blind)
        try:
            while True:
                self._paused = self._script.send(outcome) if error is None else self._script.throw(error)
                error = None
                phase = self._phase_at(self._paused)
                if phase and self._paused is not through:
                    self.phase = phase
                    if isinstance(self._paused, do.Configure):
                        self._arrive(cluster, self._paused.record)
                    return
                try:
                    outcome = self._carry_out(cluster, self._paused)
                except GangError as failure:
                    self.poison()
                    error = failure
                    self.lifecycle.observed = self._observe(cluster.num_successors(self.host))
        except (StopIteration, SystemExit):
            self.end(DONE)
        except (OperationalError, StateLostError):
            self.end(FAILED)
        except InternalError as broken:
            raise Violation(f"RULE-4: {broken}") from broken

    def _phase_at(self, instruction: Instruction) -> str:
        """Where it is while it has paused. Empty: it does not."""
        match instruction:
            case do.Configure():
                return CONFIGURING
            case do.Heal() | Do.FINISH_REDUCTION:
                return REDUCING
            case Do.AWAIT_SUMS:
                return VOTING if self.votes else ""
            case Do.AWAIT_RECORD:
                return REQUESTING
            case Do.APPLY:
                return APPLYING
        return BETWEEN if instruction in (_BOUNDARY, Do.LEAVE_GENERATION) else ""

    def _observe(self, num_successors: int = 0, is_blind: bool = False) -> Observed:
        return Observed(
            error=_LOST if self.poisoned and not is_blind else None,
            joining=self.joining,
            draining=self.draining,
            by_signal=self.draining and not self.by_script,
            is_job_over=self.is_retired,
            num_successors=num_successors,
        )

    def _carry_out(self, cluster: Cluster, instruction: Instruction) -> object:
        match instruction:
            case do.ServeState(_, tip):
                self._begin(tip)
            case Do.CONTRIBUTE:
                self._contribute()
            case do.FetchForward():
                return self.has_forward
            case do.StartSum(gang, values):
                self._start_sum(gang, values)
            case Do.AWAIT_SUMS:  # of the totals
                assert self.generation is not None
                return self.generation.totals(self.round).sums()
            case do.MakeReady():
                self._make_ready(cluster)
            case do.ReportCommitted(attempt):
                self.sent.append(("committed", attempt))
                self.reported = attempt
            case Do.APPLY:
                self._apply(cluster)
            case do.Poison():
                self.poison()
            case Do.LEAVE_GENERATION:
                self.leave_generation()
                self.poisoned = False
            case do.SendRequest(report, error):
                if self.generation is not None:
                    raise Violation(
                        f"RULE-3: {self.name} requests while it runs in {self.generation.record.generation}"
                    )
                self.sent.append(("ask", (report, cluster.hosts[self.host].layout, error is not None)))
            case do.SendLeft(finished, in_order, by_script):
                if in_order and not finished:
                    self._check_order(cluster)
                self.sent.append(("left", (finished, in_order, by_script)))
        return None

    def _check_order(self, cluster: Cluster) -> None:
        """It leaves in order only at a boundary that all come to."""
        for member in self.generation.seated if self.generation is not None else ():
            peer = cluster.ranks[member]
            if peer is self or not peer.alive or peer.generation is not self.generation or peer.round < self.round:
                continue
            if peer.round > self.round or (peer.phase is BETWEEN and peer.moves(cluster)[-1:] == ["reports an error"]):
                raise Violation(f"MANAGER-10: {self.name} leaves, but {peer.name} goes on")

    # -- from generation to generation

    def _act(self, cluster: Cluster, record: Record) -> None:
        seat = record.seat(self.name)
        if seat is None:
            raise Violation(f"RULE-9: {self.name} is given generation {record.generation}, which has no seat for it")
        if record.generation <= self.member_state.entered:
            raise Violation(f"RULE-2: {self.name} enters {record.generation} after {self.member_state.entered}")
        self._go_on(cluster, record, through=Do.APPLY)
        if self.alive:
            self._check_entered(cluster.chain.invariants.of[record.digest], record, seat)

    def _check_entered(self, truth: State, record: Record, seat: Seat) -> None:
        member_state = self.member_state
        if member_state.tip is None and seat.status == ACTIVE:
            raise Violation(f"RECOVERY-2: {self.name} is active in generation {record.generation}, but has to heal")
        if member_state.tip is not None:
            if record.committed == Attempt(0, record.generation):
                self.state, self.model = truth, member_state.holds
            if self.state is not truth:
                raise Violation(f"RULE-4: {self.name} holds {self.state} for {truth} in generation {record.generation}")
            if seat.status == ACTIVE and self.model != record.model_coordinates(self.name):
                raise Violation(f"RULE-6: {self.name} holds {self.model}, but is seated elsewhere")

    def _arrive(self, cluster: Cluster, record: Record) -> None:
        self.generation, self.round = cluster.generation(record), 0
        if self.aborted.ends(record.generation):
            self.poison()
        else:
            self.generation.arrived.add(self.name)

    def _configure(self, cluster: Cluster) -> None:
        generation = self.generation
        assert generation is not None
        if generation.record.digest not in cluster.chain.written:
            raise Violation(f"RULE-1: {self.name} runs in a generation that was never agreed")
        generation.has_begun = True
        self.sent.append(("entered", None))
        self._go_on(cluster)

    # -- one step

    def _begin(self, tip: Attempt | None) -> None:
        assert self.generation is not None
        if self.generation.record.generation <= self.promised:
            raise Violation(f"RULE-9: {self.name} takes part in {self.generation.record.generation} after it asked")
        self.round += 1
        self.votes = False
        self.serving = tip

    def _contribute(self) -> None:
        generation, member_state = self.generation, self.member_state
        assert generation is not None
        share = member_state.share(generation.record.layout)
        generation.reduction(self.round).parts[self.name] = Part(
            member_state.attempt(),
            self.state if member_state.tip is not None else None,
            frozenset(member_state.active),
            None if share is None else (share.index, share.count),
        )

    def _start_sum(self, gang: str, values: tuple[float, ...]) -> None:
        if self.poisoned:
            raise _LOST
        assert self.generation is not None
        self.votes = gang == "control"
        sums = self.generation.vote(self.round) if self.votes else self.generation.totals(self.round)
        sums.parts[self.name] = values

    def _sources(self, cluster: Cluster, heal: do.Heal) -> list[Rank]:
        """Those that serve the state now, or soon."""
        return [
            peer
            for seat in sorted(heal.sources, key=lambda seat: seat.member)
            if (peer := cluster.ranks[seat.member]).alive
            and cluster.reaches(self.host, peer.host)
            and (peer.serving == heal.attempt or (peer.generation is self.generation and peer.phase in _BEFORE))
        ]

    def _heal(self, cluster: Cluster) -> None:
        heal, generation = self._paused, self.generation
        assert isinstance(heal, do.Heal)
        assert generation is not None
        source = next(peer for peer in self._sources(cluster, heal) if peer.serving == heal.attempt)
        self.state, self.model = source.state, self.member_state.holds
        self._go_on(cluster, (True, 0))
        if source.model != self.model or self.state is None:
            raise Violation(f"RULE-6: {self.name} is at {self.model}, but heals from {source.name} at {source.model}")
        peers = [part.state for part in generation.reduction(self.round).parts.values() if part.state is not None]
        if any(state is not self.state for state in peers):
            raise Violation(f"RULE-6: {self.name} heals to {self.state}, but the others are at {peers}")

    def _make_ready(self, cluster: Cluster) -> None:
        """What it has prepared can be applied without anybody else."""
        generation, attempt = self.generation, self.member_state.pending
        assert generation is not None
        if attempt is None or self.state is None:
            raise Violation(f"RULE-4: {self.name} makes {attempt} ready to be applied to {self.state}")
        promises.check_step(cluster, generation, list(generation.reduction(self.round).parts.values()))
        if any(values[1] for values in generation.totals(self.round).parts.values()):
            raise Violation(f"MANAGER-6: {self.name} has prepared {attempt}, in which a rank failed")
        cluster.chain.invariants.reduce(generation.record, self.state, attempt, self.round)
        self.prepared = self.state.after(attempt, (generation.record.digest, self.round))

    def _apply(self, cluster: Cluster) -> None:
        if self.prepared is None:
            raise Violation(f"MANAGER-5: {self.name} applies what was not made ready")
        self.state, self.prepared, self.serving = self.prepared, None, None
        cluster.chain.invariants.apply(self, self.state)
