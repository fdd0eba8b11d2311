"""Golden scenarios of jobs under coordinators that decide: what goes wrong when a rule is left out.

`scripts/chaos simulate --coordinator --replay FILE` says what is told in one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticgang.simulation.coordinated_cluster import CoordinatedCluster
from elasticgang.simulation.coordinated_schedule import CoordinatedSchedule
from elasticgang.simulation.invariants import is_broken
from elasticgang.simulation.scenario import play, read
from tests.unit.coordinator_mutants import MUTANTS, mutated

SCENARIOS = Path(__file__).parent / "coordinator_scenarios"
FILES = sorted(SCENARIOS.glob("*.txt"))

# By scenario and mutant: how a line begins that is told without the rule alone.
TOLD = [
    ("answer_comes_late", "a lease runs from the answer", "LOST-1: "),
    ("answer_comes_late", "who is silent is dead", "LOST-1: "),
    ("coordinator_stands_still", "a coordinator's standstill counts", "LOST-2: "),
    ("decided_and_never_sent", "the higher generation is newer", "a ends: evicted"),
    ("directory_out_of_date", "office is kept at a newer record", "LOST-1: "),
    ("holder_is_known_to_be_dead", "dead agents are waited for", "RULE-7: "),
    ("id_is_taken", "an id is free once its agent is lost", "COMMIT-1: "),
    ("id_is_taken", "two processes have one id", "COMMIT-1: "),
    ("join_notice_lost", "notices are sent once", "RULE-7: "),
    ("joiner_first_to_have_it", "joiners are sent a record at once", "ACCEPT-1: "),
    ("joiners_first", "anybody founds a job", "OFFICE-1: "),
    ("led_elsewhere", "joiners go on alone", "COMMIT-1: "),
    ("left_behind_for_long", "lost agents come back as they are", "RULE-7: "),
    ("lost_but_alive", "silent agents are not waited for", "COMMIT-1: "),
    ("lost_but_alive", "lost before it is fenced", "LOST-2: "),
    ("majority_of_the_past", "a majority is trusted", "OFFICE-1: "),
    ("joiner_first_to_have_it", "others' records are not learned", "RULE-7: "),
    ("office_is_left", "an agent accepts earlier terms", "LOST-1: "),
    ("office_is_left", "office is kept", "LOST-1: "),
    ("office_is_left", "the highest term alone decides", "LOST-1: "),
    ("led_elsewhere", "a promise is not told", "RULE-7: "),
    ("promise_outlives_its_session", "promises count by sessions", "RULE-7: "),
    ("pushed_before_written", "pushed before it is written", "RULE-1: "),
    ("ready_and_gone", "reports outlive their session", "REPORT-1: "),
    ("refused_after_a_promise", "a refusal where the former coordinator was renews the lease", "LOST-1: "),
    ("refused_elsewhere", "any refusal renews the lease", "LOST-1: "),
    ("reported_in_a_former_session", "a report is sent once", "RULE-7: "),
    ("session_is_down_for_a_moment", "absent agents are not waited for", "PRESENT-1: "),
    ("stale_holder_first", "the first to come is trusted", "OFFICE-1: "),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    story, expected = read(path.read_text())
    assert expected
    assert not is_broken(expected[-1])
    assert play(story, CoordinatedCluster) == expected


@pytest.mark.parametrize(("name", "rule", "shown"), TOLD)
def test_what_a_story_shows_depends_on_the_rule(name: str, rule: str, shown: str) -> None:
    story, expected = read((SCENARIOS / f"{name}.txt").read_text())
    with mutated(rule):
        told = play(story, CoordinatedCluster)
    assert any(line.startswith(shown) for line in told)
    assert not any(line.startswith(shown) for line in expected)


# How many random schedules find a rule that is left out, at most.
FOUND = {
    "a record is delivered without a lease": 40,  # FENCE-1
    "directories and promises are mixed": 100,
    "office is kept at a higher term": 40,
    "the end of the job is told once": 400,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FOUND)
def test_random_schedules_find_a_rule_that_is_left_out(name: str) -> None:
    with mutated(name):
        failure = next(filter(None, (CoordinatedSchedule(seed).run() for seed in range(FOUND[name]))), None)
    assert failure is not None, f"not found in {FOUND[name]} schedules"
    assert is_broken(failure.violation)


def test_every_rule_that_is_left_out_is_found() -> None:
    assert {rule for _, rule, _ in TOLD} | set(FOUND) == set(MUTANTS)
