"""Random schedules find what is wrong where no golden scenario shows it: each such rule that is left out or weakened
breaks a promise before long."""

from __future__ import annotations

import pytest

from elasticgang.simulation.invariants import is_broken
from elasticgang.simulation.schedule import Schedule
from tests.unit.mutants import FOUND, mutated


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FOUND)
def test_random_schedules_find_a_rule_that_is_left_out(name: str) -> None:
    with mutated(name):
        failure = next(filter(None, (Schedule(seed).run() for seed in range(FOUND[name]))), None)
    assert failure is not None, f"not found in {FOUND[name]} schedules"
    assert is_broken(failure.violation)
