"""What a member does with durable checkpoints: it resumes from one, and leaves once the final state is saved."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.commit import Action, Attempt
from elasticgang.protocol.member_instructions import Do, Observed
from elasticgang.protocol.member_lifecycle import Next
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import ACTIVE, LEARNER, SPARE, CheckpointRef
from tests.unit.test_member_lifecycle import (
    LOST,
    NUM_STEPS,
    Driver,
    active,
    record,
)

SAVED = Attempt(7, 3)
REF = CheckpointRef(SAVED, "0123456789abcdef")


def resuming() -> Driver:
    """In a first generation that goes back to a checkpoint: nobody holds state."""
    driver = Driver()
    its = record(LEARNER, 1, SAVED)
    seats = tuple(seat._replace(status=LEARNER) for seat in its.seats)
    driver.records = [dataclasses.replace(its, seats=seats, rolled_back=True, checkpoint=REF.digest, digest="")]
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.REGROUP
    return driver


# MANAGER-11
def test_a_rank_loads_the_checkpoint_before_its_first_step() -> None:
    driver = resuming()
    assert driver.lifecycle.state.tip is None
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), {"LoadCheckpoint": True}) is Next.LOAD
    state = driver.lifecycle.state
    assert driver.names == ["BuildSeat", "LoadCheckpoint", "REPORT_HEALED"]
    assert driver.done[1] == do.LoadCheckpoint(REF)
    assert (state.tip, state.committed) == (SAVED, SAVED)
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.STEP


# MANAGER-11
def test_a_rank_that_cannot_load_the_checkpoint_ends_the_generation() -> None:
    driver = resuming()
    driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), {"LoadCheckpoint": False})
    assert driver.names == ["BuildSeat", "LoadCheckpoint", "Poison"]
    assert driver.lifecycle.state.tip is None
    driver.lifecycle.observed = Observed(LOST)
    earlier = CheckpointRef(Attempt(5, 2), "5")
    driver.records = [record(LEARNER, 2, earlier.attempt)]
    outcomes = {"FIND_CHECKPOINT": earlier}
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), outcomes) is Next.REGROUP
    (request,) = (each for each in driver.done if isinstance(each, do.SendRequest))
    assert request.checkpoint == earlier


# RECOVERY-6
@pytest.mark.parametrize("status", [LEARNER, SPARE])
def test_state_of_the_same_attempt_is_dropped_for_the_checkpoint(status: str) -> None:
    """It may be of another checkpoint, or is prepared, and nobody applies it."""
    its = record(LEARNER, 1, SAVED)
    seats = tuple(seat._replace(status=status) for seat in its.seats)
    its = dataclasses.replace(its, seats=seats, rolled_back=True, checkpoint=REF.digest, digest="")
    for tip, pending in ((SAVED, None), (Attempt(6, 2), SAVED)):
        state = MemberState("a0", tip, pending)
        assert state.action_for(its) is Action.HEAL
        state.enter(its, seats[0])
        assert (state.tip, state.pending, state.committed) == (None, None, SAVED)


# MANAGER-11
def test_a_job_that_had_finished_loads_its_last_state_and_ends() -> None:
    driver = resuming()
    assert driver.run(driver.lifecycle.pass_boundary(SAVED.step), {"LoadCheckpoint": True}) is Next.LOAD
    assert driver.run(driver.lifecycle.pass_boundary(SAVED.step)) is Next.LEAVE


def finished(status: str = ACTIVE) -> Driver:
    """At the boundary after the last step, with checkpoints."""
    driver = Driver()
    driver.lifecycle.saves_last = True
    driver.records = [record(status, 1, Attempt(NUM_STEPS, 1))]
    driver.lifecycle.state.tip = Attempt(NUM_STEPS, 1) if status == ACTIVE else None
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.REGROUP
    return driver


# MANAGER-12
def test_a_rank_leaves_once_no_rank_writes_the_final_state_any_more() -> None:
    driver = finished()
    routine = driver.lifecycle.pass_boundary(NUM_STEPS)
    now = next(routine)
    for is_saving, sums, drops in ((True, [1.0, 0.0], False), (False, [1.0, 1.0], True), (False, [0.0, 1.0], False)):
        assert now is Do.SAVE_LAST
        assert routine.send((is_saving, False)) == do.StartSum("save", (float(is_saving), 0.0))
        assert routine.send(None) is Do.AWAIT_SUMS
        with contextlib.suppress(StopIteration):
            now = routine.send(sums)
            assert (now is Do.DROP_SAVE) == drops
            now = routine.send(None) if drops else now
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.LEAVE


# MANAGER-12
@pytest.mark.parametrize("has_failed", [True, False])
def test_all_ranks_know_if_the_final_save_has_failed_on_one(has_failed: bool) -> None:
    """Also one that had left it to the others whether the state is saved (SAVER-10)."""
    driver = finished()
    outcomes = {"SAVE_LAST": (False, False), "AWAIT_SUMS save": [0.0, float(has_failed)]}
    driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), outcomes)
    assert driver.lifecycle.has_failed_to_save == has_failed
    driver.run(driver.lifecycle.begin())  # the job goes on, with others
    assert not driver.lifecycle.has_failed_to_save


# MANAGER-12
def test_a_death_during_the_final_save_is_followed_by_another_one() -> None:
    driver = finished()
    driver.run(
        driver.lifecycle.pass_boundary(NUM_STEPS),
        {"SAVE_LAST": (True, False), "AWAIT_SUMS save": LOST, "IS_SAVED": False},
    )
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP
    driver.records = [record(ACTIVE, 2, Attempt(NUM_STEPS, 1))]
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.REGROUP
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.SAVE


# MANAGER-12
def test_a_rank_leaves_that_finds_the_final_state_saved_when_its_generation_ends() -> None:
    """Its peers may have left, and then nobody can be in another generation with it."""
    driver = finished()
    outcomes = {"SAVE_LAST": (False, False), "AWAIT_SUMS save": LOST, "IS_SAVED": True}
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), outcomes) is Next.SAVE
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.LEAVE


# MANAGER-12
def test_a_rank_without_state_takes_part_in_the_rounds_and_is_retired() -> None:
    driver = finished(LEARNER)
    outcomes = {"SAVE_LAST": (False, False), "AWAIT_SUMS save": [0.0, 0.0]}
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), outcomes) is Next.SAVE
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP


def voted(*, draining: bool, num_going: int) -> Driver:
    """At the boundary after the first step, with checkpoints: so many of the two ranks drain."""
    driver = active()
    driver.lifecycle.saves_last = True
    driver.lifecycle.observed = Observed(draining=draining)
    assert driver.step({"AWAIT_SUMS control": [0.0, 0, 0, 2, 2, 2, 0, num_going]})
    return driver


# MANAGER-22
def test_the_state_is_saved_before_the_last_that_hold_it_leave() -> None:
    driver = voted(draining=True, num_going=2)
    outcomes = {"SAVE_LAST": (False, False), "AWAIT_SUMS save": [0.0, 0.0]}
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), outcomes) is Next.SAVE
    assert driver.names == ["SAVE_LAST", "StartSum", "AWAIT_SUMS"]
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.LEAVE
    one_goes = voted(draining=True, num_going=1)
    assert one_goes.lifecycle.at_boundary(NUM_STEPS) is Next.LEAVE


# MANAGER-22
@pytest.mark.parametrize("draining", [True, False])
def test_after_a_death_during_that_save_the_ranks_leave_as_of_another_vote(draining: bool) -> None:
    driver = voted(draining=draining, num_going=2)
    lifecycle = driver.lifecycle
    outcomes = {"SAVE_LAST": (True, False), "AWAIT_SUMS save": LOST, "IS_SAVED": False}
    assert driver.run(lifecycle.pass_boundary(NUM_STEPS), outcomes) is Next.SAVE
    lifecycle.observed = Observed(LOST, draining=draining)
    assert lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP
    driver.enter(record(ACTIVE, 2, Attempt(1, 1)))
    assert lifecycle.at_boundary(NUM_STEPS) is Next.STEP
    assert driver.step({"AWAIT_SUMS control": [0.0, 0, 0, 2, 4, 4, 0, 2 * draining]})
    assert lifecycle.at_boundary(NUM_STEPS) is (Next.SAVE if draining else Next.STEP)


# MANAGER-22
def test_a_death_after_that_save_keeps_nobody_that_leaves() -> None:
    driver = voted(draining=True, num_going=2)
    lifecycle = driver.lifecycle
    outcomes = {"SAVE_LAST": (True, False), "AWAIT_SUMS save": LOST, "IS_SAVED": True}
    assert driver.run(lifecycle.pass_boundary(NUM_STEPS), outcomes) is Next.SAVE
    lifecycle.observed = Observed(LOST, draining=True)
    assert lifecycle.at_boundary(NUM_STEPS) is Next.LEAVE


# MANAGER-22
def test_who_stays_saves_the_final_state_too() -> None:
    driver = voted(draining=False, num_going=2)
    outcomes = {"SAVE_LAST": (False, False), "AWAIT_SUMS save": [0.0, 0.0]}
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS), outcomes) is Next.SAVE
    assert driver.lifecycle.at_boundary(NUM_STEPS) is Next.REGROUP
    driver.enter(record(ACTIVE, 2, Attempt(1, 1)))
    assert driver.step()
    assert driver.lifecycle.at_boundary(2) is Next.SAVE


# MANAGER-11
def test_a_rank_whose_peers_hold_the_state_heals_from_them() -> None:
    driver = Driver()
    driver.records = [dataclasses.replace(record(LEARNER, 1, SAVED), rolled_back=True, digest="")]
    driver.run(driver.lifecycle.pass_boundary(NUM_STEPS))
    assert driver.run(driver.lifecycle.pass_boundary(NUM_STEPS)) is Next.STEP
