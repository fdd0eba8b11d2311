"""A coordinator's state machine that is told events by hand."""

from __future__ import annotations

from typing import Any

from elasticgang.layout import ParallelLayout
from elasticgang.protocol import coordinator_messages as m
from elasticgang.protocol.coordinator_state import CoordinatorState
from elasticgang.protocol.record import (
    NO_RECORD,
    MemberReport,
    Record,
    RecordRef,
    Report,
)


def report(agent: str, seen: RecordRef = NO_RECORD, member: str = "") -> Report:
    members = (MemberReport(member or f"{agent}/0", 0, "127.0.0.1:1"),)
    return Report(agent, agent, "job", ParallelLayout(), seen, members, address="127.0.0.1:2")


class Driver:
    """A coordinator, and what it has said."""

    def __init__(self, **options: Any) -> None:
        self.state = CoordinatorState("c", **options)
        self.now_s = 0.0
        self.num_sessions = 0

    def do(self, event: m.CoordinatorEvent) -> list[Any]:
        return [*self.state.handle(event, self.now_s)]

    def hear(self, session: int, message: m.AgentMessage) -> list[Any]:
        return self.do(m.Received(session, message))

    def open(self, agent: str, **hello: Any) -> int:
        self.num_sessions += 1
        hello = {"incarnation": agent, "session": self.num_sessions, **hello}
        self.hear(self.num_sessions, m.Hello(agent, **hello))
        self.hear(self.num_sessions, m.Promise(self.state.office.term))
        return self.num_sessions

    def wait(self, seconds: float) -> list[Any]:
        out = []
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            out += self.do(m.Ticked())
        return out

    def wait_with(self, session: int, seconds: float) -> list[Any]:
        """While the agent of `session` is heard."""
        out = []
        for number in range(round(seconds / 0.5)):
            self.hear(session, m.Heartbeat(number))
            out += self.wait(0.5)
        return out


def found(**options: Any) -> tuple[Driver, int, int]:
    driver = Driver(granted=True, **options)
    a, b = driver.open("a"), driver.open("b")
    driver.hear(a, m.Ready(report("a")))
    out = driver.hear(b, m.Ready(report("b")))
    if driver.state.is_deciding:
        (persist,) = out
        assert isinstance(persist, m.Persist)
        assert persist.decision is not None
        out = driver.do(m.Persisted(persist.decision.record.digest))
    assert [i.session for i in out if isinstance(i, m.Send) and isinstance(i.message, m.Push)] == [a, b]
    ref = record(driver).ref
    for session in (a, b):
        driver.hear(session, m.Accepted(ref.generation, ref.digest))
    return driver, a, b


def record(driver: Driver) -> Record:
    assert driver.state.record is not None
    return driver.state.record
