"""Questions of several agents to a real coordinator, and what they cost its store."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from elasticgang.coordinator.client import ClientCallbacks, CoordinatorClient, WatchedAgents
from elasticgang.coordinator.endpoint import Endpoint, reach, record_key
from elasticgang.coordinator.server import Coordinator
from elasticgang.coordinator.session import CoordinatorSession, SessionCallbacks, present_record
from elasticgang.layout import ParallelLayout
from elasticgang.protocol.record import NO_RECORD, PROTOCOL, MemberReport, Record, Report, Undecided, Unrecoverable
from tests.support import Command, wait_until

TIMEOUT_S = 20.0
JOB = "job"


class CountedStore:
    """The real one, and the names of what it is asked. `calls`: a list that several share."""

    def __init__(self, store: Any, calls: list[str] | None = None) -> None:
        self._store = store
        self.calls: list[str] = [] if calls is None else calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._store, name)
        self.calls.append(name)
        return function


class Host:
    """An agent of one rank, as far as its session sees it."""

    def __init__(self, agent: str, endpoint: Endpoint) -> None:
        self.store = cast(Any, CountedStore(endpoint.store))
        self.session = CoordinatorSession(replace(endpoint, store=self.store), JOB, agent, None, TIMEOUT_S)
        self.session._awaiting = cast(Any, CountedStore(self.session._awaiting, self.store.calls))
        self.session.start(SessionCallbacks(beat=lambda _: None, notice=lambda *_: None, lost=lambda _: None))
        self._member = MemberReport(f"{agent}0", 0, "127.0.0.1:1")
        self.record: Record | None = None

    def report(self, lost: Sequence[str] = ()) -> Report:
        record, member = self.record, self._member
        if record is not None:
            member = replace(member, tip=record.committed, holds=(0, 0, 0), entered=record.generation, active=True)
        return Report(
            agent=self.session.agent,
            host=self.session.agent,
            job=JOB,
            coordinator=self.session.endpoint.incarnation,
            layout=ParallelLayout(),
            newest_record=NO_RECORD if record is None else record.ref,
            members=(member,),
            dead_agents=tuple(lost),
            min_agents=3,
        )

    def asks(self, lost: Sequence[str] = ()) -> Record | Undecided | Unrecoverable:
        while (answer := self.session.request_record(self.report(lost))) is None:
            pass
        if isinstance(answer, Record):
            self.record = answer
        return answer

    def agrees(self, lost: Sequence[str] = ()) -> Record:
        answer: Record | Undecided | Unrecoverable | None = None
        while not isinstance(answer, Record):
            answer = self.asks(lost)
            assert not (isinstance(answer, Undecided) and answer.refused), answer.reason
        return answer


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Coordinator("127.0.0.1", 0, grace_s=0.0)
    yield reach(made.address, TIMEOUT_S)
    made.close()


@pytest.fixture
def hosts(endpoint: Endpoint) -> Iterator[list[Host]]:
    """In one generation."""
    made = [Host(agent, reach(endpoint.address, TIMEOUT_S)) for agent in "abc"]
    all_agree(made)
    yield made
    for host in made:
        host.session.close()


def all_agree(hosts: Sequence[Host], lost: Sequence[str] = ()) -> Record:
    for host in hosts:
        host.session.sends_heartbeats = True
    with ThreadPoolExecutor(len(hosts)) as threads:
        agreed: list[Record] = list(threads.map(lambda host: host.agrees(lost), hosts))
    assert agreed == [agreed[0]] * len(agreed)
    return agreed[0]


# SESSION-6
def test_a_question_that_waits_for_a_record_does_not_delay_the_failure_detector(hosts: list[Host]) -> None:
    """Four turns before this agent's: the longest wait there is, for a record that nobody writes."""
    host = hosts[0]
    assert host.record is not None
    agents = ("A1", "A2", "A3", "A4", "a")
    record = replace(host.record, agents=agents)
    waiting = threading.Thread(target=host.session._written_by_peer, args=(host.report(), record, agents))
    num_looks = 0
    waiting.start()
    while waiting.is_alive():
        assert set(host.session.heartbeat_counts("abc")) == set("abc")
        num_looks += 1
    assert num_looks > 20  # in a second; where both share a client, one look at most is through before the wait
    assert host.store.calls[-1] == "wait"


def test_a_coordinator_that_does_not_answer_the_failure_detector_is_given_up(tmp_path: Path) -> None:
    """Nothing else looks at how long it takes to answer here."""

    async def detect(coordinator: Command) -> str:
        address = coordinator.stdout.split()[-1]
        away: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        hooks = ClientCallbacks(lambda *_: None, away.set_result, lambda _: None, lambda: None)
        line = CoordinatorClient(address, JOB, TIMEOUT_S, None, hooks)
        await line.open(reach(address, TIMEOUT_S), "a")
        coordinator.process.send_signal(signal.SIGSTOP)
        tasks = [
            asyncio.ensure_future(line.watch_agents(lambda: WatchedAgents(["b"], [], True), lambda _: None)),
            asyncio.ensure_future(line.keep_connected(lambda: "a", lambda: None)),
        ]
        try:
            return await asyncio.wait_for(away, TIMEOUT_S)
        finally:
            for task in tasks:
                task.cancel()

    with Command(tmp_path, [sys.executable, "-m", "elasticgang", "coordinator", "--port", "0"]) as coordinator:
        wait_until(lambda: coordinator.stdout.endswith("\n"), "the coordinator's address")
        assert asyncio.run(detect(coordinator)).endswith("does not answer the failure detector")


# SESSION-7
def test_threads_that_read_records_in_any_order_hold_the_newest(hosts: list[Host]) -> None:
    """What is held is brought to a coordinator that has lost it: it never goes back."""
    session, record = hosts[0].session, hosts[0].record
    assert record is not None
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(100):
            first = 10 * (number + 1)
            records = [replace(record, generation=first + place) for place in range(8)]
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(session._remember, [each.text for each in reversed(records)]))
            assert session._newest_agreed == records[-1]
    finally:
        sys.setswitchinterval(before)


def test_an_announcement_by_several_threads_is_posted_once(hosts: list[Host]) -> None:
    posted: list[dict[str, Any]] = []
    session = hosts[0].session
    session.post = lambda notice, job=None: posted.append(notice)  # type: ignore[method-assign]
    newcomer = replace(hosts[0].report(), members=(MemberReport("newcomer", 1, "127.0.0.1:2"),))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(session.announce_join, [newcomer] * 64))
    assert posted == [{"kind": "join", "generation": 1}]


def test_a_question_costs_the_store_little(hosts: list[Host]) -> None:
    for _ in range(3):
        for host in hosts:
            host.store.calls.clear()
        all_agree(hosts)
        first, *others = (host.store.calls for host in hosts)
        assert first == ["compare_set", "set", "set", "set"]
        assert others == [["wait", "get"]] * 2


def test_who_has_not_heard_of_a_generation_does_not_write_over_it(hosts: list[Host]) -> None:
    left_out, *others = hosts
    left_out.session.sends_heartbeats = False
    newest = all_agree(others, lost=["a"])
    assert (newest.generation, newest.agents) == (2, ("b", "c"))
    for host in hosts:
        host.session.sends_heartbeats = host is left_out  # the lighthouse waits for nobody else, soon
    assert left_out.asks() == Undecided("a generation was agreed without this agent")
    assert present_record(left_out.store, JOB)[1] == newest
    again = left_out.asks()
    assert isinstance(again, Undecided)
    assert again.reason == "no witness of generation 2 is here, but b0, c0 may live"


# SESSION-4
def test_those_that_wait_for_a_record_that_does_not_come_take_turns(hosts: list[Host]) -> None:
    """Whose turn is first is gone once all have asked; who comes next writes it, and the last has nothing to do."""
    for host in hosts:
        host.store.calls.clear()
    first, second, third = hosts
    first.session._written_by_peer = lambda *_: Undecided("it is gone")  # type: ignore[method-assign,assignment]
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(Host.asks, hosts))
    assert answers[0] == Undecided("it is gone")
    assert isinstance(answers[1], Record)
    assert answers[1] == answers[2]
    assert second.store.calls == ["wait", "compare_set", "set", "set", "set"]
    assert third.store.calls == ["wait", "get"]


def test_a_record_that_somebody_has_written_over_is_written_again(hosts: list[Host]) -> None:
    left_out, *others = hosts
    left_out.session.sends_heartbeats = False
    newest = all_agree(others, lost=["a"])
    for host in hosts:
        host.session.sends_heartbeats = host is left_out
    hosts[0].store.set(record_key(JOB), "garbage")
    assert isinstance(left_out.asks(), Undecided)  # it brings the one that it knows, which is older
    left_out.session.sends_heartbeats = False
    followed = all_agree(others, lost=["a"])
    assert (followed.generation, followed.parent) == (3, newest.digest)


def test_who_holds_none_is_refused_where_the_record_cannot_be_read(hosts: list[Host], endpoint: Endpoint) -> None:
    hosts[0].store.set(record_key(JOB), "garbage")
    mismatched_agent = Host("d", endpoint)
    answer = mismatched_agent.asks()
    mismatched_agent.session.close()
    assert isinstance(answer, Undecided)
    assert answer.refused == (("d", "the job's record in the store cannot be read"),)


def test_a_record_of_another_protocol_is_left_alone(hosts: list[Host]) -> None:
    store = hosts[0].store
    store.set(record_key(JOB), "of another version")
    store.set(f"elasticgang/protocol/{JOB}", f"{PROTOCOL}1")
    host = hosts[0]
    host.asks()  # without a look at the store, since it is the first question after a record
    answer = host.asks()
    assert isinstance(answer, Undecided)
    assert answer.refused == (("a", f"its protocol is {PROTOCOL}, but the job's is {PROTOCOL}1"),)
    assert store.get(record_key(JOB)) == b"of another version"
