"""Events and instructions of an agent's state machine: `agent_lifecycle.py` and `agent_state.py` decide, `agent.py`
translates sockets, processes and timers to events and executes instructions."""

from __future__ import annotations

from dataclasses import dataclass

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import MemberReport, Record, Undecided, Unrecoverable


@dataclass(frozen=True)
class Started:
    member: str
    local_rank: int


@dataclass(frozen=True)
class RecordRequested:
    """`broken`: because a collective failed, not because the generation ended in order; `timed_out`: it took too long,
    and nobody is known to be gone."""

    member: str
    report: MemberReport
    layout: ParallelLayout
    broken: bool
    timed_out: bool = False


@dataclass(frozen=True)
class Committed:
    member: str
    attempt: Attempt


@dataclass(frozen=True)
class MemberLeft:
    """The member takes part no more. `finished`: it has done all steps. `in_order`: it has taken part in a vote
    by which the others of its generation know, and are on their way to the next one. `by_script`: by `manager.leave()`,
    in a job of `num_steps`."""

    member: str
    finished: bool
    in_order: bool = False
    by_script: bool = False
    num_steps: int = 0


@dataclass(frozen=True)
class Exited:
    """The process is gone. `status`: as of `subprocess`, negative for a signal. `blameless`: it ended with an error
    that a lost peer caused. `draining`: it was asked to leave for good; `joined`: it has called `elasticgang.join`.
    `raised`: its script has ended by an exception, whatever the status says. `step`: the one it began last. `at_s`: of
    CLOCK_MONOTONIC."""

    member: str
    status: int
    blameless: bool = False
    draining: bool = False
    joined: bool = False
    raised: bool = False
    step: int | None = None
    at_s: float = 0.0


@dataclass(frozen=True)
class NotStarted:
    """No process could be started for the rank: `reason`."""

    local_rank: int
    reason: str


@dataclass(frozen=True)
class StartExpired:
    pass


@dataclass(frozen=True)
class PeerNotice:
    """Another agent says that `generation` is over, or (`over` false) that somebody waits to join it."""

    generation: int
    over: bool
    reason: str = ""


@dataclass(frozen=True)
class HostLost:
    """`agent` is dead, or has killed all of its members because its lease expired. It does not return under this id."""

    agent: str


@dataclass(frozen=True)
class QuorumAnswered:
    """The outcome of an `RequestQuorum`. `is_newest`: no other was made since."""

    answer: Record | Undecided | Unrecoverable
    is_newest: bool = True


@dataclass(frozen=True)
class PeerFailed:
    """The script of `member`, a process of that rank of another agent, has failed in `step`. It may come twice."""

    agent: str
    member: str
    local_rank: int
    step: int


@dataclass(frozen=True)
class Finished:
    """A member of another agent has done all steps."""


@dataclass(frozen=True)
class CoordinatorReturned:
    """The agent has a new session with the coordinator, which may have restarted as `incarnation`."""

    incarnation: str


Event = (
    Started
    | NotStarted
    | RecordRequested
    | Committed
    | MemberLeft
    | Exited
    | StartExpired
    | PeerNotice
    | HostLost
    | PeerFailed
    | Finished
    | CoordinatorReturned
    | QuorumAnswered
)


@dataclass(frozen=True)
class CoordinatorConnected:
    """The agent has its first session with the coordinator under its present id. `host`: the agent's own
    address as the coordinator sees it; `address`: where it listens for other agents."""

    host: str
    incarnation: str
    address: str


@dataclass(frozen=True)
class RankEntered:
    """A rank has entered a generation."""


@dataclass(frozen=True)
class ScriptRaised:
    """The script of `member` has ended by an exception. The process may run on: a thread of the script may hold it."""

    member: str


@dataclass(frozen=True)
class SignalReceived:
    """The agent itself got SIGTERM or SIGINT."""

    number: int


@dataclass(frozen=True)
class LeaseExpired:
    """The coordinator has not answered for so long that it may soon declare this agent lost, or it has evicted the
    agent."""

    reason: str = ""


@dataclass(frozen=True)
class CoordinatorTimedOut:
    """The coordinator was needed, and away for longer than `--coordinator-timeout`."""

    reason: str


@dataclass(frozen=True)
class InternalError:
    """An exception in the driver that nothing handled."""

    reason: str


@dataclass(frozen=True)
class TimePassed:
    """The machine's `deadline_s` is reached."""


AgentEvent = (
    Event
    | CoordinatorConnected
    | RankEntered
    | ScriptRaised
    | SignalReceived
    | LeaseExpired
    | CoordinatorTimedOut
    | InternalError
    | TimePassed
)


@dataclass(frozen=True)
class Abort:
    """End `generation` for `members`, and tell the other agents."""

    members: tuple[str, ...]
    generation: int
    reason: str


@dataclass(frozen=True)
class AnnounceJoin:
    """Tell `members` of `generation`, and the other agents, that somebody waits to join."""

    members: tuple[str, ...]
    generation: int


@dataclass(frozen=True)
class RequestQuorum:
    """Request the next record with the `report()` of then, after `delay_s`, unless another `RequestQuorum` has come or
    it must not be any more (`may_request`)."""

    delay_s: float = 0.0


@dataclass(frozen=True)
class DeliverRecord:
    members: tuple[str, ...]
    record: Record


@dataclass(frozen=True)
class Restart:
    """From the agent state to the lifecycle: start the rank again, `delay_s` after the survivors are on their way."""

    local_rank: int
    delay_s: float


@dataclass(frozen=True)
class BroadcastFailure:
    """Tell the other agents that the script of `member` has failed in `step`."""

    member: str
    local_rank: int
    step: int


@dataclass(frozen=True)
class RetireMembers:
    """The job is over for `members`, which hold no state: tell them, so that they end."""

    members: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Fail:
    """The job has failed with `code`. `Exit` follows."""

    code: int
    reason: str


@dataclass(frozen=True)
class Warn:
    """Of what ends nothing, and may not be meant."""

    text: str


@dataclass(frozen=True)
class End:
    """The job is over here as was asked for: `reason`. `Exit` follows."""

    reason: str


@dataclass(frozen=True)
class NotifyOver:
    """Notify the other agents that `generation` is over."""

    generation: int
    reason: str


Instruction = (
    Abort
    | NotifyOver
    | AnnounceJoin
    | RequestQuorum
    | DeliverRecord
    | Restart
    | BroadcastFailure
    | RetireMembers
    | Fail
    | Warn
    | End
)


@dataclass(frozen=True)
class StartRank:
    """Fork a process for the rank. Its outcome is `Started` or `NotStarted`."""

    local_rank: int


@dataclass(frozen=True)
class KillRanks:
    members: tuple[str, ...]


@dataclass(frozen=True)
class SignalRanks:
    """Pass on the signal `number`. `drains`: the members leave at a step boundary; else it ends them."""

    members: tuple[str, ...]
    number: int
    drains: bool


@dataclass(frozen=True)
class NotifyFinished:
    """Notify all other agents that the job has finished."""


@dataclass(frozen=True)
class StopHelpers:
    """The agent ends: restart neither the fork server nor the coordinator."""


@dataclass(frozen=True)
class Fence:
    """Kill `members`, which are all that run: the agent's lease is over."""

    members: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class Rejoin:
    """Every rank of `former` has exited: close the present session with the coordinator, and connect to it as `agent`.
    The outcome is `CoordinatorConnected` or `CoordinatorTimedOut`."""

    agent: str
    former: str


@dataclass(frozen=True)
class Exit:
    """Kill what still runs, and exit with `code`. Nothing follows."""

    code: int


AgentInstruction = (
    Instruction | StartRank | KillRanks | SignalRanks | NotifyFinished | StopHelpers | Fence | Rejoin | Exit
)
