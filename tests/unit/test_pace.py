"""What a generation change costs, from the commits before and after it."""

from __future__ import annotations

import pytest

from elasticgang.observe.pace import Pace, step_seconds, steps_per_second

SECONDS = [(step, 10.0 + step) for step in range(1, 6)]  # the last at 15.0


def test_the_rate_is_that_of_the_present_generation() -> None:
    commits = [*SECONDS, (6, 20.0), (7, 20.5), (8, 21.0)]
    assert steps_per_second(commits, since_s=19.0) == 2.0
    assert steps_per_second(commits, since_s=0.0) == pytest.approx(7 / 10)
    assert steps_per_second(commits, since_s=20.9) == pytest.approx(7 / 10), "one commit alone has no rate"
    assert steps_per_second(commits[:1], since_s=0.0) == 0.0


def test_a_commit_that_was_not_seen_counts_as_a_step() -> None:
    assert step_seconds([(1, 1.0), (3, 3.0), (4, 4.0)]) == 1.0
    assert step_seconds(SECONDS[:1]) is None


# PACE-1
def test_the_time_between_two_generations_is_not_that_of_a_step() -> None:
    commits = [(1, 1.0), (2, 2.0), (3, 20.0), (4, 30.0)]
    assert step_seconds(commits) == 10.0
    assert step_seconds(commits, [0.5, 2.5, 20.5]) == 1.0
    assert step_seconds(commits, [20.5, 1.5, 2.5]) is None, "each pair spans a beginning"
    pace = Pace(0.0)
    pace.begin(0, 0.5)
    pace.read(commits[:2])
    pace.cost(2.5)
    for number, lost_s in ((3, 17.0), (4, 9.0)):
        pace.begin(number - 1, commits[number - 1][1] - 0.5)
        pace.read(commits[:number])
        assert pace.cost(31.0) == pytest.approx(lost_s)


def test_a_change_costs_what_its_steps_took_longer_than_usual() -> None:
    pace = Pace(0.0)
    pace.begin(0, 0.5)
    pace.read(SECONDS[:1])
    assert pace.cost(11.5) == 11.0, "until the first commit"
    pace.read(SECONDS)
    pace.begin(5, 17.0)
    pace.read([*SECONDS, (6, 18.5)])  # 3.5 s after the last one
    assert pace.cost(18.6) == pytest.approx(2.5)
    assert pace.step == 6


def test_a_rolled_forward_step_is_not_lost() -> None:
    pace = Pace(0.0)
    pace.read(SECONDS)
    pace.begin(6, 17.0)
    pace.read([*SECONDS, (7, 18.5)])
    assert pace.cost(18.6) == pytest.approx(1.5)


def test_steps_that_a_checkpoint_has_not_are_lost() -> None:
    pace = Pace(0.0)
    pace.read(SECONDS)
    pace.begin(2, 17.0)
    pace.read([(3, 20.0)])
    assert pace.cost(20.0) == pytest.approx(5.0 + 2.0)


def test_no_time_is_lost_twice() -> None:
    pace = Pace(0.0)
    pace.read(SECONDS)
    pace.begin(5, 15.5)
    assert pace.cost(17.0) == 2.0, "the generation ended without a commit"
    pace.begin(5, 17.0)
    pace.read([*SECONDS, (6, 20.0)])
    assert pace.cost(20.1) == pytest.approx(2.0), "from 17.0 on, less one step"


def test_a_resumed_job_counts_from_its_checkpoint() -> None:
    pace = Pace(0.0)
    pace.begin(100, 1.0)
    pace.read([(101, 3.0), (102, 4.0)])
    assert pace.cost(4.0) == pytest.approx(2.0)
