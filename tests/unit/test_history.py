"""The points of a job's curves."""

from __future__ import annotations

import itertools
import json
from typing import Any

from elasticgang.watch.history import MAX_POINTS, History


def status(second: int, **numbers: Any) -> dict[str, Any]:
    return {"elapsed_s": float(second), "step": 2 * second, "steps_per_s": 2.0, "numbers": numbers}


def test_the_points_span_the_whole_time_in_even_distances() -> None:
    history = History()
    for second in range(20 * MAX_POINTS):
        history.add(status(second, loss=1.0 / (second + 1)))
        assert len(history.points) < MAX_POINTS
        if second % MAX_POINTS in (0, MAX_POINTS - 2, MAX_POINTS - 1):  # also around the loss of every other point
            assert json.loads(history.json) == [list(point) for point in history.points]
    seconds = [point[0] for point in history.points]
    distances = {later - earlier for earlier, later in itertools.pairwise(seconds)}
    assert len(distances) == 1
    assert len(seconds) > MAX_POINTS // 4
    assert seconds[0] <= distances.copy().pop()
    assert 20 * MAX_POINTS - seconds[-1] <= distances.pop()


def test_a_loss_that_is_missing_or_not_finite_is_no_point_of_the_curve() -> None:
    history = History()
    for numbers in ({}, {"loss": "nan"}, {"loss": 2}):
        history.add(status(1, **numbers))
    assert [point[3] for point in history.points] == [None, None, 2.0]
