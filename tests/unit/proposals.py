"""Members, reports and records, for tests of the next record."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.record import (
    ACTIVE,
    NO_RECORD,
    MemberReport,
    Record,
    RecordRef,
    Report,
    Undecided,
)

FLAT = ParallelLayout()
PAIRS = ParallelLayout(tp=2)
WHOLE = (0, 0, 0)


def member(id: str, tip: Attempt | None = None, pending: Attempt | None = None, **facts: Any) -> MemberReport:
    """A member as it reports itself; it holds the whole model if it holds anything."""
    facts.setdefault("holds", WHOLE if tip else None)
    return MemberReport(id, int(id[-1]), f"{id}:1", tip, pending, **facts)


def report(agent: str, *members: MemberReport, seen: Record | RecordRef | None = None, **facts: Any) -> Report:
    known = {"host": agent, "job": "job", "layout": FLAT, **facts}
    name = seen.ref if isinstance(seen, Record) else seen or NO_RECORD
    return Report(agent=agent, newest_record=name, members=members, **known)


def agreed(record: Record | None, *proposal: Report, lost: Collection[str] = ()) -> Record:
    answer = next_record(record, proposal, lost)
    assert isinstance(answer, Record), answer
    return answer


def undecided(record: Record | None, *proposal: Report, lost: Collection[str] = ()) -> Undecided:
    answer = next_record(record, proposal, lost)
    assert isinstance(answer, Undecided), answer
    return answer


def first(*agents: str, layout: ParallelLayout = FLAT) -> Record:
    """The record of a job's start: agents "a", "b", ... with one member "a0", "b0", ... each."""
    return agreed(None, *(report(agent, member(f"{agent}0"), layout=layout) for agent in agents))


def trained(*agents: str, steps: int = 3) -> tuple[Record, Attempt]:
    """A record of generation 2 in which all are active, and its committed attempt."""
    start = first(*agents)
    attempt = Attempt(steps, 1)
    record = agreed(start, *(report(agent, member(f"{agent}0", attempt, entered=1), seen=start) for agent in agents))
    assert record.committed == attempt
    assert record.members(ACTIVE) == tuple(f"{agent}0" for agent in agents)
    return record, attempt
