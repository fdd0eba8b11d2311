"""Exits, restarts and the end of the job, in an agent's state machine (AGENT-5)."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.agent_events import (
    Abort,
    AnnounceJoin,
    BroadcastFailure,
    BroadcastJobFailed,
    Committed,
    DeliverRecord,
    Exited,
    Fail,
    Instruction,
    MemberLeft,
    PeerFailed,
    PeerFailedJob,
    RecordRequested,
    ReportDeviceFault,
    RequestRecord,
    Restart,
    RetireMembers,
    StateDiffers,
    Warn,
)
from elasticgang.protocol.agent_state import describe_exit, tells_exit
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.next_record import infeasible
from elasticgang.protocol.record import Undecided
from elasticgang.protocol.restarts import WINDOW_S
from tests.unit.agent_hosts import KILLED, LAYOUT, Host, rank_did, record_of, report_of, running

# -- AGENT-5: once a member has finished, nobody is restarted


def test_after_the_end_a_killed_rank_is_not_restarted() -> None:
    host = running()
    assert host.leaves("a0", finished=True) == []
    assert host.exits("a0", 0) == []
    assert host.exits("a1") == [Abort(("a2",), 1, rank_did("was killed by SIGKILL", 1))]
    assert host.exits("a2", blameless=True, status=1) == []


# AGENT-10
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_rank_that_is_killed_after_its_last_step_is_told_of_and_no_other_is_ended(number: signal.Signals) -> None:
    host = running()
    host.leaves("a0", finished=True)
    host.leaves("a1", finished=True)
    after = "after its last step, before its script had ended: exit code"
    assert host.exits("a0", -number) == [Warn(f"rank 0 was killed by {number.name} {after} {128 + number}")]
    assert host.exits("a1", 0) == []
    assert host.exits("a2") == []  # it had not finished, and the others had (AGENT-5)
    assert host.state.exit_code == 128 + number


# AGENT-10
def test_who_was_asked_to_leave_or_raised_an_error_of_a_peer_after_its_last_step_was_not_killed() -> None:
    host = running(2)
    host.leaves("a0", finished=True)
    host.leaves("a1", finished=True)
    assert host.exits("a0", goes=True) == []
    assert host.exits("a1", 1, blameless=True) == []
    assert host.state.exit_code == 0


def test_an_orderly_end() -> None:
    host = running(2)
    assert host.leaves("a0", finished=True) == []
    assert host.leaves("a1", finished=True) == []
    assert host.exits("a0", 0) == []
    assert host.exits("a1", 0) == []
    assert host.state.live() == ()


def test_ranks_without_state_retire_at_the_end_and_ranks_with_state_do_not() -> None:
    host = running(4)
    host.exits("a1")
    host.start("a1'")
    host.asks("a1'")  # waits to join
    host.asks("a2", broken=True, tip=Attempt(8, 1))
    host.asks("a3", broken=True, pending=Attempt(9, 1))
    (retired,) = host.leaves("a0", finished=True)[:1]
    assert retired == RetireMembers(("a1'",), "the job has finished")


def test_a_spare_with_an_older_state_retires_at_the_end() -> None:
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


def test_a_rank_that_is_starting_retires_at_the_end() -> None:
    host = running(2)
    host.exits("a1")
    host.start("a1'")
    assert host.leaves("a0", finished=True) == [RetireMembers(("a1'",), "the job has finished")]
    assert host.exits("a1'") == []


def test_a_rank_that_requests_without_state_after_the_end_retires() -> None:
    host = running(2)
    host.leaves("a0", finished=True)
    assert host.asks("a1", broken=True) == [RetireMembers(("a1",), "the job has finished")]


def test_a_survivor_in_doubt_after_the_end_still_gets_a_record() -> None:
    """Rank 0 saw the last vote pass and has finished; rank 1 did not see it, since rank 2 died."""
    host = running()
    host.state.handle(Committed("a0", Attempt(9, 1)))
    host.leaves("a0", finished=True)
    host.exits("a2")
    assert host.asks("a1", broken=True, tip=Attempt(8, 1), pending=Attempt(9, 1)) == [RequestRecord()]
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
def test_a_kill_from_outside_is_not_a_failure(number: signal.Signals) -> None:
    host = running(1)
    for generation in range(2, 22):
        host.commits("a0")
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
        Warn("rank 1 exited with code 1 in step 5: restart 1 of 2 within an hour"),
        Abort(("a0", "a2"), 1, rank_did("exited with code 1", 1)),
        Restart(1, 0.0),
    ]


def test_a_rank_that_has_committed_nothing_ends_the_job_when_its_script_fails() -> None:
    host = running(3, max_restarts=2)
    host.commits("a0", "a2")
    assert host.raises("a1", 5) == [Fail(1, "rank 1 exited with code 1 before its first committed step")]


GIVEN_UP = "rank 1 exited with code 1 before it began a step, again: it is not restarted"


def test_what_an_earlier_process_of_a_rank_has_committed_counts() -> None:
    host = running(3, max_restarts=2)
    host.commits("a1")
    assert Restart(1, 0.0) in host.exits("a1", KILLED)
    host.start("a1'")
    assert Restart(1, 0.0) in host.raises("a1'", None)
    host.start("a1''")
    assert host.raises("a1''", None) == [Warn(GIVEN_UP)]


# RESTART-3
def test_the_last_rank_of_a_host_that_is_given_up_ends_the_agent_with_its_code() -> None:
    host = running(1, max_restarts=2)
    host.commits("a0")
    host.exits("a0", KILLED)
    host.start("a0'")
    assert Restart(0, 0.0) in host.exits("a0'", 3)
    host.start("a0''")
    failed = host.exits("a0''", 3)[-1]
    assert failed == Fail(3, f"no rank of this host is left; {GIVEN_UP.replace('1', '0', 1).replace('1', '3')}")


def test_a_step_that_fails_on_two_ranks_ends_the_job() -> None:
    host = running(3, max_restarts=2)
    host.commits("a0", "a1")
    assert Restart(0, 0.0) in host.raises("a0", 5)
    failed = Fail(1, "rank 1 exited with code 1 in step 5, in which rank 0 had failed too")
    assert host.raises("a1", 5) == [failed]


# RESTART-2
def test_ranks_that_heal_because_their_state_is_wrong_are_restarted_though_the_step_is_the_same() -> None:
    host = running(3, max_restarts=3)
    host.commits("a0", "a1", "a2", step=4)
    for member, rank in (("a0", 0), ("a1", 1)):
        told = host.raises(member, 5, heals=True)
        assert Restart(rank, 0.0) in told
        assert not [each for each in told if isinstance(each, BroadcastFailure)]


# AGENT-13
def test_agent_13_a_difference_is_told_once() -> None:
    host = running(3, max_restarts=3)
    first = StateDiffers(5, 1, "states differ", ends_job=False)
    assert host.state.handle(first) == [Warn("states differ")]
    assert host.state.handle(replace(first, text="in other words")) == []
    assert host.state.handle(replace(first, generation=2)) == [Warn("states differ")]
    assert host.state.handle(replace(first, step=6)) == [Warn("states differ")]


# AGENT-13
def test_agent_13_without_anybody_who_is_right_all_agents_fail() -> None:
    told, failed = BroadcastJobFailed(5, 1, "states differ"), Fail(1, "states differ")
    found = StateDiffers(5, 1, "states differ", ends_job=True)
    assert running(3, max_restarts=3).state.handle(found) == [told, failed]
    assert running(3, max_restarts=3).state.handle(PeerFailedJob("states differ")) == [failed]


def test_a_rank_killed_while_it_exits_after_an_exception_has_failed() -> None:
    host = running(3, max_restarts=2)
    assert host.raises("a1", 5, KILLED) == [Fail(1, "rank 1 exited with code 1 before its first committed step")]


def test_failures_are_broadcast_to_the_other_agents() -> None:
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


def test_an_error_caused_by_a_lost_peer_is_not_a_failure() -> None:
    host = running(2)
    assert host.exits("a1", 1, blameless=True)[-1] == Restart(1, 0.0)
    assert host.state.restarts.num_recent(1) == 0


# AGENT-14
def test_repeated_early_deaths_delay_the_restart() -> None:
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


# AGENT-14
def test_a_rank_that_dies_in_each_of_its_first_steps_is_restarted_later() -> None:
    """As one that is killed for memory whenever it heals."""
    host, delays = running(2), []
    for number in range(8):
        member = "a1" + "'" * number
        if number:
            host.start(member)
            host.asks(member)
            host.asks("a0")
            host.is_answered(record_of(["a0", member], number + 1))
        *_, restart = host.exits(member)
        assert isinstance(restart, Restart)
        delays.append(restart.delay_s)
    assert delays == [0.0] * 5 + [1.0, 2.0, 4.0]
    host.start("a1!")
    host.commits("a1!")
    assert host.exits("a1!")[-1] == Restart(1, 0.0)


# AGENT-14
def test_early_deaths_of_more_than_an_hour_ago_do_not_delay_a_restart() -> None:
    """As of a spare, which never commits."""
    host, delays = running(1), []
    host.exits("a0")
    for at_s in (*range(1, 7), WINDOW_S + 10.0):
        host.start("a0'")
        *_, restart = host.exits("a0'", at_s=at_s)
        assert isinstance(restart, Restart)
        delays.append(restart.delay_s)
    assert delays == [0.0] * 4 + [1.0, 2.0, 0.0]


# AGENT-14
def test_a_commit_resets_the_restart_delay() -> None:
    host = running(1)
    host.exits("a0")
    for number in range(7):
        host.start(f"a0{number}")
        last = host.exits(f"a0{number}")
    assert last == [Restart(0, 4.0)]
    host.start("a0'")
    host.commits("a0'")
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


def test_the_report_contains_the_newest_commit() -> None:
    host = running()
    host.state.handle(Committed("a0", Attempt(4, 1)))
    host.state.handle(Committed("a1", Attempt(3, 1)))  # late
    host.exits("a0")
    host.asks("a1", broken=True, tip=Attempt(3, 1))
    host.asks("a2", broken=True, tip=Attempt(4, 1))
    report = host.state.report()
    assert (report.agent, report.host, report.job) == ("a", "host", "job")
    assert report.newest_record == record_of(["a0", "a1", "a2"]).ref
    assert report.newest_commit == Attempt(4, 1)
    assert report.exited == ("a0",)
    assert report.layout == LAYOUT


def test_the_newest_commit_is_taken_from_tips_and_records_too() -> None:
    host = running(2)
    host.asks("a0", tip=Attempt(5, 1))
    assert host.state.newest_commit == Attempt(5, 1)
    host.asks("a1", tip=Attempt(2, 1))
    assert host.state.newest_commit == Attempt(5, 1)
    host.is_answered(record_of(["a0", "a1"], 2, committed=Attempt(6, 1), rolled_forward=True))
    assert host.state.newest_commit == Attempt(6, 1)


def test_a_rolled_back_commit_is_forgotten() -> None:
    host = running(1)
    host.state.handle(Committed("a0", Attempt(8, 1)))
    host.asks("a0", tip=Attempt(5, 1))
    host.is_answered(record_of(["a0"], 2, committed=Attempt(5, 1), rolled_back=True))
    assert host.state.newest_commit == Attempt(5, 1)
    host.state.handle(Committed("a0", Attempt(6, 2)))
    assert host.state.newest_commit == Attempt(6, 2)


def test_the_initial_state_is_not_a_commit() -> None:
    host = running(1)
    host.asks("a0", tip=Attempt(0, 1))
    assert host.state.newest_commit is None


def test_an_agent_reports_only_its_own_members_as_exited() -> None:
    host = running(1)
    host.asks("a0")
    record = record_of(["a0", "b0"], 2)
    assert host.is_answered(record) == [DeliverRecord(("a0",), record)]
    assert host.state.report().exited == ()


def test_a_member_without_a_seat_keeps_waiting() -> None:
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
def test_exits_are_described(status: int, words: str) -> None:
    assert describe_exit(status) == words


@pytest.mark.parametrize(
    ("instruction", "tells"),
    [
        (Warn("rank 1 exited with code 3 in step 5: restart 1 of 3 within an hour"), True),
        (Fail(3, "rank 1 exited with code 3; --max-restarts is 0"), True),
        (ReportDeviceFault(0, 1, "the script exited with code 83", 1, False, 0), True),
        (Warn("rank 0 exited with code 3 in step 5: restart 1 of 3 within an hour"), False),
        (Fail(1, "all ranks have left; the last committed step is 5"), False),
        (Abort(("a0",), 1, rank_did("exited with code 3", 1)), False),
        (Restart(1, 0.0), False),
    ],
)
def test_it_is_known_whether_an_exit_is_told(instruction: Instruction, tells: bool) -> None:
    assert tells_exit([RequestRecord(), instruction], 1, 3) == tells


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
def test_in_any_event_order_a_request_is_open_only_without_seated_ranks(
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
            asked = [member for member in state if state[member] == "asking"]
            if what == "undecided" or not asked:
                done = host.is_answered(Undecided("why not"))
            else:
                is_open = False
                generation += 1
                record = record_of(asked, generation)
                done = host.is_answered(record)
                state.update(dict.fromkeys(asked, "seated"))
                assert done[0] == DeliverRecord(tuple(asked), record)
        num_asked = sum(isinstance(instruction, RequestRecord) for instruction in done)
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


def test_successors_are_ranks_that_start_or_wait_and_do_not_drain() -> None:
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


def test_a_finished_job_has_no_successors() -> None:
    host = running(2)
    host.exits("a1")
    assert host.state.num_successors(()) == 1
    host.leaves("a0", finished=True)
    assert host.state.num_successors(()) == 0
