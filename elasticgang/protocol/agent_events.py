"""Events and instructions of an agent's state machine.

`agent_lifecycle.py` and `agent_state.py` decide; `agent.py` translates sockets, processes and timers to events, and
executes the instructions.
"""

from __future__ import annotations

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.devices import NOT_JOINED, Taken
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.record import CheckpointRef, MemberReport, Record, Undecided, Unrecoverable
from elasticgang.protocol.values import value


@value(frozen=True)
class Started:
    member: str
    local_rank: int


@value(frozen=True)
class RecordRequested:
    """`broken`: a collective failed; otherwise the generation ended in order. `timed_out`: the collective timed out,
    and no peer is known to be lost. `checkpoint`: the newest that the member can load. `settings`: as in `Report`.
    `left_step`: an exception has left a step here, and the script goes on (MANAGER-19). `connected`: the member has
    connected to the others of its generation, if it had a seat. `lacks`: what it lacked for that, in
    words (RENDEZVOUS-4, SUMS-5)."""

    member: str
    report: MemberReport
    layout: ParallelLayout
    broken: bool
    timed_out: bool = False
    checkpoint: CheckpointRef | None = None
    settings: tuple[tuple[str, str], ...] = ()
    left_step: bool = False
    connected: bool = True
    lacks: str = ""


@value(frozen=True)
class Committed:
    member: str
    attempt: Attempt


@value(frozen=True)
class MemberLeft:
    """The member takes part no longer. `finished`: it has done all steps. `in_order`: a vote has announced it, so that
    all members of its generation go on to the next one. `by_script`: it called `manager.leave()`. `num_steps`: steps of
    the job; 0 if unknown. `raised`: an exception has left a step, and its loop with it."""

    member: str
    finished: bool
    in_order: bool = False
    by_script: bool = False
    num_steps: int = 0
    raised: bool = False


@value(frozen=True)
class ExitBegan:
    """The process of `member` has begun to exit, and runs no code once it is killed. `Exited` follows when it is gone,
    with its memory."""

    member: str


@value(frozen=True)
class Exited:
    """The process has exited.

    `status`: as `Popen.returncode`, negative for a signal. `blameless`: its script raised an error that a lost peer
    caused. `draining`: it was asked to leave for good. `joined`: it has called `elasticgang.join`. `raised`: its script
    raised an exception, whatever the status says. `step`: the last one it began. `at_s`: CLOCK_MONOTONIC seconds.
    `device_fault`: how the rank's device has failed; None: it has not. `taken`: that device. `differs`: it has raised
    that its training state is of another form than that of the other ranks. `heals`: it has raised that its training
    state is damaged, and others have the right one, or that it cannot get it from them.
    """

    member: str
    status: int
    blameless: bool = False
    draining: bool = False
    joined: bool = False
    raised: bool = False
    step: int | None = None
    at_s: float = 0.0
    device_fault: str | None = None
    taken: Taken = NOT_JOINED
    differs: bool = False
    heals: bool = False


@value(frozen=True)
class NotStarted:
    """No process could be started for the rank, because of `reason`."""

    local_rank: int
    reason: str


@value(frozen=True)
class DeviceUsed:
    """The rank was not started, because the former rank still has memory on its device."""

    local_rank: int


@value(frozen=True)
class StartExpired:
    pass


@value(frozen=True)
class StartsStopped:
    """A signal has arrived: no rank starts any more, whatever was decided (LIFE-1)."""


@value(frozen=True)
class PeerNotice:
    """A notice of another agent: `generation` is over because of `cause`, or (`over` false) a rank waits to join it."""

    generation: int
    over: bool
    cause: EndCause = EndCause("")


@value(frozen=True)
class RecordAnswered:
    """What the coordinator has decided: the next record, or why there is none."""

    answer: Record | Undecided | Unrecoverable


@value(frozen=True)
class PeerFailed:
    """The script of `member` has failed in `step`; it was a process of the rank `local_rank` of `agent`. The event may
    be repeated."""

    agent: str
    member: str
    local_rank: int
    step: int


@value(frozen=True)
class Finished:
    """A member of another agent has done all steps."""


@value(frozen=True)
class StateDiffers:
    """Ranks have found in `generation` that their training states differ after `step`. `ends_job`: nobody can say which
    is right. Each rank of this agent that knows it says so."""

    step: int
    generation: int
    text: str
    ends_job: bool


@value(frozen=True)
class HostsTried:
    """The outcome of `TryHosts` of the same `agent` and `number`, at `at_s`. `unreached`: with the reasons, in words.
    Agents that are in neither were not tried in time."""

    agent: str
    number: int
    reached: tuple[str, ...]
    unreached: tuple[tuple[str, str], ...]
    at_s: float


@value(frozen=True)
class RetryDue:
    """`Reach.next_try_s` is reached."""


@value(frozen=True)
class PeerFailedJob:
    """Another agent ends the job, because of `reason`."""

    reason: str


Event = (
    Started
    | NotStarted
    | RecordRequested
    | Committed
    | MemberLeft
    | ExitBegan
    | Exited
    | StartExpired
    | StartsStopped
    | PeerNotice
    | PeerFailed
    | StateDiffers
    | PeerFailedJob
    | Finished
    | RecordAnswered
    | HostsTried
    | RetryDue
)


@value(frozen=True)
class CoordinatorConnected:
    """The agent has its first session with the coordinator under its present id. `host`: the agent's own
    address as the coordinator sees it; `address`: where it listens for other agents."""

    host: str
    address: str


@value(frozen=True)
class RankEntered:
    """A rank has entered a generation."""


@value(frozen=True)
class ScriptRaised:
    """The script of `member` has raised an exception. The process may still run: a thread of the script can keep it
    alive."""

    member: str


@value(frozen=True)
class SignalReceived:
    """The agent itself got SIGTERM or SIGINT."""

    number: int


@value(frozen=True)
class LeaseExpired:
    """The coordinator has not answered for so long that it may soon declare this agent lost, or it has evicted the
    agent."""

    reason: str = ""


@value(frozen=True)
class CoordinatorTimedOut:
    """The coordinator was needed, and unreachable for longer than `--coordinator-timeout`."""

    reason: str


@value(frozen=True)
class InternalError:
    """An unhandled exception in the driver."""

    reason: str


@value(frozen=True)
class TimePassed:
    """The machine's `deadline_s` is reached."""


AgentEvent = (
    Event
    | CoordinatorConnected
    | DeviceUsed
    | RankEntered
    | ScriptRaised
    | SignalReceived
    | LeaseExpired
    | CoordinatorTimedOut
    | InternalError
    | TimePassed
)


@value(frozen=True)
class Abort:
    """End `generation` for `members`, and notify the other agents."""

    members: tuple[str, ...]
    generation: int
    cause: EndCause


@value(frozen=True)
class AnnounceJoin:
    """Notify `members` of `generation`, and the other agents, that a rank waits to join."""

    members: tuple[str, ...]
    generation: int


@value(frozen=True)
class RequestRecord:
    """Send `report()` to the coordinator, unless `may_request()` is false by then."""


@value(frozen=True)
class DeliverRecord:
    members: tuple[str, ...]
    record: Record


@value(frozen=True)
class Restart:
    """From the agent state to the lifecycle: restart the rank, `delay_s` after a survivor has entered the next
    generation."""

    local_rank: int
    delay_s: float


@value(frozen=True)
class BroadcastFailure:
    """Notify the other agents that the script of `member` has failed in `step`."""

    member: str
    local_rank: int
    step: int


@value(frozen=True)
class BroadcastJobFailed:
    """Notify all other agents that the job ends, as of `PeerFailedJob`. `Fail` follows."""

    step: int
    generation: int
    text: str


@value(frozen=True)
class ReportDeviceFault:
    """Write that `device` has failed for the `number`-th time in an hour, while the rank `local_rank` used it, because
    of `reason`. `next_device`: where the rank is restarted; None: it is not. `uuid`: of the device; "" if unknown.
    `is_chosen`: the script has chosen the device with that UUID, and not `device`."""

    device: int
    local_rank: int
    reason: str
    number: int
    is_quarantined: bool
    next_device: int | None
    uuid: str = ""
    is_chosen: bool = False


@value(frozen=True)
class RetireMembers:
    """Tell `members`, which do not hold the final state, that the job is over, so that they exit."""

    members: tuple[str, ...]
    reason: str


@value(frozen=True)
class Fail:
    """The job has failed with `code`. `Exit` follows."""

    code: int
    reason: str


@value(frozen=True)
class Warn:
    """Warn the user. The job goes on."""

    text: str


@value(frozen=True)
class End:
    """The job is over on this host as requested, because of `reason`. `Exit` follows."""

    reason: str


@value(frozen=True)
class NotifyOver:
    """Notify the other agents that `generation` is over."""

    generation: int
    cause: EndCause


@value(frozen=True)
class TryHosts:
    """Open a connection to each of the other agents (id, address), and bring `HostsTried`."""

    agent: str
    number: int
    others: tuple[tuple[str, str], ...]


@value(frozen=True)
class TellUnreached:
    """Tell the coordinator which agents' hosts this one does not reach."""

    agents: tuple[str, ...]


@value(frozen=True)
class KillRanks:
    members: tuple[str, ...]


Instruction = (
    Abort
    | KillRanks
    | TryHosts
    | TellUnreached
    | NotifyOver
    | AnnounceJoin
    | RequestRecord
    | DeliverRecord
    | Restart
    | BroadcastFailure
    | BroadcastJobFailed
    | ReportDeviceFault
    | RetireMembers
    | Fail
    | Warn
    | End
)


@value(frozen=True)
class StartRank:
    """Fork a process for the rank. Its outcome is `Started` or `NotStarted`."""

    local_rank: int


@value(frozen=True)
class SignalRanks:
    """Forward the signal `number`. `drains`: the members leave at a step boundary; otherwise they exit."""

    members: tuple[str, ...]
    number: int
    drains: bool


@value(frozen=True)
class NotifyFinished:
    """Notify all other agents that the job has finished, here in `generation`."""

    generation: int


@value(frozen=True)
class StopHelpers:
    """The agent is about to exit: restart neither the fork server nor the coordinator."""


@value(frozen=True)
class Fence:
    """Kill `members`, which are all running ones: the agent's lease has expired."""

    members: tuple[str, ...]
    reason: str = ""


@value(frozen=True)
class Rejoin:
    """Every rank of `former` has exited: close the present session with the coordinator, and connect to it as `agent`.
    The outcome is `CoordinatorConnected` or `CoordinatorTimedOut`."""

    agent: str
    former: str


@value(frozen=True)
class Exit:
    """Kill all remaining processes, and exit with `code`. No instruction follows."""

    code: int


AgentInstruction = Instruction | StartRank | SignalRanks | NotifyFinished | StopHelpers | Fence | Rejoin | Exit
