"""How fast a job commits steps, the time that a generation change costs, and the means of what ranks report. Pure:
CLOCK_MONOTONIC seconds go in.

PACE-1  The usual time of a step is that of steps between whose commits no generation began. With the others, a change
    soon after the start would seem to cost nothing.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

NUM_BEGINNINGS = 64  # as many generations as there are commits on a status page

Commits = Sequence[tuple[int, float]]  # (committed steps, seconds), the newest last


def mean_numbers(ranks: Iterable[Mapping[str, float]]) -> dict[str, float | str]:
    """The mean of each number over the ranks that report it; one that is not finite as text, which JSON can hold."""
    values: dict[str, list[float]] = {}
    for numbers in ranks:
        for name, value in numbers.items():
            values.setdefault(name, []).append(value)
    means = {name: sum(found) / len(found) for name, found in sorted(values.items())}
    return {name: mean if math.isfinite(mean) else str(mean) for name, mean in means.items()}


def step_seconds(commits: Commits, beginnings: Iterable[float] = ()) -> float | None:
    """The median time of a step; None if there is no pair of commits to take it from. `beginnings`: when generations
    began (PACE-1)."""
    began = sorted(beginnings)
    found = [
        (late - early) / (last - first)
        for (first, early), (last, late) in itertools.pairwise(commits)
        if bisect.bisect_right(began, early) == bisect.bisect_right(began, late)
    ]
    return statistics.median(found) if found else None


def steps_per_second(commits: Commits, since_s: float) -> float:
    """The mean over the commits after `since_s`, or over all if there are fewer than two; 0 if these are too few."""
    recent = [commit for commit in commits if commit[1] >= since_s]
    chosen = recent if len(recent) > 1 else commits
    if len(chosen) < 2 or chosen[-1][1] <= chosen[0][1]:
        return 0.0
    return (chosen[-1][0] - chosen[0][0]) / (chosen[-1][1] - chosen[0][1])


def seconds_lost(
    since: tuple[int, float], newest: tuple[int, float] | None, step_s: float | None, now_s: float
) -> float:
    """What a generation change has cost by now: the time from the commit `since` before it to the newest commit after
    it, less the usual time of the steps between them; all of the time to now, while there is none."""
    step, since_s = since
    if newest is None or newest[1] <= since_s:
        return max(0.0, now_s - since_s)
    return max(0.0, newest[1] - since_s - (newest[0] - step) * (step_s or 0.0))


class Pace:
    """The commits that one agent sees, and what its changes cost (`seconds_lost`). What one change has cost, the next
    one does not. `counted_to`: the commit up to which changes are counted."""

    def __init__(self, now_s: float) -> None:
        self.step_s: float | None = None
        self._newest: tuple[int, float] | None = None
        self._beginnings: deque[float] = deque(maxlen=NUM_BEGINNINGS)
        self.counted_to: tuple[int, float] = (0, now_s)

    def read(self, commits: Commits) -> None:
        """The last commits of a rank."""
        if commits and (self._newest is None or commits[-1][1] > self._newest[1]):
            self._newest = commits[-1]
            self.step_s = step_seconds(commits, self._beginnings) or self.step_s

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self.counted_to[0] if self._newest is None else self._newest[0]

    @property
    def newest(self) -> tuple[int, float] | None:
        """The newest commit; None before the first."""
        return self._newest

    def begin(self, committed: int, now_s: float) -> None:
        """A generation begins with so many committed steps."""
        self._beginnings.append(now_s)
        if self._newest is None:
            self.counted_to = (committed, self.counted_to[1])
        elif self._newest[1] > self.counted_to[1]:
            self.counted_to = self._newest

    def cost(self, now_s: float) -> float:
        """The seconds that the change, which is over, has cost."""
        since, newest = self.counted_to, self._newest
        self.counted_to = (since[0], now_s) if newest is None or newest[1] <= since[1] else newest
        return seconds_lost(since, newest, self.step_s, now_s)
