"""A rank of the simulation: the driver of a `MemberLifecycle`, whose instructions it carries out on symbols.

It pauses at an instruction that takes time, and goes on with a move; one that waits for something is possible once that
is there.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from elasticgang.errors import GangError, InternalError, OperationalError, PeerLostError, StateLostError
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_instructions import AbortNotice, Do, Instruction, Observed
from elasticgang.protocol.member_lifecycle import MemberLifecycle, Routine
from elasticgang.protocol.record import FormerState, Record
from elasticgang.protocol.slot_division import Basis, divide, holding, max_ahead
from elasticgang.simulation import promises
from elasticgang.simulation.generation import Part, SimulatedGeneration
from elasticgang.simulation.held_runs import NUM_RUNS, HeldRuns
from elasticgang.simulation.invariants import Model, State, Violation
from elasticgang.simulation.rank_checks import check_entered, check_healed, check_order, check_words
from elasticgang.simulation.rank_moves import faults, moves
from elasticgang.simulation.rank_script import (
    BETWEEN,
    CONFIGURING,
    DIVIDE,
    MOVING,
    REDUCING,
    STARTING,
    Torn,
    fail,
    phase_at,
    train,
)

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster

_BEFORE = (CONFIGURING, BETWEEN, MOVING)  # a step begins

_MAX_LOST = 20

KILLED, FAILED, DONE = -9, 1, 0

_LOST = PeerLostError("a peer is lost")


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
        self.paused: Instruction | None = None  # what it is at
        self.phase = STARTING
        self.alive = True
        self.status = 0
        self.generation: SimulatedGeneration | None = None
        self.poisoned = False
        self.round = 0
        self.draining = False  # it was asked to leave
        self.hangs = False  # and never does anything more
        self.raised = False  # its script has, and the process has not exited
        self.seems_to_exit = False  # though it does not: it has overwritten its word, or executes another program
        self.is_noticed = False  # its agent was told that it exits
        self.is_exiting = False  # and has acted on it
        self.by_script = False  # it was its own script that asked
        self.is_retired = False
        self.reports_error = False  # in the step that begins
        self.has_forward = True  # of a step, as a learner
        self.votes = False  # the sum that it has started last is of a vote
        self.saves = False  # or of the save of the final state
        self.aborted = AbortNotice()
        self.joining = 0
        self.promised = 0  # the newest generation that was over when it asked
        self.serving: Attempt | None = None
        self.sent: deque[tuple[str, Any]] = deque()
        self.received: deque[tuple[str, Any]] = deque()
        self.records: deque[Record] = deque()
        self.state: State | None = None
        self.prepared: State | None = None  # what applying makes of `state`
        self.forward: Attempt | None = None  # whose forward has changed `state`; of no committed attempt (MANAGER-4)
        self.reported = Attempt(0, 0)  # as committed
        self.model: Model | None = None
        self.layout = 0  # the number of the layout that `model` is of
        self.former: tuple[State, FormerState] | None = None  # what it has besides
        self.kept: FormerState | None = None  # and serves
        self.held: HeldRuns | None = None  # in a job that keeps gradients
        self._held_in: SimulatedGeneration | None = None  # in which the try has begun that they are of

    def __repr__(self) -> str:
        return self.name

    moves, faults = moves, faults

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
                if self.phase is MOVING:
                    self._go_on(cluster, False)
                elif self.phase is REDUCING:  # that raises nothing
                    self._go_on(cluster, (False, 0, 0.0))
                else:
                    self._go_on(cluster, error=_LOST)
            case "begins" | "reports an error":
                self.reports_error = verb != "begins"
                self._go_on(cluster)
            case "heals":
                self._heal(cluster)
            case "moves":
                self._move(cluster)
            case "misses" | "misses all":
                self._go_on(cluster, False if self.phase is MOVING else (False, 0, 0.0))
            case "prepares" | "prepares not":
                # The generation may be over, and this rank not have seen it: then its vote cannot begin.
                self.has_forward = verb == "prepares"
                self._go_on(cluster, is_blind=True)
            case "divides":
                assert self.generation is not None
                self._go_on(cluster, self.generation.division(self.round).read(self.name))
                if self.held is not None and self.held.firm:
                    cluster.seen.add("kept runs")
            case "computes":
                self._compute()
                self._go_on(cluster)
            case "counts":
                assert self.generation is not None
                cluster.num_only_healed += self.member_state.only_heals
                self._go_on(cluster, self.generation.vote(self.round).read(self.name))
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
            case "seems to exit":
                self.seems_to_exit = True
            case "raises":
                self.raised = True
                self.sent.append(("raised", None))
            case "exits early":
                self.end(DONE)
            case "knows of all saves":
                assert self.generation is not None
                self._go_on(cluster, self.generation.last_save(self.round).read(self.name))
            case "saves" | "finishes" | "drains" | "ends" | "stops trying":
                if self.phase is STARTING:  # the signal's handler ends it
                    self.end(DONE)
                else:
                    self._go_on(cluster)
                    if verb == "drains" and self.alive:  # it comes to the boundary at once
                        self._go_on(cluster)
            case "tears":  # and the script goes on
                self.prepared = None
                self._go_on(cluster, error=Torn())
            case "leaves":
                self._script = fail(self, cluster.num_steps)
                self._go_on(cluster)
            case "breaks":
                self.poison()
            case "dies":
                self.end(KILLED)
        check_words(self, knows_fate=verb in ("acts", "counts", "tears"))

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
            self._script = train(self, cluster.num_steps)
            next(self._script)
        if through is not None and self.paused is through:
            outcome = self._carry_out(cluster, through)
        is_voting = self.phase is REDUCING  # the only phase in which it reads how many successors there are
        num_successors = cluster.hosts[self.host].num_known_successors if is_voting else 0
        self.lifecycle.observed = self.observe(num_successors, is_blind)
        try:
            while True:
                self.paused = self._script.send(outcome) if error is None else self._script.throw(error)
                error = None
                phase = phase_at(self.paused, self.votes, self.saves)
                if phase and self.paused is not through:
                    self.phase = phase
                    if isinstance(self.paused, do.Configure):
                        self._arrive(cluster, self.paused.record)
                    elif self.paused is DIVIDE and not self.poisoned:
                        self._say_what_it_holds()
                    return
                try:
                    outcome = self._carry_out(cluster, self.paused)
                except GangError as failure:
                    self.poison()
                    error = failure
                    self.lifecycle.observed = self.observe(cluster.hosts[self.host].num_known_successors)
        except (StopIteration, SystemExit):
            self.end(DONE)
        except (OperationalError, StateLostError):
            self.end(FAILED)
        except InternalError as broken:
            raise Violation(f"RULE-4: {broken}") from broken

    def observe(self, num_successors: int = 0, is_blind: bool = False) -> Observed:
        error = _LOST if self.poisoned and not is_blind else None
        by_signal = self.draining and not self.by_script
        return Observed(error, self.joining, self.draining, by_signal, self.is_retired, num_successors)

    def _carry_out(self, cluster: Cluster, instruction: Instruction) -> object:
        match instruction:
            case do.ServeState(_, tip):
                self._begin(tip)
            case do.KeepFormer(former):
                self.kept = former
            case do.BuildSeat():
                if self.member_state.former != self.kept:
                    raise Violation(f"MANAGER-14: {self.name} builds other state before it keeps its own aside")
            case Do.CONTRIBUTE:
                self._contribute()
            case do.FetchForward():
                return self.has_forward
            case do.StartSum(gang, values):
                self._start_sum(gang, values)
                if self.saves and self.generation is not None and self.generation.last_save(self.round).is_complete:
                    cluster.saved.add(self.member_state.committed)  # all have written their shares
            case Do.SAVE_LAST:
                self.round, self.saves = self.round + 1, True
                return self.member_state.committed not in cluster.saved, False
            case Do.IS_SAVED:
                return self.member_state.committed in cluster.saved
            case Do.AWAIT_SUMS:  # of the totals
                assert self.generation is not None
                return self.generation.totals(self.round).read(self.name)
            case do.MakeReady():
                self._make_ready(cluster)
            case do.ReportCommitted(attempt):
                self.sent.append(("committed", attempt))
                self.reported = attempt
            case Do.APPLY:
                self._apply(cluster)
            case do.EndStep(is_dropped, _, restores):
                if is_dropped and self.held is not None and not self.poisoned and self.generation is self._held_in:
                    self.held.drop()  # KEEP-1
                if restores and not is_dropped:
                    raise Violation(f"MANAGER-4: {self.name} restores what {self.forward} has changed and committed")
                if restores or not is_dropped:
                    self.forward = None
            case do.Poison():
                self.poison()
            case Do.LEAVE_GENERATION:
                self.leave_generation()
                self.poisoned = False
            case do.SendRequest(report, error, connected=connected):
                if self.generation is not None:
                    raise Violation(
                        f"RULE-3: {self.name} requests while it runs in {self.generation.record.generation}"
                    )
                self.sent.append(("ask", (report, cluster.hosts[self.host].layout, error is not None, connected)))
            case do.SendLeft(finished, in_order, by_script):
                if in_order and not finished:
                    check_order(self, cluster)
                self.sent.append(("left", (finished, in_order, by_script, 0, self.raised)))
        return None

    # -- from generation to generation

    def _act(self, cluster: Cluster, record: Record) -> None:
        seat = record.seat(self.name)
        if seat is None:
            raise Violation(f"RULE-9: {self.name} is given generation {record.generation}, which has no seat for it")
        if record.generation <= self.member_state.entered:
            raise Violation(f"RULE-2: {self.name} enters {record.generation} after {self.member_state.entered}")
        self._go_on(cluster, record, through=Do.APPLY)
        if self.alive:
            truth = cluster.chain.invariants.of[record.digest]
            if self.member_state.tip is not None and record.committed == Attempt(0, record.generation):
                self.state, self.model, self.layout = truth, self.member_state.holds, self.member_state.layout
            check_entered(self, truth, record, seat)

    def _arrive(self, cluster: Cluster, record: Record) -> None:
        self.generation, self.round, self.saves = cluster.generation(record), 0, False
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
        if self.forward is not None:
            raise Violation(f"MANAGER-4: {self.name} begins a step with what {self.forward} has changed in forward")
        self.round += 1
        self.votes = False
        self.serving = tip

    def _contribute(self) -> None:
        generation, member_state = self.generation, self.member_state
        assert generation is not None
        share = member_state.share()
        self.forward = member_state.attempt() if share is not None else None
        generation.reduction(self.round).parts[self.name] = Part(
            member_state.attempt(),
            self.state if member_state.tip is not None else None,
            frozenset(member_state.active),
            None if share is None else (share.index, share.count),
            generation.record.model_coordinates(self.name),
            None if self.held is None else self.held.sources if share is not None else {},
        )

    # -- the runs of a step

    @property
    def _groups(self) -> tuple[int, list[bool]]:
        """The number of its replica group, and which groups have runs."""
        assert self.generation is not None
        record = self.generation.record
        shares = self.member_state.active_members.shares[:: record.layout.sdp]
        return record.plan.coordinates(self.name)["rdp"], [share is not None for share in shares]

    def begin_runs(self) -> bool:
        """A try of a step begins. Returns whether it is the first one of its generation."""
        assert self.held is not None
        assert self.generation is not None
        record, member_state = self.generation.record, self.member_state
        step, is_first = member_state.committed.step, self.round == 1
        self._held_in = self.generation
        self.held.num_loose = max_ahead(record.layout)
        self.held.begin(Basis.of(step, member_state.tip, record, NUM_RUNS, self.name), is_first=is_first)
        return is_first

    def _say_what_it_holds(self) -> None:
        assert self.held is not None
        assert self.generation is not None
        group, is_active = self._groups
        self.generation.division(self.round).parts[self.name] = tuple(
            self.held.message(group, is_active=is_active[group])
        )

    def divide(self, sums: list[float] | None) -> None:
        """`sums`: None if no rank says what it holds."""
        assert self.held is not None
        assert self.generation is not None
        group, is_active = self._groups
        unit = self.generation.record.layout.unit
        self.held.take(divide(holding(NUM_RUNS, 0) if sums is None else sums, unit, is_active)[group])

    def may_compute(self) -> bool:
        """KEEP-4: the ranks of a group need each other in each run."""
        assert self.held is not None
        assert self.generation is not None
        plan, num_done = self.generation.record.plan, self.generation.num_done
        group = plan.coordinates(self.name)["rdp"]
        peers = [name for name in plan.ranks if name != self.name and plan.coordinates(name)["rdp"] == group]
        return all(num_done.get((self.round, peer), 0) + self.held.num_loose > self.held.num_done for peer in peers)

    def _compute(self) -> None:
        assert self.held is not None
        assert self.generation is not None
        self.held.compute((self.state, self.generation.record.model_coordinates(self.name)))
        self.generation.num_done[self.round, self.name] = self.held.num_done

    def _start_sum(self, gang: str, values: tuple[float, ...]) -> None:
        if self.poisoned:
            raise _LOST
        assert self.generation is not None
        self.votes = gang == "control"
        sums_of = {"control": self.generation.vote, "root": self.generation.totals, "save": self.generation.last_save}
        sums = sums_of[gang](self.round)
        sums.parts[self.name] = values

    def sources(self, cluster: Cluster, heal: do.Heal) -> list[Rank]:
        """Those that serve the state now, or soon."""
        return [
            peer
            for seat in sorted(heal.sources, key=lambda seat: seat.member)
            if (peer := cluster.ranks[seat.member]).alive
            and cluster.reaches(self.host, peer.host)
            and (peer.serving == heal.attempt or (peer.generation is self.generation and peer.phase in _BEFORE))
        ]

    def _heal(self, cluster: Cluster) -> None:
        heal, generation = self.paused, self.generation
        assert isinstance(heal, do.Heal)
        assert generation is not None
        source = next(peer for peer in self.sources(cluster, heal) if peer.serving == heal.attempt)
        self.state, self.model, self.layout = source.state, self.member_state.holds, self.member_state.layout
        self._go_on(cluster, (True, 0, 0.0))
        check_healed(self, source, generation)

    def keepers(self, cluster: Cluster, move: do.Move) -> dict[Model, list[Rank]]:
        """For each part of the former layout, those that serve it now, or soon."""
        found: dict[Model, list[Rank]] = {holder.model: [] for _, holder in move.holders}
        for seat, holder in move.holders:
            peer = cluster.ranks[seat.member]
            wanted = FormerState(move.attempt, holder.layout, holder.model)
            if peer.alive and cluster.reaches(self.host, peer.host) and peer.member_state.former == wanted:
                found[holder.model].append(peer)
        return found

    def _move(self, cluster: Cluster) -> None:
        """Each part comes from one that has kept it before it has built anything else."""
        move = self.paused
        assert isinstance(move, do.Move)
        sources = [
            next(peer for peer in peers if peer.kept == peer.member_state.former)
            for peers in self.keepers(cluster, move).values()
        ]
        states = {source.former[0] for source in sources if source.former is not None}
        truth = cluster.chain.invariants.of[self.generation.record.digest] if self.generation is not None else None
        if states != {truth}:
            raise Violation(f"RULE-6: {self.name} fetches {states} for {truth}")
        self.state, self.model, self.layout = truth, self.member_state.holds, self.member_state.layout
        self._go_on(cluster, True)

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
        cluster.chain.invariants.apply(self, self.state, self.lifecycle.sums)
