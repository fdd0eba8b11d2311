"""Golden scenarios of jobs under coordinators that decide: what goes wrong when a rule is left out.

`scripts/chaos simulate --coordinator --replay FILE` says what is told in one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticgang.simulation.coordinated_scenario import play
from elasticgang.simulation.coordinated_schedule import CoordinatedSchedule
from elasticgang.simulation.invariants import is_broken
from elasticgang.simulation.scenario import read
from tests.unit.coordinator_mutants import MUTANTS, OPEN, mutated

SCENARIOS = Path(__file__).parent / "coordinator_scenarios"
FILES = sorted(SCENARIOS.glob("*.txt"))

TOLD = [
    ("pushed_before_written", "pushed before it is written", "RULE-1"),
    ("joiners_first", "anybody founds a job", "RULE-1"),
    ("lost_but_alive", "silent agents are not waited for", "COMMIT-1"),
    ("lost_but_alive", "lost before it is fenced", "LOST-1"),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    story, expected = read(path.read_text())
    assert expected
    assert not is_broken(expected[-1])
    assert play(story) == expected


@pytest.mark.parametrize(("name", "rule", "broken"), TOLD)
def test_what_a_story_shows_depends_on_the_rule(name: str, rule: str, broken: str) -> None:
    story, _ = read((SCENARIOS / f"{name}.txt").read_text())
    with mutated(rule):
        *_, last = play(story)
    assert last.startswith(f"{broken}: ")


# How many random schedules find a rule that is left out, at most.
FOUND = {
    "the highest term alone decides": 40,
    "directories and promises are mixed": 40,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FOUND)
def test_random_schedules_find_a_rule_that_is_left_out(name: str) -> None:
    with mutated(name):
        failure = next(filter(None, (CoordinatedSchedule(seed).run() for seed in range(FOUND[name]))), None)
    assert failure is not None, f"not found in {FOUND[name]} schedules"
    assert is_broken(failure.violation)


def test_every_rule_that_is_left_out_is_found_or_named_as_open() -> None:
    shown = {rule for _, rule, _ in TOLD} | set(FOUND)
    assert set(MUTANTS) - shown == OPEN
