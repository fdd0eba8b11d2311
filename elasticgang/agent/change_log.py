"""Writes each generation change to the event log, and as a line of the agent's log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from elasticgang.agent.incident_log import IncidentLog
from elasticgang.agent.job import Events
from elasticgang.observe.change_report import ChangeReporter, format_change, layouts_of
from elasticgang.observe.pace import Pace
from elasticgang.protocol.record import Record

log = logging.getLogger("elasticgang")


class ChangeLog:
    """`reporter` gathers what a change consists of; `write` takes the changes that it returns as complete. `pace`: of
    the ranks of this host. `incidents`: of the changes that nobody planned."""

    def __init__(self, events: Events, began_at: float) -> None:
        """`began_at`: CLOCK_MONOTONIC seconds, from which on the start of the job counts."""
        self.reporter = ChangeReporter()
        self.pace = Pace(began_at)
        self.incidents = IncidentLog(events)
        self._events = events
        self._counts: dict[str, int] = {}

    def write(self, changes: Iterable[dict[str, Any]]) -> None:
        for change in changes:
            lost_s = round(self.pace.cost(time.monotonic()), 4)
            self._events.write("generation_change", **change, lost_s=lost_s, step_s=self.pace.step_s)
            self.incidents.write({**change, "lost_s": lost_s})
            log.info("%s", format_change(change, self._counts))

    def agreed(self, record: Record, agent: str, lost_agents: Iterable[str], left_agents: Iterable[str]) -> None:
        """A record is agreed. `agent`: this agent. `lost_agents`: those that the record no longer has. `left_agents`:
        those that have ended in order."""
        for lost in lost_agents:
            self.reporter.agent_lost(lost, time.monotonic())
        for left in left_agents:
            self.reporter.agent_left(left, time.monotonic())
        self.write(self.reporter.agreed(record, agent))
        self.pace.begin(record.committed.step, time.monotonic())
        self._counts = {status: len(record.members(status)) for status in ("active", "learner", "spare")}
        self._events.write(
            "generation",
            generation=record.generation,
            digest=record.digest,
            **layouts_of(record),
            committed=list(record.committed),
            rolled_forward=record.rolled_forward,
            saved=None if record.saved is None else record.saved.attempt.step,
            ranks=sorted(seat.local_rank for seat in record.seats),
            seats=_seats(record),
            counted_to=self.pace.counted_to,
            step_s=self.pace.step_s,
            **self._counts,
        )

    def ended(self) -> None:
        """The job ends: nothing more follows of the change under way."""
        self.write(self.reporter.ended())


def _seats(record: Record) -> list[dict[str, Any]]:
    """The seats by agent: (local rank, rank or None, status). Of one that is left out, the hosts beyond its reach."""
    found: dict[str, dict[str, Any]] = {}
    for seat in record.seats:
        agent = found.setdefault(seat.agent, {"agent": seat.agent, "host": seat.host, "seats": []})
        agent["seats"].append((seat.local_rank, record.plan.ranks.get(seat.member), seat.status))
    for away, _ in record.cut_off:
        if away in found:  # else none of its ranks runs
            found[away]["out_of_reach"] = record.hosts_out_of_reach(away)
    return list(found.values())
