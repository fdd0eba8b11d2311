"""Ten thousand random schedules of a job by the real rules: after every move, all promises hold.

`scripts/chaos simulate --schedules 1000000` does more of the same.
"""

from __future__ import annotations

import os

import pytest

from elasticgang.simulation.invariants import is_broken
from elasticgang.simulation.runner import run, run_over
from elasticgang.simulation.scenario import replay
from elasticgang.simulation.schedule import Schedule
from tests.integration.schedules import run_all
from tests.unit.mutants import mutated

NUM_SCHEDULES = 10_000

# How many schedules in a thousand must have seen it: else they show little.
PER_MILLE = {
    "rolled forward": 50,
    "gone back": 1,
    "host lost": 150,
    "left behind": 100,
    "learner": 500,
    "spare": 200,
    "given up": 20,
    "coordinator restarted": 300,
    "sharded": 400,
    "asked for spares": 100,
    "spare promoted": 100,
    "only heals": 5,
    "fenced": 60,
    "rejoined": 60,
    "drained": 20,
    "signalled": 50,
    "failed start": 50,
    "timed out: start": 100,
    "timed out: exit": 30,
    "timed out: grace": 10,
    "ended": 50,
    "failed": 100,
    "warned": 100,
}


@pytest.mark.timeout(600)
def test_random_schedules() -> None:
    parts = run_over(range(NUM_SCHEDULES), min(4, os.cpu_count() or 1))
    assert run_all(parts, NUM_SCHEDULES, PER_MILLE).num_steps > 3 * NUM_SCHEDULES


# BATCH-1
def test_equal_seeds_give_equal_schedules() -> None:
    one, other = (list(run_over(range(60), num_processes)) for num_processes in (1, 2))
    assert one == other
    schedule = Schedule(7)
    assert schedule.run() is None
    assert replay(schedule.setting, schedule.moves) == (schedule.moves, "")


def test_a_failure_names_its_seed() -> None:
    with mutated("nobody is waited for"):
        first = run(range(20)).failures[0]
        again = Schedule(first.seed).run()
    assert again == first
    assert is_broken(first.violation)


def test_what_the_rules_raise_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_it(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("elasticgang.protocol.next_record.recover", raise_it)
    (failure,) = run(range(1)).failures
    assert "ZeroDivisionError" in failure.violation
    assert not is_broken(failure.violation)
