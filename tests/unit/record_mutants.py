"""Rules of the coordinator and its records that are not ours, each with the unit test that shows what it breaks.

They are about who decides and reports, recovery, forms and deltas, layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from elasticgang.protocol import (
    coverage,
    member_state,
    next_record,
    record_delta,
    recovery,
)
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.commit import Action, Attempt
from elasticgang.protocol.coordinator_messages import (
    CollectReport,
    DecisionRef,
    EndGeneration,
    Goodbye,
    Hello,
    Ready,
    Welcome,
)
from elasticgang.protocol.coordinator_state import CoordinatorState
from elasticgang.protocol.cut_off import find_cut_off
from elasticgang.protocol.job_facts import AgentFacts, GatheredFacts, JobFacts, KnownSuccessors, Wait
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.newest_decision import NewestDecision
from elasticgang.protocol.next_decision import NextDecision
from elasticgang.protocol.office import Office
from elasticgang.protocol.record import SPARE, MemberReport, Record, Report, Seat
from elasticgang.protocol.record_delivery import RecordDelivery
from elasticgang.protocol.record_form import RecordForm, digest_of_line
from elasticgang.protocol.reports import Reports
from elasticgang.session import messages
from tests.unit import (
    coordinator_driver,
    test_coordinator_notices,
    test_coordinator_state,
    test_coverage,
    test_job_facts,
    test_left_out_hosts,
    test_next_record,
    test_operators_word,
    test_record_form,
    test_recovery,
    test_reshape,
    test_sent_records,
    test_session_wire,
)
from tests.unit.patches import always, with_monkeypatch
from tests.unit.unit_mutant import UnitMutant

_coordinator_decides = CoordinatorState._decide
_changed = GatheredFacts.changed
_connected = AgentSession._connected
_end = CoordinatorState._end
_welcome = AgentSession._welcome
_may_hold = recovery._may_hold
_beyond_max = next_record._surplus_agents
_from_text = Record.from_text
_head = Record.head
_layout_in_force = next_record._layout_in_force
_can_give = recovery._can_give
_apply_delta = record_delta.apply_delta


def _is_without_sessions(self: CoordinatorState) -> bool:
    return not (self.sessions.begun or self.sessions.waiting or self.is_deciding)


def _founds_again(self: CoordinatorState) -> Any:
    finished, self.newest.finished = self.newest.finished, False
    out = _coordinator_decides(self)
    self.newest.finished = finished
    return out


def _beyond_max_whoever_holds(record: Record | None, reports: Sequence[Report], _: object) -> list[Report]:
    return _beyond_max(record, reports, {})


def _may_hold_but_spares(record: Record, absent: Sequence[Seat], model: Any) -> Any:
    return _may_hold(record, [seat for seat in absent if seat.status != SPARE], model)


def _action_by_step(tip: Attempt | None, pending: Attempt | None, committed: Attempt) -> Action:
    if tip is not None and tip.step == committed.step:
        return Action.KEEP
    return Action.APPLY if pending is not None and pending.step == committed.step else Action.HEAL


def _end_whatever(self: CoordinatorState, end: EndGeneration, source: int | None = None) -> Any:
    return _end(self, replace(end, generation=0 if self.record is None else self.record.generation), source)


def _head_without_rollback(self: Record) -> dict[str, Any]:
    return {**_head(self), "rolled_back": False}


def _digest_without_order(self: RecordForm) -> str:
    return digest_of_line("".join((*self.tops, *self.lines.values()))).hex()[:16]


def _parse_all(text: str) -> Record:
    record = _from_text(text)
    assert record.plan is not None
    return record


class _EqualToAll(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def _apply_unchecked(parent: Record, delta: dict[str, Any]) -> Record:
    return _apply_delta(parent, {**delta, "digest": _EqualToAll()})


def _makes_the_same(_: Record, __: dict[str, Any]) -> Any:
    return SimpleNamespace(text=_EqualToAll())


def _in_force_whoever_starts(record: Record | None, reports: Sequence[Report], seatable: Any) -> Any:
    return _layout_in_force(record, [replace(report, num_starting=0) for report in reports], seatable)


def _whole_in_force(record: Record, members: Any, committed: Attempt) -> int | None:
    number = record.in_force
    return None if recovery._missing(record, members, committed, number) else number


def _can_give_in_any_layout(member: MemberReport, committed: Attempt, model: Any, _: int) -> bool:
    return any(_can_give(member, committed, model, number) for number in range(3))


def _newer_by_generation(ref: DecisionRef, than: DecisionRef) -> bool:
    return ref.generation > than.generation


_exit = CoordinatorState._exit
_hello = CoordinatorState._hello


def _exit_for_good(self: CoordinatorState, agent: str, reason: str, *, has_left: bool = False) -> Any:
    self.office.left.add(agent)
    return _exit(self, agent, reason, has_left=has_left)


def _go_back_in_silence(self: CoordinatorState) -> Any:
    self.newest.go_back()
    return []


def _collect_at_once(self: AgentSession) -> Any:
    self._is_report_due = False
    return [CollectReport()]


def _hello_beside_another(self: CoordinatorState, number: int, hello: Hello) -> Any:
    self.sessions._asked.clear()
    return _hello(self, number, hello)


def _connect_without_facts(self: AgentSession, address: str, now_s: float) -> Any:
    out, self.facts = _connected(self, address, now_s), AgentFacts()
    return out


def _welcome_without_notifications(self: AgentSession, welcome: Welcome, now_s: float) -> Any:
    self._unheard.clear()
    return _welcome(self, welcome, now_s)


def _keep_none(self: GatheredFacts, agent: str) -> None:
    self.drop([agent])


def _tell_all_facts(self: AgentSession) -> Any:
    return self._send(self.facts) if self.is_welcome else []


def _all_failures(self: GatheredFacts) -> Any:
    return tuple(failure for step in sorted(self._failed) for failure in self._failed[step])


def _all_waits(self: GatheredFacts) -> Any:
    return tuple(
        Wait(generation, group, reached if counts else None, agent)
        for (generation, group, counts), agents in self._waiting.items()
        for agent, reached in agents.items()
    )


def _change_at_once(self: GatheredFacts, *, on_tick: bool = False) -> JobFacts | None:
    return _changed(self, on_tick=True)


def _leave_out_the_first(
    unreached: Mapping[str, Collection[str]], in_turn: Sequence[str], begin: Callable[[], Callable[[str], bool]]
) -> dict[str, tuple[str, ...]]:
    return find_cut_off(unreached, in_turn[::-1], begin)


def _leave_out_anybody(
    unreached: Mapping[str, Collection[str]], in_turn: Sequence[str], begin: Callable[[], Callable[[str], bool]]
) -> dict[str, tuple[str, ...]]:
    return find_cut_off(unreached, in_turn, always(always(True)))


RECORD_MUTANTS = {
    "a lost spare costs a step": UnitMutant(
        ((CoordinatorState, "_are_needed", staticmethod(always(True))),),
        partial(test_coordinator_notices.test_an_agent_whose_ranks_are_all_spares_costs_no_step, Goodbye()),
    ),
    "nobody is told for whom the job waits": UnitMutant(
        ((NextDecision, "overdue_agents", lambda self, now_s, is_ended: ""),),
        test_coordinator_notices.test_agents_are_told_for_whom_they_wait_once_the_generation_is_over,
    ),
    "nobody is told of a late disk": UnitMutant(
        ((CoordinatorState, "_tell_late_write", always([])),),
        test_coordinator_notices.test_agents_are_told_that_the_disk_of_the_state_directory_is_late,
    ),
    "nobody is told why a coordinator is not in office": UnitMutant(
        ((CoordinatorState, "_tell_out_of_office", always([])),),
        test_coordinator_notices.test_agents_are_told_why_a_coordinator_is_not_in_office,
    ),
    "joiners with other settings are let in": UnitMutant(
        ((next_record, "_unlike", always(())),),
        test_next_record.test_a_joiner_with_other_settings_than_the_agents_that_take_part_is_refused,
    ),
    "a session that has yet to send its decision stays": UnitMutant(
        ((CoordinatorState, "_hello", _hello_beside_another),),
        test_coordinator_state.test_a_newer_session_closes_the_one_that_has_not_sent_its_decision,
    ),
    "a coordinator remembers all agents that it has ever had": UnitMutant(
        ((CoordinatorState, "_forget_former", always(None)),),
        lambda: test_coordinator_state.test_a_coordinator_of_weeks_keeps_nothing_of_agents_that_have_gone("exit"),
    ),
    "a job is abandoned without sessions": UnitMutant(
        ((CoordinatorState, "is_abandoned", property(_is_without_sessions)),),
        lambda: test_coordinator_state.test_a_job_is_abandoned_once_every_agent_of_its_record_is_lost(False),
    ),
    "a job out of office is never abandoned": UnitMutant(
        ((CoordinatorState, "is_abandoned", False),),
        test_coordinator_state.test_out_of_office_a_job_is_abandoned_without_sessions,
    ),
    "a forgotten job is founded anew": UnitMutant(
        ((CoordinatorState, "_decide", _founds_again),),
        test_coordinator_state.test_a_finished_job_that_was_forgotten_is_not_founded_anew,
    ),
    "an agent is ready beside a record that waits": UnitMutant(
        ((AgentSession, "_collect", _collect_at_once),),
        test_coordinator_state.test_an_agent_is_not_ready_for_the_next_record_before_its_ranks_have_the_one_that_waits_for_a_lease,
    ),
    "an agent without a record is fenced": UnitMutant(
        ((AgentSession, "_is_bound", always(True)),),
        test_coordinator_state.test_an_agent_without_a_record_has_no_lease_that_ends,
    ),
    "an agent without a record is in a hurry": UnitMutant(
        ((AgentSession, "_is_bound", always(True)),),
        test_coordinator_state.test_an_agent_without_a_record_waits_longest_for_an_answer,
    ),
    "an agent reports as another one": UnitMutant(
        ((Reports, "why_not_its_own", always(None)),),
        lambda: test_coordinator_state.test_an_agent_speaks_for_itself_alone(
            Ready(coordinator_driver.report("b")), is_closed=True
        ),
    ),
    "an end of any generation counts": UnitMutant(
        ((CoordinatorState, "_end", _end_whatever),),
        test_coordinator_state.test_only_members_end_a_generation_and_only_the_present_one,
    ),
    "an agent that comes back stays excused": UnitMutant(
        ((Office, "recall", always(None)),),
        test_operators_word.test_an_agent_that_comes_back_after_the_operators_word_must_promise,
    ),
    "the higher generation is newer": UnitMutant(
        ((NewestDecision, "_is_newer", staticmethod(_newer_by_generation)),),
        test_sent_records.test_a_decision_of_a_later_term_is_newer_whatever_its_generation,
    ),
    "joiners go on alone": UnitMutant(
        ((NextDecision, "_is_alone", always(False)),),
        test_coordinator_state.test_joiners_with_a_checkpoint_do_not_go_on_alone,
    ),
    "who has exited has left": UnitMutant(
        ((CoordinatorState, "_exit", _exit_for_good),),
        lambda: test_coordinator_state.test_who_has_exited_without_saying_so_may_have_had_another_coordinator(
            has_said_so=False
        ),
    ),
    "nobody is sent the record that is the newest again": UnitMutant(
        ((CoordinatorState, "_go_back_in_office", _go_back_in_silence),),
        test_sent_records.test_whoever_was_never_sent_the_record_before_is_sent_it_when_the_coordinator_goes_back,
    ),
    "lost agents come back as they are": UnitMutant(
        ((RecordDelivery, "evict", always([])),),
        test_coordinator_state.test_a_lost_agent_with_an_ancestor_of_the_record_may_come_back_and_another_is_evicted,
    ),
    "chains are told apart by number": UnitMutant(
        ((Record, "builds_on", always(True)),),
        test_recovery.test_a_record_builds_on_no_other_chain_whatever_its_numbers,
    ),
    "who is one too many waits, whatever it holds": UnitMutant(
        ((next_record, "_surplus_agents", _beyond_max_whoever_holds),),
        test_next_record.test_the_last_holder_has_a_seat_even_beyond_max_agents,
    ),
    "by step alone": UnitMutant(
        ((member_state, "action", _action_by_step), (recovery, "action", _action_by_step)),
        test_recovery.test_a_step_number_alone_does_not_name_a_state,
    ),
    "nobody is waited for": UnitMutant(
        ((recovery, "_absent", always([])),), test_recovery.test_missing_state_is_waited_for
    ),
    "spares are not waited for": UnitMutant(
        ((recovery, "_may_hold", _may_hold_but_spares),), test_recovery.test_a_spare_may_hold_the_missing_state
    ),
    "no witness is needed": UnitMutant(
        ((next_record, "without_witness", always(None)),), test_next_record.test_a_torn_member_is_no_witness
    ),
    "a digest covers no rollback": UnitMutant(
        ((Record, "head", _head_without_rollback),),
        lambda: test_record_form.test_digest_tells_records_apart({"rolled_back": True}),
    ),
    "a digest covers no order": UnitMutant(
        ((RecordForm, "digest", property(_digest_without_order)),),
        test_record_form.test_every_line_changes_the_digest,
    ),
    "an agent parses all of a record": UnitMutant(
        ((Record, "from_text", staticmethod(_parse_all)),),
        lambda: test_record_form.test_what_are_not_its_seats_say_so_when_they_are_asked_for("{}"),
    ),
    "a delta makes what it makes": UnitMutant(
        ((messages, "apply_delta", _apply_unchecked),),
        test_session_wire.test_a_delta_makes_the_record_or_is_refused,
    ),
    "a delta is sent untried": UnitMutant(
        ((record_delta, "apply_delta", _makes_the_same),),
        test_record_form.test_a_record_that_a_delta_does_not_make_is_sent_whole,
    ),
    "a name may be in no stage": UnitMutant(
        ((coverage, "left_out", always(None)),), test_coverage.test_a_name_that_no_stage_has_is_found_by_every_rank
    ),
    "one rank that knows is enough": UnitMutant(
        ((coverage, "num_names", lambda sums: len(test_coverage.NAMES)),),
        test_coverage.test_nothing_is_judged_unless_a_rank_of_each_stage_knows,
    ),
    "the first layout is always in force": UnitMutant(
        ((next_record, "_layout_in_force", always(0)),),
        test_reshape.test_members_that_hold_all_parts_keep_them_for_a_layout_that_fewer_fill,
    ),
    "a layout is left while its ranks start": UnitMutant(
        ((next_record, "_layout_in_force", _in_force_whoever_starts),),
        test_reshape.test_the_layout_in_force_waits_for_ranks_that_are_being_started,
    ),
    "nobody keeps the parts of another layout": UnitMutant(
        ((next_record, "_kept", always(())),), test_reshape.test_a_layout_is_taken_again_once_members_fill_it
    ),
    "seats of another layout are given as to newcomers": UnitMutant(
        ((next_record, "_parts_kept", always({})),), test_reshape.test_members_sit_where_they_keep_the_most
    ),
    "a record names the checkpoint that is reported last": UnitMutant(
        ((next_record, "_saved", lambda record, reports, committed: recovery.newest_checkpoint(reports)),),
        test_recovery.test_a_record_names_the_newest_checkpoint_that_is_complete,
    ),
    "hosts that do not reach each other take part together": UnitMutant(
        ((next_record, "_cut_off", always({})),),
        test_left_out_hosts.test_the_members_of_a_host_that_the_others_do_not_reach_are_spares,
    ),
    "who comes first in turn is left out": UnitMutant(
        ((next_record, "find_cut_off", _leave_out_the_first),),
        test_left_out_hosts.test_two_hosts_that_do_not_reach_each_other_go_on_with_one,
    ),
    "a host is left out whom the others need": UnitMutant(
        ((next_record, "find_cut_off", _leave_out_anybody),),
        test_left_out_hosts.test_who_alone_holds_the_state_stays_although_it_reaches_the_fewest,
    ),
    "spares go on with a job that has finished": UnitMutant(
        ((NextDecision, "_has_seated", always(True)),),
        test_left_out_hosts.test_when_the_others_have_finished_no_record_follows_for_a_host_that_is_left_out,
    ),
    "a host that was left out stays out": UnitMutant(
        ((CoordinatorState, "_let_back", always([])),),
        test_left_out_hosts.test_a_host_comes_back_once_it_and_all_others_reach_each_other,
    ),
    "a record has any size": UnitMutant(
        ((next_record, "_too_large", always(None)),),
        with_monkeypatch(test_next_record.test_a_job_too_large_for_a_message_is_refused_as_a_whole),
    ),
    "one joiner too many costs all": UnitMutant(
        ((next_record, "math", SimpleNamespace(ceil=always(99))),),
        with_monkeypatch(test_next_record.test_joiners_for_whom_no_message_has_room_are_refused, "xde", "ex"),
    ),
    "a job goes back at once to what is here": UnitMutant(
        ((recovery, "_unread", always(None)),),
        test_recovery.test_a_job_waits_for_whoever_may_load_the_checkpoint_that_the_record_names,
    ),
    "state is whole in the layout in force alone": UnitMutant(
        ((recovery, "_whole_in", _whole_in_force),), test_reshape.test_kept_state_is_a_copy_until_the_move_is_over
    ),
    "parts of several layouts add up": UnitMutant(
        ((recovery, "_can_give", _can_give_in_any_layout),),
        test_reshape.test_parts_of_several_layouts_do_not_add_up,
    ),
    "holders keep nothing": UnitMutant(
        ((MemberState, "_kept", always(None)),),
        test_reshape.test_a_holder_keeps_its_state_until_a_later_commit_or_record,
    ),
    "spares are not relieved": UnitMutant(
        ((MemberState, "_have_spares_kept", always(False)),),
        test_reshape.test_a_spare_that_keeps_state_is_relieved_once_everybody_has_fetched,
    ),
    "the last holder leaves before another layout is taken": UnitMutant(
        ((MemberState, "_is_new", always(False)),),
        test_reshape.test_the_last_holder_stays_until_the_record_knows_that_it_drains,
    ),
    "successors end with a session": UnitMutant(
        ((KnownSuccessors, "lose_session", lambda self, now_s: self.hear(False)),),
        test_job_facts.test_an_agent_that_loses_its_session_counts_the_successors_that_it_knew_for_a_time,
    ),
    "facts outlive their agent": UnitMutant(
        ((GatheredFacts, "drop", always(None)),),
        test_job_facts.test_the_facts_of_a_member_outlive_its_session_until_it_is_lost,
    ),
    "an agent without a session has no successors": UnitMutant(
        ((GatheredFacts, "keep_successors", _keep_none),),
        test_job_facts.test_the_successors_of_an_agent_that_takes_no_part_yet_count_while_it_may_come_back,
    ),
    "an agent without a session has successors for ever": UnitMutant(
        ((CoordinatorState, "_absent_with_facts", always([])),),
        test_job_facts.test_the_successors_of_an_agent_that_takes_no_part_yet_count_while_it_may_come_back,
    ),
    "all facts outlive a session": UnitMutant(
        ((GatheredFacts, "keep_successors", always(None)),),
        test_job_facts.test_what_else_is_known_of_an_agent_that_takes_no_part_ends_with_its_session,
    ),
    "what is notified before a welcome is lost": UnitMutant(
        ((AgentSession, "_welcome", _welcome_without_notifications),),
        test_coordinator_state.test_what_an_agent_notifies_before_it_is_welcome_is_not_lost,
    ),
    "facts are told once": UnitMutant(
        ((AgentSession, "_connected", _connect_without_facts),),
        test_job_facts.test_an_agent_sends_its_facts_in_each_session,
    ),
    "an agent alone tells its facts": UnitMutant(
        ((AgentSession, "_tell_facts", _tell_all_facts),),
        test_job_facts.test_an_agent_that_takes_part_alone_tells_no_facts,
    ),
    "all failures of a step are told": UnitMutant(
        ((GatheredFacts, "_first_failures", _all_failures),),
        test_job_facts.test_of_a_step_the_first_two_failures_are_told,
    ),
    "the waits of each agent are told": UnitMutant(
        ((GatheredFacts, "_furthest_waits", _all_waits),),
        test_job_facts.test_of_members_that_wait_the_furthest_in_each_group_are_told,
    ),
    "waits are told at once": UnitMutant(
        ((GatheredFacts, "changed", _change_at_once),), test_job_facts.test_waits_are_told_on_a_tick_alone
    ),
}
