"""Carries out a member's instructions, on the training thread. `protocol/member_lifecycle.py` decides.

DRIVER-1  The reduction of the gradients is finished once it has passed on the stream of the training thread, and not
    when it is queued there: a rank prepares and votes only after that. Otherwise a peer could vote, and be lost with
    its part of the sum. The rank waits for that point of the stream alone; the device divides and clips the gradients
    while the vote is under way.
DRIVER-2  A reduction that has passed counts only if its process groups have no error afterwards (DATA-5).
DRIVER-6  No gradient outlives its step: not in a step that is tried again, and not where another optimizer has taken
    the step. A sum over the ranks would count it once more for each of them, and a rank that has healed has none.
DRIVER-9  What the script does in its loop behind `with step:`, it does also for a step that is dropped, and on some
    ranks only. The small state is put back once more then. Parameters cannot be: a warning names one that has changed.
DRIVER-10  A rank that has no part of the step, because it or its replica group heals, adds neither gradients nor a
    weight, whatever its script has computed: its parameters are not those of the job. A script that takes its samples
    otherwise than from a `GlobalBatch` computes something there.
DRIVER-11  A process that the script forks has no part in the job: where it leaves a step or the loop, by an
    exception such as SystemExit, it neither ends the step nor leaves the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch

from elasticgang.errors import GangError, InvalidOperationError, LayoutError, StateLostError
from elasticgang.gang import compiled, torch_registry
from elasticgang.gang.bans import Ban
from elasticgang.layout import ModelCoordinates
from elasticgang.member.form_comparison import FormComparison
from elasticgang.member.interfaces import Checkpoints, Mover, Reducer, Rendezvous, StateServer
from elasticgang.member.seat_state import SeatState, check_is_of_seat
from elasticgang.member.step_agreement import NUM_NUMBERS, StepAgreement
from elasticgang.process.status_page import ThreadState
from elasticgang.protocol import coverage
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.coverage import Coverage
from elasticgang.protocol.form import Form
from elasticgang.protocol.member_instructions import Do, Instruction
from elasticgang.protocol.member_lifecycle import MemberLifecycle, Routine
from elasticgang.protocol.record import FormerState, Seat
from elasticgang.protocol.sample_positions import NAME, BatchShape, SamplePositions
from elasticgang.protocol.shortened import shortened
from elasticgang.testing import reached

log = logging.getLogger("elasticgang")

_T = TypeVar("_T")
_NUM_SAVES = 2  # numbers of a vote that are of checkpoints


class MemberDriver:
    """`seat_state`: what `QuorumManager.build` makes, if anything; `checkpoints`: of `QuorumManager.checkpoints`;
    `mover`: if the job has fallback layouts; `samples`: how far the job has come in its data.
    `apply`, `prepare`, `measure`: as `commit` has them."""

    def __init__(self, rendezvous: Rendezvous, state_server: StateServer, device: torch.device) -> None:
        self.lifecycle = MemberLifecycle(rendezvous.member, rendezvous.local_rank, state_server.address)
        self.lifecycle.comparison.every = rendezvous.compare_state
        self.reducers: list[Reducer] = []
        self.seat_state: SeatState | None = None
        self.checkpoints: Checkpoints | None = None
        self.mover: Mover | None = None
        self.samples = SamplePositions()
        state_server.register(None, **{NAME: self.samples})
        self._seat_reducers: list[Reducer] = []
        self._model: str | None = None
        self._rendezvous, self._state_server, self._page = rendezvous, state_server, rendezvous.page
        self._device, self._pid = device, os.getpid()
        self.comparison = FormComparison(self.lifecycle.state, state_server, self.reducers, self._page, self._is_over)
        self._agreement = StepAgreement(self.lifecycle.state, self.reducers)
        self._apply: Callable[..., None] | None = None
        self._prepare: Callable[..., None] | None = None
        self._measure: Callable[[], Sequence[float]] | None = None
        self._sums: Callable[[], list[float]] = list
        self._summed = ""  # the gang of the sums under way, as `StartSum` has it
        self._num_values = 0  # of the totals under way, before the driver's own
        self._load_forward: Callable[[], None] | None = None
        self._to_apply: Callable[[], None] = lambda: None
        self._loaded: tuple[Attempt, Coverage | None] | None = None  # what this rank has loaded for its seat
        self._has_warned = False  # DRIVER-9
        self._sized = 0  # the newest generation in which the state of optimizers was measured
        self._covered = 0  # the newest generation whose stages were found to have everything

    def commit(
        self,
        weight: float,
        apply: Callable[..., None],
        measure: Callable[[], Sequence[float]] | None,
        prepare: Callable[..., None] | None,
        numbers: Sequence[float],
        names: int,
        taken: Collection[tuple[BatchShape, int]],
        settings: Callable[[], Form],
        rates: float,
    ) -> bool:
        """`taken`: the global batches of the step, each with its first position (AGREEMENT-1). `settings`: of the
        optimizer (ALIKE-2). `rates`: stands for its learning rates (AGREEMENT-2).

        Raises:
            InvalidOperationError: as `MemberLifecycle.commit` does; as `StepAgreement.check` does; or the step has
                changed a parameter.
            MismatchError: ALIKE-2.
        """
        if self.lifecycle.state.share() is None:  # DRIVER-10
            weight = 0.0
        self.lifecycle.check_unvoted()  # before what the first vote has changed is noticed
        if (changed := self._state_server.registered.objects.changed_parameter()) is not None:
            raise InvalidOperationError(
                f"step {self.lifecycle.state.committed.step} has changed the parameter {changed} before `optim.step`: "
                "a rank that heals meanwhile would miss that, and a step that is dropped would leave it. Change "
                "parameters only after `optim.step` has returned True."
            )
        self.samples.vote(self.lifecycle.state.committed.step, [shape for shape, _ in taken])
        self._apply, self._measure, self._prepare = apply, measure, prepare
        self._agreement.begin(weight, taken, rates)
        if weight > 0:
            self._warn_of_loaded()
        try:
            with self.comparison.settings_announced(settings):
                return self.run(self.lifecycle.commit(weight, numbers, measures=measure is not None, names=names))
        finally:
            self._agreement.end()

    def run(self, routine: Routine[_T]) -> _T:
        """Carry out the instructions of `routine` to its end. A GangError of one ends the generation."""
        outcome: Any = None
        error: GangError | None = None
        while True:
            self.lifecycle.observed = self._rendezvous.observe()
            try:
                instruction = routine.send(outcome) if error is None else routine.throw(error)
            except StopIteration as end:
                result: _T = end.value
                return result
            outcome = error = None
            try:
                outcome = self._perform(instruction)
            except GangError as failure:
                self._rendezvous.poison(failure)
                error = failure

    @property
    def is_forked(self) -> bool:
        """DRIVER-11: whether this process is a child of the rank, with a copy of its driver."""
        return os.getpid() != self._pid

    def reach_step(self) -> None:
        """The script is about to get the next step."""
        if self.checkpoints is not None or self.mover is not None:
            self._state_server.registered.small.reach()

    def leave_step(self) -> None:
        """DRIVER-9. The script's code behind `with step:` has run."""
        registered = self._state_server.registered
        if not registered.small.is_again:
            return
        changed = registered.objects.changed_parameter()
        registered.restore()
        if changed is not None and not self._has_warned and self.lifecycle.state.tip is not None:  # else it heals first
            self._has_warned = True
            log.warning(
                "the script has changed the parameter %s behind `with step:`, after step %d was dropped, which is "
                "tried again: it has changed once too often, and on some ranks only, unless that was undone. Put code "
                "that must follow a committed step under `if optim.step(...)`",
                changed,
                self.lifecycle.state.committed.step,
            )

    def contribute(self) -> None:
        self.comparison.announce_trained(is_known=False)  # first: the script's own collectives may follow
        has_part = self.lifecycle.state.share() is not None
        for reducer in self.reducers:
            if not has_part:  # DRIVER-10
                for parameter in reducer.reduced:
                    parameter.grad = None
            reducer.contribute()

    def _saves(self) -> tuple[float, float]:
        """What this rank's vote says of checkpoints: it proposes a save, and has one under way."""
        checkpoints = self.checkpoints
        return (0.0, 0.0) if checkpoints is None else (float(checkpoints.proposes), float(checkpoints.is_saving))

    def _perform(self, instruction: Instruction) -> Any:
        rendezvous, state_server = self._rendezvous, self._state_server
        match instruction:
            case do.ServeState(index, tip):
                self._load_forward = None
                self._page.begin_step(index)
                if self.mover is not None and tip is not None and tip.step > 0:
                    record = self.lifecycle.state.record
                    assert record is not None
                    if record.plan.ranks[rendezvous.member] == 0:
                        self.mover.check_buffers(record.layout, record.layouts)
                state_server.begin(tip)
                self._measure_state(tip)
                if self.checkpoints is not None:
                    self.checkpoints.begin(rendezvous.member, self.lifecycle.state)
            case Do.CONTRIBUTE:
                state_server.forward_done()
                self.contribute()
            case do.StartSum(gang, values, measures):
                self._summed = gang
                if gang == "control":  # SCHEDULE-1, SAVER-6
                    values = (*values, *self._saves())
                elif gang == "root":
                    self._num_values = len(values)
                    has_all = float(all(reducer.has_all for reducer in self.reducers))  # DDP-8
                    values = (*values, *self._agreement.numbers(), has_all)
                measured = self._measure() if measures and self._measure is not None else ()
                self._sums = rendezvous.start_sum([*values, *measured])
            case Do.AWAIT_SUMS:
                sums = self._sums()
                if self._summed == "save":
                    return sums
                if self._summed == "control":
                    reached("votes_received")
                    if self.checkpoints is not None:
                        num_proposals, num_saving = sums[-_NUM_SAVES:]
                        self.checkpoints.count(num_proposals, num_saving, self.lifecycle.state.entered)
                    return sums[:-_NUM_SAVES]
                reached("totals_received")
                start, end = self._num_values, self._num_values + NUM_NUMBERS
                of_agreement, has_any_all = sums[start:end], sums[end]
                del sums[start : end + 1]
                self._agreement.check(of_agreement, has_error=sums[1] > 0)
                if not has_any_all:
                    for reducer in self.reducers:
                        reducer.leave_out_unused()
                    self._await_reduction()
                return sums
            case Do.FINISH_REDUCTION:
                for reducer in self.reducers:
                    reducer.finish()
                self._await_reduction()
            case do.MakeReady(total, measured):
                assert self._apply is not None
                self._to_apply = functools.partial(self._apply, total, *measured)
                if self._prepare is not None:
                    self._prepare(total, *measured)
            case Do.APPLY:
                self._apply_prepared()
                reached("applied")
            case do.EndStep():
                self._end_step(instruction)
            case do.Heal(sources, attempt):
                reached("healing")
                began_s = time.monotonic()
                with self._page.in_thread_state(ThreadState.WAITING):
                    healed = state_server.heal(_addresses(sources), attempt, self._is_over)
                num_received = None if state_server.awaits_turn else state_server.num_received
                return healed, num_received, time.monotonic() - began_s
            case do.FetchForward(sources, attempt):
                with self._page.in_thread_state(ThreadState.WAITING):
                    self._load_forward = state_server.fetch_after(_addresses(sources), attempt, self._is_over)
                return self._load_forward is not None
            case Do.SAVE_LAST:
                assert self.checkpoints is not None
                with self._page.paused():
                    return self.checkpoints.save_last(rendezvous.member, self.lifecycle.state)
            case Do.IS_SAVED:
                with self._page.paused():  # an object store may take long
                    return self.checkpoints is not None and self.checkpoints.has(self.lifecycle.state.committed)
            case Do.DROP_SAVE:
                assert self.checkpoints is not None
                self.checkpoints.drop()
            case Do.FIND_CHECKPOINT:
                with self._page.paused():
                    state_server.wait_for_memory()  # RESERVE-1; what the rank reports is found out afterwards
                    return None if self.checkpoints is None else self.checkpoints.newest(self.lifecycle.state)
            case do.LoadCheckpoint(ref):
                if self.checkpoints is None:
                    raise StateLostError(
                        f"the job goes back to the checkpoint of step {ref.attempt.step}; this rank has none"
                    )
                state_server.release_memory()
                with self._page.paused(), state_server.exclusive():
                    is_loaded = self.checkpoints.load(ref, self.lifecycle.state)
                self._loaded = (ref.attempt, self.checkpoints.coverage) if is_loaded else None
                state_server.registered.small.forget()
                return is_loaded
            case do.Poison(error):
                rendezvous.poison(error)
            case Do.IS_SAVE_DUE:
                return self.checkpoints is not None and self.checkpoints.is_due(self.lifecycle.state)
            case Do.DIGEST_STATE:
                return state_server.digest_state(self._page.beat)
            case do.SumState(values):
                sums = rendezvous.start_sum(values)()
                reached("states_compared")
                return sums
            case do.BuildSeat(coordinates, layout):
                self._build_seat(ModelCoordinates(*coordinates), layout)
                self.comparison.compare_state((layout, *coordinates))
            case do.KeepFormer(former, is_dropped):
                self._keep_former(former, is_dropped=is_dropped)
            case do.Move():
                state_server.release_memory()
                return self._move(instruction)
            case do.ReportSpare():
                state_server.release_memory()
                rendezvous.perform(instruction)
            case Do.REPORT_HEALED:
                rendezvous.perform(instruction)
                reached("healed")
            case do.ReportCommitted():
                rendezvous.perform(instruction)
                reached("commit_recorded")
            case do.Configure():
                if self.lifecycle.state.tip is not None and self.lifecycle.state.prepares_digests:
                    state_server.prepare(self.lifecycle.state.tip)  # SNAPSHOT-4
                rendezvous.perform(instruction)
                if compiled.drop_stale():
                    self._page.forget_steps()  # the next one may take long: it compiles
            case Do.WARN_STAYS:
                log.warning(
                    "this rank is to go, but stays until another has healed the state that it alone holds: one that "
                    "starts, or spares once they fill a replica group; a second SIGTERM ends it now, and the state "
                    "with it"
                )
            case do.SendRequest():
                if self._model is None:  # a module may change once it is used
                    self._model = "" if self.seat_state is not None else state_server.registered.objects.model
                saves = ""
                if rendezvous.compare_state and self.checkpoints is not None:  # COMPARE-1
                    saves = self.checkpoints.schedule
                rendezvous.perform(dataclasses.replace(instruction, model=self._model, saves=saves))
            case do.SendLeft():
                reached("leaving")
                if self.checkpoints is not None:
                    with self._page.paused():
                        self._close(self.checkpoints)
                rendezvous.perform(instruction)
            case Do.CLOSE:
                rendezvous.perform(instruction)
                state_server.close()
            case _:
                return rendezvous.perform(instruction)
        return None

    def _close(self, checkpoints: Checkpoints) -> None:
        """This rank leaves: end its saves, after the last one, and tell what is not saved."""
        state = self.lifecycle.state
        may_save = self.lifecycle.comparison.has_passed  # COMPARE-3
        is_skipped = not may_save and state.tip == state.committed and checkpoints.is_due(state)
        if is_skipped and state.record is not None and state.record.plan.ranks.get(state.member) == 0:
            log.warning(
                "the checkpoint of step %d is not saved, because its state was not compared (--compare-state): the "
                "script has left its loop. `manager.leave()` would compare and save it",
                state.committed.step,
            )
        checkpoints.close(self._rendezvous.member, state, saves=may_save)
        if self.lifecycle.has_failed_to_save and not checkpoints.has(state.committed):
            self._rendezvous.tell_unsaved(state.committed.step)

    def _measure_state(self, tip: Attempt | None) -> None:
        """Once in each generation, after its first commit, for which the others of a dead rank wait: a rank that is
        restarted reserves as much memory (RESERVE-3)."""
        if tip is not None and tip.step > 0 and tip.generation == self.lifecycle.state.entered != self._sized:
            self._sized = tip.generation
            self._page.set_optimizer_bytes(self._state_server.registered.objects.optimizer_bytes)

    def _await_reduction(self) -> None:
        """DRIVER-1, DRIVER-2. An abort of the generation ends what it waits for. The time counts for the hang detector
        (HANG-3), because a device can hang. A fault of the device is raised here."""
        if self._device.type == "cuda":
            reduced = torch.cuda.Event()  # type: ignore[no-untyped-call]
            reduced.record(torch.cuda.current_stream(self._device))
            reduced.synchronize()
        self._rendezvous.check_reduction()

    def _is_over(self) -> bool:
        return self._rendezvous.error is not None

    def _apply_prepared(self) -> None:
        with contextlib.ExitStack() as held:
            with self._page.in_thread_state(ThreadState.WAITING):
                held.enter_context(self._state_server.exclusive())
            held.enter_context(self._page.in_thread_state(ThreadState.USER_CODE))
            if self._load_forward is not None:
                self._load_forward()
            held.enter_context(self._banned(Ban.APPLY))  # RULE-10
            self._to_apply()

    @contextlib.contextmanager
    def _banned(self, ban: Ban) -> Iterator[None]:
        former = self._rendezvous.ban(ban)
        try:
            yield
        finally:
            self._rendezvous.ban(former)

    def _end_step(self, end: do.EndStep) -> None:
        if end.is_computed:
            self._page.step_done()
        if end.is_dropped:
            for reducer in self.reducers:
                reducer.drop(rebuild=end.rebuilds)
        self._state_server.registered.objects.drop_gradients()  # DRIVER-6
        if end.restores:
            self._state_server.registered.restore()
        else:
            self._state_server.registered.small.forget()

    def _keep_former(self, former: FormerState | None, *, is_dropped: bool) -> None:
        mover, record = self.mover, self.lifecycle.state.record
        if mover is None:
            return
        if former is None:
            mover.drop()
            return
        assert record is not None
        mover.keep(former, record.layouts[former.layout], is_dropped=is_dropped)

    def _move(self, move: do.Move) -> bool:
        state = self.lifecycle.state
        if self.mover is None or state.record is None:
            raise StateLostError(f"this rank has no peers to fetch the state of step {move.attempt.step} from")
        record = state.record
        seat = record.layout, record.model_coordinates(state.member)
        rank = record.plan.ranks[state.member]
        with self._page.in_thread_state(ThreadState.WAITING):
            is_loaded = self.mover.move(move.holders, move.layout, move.attempt, seat, rank, self._is_over)
        self._loaded = (move.attempt, self.mover.coverage) if is_loaded else None
        self._state_server.registered.small.forget()
        if is_loaded:
            log.info(
                "rank %d has its part of the layout (%s), made of (%s)", rank, record.layout.sizes, move.layout.sizes
            )
        return is_loaded

    def check_coverage(self) -> None:
        """COVERAGE-1: of the stages of this generation, if they have taken the state of others. Every rank calls it
        before its first vote in a generation.

        Raises:
            LayoutError: a part of the state is in no stage.
            GangError: the generation has ended.
        """
        state = self.lifecycle.state
        record, layout = state.record, state.record.layout if state.record is not None else None
        if record is None or layout is None or self._covered == state.entered:
            return
        if layout.pp > 1:  # in each generation: the one that has loaded may have ended before its first step
            known = self._loaded[1] if self._loaded is not None and self._loaded[0] == state.tip else None
            stage = record.model_coordinates(state.member)[0]
            start = self._rendezvous.start_sum
            num = coverage.num_names(start(coverage.first_round(known, stage, layout.pp))())
            if num and (why := coverage.left_out(known, layout, start(coverage.second_round(known, num))())):
                raise LayoutError(why)
        self._covered = state.entered

    def _build_seat(self, part: ModelCoordinates, layout: int) -> None:
        """Between steps alone, so that a step's objects are the same ones throughout."""
        built = self.seat_state
        if built is None or built.is_for(part, layout):
            return
        self._page.forget_steps()
        self._loaded = None
        with self._state_server.exclusive():  # no healer reads what goes
            self.comparison.forget()
            self._state_server.unregister(built.clear())
            for reducer in self._seat_reducers:
                reducer.close()
                self.reducers.remove(reducer)
        torch_registry.forget_former_seat()
        others = list(self.reducers)
        with self._page.paused(), self._banned(Ban.BUILD):
            objects = built.make(part, layout)
        check_is_of_seat(objects, self._rendezvous.gangs)
        self._seat_reducers = [reducer for reducer in self.reducers if reducer not in others]
        self._state_server.register(built.name_of, **objects)

    def _warn_of_loaded(self) -> None:
        """LOADED-1, LOADED-2, by the first rank of each stage."""
        state = self.lifecycle.state
        names, settings = self._state_server.registered.unlike_loaded()
        if state.record is None or state.record.model_coordinates(state.member)[1:] != (0, 0) or state.first_of_part():
            return
        if names:
            log.warning(
                "%s did not require gradients in the state that was loaded, but in each step since. If they are to "
                "stay frozen, freeze them by `if step.index >= N:`, because step N is not run again",
                shortened(names, 1),
            )
        if settings:
            log.warning(
                "%s: the optimizer goes on with the settings of the state that was loaded. If the script's are meant, "
                "set them in each step before `optim.step`; a learning rate by `group['lr'] = lr` for each of "
                "`optim.param_groups`, also beside a schedule of torch, which goes on as it was saved",
                shortened(settings, 3),
            )


def _addresses(sources: Sequence[Seat]) -> list[str]:
    return [seat.address for seat in sources]
