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
    NotStarted,
    RequestQuorum,
    Restart,
    RetireMembers,
    Warn,
)
from elasticgang.protocol.agent_state import describe_exit
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import Undecided, Unrecoverable
from tests.unit.agent_hosts import KILLED, Host, record_of, running

# -- AGENT-1: a record is requested when every live member of the present generation has asked


def test_the_last_one_to_ask_makes_the_agent_ask() -> None:
    host = running()
    assert host.asks("a1") == []
    assert host.asks("a0") == []
    assert host.asks("a2") == [RequestQuorum()]
    assert {member.id for member in host.state.report().members} == {"a0", "a1", "a2"}


def test_who_comes_or_dies_while_a_question_is_open_is_told_by_a_newer_one() -> None:
    host = running()
    for member in ("a0", "a1", "a2"):
        last = host.asks(member)
    assert last == [RequestQuorum()]
    host.start("a3")
    assert host.asks("a3") == [RequestQuorum()]
    assert host.exits("a2") == [RequestQuorum(), Restart(2, 0.0)]
    assert {member.id for member in host.state.report().members} == {"a0", "a1", "a3"}


def test_the_answer_to_an_older_question_counts_if_it_is_a_record() -> None:
    host = running(2)
    host.asks("a0")
    host.asks("a1")
    host.start("a2")
    assert host.asks("a2") == [RequestQuorum()]
    assert host.is_answered(Undecided("why not"), is_newest=False) == []
    assert host.is_answered(Unrecoverable("too early to say"), is_newest=False) == []
    record = record_of(["a0", "a1"], 2)
    answer = host.is_answered(record, is_newest=False)
    assert answer == [DeliverRecord(("a0", "a1"), record), AnnounceJoin(("a0", "a1"), 2)]
    assert not host.state.may_request()  # the newer question may still be on its way to be asked
    assert host.is_answered(record) == []
    assert host.is_answered(Undecided("it came too late")) == []


def test_a_newcomer_during_the_question_is_announced_with_the_answer() -> None:
    host = running(2)
    host.asks("a0")
    assert host.asks("a1") == [RequestQuorum()]
    host.start("a2")
    host.asks("a2")
    record = record_of(["a0", "a1"], 2)
    assert host.is_answered(record) == [DeliverRecord(("a0", "a1"), record), AnnounceJoin(("a0", "a1"), 2)]


def test_a_death_is_the_last_that_was_waited_for() -> None:
    host = running()
    host.asks("a0", broken=True)
    host.asks("a1", broken=True)
    assert host.exits("a2") == [RequestQuorum(), Restart(2, 0.0)]


def test_a_death_during_the_question_ends_the_generation_that_it_makes() -> None:
    host = running()
    for member in ("a0", "a1", "a2"):
        host.asks(member)
    host.exits("a1")
    record = record_of(["a0", "a1", "a2"], 2)
    assert host.is_answered(record) == [
        DeliverRecord(("a0", "a2"), record),
        Abort(("a0", "a2"), 2, "rank 1 died before the generation began"),
    ]


def test_all_die_during_the_question() -> None:
    host = running(1)
    assert host.asks("a0", broken=True) == [RequestQuorum()]
    assert host.exits("a0") == [Restart(0, 0.0)]
    record = record_of(["a0"], 2)
    assert host.is_answered(record) == [DeliverRecord((), record)]
    host.start("a0'")
    assert host.asks("a0'") == [RequestQuorum()]
    assert host.state.report().exited == ("a0",)


def test_a_void_answer_is_asked_again_a_little_later() -> None:
    host = running(1)
    host.asks("a0")
    (again,) = host.is_answered(Undecided("only joiners are here"))
    assert isinstance(again, RequestQuorum)
    assert 0 < again.delay_s <= 0.1
    assert host.exits("a0") == [Restart(0, 0.0)]
    assert host.is_answered(Undecided("again")) == []  # nobody is left to ask for
    host.start("a0'")
    assert host.asks("a0'") == [RequestQuorum()]


def test_a_refusal_of_this_host_ends_the_job_and_one_of_another_does_not() -> None:
    host = running(1)
    host.asks("a0")
    (again,) = host.is_answered(Undecided("refused", refused=(("b", "its layout is other"),)))
    assert isinstance(again, RequestQuorum)
    assert host.is_answered(Undecided("refused", refused=(("a", "its layout is other"),))) == [
        Fail(2, "the job refused this host: its layout is other")
    ]


def test_when_another_agent_has_finished_newcomers_are_dismissed_and_who_is_in_doubt_asks() -> None:
    newcomer = Host(1)
    newcomer.start("a0")
    assert newcomer.asks("a0") == [RequestQuorum()]
    assert newcomer.state.handle(Finished()) == [RetireMembers(("a0",), "the job has finished")]
    assert not newcomer.state.may_request()
    doubting = running(2)
    doubting.asks("a0", tip=Attempt(4, 1), pending=Attempt(5, 1))
    doubting.asks("a1", tip=Attempt(4, 1), pending=Attempt(5, 1))
    assert doubting.state.handle(Finished()) == [RequestQuorum()]


def test_a_lost_state_ends_the_job() -> None:
    host = running(1)
    host.asks("a0")
    (failed,) = host.is_answered(Unrecoverable("no live member holds step 3"))
    assert failed == Fail(1, "the job's state is lost: no live member holds step 3")


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
    assert host.exits("a1") == [Abort(("a0", "a2"), 1, "rank 1 was killed by SIGKILL"), Restart(1, 0.0)]


def test_an_error_of_one_ends_the_generation_for_the_others() -> None:
    host = running()
    assert host.asks("a1", broken=True) == [Abort(("a0", "a2"), 1, "rank 1 lost a peer")]
    assert host.asks("a0", broken=True) == [Abort(("a2",), 1, "rank 0 lost a peer")]
    assert host.asks("a2", broken=True) == [RequestQuorum()]


def test_of_one_that_waited_too_long_nobody_is_said_to_be_lost() -> None:
    host = running()
    assert host.asks("a1", broken=True, timed_out=True) == [Abort(("a0", "a2"), 1, "rank 1 timed out in a collective")]


def test_one_that_leaves_unfinished_ends_the_generation_for_the_others() -> None:
    host = running()
    assert host.leaves("a1", finished=False) == [Abort(("a0", "a2"), 1, "rank 1 left before the last step")]
    assert "a1" in host.state.report().exited
    host.asks("a0", broken=True)
    assert host.asks("a2", broken=True) == [RequestQuorum()]


def test_an_exit_in_order_restarts_nobody_and_the_others_go_on() -> None:
    host = running()
    host.leaves("a1", finished=False)
    (warning,) = host.exits("a1", 0)
    assert isinstance(warning, Warn)
    assert warning.text.startswith("rank 1 exited with code 0 before its loop had ended: it is not started again")


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


def test_nobody_is_warned_once_the_job_is_done() -> None:
    host = running(2)
    host.leaves("a0", finished=True)
    assert host.exits("a0", 0) == []
    assert host.exits("a1", 0) == []


def test_who_never_comes_to_its_loop_while_the_others_train_is_named() -> None:
    host = running(1)
    host.start("a1")
    (warning,) = host.exits("a1", 0)
    assert isinstance(warning, Warn)
    assert "never called `elasticgang.join`" in warning.text


def test_one_that_has_joined_and_never_asks_is_named_and_nobody_has_lost_a_step() -> None:
    host = Host(2)
    host.start("a0", "a1")
    (warning,) = host.state.handle(Exited("a1", 0, joined=True))
    assert warning == Warn("rank 1 exited with code 0 before its loop had ended: it is not started again")


def test_what_an_early_exit_costs_is_said_only_while_somebody_goes_on() -> None:
    host = running(2)
    host.leaves("a0", finished=False)
    (first,) = host.exits("a0", 0)
    host.leaves("a1", finished=False)
    (second,) = host.exits("a1", 0)
    assert isinstance(first, Warn)
    assert isinstance(second, Warn)
    assert first.text.endswith(", and those that go on lose the step under way (`manager.leave()` costs them none)")
    assert second.text.endswith("it is not started again")


def test_one_that_leaves_in_order_ends_no_generation_and_is_waited_for_no_more() -> None:
    host = running()
    host.asks("a0")
    assert host.leaves("a1", finished=False, in_order=True) == []
    assert host.asks("a2") == [RequestQuorum()]
    assert host.state.report().exited == ("a1",)
    assert host.exits("a1", 0, goes=True) == []


def test_the_others_may_have_asked_before_it_leaves() -> None:
    host = running()
    host.asks("a0")
    host.asks("a2")
    assert host.leaves("a1", finished=False, in_order=True) == [RequestQuorum()]


def test_who_cannot_agree_on_the_last_step_gives_up_after_a_while() -> None:
    """In a sharded job, those that have heard the vote have finished, and too few are left for a replica group."""
    host = running(1)
    host.asks("a0", tip=Attempt(2, 1), pending=Attempt(3, 1), broken=True)
    host.state.handle(Finished())
    answers = [host.is_answered(Undecided("too few")) for _ in range(100)]
    assert all(isinstance(done, RequestQuorum) for answer in answers[:40] for done in answer)
    assert answers[40] == [Fail(1, "others have finished, but here the last step is in doubt: too few")]


def test_one_that_goes_as_it_is_seated_ends_the_generation_that_waits_for_it() -> None:
    host = running(1)
    host.start("a1")
    host.asks("a1")
    host.asks("a0")
    host.is_answered(record_of(["a0", "a1"], 2))
    assert host.leaves("a1", finished=False) == [Abort(("a0",), 2, "rank 1 left before the last step")]


def test_a_spare_that_goes_ends_no_generation() -> None:
    host = running(1)
    host.start("a1")
    host.asks("a1")
    host.asks("a0")
    host.is_answered(record_of(["a0"], 2, spares=["a1"]))
    assert host.leaves("a1", finished=False) == []


@pytest.mark.parametrize("status", [0, KILLED, -signal.SIGTERM])
def test_one_that_is_to_go_is_not_started_again_however_it_ends(status: int) -> None:
    host = running()
    assert host.exits("a1", status, goes=True) == [
        Abort(("a0", "a2"), 1, f"rank 1 {describe_exit(status)}"),
    ]


def test_one_that_is_to_go_and_fails_has_failed() -> None:
    host = running()
    assert host.exits("a1", 3, goes=True)[-1] == Fail(3, "rank 1 exited with code 3; --max-restarts is 0")
    host = running(max_restarts=1)
    host.commits("a1")
    assert host.raises("a1", 4, goes=True) == [
        Warn("rank 1 exited with code 1 in step 4"),
        Abort(("a0", "a2"), 1, "rank 1 exited with code 1"),
    ]


def test_the_last_one_to_go_ends_the_job() -> None:
    host = running(2)
    host.state.handle(Committed("a0", Attempt(7, 1)))
    for member in ("a0", "a1"):
        host.leaves(member, finished=False, in_order=True)
    assert host.exits("a0", 0, goes=True) == []
    assert host.exits("a1", 0, goes=True) == [Fail(1, "all ranks have left; the last committed step is 7")]


def test_when_all_leave_of_themselves_the_job_has_ended_well() -> None:
    host = running(2)
    host.state.handle(Committed("a0", Attempt(7, 1)))
    for member in ("a0", "a1"):
        host.leaves(member, finished=False, in_order=True, num_steps=9)
    assert host.exits("a0", 0, goes=True) == []
    assert host.exits("a1", 0, goes=True) == [End("all ranks have left: 7 of 9 steps are committed")]


def test_when_one_of_those_that_left_was_told_to_by_a_signal_it_has_not() -> None:
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


def test_a_rank_that_cannot_be_started_is_tried_again_ever_later() -> None:
    host = running(2)
    assert host.exits("a1")[-1] == Restart(1, 0.0)
    tries = [host.state.handle(NotStarted(1, "no memory")) for _ in range(20)]
    assert all(isinstance(warning, Warn) for warning, _ in tries)
    assert [delay for _, delay in tries[:6]] == [Restart(1, delay) for delay in (1.0, 2.0, 4.0, 8.0, 10.0, 10.0)]
    host.start("a1'")
    assert host.exits("a1'")[-1] == Restart(1, 0.0)
    assert host.state.handle(NotStarted(1, "no memory"))[-1] == Restart(1, 1.0)


def test_when_none_can_be_started_and_none_is_left_the_job_ends() -> None:
    host = running(1)
    host.exits("a0")
    tries = [host.state.handle(NotStarted(0, "no memory"))[-1] for _ in range(13)]
    assert all(isinstance(done, Restart) for done in tries[:-1])
    assert tries[-1] == Fail(1, "rank 0 cannot be started: no memory")


def test_when_those_that_stay_cannot_fill_the_layout_the_job_ends() -> None:
    pairs = ParallelLayout(tp=2)
    host = Host(3)
    host.state.max_agents = 1
    host.start("a0", "a1", "a2")
    for member in ("a0", "a1", "a2"):
        host.asks(member, layout=pairs)
    assert host.exits("a2", 0, goes=True) == [RequestQuorum()]
    (*_, failed) = host.exits("a1", 0, goes=True)
    assert isinstance(failed, Fail)
    assert "the layout needs 2 ranks" in failed.reason
    assert "but the job has 1: the others have left" in failed.reason


def test_it_is_not_the_last_one_while_another_comes_back() -> None:
    host = running(2)
    assert host.exits("a0")[-1] == Restart(0, 0.0)
    assert host.exits("a1", 0, goes=True) == []
    host.start("a0'")
    assert host.exits("a0'", 0, goes=True)[-1] == Fail(1, "all ranks have left; the last committed step is 0")


def test_two_deaths_at_once() -> None:
    host = running()
    assert host.exits("a1") == [Abort(("a0", "a2"), 1, "rank 1 was killed by SIGKILL"), Restart(1, 0.0)]
    assert host.exits("a0") == [Abort(("a2",), 1, "rank 0 was killed by SIGKILL"), Restart(0, 0.0)]
    assert host.asks("a2", broken=True) == [RequestQuorum()]
    assert host.state.report().exited == ("a0", "a1")


def test_the_death_of_one_that_was_not_seated_ends_nothing() -> None:
    host = running()
    host.start("a1'")
    assert host.exits("a1'") == [Restart(1, 0.0)]
