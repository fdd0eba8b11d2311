"""Messages between agents and their coordinator, the events and instructions of both state machines, and the timeouts.

Pure, and only data. `coordinator_state.py` and `agent_session.py` decide; `session/` has the wire format.

SESSION-TERM  No two coordinators have the same term: `name` is drawn anew by each process.
SESSION-ORDER Decisions are ordered by term, then by generation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.job_facts import AgentFacts, JobFacts
from elasticgang.protocol.record import Record, Report
from elasticgang.protocol.values import value


class Term(NamedTuple):
    """The term of office of one coordinator. `name` is the incarnation of its process."""

    number: int
    name: str


NO_TERM = Term(0, "")


class DecisionRef(NamedTuple):
    """Names a decision. `durable`: the coordinator that made it keeps a state directory."""

    term: Term
    generation: int
    digest: str
    durable: bool

    @property
    def order(self) -> tuple[Term, int]:
        return self.term, self.generation


@value(frozen=True)
class Decision:
    """A record with the term in which a coordinator decided it."""

    term: Term
    record: Record
    durable: bool = False

    @property
    def ref(self) -> DecisionRef:
        return DecisionRef(self.term, self.record.generation, self.record.digest, self.durable)


@value(frozen=True)
class Timeouts:
    """Seconds by the clock of the process that waits. `drift`: by how much a clock may run too fast or too slow.

    lease_s          an agent's ranks may act so long after the agent sent the last heartbeat that was answered
    grace_s          after the lease: within it, every rank of the agent has ended
    lost_after_s     the coordinator declares a silent agent lost, and what its ranks held
    heartbeat_s      between an agent's heartbeats
    answer_s         an agent that has waited so long for an answer opens a new session, and waits twice as long there
                     (before its first record, it waits longest from the start)
    standstill_s     a coordinator that was not run for so long may not have read what agents sent meanwhile
    founding_s       from the first report of a new job to the record of whoever is ready
    notice_s         agents are told why there is no next record
    """

    lease_s: float = 8.0
    grace_s: float = 3.0
    lost_after_s: float = 12.5
    heartbeat_s: float = 1.0
    answer_s: float = 3.0
    standstill_s: float = 1.0
    founding_s: float = 60.0
    notice_s: float = 3.0
    drift: float = 0.01

    def __post_init__(self) -> None:
        """Raises ValueError when a coordinator could declare an agent lost before its ranks have ended."""
        slow, fast = 1 + self.drift, 1 - self.drift
        if self.lost_after_s * fast <= (self.lease_s + self.grace_s) * slow:  # LEASE-2
            raise ValueError(
                f"`lost_after_s` must exceed `lease_s + grace_s` and drift, but is {self.lost_after_s} beside "
                f"{self.lease_s} + {self.grace_s}"
            )


JOB_TIMEOUTS = Timeouts()

_FOREVER_S = 1e9

# Of a job's own coordinator and the agent that runs it: they are one host, which cannot be cut off from itself.
EMBEDDED_TIMEOUTS = Timeouts(lease_s=_FOREVER_S, lost_after_s=1.1 * _FOREVER_S)


# -- an agent to its coordinator


@value(frozen=True)
class Hello:
    """First in each session. `incarnation`: of the agent's process. `session`: counts its sessions; a later one
    replaces an earlier one. `term`: the highest that it has promised. `decision`: the newest it knows. `over`: the
    newest generation that it knows to be over. `finished`: as of `Finished`; 0 if no rank has done all steps. `former`:
    the id of the same process before, if it had one: all ranks of that id have exited. The process speaks for it on
    what it has promised and accepted; `former_decision`: the newest that it had accepted."""

    agent: str
    incarnation: str
    session: int
    term: Term = NO_TERM
    decision: DecisionRef | None = None
    over: int = 0
    finished: int = 0
    former: str = ""
    former_decision: DecisionRef | None = None


@value(frozen=True)
class Promise:
    """The agent accepts no decision of an earlier term from now on."""

    term: Term


@value(frozen=True)
class KnownDecision:
    """Answers `RequestDecision`."""

    decision: Decision


@value(frozen=True)
class Ready:
    """All live ranks of the agent have requested the next record."""

    report: Report


@value(frozen=True)
class EndGeneration:
    """Also from the coordinator to the other agents."""

    generation: int
    cause: EndCause = EndCause("")


@value(frozen=True)
class JoinRequest:
    """A rank waits to join `generation`, which goes on until its members reach a step boundary."""

    generation: int


@value(frozen=True)
class Accepted:
    generation: int
    digest: str


@value(frozen=True)
class Finished:
    """A rank has done all steps, the last one in `generation`. Also from the coordinator to the other agents."""

    generation: int = 0


@value(frozen=True)
class Goodbye:
    """All ranks of the agent have ended, and it does not come back under this id."""

    reason: str = ""


@value(frozen=True)
class Heartbeat:
    number: int


@value(frozen=True)
class JobFailed:
    """The sender ends the job in `step` of `generation`, and so must all. Also from the coordinator to the other
    agents, once for each generation and step, and to one of that generation that opens a new session."""

    step: int
    generation: int
    text: str


AgentMessage = (
    Hello
    | Promise
    | KnownDecision
    | Ready
    | EndGeneration
    | JoinRequest
    | Accepted
    | Finished
    | Goodbye
    | Heartbeat
    | JobFailed
    | AgentFacts
)


# -- the coordinator to an agent


@value(frozen=True)
class Welcome:
    """A snapshot: first in each session, and again when the term or the office changes. Notices that were lost with a
    former session are in it. `in_office`: also, the agent has accepted the newest record, if it was sent it.
    `everywhere`: the coordinator listens on all addresses of its machine."""

    term: Term
    in_office: bool
    over: int = 0
    joining: int = 0
    finished: bool = False
    everywhere: bool = False


@value(frozen=True)
class Push:
    """A decision, and the notices of its generation that the agent may have missed."""

    decision: Decision
    over: int = 0
    joining: int = 0


@value(frozen=True)
class RequestDecision:
    """The agent knows a newer decision than its coordinator, which asks for it."""

    digest: str


@value(frozen=True)
class HeartbeatAnswer:
    """Only one from a coordinator in office renews the lease."""

    number: int
    in_office: bool


@value(frozen=True)
class JoinNotice:
    generation: int


@value(frozen=True)
class Evicted:
    """The agent kills its ranks. It may come back under another id."""

    reason: str


@value(frozen=True)
class Refused:
    """The agent does not fit the job."""

    reason: str


@value(frozen=True)
class Notice:
    """Agents show it to users. `topic`: "lost", "left" (they have said `Goodbye`) or "refused", about `agents`;
    "undecided" or "waiting" (for agents that are not ready, a disk or an operator), about the job. An agent that waits
    for nothing but the fate of the last step fails on "undecided" (AGENT-5)."""

    topic: str
    reason: str
    agents: tuple[str, ...] = ()


@value(frozen=True)
class JobUnrecoverable:
    """The committed state is lost, and the job with it."""

    reason: str


# -- an operator to a coordinator, and back


@value(frozen=True)
class GrantOffice:
    """The operator's word for the job of the session (OFFICE). `Granted` or `Refused` answers it."""


@value(frozen=True)
class Granted:
    """`reason`: from what the job goes on, and without whom."""

    reason: str


CoordinatorMessage = (
    Welcome
    | Push
    | RequestDecision
    | HeartbeatAnswer
    | EndGeneration
    | JoinNotice
    | Finished
    | JobFailed
    | JobFacts
    | Notice
    | Evicted
    | Refused
    | JobUnrecoverable
)


# -- events of the coordinator's state machine


@value(frozen=True)
class Received:
    session: int
    message: AgentMessage


@value(frozen=True)
class SessionClosed:
    session: int


@value(frozen=True)
class Persisted:
    """The `Persist` of the decision with this digest is on the disk."""

    digest: str


@value(frozen=True)
class AgentExited:
    """The agent's process is known to be gone, with all that it had started."""

    agent: str


@value(frozen=True)
class OfficeGranted:
    """The operator's word: no other coordinator leads this job, and whoever is absent is gone; or the job is new."""


@value(frozen=True)
class Ticked:
    """Time has passed. At least once in `standstill_s`."""


CoordinatorEvent = Received | SessionClosed | Persisted | AgentExited | OfficeGranted | Ticked


# -- instructions of the coordinator's state machine


@value(frozen=True)
class Send:
    session: int
    message: CoordinatorMessage


@value(frozen=True)
class Persist:
    """Write to the state directory and fsync; then bring `Persisted`, if there is a decision. `finished`: the job has
    finished. `addresses`: of the coordinators that have used the directory since the decision (MOVED). `own`: the
    decision was written there before anybody had it; else agents have brought it (OFFICE)."""

    term: Term
    decision: Decision | None
    finished: bool
    addresses: frozenset[str]
    own: bool


@value(frozen=True)
class CloseSession:
    session: int
    reason: str


CoordinatorInstruction = Send | Persist | CloseSession


# -- events and instructions of the agent's session


@value(frozen=True)
class Connected:
    """`address`: of the coordinator."""

    address: str


@value(frozen=True)
class Disconnected: ...


@value(frozen=True)
class ConnectionRefused:
    """Nothing listens at `address`. `began_s`: when the attempt began."""

    address: str
    began_s: float


@value(frozen=True)
class AddressLost:
    """This host no longer has the address at which its ranks listen."""

    reason: str


@value(frozen=True)
class Answer:
    """A message of the coordinator."""

    message: CoordinatorMessage


@value(frozen=True)
class ReportRequested:
    """The agent's ranks may be ready: `CollectReport` follows once the coordinator can be told."""


@value(frozen=True)
class ReportCollected:
    report: Report


@value(frozen=True)
class Notify:
    """Tell the coordinator, and tell it again in the next session where that is needed."""

    message: EndGeneration | JoinRequest | Finished | Goodbye | JobFailed | AgentFacts


SessionEvent = (
    Connected
    | Disconnected
    | ConnectionRefused
    | AddressLost
    | Answer
    | ReportRequested
    | ReportCollected
    | Notify
    | Ticked
)


@value(frozen=True)
class SendToCoordinator:
    message: AgentMessage


@value(frozen=True)
class HangUp:
    """Close the session, and open another."""

    reason: str


@value(frozen=True)
class SetLease:
    """No rank may act beyond `until_s`."""

    until_s: float


@value(frozen=True)
class CollectReport:
    """Bring `ReportCollected`, if every live rank still waits for the next record."""


@value(frozen=True)
class Inform:
    """Bring `event` (of `agent_events.py`) to the agent's state machine; `JobFacts` or a `Notice` to the agent."""

    event: Any


@value(frozen=True)
class KillRanks:
    """The agent takes part no more under this id: its ranks must not act again."""

    reason: str


SessionInstruction = SendToCoordinator | HangUp | SetLease | CollectReport | Inform | KillRanks
