"""Members that have begun to exit, in an agent's state machine (AGENT-8)."""

from __future__ import annotations

import pytest

from elasticgang.protocol.agent_events import (
    Abort,
    DeliverRecord,
    ExitBegan,
    Fail,
    Instruction,
    KillRanks,
    RequestRecord,
    Restart,
)
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import Unrecoverable
from tests.unit.agent_hosts import Host, rank_did, record_of, running


def begins_to_exit(host: Host, member: str) -> list[Instruction]:
    return host.state.handle(ExitBegan(member))


def test_it_is_killed_and_the_others_go_on_before_it_is_gone() -> None:
    host = running()
    assert begins_to_exit(host, "a1") == [Abort(("a0", "a2"), 1, rank_did("died", 1)), KillRanks(("a1",))]
    host.asks("a0", broken=True)
    assert host.asks("a2", broken=True)[-1] == RequestRecord()
    report = host.state.report()
    assert report.exited == ("a1",)
    assert [member.id for member in report.members] == ["a0", "a2"]
    record = record_of(["a0", "a2"], 2)
    assert host.is_answered(record) == [DeliverRecord(("a0", "a2"), record)]
    assert host.exits("a1") == [Restart(1, 0.0)]


def test_it_is_named_if_the_state_is_lost_with_it() -> None:
    host = running()
    begins_to_exit(host, "a1")
    host.asks("a0", broken=True)
    host.asks("a2", broken=True)
    (failed,) = host.is_answered(Unrecoverable("no live member holds step 3"))
    assert failed == Fail(1, "the job's state is lost: no live member holds step 3; rank 1 died last")


def test_the_rest_ask_again_only_once() -> None:
    host = running()
    host.asks("a0", broken=True)
    host.asks("a2", broken=True)
    assert begins_to_exit(host, "a1")[-1] == RequestRecord()
    assert host.exits("a1") == [Restart(1, 0.0)]


def test_it_is_killed_before_the_next_record_is_asked_for() -> None:
    host = running()
    host.asks("a0", broken=True)
    host.asks("a2", broken=True)
    assert begins_to_exit(host, "a1")[-2:] == [KillRanks(("a1",)), RequestRecord()]


def test_one_that_waits_for_the_record_is_not_in_the_request() -> None:
    host = running()
    host.asks("a0", broken=True)
    host.asks("a1", broken=True)
    assert host.asks("a2", broken=True) == [RequestRecord()]
    assert begins_to_exit(host, "a1") == [KillRanks(("a1",)), RequestRecord()]
    assert [member.id for member in host.state.report().members] == ["a0", "a2"]


def test_a_record_that_seats_it_is_over_at_once() -> None:
    host = running()
    for member in ("a0", "a1", "a2"):
        host.asks(member, broken=True)
    begins_to_exit(host, "a1")
    record = record_of(["a0", "a1", "a2"], 2)
    expected = [
        DeliverRecord(("a0", "a2"), record),
        Abort(("a0", "a2"), 2, rank_did("died before the generation began", 1)),
    ]
    assert host.is_answered(record) == expected


def test_its_messages_count_no_more() -> None:
    host = running()
    begins_to_exit(host, "a1")
    assert host.asks("a1") == []
    assert host.leaves("a1", finished=True) == []
    assert not host.state.finished
    assert host.exits("a1")[-1] == Restart(1, 0.0)


@pytest.mark.parametrize("phase", ["starting", "left", "unknown", "exiting"])
def test_of_one_that_takes_no_part_nothing_follows(phase: str) -> None:
    host = running()
    if phase == "starting":
        host.exits("a1")
        host.start("a1'")
    elif phase == "left":
        host.leaves("a1", finished=True)
    elif phase == "exiting":
        begins_to_exit(host, "a1")
    member = {"starting": "a1'", "unknown": "a9"}.get(phase, "a1")
    assert not host.state.takes_part(member)
    assert begins_to_exit(host, member) == []


def test_the_last_holder_of_the_state_waits_for_its_restart() -> None:
    host = running(2)
    begins_to_exit(host, "a1")
    assert host.state.num_successors([]) == 1
    assert host.state.num_successors(["a1"]) == 0
    host.exits("a1")
    assert host.state.num_successors([]) == 1


def test_the_job_goes_on_when_the_others_have_left() -> None:
    host = running(2)
    host.commits("a0", "a1")
    begins_to_exit(host, "a1")
    host.asks("a0", broken=True, tip=Attempt(1, 1))
    host.leaves("a0", finished=False, in_order=True)
    assert host.exits("a0", 0, goes=True) == []
    assert host.exits("a1")[-1] == Restart(1, 0.0)
