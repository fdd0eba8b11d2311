"""Newcomers, other agents and the first generation, in an agent's state machine (AGENT-3, AGENT-4, AGENT-7)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from elasticgang.protocol.agent_events import (
    Abort,
    AnnounceJoin,
    DeliverRecord,
    PeerNotice,
    RequestRecord,
    Restart,
    StartExpired,
    Warn,
)
from elasticgang.protocol.end_cause import EndCause
from tests.unit.agent_hosts import Host, rank_did, record_of, running

# -- AGENT-3: a newcomer ends no generation


def test_a_newcomer_is_announced_and_joins_with_the_next_generation() -> None:
    host = running()
    host.exits("a1")
    host.asks("a0", broken=True)
    assert host.asks("a2", broken=True) == [RequestRecord()]
    record = record_of(["a0", "a2"], 2)
    host.is_answered(record)
    host.start("a1'")
    assert host.asks("a1'") == [AnnounceJoin(("a0", "a2"), 2)]
    assert host.asks("a0") == []
    assert host.asks("a2") == [RequestRecord()]
    assert {member.id for member in host.state.report().members} == {"a0", "a1'", "a2"}


def test_a_newcomer_that_requests_after_an_error_ends_no_generation() -> None:
    host = running(2)
    host.start("a2")
    assert host.asks("a2", broken=True) == [AnnounceJoin(("a0", "a1"), 1)]


def test_a_spare_keeps_its_request_open_and_delays_no_rank() -> None:
    host = Host(3)
    host.start("a0", "a1", "a2")
    for member in ("a0", "a1", "a2"):
        host.asks(member)
    record = record_of(["a0", "a1"], spares=["a2"])
    assert host.is_answered(record) == [DeliverRecord(("a0", "a1", "a2"), record)]  # nobody is announced
    assert host.exits("a0")[0] == Abort(("a1",), 1, rank_did("was killed by SIGKILL", 0))
    assert host.asks("a1", broken=True) == [RequestRecord()]
    assert {member.id for member in host.state.report().members} == {"a1", "a2"}


def test_the_death_of_a_spare_ends_no_generation() -> None:
    host = Host(2)
    host.start("a0", "a1")
    host.asks("a0")
    host.asks("a1")
    host.is_answered(record_of(["a0"], spares=["a1"]))
    assert host.exits("a1") == [Restart(1, 0.0)]


# -- other agents


def beside(*members: str, spares: Iterable[str] = (), num_ranks: int = 2) -> Host:
    """The ranks of agent a and `members` of others are in generation 1."""
    host = Host(num_ranks)
    mine = [f"a{rank}" for rank in range(num_ranks)]
    host.start(*mine)
    for member in mine:
        host.asks(member)
    host.is_answered(record_of([member for member in (*mine, *members) if member not in spares], spares=spares))
    return host


def test_the_end_is_broadcast_once_even_without_seated_ranks_here() -> None:
    host = beside("b0")
    assert host.exits("a0") == [Abort(("a1",), 1, rank_did("was killed by SIGKILL", 0)), Restart(0, 0.0)]
    assert host.asks("a1", broken=True) == [RequestRecord()]
    host = beside("b0", num_ranks=1)
    assert host.asks("a0", broken=True) == [Abort((), 1, rank_did("lost a peer", 0, is_effect=True)), RequestRecord()]


def test_an_orderly_request_ends_no_generation() -> None:
    host = beside("b0", num_ranks=1)
    assert host.asks("a0") == [RequestRecord()]


def test_a_received_end_notice_ends_the_generation_and_is_not_forwarded() -> None:
    host = beside("b0")
    died = rank_did("died", 0, agent="b", is_effect=True)
    assert host.state.handle(PeerNotice(1, over=True, cause=died)) == [Abort(("a0", "a1"), 1, died)]
    assert host.state.handle(PeerNotice(1, over=True)) == []
    assert host.asks("a0", broken=True) == [Abort(("a1",), 1, rank_did("lost a peer", 0, is_effect=True))]
    assert host.asks("a1", broken=True) == [RequestRecord()]


# AGENT-7
@pytest.mark.parametrize("generation", [1, 3, 1 << 60])
def test_an_end_notice_about_another_generation_is_ignored(generation: int) -> None:
    host = beside("b0")
    host.asks("a0")
    host.asks("a1")
    second = record_of(["a0", "a1", "b0"], 2)
    assert host.is_answered(second) == [DeliverRecord(("a0", "a1"), second)]
    assert host.state.handle(PeerNotice(generation, over=True)) == []
    assert host.state.handle(PeerNotice(2, over=True, cause=EndCause("late"))) == [
        Abort(("a0", "a1"), 2, EndCause("late"))
    ]


def test_an_agent_whose_first_rank_leaves_waits_for_ranks_not_yet_started() -> None:
    host = Host(2)
    host.start("a0")
    host.asks("a0")
    host.leaves("a0", finished=False, num_steps=9)
    assert host.exits("a0", 0, goes=True) == []
    host.start("a1")
    assert host.asks("a1") == [RequestRecord()]


def test_a_join_notice_is_announced_only_in_its_generation() -> None:
    host = beside("b0")
    assert host.state.handle(PeerNotice(1, over=False)) == [AnnounceJoin(("a0", "a1"), 1)]
    assert host.state.handle(PeerNotice(2, over=False)) == []


# AGENT-6
def test_an_agent_without_live_ranks_requests_so_that_the_others_can_go_on() -> None:
    host = beside("b0", num_ranks=1)
    assert host.exits("a0") == [Abort((), 1, rank_did("was killed by SIGKILL", 0)), RequestRecord(), Restart(0, 0.0)]
    report = host.state.report()
    assert (report.members, report.exited) == ((), ("a0",))
    without = replace(record_of(["b0"], 2), agents=("a", "b"), digest="")
    assert host.is_answered(without) == [DeliverRecord((), without), RequestRecord()]
    host.start("a0'")
    assert host.asks("a0'") == [RequestRecord()]  # instead of the one that is open


def test_a_lone_agent_without_live_ranks_does_not_request() -> None:
    host = running(1)
    assert host.exits("a0") == [Restart(0, 0.0)]


def test_an_agent_of_spares_keeps_a_request_open() -> None:
    host = beside("b0", "b1", spares=["a0", "a1"])
    assert host.state.may_request()
    record = record_of(["b0"], 2, spares=["a0", "a1"])
    assert host.is_answered(record) == [DeliverRecord(("a0", "a1"), record), RequestRecord()]
    assert host.exits("a0") == [RequestRecord(), Restart(0, 0.0)]  # or it would be given the next seat


def test_a_record_that_seats_only_dead_ranks_of_this_agent() -> None:
    """It was decided from an earlier report; since then the rank has died, and its successor has requested."""
    host = beside("b0", num_ranks=1)
    host.asks("a0")
    host.exits("a0")
    host.start("a0'")
    host.asks("a0'")
    record = record_of(["a0", "b0"], 2)
    assert host.is_answered(record) == [
        DeliverRecord((), record),
        Abort((), 2, rank_did("died before the generation began", 0)),
        RequestRecord(),
    ]


def test_a_rank_that_left_during_a_request_is_not_awaited() -> None:
    host = beside("b0")
    host.asks("a0")
    host.asks("a1")
    assert host.leaves("a1", finished=False) == [
        RequestRecord()
    ]  # the generation that it was in is over for it already
    record = record_of(["a0", "a1", "b0"], 2)
    assert host.is_answered(record)[1] == Abort(("a0",), 2, rank_did("died before the generation began", 1))


# -- AGENT-4: ranks that are starting are waited for, before the first generation


def test_the_first_generation_waits_for_all_ranks() -> None:
    host = Host(3)
    host.start("a0")
    assert host.asks("a0") == []
    host.start("a1", "a2")
    assert host.asks("a2") == []
    assert host.asks("a1") == [RequestRecord()]


def test_the_first_generation_does_not_wait_for_ever() -> None:
    host = Host(3)
    host.start("a0", "a1", "a2")
    assert host.state.handle(StartExpired()) == []
    host = Host(3)
    host.start("a0", "a1", "a2")
    host.asks("a0")
    assert host.state.handle(StartExpired()) == [RequestRecord()]
    host = Host(3)
    host.start("a0", "a1", "a2")
    host.state.handle(StartExpired())
    assert host.asks("a1") == [RequestRecord()]


def test_later_generations_do_not_wait_for_starting_ranks() -> None:
    host = running(2)
    host.exits("a1")
    host.start("a1'")
    assert host.asks("a0", broken=True) == [RequestRecord()]


def test_a_script_that_ends_without_joining_is_not_awaited() -> None:
    host = Host(2)
    host.start("a0", "a1")
    host.asks("a0")
    asked, warned = host.exits("a1", 0)
    assert asked == RequestRecord()
    assert isinstance(warned, Warn)
