"""An agent's state machine with a host to drive it, for tests."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.protocol.agent_events import (
    Committed,
    DeliverRecord,
    Exited,
    Instruction,
    MemberLeft,
    RecordAnswered,
    RecordRequested,
    RequestRecord,
    Started,
)
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.record import ACTIVE, SPARE, MemberReport, Record, Seat, Undecided, Unrecoverable
from elasticgang.protocol.restarts import Restarts

LAYOUT = ParallelLayout()
KILLED = -signal.SIGKILL


def report_of(member: str, tip: Attempt | None = None, pending: Attempt | None = None) -> MemberReport:
    return MemberReport(member, int(member[1]), "127.0.0.1:1", tip, pending)


def record_of(members: Iterable[str], generation: int = 1, *, spares: Iterable[str] = (), **fields: object) -> Record:
    """A record in which `members` ("a0": rank 0 of agent a) are active."""
    every = [*members, *spares]
    seats = tuple(
        Seat(member, member[0], "host", int(member[1]), "127.0.0.1:1", SPARE if member in spares else ACTIVE)
        for member in every
    )
    layout = fields.pop("layout", LAYOUT)
    assert isinstance(layout, ParallelLayout)
    planned = plan([Member(member, "host") for member in members], layout)
    agents = tuple(sorted({member[0] for member in every}))
    known = {"committed": Attempt(0, 1), **fields}
    parent = "parent" if generation > 1 else ""
    return Record("job", generation, parent, layout, planned, seats, agents, **known)  # type: ignore[arg-type]


def rank_did(what: str, *ranks: int, agent: str = "a", is_effect: bool = False, timed_out: bool = False) -> EndCause:
    return EndCause(what, (agent,), ranks, is_effect, timed_out)


class Host:
    """An agent's state and the events it got, in words: `a0` is the first process of rank 0, `a0'` its next one."""

    def __init__(self, num_ranks: int = 3, max_restarts: int = 0) -> None:
        self.state = AgentState(agent="a", host="host", job="job", restarts=Restarts(max_restarts), num_ranks=num_ranks)

    def start(self, *members: str) -> None:
        for member in members:
            assert self.state.handle(Started(member, int(member[1]))) == []

    def asks(
        self,
        member: str,
        *,
        broken: bool = False,
        timed_out: bool = False,
        left_step: bool = False,
        settings: tuple[tuple[str, str], ...] = (),
        tip: Attempt | None = None,
        pending: Attempt | None = None,
        layout: ParallelLayout = LAYOUT,
    ) -> list[Instruction]:
        report = report_of(member, tip, pending)
        return self.state.handle(
            RecordRequested(member, report, layout, broken, timed_out, settings=settings, left_step=left_step)
        )

    def exits(
        self, member: str, status: int = KILLED, *, blameless: bool = False, goes: bool = False, at_s: float = 0.0
    ) -> list[Instruction]:
        return self.state.handle(Exited(member, status, blameless, goes, at_s=at_s))

    def raises(
        self,
        member: str,
        step: int | None,
        status: int = 1,
        *,
        goes: bool = False,
        differs: bool = False,
        heals: bool = False,
    ) -> list[Instruction]:
        exited = Exited(member, status, draining=goes, raised=True, step=step, differs=differs, heals=heals)
        return self.state.handle(exited)

    def commits(self, *members: str, step: int = 1) -> None:
        for member in members:
            assert self.state.handle(Committed(member, Attempt(step, 1))) == []

    def leaves(self, member: str, *, finished: bool, in_order: bool = False, num_steps: int = 0) -> list[Instruction]:
        """`num_steps`: by `manager.leave()`, of so many."""
        return self.state.handle(MemberLeft(member, finished, in_order, num_steps > 0, num_steps))

    def is_answered(self, answer: Record | Undecided | Unrecoverable) -> list[Instruction]:
        return self.state.handle(RecordAnswered(answer))


def running(num_ranks: int = 3, **options: int) -> Host:
    """All ranks are seated in generation 1."""
    host = Host(num_ranks, **options)
    members = [f"a{rank}" for rank in range(num_ranks)]
    host.start(*members)
    for member in members[:-1]:
        assert host.asks(member) == []
    assert host.asks(members[-1]) == [RequestRecord()]
    record = record_of(members)
    assert host.is_answered(record) == [DeliverRecord(tuple(members), record)]
    return host
