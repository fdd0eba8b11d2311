"""Which steps are saved: every so many steps, or as often as clocks say.

Pure: the clock is given.

SCHEDULE-1  All active ranks of a generation save the same steps. A clock makes nothing due by itself: its rank proposes
    a save in its vote, and the sum of the proposals makes one due, which all that count the vote know alike.
SCHEDULE-2  What a vote has made due is due in the vote's generation alone: a rank may enter the next one without having
    counted it. The clock proposes until a save begins.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticgang.protocol.commit import Attempt


class Schedule:
    """Of one rank. One of `every_steps` and `every_seconds` is given. The time runs from the first step on, and from
    the beginning of each save."""

    def __init__(
        self,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._every_steps, self._every_seconds, self._clock = every_steps, every_seconds, clock
        self._since: float | None = None
        self._agreed = 0  # the generation of the vote that has made a save due

    @property
    def proposes(self) -> bool:
        """Whether this rank's vote proposes a save."""
        if self._every_seconds is None or self._since is None:
            return False
        return self._clock() >= self._since + self._every_seconds

    @property
    def words(self) -> str:
        """For messages."""
        if self._every_steps is not None:
            return f"every {self._every_steps} steps"
        return f"every {float(self._every_seconds or 0.0)} seconds"

    def count(self, num_proposals: float, generation: int) -> None:
        """A vote of `generation` has been counted."""
        self._agreed = generation if num_proposals else 0

    def is_due(self, committed: Attempt, generation: int) -> bool:
        """Whether the ranks of `generation` save the state of `committed`, at the beginning of the step after it."""
        if self._every_steps is not None:
            return committed.step > 0 and committed.step % self._every_steps == 0
        if self._since is None:
            self._since = self._clock()
        return committed.step > 0 and self._agreed == generation

    def begun(self) -> None:
        """A save that was due has begun."""
        self._agreed, self._since = 0, self._clock()
