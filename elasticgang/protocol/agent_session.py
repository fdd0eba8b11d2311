"""An agent's half of its session with the coordinator: events and the time in, instructions out.

Pure: no clock, no socket. The agent performs the instructions and brings the events.

PROMISE  An agent that has promised a term accepts decisions only from a coordinator whose term is not lower. It keeps
         the promise when it takes another id, and speaks for the former one on what that had accepted.
LEASE    The ranks may act for `lease_s` after the agent sent the last message that a coordinator in office answered.
         The answer counts from when that message was sent, so that the coordinator heard of the agent no earlier.
REFUSED  A connection that was refused at the coordinator's address renews the lease as an answer does: nothing listens
         there, so that nobody decides without this agent. It counts only at the address of the coordinator that
         granted the lease, and no more once another one was promised a term.
FENCE    Once the lease is over the agent kills its ranks, and takes part no more under its id. A record that comes
         before there is a lease waits for one. Until the ranks have it, the agent is not ready for the next one.
READDRESS  So it does once its host has lost the address at which its ranks listen: no rank could connect to them again.
UNBOUND  Before its first record, an agent is bound by no lease, and waits longest for an answer: its ranks cannot act.
         A coordinator that is slow because many agents come at once would otherwise lose them all, and their return
         would make it slower.
RESEND   What the coordinator must know is in each `Hello` and in each report, and the agent's facts follow the first
         `Welcome` of a session; nothing is lost with one. What the agent notified before that `Welcome` follows it too:
         a coordinator that has yet to be sent the decision of a `Hello` takes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from elasticgang.protocol import agent_events
from elasticgang.protocol.coordinator_messages import (
    NO_TERM,
    Accepted,
    AddressLost,
    Answer,
    CollectReport,
    Connected,
    ConnectionRefused,
    CoordinatorMessage,
    Decision,
    Disconnected,
    EndGeneration,
    Evicted,
    Finished,
    Goodbye,
    HangUp,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    Inform,
    JobFailed,
    JobUnrecoverable,
    JoinNotice,
    JoinRequest,
    KillRanks,
    KnownDecision,
    Notice,
    Notify,
    Promise,
    Push,
    Ready,
    Refused,
    ReportCollected,
    ReportRequested,
    RequestDecision,
    SendToCoordinator,
    SessionEvent,
    SessionInstruction,
    SetLease,
    Term,
    Ticked,
    Timeouts,
    Welcome,
)
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.job_facts import NO_FACTS, AgentFacts, JobFacts
from elasticgang.protocol.record import Record, Undecided, Unrecoverable

Instructions: TypeAlias = "list[SessionInstruction]"
_Notification: TypeAlias = "EndGeneration | JoinRequest | Finished | Goodbye | JobFailed"

_MAX_DOUBLINGS = 3


@dataclass
class AgentSession:
    """`handle` is the only way in. `decision`: the newest that this agent accepted. `lease_until_s`: None before the
    first answer. `is_ended`: this agent takes part no more. `former`,
    `former_decision`: as of `Hello`. `facts`: the newest."""

    agent: str
    incarnation: str
    timeouts: Timeouts = field(default_factory=Timeouts)
    promised: Term = NO_TERM
    decision: Decision | None = None
    over: int = 0
    finished: int = 0
    lease_until_s: float | None = None
    lease_address: str = ""  # REFUSED
    is_ended: bool = False
    former: str = ""
    former_decision: Decision | None = None
    facts: AgentFacts = NO_FACTS
    _unheard: list[_Notification] = field(default_factory=list)  # RESEND: in the open session
    _told: AgentFacts | None = None  # facts, in the open session; None: the coordinator may have any of a former one
    _session: int = 0
    _address: str = ""  # of the open session; "" without one
    _term: Term | None = None  # of the coordinator of this session
    _in_office: bool = False
    _hello_s: float = 0.0
    _beat: int = 0
    _beats_s: dict[int, float] = field(default_factory=dict)  # sent, not answered
    _last_answer_s: float = 0.0
    _next_beat_s: float = 0.0
    _num_unanswered: int = 0  # sessions in a row: in each further one, the agent waits twice as long
    _is_report_due: bool = False
    _joining: int = 0  # the newest generation that a rank waits to join
    _held: Record | None = None  # FENCE: accepted, not yet delivered

    @property
    def is_connected(self) -> bool:
        return self._address != ""

    @property
    def is_welcome(self) -> bool:
        """The coordinator of this session can be told that the ranks are ready."""
        return self._term is not None

    @property
    def is_led(self) -> bool:
        """The coordinator of this session leads the job, as far as it has said."""
        return self.is_welcome and self._in_office

    def handle(self, event: SessionEvent, now_s: float) -> Instructions:
        if self.is_ended:
            return []
        if self.lease_until_s is not None and now_s >= self.lease_until_s:
            if self._is_bound():
                lease_s, over = self.timeouts.lease_s, "has no lease any more"
                return self._fence(f"no coordinator has answered for {lease_s:g} s", over)
            self.lease_until_s = None
        out: Instructions = []
        match event:
            case Connected(address):
                out += self._connected(address, now_s)
            case Disconnected():
                self._disconnected()
            case ConnectionRefused(address, began_s):
                out += self._refused(address, began_s, now_s)
            case AddressLost(reason):
                out += self._fence(reason, f"has lost its address: {reason}")
            case Answer(message):
                out += self._receive(message, now_s) if self._address else []
            case ReportRequested():
                self._is_report_due = True
                out += self._collect()
            case ReportCollected(report):
                self._is_report_due = self._held is not None  # FENCE
                out += [] if self._is_report_due else self._send(Ready(report))
            case Notify(message):
                out += self._notify(message)
            case Ticked():
                out += self._tick(now_s)
        return out

    # -- the session

    def _connected(self, address: str, now_s: float) -> Instructions:
        self._session += 1
        self._address, self._term, self._in_office = address, None, False
        self._told = NO_FACTS if self._session == 1 else None
        self._unheard.clear()
        self._beats_s.clear()
        self._hello_s = self._last_answer_s = now_s
        self._next_beat_s = now_s + self.timeouts.heartbeat_s
        ref, former_ref = (None if each is None else each.ref for each in (self.decision, self.former_decision))
        own = (self.agent, self.incarnation, self._session, self.promised, ref, self.over, self.finished)
        return self._send(Hello(*own, self.former, former_ref))

    def under(self, agent: str) -> AgentSession:
        """PROMISE: that of the same process under another id."""
        former = self.former if self.former and self.decision is None else self.agent  # the one that may be in a record
        decision = self.decision or self.former_decision
        return AgentSession(
            agent, self.incarnation, self.timeouts, self.promised, former=former, former_decision=decision
        )

    def _disconnected(self) -> None:
        self._num_unanswered += not self.is_welcome
        self._address, self._term, self._in_office = "", None, False
        self._beats_s.clear()

    def _send(
        self,
        message: Hello
        | Promise
        | KnownDecision
        | Ready
        | Accepted
        | Heartbeat
        | EndGeneration
        | JoinRequest
        | Finished
        | Goodbye
        | JobFailed
        | AgentFacts,
    ) -> Instructions:
        return [SendToCoordinator(message)] if self._address else []

    def _notify(self, message: _Notification | AgentFacts) -> Instructions:
        if isinstance(message, AgentFacts):
            self.facts = message
            return self._tell_facts()
        if isinstance(message, EndGeneration):
            self.over = max(self.over, message.generation)
        if isinstance(message, Finished):
            self.finished = max(self.finished, message.generation)
        out = self._send(message)
        if out and not self.is_welcome:
            self._unheard.append(message)
        self.is_ended = self.is_ended or isinstance(message, Goodbye)
        return out

    def _tell_facts(self) -> Instructions:
        """FACTS-ALONE, RESEND."""
        is_alone = self.decision is not None and self.decision.record.agents == (self.agent,)
        facts = self.facts.alone() if is_alone else self.facts
        if not self.is_welcome or facts == self._told:
            return []
        self._told = facts
        return self._send(facts)

    def _collect(self) -> Instructions:
        if not self._is_report_due or not self.is_welcome or self._held is not None:
            return []
        self._is_report_due = False
        return [CollectReport()]

    # -- time

    def _tick(self, now_s: float) -> Instructions:
        if not self._address:
            return []
        num_doublings = min(self._num_unanswered, _MAX_DOUBLINGS) if self._is_bound() else _MAX_DOUBLINGS
        limit_s = self.timeouts.answer_s * 2**num_doublings
        if now_s - self._last_answer_s > limit_s and (self._beats_s or not self.is_welcome):
            self._num_unanswered += self.is_welcome
            self._disconnected()
            return [HangUp(f"the coordinator has not answered for {limit_s:g} s")]
        return self._heartbeat(now_s) if now_s >= self._next_beat_s else []

    def _heartbeat(self, now_s: float) -> Instructions:
        self._beat += 1
        if not self._beats_s:  # `answer_s` counts from the oldest message without an answer
            self._last_answer_s = now_s
        self._beats_s[self._beat] = now_s
        self._next_beat_s = now_s + self.timeouts.heartbeat_s
        return self._send(Heartbeat(self._beat))

    def _is_bound(self) -> bool:
        """UNBOUND"""
        return self.decision is not None

    def _fence(self, reason: str, over: str) -> Instructions:
        """FENCE, READDRESS. `over`: how this agent ends the generation, for the others."""
        out = self._end(reason)
        if self.decision is not None:
            cause = EndCause(over, (self.agent,))
            out += self._notify(EndGeneration(self.decision.record.generation, cause))
        return out

    def _renew(self, sent_s: float, now_s: float) -> Instructions:
        until_s = sent_s + self.timeouts.lease_s  # LEASE-1
        if until_s <= now_s:
            return []
        self.lease_address = self._address
        if self.lease_until_s is not None and until_s <= self.lease_until_s:
            return []
        self.lease_until_s = until_s
        return [*self._set_lease(), *self._deliver_held()]

    def _refused(self, address: str, began_s: float, now_s: float) -> Instructions:
        """REFUSED."""
        if address != self.lease_address or self.lease_until_s is None:
            return []
        until_s = began_s + self.timeouts.lease_s
        if until_s <= self.lease_until_s:
            return []
        self.lease_until_s = until_s
        return self._set_lease()

    def _set_lease(self) -> Instructions:
        return [SetLease(self.lease_until_s)] if self.lease_until_s is not None and self._is_bound() else []

    # -- what the coordinator says

    def _receive(self, message: CoordinatorMessage, now_s: float) -> Instructions:
        match message:
            case Welcome():
                return self._welcome(message, now_s)
            case HeartbeatAnswer(number, in_office):
                return self._answered(number, in_office, now_s)
            case Push():
                return self._push(message, now_s)
            case RequestDecision(digest):
                known = (each for each in (self.decision, self.former_decision) if each is not None)
                asked_for = next((each for each in known if each.record.digest == digest), None)
                return [] if asked_for is None else self._send(KnownDecision(asked_for))
            case EndGeneration():
                return self._ended(message)
            case JoinNotice(generation):
                self._joining = max(self._joining, generation)
                return [Inform(agent_events.PeerNotice(generation, over=False))]
            case Finished():
                return [Inform(agent_events.Finished())]
            case Notice("undecided", reason):
                return [Inform(message), Inform(agent_events.RecordAnswered(Undecided(reason)))]
            case JobFailed(_, _, text):
                return [Inform(agent_events.PeerFailedJob(text))]
            case Notice() | JobFacts():
                return [Inform(message)]
            case Evicted(reason):
                return self._end(f"evicted: {reason}")
            case Refused(reason):
                return [Inform(agent_events.RecordAnswered(Undecided("refused", ((self.agent, reason),))))]
            case JobUnrecoverable(reason):
                return [Inform(agent_events.RecordAnswered(Unrecoverable(reason)))]

    def _welcome(self, welcome: Welcome, now_s: float) -> Instructions:
        """PROMISE."""
        is_first = self._term is None
        if welcome.term < self.promised:
            return []  # `Hello` has told the coordinator a higher term: it will take one beyond that
        if welcome.term != self.promised and self.lease_address != self._address:
            self.lease_address = ""  # REFUSED
        self.promised = self._term = welcome.term
        was_in_office, self._in_office = self._in_office, welcome.in_office
        out = self._send(Promise(welcome.term))
        for message in self._unheard:
            out += self._send(message)
        self._unheard.clear()
        out += self._tell_facts()
        if is_first and welcome.in_office:
            self._last_answer_s = now_s
            out += self._renew(self._hello_s, now_s)
        elif welcome.in_office and not was_in_office:
            out += self._heartbeat(now_s)  # only an answer renews the lease
        out += self._notices(welcome.over, welcome.joining)
        if welcome.finished:
            out.append(Inform(agent_events.Finished()))
        self._is_report_due = self._is_report_due or is_first
        return out + self._collect()

    def _answered(self, number: int, in_office: bool, now_s: float) -> Instructions:
        sent_s = self._beats_s.get(number)
        if sent_s is None:
            return []
        self._beats_s = beats_s = {beat: at_s for beat, at_s in self._beats_s.items() if beat > number}
        self._last_answer_s = min(beats_s.values()) if beats_s else now_s
        self._num_unanswered = 0
        self._in_office = in_office
        return self._renew(sent_s, now_s) if in_office and self.is_welcome else []

    def _push(self, push: Push, now_s: float) -> Instructions:
        decision, known = push.decision, self.decision
        if self._term is None or self._term != self.promised or decision.term > self._term:
            return []  # PROMISE
        record = decision.record
        if known is not None and decision.ref.order <= known.ref.order:
            return self._notices(push.over, push.joining)
        if known is not None and not record.builds_on(known.record.ref):
            return self._end(f"generation {record.generation} does not build on its generation {known.ref.generation}")
        self.decision = decision
        self._held = record
        if known is None:
            self._last_answer_s = now_s  # UNBOUND: it was patient until now
        out = self._tell_facts()  # before the record is delivered, which may change them
        if self.lease_until_s is not None:
            out += [] if known is not None else self._set_lease()
            out += self._deliver_held()
        out += self._notices(push.over, push.joining)
        out += self._send(Accepted(record.generation, record.digest))  # after what ranks wait for
        if self._held is not None:
            out += self._heartbeat(now_s)  # one before `Accepted` renews no lease (UNACCEPTED)
        return out

    def _deliver_held(self) -> Instructions:
        record, self._held = self._held, None
        if record is None:
            return []
        out: Instructions = [Inform(agent_events.RecordAnswered(record))]
        if self.over >= record.generation:
            out.append(Inform(agent_events.PeerNotice(record.generation, over=True, cause=EndCause("it is over"))))
        if self._joining == record.generation:
            out.append(Inform(agent_events.PeerNotice(record.generation, over=False)))
        return out

    def _notices(self, over: int, joining: int) -> Instructions:
        if self.decision is None:
            return []
        generation = self.decision.record.generation
        out: Instructions = []
        if over >= generation:
            out += self._ended(EndGeneration(over, EndCause("it was over when the agent came back")))
        if joining == generation:
            self._joining = joining
            out.append(Inform(agent_events.PeerNotice(generation, over=False)))
        return out

    def _ended(self, end: EndGeneration) -> Instructions:
        self.over = max(self.over, end.generation)
        return [Inform(agent_events.PeerNotice(end.generation, True, end.cause))]

    def _end(self, reason: str) -> Instructions:
        self.is_ended = True
        return [KillRanks(reason)]
