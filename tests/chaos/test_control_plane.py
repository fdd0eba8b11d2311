"""By which way agents hear of the end of a generation: real connections, a real coordinator, and ranks in name only."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest

from elasticgang.agent import control_plane
from elasticgang.agent.control_plane import ControlPlane, Limits
from elasticgang.coordinator.endpoint import Endpoint, reach
from elasticgang.coordinator.server import Coordinator
from elasticgang.layout import ParallelLayout
from elasticgang.protocol.agent_events import (
    Abort,
    AnnounceJoin,
    BroadcastFailure,
    CoordinatorTimedOut,
    DeliverRecord,
    Event,
    Exited,
    Fail,
    LeaseExpired,
    NotifyOver,
    RecordRequested,
    RequestQuorum,
    Started,
)
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.record import MemberReport, Record
from elasticgang.protocol.restarts import Restarts

TIMEOUT_S = 20.0
JOB = "job"


class Host:
    """The side of `control_plane.Inside`."""

    def __init__(self, agent: str, endpoint: Endpoint, max_restarts: int) -> None:
        restarts = Restarts(max_restarts)
        for local_rank in range(2):
            restarts.committed(local_rank)
        self.state = AgentState(agent, endpoint.host, JOB, endpoint.incarnation, restarts, num_ranks=2, min_agents=2)
        self.control_plane = ControlPlane(self, endpoint, JOB, Limits(TIMEOUT_S, TIMEOUT_S), None)
        self.hangs = False
        self.said: list[str] = []
        self.changed = asyncio.Event()
        self._reports: dict[str, MemberReport] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self.state.address = await self.control_plane.open()
        for local_rank in range(2):
            member = f"{self.state.agent}{local_rank}"
            self._reports[member] = MemberReport(member, local_rank, "127.0.0.1:1")
            self.handle(Started(member, local_rank))
            self._request(member, broken=False)

    def loses_a_rank(self) -> None:
        self.handle(Exited(f"{self.state.agent}0", -signal.SIGKILL))

    def _request(self, member: str, broken: bool) -> None:
        self.handle(RecordRequested(member, self._reports[member], ParallelLayout(), broken))

    def handle(self, event: Event | LeaseExpired | CoordinatorTimedOut) -> None:
        if isinstance(event, LeaseExpired | CoordinatorTimedOut):
            raise AssertionError(event)  # there is no lease, and the coordinator stays
        for instruction in self.state.handle(event):
            match instruction:
                case Abort(members, generation, reason):
                    self.control_plane.broadcast_over(generation, reason)
                    for member in () if self.hangs else members:
                        self._request(member, broken=True)
                case NotifyOver(generation, reason):
                    self.control_plane.broadcast_over(generation, reason)
                case AnnounceJoin(_, generation):
                    self.control_plane.broadcast_join(generation)
                case RequestQuorum(delay_s):
                    self.control_plane.request(delay_s)
                case BroadcastFailure(member, local_rank, step):
                    self.control_plane.broadcast_failed(member, local_rank, step)
                case Fail(_, reason):
                    self.said.append(reason)
                case DeliverRecord(members, record):
                    self._enter(members, record)
        self.changed.set()

    def _enter(self, members: tuple[str, ...], record: Record) -> None:
        self.control_plane.follow(record)
        for member in members:
            mine = self._reports[member]
            self._reports[member] = MemberReport(
                member, mine.local_rank, mine.address, record.committed, None, (0, 0, 0), record.generation, True
            )

    def spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_peer_blocked(self, agent: str, waits: list[list[Any]]) -> None: ...

    def on_successors_changed(self) -> None:
        self.changed.set()

    def kill_coordinator(self) -> None: ...

    def write_line(self, line: str) -> None:
        self.said.append(line)
        self.changed.set()

    def log(self, event: str, **fields: Any) -> None:
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), TIMEOUT_S)

    async def enters(self, generation: int) -> None:
        await self.until(lambda: self.state.record is not None and self.state.record.generation == generation)


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
                host.control_plane.leave()

    asyncio.run(run())


def told(coordinator: Coordinator, number: int) -> bytes:
    """A notice of the store, once it is there."""
    return bytes(reach(coordinator.address, TIMEOUT_S).store.get(f"elasticgang/notices/{JOB}/{number}"))


async def connected(host: Host, peer: str, is_up: bool = True) -> None:
    wires = host.control_plane._peers
    assert wires is not None
    while wires.is_up(peer) is not is_up:
        await asyncio.sleep(0.005)


# CONTROL-2
def test_the_store_is_not_told_of_what_the_connections_have_told(coordinator: Coordinator) -> None:
    async def story(one: Host, other: Host) -> None:
        await connected(one, "b")
        one.loses_a_rank()
        later = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(
            control_plane._POST_S, later.set_result, None
        )  # after what was put off before
        for host in (one, other):
            await host.enters(2)
        await later
        one.control_plane.broadcast_finished()
        assert b"finished" in await asyncio.to_thread(told, coordinator, 1)

    play(coordinator, story)


def test_it_is_told_at_once_of_what_they_cannot_tell(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "_POST_S", 10 * TIMEOUT_S)

    async def story(one: Host, other: Host) -> None:
        wires = other.control_plane._peers
        assert wires is not None
        await connected(one, "b")
        wires.close()
        await connected(one, "b", is_up=False)
        one.loses_a_rank()
        for host in (one, other):
            await host.enters(2)
        assert b"over" in await asyncio.to_thread(told, coordinator, 1)

    play(coordinator, story)


def test_the_agent_repeats_to_the_store_what_it_could_notify_nobody_of(coordinator: Coordinator) -> None:
    async def story(one: Host, other: Host) -> None:
        wires, line = other.control_plane._peers, one.control_plane._client
        assert wires is not None
        await connected(one, "b")
        wires.close()
        await connected(one, "b", is_up=False)
        line.disconnect("a test")
        await one.until(lambda: line.session is None)
        one.loses_a_rank()
        assert line.session is None
        for host in (one, other):
            await host.enters(2)

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
        one.control_plane.broadcast_successors(2, again=False)
        await other.until(lambda: other.control_plane.num_successors == 2)
        one.control_plane.broadcast_successors(0, again=False)
        await other.until(lambda: other.control_plane.num_successors == 0)
        one.control_plane.broadcast_successors(1, again=False)
        await other.until(lambda: other.control_plane.num_successors == 1)
        assert one.control_plane._peers is not None
        one.control_plane._peers.close()
        await connected(other, "a", is_up=False)
        assert other.control_plane.num_successors == 0

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
        session = host.control_plane._client.session
        assert session is not None
        session.post({"kind": "refused", "agent": agent, "reason": "why"})

    async def says(host: Host, *agents: str) -> None:
        lines = [f"elasticgang: agent {agent} is refused: why" for agent in agents]
        await host.until(lambda: lines[-1] in host.said)
        assert host.said == lines

    async def story(one: Host, other: Host) -> None:
        refuse(one, "x")
        await says(other, "x")
        before = other.control_plane._client.session
        other.control_plane._client.disconnect("a test")
        await other.until(lambda: other.control_plane._client.session not in (None, before))
        refuse(one, "y")
        await says(other, "x", "y")
        late = Host("c", reach(coordinator.address, TIMEOUT_S), 0)
        await late.control_plane.open()
        refuse(one, "z")
        await says(late, "z")
        late.control_plane.leave()

    play(coordinator, story)
