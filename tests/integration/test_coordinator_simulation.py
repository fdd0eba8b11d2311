"""Random schedules of jobs under coordinators that decide: after every move, all promises hold.

`scripts/chaos simulate --coordinator --schedules 1000000` does more of the same.
"""

from __future__ import annotations

import os

import pytest

from elasticgang.simulation.coordinated_cluster import CoordinatedCluster
from elasticgang.simulation.coordinated_runner import run, run_over
from elasticgang.simulation.coordinated_schedule import CoordinatedSchedule
from elasticgang.simulation.scenario import replay
from tests.integration.schedules import run_all
from tests.unit.coordinator_mutants import mutated

NUM_SCHEDULES = 500

# How many schedules in a thousand must have seen it: else they show little.
PER_MILLE = {
    "agent lost": 200,
    "agent paused beyond its lease": 100,
    "coordinator paused beyond a lease": 80,
    "crashed before it had written": 10,
    "crashed before it pushed what it had written": 15,
    "crashed in mid-push": 15,
    "decided beside another in office": 10,
    "duplicate id": 80,
    "evicted": 10,
    "fenced": 400,
    "founded anew": 50,
    "ghost": 300,
    "half-open session": 500,
    "host paused beyond its lease": 100,
    "joiner waited": 100,
    "learner": 300,
    "lease renewed by a refusal": 80,
    "lost agent came back": 30,
    "lost but alive": 200,
    "more than three coordinators": 200,
    "operator's word": 80,
    "partition": 250,
    "restarted with its directory": 150,
    "rolled forward": 50,
    "sharded": 400,
    "slow session": 300,
    "spare": 300,
    "started without a directory": 500,
    "state directory": 300,
    "two coordinators": 400,
    "unfenced": 300,
    "waited for a silent agent": 100,
}


@pytest.mark.timeout(600)
def test_random_schedules() -> None:
    parts = run_over(range(NUM_SCHEDULES), min(4, os.cpu_count() or 1))
    assert run_all(parts, NUM_SCHEDULES, PER_MILLE, CoordinatedCluster).num_records > NUM_SCHEDULES


def test_equal_seeds_give_equal_schedules() -> None:
    one, other = (list(run_over(range(60), num_processes)) for num_processes in (1, 2))
    assert one == other
    schedule = CoordinatedSchedule(7)
    assert schedule.run() is None
    assert replay(schedule.setting, schedule.moves, CoordinatedCluster) == (schedule.moves, "")


def test_a_failure_names_its_seed() -> None:
    with mutated("the highest term alone decides"):
        first = run(range(40)).failures[0]
        again = CoordinatedSchedule(first.seed).run()
    assert again == first
