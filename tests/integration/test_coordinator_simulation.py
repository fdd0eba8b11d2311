"""Random schedules of jobs under coordinators that decide: after every move, all promises hold.

`scripts/chaos simulate --coordinator --schedules 1000000` does more of the same.
"""

from __future__ import annotations

import os

import pytest

from elasticgang.simulation.coordinated_runner import run, run_over
from elasticgang.simulation.coordinated_scenario import replay, shrink, write
from elasticgang.simulation.coordinated_schedule import CoordinatedSchedule
from elasticgang.simulation.invariants import is_broken
from elasticgang.simulation.runner import Tally
from tests.unit.coordinator_mutants import mutated

NUM_SCHEDULES = 500

# How many schedules in a thousand must have seen it: else they show little.
PER_MILLE = {
    "rolled forward": 20,
    "agent lost": 100,
    "lost but alive": 50,
    "fenced": 300,
    "learner": 300,
    "spare": 100,
    "several coordinators": 500,
    "more than three coordinators": 100,
    "state directory": 300,
    "forgotten": 1,
    "sharded": 400,
}


@pytest.mark.timeout(600)
def test_random_schedules() -> None:
    total = Tally()
    for part in run_over(range(NUM_SCHEDULES), min(4, os.cpu_count() or 1)):
        total.add(part)
        assert not part.failures, spell(part)
    assert total.num_schedules == NUM_SCHEDULES
    assert total.num_records > NUM_SCHEDULES
    assert {name: count for name, count in PER_MILLE.items() if total.seen[name] < count * NUM_SCHEDULES / 1000} == {}


def spell(part: Tally) -> str:
    failure = part.failures[0]
    if not is_broken(failure.violation):
        return f"seed {failure.seed}: {failure.violation}"
    has_directory = CoordinatedSchedule(failure.seed).has_directory
    return write(shrink(failure, has_directory), has_directory)


def test_equal_seeds_give_equal_schedules() -> None:
    one, other = (list(run_over(range(60), num_processes)) for num_processes in (1, 2))
    assert one == other
    schedule = CoordinatedSchedule(7)
    assert schedule.run() is None
    assert replay(schedule.setting, schedule.has_directory, schedule.moves) == (schedule.moves, "")


def test_a_failure_names_its_seed() -> None:
    with mutated("the highest term alone decides"):
        first = run(range(40)).failures[0]
        again = CoordinatedSchedule(first.seed).run()
    assert again == first
