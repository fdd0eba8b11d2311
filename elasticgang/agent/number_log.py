"""Writes the numbers that the ranks of this host report, such as the loss, to the event log.

NUMBERLOG-1  There is one event in `NUMBERS_S` at most, with the last numbers of each rank (not of each member) that has
    reported since the one before, and one more as the agent exits: a log grows with the time that it is of, not with
    the steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from elasticgang.agent.job import Events
from elasticgang.observe.pace import mean_numbers
from elasticgang.process.status_page import StatusPage

NUMBERS_S = 10.0


class NumberLog:
    """Belongs to the agent's event loop."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._due_s = 0.0
        self._last: dict[str, dict[str, float]] = {}  # by rank of this host: what the next event has of it
        self._num_reports: dict[str, int] = {}  # by member, as it was read last
        self._committed = (0, 0)  # generation and step, of the newest one of those that the next event is about

    def read(self, member: str, page: StatusPage) -> None:
        """Read the numbers of a rank that lives, or has just exited, for the next event."""
        found = page.numbers()
        num_reports = sum(number.num_reports for number in found.values())
        if num_reports != self._num_reports.get(member, 0):
            self._num_reports[member] = num_reports
            rank = member.rpartition("/")[0]  # a member that succeeds it reports in its place
            self._last[rank] = {name: number.last for name, number in found.items()}
            step, generation = page.committed
            self._committed = max(self._committed, (generation, step))

    def look(self, now_s: float, pages: Mapping[str, StatusPage]) -> None:
        """Read `pages`, by member, and write an event if one is due."""
        if now_s < self._due_s:
            return
        self._num_reports = {member: num for member, num in self._num_reports.items() if member in pages}
        for member, page in pages.items():
            self.read(member, page)
        if self._last:
            self._due_s = now_s + NUMBERS_S
            self.write()

    def write(self) -> None:
        """NUMBERLOG-1."""
        if self._last:
            generation, step = self._committed
            numbers = mean_numbers(self._last.values())
            self._events.write("reported", step=step, generation=generation, numbers=numbers)
            self._last, self._committed = {}, (0, 0)
