"""Which steps are saved."""

from __future__ import annotations

import pytest

from elasticgang.checkpoint.schedule import Schedule
from elasticgang.protocol.commit import Attempt


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ranks(count: int, every_seconds: float) -> tuple[list[Clock], list[Schedule]]:
    clocks = [Clock() for _ in range(count)]
    return clocks, [Schedule(every_seconds=every_seconds, clock=clock) for clock in clocks]


def run_step(schedules: list[Schedule], step: int, generation: int = 1) -> list[bool]:
    """The beginning of the step after `step` committed ones, and its vote. Returns which ranks save."""
    due = [schedule.is_due(Attempt(step, generation), generation) for schedule in schedules]
    for schedule, is_due in zip(schedules, due, strict=True):
        if is_due:
            schedule.begun()
    num_proposals = float(sum(schedule.proposes for schedule in schedules))
    for schedule in schedules:
        schedule.count(num_proposals, generation)
    return due


def test_every_so_many_steps() -> None:
    schedule = Schedule(every_steps=3, clock=Clock())
    assert [step for step in range(10) if schedule.is_due(Attempt(step, 1), 1)] == [3, 6, 9]
    assert not schedule.proposes


# SCHEDULE-1
def test_all_ranks_save_the_step_after_the_vote_in_which_one_clock_proposed_it() -> None:
    clocks, schedules = ranks(3, 60.0)
    saved = []
    for step in range(20):
        due = run_step(schedules, step)
        assert len(set(due)) == 1
        saved += [step] * due[0]
        for number, clock in enumerate(clocks):
            clock.now += (9.0, 10.0, 11.0)[number]
    # The fastest clock passes 60 s in the sixth step, and its vote makes the save due for the step after.
    assert saved == [7, 14]


@pytest.mark.parametrize("every_seconds", [0.001, 1e9])
def test_a_rank_that_comes_later_saves_with_the_others(every_seconds: float) -> None:
    clocks, schedules = ranks(2, every_seconds)
    for step in range(3):
        clocks[0].now += 1.0
        run_step(schedules[:1], step)
    for step in range(3, 6):
        clocks[0].now += 1.0
        clocks[1].now += 1.0
        due = run_step(schedules, step, generation=2)
        assert len(set(due)) == 1
        if step == 3:  # what was proposed in the generation before is not due in this one
            assert not any(due)


# SCHEDULE-2
def test_a_vote_makes_nothing_due_in_the_next_generation() -> None:
    """One rank has counted the vote; the other has not, because its generation ended first."""
    clocks, schedules = ranks(2, 5.0)
    run_step(schedules, 1)
    clocks[0].now += 6.0
    schedules[0].count(1.0, 1)
    assert [schedule.is_due(Attempt(2, 1), 2) for schedule in schedules] == [False, False]
    assert run_step(schedules, 2, generation=2) == [False, False]  # proposed again in its vote
    assert run_step(schedules, 3, generation=2) == [True, True]


def test_nothing_is_due_before_the_first_committed_step() -> None:
    clocks, schedules = ranks(1, 1.0)
    run_step(schedules, 0)
    clocks[0].now += 5.0
    assert run_step(schedules, 0) == [False]
    assert run_step(schedules, 0) == [False]
    assert run_step(schedules, 1) == [True]
