"""Questions of several agents to a real coordinator, and what they cost its store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest

from elasticgang.layout import ParallelLayout
from elasticgang.quorum.contact import Contact, Heard, present_record
from elasticgang.quorum.coordinator import Coordinator, Endpoint, reach, record_key
from elasticgang.quorum.decide import NOTHING_SEEN, PROTOCOL, Lost, MemberReport, Record, Report, Void

TIMEOUT_S = 20.0
JOB = "job"


class CountedStore:
    """The real one, and the names of what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._store, name)
        self.calls.append(name)
        return function


class Host:
    """An agent of one rank, as far as its contact sees it."""

    def __init__(self, agent: str, endpoint: Endpoint) -> None:
        self.store = cast(Any, CountedStore(endpoint.store))
        self.contact = Contact(replace(endpoint, store=self.store), JOB, agent, None, TIMEOUT_S)
        self.contact.start(Heard(beat=lambda _: None, notice=lambda *_: None, lost=lambda _: None))
        self._member = MemberReport(f"{agent}0", 0, "127.0.0.1:1")
        self.record: Record | None = None

    def report(self, lost: Sequence[str] = ()) -> Report:
        record, member = self.record, self._member
        if record is not None:
            member = replace(member, tip=record.committed, holds=(0, 0, 0), entered=record.generation, active=True)
        return Report(
            agent=self.contact.agent,
            host=self.contact.agent,
            job=JOB,
            coordinator=self.contact.endpoint.incarnation,
            layout=ParallelLayout(),
            seen=NOTHING_SEEN if record is None else record.name,
            members=(member,),
            lost=tuple(lost),
            min_agents=3,
        )

    def asks(self, lost: Sequence[str] = ()) -> Record | Void | Lost:
        while (answer := self.contact.agree(self.report(lost))) is None:
            pass
        if isinstance(answer, Record):
            self.record = answer
        return answer

    def agrees(self, lost: Sequence[str] = ()) -> Record:
        answer: Record | Void | Lost | None = None
        while not isinstance(answer, Record):
            answer = self.asks(lost)
            assert not (isinstance(answer, Void) and answer.refused), answer.reason
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
        host.contact.close()


def all_agree(hosts: Sequence[Host], lost: Sequence[str] = ()) -> Record:
    for host in hosts:
        host.contact.beats = True
    with ThreadPoolExecutor(len(hosts)) as threads:
        agreed: list[Record] = list(threads.map(lambda host: host.agrees(lost), hosts))
    assert agreed == [agreed[0]] * len(agreed)
    return agreed[0]


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
    left_out.contact.beats = False
    newest = all_agree(others, lost=["a"])
    assert (newest.generation, newest.agents) == (2, ("b", "c"))
    for host in hosts:
        host.contact.beats = host is left_out  # the lighthouse waits for nobody else, soon
    assert left_out.asks() == Void("a generation was agreed without this agent")
    assert present_record(left_out.store, JOB)[1] == newest
    again = left_out.asks()
    assert isinstance(again, Void)
    assert again.reason == "no witness of generation 2 is here, but b0, c0 may live"


def test_those_that_wait_for_a_record_that_does_not_come_take_turns(hosts: list[Host]) -> None:
    """Whose turn is first is gone once all have asked; who comes next writes it, and the last has nothing to do."""
    for host in hosts:
        host.store.calls.clear()
    first, second, third = hosts
    first.contact._by_another = lambda *_: Void("it is gone")  # type: ignore[method-assign,assignment]
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(Host.asks, hosts))
    assert answers[0] == Void("it is gone")
    assert isinstance(answers[1], Record)
    assert answers[1] == answers[2]
    assert second.store.calls == ["wait", "compare_set", "set", "set", "set"]
    assert third.store.calls == ["wait", "get"]


def test_a_record_that_somebody_has_written_over_is_written_again(hosts: list[Host]) -> None:
    left_out, *others = hosts
    left_out.contact.beats = False
    newest = all_agree(others, lost=["a"])
    for host in hosts:
        host.contact.beats = host is left_out
    hosts[0].store.set(record_key(JOB), "garbage")
    assert isinstance(left_out.asks(), Void)  # it brings the one that it knows, which is older
    left_out.contact.beats = False
    followed = all_agree(others, lost=["a"])
    assert (followed.generation, followed.parent) == (3, newest.digest)


def test_who_holds_none_is_refused_where_the_record_cannot_be_read(hosts: list[Host], endpoint: Endpoint) -> None:
    hosts[0].store.set(record_key(JOB), "garbage")
    stranger = Host("d", endpoint)
    answer = stranger.asks()
    stranger.contact.close()
    assert isinstance(answer, Void)
    assert answer.refused == (("d", "the job's record in the store cannot be read"),)


def test_a_record_of_another_protocol_is_left_alone(hosts: list[Host]) -> None:
    store = hosts[0].store
    store.set(record_key(JOB), "of another version")
    store.set(f"elasticgang/protocol/{JOB}", f"{PROTOCOL}1")
    host = hosts[0]
    host.asks()  # without a look at the store, since it is the first question after a record
    answer = host.asks()
    assert isinstance(answer, Void)
    assert answer.refused == (("a", f"its protocol is {PROTOCOL}, but the job's is {PROTOCOL}1"),)
    assert store.get(record_key(JOB)) == b"of another version"
