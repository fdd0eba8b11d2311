"""Golden scenarios: stories of a job, replayed over the real rules by the simulator.

`scripts/chaos simulate --replay FILE` says what is told in one, and how it differs from what the file expects.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from elasticgang.simulation.scenario import play, read, replay, shrink, write
from elasticgang.simulation.schedule import Schedule
from tests.unit.mutants import TOLD, mutated

SCENARIOS = Path(__file__).parent / "scenarios"
FILES = sorted(SCENARIOS.glob("*.txt"))
STANDS_STILL = "all leave in order"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    story, expected = read(path.read_text())
    assert expected
    assert play(story) == expected


@pytest.mark.parametrize(
    ("name", "rule", "broken"),
    [
        ("commit_by_step_alone", "by step alone", "RULE-4"),
        ("commit_decision_not_recorded", "decision not in the record", "RULE-1"),
        ("in_doubt_rolled_forward", "never rolled forward", "COMMIT-1"),
        ("left_behind_asks_first", "no witness is needed", "COMMIT-1"),
        ("cut_off_with_all_members", "nobody is waited for", "COMMIT-1"),
        ("lost_with_all_it_knew", "all that is lost begins anew", "COMMIT-1"),
        ("left_behind", "who is left behind is forgotten", "COMMIT-1"),
        ("another_chain", "chains are told apart by number", "RULE-4"),
        ("only_learners_left", "learners never decide", "COMMIT-1"),
        ("spare_is_waited_for", "spares are not waited for", "COMMIT-1"),
        ("holders_on_two_hosts", "whoever holds the state sits anywhere", "RECOVERY-2"),
        ("holder_beyond_the_most", "who is one too many waits, whatever it holds", "RECOVERY-2"),
        ("nobody_has_slots", "a step without shares counts", "RULE-5"),
        ("spare_keeps_its_part", "a spare forgets its part", "RULE-6"),
        ("fenced_and_rejoins", "a fenced agent's ranks run on", "RULE-3"),
        ("fenced_while_it_forks", "a rank forked while its agent is fenced runs on", "RULE-3"),
        ("fenced_while_it_forks", "an agent rejoins at once", "RULE-3"),
        ("failed_starts", "failed starts never give up", "SIMHOST-2"),
        ("first_start_fails", "a failure exits with code 0", "SIMHOST-1"),
        ("interrupted", "a signal exits with code 0", "SIMHOST-1"),
        ("raised_and_hangs", "an agent exits before its restarts", "SIMHOST-1"),
    ],
)
def test_what_a_story_shows_depends_on_the_rule(name: str, rule: str, broken: str) -> None:
    """Without the rule that it is about, it ends in a violation."""
    story, _ = read((SCENARIOS / f"{name}.txt").read_text())
    with mutated(rule):
        *_, last = play(story)
    assert last.startswith(f"{broken}: ")


def test_a_story_stands_still_without_its_rule() -> None:
    """No violation ends it: the peers of the rank that left wait for it, and nobody commits another step."""
    story, expected = read((SCENARIOS / "script_raises_as_it_is_seated.txt").read_text())
    with mutated(STANDS_STILL):
        *_, last = play(story)
    assert last == "a0 holds 4@1; b1 holds nothing; b0.2 holds nothing"
    assert expected[-1] == "a0 holds 5@3; b1 holds 5@3; b0.2 holds 5@3"


def test_what_random_schedules_seldom_show_has_a_story() -> None:
    (cases,) = [mark.args[1] for mark in test_what_a_story_shows_depends_on_the_rule.pytestmark]  # type: ignore[attr-defined]
    assert set(TOLD) <= {STANDS_STILL, *(rule for _, rule, _ in cases)}


def test_a_failure_is_a_scenario_that_replays_it() -> None:
    with mutated("decision not in the record"):
        failures = list(itertools.islice(filter(None, (Schedule(seed).run() for seed in range(400))), 4))
        shorts = [shrink(failure) for failure in failures]
        for failure, short in zip(failures, shorts, strict=True):
            story, told = read(write(short))
            assert replay(short.setting, short.moves) == (list(short.moves), short.violation)
            assert play(story) == told
            assert told[-1] == short.violation
            assert short.violation.split(":")[0] == failure.violation.split(":")[0]
        assert sum(len(short.moves) for short in shorts) < sum(len(failure.moves) for failure in failures) / 2
    for short in shorts:
        assert replay(short.setting, short.moves)[1] == ""  # by our rules it ends well


def test_a_standstill_is_a_scenario_up_to_where_it_begins() -> None:
    with mutated("nobody is ever lost"):
        failure = next(
            failure
            for failure in (Schedule(seed).run() for seed in range(200))
            if failure is not None and failure.violation.startswith("RULE-7: ")
        )
        assert shrink(failure) == failure
        story, told = read(write(failure))
        assert play(story) == told
    assert story.startswith("# RULE-7: ")
    assert len(failure.moves) < 1000


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("step 2", "a scenario begins with `hosts`"),
        ("hosts 1\na0 flies", "`a0 flies` is not possible; a0 could: requests"),
        ("hosts 1\na0 begins", "`a0 begins` is not possible; a0 could: requests"),
        ("hosts 1\nz dies", "`z dies` is not possible; z could: do nothing"),
    ],
)
def test_what_is_not_a_scenario_says_so(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        play(text)
