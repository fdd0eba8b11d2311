"""Says where the ranks of this host stopped when a collective has timed out, or has failed again and again.

LATE-1  One line for a generation, once all ranks of this host have stopped. While the same step times out again, it is
    written for the 2nd, 4th, 8th time and so on. The event is written each time.
LATE-2  The same line, without an event, where a rank has lost a peer, but the next generation has all members, as after
    collectives of other sizes, which end a comm process: from the second time in a row on, because a comm process may
    have been killed.
"""

from __future__ import annotations

from collections.abc import Set

from elasticgang.agent.job import Events, Output
from elasticgang.protocol.shortened import has_line

_MAX_PLACES = 6


class LateCollectives:
    def __init__(self, events: Events, output: Output) -> None:
        self._events, self._output = events, output
        self._has_timed_out = self._has_failed = False
        self._stopped_at: dict[int, str] = {}  # by local rank, in the present generation
        self._step = self._first_step = 0  # that they have begun; of the present generation
        self._num_times = 0  # in a row, in `_last_step`
        self._last_step = -1
        self._members: Set[str] = frozenset()  # of the present generation

    def timed_out(self) -> None:
        """A collective has, in the present generation, on this host or on another one."""
        self._has_timed_out = True

    def failed(self) -> None:
        """A collective has, likewise, without a time-out (LATE-2)."""
        self._has_failed = True

    def stopped(self, local_rank: int, step: int | None, stopped_at: str) -> None:
        """The rank has left the present generation. `stopped_at`: see `member.stopped_at`; empty if it is unknown."""
        if stopped_at:
            self._stopped_at[local_rank] = stopped_at
            self._step = max(self._step, step or 0)

    def agreed(self, generation: int, first_step: int, members: Set[str]) -> None:
        """LATE-1, LATE-2. The generation after the one in which they have stopped begins, of `members`. `first_step`:
        the index of its first one. A rank that has not connected has not begun that of its generation."""
        former, self._members = self._members, frozenset(members)
        stopped_at, self._stopped_at = self._stopped_at, {}
        step, self._step, self._first_step = max(self._step, self._first_step), 0, first_step
        has_timed_out, has_failed = self._has_timed_out, self._has_failed and former <= self._members
        self._has_timed_out = self._has_failed = False
        if not (has_timed_out or has_failed) or not stopped_at:
            return
        self._num_times = self._num_times + 1 if step == self._last_step else 1
        self._last_step = step
        if has_timed_out:
            self._events.write(
                "collective_timed_out",
                step=step,
                generation=generation - 1,
                num_times=self._num_times,
                ranks=[{"local_rank": rank, "stopped_at": stopped_at[rank]} for rank in sorted(stopped_at)],
            )
        if has_line(self._num_times) and (has_timed_out or self._num_times > 1):
            times = f", {self._num_times} times in a row" if self._num_times > 1 else ""
            what, where = "timed out" if has_timed_out else "failed", _places(stopped_at)
            self._output.write_line(f"elasticgang: a collective has {what} in step {step}{times}: {where}")


def _places(stopped_at: dict[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank in sorted(stopped_at):
        ranks.setdefault(stopped_at[rank], []).append(rank)
    named = [f"rank {', '.join(map(str, who))} stopped {where}" for where, who in list(ranks.items())[:_MAX_PLACES]]
    more = [f"{len(ranks) - _MAX_PLACES} more places"] if len(ranks) > _MAX_PLACES else []
    return "; ".join(named + more)
