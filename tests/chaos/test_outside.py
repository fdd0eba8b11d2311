"""By which way agents hear of the end of a generation: real connections, a real coordinator, and ranks in name only."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest

from elasticgang.layout import ParallelLayout
from elasticgang.quorum import outside
from elasticgang.quorum.coordinator import Coordinator, Endpoint, reach
from elasticgang.quorum.decide import MemberReport, Record
from elasticgang.quorum.happenings import (
    Abort,
    Ask,
    Asked,
    CoordinatorTimedOut,
    Deliver,
    Event,
    Exited,
    Fail,
    LeaseExpired,
    NoticeJoin,
    Started,
    TellFailure,
)
from elasticgang.quorum.outside import Limits, Outside
from elasticgang.quorum.restarts import Restarts
from elasticgang.quorum.roster import Roster

TIMEOUT_S = 20.0
JOB = "job"


class Host:
    """The side of `outside.Inside`."""

    def __init__(self, agent: str, endpoint: Endpoint, max_restarts: int) -> None:
        restarts = Restarts(max_restarts)
        for local_rank in range(2):
            restarts.committed(local_rank)
        self.roster = Roster(agent, endpoint.host, JOB, endpoint.incarnation, restarts, num_ranks=2, min_agents=2)
        self.outside = Outside(self, endpoint, JOB, Limits(TIMEOUT_S, TIMEOUT_S), None)
        self.hangs = False
        self.said: list[str] = []
        self.changed = asyncio.Event()
        self._reports: dict[str, MemberReport] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self.roster.address = await self.outside.open()
        for local_rank in range(2):
            member = f"{self.roster.agent}{local_rank}"
            self._reports[member] = MemberReport(member, local_rank, "127.0.0.1:1")
            self.handle(Started(member, local_rank))
            self._ask(member, broken=False)

    def loses_a_rank(self) -> None:
        self.handle(Exited(f"{self.roster.agent}0", -signal.SIGKILL))

    def _ask(self, member: str, broken: bool) -> None:
        self.handle(Asked(member, self._reports[member], ParallelLayout(), broken))

    def handle(self, event: Event | LeaseExpired | CoordinatorTimedOut) -> None:
        if isinstance(event, LeaseExpired | CoordinatorTimedOut):
            raise AssertionError(event)  # there is no lease, and the coordinator stays
        for instruction in self.roster.handle(event):
            match instruction:
                case Abort(members, generation, reason):
                    self.outside.tell_over(generation, reason)
                    for member in () if self.hangs else members:
                        self._ask(member, broken=True)
                case NoticeJoin(_, generation):
                    self.outside.tell_join(generation)
                case Ask(delay_s):
                    self.outside.ask(delay_s)
                case TellFailure(member, local_rank, step):
                    self.outside.tell_failed(member, local_rank, step)
                case Fail(_, reason):
                    self.said.append(reason)
                case Deliver(members, record):
                    self._enter(members, record)
        self.changed.set()

    def _enter(self, members: tuple[str, ...], record: Record) -> None:
        self.outside.follow(record)
        for member in members:
            mine = self._reports[member]
            self._reports[member] = MemberReport(
                member, mine.local_rank, mine.address, record.committed, None, (0, 0, 0), record.generation, True
            )

    def run_aside(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def hear_waits(self, agent: str, waits: list[list[Any]]) -> None: ...

    def hear_heirs(self) -> None:
        self.changed.set()

    def end_coordinator(self) -> None: ...

    def say(self, line: str) -> None:
        self.said.append(line)
        self.changed.set()

    def log(self, event: str, **fields: Any) -> None:
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), TIMEOUT_S)

    async def enters(self, generation: int) -> None:
        await self.until(lambda: self.roster.record is not None and self.roster.record.generation == generation)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator("127.0.0.1", 0, grace_s=0.0)
    yield made
    made.close()


def play(coordinator: Coordinator, story: Callable[[Host, Host], Awaitable[None]], max_restarts: int = 0) -> None:
    async def run() -> None:
        hosts = [Host(agent, reach(coordinator.address, TIMEOUT_S), max_restarts) for agent in "ab"]
        for host in hosts:
            await host.start()
        for host in hosts:
            await host.enters(1)
        try:
            await asyncio.wait_for(story(*hosts), TIMEOUT_S)
        finally:
            for host in hosts:
                host.outside.leave()

    asyncio.run(run())


def told(coordinator: Coordinator, number: int) -> bytes:
    """A notice of the store, once it is there."""
    return bytes(reach(coordinator.address, TIMEOUT_S).store.get(f"elasticgang/notices/{JOB}/{number}"))


async def connected(host: Host, peer: str, is_up: bool = True) -> None:
    wires = host.outside._tripwires
    assert wires is not None
    while wires.is_up(peer) is not is_up:
        await asyncio.sleep(0.005)


def test_the_store_is_not_told_of_what_the_connections_have_told(coordinator: Coordinator) -> None:
    async def story(one: Host, other: Host) -> None:
        await connected(one, "b")
        one.loses_a_rank()
        later = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(outside._POST_S, later.set_result, None)  # after what was put off before
        for host in (one, other):
            await host.enters(2)
        await later
        one.outside.tell_finished()
        assert b"finished" in await asyncio.to_thread(told, coordinator, 1)

    play(coordinator, story)


def test_it_is_told_at_once_of_what_they_cannot_tell(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_POST_S", 10 * TIMEOUT_S)

    async def story(one: Host, other: Host) -> None:
        wires = other.outside._tripwires
        assert wires is not None
        await connected(one, "b")
        wires.close()
        await connected(one, "b", is_up=False)
        one.loses_a_rank()
        for host in (one, other):
            await host.enters(2)
        assert b"over" in await asyncio.to_thread(told, coordinator, 1)

    play(coordinator, story)


def test_agents_tell_each_other_in_which_step_a_script_has_failed(coordinator: Coordinator) -> None:
    async def story(one: Host, other: Host) -> None:
        await connected(one, "b")
        one.handle(Exited("a1", 1, raised=True, step=5))
        await other.enters(2)  # what is told comes before the end of the generation, in which it was
        other.handle(Exited("b0", 1, raised=True, step=6))
        other.handle(Exited("b1", 1, raised=True, step=5))
        again = "rank 1 of agent b failed in step 5, in which rank 1 had failed too"
        await one.until(lambda: again in one.said)
        assert other.said[-1].endswith("rank 1 exited with code 1 in step 5, in which rank 1 of agent a had failed too")

    play(coordinator, story, max_restarts=3)


def test_heirs_of_another_agent_count_as_long_as_there_is_a_connection(coordinator: Coordinator) -> None:
    async def story(one: Host, other: Host) -> None:
        await connected(one, "b")
        await connected(other, "a")
        one.outside.tell_heirs(2, again=False)
        await other.until(lambda: other.outside.num_heirs == 2)
        one.outside.tell_heirs(0, again=False)
        await other.until(lambda: other.outside.num_heirs == 0)
        one.outside.tell_heirs(1, again=False)
        await other.until(lambda: other.outside.num_heirs == 1)
        assert one.outside._tripwires is not None
        one.outside._tripwires.close()
        await connected(other, "a", is_up=False)
        assert other.outside.num_heirs == 0

    play(coordinator, story)


def test_it_is_told_soon_when_no_generation_follows(coordinator: Coordinator) -> None:
    async def story(one: Host, other: Host) -> None:
        await connected(one, "b")
        other.hangs = True
        one.loses_a_rank()
        assert b"over" in await asyncio.to_thread(told, coordinator, 1)

    play(coordinator, story)


def test_a_refusal_is_said_once_and_not_of_the_time_before_the_agent(coordinator: Coordinator) -> None:
    def refuse(host: Host, agent: str) -> None:
        contact = host.outside._line.contact
        assert contact is not None
        contact.post({"kind": "refused", "agent": agent, "reason": "why"})

    async def says(host: Host, *agents: str) -> None:
        lines = [f"elasticgang: agent {agent} is refused: why" for agent in agents]
        await host.until(lambda: lines[-1] in host.said)
        assert host.said == lines

    async def story(one: Host, other: Host) -> None:
        refuse(one, "x")
        await says(other, "x")
        before = other.outside._line.contact
        other.outside._line.hang_up("a test")
        await other.until(lambda: other.outside._line.contact not in (None, before))
        refuse(one, "y")
        await says(other, "x", "y")
        late = Host("c", reach(coordinator.address, TIMEOUT_S), 0)
        await late.outside.open()
        refuse(one, "z")
        await says(late, "z")
        late.outside.leave()

    play(coordinator, story)
