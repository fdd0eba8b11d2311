"""How the work of one decision grows with the number of agents."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.record import Record, Report
from tests.unit.proposals import member, report, trained

SETTINGS = (("number of steps", "10"),)


def change(num_agents: int) -> tuple[Record, list[Report]]:
    """A job whose last agent has lost its rank, and started another one."""
    names = [f"agent-{number:03}-" for number in range(num_agents)]
    record, attempt = trained(*names)
    stay, lost = names[:-1], names[-1]
    reports = [report(name, member(f"{name}0", attempt, entered=2), seen=record, settings=SETTINGS) for name in stay]
    restarted = report(lost, member(f"{lost}1"), exited=(f"{lost}0",), seen=record, settings=SETTINGS)
    return record, [*reports, restarted]


def num_calls(record: Record, reports: list[Report]) -> int:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    former = sys.getprofile()
    sys.setprofile(count)
    try:
        answer = next_record(record, reports)
    finally:
        sys.setprofile(former)
    assert isinstance(answer, Record)
    return calls


@pytest.mark.parametrize("joins", [False, True])
def test_four_times_as_many_agents_cost_about_four_times_as_much(joins: bool) -> None:
    calls = []
    for size in (60, 240):
        record, reports = change(size)
        if joins:
            reports.append(report("newcomer-", member("newcomer-0"), seen=record, settings=SETTINGS))
        calls.append(num_calls(record, reports))
    assert calls[1] < 5 * calls[0], calls
