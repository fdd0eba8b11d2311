"""The agent's state machine, event by event. The names of the rules are those of `protocol/agent_lifecycle.py`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.protocol import agent_lifecycle, stop_request
from elasticgang.protocol.agent_events import (
    Abort,
    AgentEvent,
    AgentInstruction,
    Committed,
    CoordinatorConnected,
    CoordinatorTimedOut,
    DeliverRecord,
    DeviceUsed,
    End,
    Exit,
    ExitBegan,
    Exited,
    Fail,
    Fence,
    Finished,
    InternalError,
    KillRanks,
    LeaseExpired,
    MemberLeft,
    NotifyFinished,
    NotifyOver,
    NotStarted,
    RankEntered,
    RecordAnswered,
    RecordRequested,
    Rejoin,
    RequestRecord,
    RetireMembers,
    ScriptRaised,
    SignalRanks,
    SignalReceived,
    Started,
    StartRank,
    StopHelpers,
    TimePassed,
    Warn,
)
from elasticgang.protocol.agent_lifecycle import AgentLifecycle, AgentOptions
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.record import ACTIVE, MemberReport, Record, Seat, Undecided, Unrecoverable

LAYOUT = ParallelLayout()
KILLED = -signal.SIGKILL
ENDED = [StopHelpers(), Exit(0)]
FAILED = [StopHelpers(), Exit(1)]


def record_of(*members: str, generation: int = 1) -> Record:
    """`members` ("a0": rank 0 of agent a) are active."""
    seats = tuple(Seat(member, member[0], "host", int(member[1]), "127.0.0.1:1", ACTIVE) for member in members)
    planned = plan([Member(member, "host") for member in members], LAYOUT)
    agents = tuple(sorted({member[0] for member in members}))
    return Record("job", generation, "parent", LAYOUT, planned, seats, agents, committed=Attempt(0, 1))


class Host:
    """A machine and its clock. `a0` is the first process of rank 0, `a0'` its next one."""

    def __init__(
        self, num_ranks: int = 2, *, num_spares: int = 0, max_agents: int = 0, grace_period_s: float | None = 1.0
    ) -> None:
        options = AgentOptions("job", num_ranks, num_spares, max_agents=max_agents, grace_period_s=grace_period_s)
        self.agent = AgentLifecycle("a", options)
        self.now_s = 100.0

    def __call__(self, event: AgentEvent) -> list[AgentInstruction]:
        return self.agent.handle(event, self.now_s)

    def connect(self) -> list[AgentInstruction]:
        return self(CoordinatorConnected("host", "127.0.0.1:7"))

    def start(self, *members: str) -> list[AgentInstruction]:
        for member in members:
            done = self(Started(member, int(member[1])))
        return done

    def asks(self, member: str, tip: Attempt | None = None, layout: ParallelLayout = LAYOUT) -> list[AgentInstruction]:
        return self(
            RecordRequested(member, MemberReport(member, int(member[1]), "127.0.0.1:1", tip), layout, broken=False)
        )

    def exits(self, member: str, status: int = KILLED, **facts: Any) -> list[AgentInstruction]:
        return self(Exited(member, status, **facts))

    def waits(self) -> list[AgentInstruction]:
        """Until the next deadline."""
        deadline_s = self.agent.deadline_s
        assert deadline_s is not None
        self.now_s = max(self.now_s, deadline_s)
        return self(TimePassed())

    def gets(self, number: int) -> list[AgentInstruction]:
        return self(SignalReceived(number))


def running(*others: str, num_ranks: int = 2, grace_period_s: float | None = 1.0) -> Host:
    """All ranks are seated in generation 1, with those of `others`, of other agents."""
    host = Host(num_ranks, grace_period_s=grace_period_s)
    host.connect()
    members = [f"a{rank}" for rank in range(num_ranks)]
    host.start(*members)
    for member in members:
        asked = host.asks(member)
    assert asked == [RequestRecord()]
    assert isinstance(host(RecordAnswered(record_of(*members, *others)))[0], DeliverRecord)
    return host


# -- LIFE-1 and LIFE-2: starts


def test_ranks_start_one_at_a_time_once_the_coordinator_answers() -> None:
    host = Host(2, num_spares=1)
    assert host.connect() == [StartRank(0)]
    assert (host.agent.state.host, host.agent.state.address) == ("host", "127.0.0.1:7")
    assert host.start("a0") == [StartRank(1)]
    assert host.start("a1") == [StartRank(2)]
    assert host.start("a2") == []
    assert host.connect() == []


def test_a_failed_fork_of_the_first_start_ends_the_agent() -> None:
    host = Host(2)
    host.connect()
    host.start("a0")
    fail, *rest = host(NotStarted(1, "no memory"))
    assert fail == Fail(2, "rank 1 cannot be started: no memory")
    assert rest == [StopHelpers(), Exit(2)]


def test_a_failed_restart_is_tried_again_after_a_growing_delay() -> None:
    host = running()
    host.exits("a1")
    assert host.waits() == [StartRank(1)]
    for delay_s in (1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        (warning,) = host(NotStarted(1, "no memory"))
        assert isinstance(warning, Warn)
        before_s = host.now_s
        assert host.waits() == [StartRank(1)]
        assert host.now_s - before_s == delay_s + agent_lifecycle.ENTER_TIMEOUT_S


def test_failed_starts_give_up_after_their_budget_when_no_rank_is_left() -> None:
    host = running(num_ranks=1)
    host.exits("a0")
    failed: list[AgentInstruction] = []
    num_tried = 0
    while not any(isinstance(instruction, Exit) for instruction in failed):
        assert host.waits() == [StartRank(0)]
        failed = host(NotStarted(0, "no memory"))
        num_tried += 1
    assert num_tried == 13
    assert failed == [Fail(1, "rank 0 cannot be started: no memory"), StopHelpers(), Exit(1)]


def test_no_rank_starts_once_the_job_has_finished() -> None:
    host = Host(2)
    host.connect()
    host(Finished())
    assert host.start("a0") == []
    host = running()
    host.exits("a1")
    assert NotifyFinished(1) in host(MemberLeft("a0", finished=True))
    assert host.agent.deadline_s is None
    assert host.exits("a0", 0) == ENDED


def test_the_end_of_the_job_is_notified_once_and_not_if_another_agent_notified_it() -> None:
    host = running()
    assert NotifyFinished(1) in host(MemberLeft("a0", finished=True))
    assert NotifyFinished(1) not in host(MemberLeft("a1", finished=True))
    host = running("b0")
    assert NotifyFinished(1) not in host(Finished())
    assert NotifyFinished(1) not in host(MemberLeft("a1", finished=True))


# -- start time-outs


def test_ranks_that_start_are_waited_for_until_the_start_expires() -> None:
    host = Host(2)
    host.connect()
    host.start("a0", "a1")
    assert host.asks("a0") == []
    assert host.agent.timers() == {"start": host.now_s + agent_lifecycle.START_TIMEOUT_S}
    assert host.waits() == [RequestRecord()]
    assert host.agent.deadline_s is None


def test_the_start_does_not_expire_once_all_have_asked() -> None:
    assert running().agent.deadline_s is None


# -- LIFE-8: devices that are used


def test_a_rank_whose_device_is_used_lets_the_others_start() -> None:
    host = running(num_ranks=3)
    host.exits("a1")
    host.exits("a2")
    host(RankEntered())
    assert host.waits() == [StartRank(1)]
    assert host(DeviceUsed(1)) == [StartRank(2)]
    assert host.start("a2'") == []
    assert host.agent.timers() == {"restart 1": host.now_s + agent_lifecycle.DEVICE_POLL_S}
    assert host.waits() == [StartRank(1)]


def test_a_rank_whose_device_is_used_is_not_started_once_the_agent_ends() -> None:
    host = running()
    host.exits("a1")
    assert host.waits() == [StartRank(1)]
    host.gets(signal.SIGTERM)
    host.exits("a0", 0)
    assert host(DeviceUsed(1)) == [StopHelpers(), Exit(128 + signal.SIGTERM)]


def test_a_fenced_agent_whose_devices_are_used_rejoins() -> None:
    host = running("b0")
    host.exits("a1")
    assert StartRank(1) in host.waits()
    host(LeaseExpired("no answer"))
    assert host.exits("a0") == []
    assert host(DeviceUsed(1)) == [Rejoin("a.2", "a")]


# -- LIFE-3: restarts


def enters(host: Host, *members: str, generation: int = 2) -> None:
    for member in members:
        host.asks(member)
    host(RecordAnswered(record_of(*members, generation=generation)))
    host(RankEntered())


def test_a_restart_waits_until_a_survivor_has_entered() -> None:
    host = running()
    host.exits("a1")
    assert host.agent.timers() == {"restart 1": host.now_s + agent_lifecycle.ENTER_TIMEOUT_S}
    host(RankEntered())
    assert host.agent.timers() == {"restart 1": host.now_s + agent_lifecycle.COMMIT_TIMEOUT_S}
    timers = host.agent.timers()
    host.now_s += agent_lifecycle.COMMIT_TIMEOUT_S / 2
    host(RankEntered())  # the next one does not make it later
    assert host.agent.timers() == timers
    assert host.waits() == [StartRank(1)]


def test_a_restart_waits_for_the_first_commit_of_the_next_generation() -> None:
    host = running()
    host.exits("a1")
    enters(host, "a0")
    host(Committed("a0", Attempt(1, 1)))  # of the former one, read late
    assert host.agent.timers()["restart 1"] > host.now_s
    host(Committed("a0", Attempt(2, 2)))
    assert host.agent.timers() == {"restart 1": host.now_s}
    assert host.waits() == [StartRank(1)]


def test_a_rank_that_is_gone_after_the_first_commit_restarts_at_once() -> None:
    host = running(num_ranks=3)
    host(ExitBegan("a1"))
    enters(host, "a0", "a2")
    host(Committed("a0", Attempt(2, 2)))
    host.exits("a1")
    assert host.agent.timers() == {"restart 1": host.now_s}
    host.exits("a2")
    assert host.agent.timers()["restart 2"] == host.now_s + agent_lifecycle.ENTER_TIMEOUT_S


def test_a_commit_that_is_read_before_the_next_generation_begins_hastens_no_restart() -> None:
    host = running()
    host.exits("a1")
    host(Committed("a0", Attempt(1, 1)))
    assert host.agent.timers() == {"restart 1": host.now_s + agent_lifecycle.ENTER_TIMEOUT_S}


def test_a_restart_does_not_wait_for_long_when_no_survivor_enters() -> None:
    host = running()
    host.exits("a1")
    host.now_s += agent_lifecycle.ENTER_TIMEOUT_S
    assert host(TimePassed()) == [StartRank(1)]


def test_a_survivor_of_the_generation_before_has_not_entered_the_next() -> None:
    host = running()
    host(RankEntered())
    assert isinstance(host.exits("a1")[0], Abort)
    assert host.agent.timers() == {"restart 1": host.now_s + agent_lifecycle.ENTER_TIMEOUT_S}


# -- LIFE-4: members that must exit


def test_a_dismissed_member_is_killed_when_it_does_not_exit() -> None:
    host = Host(2)
    host.connect()
    host.start("a0", "a1")
    host.asks("a0")
    assert host(Finished()) == [
        RetireMembers(("a0", "a1"), "the job has finished"),
        KillRanks(("a1",)),  # it never asked
    ]
    assert host.agent.is_retired("a0")
    assert host.agent.timers()["exit a0"] == host.now_s + agent_lifecycle.RETIRE_TIMEOUT_S
    assert host(Finished()) == []
    assert host.exits("a1") == []
    assert host.waits() == [KillRanks(("a0",))]
    assert host.exits("a0") == ENDED


def test_a_dismissed_member_that_exits_is_not_killed() -> None:
    host = Host(1)
    host.connect()
    host.start("a0")
    host.asks("a0")
    host(Finished())
    assert host.exits("a0", 0) == ENDED
    assert host.agent.deadline_s is None


def test_a_member_whose_script_raised_is_killed_when_it_does_not_exit() -> None:
    host = running()
    host(Committed("a1", Attempt(1, 1)))
    host(ScriptRaised("a1"))
    assert host.agent.timers() == {"exit a1": host.now_s + agent_lifecycle.EXIT_TIMEOUT_S}
    assert host.waits() == [KillRanks(("a1",))]
    host.exits("a1", raised=True)
    assert host.waits() == [StartRank(1)]


# -- LIFE-5: signals


@pytest.mark.parametrize("others", [["b0"], []])
def test_the_first_sigterm_drains_whether_or_not_other_agents_go_on(others: list[str]) -> None:
    host = running(*others)
    assert host.gets(signal.SIGTERM) == [SignalRanks(("a0", "a1"), signal.SIGTERM, drains=True)]
    host(MemberLeft("a0", finished=False, in_order=True))
    assert host.exits("a0", 0, draining=True) == []
    host(MemberLeft("a1", finished=False, in_order=True))
    assert host.exits("a1", 0, draining=True)[-2:] == [StopHelpers(), Exit(128 + signal.SIGTERM)]


# LIFE-1 MEMBER-6
def test_nobody_stays_for_a_restart_that_a_signal_has_dropped() -> None:
    host = running()
    host.exits("a1")
    assert host.agent.state.num_successors([]) == 1
    host.gets(signal.SIGTERM)
    assert host.agent.num_coming == 0
    assert host.agent.state.num_successors(["a0"]) == 0


def test_a_draining_agent_starts_no_rank_and_ends_one_whose_fork_is_under_way() -> None:
    host = running("b0")
    host.exits("a0")
    host.exits("a1")
    assert StartRank(0) in host.waits()
    host.gets(signal.SIGTERM)
    assert host(Started("a0'", 0)) == [SignalRanks(("a0'",), signal.SIGTERM, drains=False)]
    assert host.exits("a0'", -signal.SIGTERM)[-1] == Exit(128 + signal.SIGTERM)


def test_sigint_ends_the_ranks() -> None:
    host = running()
    assert host.gets(signal.SIGINT) == [StopHelpers(), SignalRanks(("a0", "a1"), signal.SIGINT, drains=False)]
    assert host.exits("a0") == []
    assert host.exits("a1") == [StopHelpers(), Exit(128 + signal.SIGINT)]


def test_sigint_and_a_second_sigterm_end_the_ranks_and_notify_the_others() -> None:
    host = running("b0")
    assert host.gets(signal.SIGINT)[0] == NotifyOver(1, EndCause("exits on SIGINT", ("a",)))
    host = running("b0")
    host.gets(signal.SIGTERM)
    host.now_s += stop_request.REPEATED_S
    assert host.gets(signal.SIGTERM) == [
        NotifyOver(1, EndCause("exits on SIGTERM", ("a",))),
        StopHelpers(),
        SignalRanks(("a0", "a1"), signal.SIGTERM, drains=False),
    ]


# REPEAT-1
def test_sigterm_that_every_process_gets_is_one_request_to_leave() -> None:
    host = running()
    host.gets(signal.SIGTERM)
    host.now_s += 0.9
    assert host.gets(signal.SIGTERM) == []
    assert host.gets(signal.SIGINT)[-1] == SignalRanks(("a0", "a1"), signal.SIGINT, drains=False)
    host = running()
    host.gets(signal.SIGINT)
    assert host.gets(signal.SIGTERM)[-1] == SignalRanks(("a0", "a1"), signal.SIGTERM, drains=False)


@pytest.mark.parametrize(
    ("grace_period_s", "ends_s"),
    [
        (1.0, [1.0, 1.0]),
        (None, [agent_lifecycle.LEAVE_S, 0.7 + agent_lifecycle.END_S]),
        (60.0, [60.0, 60.0]),
    ],
)
def test_the_agent_exits_when_the_first_grace_period_ends(grace_period_s: float | None, ends_s: list[float]) -> None:
    """Without a second signal, and with one."""
    for wanted_s, has_second in zip(ends_s, (False, True), strict=True):
        host = running("b0", grace_period_s=grace_period_s)
        began_s = host.now_s
        host.gets(signal.SIGTERM)
        if has_second:
            host.now_s += 0.7
            host.gets(signal.SIGINT)
        assert host.waits()[-1] == Exit(128 + (signal.SIGINT if has_second else signal.SIGTERM))
        assert host.now_s == pytest.approx(began_s + wanted_s)


def test_without_a_record_the_ranks_have_nothing_to_leave_in_order() -> None:
    host = Host(1, grace_period_s=None)
    host.connect()
    host.start("a0")
    host.gets(signal.SIGTERM)
    began_s = host.now_s
    assert host.waits()[-1] == Exit(128 + signal.SIGTERM)
    assert host.now_s == began_s + agent_lifecycle.END_S


def test_an_agent_whose_grace_period_ends_says_how_many_ranks_had_not_left() -> None:
    host = running("b0")
    host.gets(signal.SIGTERM)
    notices = [each for each in host.waits() if isinstance(each, NotifyOver)]
    assert [each.cause.text("b") for each in notices] == [
        "agent a exits on SIGTERM: 2 of its ranks had not left within 1 s"
    ]


# LIFE-9
def test_one_line_tells_of_ranks_that_drain_and_do_not_leave() -> None:
    host = running()
    host.gets(signal.SIGTERM)
    host.exits("a0", 0)
    (warning,) = [each.text for each in host.waits() if isinstance(each, Warn)]
    assert warning.startswith("rank 1 did not exit within 1 s of SIGTERM (--grace-period): killing what is left; a scr")
    host = running()
    host.gets(signal.SIGINT)
    assert not [each for each in host.waits() if isinstance(each, Warn)]


# LIFE-9
def test_a_rank_that_has_left_and_does_not_exit_is_not_told_to_leave() -> None:
    host = running()
    host.gets(signal.SIGTERM)
    host.exits("a0", 0)
    host(MemberLeft("a1", finished=False))
    (warning,) = [each.text for each in host.waits() if isinstance(each, Warn)]
    assert warning == "rank 1 did not exit within 1 s of SIGTERM (--grace-period): killing what is left"


def test_a_signal_before_the_first_start_ends_the_agent_at_once() -> None:
    assert Host().gets(signal.SIGTERM)[-1] == Exit(128 + signal.SIGTERM)


# -- LIFE-6: fencing


def test_a_fenced_agent_kills_its_ranks_and_rejoins_once_all_have_exited() -> None:
    host = running("b0")
    assert host(LeaseExpired()) == [Fence(("a0", "a1"))]
    assert host(LeaseExpired()) == []
    assert host.exits("a0") == []
    assert host.exits("a1") == [Rejoin("a.2", "a")]
    assert host.agent.agent == "a.2"
    assert host.connect() == [StartRank(0)]
    assert host.start("a0'") == [StartRank(1)]
    assert host.asks("a0'") == []  # it waits for those that start
    host.start("a1'")
    assert host.asks("a1'") == [RequestRecord()]
    assert host.agent.state.report().agent == "a.2"


def test_a_fenced_agent_decides_nothing_about_its_ranks() -> None:
    host = running("b0")
    host(LeaseExpired())
    record = host.agent.state.record
    assert host.asks("a0") == []
    assert host(RecordAnswered(record_of("a0", "a1", "b0", generation=2))) == []
    assert host(Finished()) == []
    assert host.agent.state.record is record
    assert host.agent.deadline_s is None


def test_a_fork_under_way_is_waited_for_and_its_rank_killed_before_the_rejoin() -> None:
    host = running("b0")
    host.exits("a0")
    host.exits("a1")
    assert StartRank(0) in host.waits()
    assert host(LeaseExpired()) == [Fence(())]
    assert host(Started("a0'", 0)) == [KillRanks(("a0'",))]
    assert host.exits("a0'") == [Rejoin("a.2", "a")]
    host = running("b0", num_ranks=1)
    host.exits("a0")
    host.waits()
    host(LeaseExpired())
    assert host(NotStarted(0, "no memory")) == [Rejoin("a.2", "a")]


def test_a_failed_start_after_a_rejoin_is_tried_again() -> None:
    host = running("b0", num_ranks=1)
    host(LeaseExpired())
    host.exits("a0")
    assert host.connect() == [StartRank(0)]
    (warning,) = host(NotStarted(0, "no memory"))
    assert isinstance(warning, Warn)
    assert host.waits() == [StartRank(0)]


def test_a_signal_while_the_agent_is_fenced_or_rejoins_ends_it() -> None:
    host = running("b0", num_ranks=1)
    host(LeaseExpired())
    assert host.gets(signal.SIGTERM) == [StopHelpers(), SignalRanks(("a0",), signal.SIGTERM, drains=False)]
    assert host.exits("a0") == [StopHelpers(), Exit(128 + signal.SIGTERM)]
    host = running("b0", num_ranks=1)
    host(LeaseExpired())
    host.exits("a0")
    assert host.gets(signal.SIGINT)[-1] == Exit(128 + signal.SIGINT)


def test_a_coordinator_that_stays_away_fails_the_job() -> None:
    host = running("b0", num_ranks=1)
    host(LeaseExpired())
    host.exits("a0")
    assert host(CoordinatorTimedOut("away")) == [Fail(1, "away"), StopHelpers(), Exit(1)]
    assert host.connect() == []


# -- LIFE-7: the exit code


def leaves(host: Host) -> list[AgentInstruction]:
    host(MemberLeft("a0", finished=False, by_script=True, num_steps=9))
    return host.exits("a0", 0, draining=True)


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (lambda host: host.exits("a0", 0), 0),
        (leaves, 0),
        (lambda host: host.exits("a0", 3), 3),
        (lambda host: host.exits("a0", -signal.SIGSEGV), 128 + signal.SIGSEGV),
        (lambda host: host.exits("a0", 0, draining=True), 1),  # a signal to the rank was among it
        (lambda host: host(InternalError("bug")), 1),
        (lambda host: host.asks("a0", layout=ParallelLayout(tp=2)), 2),
        (lambda host: host(RecordAnswered(Undecided("why", refused=(("a", "protocol 1"),)))), 2),
    ],
)
def test_the_exit_code_follows_from_how_the_ranks_ended(
    ends: Callable[[Host], list[AgentInstruction]], code: int
) -> None:
    host = running(num_ranks=1)
    done = ends(host)
    assert done[-1] == Exit(code)
    assert sum(isinstance(instruction, Exit) for instruction in done) == 1
    assert any(isinstance(instruction, Fail) for instruction in done) == (code != 0)
    assert host.exits("a0") == []
    assert host.gets(signal.SIGTERM) == []
    assert host.agent.deadline_s is None


# AGENT-10
@pytest.mark.parametrize(
    ("then", "code"),
    [
        (lambda host: host.exits("a1", 0), 128 + signal.SIGKILL),
        (lambda host: host.exits("a1", 3), 3),
        (lambda host: [*host.gets(signal.SIGINT), *host.exits("a1")], 128 + signal.SIGINT),
    ],
)
def test_after_a_kill_behind_the_last_step_the_others_end_by_themselves(
    then: Callable[[Host], list[AgentInstruction]], code: int
) -> None:
    host = running()
    for member in ("a0", "a1"):
        host(MemberLeft(member, finished=True, in_order=True))
    (warning,) = host.exits("a0")
    assert isinstance(warning, Warn)
    assert then(host)[-1] == Exit(code)


# AGENT-11
def test_a_lost_state_fails_the_job_once_those_that_had_left_their_loop_have_ended() -> None:
    host = running()
    host(MemberLeft("a0", finished=False, in_order=False))
    host.exits("a1")
    while not any(isinstance(done, StartRank) for done in host.waits()):
        pass
    host.start("a1'")
    host.asks("a1'")
    done = host(RecordAnswered(Unrecoverable("no live member holds step 3")))
    assert [type(instruction) for instruction in done] == [Warn, RetireMembers]
    assert host.exits("a1'") == []  # it is not restarted
    assert host.exits("a0", 0) == [Fail(1, "the job's state is lost: no live member holds step 3"), *FAILED]


def test_after_a_signal_its_code_counts() -> None:
    host = running("b0", num_ranks=1)
    host.gets(signal.SIGTERM)
    done = host.exits("a0", 3, draining=True)
    assert isinstance(done[0], Fail)
    assert done[-1] == Exit(128 + signal.SIGTERM)


def test_one_that_leaves_by_its_script_ends_the_job_in_so_many_words() -> None:
    host = running(num_ranks=1)
    assert leaves(host) == [End("all ranks have left: 0 of 9 steps are committed"), *ENDED]


def test_a_layout_that_the_only_agent_can_never_fill_fails_the_job() -> None:
    host = Host(1, max_agents=1)
    host.connect()
    host.start("a0")
    fail, *rest = host.asks("a0", layout=ParallelLayout(tp=2))
    assert isinstance(fail, Fail)
    assert "needs 2 ranks" in fail.reason
    assert rest == [StopHelpers(), Exit(2)]
