"""Coordinators and sessions that are not ours: a rule is left out or weakened, to show that the simulation finds what
that breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elasticgang.protocol.absences import Absences
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.coordinator_messages import (
    NO_TERM,
    CollectReport,
    Decision,
    Hello,
    Push,
    Term,
    Welcome,
)
from elasticgang.protocol.coordinator_sessions import Sessions
from elasticgang.protocol.coordinator_state import CoordinatorState
from elasticgang.protocol.job_facts import JobFacts
from elasticgang.protocol.newest_decision import NewestDecision
from elasticgang.protocol.next_decision import NextDecision
from elasticgang.protocol.office import Office
from elasticgang.protocol.record import Record, Report
from elasticgang.protocol.record_delivery import RecordDelivery
from elasticgang.protocol.reports import Reports
from tests.unit.patches import Patch, always

_decide = CoordinatorState._decide
_welcome = RecordDelivery._welcome
_renew = AgentSession._renew


def _push_then_write(self: CoordinatorState, decision: Decision) -> Any:
    out = self._adopt(decision)
    return [*out, *self._persist()]


def _trust_the_first(self: Office) -> bool:
    decision = self.newest.decision
    return decision is not None and not decision.durable and bool(self._promises & set(decision.record.agents))


def _trust_a_majority(self: Office) -> bool:
    decision = self.newest.decision
    if decision is None or decision.durable:
        return False
    return 2 * len(self._promises & set(decision.record.agents)) > len(decision.record.agents)


def _count_sessions(self: CoordinatorState) -> bool:
    office, decision = self.office, self.newest.decision
    if office.granted or decision is None or decision.durable:
        return office.granted
    return {s.agent for s in self.sessions.begun.values() if s.promised} >= set(decision.record.agents)


def _anybody_founds(self: Office) -> bool:
    return self.granted or self.newest.decision is None or self._has_all_promises()


def _in_office_by_term(self: Office) -> bool:
    decision = self.newest.decision
    return self.granted or (decision is not None and bool(self._promises & set(decision.record.agents)))


def _counts_without_promise(self: Reports, agent: str, report: Report) -> bool:
    record = self.newest.record
    if record is not None and agent in record.agents:
        return report.newest_record == record.ref
    return report.newest_record.generation == 0 or (record is not None and record.builds_on(report.newest_record))


def _counts_across_a_record(self: Reports, agent: str, report: Report) -> bool:
    session = self.sessions.of(agent)
    return session is not None and session.promised and _counts_without_promise(self, agent, report)


def _counts_whatever_it_knows(self: Reports, agent: str, report: Report) -> bool:
    session = self.sessions.of(agent)
    return session is not None and session.promised


def _skip_absent(self: NextDecision, record: Record) -> str | None:
    missing = self.reports.missing(record, self.absences.lost)
    return "somebody is not ready" if any(agent in self.sessions.number_of for agent in missing) else None


def _welcome_without_notices(self: RecordDelivery, session: Any) -> Welcome:
    return replace(_welcome(self, session), over=0, joining=0)


def _welcome_whoever_owes(self: RecordDelivery, session: Any) -> Welcome:
    return replace(_welcome(self, session), in_office=self.office.is_held)


def _notices_lost(self: AgentSession, over: int, joining: int) -> Any:
    return []


def _silent_at_once(self: Absences, _limit_s: float, agents: Any) -> list[str]:
    now_s = self._now_s or 0.0
    return [agent for agent in agents if self._heard_s.get(agent, now_s) < now_s - 3]


def _never_advance(self: Absences, now_s: float) -> None:
    self._now_s = now_s


def _renew_from_the_answer(self: AgentSession, sent_s: float, now_s: float) -> Any:
    return _renew(self, now_s, now_s)


def _refused_anywhere(self: AgentSession, address: str, began_s: float, now_s: float) -> Any:
    return [] if self.lease_until_s is None else _renew(self, began_s, now_s)


def _refused_by_former(self: AgentSession, welcome: Welcome, now_s: float) -> Any:
    address = self.lease_address
    out = _session_welcome(self, welcome, now_s)
    self.lease_address = self.lease_address or address
    return out


def _accept_any_term(self: AgentSession, welcome: Welcome, now_s: float) -> Any:
    self.promised = min(self.promised, welcome.term)
    return _session_welcome(self, welcome, now_s)


def _connect_without_promise(self: AgentSession, address: str, now_s: float) -> Any:
    promised, self.promised = self.promised, NO_TERM
    out = _connected(self, address, now_s)
    self.promised = promised
    return out


def _report_once(self: AgentSession, welcome: Welcome, now_s: float) -> Any:
    is_due = self._is_report_due
    self._is_report_due = False
    out = [i for i in _session_welcome(self, welcome, now_s) if not isinstance(i, CollectReport)]
    self._is_report_due = is_due
    return out + self._collect()


def _push_at_once(self: AgentSession, push: Push, now_s: float) -> Any:
    known = self.decision
    out = _push(self, push, now_s)
    return out + self._deliver_held() if self.decision is not known else out


def _finish_once(self: AgentSession, address: str, now_s: float) -> Any:
    finished, self.finished = self.finished, False
    out = _connected(self, address, now_s)
    self.finished = finished
    return out


def _hello_free_once_lost(self: CoordinatorState, number: int, hello: Hello) -> Any:
    if hello.agent in self.absences.lost:
        self.sessions._incarnations.pop(hello.agent, None)
    return _hello(self, number, hello)


def _exit_unheard_after_the_end(self: CoordinatorState, agents: Any, *, has_left: bool = False) -> Any:
    if self.newest.finished and self.record is not None:
        self.newest.finish(self.record.generation)
    return _declare_lost(self, agents, has_left=has_left)


def _leave_office_in_despair(self: CoordinatorState) -> None:
    unrecoverable = self.unrecoverable
    _leave_office(self)
    self.unrecoverable = unrecoverable


def _give_up_over_the_unaccepted(self: NextDecision, now_s: float, *, on_tick: bool) -> Any:
    record = self.newest.record
    if record is not None and self._waits(record) is None:
        self.newest.before = None
    return _look(self, now_s, on_tick=on_tick)


def _keep_office_at_a_term(self: CoordinatorState, term: Term) -> Any:
    granted = self.office.granted
    out = _learn_term(self, term)
    self.office.granted = granted
    return out


def _learn_higher_numbers(self: CoordinatorState, term: Term) -> Any:
    return _learn_term(self, term) if term.number > self.office.number else []


def _excuse_all(record: Record, _: object) -> frozenset[str]:
    return frozenset(record.agents)


def _keep_silent_members(self: CoordinatorState, _in_office: bool) -> list[str]:
    return [s.agent for s in self.sessions.begun.values() if not self.newest.has_agent(s.agent)]


def _keep_unaccepted(self: CoordinatorState) -> None:
    decision, parents = self.newest.decision, self.newest.parents
    _leave_office(self)
    self.newest.decision, self.newest.parents = decision, parents


_session_welcome = AgentSession._welcome
_connected = AgentSession._connected
_push = AgentSession._push
_hello = CoordinatorState._hello
_learn_term = CoordinatorState._learn_term
_look = NextDecision.look
_declare_lost = CoordinatorState._declare_lost
_leave_office = CoordinatorState._leave_office
_learn = CoordinatorState._learn
_overdue_reason = NextDecision.overdue_reason


def _forget_but_reports(self: CoordinatorState, number: int) -> Any:
    self.sessions.end(number)
    return []


def _over_once(self: AgentSession, address: str, now_s: float) -> Any:
    over, self.over = self.over, 0
    out = _connected(self, address, now_s)
    self.over = over
    return out


def _overdue_once(self: NextDecision, now_s: float) -> str:
    reason = _overdue_reason(self, now_s)
    if vars(self).get("was_told") == reason:
        return ""
    if reason:
        vars(self)["was_told"] = reason
    return reason


def _tell_facts_after_the_record(self: AgentSession, push: Push, now_s: float) -> Any:
    vars(self)["_tell_facts"] = always([])
    out = _push(self, push, now_s)
    del vars(self)["_tell_facts"]
    return out + self._tell_facts()


def _hello_without_facts(self: CoordinatorState, number: int, hello: Hello) -> Any:
    return [one for one in _hello(self, number, hello) if not isinstance(getattr(one, "message", None), JobFacts)]


def _drop_in_silence(self: CoordinatorState, agents: Any) -> Any:
    self.facts.drop(agents)
    return []


COORDINATOR_MUTANTS: dict[str, tuple[Patch, ...]] = {
    "pushed before it is written": ((CoordinatorState, "_propose", _push_then_write),),
    "the first to come is trusted": ((Office, "_has_all_promises", _trust_the_first),),
    "a majority is trusted": ((Office, "_has_all_promises", _trust_a_majority),),
    "anybody founds a job": ((Office, "is_held", property(_anybody_founds)),),
    "the highest term alone decides": (
        (Office, "is_held", property(_in_office_by_term)),
        (CoordinatorState, "_leave_office", always(None)),
    ),
    "promises count by sessions": ((CoordinatorState, "in_office", property(_count_sessions)),),
    "office is kept": ((CoordinatorState, "_leave_office", always(None)),),
    "office is kept at a higher term": ((CoordinatorState, "_learn_term", _keep_office_at_a_term),),
    "others' records are not learned": ((NewestDecision, "is_news", always(False)),),
    "reports outlive their session": (
        (Reports, "_counts", _counts_without_promise),
        (CoordinatorState, "_forget_session", _forget_but_reports),
    ),
    "a report counts although it crosses a record": ((Reports, "_counts", _counts_across_a_record),),
    "reports of earlier generations count": ((Reports, "_counts", _counts_whatever_it_knows),),
    "lost before it is fenced": ((Absences, "beyond", _silent_at_once),),
    "leases of another address are not thought of": ((Office, "may_be_led_elsewhere", always(False)),),
    "a coordinator's standstill counts": ((Absences, "advance", _never_advance),),
    "absent agents are not waited for": ((NextDecision, "_waits", _skip_absent),),
    "directories and promises are mixed": ((Office, "_needs_directory", always(False)),),
    "notices are sent once": (
        (RecordDelivery, "_welcome", _welcome_without_notices),
        (AgentSession, "_notices", _notices_lost),
    ),
    "the operator's word stands for all agents": ((Office, "_absent", staticmethod(_excuse_all)),),
    "silent agents keep their sessions out of office": ((CoordinatorState, "_dispensable", _keep_silent_members),),
    "a record that nobody has accepted outlives its office": ((CoordinatorState, "_leave_office", _keep_unaccepted),),
    "joiners are sent a record at once": ((NewestDecision, "_must_accept", always(frozenset())),),
    "an id is free once its agent is lost": ((CoordinatorState, "_hello", _hello_free_once_lost),),
    "an agent that accepts no record is heard": ((RecordDelivery, "is_due", always(False)),),
    "an agent that accepts no record gets a lease": ((RecordDelivery, "_welcome", _welcome_whoever_owes),),
    "two processes have one id": ((Sessions, "is_duplicate", always(False)),),
    "a lease runs from the answer": ((AgentSession, "_renew", _renew_from_the_answer),),
    "any refusal renews the lease": ((AgentSession, "_refused", _refused_anywhere),),
    "a refusal where the former coordinator was renews the lease": ((AgentSession, "_welcome", _refused_by_former),),
    "a promise is not told": ((AgentSession, "_connected", _connect_without_promise),),
    "an agent accepts earlier terms": (
        (AgentSession, "_connected", _connect_without_promise),
        (AgentSession, "_welcome", _accept_any_term),
    ),
    "a record is delivered without a lease": ((AgentSession, "_push", _push_at_once),),
    "a report is sent once": ((AgentSession, "_welcome", _report_once),),
    "the end of the job is told once": ((AgentSession, "_connected", _finish_once),),
    "an exit after the end ends no generation": ((CoordinatorState, "_declare_lost", _exit_unheard_after_the_end),),
    "what is lost stays lost out of office": ((CoordinatorState, "_leave_office", _leave_office_in_despair),),
    "what is lost stays lost": ((CoordinatorState, "_reconsider", always(None)),),
    "a state is lost with a record that nobody has accepted": ((NextDecision, "look", _give_up_over_the_unaccepted),),
    "why a proposal is undecided is told once": ((NextDecision, "overdue_reason", _overdue_once),),
    "equal numbers are one term": ((CoordinatorState, "_learn_term", _learn_higher_numbers),),
    "facts cross a record": ((AgentSession, "_push", _tell_facts_after_the_record),),
    "a new session is sent no facts": ((CoordinatorState, "_hello", _hello_without_facts),),
    "the facts of who has gone end in silence": ((CoordinatorState, "_drop_facts", _drop_in_silence),),
    "the end of a generation is told once": ((AgentSession, "_connected", _over_once),),
}
