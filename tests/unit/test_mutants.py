"""The simulation finds what is wrong: each rule of ours that is left out or weakened breaks a promise before long."""

from __future__ import annotations

import pytest

from elasticgang.simulation.invariants import is_broken
from elasticgang.simulation.schedule import Schedule
from tests.unit.mutants import MUTANTS, mutated

NUM_SCHEDULES = 3_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_is_found(name: str) -> None:
    with mutated(name):
        failure = next(filter(None, (Schedule(seed).run() for seed in range(NUM_SCHEDULES))), None)
    assert failure is not None, f"not found in {NUM_SCHEDULES} schedules"
    assert is_broken(failure.violation)


def test_the_rules_are_ours_again() -> None:
    owners = [(owner, attribute) for patches in MUTANTS.values() for owner, attribute, _ in patches]
    before = [vars(owner)[attribute] for owner, attribute in owners]
    for name in MUTANTS:
        with mutated(name):
            pass
    assert [vars(owner)[attribute] for owner, attribute in owners] == before
