"""The routines of a member: which instructions, in which order, and what follows from each outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest

from elasticgang.errors import (
    GangError,
    InternalError,
    InvalidOperationError,
    OperationalError,
    PeerLostError,
    StepAborted,
    UnhealedError,
)
from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_instructions import AbortNotice, Do, Instruction, Observed
from elasticgang.protocol.member_lifecycle import MemberLifecycle, Next, Routine
from elasticgang.protocol.record import ACTIVE, LEARNER, SPARE, Record, Seat

T = TypeVar("T")
LOST = PeerLostError("a peer is lost")
NUM_STEPS = 100
_NUM_BEFORE_COUNTS = 7  # numbers of a vote


def record(status: str, generation: int = 1, committed: Attempt | None = None, with_seat: bool = True) -> Record:
    """Of the member a0 with that status, and the active member b0."""
    statuses = ({"a0": status} if with_seat else {}) | {"b0": ACTIVE}
    planned = plan([Member(name, name[0]) for name in statuses if statuses[name] != SPARE], ParallelLayout())
    seats = tuple(Seat(name, name[0], name[0], 0, f"{name}:1", statuses[name]) for name in statuses)
    return Record(
        "job", generation, "", ParallelLayout(), planned, seats, ("a", "b"), committed or Attempt(0, generation)
    )


@dataclass
class Driver:
    """Carries out nothing. `outcomes` of `run` has the outcome of an instruction, or the error that it raises, by its
    name; the others succeed, and both ranks send the same to a sum, but for the counts of a vote, which are of a0
    alone."""

    lifecycle: MemberLifecycle = field(default_factory=lambda: MemberLifecycle("a0", 0, "a0:1"))
    records: list[Record | None] = field(default_factory=list)
    done: list[Instruction] = field(default_factory=list)
    connecting_s: float = 0.0
    has_timed_out: bool = False
    ended_elsewhere: bool = False

    @property
    def names(self) -> list[str]:
        return [name_of(instruction) for instruction in self.done]

    def run(self, routine: Routine[T], outcomes: Mapping[str, Any] | None = None) -> T:
        self.done, given, gang, values = [], outcomes or {}, "", tuple[float, ...]()
        resume: Callable[[], Instruction] = partial(next, routine)
        while True:
            try:
                instruction = resume()
            except StopIteration as end:
                result: T = end.value
                return result
            self.done.append(instruction)
            if isinstance(instruction, do.StartSum):
                gang, values = f" {instruction.gang}", instruction.values
            name = name_of(instruction)
            name += gang if name in ("StartSum", "AWAIT_SUMS") else ""
            outcome = given.get(name)
            if isinstance(outcome, GangError):
                self.lifecycle.observed = Observed(
                    outcome,
                    connecting_s=self.connecting_s,
                    has_timed_out=self.has_timed_out,
                    ended_elsewhere=self.ended_elsewhere,
                )
                resume = partial(routine.throw, outcome)
                continue
            if isinstance(outcome, Exception):
                routine.close()
                raise outcome
            match instruction:
                case do.Heal() if outcome is None:
                    outcome = (True, 0, 0.0)
                case do.FetchForward() if outcome is None:
                    outcome = True
                case Do.AWAIT_SUMS if outcome is None:
                    num_alike = _NUM_BEFORE_COUNTS if gang == " control" else None
                    outcome = [*(2 * value for value in values[:num_alike]), *values[len(values[:num_alike]) :]]
                case Do.AWAIT_RECORD:
                    outcome = self.records.pop(0)
                case do.Poison(error):
                    self.lifecycle.observed = Observed(error=error, draining=self.lifecycle.observed.draining)
                case Do.LEAVE_GENERATION:
                    self.lifecycle.observed = Observed(draining=self.lifecycle.observed.draining)
                case _:
                    pass
            resume = partial(routine.send, outcome)

    def enter(self, *records: Record) -> None:
        self.records += records
        assert self.run(self.lifecycle.pass_boundary(NUM_STEPS)) is Next.REGROUP

    def begin(self) -> None:
        assert self.run(self.lifecycle.pass_boundary(NUM_STEPS)) is Next.STEP
        self.run(self.lifecycle.begin())

    def step(self, outcomes: Mapping[str, Any] | None = None) -> bool:
        """One step as a script takes it: the error of a lost step is dropped."""
        self.begin()
        error: Exception | None = None
        committed = False
        try:
            committed = self.run(self.lifecycle.commit(1.0, measures=False), outcomes)
        except GangError as aborted:
            error = aborted
        done = self.done
        assert self.run(self.lifecycle.end(error)) is (error is not None)
        self.done = done
        return committed


def name_of(instruction: Instruction) -> str:
    return instruction.name if isinstance(instruction, Do) else type(instruction).__name__


def active(generation: int = 1) -> Driver:
    driver = Driver()
    driver.enter(record(ACTIVE, generation))
    return driver


def learner() -> Driver:
    driver = Driver()
    driver.enter(record(LEARNER, committed=Attempt(3, 1)))
    return driver


VOTED = ["StartSum", "MakeReady", "AWAIT_SUMS"]
APPLIED = ["ReportCommitted", "APPLY"]
REQUESTED = ["LEAVE_GENERATION", "FIND_CHECKPOINT", "SendRequest", "AWAIT_RECORD"]


# MANAGER-9
def test_a_member_requests_after_it_has_left_and_enters_what_the_record_says() -> None:
    driver = active()
    assert driver.names == [*REQUESTED, "Configure"]
    assert driver.lifecycle.state.tip == Attempt(0, 1)


# MANAGER-8
def test_a_step_reduces_then_votes_then_reports_then_applies() -> None:
    driver = active()
    assert driver.step()
    assert driver.names == ["CONTRIBUTE", "StartSum", "FINISH_REDUCTION", "AWAIT_SUMS", *VOTED, *APPLIED]
    assert driver.lifecycle.state.tip == Attempt(1, 1)


def test_totals_that_measure_the_gradients_wait_for_them() -> None:
    driver = active()
    driver.begin()
    sums = {"AWAIT_SUMS root": [4.0, 0.0, 9.0]}
    assert driver.run(driver.lifecycle.commit(2.0, measures=True), sums)
    assert driver.names == ["CONTRIBUTE", "FINISH_REDUCTION", "StartSum", "AWAIT_SUMS", *VOTED, *APPLIED]
    assert driver.done[2] == do.StartSum("root", (2.0, 0.0), measures=True)
    assert do.MakeReady(4.0, (9.0,)) in driver.done


# MANAGER-15
def test_numbers_of_the_script_are_summed_with_the_totals() -> None:
    driver = active()
    driver.begin()
    sums = {"AWAIT_SUMS root": [4.0, 0.0, 7.0, -1.0, 10.0, 2.0, 9.0]}
    assert driver.run(driver.lifecycle.commit(2.0, (3.0, -1.0), measures=True, names=5), sums)
    assert driver.done[2] == do.StartSum("root", (2.0, 0.0, 3.0, -1.0, 5.0, 1.0), measures=True)
    assert do.MakeReady(4.0, (9.0,)) in driver.done
    assert driver.lifecycle.sums == (7.0, -1.0)
    driver.run(driver.lifecycle.end(None))
    assert not driver.lifecycle.sums


# MANAGER-15
def test_a_learner_adds_zeros() -> None:
    driver = learner()
    driver.begin()
    sums = {"AWAIT_SUMS root": [4.0, 0.0, 7.0, 8.0, 10.0, 2.0]}
    driver.run(driver.lifecycle.commit(2.0, (3.0, 5.0), measures=False, names=5), sums)
    assert do.StartSum("root", (0.0,) * 6) in driver.done


# MANAGER-16
def test_other_names_of_numbers_are_an_error_before_anything_is_prepared() -> None:
    driver = active()
    driver.begin()
    sums = {"AWAIT_SUMS root": [4.0, 0.0, 7.0, 11.0, 2.0]}
    with pytest.raises(InvalidOperationError, match=r"the ranks give `sums` of other names to `optim\.step` in step 0"):
        driver.run(driver.lifecycle.commit(2.0, (3.0,), measures=False, names=5), sums)
    assert driver.lifecycle.state.pending is None


# MANAGER-16
def test_the_names_do_not_matter_in_a_step_that_has_failed_on_a_rank() -> None:
    driver = active()
    driver.begin()
    sums = {"AWAIT_SUMS root": [4.0, 1.0, 7.0, 11.0, 2.0]}
    assert not driver.run(driver.lifecycle.commit(2.0, (3.0,), measures=False, names=5), sums)


def test_the_agent_is_sent_the_first_commit_of_each_generation() -> None:
    driver = active()
    reports = []
    for generation in (1, 2):
        if generation == 2:
            assert not driver.step({"AWAIT_SUMS root": LOST})
            driver.enter(record(ACTIVE, 2, Attempt(2, 1)))
        for _ in range(2):
            assert driver.step()
            reports += [each for each in driver.done if isinstance(each, do.ReportCommitted)]
    assert [report.announces for report in reports] == [True, False, True, False]


# MANAGER-6
@pytest.mark.parametrize("failed", [1.0, 2.0])
def test_nobody_prepares_or_votes_when_a_rank_failed(failed: float) -> None:
    driver = active()
    assert not driver.step({"AWAIT_SUMS root": [2.0, failed]})
    assert driver.names == ["CONTRIBUTE", "StartSum", "FINISH_REDUCTION", "AWAIT_SUMS"]
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.STEP


def test_a_reported_error_fails_this_step_and_no_other() -> None:
    driver = active()
    for fails in (1.0, 0.0):
        driver.begin()
        if fails:
            driver.lifecycle.report_error()
        driver.run(driver.lifecycle.commit(1.0, measures=False))
        assert driver.done[1] == do.StartSum("root", (1.0, fails))
        driver.run(driver.lifecycle.end(None))


@pytest.mark.parametrize(
    ("lost_at", "done"),
    [
        ("StartSum root", ["CONTRIBUTE", "StartSum", "FINISH_REDUCTION"]),
        ("AWAIT_SUMS root", ["CONTRIBUTE", "StartSum", "FINISH_REDUCTION", "AWAIT_SUMS"]),
    ],
)
def test_a_step_lost_before_the_vote_is_dropped(lost_at: str, done: list[str]) -> None:
    driver = active()
    assert not driver.step({lost_at: LOST})
    assert driver.names == done
    assert driver.lifecycle.state.pending is None
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP


# MANAGER-7
def test_a_learner_heals_and_gets_what_forward_changed_before_it_votes() -> None:
    driver = learner()
    assert driver.step({"AWAIT_SUMS root": [1.0, 0.0]})
    heals = ["CONTRIBUTE", "Heal", "REPORT_HEALED", "StartSum", "FINISH_REDUCTION", "FetchForward", "AWAIT_SUMS"]
    assert driver.names == [*heals, *VOTED, *APPLIED]
    assert isinstance(heal := driver.done[1], do.Heal)
    assert [seat.member for seat in heal.sources] == ["b0"]
    assert driver.lifecycle.state.tip == Attempt(4, 1)


def test_a_learner_without_what_forward_changed_prepares_nothing() -> None:
    driver = learner()
    assert not driver.step({"FetchForward": False, "AWAIT_SUMS root": [1.0, 0.0]})
    assert driver.names[-3:] == ["StartSum", "AWAIT_SUMS", "ReportCommitted"]
    assert driver.lifecycle.state.tip is None


# MANAGER-2
@pytest.mark.parametrize("lost_at", ["StartSum control", "AWAIT_SUMS control"])
@pytest.mark.parametrize("rolls_forward", [True, False])
def test_a_vote_that_fails_leaves_a_ready_attempt_to_the_next_record(lost_at: str, rolls_forward: bool) -> None:
    driver = active()
    driver.records = [record(ACTIVE, 2, Attempt(1, 1) if rolls_forward else Attempt(0, 1))]
    assert driver.step({lost_at: LOST}) is rolls_forward
    vote = VOTED[: 2 + (lost_at == "AWAIT_SUMS control")]
    assert driver.names[4:] == [*vote, *REQUESTED, *["APPLY"] * rolls_forward, "Configure"]
    (request,) = (each for each in driver.done if isinstance(each, do.SendRequest))
    assert (request.report.tip, request.report.pending, request.error) == (Attempt(0, 1), Attempt(1, 1), LOST)
    assert driver.lifecycle.state.tip == Attempt(int(rolls_forward), 1)


def test_a_step_in_doubt_ends_only_in_a_generation_that_is_entered() -> None:
    driver = active()
    driver.begin()
    driver.records = [record(ACTIVE, 2, Attempt(1, 1)), record(ACTIVE, 3, Attempt(1, 1))]
    outcomes = {"AWAIT_SUMS control": LOST, "Configure": LOST}
    routine = driver.lifecycle.commit(1.0, measures=False)
    with pytest.raises(IndexError):  # there is no third record
        driver.run(routine, outcomes)
    assert driver.names[-11:] == ["APPLY", "Configure", *REQUESTED, "Configure", *REQUESTED]


def test_a_spare_that_drains_leaves_the_step_that_it_resolved() -> None:
    driver = active()
    driver.begin()
    driver.records = [record(SPARE, 2, Attempt(1, 1)), None]
    routine = driver.lifecycle.commit(1.0, measures=False)
    with pytest.raises(StepAborted) as caught:
        driver.run(observing(routine, do.ReportSpare, driver, Observed(draining=True)), {"AWAIT_SUMS control": LOST})
    assert driver.run(driver.lifecycle.end(caught.value))
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.LEAVE


def observing(routine: Routine[T], kind: type, driver: Driver, observed: Observed) -> Routine[T]:
    """`routine`, which observes that after an instruction of that kind."""
    outcome: Any = None
    error: GangError | None = None
    while True:
        try:
            instruction = routine.send(outcome) if error is None else routine.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        error = None
        try:
            outcome = yield instruction
        except GangError as failure:
            error = failure
        if isinstance(instruction, kind):
            driver.lifecycle.observed = observed


def test_an_exception_that_leaves_the_vote_tears_the_state() -> None:
    driver = active()
    driver.begin()
    with pytest.raises(MemoryError):
        driver.run(driver.lifecycle.commit(1.0, measures=False), {"MakeReady": MemoryError()})
    assert not driver.run(driver.lifecycle.end(MemoryError()))
    assert [*driver.names] == ["EndStep", "Poison"]
    state = driver.lifecycle.state
    assert (state.tip, state.pending, state.torn) == (None, None, True)


def test_gradients_that_a_lost_peer_left_unready_are_not_applied() -> None:
    driver = active()
    assert not driver.step({"MakeReady": LOST})
    assert driver.names[-2:] == ["StartSum", "MakeReady"]
    assert (driver.lifecycle.state.pending, driver.lifecycle.state.torn) == (None, True)


def test_ranks_that_vote_on_different_attempts_end_the_generation() -> None:
    driver = active()
    driver.begin()
    with pytest.raises(InternalError, match="the ranks voted on different attempts"):
        driver.run(driver.lifecycle.commit(1.0, measures=False), {"AWAIT_SUMS control": [0.0, 0, 0, 2, 3, 2, 0, 0]})
    assert driver.names[-1] == "Poison"


@pytest.mark.parametrize(
    ("error", "is_over", "drops", "restores"),
    [
        (None, True, False, True),
        (LOST, False, True, True),
        (ValueError(), True, True, True),
        (ValueError(), False, False, True),
        (OperationalError(), True, False, False),
        (KeyboardInterrupt(), True, False, False),
    ],
)
def test_an_error_is_dropped_with_a_lost_step(
    error: BaseException | None, is_over: bool, drops: bool, restores: bool
) -> None:
    driver = active()
    driver.begin()
    driver.lifecycle.observed = Observed(error=LOST if is_over else None)
    assert driver.run(driver.lifecycle.end(error)) is drops
    assert driver.done[0] == do.EndStep(
        is_dropped=True, rebuilds=error is not None, restores=restores, is_computed=error is None
    )
    assert driver.names[1:] == ["Poison"] * (error is LOST)


# MANAGER-19
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_script_that_goes_on_after_an_exception_has_left_a_step_ends_the_generation(is_committed: bool) -> None:
    driver = active()
    driver.begin()
    if is_committed:
        assert driver.run(driver.lifecycle.commit(1.0, measures=False))
    assert not driver.run(driver.lifecycle.end(ValueError()))
    assert driver.names == ["EndStep"]  # the script may end
    driver.records.append(record(ACTIVE, generation=2))
    what = driver.run(driver.lifecycle.pass_boundary(NUM_STEPS))
    if is_committed:
        assert (what, driver.names) == (Next.STEP, ["BuildSeat"])
        return
    assert what is Next.REGROUP
    assert driver.names[:2] == ["Poison", "LEAVE_GENERATION"]
    (request,) = [each for each in driver.done if isinstance(each, do.SendRequest)]
    assert isinstance(request.error, StepAborted)
    assert str(request.error) == "an exception has left step 0, and the script goes on"
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.STEP


# MANAGER-13
@pytest.mark.parametrize("is_over", [False, True])
def test_a_fault_of_the_device_is_not_dropped_with_a_lost_step(is_over: bool) -> None:
    fault = RuntimeError("CUDA error: unspecified launch failure")
    for error in (fault, GangError("all_reduce failed")):
        error.__cause__ = None if error is fault else fault
        driver = active()
        driver.begin()
        driver.lifecycle.observed = Observed(error=LOST if is_over else None)
        assert not driver.run(driver.lifecycle.end(error))
        assert driver.names == ["EndStep"]


# MANAGER-13
def test_a_fault_of_the_device_is_not_dropped_where_a_generation_cannot_be_entered() -> None:
    """Otherwise the rank would end each generation of the job."""
    failure = PeerLostError("could not configure the process group of dp")
    failure.__cause__ = RuntimeError("CUDA error: device lost")
    driver = Driver(records=[record(ACTIVE)])
    with pytest.raises(PeerLostError) as raised:
        driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), {"Configure": failure})
    assert raised.value is failure


def test_misuse_is_refused() -> None:
    driver = active()
    driver.begin()
    with pytest.raises(InvalidOperationError, match="step 0 is still under way"):
        driver.run(driver.lifecycle.begin())
    with pytest.raises(InvalidOperationError, match="the weights of step 0 sum to 0 over all ranks"):
        driver.run(driver.lifecycle.commit(0.0, measures=False))
    assert driver.lifecycle.state.pending is None
    with pytest.raises(InvalidOperationError, match="step 0 was voted on before"):
        driver.run(driver.lifecycle.commit(1.0, measures=False))
    driver.run(driver.lifecycle.end(None))
    driver.begin()
    with pytest.raises(
        InvalidOperationError, match=r"step 0 ended without `optim\.step` of an `elasticgang\.Optimizer`"
    ):
        driver.run(driver.lifecycle.end(None))


def test_it_gives_up_when_too_many_steps_in_a_row_are_lost() -> None:
    driver = active()
    driver.lifecycle.max_lost_steps = 3
    lost = {"AWAIT_SUMS root": [2.0, 1.0]}
    for outcomes in (lost, lost, {}, lost, lost, lost):
        assert driver.step(outcomes) is not bool(outcomes)
    with pytest.raises(OperationalError, match="step 1 was lost 3 times in a row; the last: None"):
        driver.run(driver.lifecycle.pass_boundary(NUM_STEPS))


def test_steps_in_which_a_heal_gets_on_are_not_counted_as_lost() -> None:
    driver = learner()
    driver.lifecycle.max_lost_steps = 2
    for num_received in (5, 6, 6, 6):
        assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.STEP
        driver.step({"Heal": (False, num_received, 60.0), "AWAIT_SUMS root": [1.0, 1.0]})
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.GIVE_UP


# MANAGER-21
def test_a_rank_that_waits_for_its_turn_neither_loses_steps_nor_ends() -> None:
    driver = learner()
    driver.lifecycle.max_lost_steps = 2
    heals: list[tuple[int | None, float]] = [(5, 60.0), (5, 200.0), *[(None, 60.0)] * 5]
    for num_received, took_s in heals:
        driver.step({"Heal": (False, num_received, took_s), "AWAIT_SUMS root": [1.0, 1.0]})
        assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.STEP
    driver.step({"Heal": (False, 5, 60.0), "AWAIT_SUMS root": [1.0, 1.0]})
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.GIVE_UP


# MANAGER-21
def test_a_rank_ends_when_the_others_have_waited_for_long_for_heals_that_got_no_further() -> None:
    driver = learner()
    took_s = [(5, 60.0), (5, 60.0), (5, 60.0), (5, 0.1), (6, 60.0), (4, 119.0), (6, 4.9), (6, 119.0), (6, 30.0)]
    for num_received, each_s in took_s:
        assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.STEP
        assert not driver.step({"Heal": (False, num_received, each_s), "AWAIT_SUMS root": [1.0, 1.0]})
    why = "nothing more of the training state of step 3 has come from the ranks of b in 268 s"
    with pytest.raises(UnhealedError, match=why):
        driver.run(driver.lifecycle.pass_boundary(NUM_STEPS))


def fail_to_enter(driver: Driver, generation: int, status: str = ACTIVE, committed: Attempt | None = None) -> None:
    driver.records = [record(status, generation, committed)]
    driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), {"Configure": PeerLostError("no route")})


# MANAGER-17
def test_it_gives_up_when_too_many_generations_in_a_row_are_not_connected() -> None:
    driver = active()
    driver.lifecycle.max_lost_steps = 4
    assert driver.step()
    assert not driver.step({"AWAIT_SUMS root": LOST})
    for generation in (2, 3, 4):
        assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP
        fail_to_enter(driver, generation, committed=Attempt(1, 1))
    told = "step 1 was lost 4 times in a row, 3 times because the ranks of a and b did not connect; the last: no route"
    with pytest.raises(OperationalError, match=told):
        driver.run(driver.lifecycle.pass_boundary(NUM_STEPS))


# MANAGER-17
def test_a_rank_without_state_gives_up_sooner_on_generations_that_are_not_connected() -> None:
    driver = Driver()
    driver.lifecycle.max_not_entered = 2
    for generation in (1, 2):
        assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP
        fail_to_enter(driver, generation, LEARNER, Attempt(3, 1))
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.GIVE_UP


# MANAGER-17
def test_a_rank_without_state_does_not_give_up_on_what_other_hosts_end() -> None:
    driver, own = Driver(), Driver()
    for each in (driver, own):
        each.lifecycle.max_not_entered, each.connecting_s = 10, 6.0  # each counts for 5
    driver.ended_elsewhere = True
    for generation in (1, 2, 3, 4):
        assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP
        fail_to_enter(driver, generation, LEARNER, Attempt(3, 1))
    driver.ended_elsewhere = False
    for each, first in ((driver, 5), (own, 1)):
        assert each.lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP
        fail_to_enter(each, first, LEARNER, Attempt(3, 1))
        assert each.lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP
        fail_to_enter(each, first + 1, LEARNER, Attempt(3, 1))
        assert each.lifecycle.at_boundary(NUM_STEPS) is Next.GIVE_UP


# MANAGER-17
def test_generations_that_take_long_to_be_not_connected_count_for_several() -> None:
    """As over a path on which a firewall drops what is sent."""
    driver, delays = Driver(), []
    for generation, driver.connecting_s in enumerate((0.1, 65.0, 65.0, 65.0, 0.1, 0.1, 0.1), 1):
        assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP
        fail_to_enter(driver, generation, LEARNER, Attempt(3, 1))
        delays.append([(each.num, each.delay_s) for each in driver.done if isinstance(each, do.Delay)])
    assert delays == [[], [], [(2, 2.0)], [(3, 5.0)], [(4, 5.0)], [(5, 5.0)], [(6, 5.0)]]
    fail_to_enter(driver, 8, LEARNER, Attempt(3, 1))
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.GIVE_UP


# MANAGER-17
def test_generations_that_end_by_the_time_limit_count_for_several_however_short_it_is() -> None:
    driver = Driver(connecting_s=0.5, has_timed_out=True)
    for generation in range(1, 5):
        assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP
        fail_to_enter(driver, generation, LEARNER, Attempt(3, 1))
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.GIVE_UP


# MANAGER-17
def test_a_committed_step_forgets_the_generations_that_were_not_connected() -> None:
    driver = active()
    driver.lifecycle.max_lost_steps = 3
    for generation in (2, 5):
        assert not driver.step({"AWAIT_SUMS root": LOST})
        fail_to_enter(driver, generation)
        driver.enter(record(ACTIVE, generation + 1))
        assert driver.step()


# MANAGER-17
def test_it_waits_before_it_requests_after_some_generations_that_were_not_connected() -> None:
    driver, delays = Driver(), []
    for generation in range(1, 11):
        fail_to_enter(driver, generation)
        delays.append([each.delay_s for each in driver.done if isinstance(each, do.Delay)])
        assert driver.names[0] == "LEAVE_GENERATION"
    assert delays == [[]] * 5 + [[1.0], [2.0], [4.0], [5.0], [5.0]]


# MANAGER-17
def test_a_step_in_doubt_does_not_wait_for_ever_for_a_generation_that_is_connected() -> None:
    driver = active()
    driver.lifecycle.max_lost_steps = 3
    driver.begin()
    driver.records = [record(ACTIVE, generation, Attempt(1, 1)) for generation in (2, 3, 4)]
    with pytest.raises(OperationalError, match="step 1 was lost 3 times in a row, 3 times because the ranks of a and"):
        driver.run(driver.lifecycle.commit(1.0, measures=False), {"AWAIT_SUMS control": LOST, "Configure": LOST})


# MANAGER-18
def test_a_rank_whose_script_takes_fewer_steps_than_the_job_has_ends_alone() -> None:
    driver = learner()
    assert driver.lifecycle.at_boundary(3) is Next.REGROUP  # the job may end with this step
    told = r"the job has committed 3 steps, but this script takes 2: give `manager\.steps` the number that the job has"
    with pytest.raises(OperationalError, match=told):
        driver.run(driver.lifecycle.pass_boundary(2))
    assert not driver.done


# NEXT-2
def test_a_request_says_how_many_steps_the_script_takes() -> None:
    driver = active()
    (request,) = [each for each in driver.done if isinstance(each, do.SendRequest)]
    assert request.num_steps == NUM_STEPS


# MANAGER-10
def test_it_leaves_after_a_vote_that_grants_it_and_tells_whether_its_script_asked() -> None:
    driver = active()
    driver.lifecycle.observed = Observed(draining=True)
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.STEP
    assert driver.step({"AWAIT_SUMS control": [0.0, 0, 0, 2, 2, 2, 0, 1]})
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.LEAVE
    driver.run(driver.lifecycle.leave(NUM_STEPS, returned=True))
    assert driver.done == [do.SendLeft(finished=False, in_order=True, by_script=True, num_steps=NUM_STEPS), Do.CLOSE]
    driver.run(driver.lifecycle.leave(NUM_STEPS, returned=True))
    assert driver.done == []


def test_it_tells_that_an_exception_has_left_the_loop() -> None:
    driver = active()
    driver.run(driver.lifecycle.begin())
    assert driver.run(driver.lifecycle.end(ValueError())) is False
    driver.run(driver.lifecycle.leave(NUM_STEPS, returned=False))
    left = do.SendLeft(finished=False, in_order=False, by_script=False, num_steps=NUM_STEPS, raised=True)
    assert driver.done == [left, Do.CLOSE]


def test_a_signal_ends_the_process_after_the_loop_unless_all_steps_are_done() -> None:
    driver = active()
    driver.lifecycle.observed = Observed(draining=True, by_signal=True)
    with pytest.raises(SystemExit) as caught:
        driver.run(driver.lifecycle.leave(NUM_STEPS, returned=True))
    assert caught.value.code == 0
    assert driver.done[0] == do.SendLeft(finished=False, in_order=False, by_script=False, num_steps=NUM_STEPS)
    done = active()
    done.lifecycle.observed = Observed(draining=True, by_signal=True)
    done.run(done.lifecycle.leave(0, returned=True))


def test_one_that_was_asked_to_leave_before_it_requested_does_not_request() -> None:
    driver = Driver()
    driver.lifecycle.observed = Observed(draining=True)
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.LEAVE


def test_a_spare_exits_with_code_0_when_the_job_is_over() -> None:
    driver = Driver(records=[record(SPARE), None])
    routine = driver.lifecycle.pass_boundary(NUM_STEPS)
    with pytest.raises(SystemExit) as caught:
        driver.run(observing(routine, do.ReportSpare, driver, Observed(is_job_over=True)))
    assert caught.value.code == 0
    driver.run(driver.lifecycle.leave(NUM_STEPS, returned=False))
    assert driver.done == [Do.CLOSE]


def test_an_abort_ends_every_generation_up_to_its_own() -> None:
    assert [AbortNotice(3, "").ends(generation) for generation in (2, 3, 4)] == [True, True, False]


# MANAGER-3
def test_an_apply_that_raises_as_a_record_is_resolved_tears_the_state_and_the_rank_requests_again() -> None:
    driver = active()
    driver.begin()
    driver.records = [record(ACTIVE, 2, Attempt(1, 1))]
    with pytest.raises(ValueError, match="in the optimizer"):
        driver.run(
            driver.lifecycle.commit(1.0, measures=False),
            {"AWAIT_SUMS control": LOST, "APPLY": ValueError("in the optimizer")},
        )
    assert driver.run(driver.lifecycle.end(None)) is False
    driver.enter(record(LEARNER, 3, Attempt(1, 1)))
    (request,) = (each for each in driver.done if isinstance(each, do.SendRequest))
    assert (request.report.tip, request.report.pending, driver.lifecycle.state.torn) == (None, None, True)


# HEALER-4
def test_a_rank_that_began_to_heal_is_no_state_to_begin_a_job_with() -> None:
    """Before the first committed step it still is: a heal writes to memory of its own then."""
    for committed, is_torn in ((Attempt(0, 1), False), (Attempt(5, 1), True)):
        driver = Driver()
        driver.enter(record(LEARNER, 2, committed))
        driver.step({"Heal": (False, 0, 0.0), "AWAIT_SUMS root": [1.0, 1.0]})
        state = driver.lifecycle.state
        assert (state.tip, state.torn) == (None, is_torn)
        state.healed()
        assert (state.tip, state.torn) == (committed, False)
