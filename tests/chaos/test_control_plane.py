"""What agents learn of each other: real sessions, a real coordinator, and ranks in name only."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from elasticgang.agent import control_plane
from elasticgang.agent.control_plane import ControlPlane, Limits
from elasticgang.coordinator.decision_server import EXITED_S
from elasticgang.coordinator.server import CoordinatorOptions, ReservedPort, serve
from elasticgang.errors import OperationalError
from elasticgang.layout import ParallelLayout
from elasticgang.process.lease import Lease
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
    RecordRequested,
    RequestRecord,
    Started,
)
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.coordinator_messages import JOB_TIMEOUTS
from elasticgang.protocol.job_facts import JobFacts, ScriptFailure, Wait
from elasticgang.protocol.record import MemberReport, Record
from elasticgang.protocol.rendezvous_keys import RendezvousKeys
from elasticgang.protocol.restarts import Restarts
from elasticgang.session import operator_client
from elasticgang.session.credentials import Credentials
from tests.support import REPOSITORY

TIMEOUT_S = 20.0
JOB = "job"


class Coordinator:
    """At one port, started again by `start`."""

    def __init__(self) -> None:
        self._reserved = ReservedPort("127.0.0.1")
        self.address = f"127.0.0.1:{self._reserved.port}"
        self._serving: asyncio.Task[None] | None = None

    async def start(self, founds: bool = True) -> None:
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        options = CoordinatorOptions("127.0.0.1", self._reserved.port, founds=founds, grace_s=0.0)
        self._serving = asyncio.ensure_future(serve(options, lambda line: None, listening.set_result))
        assert await listening == self.address

    async def stop(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])

    def close(self) -> None:
        self._reserved.close()


class Host:
    """The side of `ControlPlaneCallbacks`."""

    def __init__(
        self,
        agent: str,
        coordinator: str,
        max_restarts: int = 0,
        connect_s: float = TIMEOUT_S,
        reconnect_s: float = TIMEOUT_S,
        min_agents: int = 2,
    ) -> None:
        restarts = Restarts(max_restarts)
        for local_rank in range(2):
            restarts.committed(local_rank)
        self.state = AgentState(agent, "127.0.0.1", JOB, restarts, num_ranks=2, min_agents=min_agents)
        limits = Limits(connect_s, reconnect_s)
        self.lease = Lease.create()
        self.control_plane = ControlPlane(self, coordinator, JOB, Credentials(), limits, JOB_TIMEOUTS, self.lease)
        self.said: list[str] = []
        self.logged: list[str] = []
        self.timed_out = ""
        self.changed = asyncio.Event()
        self._reports: dict[str, MemberReport] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.control_plane.open()
        self.state.address = self.control_plane.address
        self.control_plane.begin()
        for local_rank in range(2):
            member = f"{self.state.agent}{local_rank}"
            self._reports[member] = MemberReport(member, local_rank, "127.0.0.1:1")
            self.handle(Started(member, local_rank))
            self.request(member, broken=False)

    def loses_a_rank(self) -> None:
        self.handle(Exited(f"{self.state.agent}0", -signal.SIGKILL))

    def request(self, member: str, broken: bool) -> None:
        self.handle(RecordRequested(member, self._reports[member], ParallelLayout(), broken))

    def handle(self, event: Event | LeaseExpired | CoordinatorTimedOut) -> None:
        self.changed.set()
        if isinstance(event, CoordinatorTimedOut):
            self.timed_out = event.reason
            return
        if isinstance(event, LeaseExpired):
            raise AssertionError(event)
        for instruction in self.state.handle(event):
            match instruction:
                case Abort(members, generation, reason):
                    self.control_plane.broadcast_over(generation, reason)
                    for member in members:
                        self.request(member, broken=True)
                case AnnounceJoin(_, generation):
                    self.control_plane.broadcast_join(generation)
                case RequestRecord():
                    self.control_plane.request()
                case BroadcastFailure(member, local_rank, step):
                    self.control_plane.tell_failure(member, local_rank, step)
                case Fail(_, reason):
                    self.said.append(reason)
                case DeliverRecord(members, record):
                    self._enter(members, record)

    def _enter(self, members: tuple[str, ...], record: Record) -> None:
        for member in members:
            mine = self._reports[member]
            self._reports[member] = MemberReport(
                member, mine.local_rank, mine.address, record.committed, None, (0, 0, 0), record.generation, True
            )

    def on_session_renewed(self) -> None: ...

    def on_rendezvous_keys(self, message: RendezvousKeys) -> None:
        raise AssertionError(message)

    def spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_facts_changed(self) -> None:
        self.changed.set()

    def kill_coordinator(self) -> None: ...

    def write_line(self, line: str) -> None:
        self.said.append(line)
        self.changed.set()

    def log(self, event: str, **fields: Any) -> None:
        self.logged.append(event)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), TIMEOUT_S)

    async def enters(self, generation: int) -> None:
        await self.until(lambda: self.state.record is not None and self.state.record.generation == generation)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.control_plane.leave("the test ends")


Story = Callable[[Coordinator, Host, Host], Awaitable[None]]


def play(story: Story, **options: Any) -> None:
    """Two agents in generation 1."""

    async def run() -> None:
        coordinator = Coordinator()
        await coordinator.start()
        hosts = [Host(agent, coordinator.address, **options) for agent in "ab"]
        try:
            for host in hosts:
                await host.start()
            for host in hosts:
                await host.enters(1)
                host.said.clear()  # of a start that took long
            await asyncio.wait_for(story(coordinator, *hosts), 2 * TIMEOUT_S)
        finally:
            for host in hosts:
                await host.stop()
            await coordinator.stop()
            coordinator.close()

    asyncio.run(run())


def test_the_end_of_a_generation_reaches_the_other_agent() -> None:
    async def story(_: Coordinator, one: Host, other: Host) -> None:
        one.loses_a_rank()
        for host in (one, other):
            await host.enters(2)
        assert other.state.record is not None
        assert sorted(other.state.record.plan.ranks) == ["a1", "b0", "b1"]

    play(story)


# CONTROL-1
def test_what_ends_while_the_coordinator_is_away_is_told_on_its_return() -> None:
    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        await coordinator.stop()
        for host in (one, other):
            await host.until(lambda host=host: "coordinator unreachable" in host.logged)  # type: ignore[misc]
        one.loses_a_rank()
        await coordinator.start(founds=False)
        for host in (one, other):
            await host.enters(2)
            assert "coordinator reachable" in host.logged
            assert host.lease.remaining_s > 0

    play(story)


# PROMISE
def test_an_agent_that_rejoins_under_another_id_brings_the_record_that_it_had_accepted() -> None:
    """To a coordinator that knows nothing of the job, and to which the other agent does not come."""

    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        await coordinator.stop()
        await one.stop()
        await coordinator.start(founds=False)
        other.state.agent = "b.2"
        assert await other.control_plane.rejoin("b")
        host, _, port = coordinator.address.rpartition(":")
        granted = await operator_client.grant(host, int(port), JOB, Credentials(), TIMEOUT_S)
        assert "leads it on from generation 1" in granted

    play(story)


def test_an_agent_fails_when_a_coordinator_that_is_needed_stays_away() -> None:
    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        await coordinator.stop()
        await one.until(lambda: "coordinator unreachable" in one.logged)
        one.loses_a_rank()
        await one.until(lambda: one.timed_out != "")
        assert one.timed_out.startswith(f"no generation can be agreed without the coordinator at {coordinator.address}")
        assert other.timed_out == ""  # it needs nothing of the coordinator

    play(story, reconnect_s=0.5)


# CONTROL-7
def test_an_agent_that_waits_for_the_coordinator_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "SILENT_S", 0.1)

    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        await coordinator.stop()
        await one.until(lambda: "coordinator unreachable" in one.logged)
        one.loses_a_rank()
        await one.until(lambda: one.timed_out != "")
        assert one.said == [f"elasticgang: the coordinator at {coordinator.address} does not answer; waiting up to 1 s"]
        assert other.said == []

    play(story, reconnect_s=1.0)


# CONTROL-1, CONTROL-7
def test_an_agent_fails_when_a_coordinator_that_is_needed_leads_the_job_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent c has had another coordinator. So this one takes a higher term, which b, which is stopped, does not
    promise; the session of a goes on."""
    monkeypatch.setattr(control_plane, "SILENT_S", 0.1)

    async def run() -> None:
        coordinator, elsewhere = Coordinator(), Coordinator()
        await coordinator.start()
        await elsewhere.start()
        one, stranger = Host("a", coordinator.address, reconnect_s=1.0), Host("c", elsewhere.address)
        program = f"from {__name__} import live; live('b', {coordinator.address!r})"
        process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
        try:
            await one.start()
            await one.enters(1)
            one.said.clear()
            process.send_signal(signal.SIGSTOP)
            await stranger.control_plane.open()
            stranger.control_plane.coordinator, stranger.state.agent = coordinator.address, "c.2"
            assert await stranger.control_plane.rejoin("c")
            one.loses_a_rank()
            await one.until(lambda: one.timed_out != "")
            assert one.timed_out.endswith(f"the coordinator at {coordinator.address}: it does not lead the job")
            waits = f"elasticgang: the coordinator at {coordinator.address} does not lead the job; waiting up to 1 s"
            assert one.said == [waits]
            assert "coordinator unreachable" not in one.logged
        finally:
            process.kill()
            process.wait()
            for host in (one, stranger):
                await host.stop()
            for each in (coordinator, elsewhere):
                await each.stop()
                each.close()

    asyncio.run(run())


def test_agents_tell_each_other_in_which_step_a_script_has_failed() -> None:
    async def story(_: Coordinator, one: Host, other: Host) -> None:
        one.handle(Exited("a1", 1, raised=True, step=5))
        await other.enters(2)  # what is told comes before the end of the generation, in which it was
        other.handle(Exited("b0", 1, raised=True, step=6))
        other.handle(Exited("b1", 1, raised=True, step=5))
        again = "rank 1 of agent b failed in step 5, in which rank 1 had failed too"
        await one.until(lambda: again in one.said)
        assert other.said[-1].endswith("rank 1 exited with code 1 in step 5, in which rank 1 of agent a had failed too")

    play(story, max_restarts=3)


# CONTROL-2
def test_successors_of_another_agent_count_while_there_is_a_session() -> None:
    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        one.control_plane.tell(has_successors=True, is_stopping=False)
        await other.until(lambda: other.control_plane.facts.have_successors)
        one.control_plane.tell(has_successors=False, is_stopping=False)
        await other.until(lambda: not other.control_plane.facts.have_successors)
        one.control_plane.tell(has_successors=True, is_stopping=False)
        await other.until(lambda: other.control_plane.facts.have_successors)
        await coordinator.stop()
        await other.until(lambda: not other.control_plane.facts.have_successors)
        assert other.control_plane.others_have_successors  # FACTS-RECENT
        await coordinator.start(founds=False)
        await other.until(lambda: other.control_plane.facts.have_successors)  # told again in the new session

    play(story)


# CONTROL-2
def test_facts_end_with_a_session_also_of_a_coordinator_that_does_not_lead_the_job() -> None:
    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        await coordinator.stop()
        await other.stop()  # its promise is missing
        await one.until(lambda: "coordinator unreachable" in one.logged)
        one.control_plane.tell(has_successors=True, is_stopping=False)
        await coordinator.start(founds=False)
        await one.until(lambda: one.control_plane.facts.have_successors)
        await coordinator.stop()
        one.control_plane.tell(has_successors=False, is_stopping=False)
        await coordinator.start(founds=False)
        await one.until(lambda: not one.control_plane.facts.have_successors)

    play(story)


# CONTROL-4
def test_facts_of_a_session_that_ended_before_the_agent_began_do_not_hold() -> None:
    async def run() -> None:
        facts = JobFacts(True, failures=(ScriptFailure("b0", 0, 5, "b"),))
        host = Host("a", "127.0.0.1:9")
        plane = host.control_plane
        plane.inform(facts)
        plane.disconnected("the session ended")
        plane.begin()
        assert plane.facts == JobFacts()
        plane.end()
        plane.inform(facts)
        assert not host.changed.is_set()
        plane.begin()
        assert host.changed.is_set()
        why = host.state.restarts.failed_elsewhere("c0", "rank 0 of agent c", 5)
        assert why == "rank 0 of agent c failed in step 5, in which rank 0 of agent b had failed too"

    asyncio.run(run())


# FACTS-ALONE
def test_an_agent_that_takes_part_alone_tells_no_facts() -> None:
    async def run() -> None:
        coordinator = Coordinator()
        await coordinator.start()
        one, other = (Host(agent, coordinator.address, min_agents=1) for agent in "ab")
        try:
            await one.start()
            await one.enters(1)
            await other.start()
            one.control_plane.tell(has_successors=True, is_stopping=False)
            one.control_plane.broadcast_join(1)
            await other.until(lambda: "join noticed" in other.logged)  # it would come after
            assert not other.control_plane.facts.have_successors
            for member in ("a0", "a1"):
                one.request(member, broken=False)
            for host in (one, other):
                await host.enters(2)
            await other.until(lambda: other.control_plane.facts.have_successors)
        finally:
            for host in (one, other):
                await host.stop()
            await coordinator.stop()
            coordinator.close()

    asyncio.run(run())


# CONTROL-2
def test_waits_and_failures_are_told_again_in_a_new_session() -> None:
    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        await coordinator.stop()
        for host in (one, other):
            await host.until(lambda host=host: "coordinator unreachable" in host.logged)  # type: ignore[misc]
        one.control_plane.tell_failure("a1", 1, 5)
        one.control_plane.tell_waits((Wait(1, 7, 3),))
        await coordinator.start(founds=False)
        await other.until(lambda: other.control_plane.facts.waits == (Wait(1, 7, 3, "a"),))  # after the failure
        other.handle(Exited("b1", 1, raised=True, step=5))
        assert other.said[-1].endswith("rank 1 exited with code 1 in step 5, in which rank 1 of agent a had failed too")

    play(story, max_restarts=3)


# CONTROL-3, SERVE-EXITED
@pytest.mark.alone  # it has a time bound
def test_an_agent_whose_process_is_gone_is_lost_long_before_its_lease_is_over() -> None:
    async def run() -> None:
        coordinator = Coordinator()
        await coordinator.start()
        one = Host("a", coordinator.address)
        program = f"from {__name__} import live; live('b', {coordinator.address!r})"
        process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
        try:
            await one.start()
            await one.enters(1)
            process.kill()
            process.wait()
            began_s = asyncio.get_running_loop().time()
            await one.enters(2)
            took_s = asyncio.get_running_loop().time() - began_s
            assert EXITED_S <= took_s < JOB_TIMEOUTS.lease_s / 2
            assert "host lost" in one.logged
            assert one.state.record is not None
            assert one.state.record.agents == ("a",)
        finally:
            process.kill()
            process.wait()
            await one.stop()
            await coordinator.stop()
            coordinator.close()

    asyncio.run(run())


# CONTROL-3, REACH-1
def test_an_agent_that_stands_still_is_reached_by_many_at_once() -> None:
    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        host, _, port = one.control_plane.address.rpartition(":")
        with contextlib.ExitStack() as opened:  # the agent's loop does nothing meanwhile
            for _ in range(300):
                opened.enter_context(socket.create_connection((host, int(port)), timeout=0.5))

    play(story)


# CONTROL-4
def test_an_agent_is_told_of_nothing_before_it_begins() -> None:
    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        one.control_plane.broadcast_finished(1)
        await other.until(lambda: other.state.finished)
        late = Host("c", coordinator.address)
        await late.control_plane.open()  # the first message says so
        assert not late.state.finished
        late.control_plane.begin()
        assert late.state.finished
        await late.stop()

    play(story)


# CONTROL-5
def test_the_end_of_a_job_is_told_before_its_agent_exits() -> None:
    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        await coordinator.stop()
        for host in (one, other):
            await host.until(lambda host=host: "coordinator unreachable" in host.logged)  # type: ignore[misc]
        one.control_plane.broadcast_finished(1)
        confirming = asyncio.ensure_future(one.control_plane.confirm_finished())
        await asyncio.sleep(0)
        assert not confirming.done()
        await coordinator.start(founds=False)
        await confirming
        await other.until(lambda: other.state.finished)
        assert one.said == []

    play(story)


def test_an_agent_exits_with_a_warning_where_nobody_can_be_told_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "FINISHED_S", 0.2)

    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        await coordinator.stop()
        await one.until(lambda: "coordinator unreachable" in one.logged)
        one.control_plane.broadcast_finished(1)
        await one.control_plane.confirm_finished()
        (line,) = one.said
        assert line.startswith(
            f"elasticgang: warning: the coordinator at {coordinator.address} could not be told within"
        )

    play(story)


def live(agent: str, coordinator: str) -> None:
    """The process of one agent, until it is killed."""

    async def run() -> None:
        await Host(agent, coordinator).start()
        await asyncio.Event().wait()

    asyncio.run(run())


def test_an_agent_that_does_not_fit_is_refused_and_the_others_are_told() -> None:
    async def story(coordinator: Coordinator, one: Host, other: Host) -> None:
        late = Host("c", coordinator.address)
        await late.control_plane.open()
        late.control_plane.begin()
        late.handle(Started("c0", 0))
        late.handle(Started("c1", 1))
        layout = ParallelLayout(min_replicas=2)
        for local_rank in range(2):
            late.handle(
                RecordRequested(f"c{local_rank}", MemberReport(f"c{local_rank}", local_rank, "x:1"), layout, False)
            )
        await late.until(lambda: bool(late.said))
        assert late.said[0].startswith("the job refused this host: its layout is")
        await other.until(lambda: any("agent c is refused: its layout is" in line for line in other.said))
        await late.stop()
        assert one.state.record is not None
        assert one.state.record.generation == 1

    play(story)


def test_what_is_no_coordinator_is_named() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            host = Host("a", f"127.0.0.1:{silent.getsockname()[1]}", connect_s=3.0)
            with pytest.raises(OperationalError, match=r"what listens at .* has not answered for 3 s"):
                await host.control_plane.open()
            await host.stop()

    asyncio.run(run())
