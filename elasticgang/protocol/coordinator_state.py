"""What the coordinator of one job does: events and the time in, instructions out.

Pure: no clock, no socket, nothing random. Each part of what a coordinator knows has one owner, which does not know the
others but those above it here:

    NewestDecision  the newest decision of the job, who has accepted it, and what is known of its generation
    Sessions        the sessions of agents
    Absences        who is silent, or lost
    Office          the term, who has promised it, and the operator's word
    Reports         of agents that are ready
    NextDecision    when there is a next record, and why there is none yet
    RecordDelivery  what each session is owed

PERSIST  With a state directory, a record is pushed only after it was written there. One that follows a record which the
         directory has not decided is accepted by an agent first, as without a directory, and written then: until that,
         the agents of the record before decide what follows it.
LOST     An agent is declared lost once it was silent for `lost_after_s` while the coordinator was in office, not
         counting what the coordinator itself stood still; or its process is known to be gone. Out of office nobody is
         lost, and where a record is known, a silent session is closed after half a lease: the operator's word, which
         may be given while leases last, covers no agent that has a session. An exit ends the generation, unless the job
         has finished in it: all its ranks had connections then, which break by themselves. A lost agent whose ranks
         were spares, and kept nothing for others, costs no step: the generation ends at a boundary, as for one that
         joins. The others may be saving their state before they leave.
ABANDON  A job is abandoned once no agent has a session, and every agent of its record is lost, or the coordinator is
         not in office. It may be forgotten: what is known of it is in the state directory, or with agents.
NOTICE   While a proposal is undecided, each session is told why once, after the reason has held for `notice_s`: what an
         earlier session of the agent was told may not have arrived. While ready agents wait for others of a generation
         that is over, likewise for whom; and while a decision is being written, or the coordinator is out of office.
FORMER   Of an agent that is in neither of the two newest records, and has no session, only its facts are kept
         (FACTS-ABSENT). Whether it has left, promised or was silent, and which process it was, is forgotten: an agent
         that comes back has another id as a rule, and a job of weeks has thousands. Should it come with its id all the
         same, it promises again, and brings what it has accepted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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
    Ready,
    Received,
    Refused,
    RequestDecision,
    Send,
    SessionClosed,
    Term,
    Ticked,
    Timeouts,
)
from elasticgang.protocol.coordinator_sessions import Sessions
from elasticgang.protocol.cut_off import any_comes_back
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.job_facts import NO_FACTS, AgentFacts, GatheredFacts, JobFacts
from elasticgang.protocol.newest_decision import NewestDecision
from elasticgang.protocol.next_decision import NextDecision
from elasticgang.protocol.next_record import mismatch
from elasticgang.protocol.office import Office
from elasticgang.protocol.overdue import Overdue
from elasticgang.protocol.record import SPARE, Record, RecordRef, Report, Seat, Undecided, Unrecoverable
from elasticgang.protocol.record_delivery import RecordDelivery
from elasticgang.protocol.reports import Reports

Instructions: TypeAlias = "list[CoordinatorInstruction]"


class CoordinatorState:
    """`handle` is the only way in. `own`: as of `Persist`. `granted`: as a founder. `everywhere`: as of `Welcome`.
    `facts`: what agents have told of themselves."""

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
        self.timeouts = timeouts or Timeouts()
        self.newest = NewestDecision(has_directory, decision, own, finished)
        self.office = Office(self.newest, name, number, address, addresses, granted)
        self.sessions = Sessions()
        self.absences = Absences(self.timeouts.standstill_s)
        self.facts = GatheredFacts()
        self.reports = Reports(self.newest, self.sessions)
        parts = self.newest, self.office, self.sessions, self.absences, self.reports
        self.next_decision = NextDecision(*parts, self.facts, self.timeouts)
        self._delivery = RecordDelivery(*parts, everywhere)
        self.unrecoverable = ""
        self._deciding: Decision | None = None  # written to the directory, not yet pushed
        self._deferred: deque[CoordinatorEvent] = deque()
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
    def stopping_agents(self) -> list[str]:
        """Those with a session that a signal has asked to end (SERVE-LEAVE)."""
        return [agent for agent in self.sessions.number_of if self.facts.by_agent.get(agent, NO_FACTS).is_stopping]

    def absent_agents(self) -> dict[str, str]:
        """Agents of the record that have no session and are not lost, with their addresses."""
        record = self.record
        if record is None:
            return {}
        addresses = zip(record.agents, record.addresses, strict=False)
        return {
            a: address for a, address in addresses if a not in self.sessions.number_of and a not in self.absences.lost
        }

    @property
    def is_abandoned(self) -> bool:
        """ABANDON"""
        if self.sessions.begun or self.sessions.waiting or self._deciding is not None:
            return False
        return not self.in_office or self.record is None or self.absences.lost.issuperset(self.record.agents)

    @property
    def word_awaited(self) -> str:
        """Why the job goes on only on the operator's word, or with agents that are absent; empty when it does not."""
        if self.in_office:
            return self.next_decision.reason if self.next_decision.awaits_word else ""
        return self.office.why_not(self.sessions.number_of)

    # -- events

    def handle(self, event: CoordinatorEvent, now_s: float) -> Instructions:
        self._now_s = max(self._now_s, now_s)
        self.absences.advance(self._now_s)
        if isinstance(event, Persisted):
            return self._persisted(event.digest)
        if self._deciding is not None and not self._is_harmless(event):
            if isinstance(event, Received) and (session := self.sessions.begun.get(event.session)) is not None:
                self._delivery.hear(session)  # later, it may owe the record that is being written
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
            if isinstance(message, KnownDecision) and number in self.sessions.waiting:
                return self._known(number, message.decision)
            return []  # of a session that was closed
        is_heard = self._delivery.hear(session)
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
                return self._finish(generation)
            case Goodbye(reason):
                self.office.left.add(session.agent)
                return self._exit(session.agent, f"agent {session.agent} ends: {reason}", has_left=True)
            case JobFailed():
                return self._fail_job(message, number) if self.newest.has_agent(session.agent) else []
            case AgentFacts():
                is_news = not session.has_told or message.unreached != self.facts.unreached_by(session.agent)
                session.has_told = True
                self.facts.replace(session.agent, message)
                return self._tell_facts() + (self._let_back() if is_news else [])

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
        is_ended = self.newest.finished or bool(self.unrecoverable)
        out += self.sessions.tell("undecided", self.next_decision.overdue_reason(self._now_s))
        out += self.sessions.tell("waiting", self.next_decision.overdue_agents(self._now_s, is_ended=is_ended))
        if self.next_decision.is_founding_due(self._now_s):
            out += self._decide(on_tick=True)
        return out

    def _dispensable(self, in_office: bool) -> list[str]:
        """LOST: agents whose silence ends their session, and nothing else."""
        return [s.agent for s in self.sessions.begun.values() if not in_office or not self.newest.has_agent(s.agent)]

    def _tell_late_write(self) -> Instructions:
        """NOTICE."""
        return self.sessions.tell("waiting", self._overdue.reason("write", self._now_s))

    def _tell_out_of_office(self) -> Instructions:
        """NOTICE."""
        reason = "" if self.in_office or not self.sessions.begun else self.word_awaited
        self._overdue.note("office", reason, self._now_s)
        overdue = self.overdue_office
        return self.sessions.tell("waiting", f"{overdue} (`elasticgang grant`)" if overdue else "")

    @property
    def overdue_office(self) -> str:
        """Why this coordinator has not been in office for `notice_s`."""
        return self._overdue.reason("office", self._now_s)

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
        is_harmless = self.newest.has_finished_in_it and self.absences.exited.issuperset(agents)
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
        if number in self.sessions.begun or number in self.sessions.waiting:
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
        self.office.recall(hello.agent)
        if self.office.was_held and not self.in_office:  # WORD
            self._leave_office()
        if self.newest.parents:  # BACK: what is news depends on it
            out += self._learn_term(hello.term)
        for ref in (hello.decision, hello.former_decision):
            if ref is not None and self.newest.is_news(ref):
                self.sessions.await_decision(number, hello)
                return [*out, Send(number, RequestDecision(ref.digest))]
        session = self.sessions.begin(number, hello)
        known = session.seen
        self.absences.exited.discard(hello.agent)
        if hello.agent not in self.newest.owing or not self._delivery.is_due(session):
            self._hear_back(hello.agent)
        self._delivery.hear(session)
        if hello.finished:
            out += self._finish(hello.finished)
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
        if self.in_office and (evicted := self._delivery.evict(number)):
            return out + evicted
        out.append(self._delivery.welcome(number))
        if self.facts.sent != JobFacts():
            out.append(Send(number, self.facts.sent))
        if known is not None and self._job_failed is not None and known.generation == self._job_failed.generation:
            out.append(Send(number, self._job_failed))
        if known is not None:
            out += self._accepted(number, known)
        if self.in_office:
            out += self._delivery.send(number)
        if self.unrecoverable:
            out.append(Send(number, JobUnrecoverable(self.unrecoverable)))
        return out

    def _hear_back(self, agent: str) -> None:
        self.newest.owing.discard(agent)
        self.absences.hear(agent)
        self.absences.lost.discard(agent)
        self._reconsider(agent)

    def _reconsider(self, agent: str) -> None:
        """REJOIN."""
        if self.newest.has_agent(agent):
            self.unrecoverable = ""

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
            self.reports.withdraw(session.agent)
            if not self.newest.has_agent(session.agent):
                self.facts.keep_successors(session.agent)  # FACTS-ABSENT
                if session.agent not in self.facts.by_agent:
                    self.absences.forget(session.agent)

    def _close(self, agent: str, reason: str) -> Instructions:
        number = self.sessions.number_of.get(agent)
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
        return out + [self._delivery.welcome(number) for number in self.sessions.begun]

    def _grant(self) -> Instructions:
        """OFFICE (c), WORD."""
        self.office.grant(self.sessions.number_of)
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
        # What agents know is an ancestor of the dropped record, and of the one before.
        return self._persist() + self._delivery.send_to_all() + self._delivery.welcome_again()

    def _enter_office(self) -> Instructions:
        self.office.was_held = True
        for agent in () if self.record is None else self.record.agents:
            self.absences.hear(agent)
        return self._delivery.enter_office() + self._announce()

    def _accepted(self, number: int, ref: RecordRef) -> Instructions:
        out: Instructions = []
        session = self.sessions.begun[number]
        owed = self._delivery.is_due(session)
        session.seen = ref
        if owed and not self._delivery.is_due(session):
            self._hear_back(session.agent)
            out += [self._delivery.welcome(number)] if session.is_denied else []
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
        parents = self.newest.lift()
        return self._delivery.send_to_all(but=parents) if self.in_office else []  # else once this coordinator is

    # -- what agents say

    def _ready(self, number: int, report: Report) -> Instructions:
        session = self.sessions.begun[number]
        if (wrong := self.reports.why_not_its_own(session.agent, report)) is not None:
            return self._close(session.agent, wrong)
        if self.record is not None and (why := mismatch(self.record, report)) is not None:
            return self._refuse(Undecided(why, ((session.agent, why),)))
        out: Instructions = []
        if self.newest.before is not None or self.newest.given_up is not None:
            # BACK: `Accepted` may come later than the report.
            out += self._note_accepted(session.agent, report.newest_record)
        if self.record is not None and report.newest_record == self.record.ref and self._delivery.is_due(session):
            out += self._accepted(number, report.newest_record)
        self.reports.add(report, self._now_s)
        return out + self._announce([session.agent]) + self._decide()

    def _announce(self, agents: Iterable[str] | None = None) -> Instructions:
        """In office: members of these agents, or of all, may wait to join the present generation."""
        record = self.record
        if record is None or not self.in_office or self.newest.joining >= record.generation:
            return []
        return self._join(record.generation) if self.reports.have_joiner(agents) else []

    def _end(self, end: EndGeneration, source: int | None = None) -> Instructions:
        return self.sessions.broadcast(end, source) if self.newest.end(end) else []

    def _join(self, generation: int) -> Instructions:
        return self.sessions.broadcast(JoinNotice(generation)) if self.newest.join(generation) else []

    def _let_back(self) -> Instructions:
        """REACHED"""
        record = self.record
        if record is None or not record.cut_off or not self.in_office:
            return []
        may_come_back = any_comes_back({each.agent for each in record.cut_off}, record.agents, self._unreached_by)
        return self._join(record.generation) if may_come_back else []

    def _unreached_by(self, agent: str) -> tuple[str, ...] | None:
        """None: it has told no facts in its session."""
        session = self.sessions.of(agent)
        return self.facts.unreached_by(agent) if session is not None and session.has_told else None

    def _finish(self, generation: int) -> Instructions:
        return self._persist() + self.sessions.broadcast(Finished(generation)) if self.newest.finish(generation) else []

    def _fail_job(self, failed: JobFailed, source: int) -> Instructions:
        newest = self._job_failed
        if newest is not None and (newest.generation, newest.step) == (failed.generation, failed.step):
            return []
        self._job_failed = failed
        return self.sessions.broadcast(failed, source)

    def _tell_facts(self, *, on_tick: bool = False) -> Instructions:
        """FACTS-JOB."""
        facts = self.facts.changed(on_tick=on_tick)
        return [] if facts is None else self.sessions.broadcast(facts)

    def _drop_facts(self, agents: list[str]) -> Instructions:
        self.facts.drop(agents)
        for agent in agents:
            if agent not in self.sessions.number_of and not self.newest.has_agent(agent):
                self.absences.forget(agent)
        return self._tell_facts()

    def _absent_with_facts(self) -> list[str]:
        """Agents that are not in the record, and have no session."""
        present = self.sessions.number_of
        return [agent for agent in self.facts.by_agent if agent not in present and not self.newest.has_agent(agent)]

    # -- the decision

    def _decide(self, on_tick: bool = False) -> Instructions:
        if not self.in_office or self._deciding is not None or self.unrecoverable:
            return []
        if self.record is None and self.newest.finished:  # ABANDON: it was forgotten, and is not founded anew
            return []
        self.office.was_held = True
        match self.next_decision.look(self._now_s, on_tick=on_tick):
            case None:
                return []
            case Undecided() as undecided:
                return self._refuse(undecided)
            case Unrecoverable(reason) if self.newest.before is None:
                self.unrecoverable = reason
                return self.sessions.broadcast(JobUnrecoverable(reason))
            case Unrecoverable():
                return self._go_back_in_office() + self._decide()
            case record:
                return self._propose(Decision(self.office.term, record, self.newest.has_directory))

    def _go_on_without_parents(self) -> Instructions:
        """BACK: others of the record before may be led by another coordinator."""
        return self._lift() if self.newest.before is None else self._go_back_in_office()

    def _refuse(self, void: Undecided) -> Instructions:
        out: Instructions = []
        for agent, reason in void.refused:
            self.reports.withdraw(agent)
            number = self.sessions.number_of.get(agent)
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
        return [Persist(self.office.term, decision, self.newest.finished, frozenset([self.office.address]), own=True)]

    def _persist(self) -> Instructions:
        if not self.newest.has_directory:
            return []
        assert self._deciding is None, "what is being written would be replaced by the decision before (PERSIST)"
        newest, office = self.newest, self.office
        return [Persist(office.term, newest.decision, newest.finished, office.addresses, newest.own)]

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
        self.next_decision.note_made(self._now_s)
        self.absences.forget_lost()
        self.absences.expect(record.agents)
        self._forget_former(before)
        return self._delivery.push() + self._announce() + self._drop_facts(self._absent_with_facts())

    def _forget_former(self, before: Record | None) -> None:
        """FORMER. `before`: the record before the newest."""
        assert self.record is not None
        present = {*self.record.agents, *(() if before is None else before.agents), *self.sessions.named_agents()}
        self.sessions.keep(present)
        self.office.keep(present)
        self.absences.keep(present | self.facts.by_agent.keys())
