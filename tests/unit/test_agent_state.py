"""What an agent does about its ranks, event by event. The names of the rules are those of `protocol/agent_state.py`."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.protocol.agent_events import (
    Abort,
    AnnounceJoin,
    BroadcastFailure,
    Committed,
    CoordinatorReturned,
    DeliverRecord,
    End,
    Exited,
    Fail,
    Finished,
    HostLost,
    Instruction,
    MemberLeft,
    NotifyOver,
    NotStarted,
    PeerFailed,
    PeerNotice,
    QuorumAnswered,
    RecordRequested,
    RequestQuorum,
    Restart,
    RetireMembers,
    Started,
    StartExpired,
    Warn,
)
from elasticgang.protocol.agent_state import AgentState, describe_exit
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.next_record import infeasible
from elasticgang.protocol.record import ACTIVE, SPARE, MemberReport, Record, Seat, Undecided, Unrecoverable
from elasticgang.protocol.restarts import Restarts

LAYOUT = ParallelLayout()
KILLED = -signal.SIGKILL


def report_of(member: str, tip: Attempt | None = None, pending: Attempt | None = None) -> MemberReport:
    return MemberReport(member, int(member[1]), "127.0.0.1:1", tip, pending)


def record_of(members: Iterable[str], generation: int = 1, *, spares: Iterable[str] = (), **fields: object) -> Record:
    """A record in which `members` ("a0": rank 0 of agent a) are active."""
    every = [*members, *spares]
    seats = tuple(
        Seat(member, member[0], "host", int(member[1]), "127.0.0.1:1", SPARE if member in spares else ACTIVE)
        for member in every
    )
    planned = plan([Member(member, "host") for member in members], LAYOUT)
    agents = tuple(sorted({member[0] for member in every}))
    known = {"committed": Attempt(0, 1), **fields}
    return Record("job", generation, "parent", LAYOUT, planned, seats, agents, **known)  # type: ignore[arg-type]


class Host:
    """An agent's state and the events it got, in words: `a0` is the first process of rank 0, `a0'` its next one."""

    def __init__(self, num_ranks: int = 3, max_restarts: int = 0) -> None:
        self.state = AgentState(
            agent="a", host="host", job="job", coordinator="c", restarts=Restarts(max_restarts), num_ranks=num_ranks
        )

    def start(self, *members: str) -> None:
        for member in members:
            assert self.state.handle(Started(member, int(member[1]))) == []

    def asks(
        self,
        member: str,
        *,
        broken: bool = False,
        timed_out: bool = False,
        tip: Attempt | None = None,
        pending: Attempt | None = None,
        layout: ParallelLayout = LAYOUT,
    ) -> list[Instruction]:
        return self.state.handle(RecordRequested(member, report_of(member, tip, pending), layout, broken, timed_out))

    def exits(
        self, member: str, status: int = KILLED, *, blameless: bool = False, goes: bool = False
    ) -> list[Instruction]:
        return self.state.handle(Exited(member, status, blameless, goes))

    def raises(self, member: str, step: int | None, status: int = 1, *, goes: bool = False) -> list[Instruction]:
        return self.state.handle(Exited(member, status, draining=goes, raised=True, step=step))

    def commits(self, *members: str, step: int = 1) -> None:
        for member in members:
            assert self.state.handle(Committed(member, Attempt(step, 1))) == []

    def leaves(self, member: str, *, finished: bool, in_order: bool = False, num_steps: int = 0) -> list[Instruction]:
        """`num_steps`: by `manager.leave()`, of so many."""
        return self.state.handle(MemberLeft(member, finished, in_order, num_steps > 0, num_steps))

    def is_answered(self, answer: Record | Undecided | Unrecoverable, is_newest: bool = True) -> list[Instruction]:
        return self.state.handle(QuorumAnswered(answer, is_newest))


def running(num_ranks: int = 3, **options: int) -> Host:
    """All ranks are seated in generation 1."""
    host = Host(num_ranks, **options)
    members = [f"a{rank}" for rank in range(num_ranks)]
    host.start(*members)
    for member in members[:-1]:
        assert host.asks(member) == []
    assert host.asks(members[-1]) == [RequestQuorum()]
    record = record_of(members)
    assert host.is_answered(record) == [DeliverRecord(tuple(members), record)]
    return host


# -- AGENT-1: the lighthouse is asked when every live member of the present generation has asked


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


# -- AGENT-3: a newcomer ends no generation


def test_a_newcomer_is_announced_and_comes_with_the_others() -> None:
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


def test_a_newcomer_that_asks_because_of_an_error_is_a_newcomer() -> None:
    host = running(2)
    host.start("a2")
    assert host.asks("a2", broken=True) == [AnnounceJoin(("a0", "a1"), 1)]


def test_a_spare_goes_on_asking_and_holds_up_nobody() -> None:
    host = Host(3)
    host.start("a0", "a1", "a2")
    for member in ("a0", "a1", "a2"):
        host.asks(member)
    record = record_of(["a0", "a1"], spares=["a2"])
    assert host.is_answered(record) == [DeliverRecord(("a0", "a1", "a2"), record)]  # nobody is announced
    assert host.exits("a0")[0] == Abort(("a1",), 1, "rank 0 was killed by SIGKILL")
    assert host.asks("a1", broken=True) == [RequestQuorum()]
    assert {member.id for member in host.state.report().members} == {"a1", "a2"}


def test_the_death_of_a_spare_ends_nothing() -> None:
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


def test_the_other_agents_are_told_of_the_end_once_though_nobody_here_is_left_to_tell() -> None:
    host = beside("b0")
    assert host.exits("a0") == [Abort(("a1",), 1, "rank 0 was killed by SIGKILL"), Restart(0, 0.0)]
    assert host.asks("a1", broken=True) == [RequestQuorum()]
    host = beside("b0", num_ranks=1)
    assert host.asks("a0", broken=True) == [Abort((), 1, "rank 0 lost a peer"), RequestQuorum()]


def test_who_asks_in_order_ends_the_generation_for_nobody() -> None:
    host = beside("b0", num_ranks=1)
    assert host.asks("a0") == [RequestQuorum()]


def test_an_end_that_is_noticed_ends_the_generation_here_and_is_told_no_further() -> None:
    host = beside("b0")
    assert host.state.handle(PeerNotice(1, over=True, reason="rank 0 of b died")) == [
        Abort(("a0", "a1"), 1, "rank 0 of b died")
    ]
    assert host.state.handle(PeerNotice(1, over=True)) == []
    assert host.asks("a0", broken=True) == [Abort(("a1",), 1, "rank 0 lost a peer")]
    assert host.asks("a1", broken=True) == [RequestQuorum()]


def test_an_end_that_is_noticed_before_its_generation_is_known() -> None:
    host = beside("b0")
    host.asks("a0")
    host.asks("a1")
    assert host.state.handle(PeerNotice(2, over=True)) == []
    record = record_of(["a0", "a1", "b0"], 2)
    assert host.is_answered(record) == [
        DeliverRecord(("a0", "a1"), record),
        Abort(("a0", "a1"), 2, "it was over before it began"),
    ]


def test_an_end_that_is_noticed_far_ahead_is_of_that_generation_alone() -> None:
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


def test_an_agent_whose_first_rank_leaves_waits_for_those_that_are_not_started_yet() -> None:
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


def test_a_joiner_that_is_noticed_is_announced_in_the_generation_that_it_is_for() -> None:
    host = beside("b0")
    assert host.state.handle(PeerNotice(1, over=False)) == [AnnounceJoin(("a0", "a1"), 1)]
    assert host.state.handle(PeerNotice(2, over=False)) == []


def test_an_agent_whose_ranks_are_all_dead_asks_for_nobody_so_that_the_others_can_go_on() -> None:
    host = beside("b0", num_ranks=1)
    assert host.exits("a0") == [Abort((), 1, "rank 0 was killed by SIGKILL"), RequestQuorum(), Restart(0, 0.0)]
    report = host.state.report()
    assert (report.members, report.exited) == ((), ("a0",))
    without = replace(record_of(["b0"], 2), agents=("a", "b"), digest="")
    assert host.is_answered(without) == [DeliverRecord((), without), RequestQuorum()]
    host.start("a0'")
    assert host.asks("a0'") == [RequestQuorum()]  # instead of the one that is open


def test_alone_there_is_nobody_to_ask_for() -> None:
    host = running(1)
    assert host.exits("a0") == [Restart(0, 0.0)]


def test_an_agent_of_spares_has_a_question_open() -> None:
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


def test_a_rank_that_left_while_it_asked_is_not_waited_for_by_the_others() -> None:
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


def test_void_answers_are_asked_again_less_and_less_often() -> None:
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


def test_later_generations_do_not_wait_for_those_that_start() -> None:
    host = running(2)
    host.exits("a1")
    host.start("a1'")
    assert host.asks("a0", broken=True) == [RequestQuorum()]


def test_a_script_that_ends_without_joining_is_not_waited_for() -> None:
    host = Host(2)
    host.start("a0", "a1")
    host.asks("a0")
    asked, warned = host.exits("a1", 0)
    assert asked == RequestQuorum()
    assert isinstance(warned, Warn)


# -- AGENT-5: once a member has finished, nobody is restarted


def test_after_the_end_a_killed_rank_is_not_restarted() -> None:
    host = running()
    assert host.leaves("a0", finished=True) == []
    assert host.exits("a0") == []
    assert host.exits("a1") == [Abort(("a2",), 1, "rank 1 was killed by SIGKILL")]
    assert host.exits("a2", blameless=True, status=1) == []


def test_an_orderly_end() -> None:
    host = running(2)
    assert host.leaves("a0", finished=True) == []
    assert host.leaves("a1", finished=True) == []
    assert host.exits("a0", 0) == []
    assert host.exits("a1", 0) == []
    assert host.state.live() == ()


def test_those_without_state_are_dismissed_at_the_end_and_those_with_state_are_not() -> None:
    host = running(4)
    host.exits("a1")
    host.start("a1'")
    host.asks("a1'")  # waits to join
    host.asks("a2", broken=True, tip=Attempt(8, 1))
    host.asks("a3", broken=True, pending=Attempt(9, 1))
    (retired,) = host.leaves("a0", finished=True)[:1]
    assert retired == RetireMembers(("a1'",), "the job has finished")


def test_a_spare_with_state_of_before_is_dismissed_at_the_end() -> None:
    """It would ask for ever: there may be too few for a generation, and nobody is left who has what is committed."""
    host = running(4)
    host.exits("a1")
    host.asks("a0", broken=True, tip=Attempt(4, 1))
    for member in ("a2", "a3"):
        host.asks(member, broken=True, tip=Attempt(4, 1), pending=Attempt(5, 1))
    host.is_answered(record_of(["a2", "a3"], 2, spares=["a0"]))  # pairs: without rank 1, rank 0 has no place
    host.state.handle(Committed("a2", Attempt(9, 2)))
    assert host.leaves("a2", finished=True) == [RetireMembers(("a0",), "the job has finished")]
    assert host.exits("a0") == []
    assert host.leaves("a3", finished=True) == []


def test_one_that_is_still_starting_at_the_end_is_dismissed() -> None:
    host = running(2)
    host.exits("a1")
    host.start("a1'")
    assert host.leaves("a0", finished=True) == [RetireMembers(("a1'",), "the job has finished")]
    assert host.exits("a1'") == []


def test_one_that_asks_without_state_after_the_end_is_dismissed() -> None:
    host = running(2)
    host.leaves("a0", finished=True)
    assert host.asks("a1", broken=True) == [RetireMembers(("a1",), "the job has finished")]


def test_a_survivor_in_doubt_after_the_end_still_learns_its_fate() -> None:
    """Rank 0 saw the last vote pass and has finished; rank 1 did not see it, since rank 2 died."""
    host = running()
    host.state.handle(Committed("a0", Attempt(9, 1)))
    host.leaves("a0", finished=True)
    host.exits("a2")
    assert host.asks("a1", broken=True, tip=Attempt(8, 1), pending=Attempt(9, 1)) == [RequestQuorum()]
    assert host.state.report().newest_commit == Attempt(9, 1)
    assert host.state.report().exited == ("a0", "a2")
    record = record_of(["a1"], 2, committed=Attempt(9, 1))
    assert host.is_answered(record) == [DeliverRecord(("a1",), record)]


def test_a_script_that_fails_after_the_end_fails_the_job_whatever_may_be_forgiven() -> None:
    host = running(2, max_restarts=5)
    host.leaves("a0", finished=True)
    (failed,) = host.exits("a0", 3)
    assert isinstance(failed, Fail)
    assert failed.code == 3


def test_a_forgiven_failure_whose_exit_comes_after_the_end_is_forgiven() -> None:
    host = running(3, max_restarts=1)
    host.commits("a1")
    host.leaves("a1", finished=False)
    host.asks("a0", broken=True)
    host.asks("a2", broken=True)
    host.is_answered(record_of(["a0", "a2"], 2))
    host.leaves("a0", finished=True)
    assert host.exits("a1", 1) == []
    host.leaves("a2", finished=True)
    assert host.exits("a2", 0) == []


def test_a_failure_too_many_fails_the_job_although_another_has_finished() -> None:
    host = running(2)
    host.leaves("a0", finished=True)
    (failed,) = host.exits("a1", 1)
    assert isinstance(failed, Fail)


# -- who is to blame for an exit


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_kill_from_outside_is_nobodys_fault(number: signal.Signals) -> None:
    host = running(1)
    for generation in range(2, 22):
        assert host.exits("a0", -number) == [Restart(0, 0.0)]
        host.start("a0")
        host.asks("a0")
        host.is_answered(record_of(["a0"], generation))


@pytest.mark.parametrize(
    ("status", "code"),
    [(1, 1), (3, 3), (255, 255), (-signal.SIGSEGV, 128 + signal.SIGSEGV), (-signal.SIGABRT, 128 + signal.SIGABRT)],
)
def test_a_failure_of_the_script_ends_the_job_with_its_code(status: int, code: int) -> None:
    host = running(2)
    assert host.exits("a1", status) == [Fail(code, f"rank 1 {describe_exit(status)}; --max-restarts is 0")]


def test_a_rank_whose_script_fails_is_restarted_as_after_a_kill() -> None:
    host = running(3, max_restarts=2)
    host.commits("a1")
    assert host.raises("a1", 5) == [
        Warn("rank 1 exited with code 1 in step 5: restart 1 of 2 that it has in an hour"),
        Abort(("a0", "a2"), 1, "rank 1 exited with code 1"),
        Restart(1, 0.0),
    ]


def test_a_rank_that_has_committed_nothing_ends_the_job_when_its_script_fails() -> None:
    host = running(3, max_restarts=2)
    host.commits("a0", "a2")
    assert host.raises("a1", 5) == [Fail(1, "rank 1 exited with code 1 before its first committed step")]


def test_what_an_earlier_process_of_a_rank_has_committed_counts() -> None:
    host = running(3, max_restarts=2)
    host.commits("a1")
    assert Restart(1, 0.0) in host.exits("a1", KILLED)
    host.start("a1'")
    assert Restart(1, 0.0) in host.raises("a1'", None)
    host.start("a1''")
    assert host.raises("a1''", None) == [Fail(1, "rank 1 exited with code 1 before it began a step, again")]


def test_a_step_that_fails_on_two_ranks_ends_the_job() -> None:
    host = running(3, max_restarts=2)
    host.commits("a0", "a1")
    assert Restart(0, 0.0) in host.raises("a0", 5)
    failed = Fail(1, "rank 1 exited with code 1 in step 5, in which rank 0 had failed too")
    assert host.raises("a1", 5) == [failed]


def test_one_that_is_killed_while_it_exits_by_an_exception_has_failed() -> None:
    host = running(3, max_restarts=2)
    assert host.raises("a1", 5, KILLED) == [Fail(1, "rank 1 exited with code 1 before its first committed step")]


def test_failures_are_told_to_the_other_agents() -> None:
    host = Host(1, max_restarts=2)
    host.start("a0")
    host.asks("a0")
    host.is_answered(record_of(["a0", "b0"]))
    host.commits("a0")
    assert host.raises("a0", 5)[0] == BroadcastFailure("a0", 0, 5)
    assert host.state.handle(PeerFailed("b", "b0", 0, 6)) == []
    assert host.state.handle(PeerFailed("b", "b0", 0, 6)) == []  # it may come twice
    failed = Fail(1, "rank 0 of agent c failed in step 6, in which rank 0 of agent b had failed too")
    assert host.state.handle(PeerFailed("c", "c0", 0, 6)) == [failed]
    failed = Fail(1, "rank 0 of agent b failed in step 5, in which rank 0 had failed too")
    assert host.state.handle(PeerFailed("b", "b0'", 0, 5)) == [failed]


def test_an_error_that_a_lost_peer_caused_counts_for_nothing() -> None:
    host = running(2)
    assert host.exits("a1", 1, blameless=True)[-1] == Restart(1, 0.0)
    assert host.state.restarts.num_recent(1) == 0


def test_a_rank_that_dies_again_and_again_before_it_takes_part_is_slowed_down() -> None:
    host = running(2)
    delays = []
    for number in range(14):
        member = "a1" + "'" * (number + 1)
        host.start(member)
        (restart,) = host.exits(member)
        assert isinstance(restart, Restart)
        delays.append(restart.delay_s)
    assert delays == [0.0] * 5 + [1.0, 2.0, 4.0, 8.0] + [10.0] * 5
    host.start("a0'", "a1!")
    assert host.exits("a0'") == [Restart(0, 0.0)]  # of another rank


def test_taking_part_once_makes_a_rank_fast_again() -> None:
    host = running(1)
    host.exits("a0")
    for number in range(7):
        host.start(f"a0{number}")
        last = host.exits(f"a0{number}")
    assert last == [Restart(0, 2.0)]
    host.start("a0'")
    host.asks("a0'")
    host.is_answered(record_of(["a0'"], 2))
    assert host.exits("a0'") == [Restart(0, 0.0)]


# -- what is said and brought


def test_ranks_that_declare_different_layouts_end_the_job_with_both_named() -> None:
    host = Host(2)
    host.start("a0", "a1")
    host.asks("a0")
    (failed,) = host.asks("a1", layout=ParallelLayout(min_replicas=2))
    assert isinstance(failed, Fail)
    assert failed.code == 2
    assert "min_replicas=2" in failed.reason
    assert "min_replicas=1" in failed.reason


def test_the_report_brings_what_is_known() -> None:
    host = running()
    host.state.handle(Committed("a0", Attempt(4, 1)))
    host.state.handle(Committed("a1", Attempt(3, 1)))  # late
    host.exits("a0")
    host.asks("a1", broken=True, tip=Attempt(3, 1))
    host.asks("a2", broken=True, tip=Attempt(4, 1))
    report = host.state.report()
    assert (report.agent, report.host, report.job, report.coordinator) == ("a", "host", "job", "c")
    assert report.newest_record == record_of(["a0", "a1", "a2"]).ref
    assert report.newest_commit == Attempt(4, 1)
    assert report.exited == ("a0",)
    assert report.layout == LAYOUT


def test_what_is_known_is_heard_from_tips_and_records_too() -> None:
    host = running(2)
    host.asks("a0", tip=Attempt(5, 1))
    assert host.state.newest_commit == Attempt(5, 1)
    host.asks("a1", tip=Attempt(2, 1))
    assert host.state.newest_commit == Attempt(5, 1)
    host.is_answered(record_of(["a0", "a1"], 2, committed=Attempt(6, 1), rolled_forward=True))
    assert host.state.newest_commit == Attempt(6, 1)


def test_what_was_given_up_is_known_no_more_so_that_what_follows_can_be() -> None:
    host = running(1)
    host.state.handle(Committed("a0", Attempt(8, 1)))
    host.asks("a0", tip=Attempt(5, 1))
    host.is_answered(record_of(["a0"], 2, committed=Attempt(5, 1), rolled_back=True))
    assert host.state.newest_commit == Attempt(5, 1)
    host.state.handle(Committed("a0", Attempt(6, 2)))
    assert host.state.newest_commit == Attempt(6, 2)


def test_the_state_before_the_first_step_is_no_knowledge() -> None:
    host = running(1)
    host.asks("a0", tip=Attempt(0, 1))
    assert host.state.newest_commit is None


def test_members_of_other_hosts_are_not_this_ones_to_call_gone() -> None:
    host = running(1)
    host.asks("a0")
    record = record_of(["a0", "b0"], 2)
    assert host.is_answered(record) == [DeliverRecord(("a0",), record)]
    assert host.state.report().exited == ()


def test_a_member_without_a_seat_in_the_answer_goes_on_waiting() -> None:
    host = Host(2)
    host.start("a0", "a1")
    host.asks("a0")
    host.asks("a1")
    record = record_of(["a0"])
    assert host.is_answered(record) == [DeliverRecord(("a0",), record), AnnounceJoin(("a0",), 1)]


@pytest.mark.parametrize(
    "event", [Exited("a9", 1), MemberLeft("a9", True), RecordRequested("a9", report_of("a9"), LAYOUT, True)]
)
def test_events_of_unknown_members_do_nothing(event: Exited | MemberLeft | RecordRequested) -> None:
    host = running()
    assert host.state.handle(event) == []
    assert not host.state.finished


def test_a_second_exit_of_the_same_process_does_nothing() -> None:
    host = running()
    host.exits("a1")
    assert host.exits("a1") == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-250, "was killed by signal 250"),
    ],
)
def test_an_exit_in_words(status: int, words: str) -> None:
    assert describe_exit(status) == words


@pytest.mark.parametrize(
    ("layout", "num_ranks", "fits"),
    [
        (ParallelLayout(), 1, True),
        (ParallelLayout(sdp=2, tp=2), 4, True),
        (ParallelLayout(sdp=2, tp=2), 3, False),
        (ParallelLayout(pp=2, min_replicas=3), 6, True),
        (ParallelLayout(pp=2, min_replicas=3), 5, False),
    ],
)
def test_a_layout_that_can_never_be_filled_is_named_with_both_numbers(
    layout: ParallelLayout, num_ranks: int, fits: bool
) -> None:
    reason = infeasible(layout, num_ranks)
    assert (reason is None) == fits
    if reason is not None:
        assert f"needs {layout.unit * layout.min_replicas} ranks" in reason
        assert f"the job has {num_ranks}" in reason


# -- any order of events


CHOICES = ["start", "ask", "die", "leave", "answer", "undecided"]
EVENTS = st.lists(st.tuples(st.sampled_from(CHOICES), st.integers(0, 2)))


@given(EVENTS)
def test_in_any_order_a_question_is_open_and_nobody_is_left_seated_behind_it(
    events: list[tuple[str, int]],
) -> None:
    """AGENT-1, with ranks that do what ranks can do: one process to a rank, which asks, sits or dies. A new question
    takes the place of an open one."""
    host = Host(3)
    state: dict[str, str] = {}  # the live processes
    is_open = False
    started = generation = 0
    for what, rank in events:
        mine = next((member for member in state if int(member[1]) == rank), None)
        done: list[Instruction] = []
        if what == "start" and mine is None:
            started += 1
            state[f"a{rank}-{started}"] = "starting"
            host.start(f"a{rank}-{started}")
        elif what == "ask" and mine is not None and state[mine] in ("starting", "seated"):
            state[mine] = "asking"
            done = host.asks(mine, broken=rank == 0)
        elif what == "die" and mine is not None:
            del state[mine]
            done = host.exits(mine)
        elif what == "leave" and mine is not None and state[mine] == "seated":
            state[mine] = "left"
            done = host.leaves(mine, finished=False)
        elif what in ("answer", "undecided") and is_open:
            is_open = False
            asked = [member for member in state if state[member] == "asking"]
            if what == "undecided" or not asked:
                done = host.is_answered(Undecided("why not"))
            else:
                generation += 1
                record = record_of(asked, generation)
                done = host.is_answered(record)
                state.update(dict.fromkeys(asked, "seated"))
                assert done[0] == DeliverRecord(tuple(asked), record)
        num_asked = sum(isinstance(instruction, RequestQuorum) for instruction in done)
        assert num_asked <= 1
        if num_asked:
            is_open = True
            assert "seated" not in state.values()
            assert "asking" in state.values()
        for instruction in done:
            if isinstance(instruction, Abort | AnnounceJoin):
                assert set(instruction.members) == {member for member in state if state[member] == "seated"}
                assert instruction.members
    # Nobody waits for ever: when all that live have asked, there is a question.
    if generation and "asking" in state.values() and "seated" not in state.values():
        assert is_open


def test_heirs_are_those_that_start_or_wait_and_were_not_told_to_go() -> None:
    host = Host(2)
    assert host.state.num_successors(()) == 2  # nobody is started yet
    host.start("a0", "a1")
    assert host.state.num_successors(()) == 2
    host.asks("a0")
    host.asks("a1")
    host.is_answered(record_of(["a0"], spares=["a1"]))
    assert host.state.num_successors(()) == 1
    assert host.state.num_successors(["a0", "a1"]) == 0
    host.exits("a1")
    assert host.state.num_successors(()) == 1  # it is started again
    host.start("a1'")
    assert host.state.num_successors(()) == 1
    host.exits("a1'", goes=True)
    assert host.state.num_successors(()) == 0


def test_once_the_job_has_finished_there_are_no_heirs() -> None:
    host = running(2)
    host.exits("a1")
    assert host.state.num_successors(()) == 1
    host.leaves("a0", finished=True)
    assert host.state.num_successors(()) == 0
