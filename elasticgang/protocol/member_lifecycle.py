"""One member as a state machine: its steps, and its way from one generation to the next.

Pure: instructions out, their outcomes in. A member acts in one thread, so each thing it does is a *routine*: a
generator that yields instructions (`member_instructions.py`). The driver sets `observed`, then resumes the routine with
the outcome of its last instruction; a GangError of an instruction ends the generation and is thrown in. A routine that
the driver drops half-way, because the script has raised, leaves the state as of that line. `member/driver.py` carries
the instructions out on tensors, the simulator on symbols.

MANAGER-1  A step is committed only through a vote in which every active member took part, prepared (RULE-4).
MANAGER-2  When a vote fails on a rank that has prepared, the rank keeps the attempt until a record names its fate, and
    requests that record before anything else.
MANAGER-3  Applying communicates nothing; `torn` brackets it; a torn state is no state (RULE-10).
MANAGER-4  A snapshot of what forward changes is taken before a step begins, and restored when the step is dropped.
MANAGER-5  The gradients of a prepared attempt are made ready to apply before this rank gets the outcome of its vote,
    also where the vote cannot begin. If an exception leaves the vote, the state is torn.
MANAGER-6  A rank prepares only with the totals of all ranks: those that failed, the weights, and what was measured. A
    step in doubt can then be applied without the ranks that died. If any rank failed, none prepares.
MANAGER-7  A rank without state heals before it sends its totals and its vote.
MANAGER-8  A committed attempt is reported before it is applied: a rank that dies in the act does not take it along.
MANAGER-9  A rank requests only after its generation has ended here (RULE-3), and then acts on records alone (RULE-9).
MANAGER-10  A draining rank leaves at a boundary between steps, after a vote that announced and allowed it (MEMBER-6);
    at once if it has no seat and keeps no state for its peers (MEMBER-7).
MANAGER-11  When the record goes back to a durable checkpoint, a rank without state loads it before its first step, or
    heals from a peer that has. A rank that cannot ends the generation, and reports an earlier checkpoint.
MANAGER-12  With durable checkpoints, no rank leaves a job that finishes before it knows that the final state is saved
    or its save has failed. In rounds, the ranks sum whether they still wait for that, and whether it has failed: if it
    has on one rank, all say so. If the generation ends meanwhile and the state is not saved, the members of the next
    one save it again.
MANAGER-13  A fault of this rank's device (CUDA-1) is dropped neither with a lost step nor with a generation that cannot
    be entered: the process can use the device no more.
MANAGER-14  When the record names holders of another layout, they keep their state aside before they build another one.
    A rank that nobody can heal fetches its part from them before its first step. If it cannot, it ends the generation.
MANAGER-15  The script's numbers are summed with the totals, so that a rank has the sums before it prepares. All ranks
    that hold the committed step have the same ones, also if a record has resolved it. A rank without state adds zeros.
MANAGER-16  A number that stands for the names of the script's numbers is summed with them. If ranks have other names,
    every rank finds that before it prepares, and raises an error.
MANAGER-17  A generation whose groups are not connected counts as a lost attempt at the step. `MAX_LOST_STEPS` in a row
    without a committed step end this rank with an error, and `MAX_NOT_ENTERED` if it has no state: a joiner that cannot
    connect stops the others no longer than that. After `_NUM_AT_ONCE` it waits before each request, and says so: an
    interruption of the network does not use them up. For both, one that took `LATE_S`, or in which a rank has waited
    for the time limit, counts as `_NUM_AT_ONCE`: over a path that drops what is sent each takes a minute, and 20 of
    them would stop the others for 20 minutes. One that ended by what is known of another host, such as a rank without
    a comm process (RENDEZVOUS-4), does not count towards `MAX_NOT_ENTERED`: this rank could have connected.
MANAGER-18  A rank without state, whose peers hold a later step than its script's last one, ends with an error, and does
    not end their generation.
MANAGER-19  If an exception leaves a step that is not committed, and the script goes on, the generation ends: the other
    ranks wait for collectives of that step that this rank does not start any more. What forward has changed is
    restored then too.
MANAGER-20  With `--compare-state`, a boundary is passed, also by a rank that leaves there, after the comparison that is
    due at it (COMPARE-1). A generation that ends in a comparison counts as a lost attempt at the step (MANAGER-17).
MANAGER-21  A rank whose heals get no further ends with an error once they have taken `MAX_STUCK_S` together: the others
    wait for it in each step. Those that fail in less than `LATE_S`, or have no turn (FETCH-12), do not count. Nor does
    what comes again because a step has changed it: a heal gets further if more of one state is here than ever before.
MANAGER-22  With durable checkpoints, the ranks save the state as MANAGER-12 says also at a boundary at which all that
    hold some part of it leave. If the generation ends meanwhile and the state is not saved, they take part in the next
    one, and leave as of a vote there.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar

from elasticgang.errors import (
    EvictedError,
    GangError,
    InternalError,
    InvalidOperationError,
    OperationalError,
    PeerLostError,
    StateLostError,
    StepAborted,
    UnhealedError,
)
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.commit import Action, Attempt
from elasticgang.protocol.device_errors import device_fault
from elasticgang.protocol.member_instructions import Do, Instruction, Observed
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import SPARE, CheckpointRef, Record, Seat
from elasticgang.protocol.state_comparison import StateComparison

MAX_LOST_STEPS = 100
MAX_NOT_ENTERED = 20
MAX_STUCK_S = 240.0
MAX_DELAY_S = 5.0
LATE_S = 5.0
_NUM_AT_ONCE = 5
_NUM_SHOWN = 4  # hosts, in a message
_NUM_NAMES = 2  # numbers behind the script's, by which ranks see that they have the same names
_NEVER_DROPPED = (InternalError, OperationalError, EvictedError, StateLostError)

_T = TypeVar("_T")
Routine: TypeAlias = Generator[Instruction, Any, _T]


class Next(enum.Enum):
    """What a member does at a boundary between steps."""

    LOAD = "it loads a durable checkpoint, or the state of another layout"
    STEP = "it takes the next step"
    SAVE = "it saves the state, which is final or about to be lost"
    REGROUP = "it requests the next generation"
    LEAVE = "it leaves the loop over steps"
    GIVE_UP = "it has lost too many steps in a row"


@dataclass
class _Step:
    """The step under way. `heals_on`: a heal that has not ended got further than ever before, or waits
    for its turn."""

    attempt: Attempt
    has_slots: bool
    has_failed: bool = False
    has_voted: bool = False
    is_committed: bool = False  # and this rank's state holds it
    sums: tuple[float, ...] = ()  # over all ranks, of the script's numbers
    heals_on: bool = False


class MemberLifecycle:
    """`state`: what this rank knows and holds; read it. `observed`: the driver sets it before it resumes a routine."""

    def __init__(self, member: str, local_rank: int, address: str) -> None:
        self.state = MemberState(member)
        self.observed = Observed()
        self.max_lost_steps, self.max_not_entered, self.max_stuck_s = MAX_LOST_STEPS, MAX_NOT_ENTERED, MAX_STUCK_S
        self.comparison = StateComparison(self.state)
        self.saves_last = False  # the job has durable checkpoints
        self.has_left = False
        self._local_rank, self._address = local_rank, address
        self._step: _Step | None = None
        self._num_lost = 0  # steps, in a row
        self._left: int | None = None  # the step that an exception has left (MANAGER-19)
        self._has_connected = True  # or was not to
        self._num_not_entered = 0  # generations since the last commit that were not connected
        self._num_quick = 0  # as many as these in quick ones: one that was late counts for several (MANAGER-17)
        self._num_own = 0  # of these, without the ones that other hosts ended
        self._num_received = 0  # most, of a heal that has not ended
        self._stuck_s = 0.0  # of heals in a row that got no further
        self._num_steps = 0
        self._regroups = True
        self.has_seat = False
        self._may_leave = False
        self._has_saved = False  # the state of this boundary
        self.has_failed_to_save = False  # any rank, as far as this one knows, of the state of this boundary
        self._loses_part = False  # the ranks that leave at this boundary take a part of the state along
        self._has_stayed = False
        self._announced = 0  # the generation whose first commit the agent was sent

    @property
    def _is_over(self) -> bool:
        """Nothing of the present generation can commit any more."""
        return self.observed.error is not None

    @property
    def _is_leaving(self) -> bool:
        """MANAGER-10."""
        return self.observed.draining and (self._may_leave or not (self.has_seat or self.state.former is not None))

    # -- the loop over steps

    def at_boundary(self, num_steps: int) -> Next:
        state = self.state
        if self._saves_before_loss:
            return Next.REGROUP if self._is_over else Next.SAVE
        if self._is_leaving:
            return Next.LEAVE
        if self._loads and not self._is_over:
            return Next.LOAD
        is_last = state.committed.step >= num_steps
        is_done = is_last and (self._has_saved or not self.saves_last) and self.comparison.has_passed
        if is_done and state.tip is not None:
            return Next.LEAVE
        if self._gives_up or self._is_past_end(num_steps):
            return Next.GIVE_UP
        if is_done or self._regroups or self._is_over:  # done without state: the job ends without this rank
            return Next.REGROUP
        return Next.SAVE if is_last else Next.STEP

    @property
    def _saves_before_loss(self) -> bool:
        """MANAGER-22."""
        return self._loses_part and self.saves_last and not self._has_saved

    @property
    def _gives_up(self) -> bool:
        """MANAGER-17."""
        if self._is_stuck or (self.state.tip is None and self._num_own >= self.max_not_entered):
            return True
        return self._num_lost + self._num_not_entered >= self.max_lost_steps

    @property
    def _is_stuck(self) -> bool:
        """MANAGER-21"""
        return self.state.tip is None and self._stuck_s >= self.max_stuck_s

    @property
    def _was_late(self) -> bool:
        """Whether the last generation, which was not connected, counts for several (MANAGER-17)."""
        return self.observed.has_timed_out or self.observed.connecting_s >= LATE_S

    @property
    def _loads(self) -> bool:
        """MANAGER-11, MANAGER-14."""
        state = self.state
        record = state.record
        return (
            state.tip is None
            and self.has_seat
            and record is not None
            and bool(record.checkpoint or record.holders)
            and state.committed == record.committed
            and not state.sources()
        )

    def _is_past_end(self, num_steps: int) -> bool:
        """MANAGER-18."""
        state = self.state
        return self.has_seat and state.tip is None and state.committed.step > num_steps and bool(state.sources())

    def pass_boundary(self, num_steps: int) -> Routine[Next]:
        """Do what `at_boundary` says, and return that. After REGROUP, LOAD and SAVE this rank is at the same boundary
        again.

        Raises:
            OperationalError: too many attempts in a row were lost (MANAGER-17), or the job has more steps (MANAGER-18).
            UnhealedError: MANAGER-21.
            DamagedStateError: COMPARE-5.
            EvictedError, StateLostError, SystemExit: as `_next_generation` does.
        """
        yield from self._end_left_step()
        if self.has_seat and not (self._is_over or self._loads or self._is_past_end(num_steps)):  # MANAGER-20
            yield from self.comparison.compare(num_steps, saves=self._saves_before_loss)
            self._num_lost += self._is_over
        state, what = self.state, self.at_boundary(num_steps)
        self._num_steps = num_steps
        if what is Next.REGROUP:
            yield from self._next_generation()
        elif what is Next.SAVE:
            yield from self._save_last()
        elif what in (Next.STEP, Next.LOAD):
            assert state.record is not None
            yield from self._keep_former(state.record)
            yield do.BuildSeat(state.record.model_coordinates(state.member), state.layout)
            if what is Next.LOAD:
                yield from self._load(state.record)
        elif what is Next.GIVE_UP:
            self._give_up()
        return what

    def _end_left_step(self) -> Routine[None]:
        """MANAGER-19."""
        if (left := self._left) is not None:
            self._left = None
            yield do.Poison(StepAborted(f"an exception has left step {left}, and the script goes on"))

    def _give_up(self) -> NoReturn:
        state = self.state
        if self._is_past_end(self._num_steps):
            raise OperationalError(
                f"the job has committed {state.committed.step} steps, but this script takes {self._num_steps}: give "
                "`manager.steps` the number that the job has"
            )
        if self._is_stuck:
            raise UnhealedError(
                f"nothing more of the training state of step {state.committed.step} has come from the ranks of "
                f"{_names(state.sources())} in {self._stuck_s:.0f} s, in which the others waited for this rank"
            )
        num_lost = self._num_lost + self._num_not_entered
        where = ""
        if self._num_not_entered:
            where = f", {self._num_not_entered} times because the ranks of {_hosts(state)} did not connect"
        raise OperationalError(
            f"step {state.committed.step} was lost {num_lost} times in a row{where}; the last: {self.observed.error}"
        )

    def _keep_former(self, record: Record) -> Routine[None]:
        """MANAGER-14."""
        state, step = self.state, self._step
        if len(record.layouts) > 1:
            is_dropped = state.former is not None and step is not None and state.former.attempt != step.attempt
            yield do.KeepFormer(state.former, is_dropped)

    def _load(self, record: Record) -> Routine[None]:
        """MANAGER-11, MANAGER-14."""
        state = self.state
        if record.checkpoint:
            what = f"the checkpoint of step {state.committed.step} cannot be loaded"
            loaded = yield do.LoadCheckpoint(CheckpointRef(state.committed, record.checkpoint))
        else:
            layout = record.layouts[record.holders[0].layout]
            what = f"the state of step {state.committed.step} cannot be moved from the layout ({layout.sizes})"
            loaded = yield do.Move(state.holders(), layout, state.committed)
        if loaded:
            state.healed()
            self.comparison.state_loaded()
            yield Do.REPORT_HEALED
        else:
            self._num_lost += 1
            yield do.Poison(PeerLostError(what))

    def _save_last(self) -> Routine[None]:
        """MANAGER-12. A peer that knew of the outcome before this rank did may have left."""
        try:
            while not self._has_saved:
                is_saving, has_failed = yield Do.SAVE_LAST
                yield do.StartSum("save", (float(is_saving), float(has_failed)))
                num_saving, num_failed = yield Do.AWAIT_SUMS
                self._has_saved, self.has_failed_to_save = not num_saving, bool(num_failed)
                if num_saving and num_failed:
                    yield Do.DROP_SAVE
        except GangError:
            self._has_saved = yield Do.IS_SAVED

    def leave(self, num_steps: int, *, returned: bool) -> Routine[None]:
        """The loop over steps has ended: it has `returned`, or an exception has left it.

        Raises:
            SystemExit: it has returned, and a signal asked for the end of the process.
        """
        state, seen = self.state, self.observed
        finished = state.committed.step >= num_steps and state.tip is not None
        if not self.has_left:
            self.has_left = True
            if not seen.is_job_over:
                by_script = seen.draining and not seen.by_signal
                yield do.SendLeft(finished, self._may_leave, by_script, num_steps, self._left is not None)
            yield Do.CLOSE
        if returned and self.observed.by_signal and not finished:
            raise SystemExit(0)

    # -- one step

    def begin(self) -> Routine[None]:
        state = self.state
        if self._step is not None:
            raise InvalidOperationError(f"step {self._step.attempt.step - 1} is still under way")
        self._step = _Step(state.attempt(), state.share() is not None)
        self._has_saved = self.has_failed_to_save = False
        state.begin()
        yield do.ServeState(state.committed.step, state.tip)

    def report_error(self) -> None:
        """This rank's gradients must not be used."""
        if self._step is not None:
            self._step.has_failed = True

    def commit(self, weight: float, numbers: Sequence[float] = (), *, measures: bool, names: int = 0) -> Routine[bool]:
        """Vote on the step under way, and apply it when it is committed. Returns, once its fate is known, whether this
        rank's state holds it; `sums` then has the sums of `numbers` over all ranks. `measures`: the optimizer measures
        the reduced gradients. `names`: stands for the names of `numbers` (MANAGER-16).

        Raises:
            InvalidOperationError: the step was voted on before; or the weights of all ranks sum to 0; or ranks have
                other `names`.
            InternalError: the ranks voted on different attempts.
            StepAborted: this rank leaves, because it drains and has become a spare.
            EvictedError, StateLostError, SystemExit: as `_next_generation` does.
        """
        self.check_unvoted()
        step, state = self._step, self.state
        assert step is not None
        index = step.attempt.step - 1
        step.has_voted = True
        if numbers:
            numbers = (*numbers, float(names), 1.0)  # MANAGER-16
        totals = yield from self._reduce(step, weight, numbers, measures)
        if totals is None or totals[1] > 0:  # MANAGER-6
            return False
        total, _, *rest = totals
        step.sums, measured = tuple(rest[: max(0, len(numbers) - _NUM_NAMES)]), rest[len(numbers) :]
        if total <= 0:  # the same on every rank, so that all raise and none has voted
            raise InvalidOperationError(f"the weights of step {index} sum to {total:g} over all ranks")
        try:
            passed = yield from self._vote(step.attempt, total, measured)
        except GangError:
            if state.pending is not None:  # MANAGER-2
                yield from self._resolve_in_step()
        else:
            if passed:  # MANAGER-1
                yield from self._committed(step.attempt)
        step.is_committed = state.has(step.attempt)
        return step.is_committed

    def check_unvoted(self) -> None:
        """Raises InvalidOperationError: the step under way was voted on before."""
        if (step := self._step) is not None and step.has_voted:
            index = step.attempt.step - 1
            raise InvalidOperationError(
                f"step {index} was voted on before; there is one `optim.step` in a step: give one optimizer the "
                "parameters of both, as groups, or let two take turns by `step.index`"
            )

    @property
    def sums(self) -> tuple[float, ...]:
        """Over all ranks, of the numbers of the step under way (MANAGER-15). Read them once it is committed."""
        return () if self._step is None else self._step.sums

    def end(self, error: BaseException | None) -> Routine[bool]:
        """The step is over; `error` has left it. Returns whether the error belongs to a lost step, and is dropped with
        it.

        Raises:
            InvalidOperationError: nothing has voted on the step.
        """
        step, state = self._step, self.state
        assert step is not None
        self._step = None
        was_over = self._is_over
        is_lost = was_over or isinstance(error, GangError) or state.entered != step.attempt.generation
        is_ordinary = isinstance(error, Exception) and not isinstance(error, _NEVER_DROPPED)
        drops_error = is_ordinary and is_lost and not step.is_committed
        if error is not None and device_fault(error) is not None:  # MANAGER-13
            is_ordinary = drops_error = False
        restores = not step.is_committed and (error is None or is_ordinary)  # MANAGER-4
        if error is not None and not (drops_error or step.is_committed or was_over):
            self._left = step.attempt.step - 1
        yield do.EndStep(not step.is_committed, error is not None, restores, step.has_slots and error is None)
        if state.pending is not None:  # MANAGER-5
            state.begin_apply()
            yield do.Poison(PeerLostError(f"an exception has left the vote on step {step.attempt.step - 1}"))
        if error is None and not step.has_voted and not was_over:
            raise InvalidOperationError(
                f"step {step.attempt.step - 1} ended without `optim.step` of an `elasticgang.Optimizer`, so that "
                "nothing can commit it: call it in each step, also after `report_error`, and catch exceptions "
                "outside of `with step:`"
            )
        if drops_error and isinstance(error, GangError) and not was_over:
            yield do.Poison(error)
        # Healers alone see whether a heal gets on: those that do not end by themselves.
        heals_on = state.awaits_learners if state.is_active else step.heals_on
        is_passed = state.committed.step >= step.attempt.step
        self._num_lost = 0 if is_passed else self._num_lost + (not heals_on)
        if is_passed:
            self._num_not_entered = self._num_quick = self._num_own = 0
        return drops_error

    def _reduce(
        self, step: _Step, weight: float, numbers: Sequence[float], measures: bool
    ) -> Routine[list[float] | None]:
        """Reduce the gradients. Returns the sum of the weights, the number of ranks that failed, and the sums of
        `numbers` and of what was measured; None if the step is lost, or nobody has slots (MEMBER-5)."""
        state = self.state
        yield Do.CONTRIBUTE
        if state.tip is None and not self._is_over:  # MANAGER-7
            yield from self._heal(step)
        fails = state.fails or (state.is_active and step.has_failed)
        own = (weight, *numbers) if state.is_active else (0.0,) * (1 + len(numbers))  # MANAGER-15
        start = do.StartSum("root", (own[0], float(fails), *own[1:]), measures)
        # What measures the reduced gradients waits for them. Without, the totals cross beside the gradients.
        if not (measures or state.only_heals or self._is_over):
            with contextlib.suppress(GangError):
                yield start
        yield Do.FINISH_REDUCTION
        if state.only_heals:
            if not self._is_over:
                with contextlib.suppress(GangError):  # nothing is prepared, so nothing can be in doubt
                    yield from self._vote(step.attempt)
            return None
        has_forward = state.is_active
        if not state.is_active and state.tip is not None and not self._is_over:
            # A learner ran no forward: it gets its outcome before the vote, because those that have it may die after.
            has_forward = yield do.FetchForward(state.sources(), state.tip)
        try:
            if self._is_over:
                return None
            if measures:
                yield start
            total, num_failed, *rest = yield Do.AWAIT_SUMS
        except GangError:
            return None
        if self._is_over:  # the gradients may be this rank's own
            return None
        assert state.record is not None
        if not num_failed and numbers:
            _check_names(step, numbers, rest[: len(numbers)])
        if not num_failed and total > 0 and state.tip is not None and has_forward:
            state.prepare(step.attempt)
        layout = state.record.layout
        return [total / (layout.tp * layout.pp), num_failed, *rest]

    def _heal(self, step: _Step) -> Routine[None]:
        """On failure this rank stays a learner, and tries again in the next step."""
        state = self.state
        state.begin_heal()
        healed, num_received, took_s = yield do.Heal(state.sources(), state.committed)
        if num_received is None:  # other heals get further, or their ranks end
            step.heals_on = True
            return
        step.heals_on = num_received > self._num_received
        self._num_received = 0 if healed else max(self._num_received, num_received)
        self._stuck_s = 0.0 if healed or step.heals_on else self._stuck_s + took_s * (took_s >= LATE_S)
        if healed:
            state.healed()
            yield Do.REPORT_HEALED

    def _vote(self, attempt: Attempt, total: float = 0.0, measured: Sequence[float] = ()) -> Routine[bool]:
        """One round over all seats. Returns whether `attempt` passed."""
        state, seen = self.state, self.observed
        ballot = state.ballot(attempt, seen.joining == state.entered, seen.draining, seen.num_successors)
        lost = None
        try:
            yield do.StartSum("control", tuple(ballot))
        except GangError as error:
            lost = error
        if state.pending is not None:  # MANAGER-5
            try:
                yield do.MakeReady(total, tuple(measured))
            except GangError:
                state.begin_apply()
                raise
        if lost is not None:
            raise lost
        sums = yield Do.AWAIT_SUMS
        try:
            outcome = state.count(attempt, sums, seen.draining)
        except InternalError as error:
            yield do.Poison(PeerLostError(str(error)))
            raise
        self._regroups = self._regroups or outcome.regroups
        self._may_leave, self._loses_part = outcome.leaves, outcome.loses_part
        if seen.draining and not outcome.leaves and not self._has_stayed:
            self._has_stayed = True
            yield Do.WARN_STAYS
        return outcome.passed

    def _committed(self, attempt: Attempt) -> Routine[None]:
        applies = self.state.passed(attempt)
        announces = attempt.generation != self._announced
        self._announced = attempt.generation
        yield do.ReportCommitted(attempt, announces)  # MANAGER-8
        if applies:
            yield from self._apply()

    def _apply(self) -> Routine[None]:
        """MANAGER-3."""
        attempt = self.state.begin_apply()
        yield Do.APPLY
        self.state.end_apply(attempt)

    # -- from generation to generation

    def _next_generation(self) -> Routine[None]:
        """Returns once a generation is entered, or has ended before it began; or once this rank may leave, because it
        drains and has no seat.

        Raises:
            EvictedError: the record has no seat for this rank.
            StateLostError: the state is to be taken from this rank, and it has none.
            SystemExit: the job has finished. This rank has no part in what it led to: it exits with code 0.
            GangError: a fault of this rank's device has caused it (MANAGER-13).
        """
        state, error = self.state, self.observed.error
        self._regroups = True  # until it has entered
        self._may_leave = self._loses_part = False
        yield Do.LEAVE_GENERATION  # MANAGER-9
        if self._num_quick >= _NUM_AT_ONCE:  # MANAGER-17
            delay_s = min(2.0 ** (self._num_quick - _NUM_AT_ONCE), MAX_DELAY_S)
            yield do.Delay(delay_s, self._num_not_entered, _hosts(state), error)
        checkpoint = yield Do.FIND_CHECKPOINT
        report = state.report(self._local_rank, self._address, self.observed.draining)
        yield do.SendRequest(report, error, checkpoint, self._num_steps, connected=self._has_connected)
        self._has_connected = True
        while self.has_seat or not self.observed.draining or state.former is not None:
            record: Record | None = yield Do.AWAIT_RECORD
            if record is None:
                if self.observed.is_job_over:
                    raise SystemExit(0)
                continue
            seat = record.seat(state.member)
            if seat is None:
                raise EvictedError(f"generation {record.generation} has no seat for {state.member}")
            yield from self._resolve(record, seat)
            self.has_seat = seat.status != SPARE
            if self.has_seat:
                try:
                    yield do.Configure(record, seat)
                    self._regroups = False
                except GangError as failure:
                    if device_fault(failure) is not None:  # MANAGER-13
                        raise
                    self._has_connected = False
                    counts = _NUM_AT_ONCE if self._was_late else 1
                    self._num_not_entered += 1
                    self._num_quick += counts
                    self._num_own += 0 if self.observed.ended_elsewhere else counts
                return
            yield from self._keep_former(record)
            yield do.ReportSpare(record)

    def _resolve_in_step(self) -> Routine[None]:
        """As `_next_generation`, until one is entered: the script goes on with the step. Raises OperationalError: too
        many in a row were not (MANAGER-17)."""
        while True:
            yield from self._next_generation()
            if self._is_leaving:
                raise StepAborted("this rank leaves the job: it drains, and has no seat any more")
            if not self._regroups:
                return
            if self._gives_up:
                self._give_up()

    def _resolve(self, record: Record, seat: Seat) -> Routine[None]:
        """Bring this rank's state to what `record` says is committed."""
        if self.state.action_for(record) is Action.APPLY:
            yield from self._apply()
        self.state.enter(record, seat)


def _hosts(state: MemberState) -> str:
    """The hosts of the generation, for messages: this one first."""
    assert state.record is not None
    return _names(sorted(state.record.seats, key=lambda seat: seat.member != state.member))


def _names(seats: Sequence[Seat]) -> str:
    """Of their hosts."""
    hosts = list(dict.fromkeys(seat.host for seat in seats if seat.status != SPARE)) or ["no host"]
    num_more = len(hosts) - _NUM_SHOWN
    shown = [*hosts[:_NUM_SHOWN], f"{num_more} more"] if num_more > 0 else hosts
    return " and ".join([*([", ".join(shown[:-1])] if len(shown) > 1 else []), shown[-1]])


def _check_names(step: _Step, own: Sequence[float], sums: Sequence[float]) -> None:
    """MANAGER-16. `own`: this rank's numbers, whose last two are the one for the names, and 1."""
    *_, names, num_ranks = sums
    if names != own[-_NUM_NAMES] * num_ranks:
        raise InvalidOperationError(
            f"the ranks give `sums` of other names to `optim.step` in step {step.attempt.step - 1}"
        )
