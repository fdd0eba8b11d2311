"""Which hosts an agent reaches: when it tries them, and for how long it remembers (REACH-1, REACH-2)."""

from __future__ import annotations

import pytest

from elasticgang.layout import ParallelLayout
from elasticgang.protocol import agent_events as events
from elasticgang.protocol.agent_events import (
    Abort,
    HostsTried,
    Instruction,
    PeerNotice,
    RecordRequested,
    RequestRecord,
    TellUnreached,
    TryHosts,
    Warn,
)
from elasticgang.protocol.agent_lifecycle import AgentLifecycle, AgentOptions
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.reach import MAX_SETTLE_S, RETRY_S, SETTLE_S, WINDOW_S, Reach
from elasticgang.protocol.record import Record
from tests.unit.agent_hosts import Host, rank_did, record_of, report_of

NOT_REACHED = "no answer within 2.5 s"
ADDRESSES = ("10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:3")


def record(generation: int = 1) -> Record:
    return record_of(["a0", "b0", "c0"], generation, addresses=ADDRESSES)


def seated(generation: int = 1) -> Host:
    """Agent a with one rank, beside b and c."""
    host = Host(1)
    host.start("a0")
    host.asks("a0")
    host.is_answered(record(generation))
    return host


def stops(state: AgentState, *, timed_out: bool = False, connected: bool = True) -> list[Instruction]:
    return state.handle(RecordRequested("a0", report_of("a0"), ParallelLayout(), True, timed_out, connected=connected))


def tried(state: AgentState, number: int, unreached: str, at_s: float = 0.0, reached: str = "") -> list[Instruction]:
    found = tuple((agent, NOT_REACHED) for agent in unreached)
    return state.handle(HostsTried("a", number, tuple(reached or set("bc").difference(unreached)), found, at_s))


BOTH = (("b", "10.0.0.2:2"), ("c", "10.0.0.3:3"))


# REACH-1
def test_an_agent_reports_only_once_it_knows_which_hosts_it_reaches() -> None:
    state = seated().state
    ended = Abort((), 1, rank_did("timed out in a collective", 0, is_effect=True, timed_out=True))
    assert stops(state, timed_out=True) == [ended, TryHosts("a", 1, BOTH)]
    assert not state.may_request()
    warning = Warn(f"this host does not reach 10.0.0.3 ({NOT_REACHED})")
    assert tried(state, 1, "c") == [TellUnreached(("c",)), warning, RequestRecord()]
    assert state.may_request()


# REACH-1
def test_it_tries_them_when_a_rank_does_not_connect_and_when_another_agent_tells_of_a_time_out() -> None:
    state = seated().state
    assert stops(state, connected=False)[-1] == TryHosts("a", 1, BOTH)
    state = seated().state
    notice = PeerNotice(1, over=True, cause=EndCause("timed out", ("b",), (0,), timed_out=True))
    assert state.handle(notice)[-1] == TryHosts("a", 1, BOTH)
    assert stops(state)[-1:] != [RequestRecord()]
    assert tried(state, 1, "") == [RequestRecord()]


# REACH-1
def test_it_tries_them_once_in_each_generation_and_not_without_such_a_reason() -> None:
    state = seated().state
    assert stops(state)[-1] == RequestRecord()  # a peer was lost
    state = seated().state
    stops(state, timed_out=True)
    notice = PeerNotice(1, over=True, cause=EndCause("timed out", ("b",), (0,), timed_out=True))
    assert not any(isinstance(each, TryHosts) for each in state.handle(notice))
    tried(state, 1, "")
    state.handle(events.RecordAnswered(record(2)))
    assert stops(state, connected=False)[-1] == TryHosts("a", 2, BOTH)


# REACH-1
def test_an_agent_that_is_alone_tries_nobody() -> None:
    host = Host(1)
    host.start("a0")
    host.asks("a0")
    host.is_answered(record_of(["a0"], addresses=ADDRESSES[:1]))
    assert stops(host.state, connected=False)[-1] == RequestRecord()


def test_a_try_of_a_former_id_or_of_hosts_that_are_gone_counts_for_nothing() -> None:
    state = seated().state
    stops(state, timed_out=True)
    assert state.handle(HostsTried("z", 1, (), (("b", NOT_REACHED),), 0.0)) == []
    assert not state.may_request()
    assert tried(state, 1, "x") == [RequestRecord()]
    assert state.reach.unreached == ()


def test_a_record_without_an_unreached_host_ends_what_is_told_of_it() -> None:
    state = seated().state
    stops(state, timed_out=True)
    tried(state, 1, "c")
    following = record_of(["a0", "b0"], 2, addresses=ADDRESSES[:2])
    assert TellUnreached(()) in state.handle(events.RecordAnswered(following))
    assert state.reach.next_try_s is None


def test_that_ranks_do_not_connect_to_hosts_that_are_reached_is_told_once() -> None:
    state = seated().state
    texts: list[str] = []
    for number in range(1, 6):
        stops(state, connected=False)
        texts += [each.text for each in tried(state, number, "") if isinstance(each, Warn)]
        state.handle(events.RecordAnswered(record(number + 1)))
    (text,) = texts
    assert text.startswith("ranks of this host have not connected in 3 generations, although it reaches the other")


# AGENT-15
@pytest.mark.parametrize("lacks", ["", "comm process"])
def test_generations_that_something_else_has_ended_do_not_count_as_unconnected(lacks: str) -> None:
    """On this host or on another one, which notifies this one first."""
    state = seated().state
    what = "has no comm process"
    for number in range(1, 6):
        if not lacks:
            state.handle(PeerNotice(number, over=True, cause=rank_did(what, 0, agent="b")))
        request = RecordRequested("a0", report_of("a0"), ParallelLayout(), True, connected=False, lacks=lacks)
        done = state.handle(request)
        assert (Abort((), number, rank_did(what, 0)) in done) == bool(lacks)
        assert not [each for each in tried(state, number, "") if isinstance(each, Warn)]
        state.handle(events.RecordAnswered(record(number + 1)))


# REACH-2
def test_hosts_that_are_not_reached_are_tried_again_until_they_are() -> None:
    lifecycle = AgentLifecycle("a", AgentOptions("job", 1))
    lifecycle.handle(events.CoordinatorConnected("10.0.0.1", ADDRESSES[0]), 0.0)
    lifecycle.handle(events.Started("a0", 0), 0.0)
    asked = RecordRequested("a0", report_of("a0"), ParallelLayout(), False)
    lifecycle.handle(asked, 0.0)
    lifecycle.handle(events.RecordAnswered(record()), 0.0)
    lifecycle.handle(RecordRequested("a0", report_of("a0"), ParallelLayout(), True, True), 1.0)
    lifecycle.handle(HostsTried("a", 1, ("b",), (("c", NOT_REACHED),), 2.0), 2.0)
    now_s, number = 2.0, 1
    told: list[events.AgentInstruction] = []
    while not told:
        assert lifecycle.timers()["reach"] == now_s + RETRY_S
        assert lifecycle.handle(events.TimePassed(), now_s + RETRY_S / 2) == []
        now_s, number = now_s + RETRY_S, number + 1
        assert lifecycle.handle(events.TimePassed(), now_s) == [TryHosts("a", number, BOTH[1:])]
        assert "reach" not in lifecycle.timers()
        told = lifecycle.handle(HostsTried("a", number, ("c",), (), now_s), now_s)
    assert told == [TellUnreached(())]
    assert now_s == 2.0 + RETRY_S + SETTLE_S
    assert "reach" not in lifecycle.timers()


# REACH-2
def test_a_path_that_comes_and_goes_counts_only_once_it_lasts_and_ever_later() -> None:
    reach, now_s, waits = Reach(), 0.0, []
    for _ in range(9):
        reach.tried("b", "c", now_s)
        reach.tried("bc", "", now_s)
        reach.tried("b", "c", now_s + SETTLE_S / 2)  # lost again before it counted
        began_s = now_s = now_s + SETTLE_S
        while reach.unreached:
            reach.tried("bc", "", now_s)
            now_s += 1.0
        waits.append(now_s - 1.0 - began_s)
    assert waits == [SETTLE_S * 2**number for number in range(7)] + [MAX_SETTLE_S] * 2


# REACH-2
def test_losses_of_long_ago_do_not_count() -> None:
    reach = Reach()
    for began_s in (0.0, 100.0, 200.0, 200.0 + WINDOW_S):
        reach.tried("", "c", began_s)
        reach.tried("c", "", began_s)
        reach.tried("c", "", began_s + SETTLE_S)
        is_first = began_s in (0.0, 200.0 + WINDOW_S)
        assert reach.unreached == (() if is_first else ("c",))
        reach.tried("c", "", began_s + 4 * SETTLE_S)
        assert reach.unreached == ()
