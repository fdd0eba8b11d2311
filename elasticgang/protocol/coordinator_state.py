"""What the coordinator of one job does: events and the time in, instructions out.

Pure: no clock, no socket, nothing random. `next_record` decides what is in a record; here is decided when there is
one, and who is sent it.

PERSIST  With a state directory, a record is pushed only after it was written there. One that follows a record which the
         directory has not decided is accepted by an agent first, as without a directory, and written then: until that,
         the agents of the record before decide what follows it.
PRESENT  Every agent of the record is ready, or declared lost, before the next record is decided.
REPORT   A report counts while the session by which it came is up, and its agent has promised the present term. One
         that crosses a record which the agent is sent does not: the ranks may run in that record by now.
LOST     An agent is declared lost once it was silent for `lost_after_s` while the coordinator was in office, not
         counting what the coordinator itself stood still; or its process is known to be gone. Out of office nobody is
         lost, and where a record is known, a silent session is closed after half a lease: the operator's word, which
         may be given while leases last, covers no agent that has a session. An exit ends the generation, unless the job
         has finished in it: all its ranks had connections then, which break by themselves. A lost agent whose ranks
         were spares, and kept nothing for others, costs no step: the generation ends at a boundary, as for one that
         joins. The others may be saving their state before they leave.
UNACCEPTED  An agent that was sent the newest record is not heard until it has accepted it, whatever it sends, and gets
         no answer that renews a lease. So it is lost in the end (LOST), also if it opens one session after the other,
         for example because its network loses large packets. It stays lost until it accepts the record.
ALONE    A record that was decided without a state directory is followed by one without any of its agents only if all of
         these have left (LEFT), if need be by the operator's word: others may be, or may have been, led by another
         coordinator.
REJOIN   An agent that was declared lost may come back, as a joiner that may bring state, if the newest record it knows
         is an ancestor of the present one; else it is evicted, before it learns that the coordinator is in office. One
         of the record that comes back may hold what was given up for lost: the coordinator decides again.
OVER     Once a rank has done all steps, no record follows without a member that has a seat in the newest one: what
         spares hold is older than the last step, and they would take steps again that are committed.
ABANDON  A job is abandoned once no agent has a session, and every agent of its record is lost, or the coordinator is
         not in office. It may be forgotten: what is known of it is in the state directory, or with agents.
NOTICE   While a proposal is undecided, each session is told why once, after the reason has held for `notice_s`: what an
         earlier session of the agent was told may not have arrived. While ready agents wait for others of a generation
         that is over, likewise for whom; and while a decision is being written, or the coordinator is out of office.
REACHED  While some agents are left out of the newest record, because they and others do not reach each other (NEXT-10),
         the coordinator ends it at a step boundary, as for a joiner, once one of them and all that take part do. It
         does not before all of these have told it in their sessions whom they reach, such as after its restart.
FORMER   Of an agent that is in neither of the two newest records, and has no session, only its facts are kept
         (FACTS-ABSENT). Whether it has left, promised or was silent, and which process it was, is forgotten: an agent
         that comes back has another id as a rule, and a job of weeks has thousands. Should it come with its id all the
         same, it promises again, and brings what it has accepted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from elasticgang.protocol.absences import Absences
from elasticgang.protocol.coordinator_messages import (
    Accepted,
    AgentExited,
    AgentMessage,
    CloseSession,
    CoordinatorEvent,
    CoordinatorInstruction,
    Decision,
    EndGeneration,
    Evicted,
    Finished,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    JobFailed,
    JobUnrecoverable,
    JoinNotice,
    JoinRequest,
    KnownDecision,
    Notice,
    OfficeGranted,
    Persist,
    Persisted,
    Promise,
    Push,
    Ready,
    Received,
    Refused,
    RequestDecision,
    Send,
    SessionClosed,
    Term,
    Ticked,
    Timeouts,
    Welcome,
)
from elasticgang.protocol.coordinator_sessions import Session, Sessions
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.job_facts import NO_FACTS, AgentFacts, GatheredFacts, JobFacts
from elasticgang.protocol.newest_decision import NewestDecision
from elasticgang.protocol.next_record import mismatch, next_record
from elasticgang.protocol.office import Office
from elasticgang.protocol.overdue import Overdue
from elasticgang.protocol.record import NO_RECORD, SPARE, Record, RecordRef, Report, Seat, Undecided, Unrecoverable
from elasticgang.protocol.shortened import shortened

Instructions: TypeAlias = "list[CoordinatorInstruction]"

_MAX_NAMED = 4  # in a notice


class CoordinatorState:
    """`handle` is the only way in. `own`: as of `Persist`. `granted`: as a founder. `everywhere`: as of `Welcome`.
    `reason`: why there is no next record yet. `proposal`: what the last decision of this coordinator was made from."""

    def __init__(
        self,
        name: str,
        number: int = 1,
        has_directory: bool = False,
        decision: Decision | None = None,
        own: bool = False,
        address: str = "",
        addresses: frozenset[str] = frozenset(),
        granted: bool = False,
        timeouts: Timeouts | None = None,
        everywhere: bool = False,
        finished: bool = False,
    ) -> None:
        self.timeouts, self.everywhere, self.finished = timeouts or Timeouts(), everywhere, finished
        self.newest = NewestDecision(has_directory, decision, own)
        self.office = Office(self.newest, name, number, address, addresses, granted)
        self.sessions = Sessions()
        self.absences = Absences(self.timeouts.standstill_s)
        self.unrecoverable = ""
        self.reason = "no agent is ready"
        self.proposal: list[Report] = []
        self.awaits_word = False  # ALONE, MOVED
        self._reports: dict[str, Report] = {}
        self._deciding: Decision | None = None  # written to the directory, not yet pushed
        self._deferred: deque[CoordinatorEvent] = deque()
        self._finished_in = 0  # the newest generation in which an agent says that it has finished
        self._first_report_s: float | None = None
        self._num_founders = 1  # the most agents for which a report wants the first record to wait
        self._is_founding_due = False  # the next tick looks whether there are enough
        self._facts = GatheredFacts()
        self._job_failed: JobFailed | None = None  # the newest
        self._now_s = 0.0
        self._overdue = Overdue(self.timeouts.notice_s)  # NOTICE

    @property
    def record(self) -> Record | None:
        return self.newest.record

    @property
    def in_office(self) -> bool:
        return self.office.is_held

    @property
    def is_deciding(self) -> bool:
        return self._deciding is not None

    @property
    def agent_facts(self) -> Mapping[str, AgentFacts]:
        """By agent; without those that have none."""
        return self._facts.by_agent

    @property
    def stopping_agents(self) -> list[str]:
        """Those with a session that a signal has asked to end (SERVE-LEAVE)."""
        return [agent for agent in self.sessions.agents if self.agent_facts.get(agent, NO_FACTS).is_stopping]

    @property
    def job_facts(self) -> JobFacts:
        """What the sessions were sent last."""
        return self._facts.sent

    def absent_agents(self) -> dict[str, str]:
        """Agents of the record that have no session and are not lost, with their addresses."""
        record = self.record
        if record is None:
            return {}
        addresses = zip(record.agents, record.addresses, strict=False)
        return {a: address for a, address in addresses if a not in self.sessions.agents and a not in self.absences.lost}

    @property
    def is_abandoned(self) -> bool:
        """ABANDON"""
        if not self.sessions.are_none or self._deciding is not None:
            return False
        return not self.in_office or self.record is None or self.absences.lost.issuperset(self.record.agents)

    @property
    def word_awaited(self) -> str:
        """Why the job goes on only on the operator's word, or with agents that are absent; empty when it does not."""
        if self.in_office:
            return self.reason if self.awaits_word else ""
        return self.office.why_not(self.sessions.agents)

    # -- events

    def handle(self, event: CoordinatorEvent, now_s: float) -> Instructions:
        self._now_s = max(self._now_s, now_s)
        self.absences.advance(self._now_s)
        if isinstance(event, Persisted):
            return self._persisted(event.digest)
        if self._deciding is not None and not self._is_harmless(event):
            if isinstance(event, Received):
                self._hear(event.session)  # later, it may owe the record that is being written
            self._deferred.append(event)
            return []
        return self._handle(event)

    @staticmethod
    def _is_harmless(event: CoordinatorEvent) -> bool:
        return isinstance(event, Ticked) or (isinstance(event, Received) and isinstance(event.message, Heartbeat))

    def _handle(self, event: CoordinatorEvent) -> Instructions:
        match event:
            case Received(session, message):
                return self._receive(session, message)
            case SessionClosed(session):
                self._forget_session(session)
                return self._decide()
            case Ticked():
                return self._tick()
            case AgentExited(agent):
                return self._exit(agent, f"agent {agent} has exited")
            case OfficeGranted():
                return self._grant()
            case Persisted():
                raise AssertionError("`handle` takes it")

    def _receive(self, number: int, message: AgentMessage) -> Instructions:
        if isinstance(message, Hello):
            return self._hello(number, message)
        session = self.sessions.begun.get(number)
        if session is None:
            if isinstance(message, KnownDecision) and self.sessions.awaits_decision(number):
                return self._known(number, message.decision)
            return []  # of a session that was closed
        is_heard = self._hear(number)
        match message:
            case Heartbeat(beat):
                return [Send(number, HeartbeatAnswer(beat, is_heard and self.in_office))]
            case Promise():
                return self._promise(number, message)
            case KnownDecision():
                return [CloseSession(number, "it sends a decision that it was not asked for")]
            case Ready(report):
                return self._ready(number, report)
            case EndGeneration():
                return self._end(message, number) if self.newest.has_agent(session.agent) else []
            case JoinRequest(generation):
                return self._join(generation)
            case Accepted(generation, digest):
                return self._accepted(number, RecordRef(generation, digest))
            case Finished(generation):
                return self._finish(number, generation)
            case Goodbye(reason):
                self.office.left.add(session.agent)
                return self._exit(session.agent, f"agent {session.agent} ends: {reason}", has_left=True)
            case JobFailed():
                return self._fail_job(message, number) if self.newest.has_agent(session.agent) else []
            case AgentFacts():
                is_news = not session.has_told or message.unreached != self._unreached_by(session.agent)
                session.has_told = True
                self._facts.replace(session.agent, message)
                return self._tell_facts() + (self._let_back() if is_news else [])

    def _hear(self, number: int) -> bool:
        """UNACCEPTED: False if it owes an acceptance."""
        session = self.sessions.begun.get(number)
        if session is None:
            return False
        if self._owes(session):
            self.newest.owing.add(session.agent)
            return False
        self.absences.hear(session.agent)
        return True

    # -- time

    def _tick(self) -> Instructions:
        record = self.record
        if self._deciding is not None:
            return self._tell_late_write()
        in_office = self.in_office
        limit_s = self.timeouts.lost_after_s if in_office or record is None else self.timeouts.lease_s / 2
        absent = self.absences.beyond(self.timeouts.lost_after_s, self._absent_with_facts())  # FACTS-ABSENT
        out = self._drop_facts(absent) + self._tell_facts(on_tick=True)
        members = () if record is None else record.agents
        dispensable = self._dispensable(in_office)
        for agent in self.absences.beyond(limit_s, dispensable) if dispensable else ():
            out += self._close(agent, f"agent {agent} was silent for {limit_s:g} s")
        out += self._tell_out_of_office()
        if not in_office:
            return out
        self.absences.expect(members)
        silent = [agent for agent in self.absences.beyond(limit_s, members) if agent not in self.absences.lost]
        gone = [a for a in silent if not self.office.may_be_led_elsewhere(a)]
        out += self._declare_lost(gone) if gone else []
        if len(gone) < len(silent):
            out += self._decide()  # for its reason
        out += self._tell_undecided() + self._tell_waiting()
        if self.record is None and (self._is_founding_due or self._is_founding_over()):
            out += self._decide(on_tick=True)
        return out

    def _dispensable(self, in_office: bool) -> list[str]:
        """LOST: agents whose silence ends their session, and nothing else."""
        return [s.agent for s in self.sessions.begun.values() if not in_office or not self.newest.has_agent(s.agent)]

    def _tell_undecided(self) -> Instructions:
        """NOTICE."""
        return self.sessions.tell("undecided", self._overdue.reason("undecided", self._now_s))

    def _tell_waiting(self) -> Instructions:
        """NOTICE."""
        record = self.record
        if record is None:
            return []
        waits = self.newest.over >= record.generation and bool(self._reports)
        waits = waits and not self.finished and not self.unrecoverable
        waits = waits and self._waits(record) is not None
        self._overdue.note("ready agents", "others" if waits else "", self._now_s)
        if not self._overdue.reason("ready agents", self._now_s):
            return []
        return self.sessions.tell("waiting", f"waiting for agent {self._awaited(record)}")

    def _tell_late_write(self) -> Instructions:
        """NOTICE."""
        return self.sessions.tell("waiting", self._overdue.reason("write", self._now_s))

    def _tell_out_of_office(self) -> Instructions:
        """NOTICE."""
        self._overdue.note(
            "office", "" if self.in_office or not self.sessions.begun else self.word_awaited, self._now_s
        )
        return self.sessions.tell(
            "waiting", f"{self.overdue_office} (`elasticgang grant`)" if self.overdue_office else ""
        )

    @property
    def overdue_office(self) -> str:
        """Why this coordinator has not been in office for `notice_s`."""
        return self._overdue.reason("office", self._now_s)

    def _awaited(self, record: Record) -> str:
        """PRESENT: the first few of them, with their hosts."""
        reports = self.reports()
        hosts = dict(zip(record.agents, (a.rpartition(":")[0] for a in record.addresses), strict=False))
        missing = [agent for agent in record.agents if agent not in reports and agent not in self.absences.lost]
        return shortened(
            [f"{agent} (at {hosts[agent]})" if hosts.get(agent) else agent for agent in missing], _MAX_NAMED
        )

    def _is_founding_over(self) -> bool:
        first_s = self._first_report_s
        return first_s is not None and self._now_s - first_s >= self.timeouts.founding_s

    def _exit(self, agent: str, reason: str, *, has_left: bool = False) -> Instructions:
        self.absences.exited.add(agent)
        out = self._close(agent, reason) + self._drop_facts([agent])
        return out + self._declare_lost([agent], has_left=has_left)

    def _declare_lost(self, agents: Iterable[str], *, has_left: bool = False) -> Instructions:
        """LOST. No record says so before the next one: an agent that is back by then is not lost. `has_left`: they have
        said so themselves; only the notices differ."""
        record = self.record
        agents = [agent for agent in agents if record is not None and record.has_agent(agent)]
        if record is None or not agents:
            return []
        out: Instructions = []
        is_harmless = record.generation == self._finished_in and self.absences.exited.issuperset(agents)
        for agent in agents:
            out += self._close(agent, self._why_lost(agent, record))
        out += self._drop_facts(agents)
        new = tuple([agent for agent in agents if agent not in self.absences.lost])
        if new and not is_harmless:
            out += self.sessions.broadcast(Notice("left" if has_left else "lost", "", new))
        self.absences.lost.update(agents)
        if self.office.parents_have_left:
            return out + self._go_on_without_parents() + self._decide()
        seats = [seat for agent in agents for seat in record.seats_of(agent)]
        if seats and not is_harmless:
            if self._are_needed(seats, record):
                how = "has left" if has_left else "is lost"
                out += self._end(EndGeneration(record.generation, EndCause(how, tuple(agents))))
            else:
                out += self._join(record.generation)
        return out + self._decide()

    @staticmethod
    def _are_needed(seats: Iterable[Seat], record: Record) -> bool:
        """LOST: whether the generation cannot go on without the members of `seats`."""
        return any(seat.status != SPARE or record.holder(seat.member) is not None for seat in seats)

    def _why_lost(self, agent: str, record: Record) -> str:
        if agent not in self.newest.owing:
            return f"agent {agent} is declared lost"
        return (
            f"agent {agent} is declared lost: it has not accepted generation {record.generation}; does the path to it "
            "lose large packets?"
        )

    # -- sessions

    def _hello(self, number: int, hello: Hello) -> Instructions:
        out: Instructions = []
        if self.sessions.has_hello(number):
            return [CloseSession(number, "it says hello twice")]
        if self.sessions.is_duplicate(hello):
            return [
                Send(number, Refused(f"another process takes part as agent {hello.agent}")),
                CloseSession(number, f"a second process calls itself agent {hello.agent}"),
            ]
        others = self.sessions.opened_by(hello.agent)
        if any(newest > hello.session for newest in others.values()):  # NEWEST
            return [CloseSession(number, f"agent {hello.agent} has a newer session")]
        for other in others:
            self._forget_session(other)
            out.append(CloseSession(other, f"agent {hello.agent} has opened a newer session"))
        self._recall(hello.agent)
        if self.newest.parents:  # BACK: what is news depends on it
            out += self._learn_term(hello.term)
        for ref in (hello.decision, hello.former_decision):
            if ref is not None and self.newest.is_news(ref):
                self.sessions.await_decision(number, hello)
                return [*out, Send(number, RequestDecision(ref.digest))]
        session = self.sessions.begin(number, hello)
        known = session.seen
        self.absences.exited.discard(hello.agent)
        if hello.agent not in self.newest.owing or not self._owes(session):
            self._hear_back(hello.agent)
        if self._owes(session):
            self.newest.owing.add(hello.agent)
        if hello.finished:
            out += self._finish(number, hello.finished)
        out += self._learn_term(hello.term)
        if self.sessions.speaks_for_former(hello):
            if hello.former_decision is not None:
                ref = hello.former_decision
                out += self._note_accepted(hello.former, RecordRef(ref.generation, ref.digest))
            session.former = hello.former
            self.office.left.add(hello.former)
            out += self._exit(hello.former, f"agent {hello.former} is now {hello.agent}")
        if hello.over and self.newest.has_agent(hello.agent):
            out += self._end(EndGeneration(hello.over, EndCause("it was over when an agent came back")), number)
        if self.in_office and self._is_evicted(number):
            return [*out, self._evict(number)]
        out.append(Send(number, self._welcome(session)))
        if self._facts.sent != JobFacts():
            out.append(Send(number, self._facts.sent))
        if known is not None and self._job_failed is not None and known.generation == self._job_failed.generation:
            out.append(Send(number, self._job_failed))
        if known is not None:
            out += self._accepted(number, known)
        if self.in_office:
            out += self._greet(number)
        if self.unrecoverable:
            out.append(Send(number, JobUnrecoverable(self.unrecoverable)))
        return out

    def _recall(self, agent: str) -> None:
        """WORD: office only once the agent has promised."""
        self.office.recall(agent)
        if self.office.was_held and not self.in_office:
            self._leave_office()

    def _hear_back(self, agent: str) -> None:
        self.newest.owing.discard(agent)
        self.absences.hear(agent)
        self.absences.lost.discard(agent)
        self._reconsider(agent)

    def _reconsider(self, agent: str) -> None:
        """REJOIN."""
        if self.newest.has_agent(agent):
            self.unrecoverable = ""

    def _welcome(self, session: Session) -> Welcome:
        in_office = self.in_office
        session.is_denied = in_office and self._owes(session)
        leads = in_office and not session.is_denied
        return Welcome(self.office.term, leads, self.newest.over, self.newest.joining, self.finished, self.everywhere)

    def _welcome_again(self) -> Instructions:
        """UNACCEPTED: agents that owe nothing any more."""
        denied = [
            number for number, session in self.sessions.begun.items() if session.is_denied and not self._owes(session)
        ]
        return [Send(number, self._welcome(self.sessions.begun[number])) for number in denied]

    def _promise(self, number: int, promise: Promise) -> Instructions:
        session = self.sessions.begun[number]
        out = self._learn_term(promise.term)
        if promise.term != self.office.term:
            return out
        session.promised = True
        self.office.promise(session.agent, *([session.former] if session.former else []))
        if self.in_office and not self.office.was_held:
            out += self._enter_office()
        return out + self._announce([session.agent]) + self._decide()

    def _known(self, number: int, decision: Decision) -> Instructions:
        waiting = self.sessions.take_waiting(number)
        if waiting is None or decision.ref not in (waiting.decision, waiting.former_decision):
            return [CloseSession(number, "it sends a decision that it was not asked for")]
        out = self._learn(decision)
        return out + self._receive(number, waiting)

    def _forget_session(self, number: int) -> None:
        session = self.sessions.end(number)
        if session is not None:
            self._withdraw_report(session.agent)
            if not self.newest.has_agent(session.agent):
                self._facts.keep_successors(session.agent)  # FACTS-ABSENT
                if session.agent not in self._facts.by_agent:
                    self.absences.forget(session.agent)

    def _withdraw_report(self, agent: str) -> None:
        """REPORT."""
        self._reports.pop(agent, None)

    def _close(self, agent: str, reason: str) -> Instructions:
        number = self.sessions.number_of(agent)
        if number is None:
            return []
        self._forget_session(number)
        told = [] if self.newest.has_agent(agent) else self._drop_facts([agent])
        return [*told, CloseSession(number, reason)]

    # -- office

    def _learn(self, decision: Decision) -> Instructions:
        """Another coordinator has decided."""
        if not self.newest.is_news(decision.ref):
            return []
        self.newest.learn(decision)
        self.office.take_back_word()
        self.absences.forget_lost()
        self._leave_office()
        return self._persist() + self._drop_facts(self._absent_with_facts())

    def _learn_term(self, term: Term) -> Instructions:
        """Another coordinator has, or had, a term that is not lower: take a higher one."""
        if term == self.office.term or term.number < self.office.number:
            return []
        if self.office.raise_term(term):
            self._leave_office()
        out = self._persist()
        for session in self.sessions.begun.values():
            session.promised = False
        return out + [Send(number, self._welcome(session)) for number, session in self.sessions.begun.items()]

    def _grant(self) -> Instructions:
        """OFFICE (c), WORD."""
        self.office.grant(self.sessions.agents)
        out = self._enter_office() if self.in_office else []
        return out + (self._go_on_without_parents() if self.office.parents_have_left else []) + self._decide()

    def _leave_office(self) -> None:
        self.office.leave()
        self.unrecoverable = ""
        if self.newest.parents and self.newest.before is not None:
            self.newest.go_back()
            self.absences.forget_lost()

    def _go_back_in_office(self) -> Instructions:
        """BACK. Agents of the record before may never have been sent it."""
        self.newest.go_back()
        out = self._persist()
        for number in self.sessions.begun:  # what they know is an ancestor of the dropped record, and of the one before
            out += self._greet(number)  # with `joining`
        return out + self._welcome_again()

    def _enter_office(self) -> Instructions:
        self.office.was_held = True
        for agent in () if self.record is None else self.record.agents:
            self.absences.hear(agent)
        out: Instructions = []
        for number in list(self.sessions.begun):
            if self._is_evicted(number):
                out.append(self._evict(number))
            else:
                out.append(Send(number, self._welcome(self.sessions.begun[number])))
                out += self._greet(number)
        return out + self._announce(self._reports)

    def _is_evicted(self, number: int) -> bool:
        """REJOIN."""
        seen = self.sessions.begun[number].seen
        return self.record is not None and seen is not None and not self._is_ancestor(self.record, seen)

    def _evict(self, number: int) -> Send:
        seen = self.sessions.begun[number].seen
        assert seen is not None
        return Send(number, Evicted(f"its generation {seen.generation} is not one that the job builds on"))

    def _greet(self, number: int) -> Instructions:
        """In office: bring the agent to the present record."""
        decision, session = self.newest.decision, self.sessions.begun[number]
        if decision is None or not self.newest.is_owed_to(session.agent, session.seen):
            return []
        self._withdraw_report(session.agent)
        session.pushed = decision.record.generation
        return [Send(number, Push(decision, self.newest.over, self.newest.joining))]

    @staticmethod
    def _is_ancestor(record: Record, seen: RecordRef) -> bool:
        return record.builds_on(seen)

    def _owes(self, session: Session) -> bool:
        """UNACCEPTED"""
        return self.newest.is_owed_to(session.agent, session.seen) and self.in_office

    def _accepted(self, number: int, ref: RecordRef) -> Instructions:
        out: Instructions = []
        session = self.sessions.begun[number]
        owed = self._owes(session)
        session.seen = ref
        if owed and not self._owes(session):
            self._hear_back(session.agent)
            out += [Send(number, self._welcome(session))] if session.is_denied else []
        return out + self._note_accepted(session.agent, ref)

    def _note_accepted(self, agent: str, ref: RecordRef) -> Instructions:
        record, given_up = self.record, self.newest.given_up
        if given_up is not None and ref == given_up.record.ref:
            return self._learn(given_up)  # BACK
        if record is None or ref != record.ref:
            return []
        out = self._persist() if self.newest.accept() else []
        return out + (self._lift() if agent in self.newest.parents else [])

    def _lift(self) -> Instructions:
        """ACCEPT is met: the others are sent the record."""
        parents, self.newest.parents = self.newest.parents, frozenset()
        out: Instructions = []
        if not self.in_office:
            return out  # they are sent it once this coordinator is
        for number, session in self.sessions.begun.items():
            if session.agent not in parents:
                out += self._greet(number)
        return out

    # -- what agents say

    def _ready(self, number: int, report: Report) -> Instructions:
        session = self.sessions.begun[number]
        if (wrong := self._not_its_own(session.agent, report)) is not None:
            return self._close(session.agent, wrong)
        if self.record is not None and (why := mismatch(self.record, report)) is not None:
            return self._refuse(Undecided(why, ((session.agent, why),)))
        out: Instructions = []
        if self.newest.before is not None or self.newest.given_up is not None:
            # BACK: `Accepted` may come later than the report.
            out += self._note_accepted(session.agent, report.newest_record)
        if self.record is not None and report.newest_record == self.record.ref and self._owes(session):
            out += self._accepted(number, report.newest_record)
        self._reports[session.agent] = report
        self._num_founders = max(self._num_founders, report.min_agents)
        if self._first_report_s is None:
            self._first_report_s = self._now_s
        return out + self._announce([session.agent]) + self._decide()

    def _announce(self, agents: Iterable[str]) -> Instructions:
        """In office: members of these agents may wait to join the present generation."""
        record = self.record
        if record is None or not self.in_office or self.newest.joining >= record.generation:
            return []
        for agent in agents:
            report = self._reports.get(agent)
            if report is None or not self._counts(agent, report):
                continue
            if any(record.seat(member.id) is None for member in report.members):
                return self._join(record.generation)
        return []

    def _not_its_own(self, agent: str, report: Report) -> str | None:
        """SENDER."""
        if report.agent != agent:
            return f"agent {agent} reports as agent {report.agent}"
        record = self.record
        for member in report.members:
            seat = None if record is None else record.seat(member.id)
            if seat is not None and seat.agent != agent:
                return f"agent {agent} reports member {member.id} of agent {seat.agent}"
        return None

    def _end(self, end: EndGeneration, source: int | None = None) -> Instructions:
        return self.sessions.broadcast(end, source) if self.newest.end(end) else []

    def _join(self, generation: int) -> Instructions:
        return self.sessions.broadcast(JoinNotice(generation)) if self.newest.join(generation) else []

    def _let_back(self) -> Instructions:
        """REACHED"""
        record = self.record
        if record is None or not record.cut_off or not self.in_office:
            return []
        away = {each.agent for each in record.cut_off}
        back = {agent for agent in away if self._has_told(agent) and away.issuperset(self._unreached_by(agent))}
        for agent in record.agents:
            if not back:
                return []
            if agent not in away:
                if not self._has_told(agent):
                    return []
                back.difference_update(self._unreached_by(agent))
        return self._join(record.generation) if back else []

    def _has_told(self, agent: str) -> bool:
        session = self.sessions.of(agent)
        return session is not None and session.has_told

    def _unreached_by(self, agent: str) -> tuple[str, ...]:
        return self._facts.by_agent.get(agent, NO_FACTS).unreached

    def _finish(self, source: int, generation: int) -> Instructions:
        self._finished_in = max(self._finished_in, generation)
        if self.finished:
            return []
        self.finished = True
        return self._persist() + self.sessions.broadcast(Finished(generation))

    def _fail_job(self, failed: JobFailed, source: int) -> Instructions:
        newest = self._job_failed
        if newest is not None and (newest.generation, newest.step) == (failed.generation, failed.step):
            return []
        self._job_failed = failed
        return self.sessions.broadcast(failed, source)

    def _tell_facts(self, *, on_tick: bool = False) -> Instructions:
        """FACTS-JOB."""
        facts = self._facts.changed(on_tick=on_tick)
        return [] if facts is None else self.sessions.broadcast(facts)

    def _drop_facts(self, agents: list[str]) -> Instructions:
        self._facts.drop(agents)
        for agent in agents:
            if agent not in self.sessions.agents and not self.newest.has_agent(agent):
                self.absences.forget(agent)
        return self._tell_facts()

    def _absent_with_facts(self) -> list[str]:
        """Agents that are not in the record, and have no session."""
        present = self.sessions.agents
        return [agent for agent in self._facts.by_agent if agent not in present and not self.newest.has_agent(agent)]

    # -- the decision

    def reports(self) -> dict[str, Report]:
        """Those that count (REPORT)."""
        return {agent: report for agent, report in self._reports.items() if self._counts(agent, report)}

    def _counts(self, agent: str, report: Report) -> bool:
        session, record = self.sessions.of(agent), self.record
        if session is None or not session.promised:
            return False
        if record is not None and record.has_agent(agent):
            return report.newest_record == record.ref
        if report.newest_record.generation < session.pushed:
            return False
        return report.newest_record == NO_RECORD or (record is not None and record.builds_on(report.newest_record))

    def _decide(self, on_tick: bool = False) -> Instructions:
        if not self.in_office or self._deciding is not None or self.unrecoverable:
            return []
        if self.record is None and self.finished:  # ABANDON: it was forgotten, and is not founded anew
            return []
        self.office.was_held = True
        record = self.record
        if record is None and not self._may_found(on_tick):
            return []
        if record is not None and (waits := self._waits(record)) is not None:
            needs_word = self._away(record) or self._unaccepted()
            self.awaits_word = bool(needs_word)
            self._note_reason(needs_word or waits, is_proposal=False)
            return []
        reports = self.reports()
        if record is None and not self._is_founding_over() and len(reports) < len(self.sessions.begun):
            return []
        if (
            record is not None
            and self.finished
            and not any(self._has_seated(record, each) for each in reports.values())
        ):
            return []  # OVER
        return self._next(record, reports) if reports else []

    @staticmethod
    def _has_seated(record: Record, report: Report) -> bool:
        """Whether a member has a seat in `record`, and is no spare there."""
        seats = [record.seat(member.id) for member in report.members]
        return any(seat is not None and seat.status != SPARE for seat in seats)

    def _may_found(self, on_tick: bool) -> bool:
        """Whether to look at the reports before the first record. Too few for it are looked at on a tick, not whenever
        an agent comes: a thousand that come at once would wait for a thousand looks at all of them."""
        self._is_founding_due = not on_tick and len(self._reports) < self._num_founders
        return not self._is_founding_due

    def _waits(self, record: Record) -> str | None:
        """PRESENT: for which agents; None for none."""
        if len(self._reports) + len(self.absences.lost) < len(record.agents):  # without a look at each
            return f"{len(self._reports)} of {len(record.agents)} agents are ready"
        reports = self.reports()
        missing = [agent for agent in record.agents if agent not in reports and agent not in self.absences.lost]
        return f"waiting for agent {', '.join(missing)}" if missing else None

    def _go_on_without_parents(self) -> Instructions:
        """BACK: others of the record before may be led by another coordinator."""
        return self._lift() if self.newest.before is None else self._go_back_in_office()

    def _unaccepted(self) -> str:
        """ACCEPT: why the operator's word is needed; empty when it is not."""
        if not self.newest.parents or not self.newest.parents <= self.absences.lost:
            return ""
        return f"{self._gone(sorted(self.newest.parents))}; it has not accepted the record: this takes an operator"

    def _away(self, record: Record) -> str:
        """MOVED: why the operator's word is needed; empty when it is not."""
        if not self.office.has_moved:  # without a look at each agent, for each report
            return ""
        limit_s = self.timeouts.lost_after_s
        away = [a for a in self.absences.beyond(limit_s, record.agents) if self.office.may_be_led_elsewhere(a)]
        if not away:
            return ""
        others = ", ".join(sorted(self.office.addresses - {self.office.address}))
        return (
            f"agent {', '.join(away)} has not come to this coordinator at {self.office.address}, and may still train "
            f"if it dials the one before, at {others}: this takes an operator"
        )

    def _next(self, record: Record | None, reports: dict[str, Report]) -> Instructions:
        proposal = list(reports.values())
        answer = next_record(record, proposal, self.absences.lost, self._facts.unreached)
        if isinstance(answer, Undecided):
            self._note_reason(answer.reason, is_proposal=True)
            return self._refuse(answer)
        if isinstance(answer, Unrecoverable) and self.newest.before is None:
            self.unrecoverable = answer.reason
            return self.sessions.broadcast(JobUnrecoverable(answer.reason))
        self.awaits_word = False
        if record is not None and self._is_alone(record, reports):
            self.awaits_word = True
            self._note_reason(f"{self._gone(record.agents)}: this takes an operator", is_proposal=True)
            return []
        if isinstance(answer, Unrecoverable):  # BACK
            return self._go_back_in_office() + self._decide()
        self.proposal = proposal
        if record is not None and self.newest.may_be_undone(reports):
            answer = replace(answer, rolled_back=True)
        return self._propose(Decision(self.office.term, answer, self.newest.has_directory))

    def _note_reason(self, reason: str, *, is_proposal: bool) -> None:
        """`is_proposal`: the reports are there, so that it is to be told (NOTICE)."""
        self.reason = reason
        self._overdue.note("undecided", reason if is_proposal else "", self._now_s)

    def _is_alone(self, record: Record, reports: dict[str, Report]) -> bool:
        """ALONE."""
        if self.newest.own or any(agent in reports for agent in record.agents):
            return False
        return bool(self.office.remaining(record.agents))

    def _gone(self, agents: Iterable[str]) -> str:
        """Which of `agents` may have, or may have had, another coordinator."""
        gone = self.office.remaining(agents)
        silent = [agent for agent in gone if agent not in self.absences.exited]
        if silent:
            return f"agent {', '.join(silent)} of the record is silent, and may have another coordinator"
        return f"agent {', '.join(gone)} of the record has exited, and another coordinator may have led it before"

    def _refuse(self, void: Undecided) -> Instructions:
        out: Instructions = []
        for agent, reason in void.refused:
            self._withdraw_report(agent)
            number = self.sessions.number_of(agent)
            if number is not None:
                out += self.sessions.broadcast(Notice("refused", reason, (agent,)), number)
                out.append(Send(number, Refused(reason)))
                out += self._close(agent, f"agent {agent} is refused: {reason}")
        return out + self._decide() if void.refused else out

    def _propose(self, decision: Decision) -> Instructions:
        """PERSIST."""
        if not self.newest.is_by_directory:
            return self._adopt(decision)
        self._deciding = decision
        late = f"generation {decision.record.generation} is not yet on the disk of the coordinator's state directory"
        self._overdue.note("write", late, self._now_s)
        return [Persist(self.office.term, decision, self.finished, frozenset([self.office.address]), own=True)]

    def _persist(self) -> Instructions:
        if not self.newest.has_directory:
            return []
        assert self._deciding is None, "what is being written would be replaced by the decision before (PERSIST)"
        return [Persist(self.office.term, self.newest.decision, self.finished, self.office.addresses, self.newest.own)]

    def _persisted(self, digest: str) -> Instructions:
        if self._deciding is None or self._deciding.record.digest != digest:
            return []
        decision, self._deciding = self._deciding, None
        self._overdue.note("write", "", self._now_s)
        out = self._adopt(decision)
        while self._deferred and self._deciding is None:
            out += self._handle(self._deferred.popleft())
        return out + self._decide()

    def _adopt(self, decision: Decision) -> Instructions:
        before, record = self.record, decision.record
        self.newest.adopt(decision)
        self.office.decide()
        self._note_reason("", is_proposal=False)
        self.absences.forget_lost()
        self.absences.expect(record.agents)
        self._forget_former(before)
        push = Push(decision)
        out: Instructions = []
        for number, session in self.sessions.begun.items():
            if self.newest.may_be_sent(session.agent):
                self._withdraw_report(session.agent)  # of the others it stands: the record may never reach them
                session.pushed = record.generation
                out.append(Send(number, push))
        return out + self._welcome_again() + self._announce(self._reports) + self._drop_facts(self._absent_with_facts())

    def _forget_former(self, before: Record | None) -> None:
        """FORMER. `before`: the record before the newest."""
        assert self.record is not None
        present = {*self.record.agents, *(() if before is None else before.agents), *self.sessions.named_agents()}
        self.sessions.keep(present)
        self.office.keep(present)
        self.absences.keep(present | self._facts.by_agent.keys())
