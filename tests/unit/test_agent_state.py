"""When an agent requests a record, and what ends a generation (AGENT-1 and AGENT-2 of `protocol/agent_state.py`)."""

from __future__ import annotations

import signal

import pytest

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.agent_events import (
    Abort,
    AnnounceJoin,
    Committed,
    DeliverRecord,
    End,
    Exited,
    Fail,
    Finished,
    KillRanks,
    NotStarted,
    PeerNotice,
    RecordRequested,
    RequestRecord,
    Restart,
    RetireMembers,
    StartsStopped,
    Warn,
)
from elasticgang.protocol.agent_state import describe_exit
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import CheckpointRef, Undecided, Unrecoverable
from tests.unit.agent_hosts import KILLED, LAYOUT, Host, rank_did, record_of, report_of, running

# -- AGENT-1: a record is requested when every live member of the present generation has asked


def test_the_agent_requests_a_quorum_after_its_last_rank_has_requested() -> None:
    host = running()
    assert host.asks("a1") == []
    assert host.asks("a0") == []
    assert host.asks("a2") == [RequestRecord()]
    assert {member.id for member in host.state.report().members} == {"a0", "a1", "a2"}


def test_a_join_or_death_during_an_open_request_starts_a_newer_one() -> None:
    host = running()
    for member in ("a0", "a1", "a2"):
        last = host.asks(member)
    assert last == [RequestRecord()]
    host.start("a3")
    assert host.asks("a3") == [RequestRecord()]
    assert host.exits("a2") == [RequestRecord(), Restart(2, 0.0)]
    assert {member.id for member in host.state.report().members} == {"a0", "a1", "a3"}


def test_a_record_from_an_older_report_counts() -> None:
    host = running(2)
    host.asks("a0")
    host.asks("a1")
    host.start("a2")
    assert host.asks("a2") == [RequestRecord()]
    record = record_of(["a0", "a1"], 2)
    answer = host.is_answered(record)
    assert answer == [DeliverRecord(("a0", "a1"), record), AnnounceJoin(("a0", "a1"), 2)]
    assert not host.state.may_request()  # the newer report may still be on its way
    assert host.is_answered(record) == []
    assert host.is_answered(Undecided("it came too late")) == []


def test_a_newcomer_during_a_request_is_announced_with_the_answer() -> None:
    host = running(2)
    host.asks("a0")
    assert host.asks("a1") == [RequestRecord()]
    host.start("a2")
    host.asks("a2")
    record = record_of(["a0", "a1"], 2)
    assert host.is_answered(record) == [DeliverRecord(("a0", "a1"), record), AnnounceJoin(("a0", "a1"), 2)]


def test_the_agent_requests_when_the_last_awaited_rank_dies() -> None:
    host = running()
    host.asks("a0", broken=True)
    host.asks("a1", broken=True)
    assert host.exits("a2") == [RequestRecord(), Restart(2, 0.0)]


def test_a_death_during_a_request_ends_the_new_generation() -> None:
    host = running()
    for member in ("a0", "a1", "a2"):
        host.asks(member)
    host.exits("a1")
    record = record_of(["a0", "a1", "a2"], 2)
    assert host.is_answered(record) == [
        DeliverRecord(("a0", "a2"), record),
        Abort(("a0", "a2"), 2, rank_did("died before the generation began", 1)),
    ]


def test_all_ranks_die_during_a_request() -> None:
    host = running(1)
    assert host.asks("a0", broken=True) == [RequestRecord()]
    assert host.exits("a0") == [Restart(0, 0.0)]
    record = record_of(["a0"], 2)
    assert host.is_answered(record) == [DeliverRecord((), record)]
    host.start("a0'")
    assert host.asks("a0'") == [RequestRecord()]
    assert host.state.report().exited == ("a0",)


def test_an_undecided_answer_keeps_the_request_open() -> None:
    host = running(1)
    host.asks("a0")
    assert host.is_answered(Undecided("only joiners are here")) == []
    assert host.state.may_request()


def test_refusal_of_this_host_ends_the_job_and_refusal_of_another_does_not() -> None:
    host = running(1)
    host.asks("a0")
    assert host.is_answered(Undecided("refused", refused=(("b", "its layout is other"),))) == []
    assert host.is_answered(Undecided("refused", refused=(("a", "its layout is other"),))) == [
        Fail(2, "the job refused this host: its layout is other")
    ]


def test_when_another_agent_has_finished_newcomers_retire_and_ranks_in_doubt_request() -> None:
    newcomer = Host(1)
    newcomer.start("a0")
    assert newcomer.asks("a0") == [RequestRecord()]
    assert newcomer.state.handle(Finished()) == [RetireMembers(("a0",), "the job has finished")]
    assert not newcomer.state.may_request()
    doubting = running(2)
    doubting.asks("a0", tip=Attempt(4, 1), pending=Attempt(5, 1))
    doubting.asks("a1", tip=Attempt(4, 1), pending=Attempt(5, 1))
    assert doubting.state.handle(Finished()) == [RequestRecord()]


def test_a_lost_state_ends_the_job() -> None:
    host = running(1)
    host.asks("a0")
    (failed,) = host.is_answered(Unrecoverable("no live member holds step 3"))
    assert failed == Fail(1, "the job's state is lost: no live member holds step 3")


# AGENT-11
def test_a_lost_state_ends_no_rank_that_has_left_its_loop() -> None:
    host = running(4)
    host.leaves("a0", finished=False)  # by `break`
    for member in ("a1", "a2"):
        host.asks(member, broken=True)
    host.exits("a3")
    host.start("a3'")
    why = "the job's state is lost: no live member holds step 3"
    warning, retired = host.is_answered(Unrecoverable("no live member holds step 3"))
    assert warning == Warn(f"{why}; the ranks that have left their loop run to their end")
    assert retired == RetireMembers(("a1", "a2", "a3'"), why)
    assert host.exits("a1", 0) == host.exits("a2") == []
    assert host.asks("a3'") == [RetireMembers(("a3'",), why)]
    assert host.exits("a3'", 1) == []
    assert not host.state.may_request()
    assert host.exits("a0", 0) == []
    assert host.state.lost == why


def test_a_finished_jobs_state_is_not_lost_with_those_that_held_it() -> None:
    newcomer = Host(1)
    newcomer.start("a0")
    newcomer.asks("a0")
    newcomer.state.handle(Finished())
    assert newcomer.is_answered(Unrecoverable("no live member holds step 5")) == []
    doubting = running(1)
    doubting.asks("a0", tip=Attempt(4, 1), pending=Attempt(5, 1))
    doubting.state.handle(Finished())
    (failed,) = doubting.is_answered(Unrecoverable("no live member holds step 5"))
    assert failed == Fail(1, "the job's state is lost: no live member holds step 5")


# -- AGENT-2: a death, or an error, ends the generation for all others at once


def test_a_death_ends_the_generation_for_the_others() -> None:
    host = running()
    assert host.exits("a1") == [Abort(("a0", "a2"), 1, rank_did("was killed by SIGKILL", 1)), Restart(1, 0.0)]


def test_an_error_of_one_ends_the_generation_for_the_others() -> None:
    host = running()
    assert host.asks("a1", broken=True) == [Abort(("a0", "a2"), 1, rank_did("lost a peer", 1, is_effect=True))]
    assert host.asks("a0", broken=True) == [Abort(("a2",), 1, rank_did("lost a peer", 0, is_effect=True))]
    assert host.asks("a2", broken=True) == [RequestRecord()]


def test_a_collective_timeout_is_not_reported_as_a_lost_peer() -> None:
    host = running()
    assert host.asks("a1", broken=True, timed_out=True) == [
        Abort(("a0", "a2"), 1, rank_did("timed out in a collective", 1, is_effect=True, timed_out=True))
    ]


# LATE-1
def test_a_collective_timeout_is_told_once_if_another_rank_was_quicker_to_lose_its_peer() -> None:
    host = running()
    host.asks("a1", broken=True)
    host.asks("a0", broken=True)
    late = Abort((), 1, rank_did("timed out in a collective", 2, is_effect=True, timed_out=True))
    assert host.asks("a2", broken=True, timed_out=True) == [late, RequestRecord()]
    cause = rank_did("timed out in a collective", 0, agent="b", is_effect=True, timed_out=True)
    notice = PeerNotice(1, over=True, cause=cause)
    assert host.state.handle(notice) == []
    other = running()
    for member in ("a1", "a0", "a2"):
        other.asks(member, broken=True)
    assert other.state.handle(notice) == [Abort((), 1, cause)]
    assert other.state.handle(notice) == []


def test_ranks_that_loop_over_other_numbers_of_steps_end_the_job() -> None:
    """Those with fewer would end it with exit code 0 before the others have trained theirs."""
    host = Host(2)
    host.start("a0", "a1")
    assert host.asks("a0", settings=(("number of steps", "10"),)) == []
    (failed,) = host.asks("a1", settings=(("number of steps", "200"),))
    assert failed == Fail(2, "rank 1 loops over 200 steps, but the other ranks over 10")


OF_TEN, OF_MORE = (("number of steps", "10"),), (("number of steps", "200"),)


def restarted(*, num_ranks: int = 3) -> Host:
    """The last rank was killed after a committed step, and has started again: the others go on in generation 2."""
    host = Host(num_ranks)
    members = [f"a{rank}" for rank in range(num_ranks)]
    host.start(*members)
    for member in members:
        host.asks(member, settings=OF_TEN)
    host.is_answered(record_of(members))
    host.commits(*members)
    *others, killed = members
    assert Restart(num_ranks - 1, 0.0) in host.exits(killed)
    for member in others:
        host.asks(member, settings=OF_TEN, broken=True)
    host.is_answered(record_of(others, 2, committed=Attempt(1, 1)) if others else Undecided("no rank is here"))
    host.start(f"{killed}'")
    return host


REFUSED = "rank 2 differs from the others: it is refused, and not restarted"


# AGENT-12
@pytest.mark.parametrize(
    ("settings", "layout", "why"),
    [
        (OF_MORE, LAYOUT, "loops over 200 steps, but the other ranks over 10"),
        (OF_TEN, ParallelLayout(tp=4), f"declares {ParallelLayout(tp=4)}, but the other ranks {LAYOUT}"),
    ],
)
def test_a_rank_that_comes_back_with_other_settings_is_refused_alone(
    settings: tuple[tuple[str, str], ...], layout: ParallelLayout, why: str
) -> None:
    host = restarted()
    told = Warn(f"rank 2 {why}: it is refused, and not restarted")
    assert host.asks("a2'", settings=settings, layout=layout) == [told, KillRanks(("a2'",))]
    assert host.exits("a2'") == []
    assert host.asks("a0", settings=OF_TEN) == []  # nobody waits for the refused one
    assert host.asks("a1", settings=OF_TEN) == [RequestRecord()]
    assert [member.id for member in host.state.report().members] == ["a0", "a1"]


# AGENT-12, COMPARE-1
def test_a_rank_that_compares_at_other_steps_ends_the_start() -> None:
    host = Host(2)
    host.start("a0", "a1")
    host.asks("a0", settings=(("--compare-state", "5, with saves every 3 steps"),))
    told = host.asks("a1", settings=(("--compare-state", "5, with saves every 4 steps"),))
    other = "the other ranks 5, with saves every 3 steps"
    assert told == [Fail(2, f"rank 1 has the --compare-state 5, with saves every 4 steps, but {other}")]


# AGENT-12
def test_a_rank_that_comes_back_with_another_process_group_is_refused_alone() -> None:
    host = Host(2)
    host.start("a0", "a1")
    for member in ("a0", "a1"):
        host.asks(member, settings=(("process group", "isolated-gloo"),))
    host.is_answered(record_of(["a0", "a1"]))
    host.commits("a0", "a1")
    host.exits("a1")
    host.start("a1'")
    why = "rank 1 has the process group gloo, but the other ranks isolated-gloo: it is refused, and not restarted"
    assert host.asks("a1'", settings=(("process group", "gloo"),)) == [Warn(why), KillRanks(("a1'",))]


# AGENT-12
def test_a_rank_whose_state_is_of_another_form_is_refused_alone() -> None:
    host = restarted()
    assert host.asks("a2'", settings=OF_TEN) == [AnnounceJoin(("a0", "a1"), 2)]
    host.asks("a0", settings=OF_TEN)
    host.asks("a1", settings=OF_TEN)
    host.is_answered(record_of(["a0", "a1", "a2'"], 3, committed=Attempt(1, 1)))
    assert host.leaves("a2'", finished=False) == [Abort(("a0", "a1"), 3, rank_did("left before the last step", 2))]
    assert host.raises("a2'", None, differs=True) == [Warn(REFUSED)]


# AGENT-12
def test_a_spare_whose_state_is_of_another_form_is_refused_when_it_gets_a_seat() -> None:
    host = Host(3)
    host.start("a0", "a1", "a2")
    for member in ("a0", "a1", "a2"):
        host.asks(member)
    host.is_answered(record_of(["a0", "a1"], spares=["a2"]))
    host.commits("a0", "a1")
    host.exits("a1")
    host.asks("a0", broken=True)
    host.is_answered(record_of(["a0", "a2"], 2, committed=Attempt(1, 1)))
    host.leaves("a2", finished=False)
    assert host.raises("a2", None, differs=True) == [Warn(REFUSED)]


# AGENT-12
def test_a_rank_of_another_form_ends_a_job_that_starts_though_the_others_commit_meanwhile() -> None:
    host = running(2, max_restarts=3)
    host.commits("a0")
    (failed,) = [each for each in host.raises("a1", None, differs=True) if isinstance(each, Fail)]
    assert failed == Fail(1, "rank 1 exited with code 1 before its first committed step")


# AGENT-12
def test_a_rank_that_differs_in_a_step_ends_a_job_that_starts_though_it_has_committed() -> None:
    host = running(2, max_restarts=3)
    host.commits("a0", "a1")
    (failed,) = [each for each in host.raises("a1", 1, differs=True) if isinstance(each, Fail)]
    assert failed == Fail(1, "rank 1 exited with code 1 in step 1, because it differs from the others")


# AGENT-12
def test_an_agent_whose_last_rank_is_refused_fails() -> None:
    host = restarted(num_ranks=1)
    host.asks("a0'", settings=OF_TEN)
    host.is_answered(record_of(["a0'", "b0"], 3, committed=Attempt(1, 1)))
    (failed,) = [each for each in host.raises("a0'", None, differs=True) if isinstance(each, Fail)]
    assert failed == Fail(2, f"no rank of this host is left; {REFUSED.replace('2', '0')}")


def test_a_rank_that_goes_on_after_an_exception_is_the_cause() -> None:
    host = running()
    assert host.asks("a1", broken=True, left_step=True) == [
        Abort(("a0", "a2"), 1, rank_did("left a step by an exception, and goes on", 1))
    ]


@pytest.mark.parametrize(
    ("tip", "other", "why"),
    [
        (None, CheckpointRef(Attempt(300, 1), "older"), "could not load the checkpoint of step 400"),
        (None, None, "could not load the checkpoint of step 400"),
        (None, CheckpointRef(Attempt(400, 1), "digest"), "lost a peer"),
        (Attempt(400, 1), None, "lost a peer"),
    ],
)
def test_a_rank_that_could_not_load_the_checkpoint_has_lost_no_peer(
    tip: Attempt | None, other: CheckpointRef | None, why: str
) -> None:
    host = running()
    host.asks("a0", broken=True)
    host.asks("a1", broken=True)
    host.asks("a2", broken=True)
    host.is_answered(record_of(["a0", "a1", "a2"], 2, committed=Attempt(400, 1), checkpoint="digest"))
    request = RecordRequested("a1", report_of("a1", tip), LAYOUT, True, False, other)
    is_effect = why == "lost a peer"
    assert host.state.handle(request) == [Abort(("a0", "a2"), 2, rank_did(why, 1, is_effect=is_effect))]


def test_a_rank_that_leaves_before_the_last_step_ends_the_generation() -> None:
    host = running()
    assert host.leaves("a1", finished=False) == [Abort(("a0", "a2"), 1, rank_did("left before the last step", 1))]
    assert "a1" in host.state.report().exited
    host.asks("a0", broken=True)
    assert host.asks("a2", broken=True) == [RequestRecord()]


def test_an_orderly_exit_restarts_no_rank_and_the_others_go_on() -> None:
    host = running()
    host.leaves("a1", finished=False)
    (warning,) = host.exits("a1", 0)
    assert isinstance(warning, Warn)
    assert warning.text.startswith("rank 1 exited with code 0 before its loop had ended: not restarting it")


def test_one_warning_names_join_when_scripts_never_call_it() -> None:
    host = Host(3)
    host.start("a0", "a1", "a2")
    (warning,) = host.exits("a1", 0)
    assert isinstance(warning, Warn)
    assert warning.text.startswith("rank 1 exited with code 0 and never called `elasticgang.join`")
    assert host.exits("a0", 0) == host.exits("a2", 0) == []


def test_a_failed_script_that_never_joined_is_named_by_its_failure_alone() -> None:
    host = Host(1)
    host.start("a0")
    assert [type(done) for done in host.exits("a0", 3)] == [Fail]


def test_no_warning_after_the_job_has_finished() -> None:
    host = running(2)
    host.leaves("a0", finished=True)
    assert host.exits("a0", 0) == []
    assert host.exits("a1", 0) == []


def test_a_rank_that_never_joins_while_others_train_is_named() -> None:
    host = running(1)
    host.start("a1")
    (warning,) = host.exits("a1", 0)
    assert isinstance(warning, Warn)
    assert "never called `elasticgang.join`" in warning.text


def test_a_rank_that_joins_and_never_requests_is_named_and_costs_no_step() -> None:
    host = Host(2)
    host.start("a0", "a1")
    (warning,) = host.state.handle(Exited("a1", 0, joined=True))
    assert warning == Warn("rank 1 exited with code 0 before its loop had ended: not restarting it")


def test_the_warning_names_the_lost_step_only_if_other_ranks_go_on() -> None:
    host = running(2)
    host.leaves("a0", finished=False)
    (first,) = host.exits("a0", 0)
    host.leaves("a1", finished=False)
    (second,) = host.exits("a1", 0)
    assert isinstance(first, Warn)
    assert isinstance(second, Warn)
    assert first.text.endswith("; the other ranks lose the step under way (`manager.leave()` costs them none)")
    assert second.text.endswith("not restarting it")


def test_a_rank_that_leaves_in_order_ends_no_generation_and_is_not_awaited() -> None:
    host = running()
    host.asks("a0")
    assert host.leaves("a1", finished=False, in_order=True) == []
    assert host.asks("a2") == [RequestRecord()]
    assert host.state.report().exited == ("a1",)
    assert host.exits("a1", 0, goes=True) == []


def test_the_others_may_request_before_a_rank_leaves() -> None:
    host = running()
    host.asks("a0")
    host.asks("a2")
    assert host.leaves("a1", finished=False, in_order=True) == [RequestRecord()]


# AGENT-5
def test_an_agent_that_cannot_agree_on_the_last_step_fails() -> None:
    """In a sharded job, those that have received the vote have finished, and too few are left for a replica group."""
    host = running(1)
    host.asks("a0", tip=Attempt(2, 1), pending=Attempt(3, 1), broken=True)
    assert host.is_answered(Undecided("too few")) == []
    host.state.handle(Finished())
    assert host.is_answered(Undecided("too few")) == [
        Fail(1, "others have finished, but here the last step is in doubt: too few")
    ]


# AGENT-5
def test_a_rank_in_doubt_is_retired_when_another_has_finished_with_its_part() -> None:
    host = running(2)
    host.leaves("a1", finished=True, in_order=True)
    host.asks("a0", tip=Attempt(2, 1), pending=Attempt(3, 1), broken=True)
    lost = Unrecoverable("no live member holds step 3")
    assert host.is_answered(lost) == [RetireMembers(("a0",), "the job has finished")]


# AGENT-5
def test_a_spare_with_the_last_step_is_retired_when_others_have_finished() -> None:
    """In a sharded job, one whose replica group has lost a rank after the last step."""
    host = running(2)
    tip = Attempt(3, 1)
    for member in ("a0", "a1"):
        host.asks(member, tip=tip)
    host.is_answered(record_of(["a0"], 2, spares=["a1"], committed=tip))
    assert host.leaves("a0", finished=True) == [RetireMembers(("a1",), "the job has finished")]


# AGENT-5
def test_a_spare_with_an_older_step_is_retired_when_another_agent_has_finished() -> None:
    host = running(1)
    host.asks("a0", tip=Attempt(3, 1))
    host.is_answered(record_of(["b0"], 2, spares=["a0"], committed=Attempt(3, 1)))
    assert host.state.handle(Finished()) == [RetireMembers(("a0",), "the job has finished")]
    assert not host.state.may_request()


def test_a_rank_that_leaves_when_it_is_seated_ends_the_new_generation() -> None:
    host = running(1)
    host.start("a1")
    host.asks("a1")
    host.asks("a0")
    host.is_answered(record_of(["a0", "a1"], 2))
    assert host.leaves("a1", finished=False) == [Abort(("a0",), 2, rank_did("left before the last step", 1))]


def test_a_spare_that_leaves_ends_no_generation() -> None:
    host = running(1)
    host.start("a1")
    host.asks("a1")
    host.asks("a0")
    host.is_answered(record_of(["a0"], 2, spares=["a1"]))
    assert host.leaves("a1", finished=False) == []


# DRAIN-1
@pytest.mark.parametrize("status", [0, KILLED, -signal.SIGTERM])
def test_a_draining_rank_is_not_restarted_however_it_exits(status: int) -> None:
    host = running()
    assert host.exits("a1", status, goes=True) == [
        Abort(("a0", "a2"), 1, rank_did(describe_exit(status), 1)),
    ]


def test_a_draining_rank_whose_script_fails_counts_as_failed() -> None:
    host = running()
    assert host.exits("a1", 3, goes=True)[-1] == Fail(3, "rank 1 exited with code 3; --max-restarts is 0")
    host = running(max_restarts=1)
    host.commits("a1")
    assert host.raises("a1", 4, goes=True) == [
        Warn("rank 1 exited with code 1 in step 4"),
        Abort(("a0", "a2"), 1, rank_did("exited with code 1", 1)),
    ]


def test_the_job_ends_when_the_last_rank_leaves() -> None:
    host = running(2)
    host.state.handle(Committed("a0", Attempt(7, 1)))
    for member in ("a0", "a1"):
        host.leaves(member, finished=False, in_order=True)
    assert host.exits("a0", 0, goes=True) == []
    assert host.exits("a1", 0, goes=True) == [Fail(1, "all ranks have left; the last committed step is 7")]


def test_the_job_succeeds_if_all_ranks_called_leave() -> None:
    host = running(2)
    host.state.handle(Committed("a0", Attempt(7, 1)))
    for member in ("a0", "a1"):
        host.leaves(member, finished=False, in_order=True, num_steps=9)
    assert host.exits("a0", 0, goes=True) == []
    assert host.exits("a1", 0, goes=True) == [End("all ranks have left: 7 of 9 steps are committed")]


def test_the_job_fails_if_one_rank_left_because_of_a_signal() -> None:
    host = running(2)
    host.leaves("a0", finished=False, in_order=True)
    host.leaves("a1", finished=False, in_order=True, num_steps=9)
    assert host.exits("a0", 0, goes=True) == []
    assert host.exits("a1", 0, goes=True) == [Fail(1, "all ranks have left; the last committed step is 0")]


def test_when_all_ranks_of_one_host_leave_the_others_go_on() -> None:
    host = running(1)
    host.asks("a0")
    host.is_answered(record_of(["a0", "b0"], 2))
    host.leaves("a0", finished=False, in_order=True)
    assert host.exits("a0", 0, goes=True)[-1] == End("all ranks of this host have left: 0 steps are committed")


def test_a_failed_start_is_retried_with_growing_delays() -> None:
    host = running(2)
    assert host.exits("a1")[-1] == Restart(1, 0.0)
    tries = [host.state.handle(NotStarted(1, "no memory")) for _ in range(20)]
    assert all(isinstance(warning, Warn) for warning, _ in tries)
    assert [delay for _, delay in tries[:6]] == [Restart(1, delay) for delay in (1.0, 2.0, 4.0, 8.0, 10.0, 10.0)]
    host.start("a1'")
    assert host.exits("a1'")[-1] == Restart(1, 0.0)
    assert host.state.handle(NotStarted(1, "no memory"))[-1] == Restart(1, 1.0)


def test_a_failed_start_is_not_retried_after_a_stop_signal() -> None:
    host = running(2)
    host.exits("a1")
    host.state.handle(StartsStopped())
    assert host.state.handle(NotStarted(1, "no memory")) == []


def test_the_job_ends_if_no_rank_runs_or_can_be_started() -> None:
    host = running(1)
    host.exits("a0")
    tries = [host.state.handle(NotStarted(0, "no memory"))[-1] for _ in range(13)]
    assert all(isinstance(done, Restart) for done in tries[:-1])
    assert tries[-1] == Fail(1, "rank 0 cannot be started: no memory")


def test_the_job_ends_if_the_remaining_ranks_cannot_fill_the_layout() -> None:
    pairs = ParallelLayout(tp=2)
    host = Host(3)
    host.state.max_agents = 1
    host.start("a0", "a1", "a2")
    for member in ("a0", "a1", "a2"):
        host.asks(member, layout=pairs)
    assert host.exits("a2", 0, goes=True) == [RequestRecord()]
    (*_, failed) = host.exits("a1", 0, goes=True)
    assert isinstance(failed, Fail)
    assert "the layout needs 2 ranks" in failed.reason
    assert "but the job has 1: the others have left" in failed.reason


def test_a_rank_is_not_the_last_one_while_another_restarts() -> None:
    host = running(2)
    assert host.exits("a0")[-1] == Restart(0, 0.0)
    assert host.exits("a1", 0, goes=True) == []
    host.start("a0'")
    assert host.exits("a0'", 0, goes=True)[-1] == Fail(1, "all ranks have left; the last committed step is 0")


def test_two_deaths_at_once() -> None:
    host = running()
    assert host.exits("a1") == [Abort(("a0", "a2"), 1, rank_did("was killed by SIGKILL", 1)), Restart(1, 0.0)]
    assert host.exits("a0") == [Abort(("a2",), 1, rank_did("was killed by SIGKILL", 0)), Restart(0, 0.0)]
    assert host.asks("a2", broken=True) == [RequestRecord()]
    assert host.state.report().exited == ("a0", "a1")


def test_the_death_of_an_unseated_rank_ends_no_generation() -> None:
    host = running()
    host.start("a1'")
    assert host.exits("a1'") == [Restart(1, 0.0)]


def test_the_report_has_the_settings_of_the_rank_that_requests_first() -> None:
    host = Host(num_ranks=2)
    for number, settings in ((0, (("model", "x"),)), (1, (("model", "y"),))):
        host.start(f"a{number}")
        host.state.handle(
            RecordRequested(f"a{number}", report_of(f"a{number}"), LAYOUT, broken=False, settings=settings)
        )
    assert host.state.report().settings == (("model", "x"),)
