"""Newcomers, other agents and the first generation, in an agent's state machine (AGENT-3, AGENT-4, AGENT-8)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elasticgang.protocol.agent_events import (
    Abort,
    AnnounceJoin,
    CoordinatorReturned,
    DeliverRecord,
    HostLost,
    NotifyOver,
    PeerNotice,
    RequestQuorum,
    Restart,
    StartExpired,
    Warn,
)
from elasticgang.protocol.record import Undecided
from tests.unit.agent_hosts import Host, record_of, running

# -- AGENT-3: a newcomer ends no generation


def test_a_newcomer_is_announced_and_joins_with_the_next_generation() -> None:
    host = running()
    host.exits("a1")
    host.asks("a0", broken=True)
    assert host.asks("a2", broken=True) == [RequestQuorum()]
    record = record_of(["a0", "a2"], 2)
    host.is_answered(record)
    host.start("a1'")
    assert host.asks("a1'") == [AnnounceJoin(("a0", "a2"), 2)]
    assert host.asks("a0") == []
    assert host.asks("a2") == [RequestQuorum()]
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
    assert host.exits("a0")[0] == Abort(("a1",), 1, "rank 0 was killed by SIGKILL")
    assert host.asks("a1", broken=True) == [RequestQuorum()]
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
    assert host.exits("a0") == [Abort(("a1",), 1, "rank 0 was killed by SIGKILL"), Restart(0, 0.0)]
    assert host.asks("a1", broken=True) == [RequestQuorum()]
    host = beside("b0", num_ranks=1)
    assert host.asks("a0", broken=True) == [Abort((), 1, "rank 0 lost a peer"), RequestQuorum()]


def test_an_orderly_request_ends_no_generation() -> None:
    host = beside("b0", num_ranks=1)
    assert host.asks("a0") == [RequestQuorum()]


def test_a_received_end_notice_ends_the_generation_and_is_not_forwarded() -> None:
    host = beside("b0")
    assert host.state.handle(PeerNotice(1, over=True, reason="rank 0 of b died")) == [
        Abort(("a0", "a1"), 1, "rank 0 of b died")
    ]
    assert host.state.handle(PeerNotice(1, over=True)) == []
    assert host.asks("a0", broken=True) == [Abort(("a1",), 1, "rank 0 lost a peer")]
    assert host.asks("a1", broken=True) == [RequestQuorum()]


def test_an_end_notice_may_come_before_its_record() -> None:
    host = beside("b0")
    host.asks("a0")
    host.asks("a1")
    assert host.state.handle(PeerNotice(2, over=True)) == []
    record = record_of(["a0", "a1", "b0"], 2)
    assert host.is_answered(record) == [
        DeliverRecord(("a0", "a1"), record),
        Abort(("a0", "a1"), 2, "it was over before it began"),
    ]


# AGENT-7
def test_an_end_notice_about_a_later_generation_ends_only_that_one() -> None:
    host = beside("b0")
    assert host.state.handle(PeerNotice(1 << 60, over=True)) == []
    assert host.state.handle(PeerNotice(3, over=True)) == []
    host.asks("a0")
    host.asks("a1")
    second, third = (record_of(["a0", "a1", "b0"], generation) for generation in (2, 3))
    assert host.is_answered(second) == [DeliverRecord(("a0", "a1"), second)]
    assert host.asks("a0", broken=True) == [Abort(("a1",), 2, "rank 0 lost a peer")]
    host.asks("a1", broken=True)
    assert host.is_answered(third) == [
        DeliverRecord(("a0", "a1"), third),
        Abort(("a0", "a1"), 3, "it was over before it began"),
    ]


def test_an_agent_whose_first_rank_leaves_waits_for_ranks_not_yet_started() -> None:
    host = Host(2)
    host.start("a0")
    host.asks("a0")
    host.leaves("a0", finished=False, num_steps=9)
    assert host.exits("a0", 0, goes=True) == []
    host.start("a1")
    assert host.asks("a1") == [RequestQuorum()]


# -- AGENT-8: the end of a generation is repeated to a coordinator that has returned


def test_the_agent_repeats_the_end_of_the_present_generation_to_a_coordinator_that_has_returned() -> None:
    host = beside("b0")
    assert host.state.handle(CoordinatorReturned("c2")) == []
    host.asks("a0", broken=True)
    for incarnation in ("c3", "c4"):
        assert host.state.handle(CoordinatorReturned(incarnation)) == [NotifyOver(1, "rank 0 lost a peer")]
    host.asks("a1", broken=True)
    host.is_answered(record_of(["a0", "a1", "b0"], 2))
    assert host.state.handle(CoordinatorReturned("c5")) == []


def test_the_agent_does_not_repeat_an_end_that_another_agent_has_notified() -> None:
    host = beside("b0")
    host.state.handle(PeerNotice(1, over=True, reason="rank 0 of b died"))
    host.asks("a0", broken=True)
    assert host.state.handle(CoordinatorReturned("c2")) == []


def test_a_join_notice_is_announced_only_in_its_generation() -> None:
    host = beside("b0")
    assert host.state.handle(PeerNotice(1, over=False)) == [AnnounceJoin(("a0", "a1"), 1)]
    assert host.state.handle(PeerNotice(2, over=False)) == []


# AGENT-6
def test_an_agent_without_live_ranks_requests_so_that_the_others_can_go_on() -> None:
    host = beside("b0", num_ranks=1)
    assert host.exits("a0") == [Abort((), 1, "rank 0 was killed by SIGKILL"), RequestQuorum(), Restart(0, 0.0)]
    report = host.state.report()
    assert (report.members, report.exited) == ((), ("a0",))
    without = replace(record_of(["b0"], 2), agents=("a", "b"), digest="")
    assert host.is_answered(without) == [DeliverRecord((), without), RequestQuorum()]
    host.start("a0'")
    assert host.asks("a0'") == [RequestQuorum()]  # instead of the one that is open


def test_a_lone_agent_without_live_ranks_does_not_request() -> None:
    host = running(1)
    assert host.exits("a0") == [Restart(0, 0.0)]


def test_an_agent_of_spares_keeps_a_request_open() -> None:
    host = beside("b0", "b1", spares=["a0", "a1"])
    assert host.state.may_request()
    record = record_of(["b0"], 2, spares=["a0", "a1"])
    assert host.is_answered(record) == [DeliverRecord(("a0", "a1"), record), RequestQuorum()]
    assert host.exits("a0") == [RequestQuorum(), Restart(0, 0.0)]  # or it would be given the next seat


def test_a_record_that_seats_only_dead_ranks_of_this_agent() -> None:
    """It was agreed by a call that had timed out; since then the rank has died, and its successor has asked."""
    host = beside("b0", num_ranks=1)
    host.asks("a0")
    host.exits("a0")
    host.start("a0'")
    host.asks("a0'")
    record = record_of(["a0", "b0"], 2)
    assert host.is_answered(record) == [
        DeliverRecord((), record),
        Abort((), 2, "rank 0 died before the generation began"),
        RequestQuorum(),
    ]


def test_a_rank_that_left_during_a_request_is_not_awaited() -> None:
    host = beside("b0")
    host.asks("a0")
    host.asks("a1")
    assert host.leaves("a1", finished=False) == [
        RequestQuorum()
    ]  # the generation that it was in is over for it already
    record = record_of(["a0", "a1", "b0"], 2)
    assert host.is_answered(record)[1] == Abort(("a0",), 2, "rank 1 died before the generation began")


def test_a_lost_host_ends_its_generation_and_is_reported_for_good() -> None:
    host = beside("b0")
    assert host.state.handle(HostLost("z")) == []
    assert host.state.handle(HostLost("b")) == [Abort(("a0", "a1"), 1, "the host of agent b is lost")]
    host.asks("a0", broken=True)
    assert host.asks("a1", broken=True) == [RequestQuorum()]
    assert host.state.report().dead_agents == ("b", "z")
    assert host.state.report().exited == ()
    assert host.state.handle(HostLost("c")) == [RequestQuorum()]  # a question that is open does not say so


def test_undecided_answers_are_requested_again_less_and_less_often() -> None:
    host = running(1)
    host.asks("a0")
    delays = [
        again.delay_s
        for _ in range(30)
        for again in host.is_answered(Undecided("why not"))
        if isinstance(again, RequestQuorum)
    ]
    assert delays[:10] == [0.05] * 10
    assert delays == sorted(delays)
    assert delays[-1] == 1.0
    host.is_answered(record_of(["a0"], 2))
    host.asks("a0")
    assert host.is_answered(Undecided("why not")) == [RequestQuorum(0.05)]


# -- AGENT-4: ranks that are starting are waited for, before the first generation


def test_the_first_generation_waits_for_all_ranks() -> None:
    host = Host(3)
    host.start("a0")
    assert host.asks("a0") == []
    host.start("a1", "a2")
    assert host.asks("a2") == []
    assert host.asks("a1") == [RequestQuorum()]


def test_the_first_generation_does_not_wait_for_ever() -> None:
    host = Host(3)
    host.start("a0", "a1", "a2")
    assert host.state.handle(StartExpired()) == []
    host = Host(3)
    host.start("a0", "a1", "a2")
    host.asks("a0")
    assert host.state.handle(StartExpired()) == [RequestQuorum()]
    host = Host(3)
    host.start("a0", "a1", "a2")
    host.state.handle(StartExpired())
    assert host.asks("a1") == [RequestQuorum()]


def test_later_generations_do_not_wait_for_starting_ranks() -> None:
    host = running(2)
    host.exits("a1")
    host.start("a1'")
    assert host.asks("a0", broken=True) == [RequestQuorum()]


def test_a_script_that_ends_without_joining_is_not_awaited() -> None:
    host = Host(2)
    host.start("a0", "a1")
    host.asks("a0")
    asked, warned = host.exits("a1", 0)
    assert asked == RequestQuorum()
    assert isinstance(warned, Warn)
