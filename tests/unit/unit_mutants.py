"""Rules that are not ours, in what the simulation does not drive: each with the unit test that shows what it breaks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from elasticgang.errors import GangError
from elasticgang.protocol import (
    device_errors,
    devices,
    hang_detector,
    member_lifecycle,
    member_state,
    next_record,
    record_delta,
    recovery,
    rendezvous_keys,
    restarts,
)
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.agent_events import Event, PeerNotice
from elasticgang.protocol.agent_lifecycle import AgentLifecycle
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.commit import Action, Attempt
from elasticgang.protocol.coordinator_messages import Ready
from elasticgang.protocol.coordinator_state import CoordinatorState
from elasticgang.protocol.devices import Devices, Fault, FaultOutcome
from elasticgang.protocol.hang_detector import BlockedOn, HangDetector, HangReport, Reading, Standstill
from elasticgang.protocol.member_instructions import Do
from elasticgang.protocol.member_lifecycle import MemberLifecycle, Routine
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import SPARE, CheckpointRef, MemberReport, Record, Report, Seat
from elasticgang.protocol.record_form import RecordForm, digest_of_line
from elasticgang.protocol.rendezvous_keys import Key, KeyExchange
from elasticgang.protocol.restarts import Failure, Restarts
from elasticgang.session import messages
from tests.unit import (
    coordinator_driver,
    test_agent_lifecycle,
    test_agent_state,
    test_agent_state_devices,
    test_agent_state_joins,
    test_coordinator_state,
    test_device_errors,
    test_devices,
    test_hang_detector,
    test_member_checkpoints,
    test_member_lifecycle,
    test_next_record,
    test_record_form,
    test_recovery,
    test_rendezvous_keys,
    test_reshape,
    test_restarts,
    test_session_wire,
)
from tests.unit.mutants import Patch


class UnitMutant(NamedTuple):
    """`shown_by`: raises while the rule is that of `patches`, and not while it is ours."""

    patches: tuple[Patch, ...]
    shown_by: Callable[[], None]


_decide = AgentLifecycle._decide
_peer_noticed = AgentState._peer_noticed
_coordinator_decides = CoordinatorState._decide
_end = CoordinatorState._end
_enter = MemberState.enter
_may_hold = recovery._may_hold
_beyond_max = next_record._surplus_agents
_from_text = Record.from_text
_head = Record.head
_detect = HangDetector.detect
_standstill = HangDetector.standstill
_failed = Restarts.failed
_faulted = Devices.faulted
_put = KeyExchange._put
_layout_in_force = next_record._layout_in_force
_can_give = recovery._can_give
_apply_delta = record_delta.apply_delta


# -- agents and coordinators


def _decide_without_waiting(self: AgentLifecycle, event: Event) -> Any:
    out = _decide(self, event)
    for delayed in self._delayed.values():
        delayed.at_s = min(delayed.at_s, self._now_s + delayed.delay_s)
    return out


def _noticed_of_any_generation(self: AgentState, event: PeerNotice) -> Any:
    return _peer_noticed(self, event if self.record is None else replace(event, generation=self.record.generation))


def _is_without_sessions(self: CoordinatorState) -> bool:
    return not (self.sessions or self._unlearned or self.is_deciding)


def _founds_again(self: CoordinatorState) -> Any:
    finished, self.finished = self.finished, False
    out = _coordinator_decides(self)
    self.finished = finished
    return out


def _beyond_max_whoever_holds(record: Record | None, reports: Sequence[Report], _: object) -> list[Report]:
    return _beyond_max(record, reports, {})


def _may_hold_but_spares(record: Record, absent: Sequence[Seat], model: Any) -> Any:
    return _may_hold(record, [seat for seat in absent if seat.status != SPARE], model)


def _action_by_step(tip: Attempt | None, pending: Attempt | None, committed: Attempt) -> Action:
    if tip is not None and tip.step == committed.step:
        return Action.KEEP
    return Action.APPLY if pending is not None and pending.step == committed.step else Action.HEAL


def _end_whatever(self: CoordinatorState, _: int, reason: str, source: int | None = None) -> Any:
    return _end(self, 0 if self.record is None else self.record.generation, reason, source)


def _saves_without_rounds(self: MemberLifecycle) -> Routine[None]:
    yield Do.SAVE_LAST
    self._has_saved = True


def _saves_blindly(self: MemberLifecycle) -> Routine[None]:
    with contextlib.suppress(GangError):
        yield Do.SAVE_LAST
        yield do.StartSum("root", (0.0, 0.0))
        yield Do.AWAIT_SUMS
        self._has_saved = True


# -- records


def _without_digest(checkpoint: CheckpointRef) -> recovery.CommittedState:
    return recovery.CommittedState(checkpoint.attempt, rolled_back=True)


def _enters_by_attempt(self: MemberState, record: Record, seat: Seat) -> None:
    _enter(self, replace(record, checkpoint=""), seat)


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


# -- layouts


def _in_force_whoever_starts(record: Record | None, reports: Sequence[Report], seatable: Any) -> Any:
    return _layout_in_force(record, [replace(report, num_starting=0) for report in reports], seatable)


def _whole_in_force(record: Record, members: Any, committed: Attempt) -> int | None:
    number = record.in_force
    return None if recovery._missing(record, members, committed, number) else number


def _can_give_in_any_layout(member: MemberReport, committed: Attempt, model: Any, _: int) -> bool:
    return any(_can_give(member, committed, model, number) for number in range(3))


def _keeps_nothing(*_: object) -> Routine[None]:
    yield from ()


# -- rendezvous keys


def _put_last(self: KeyExchange[Hashable], key: Key, party: Hashable) -> bool:
    self._keys.get(key.group, {}).pop(key.name, None)
    return _put(self, key, party)


def _take_for_all(self: KeyExchange[Hashable], party: Hashable, groups: Iterable[str], keys: Iterable[Key]) -> Any:
    for group in groups:
        self._parties.setdefault(group, {})[party] = None
    others = {other for joined in self._parties.values() for other in joined if other != party}
    new = [key for key in keys if self._put(key, party)]
    return {other: new for other in others if new}


# -- failures and hangs


def _failed_as_if_committed(self: Restarts, failure: Failure) -> str | None:
    self._have_committed.add(failure.local_rank)
    return _failed(self, failure)


def _failed_as_if_first(self: Restarts, failure: Failure) -> str | None:
    self._failed_early.discard(failure.local_rank)
    return _failed(self, failure)


def _failed_as_if_often_allowed(self: Restarts, failure: Failure) -> str | None:
    return _failed(replace(self, max_restarts=self.max_restarts and 1000), failure)


def _faulted_as_if_first(self: Devices, fault: Fault) -> FaultOutcome | None:
    self._faulted_at_s.clear()
    return _faulted(self, fault)


def _faulted_as_if_in_another_step(self: Devices, fault: Fault) -> FaultOutcome | None:
    return _faulted(self, replace(fault, step=None))


def _count_all_time(self: HangDetector, now_ms: int) -> None:
    self._clock_ms = now_ms


def _detect_in_pauses(
    self: HangDetector, now_ms: int, readings: Sequence[Reading], edges: Sequence[BlockedOn] = (), **given: bool
) -> list[HangReport]:
    return _detect(self, now_ms, [replace(reading, paused=False) for reading in readings], edges, **given)


def _standstill_at_every_look(self: HangDetector) -> Standstill | None:
    self._reported_ms = 0
    return _standstill(self)


def _with_host(test: Callable[[test_hang_detector.Host], None]) -> Callable[[], None]:
    def run() -> None:
        host = test_hang_detector.Host(*"abcd")
        host.steps(1, 200)
        test(host)

    return run


def _with_monkeypatch(test: Callable[[pytest.MonkeyPatch], None]) -> Callable[[], None]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            test(monkeypatch)

    return run


def _always(value: object) -> Callable[..., Any]:
    return lambda *_: value


UNIT_MUTANTS: dict[str, UnitMutant] = {
    "a restart waits for no survivor": UnitMutant(
        ((AgentLifecycle, "_decide", _decide_without_waiting),),
        test_agent_lifecycle.test_a_restart_waits_until_a_survivor_has_entered,
    ),
    "a restart always waits as long as it may": UnitMutant(
        ((AgentLifecycle, "_survivor_entered", _always(None)),),
        test_agent_lifecycle.test_a_restart_waits_until_a_survivor_has_entered,
    ),
    "a notice is about any generation": UnitMutant(
        ((AgentState, "_peer_noticed", _noticed_of_any_generation),),
        lambda: test_agent_state_joins.test_an_end_notice_about_another_generation_is_ignored(1),
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
    "an agent reports as another one": UnitMutant(
        ((CoordinatorState, "_not_its_own", _always(None)),),
        lambda: test_coordinator_state.test_an_agent_speaks_for_itself_alone(
            Ready(coordinator_driver.report("b")), is_closed=True
        ),
    ),
    "an end of any generation counts": UnitMutant(
        ((CoordinatorState, "_end", _end_whatever),),
        test_coordinator_state.test_only_members_end_a_generation_and_only_the_present_one,
    ),
    "a finished job fails for a rank in doubt": UnitMutant(
        ((AgentState, "_part_of", _always(None)),),
        test_agent_state.test_a_rank_in_doubt_is_retired_when_another_has_finished_with_its_part,
    ),
    "joiners go on alone": UnitMutant(
        ((CoordinatorState, "_is_alone", _always(False)),),
        test_coordinator_state.test_joiners_with_a_checkpoint_do_not_go_on_alone,
    ),
    "lost agents come back as they are": UnitMutant(
        ((CoordinatorState, "_is_ancestor", staticmethod(_always(True))),),
        test_coordinator_state.test_a_lost_agent_with_an_ancestor_of_the_record_may_come_back_and_another_is_evicted,
    ),
    "chains are told apart by number": UnitMutant(
        ((Record, "builds_on", _always(True)),),
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
        ((recovery, "_absent", _always([])),), test_recovery.test_missing_state_is_waited_for
    ),
    "spares are not waited for": UnitMutant(
        ((recovery, "_may_hold", _may_hold_but_spares),), test_recovery.test_a_spare_may_hold_the_missing_state
    ),
    "no witness is needed": UnitMutant(
        ((next_record, "without_witness", _always(None)),), test_next_record.test_a_torn_member_is_no_witness
    ),
    "a checkpoint is not loaded": UnitMutant(
        ((MemberLifecycle, "_loads", False),),
        test_member_checkpoints.test_a_rank_loads_the_checkpoint_before_its_first_step,
    ),
    "a rank leaves while others save the final state": UnitMutant(
        ((MemberLifecycle, "_save_last", _saves_without_rounds),),
        test_member_checkpoints.test_a_rank_leaves_once_no_rank_writes_the_final_state_any_more,
    ),
    "a final save that has failed is not repeated": UnitMutant(
        ((MemberLifecycle, "_save_last", _saves_without_rounds),),
        test_member_checkpoints.test_a_death_during_the_final_save_is_followed_by_another_one,
    ),
    "a rank does not look for the saved final state": UnitMutant(
        ((MemberLifecycle, "_save_last", _saves_blindly),),
        test_member_checkpoints.test_a_rank_leaves_that_finds_the_final_state_saved_when_its_generation_ends,
    ),
    "a job begins without its checkpoint": UnitMutant(
        ((recovery, "_checkpoint", _always(None)),),
        test_recovery.test_a_job_begins_with_the_newest_checkpoint_that_an_agent_can_load,
    ),
    "state in memory counts as the checkpoint's": UnitMutant(
        ((recovery.CommittedState, "of", staticmethod(_without_digest)),),
        test_recovery.test_state_in_memory_is_no_holder_of_a_checkpoint_of_the_same_attempt,
    ),
    "a rank keeps its state beside the checkpoint": UnitMutant(
        ((MemberState, "enter", _enters_by_attempt),),
        lambda: test_member_checkpoints.test_state_of_the_same_attempt_is_dropped_for_the_checkpoint(SPARE),
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
    "the first layout is always in force": UnitMutant(
        ((next_record, "_layout_in_force", _always(0)),),
        test_reshape.test_members_that_hold_all_parts_keep_them_for_a_layout_that_fewer_fill,
    ),
    "a layout is left while its ranks start": UnitMutant(
        ((next_record, "_layout_in_force", _in_force_whoever_starts),),
        test_reshape.test_the_layout_in_force_waits_for_ranks_that_are_being_started,
    ),
    "nobody keeps the parts of another layout": UnitMutant(
        ((next_record, "_kept", _always(())),), test_reshape.test_a_layout_is_taken_again_once_members_fill_it
    ),
    "state is whole in the layout in force alone": UnitMutant(
        ((recovery, "_whole_in", _whole_in_force),), test_reshape.test_kept_state_is_a_copy_until_the_move_is_over
    ),
    "parts of several layouts add up": UnitMutant(
        ((recovery, "_can_give", _can_give_in_any_layout),),
        test_reshape.test_parts_of_several_layouts_do_not_add_up,
    ),
    "holders keep nothing": UnitMutant(
        ((MemberState, "_kept", _always(None)),),
        test_reshape.test_a_holder_keeps_its_state_until_a_later_commit_or_record,
    ),
    "spares are not relieved": UnitMutant(
        ((MemberState, "_have_spares_kept", _always(False)),),
        test_reshape.test_a_spare_that_keeps_state_is_relieved_once_everybody_has_fetched,
    ),
    "the last holder leaves before another layout is taken": UnitMutant(
        ((MemberState, "_is_new", _always(False)),),
        test_reshape.test_the_last_holder_stays_until_the_record_knows_that_it_drains,
    ),
    "other state is built over the kept one": UnitMutant(
        ((MemberLifecycle, "_keep_former", _keeps_nothing),),
        test_reshape.test_a_rank_keeps_its_state_before_it_builds_another_and_fetches_that,
    ),
    "state of another layout is not fetched": UnitMutant(
        ((MemberLifecycle, "_loads", False),),
        test_reshape.test_a_rank_that_cannot_fetch_ends_the_generation,
    ),
    "no layout waits for ranks that start": UnitMutant(
        ((AgentState, "num_starting", 0),),
        test_reshape.test_a_report_says_how_many_ranks_are_being_started_until_they_are_late,
    ),
    "ranks that start are never late": UnitMutant(
        ((AgentLifecycle, "_awaits_starts", False),),
        test_reshape.test_ranks_that_are_being_started_are_late_after_the_start_timeout,
    ),
    "the last value of a key stays": UnitMutant(
        ((KeyExchange, "_put", _put_last),), test_rendezvous_keys.test_the_first_value_stays
    ),
    "keys are sent to all": UnitMutant(
        ((KeyExchange, "take", _take_for_all),),
        test_rendezvous_keys.test_a_party_gets_the_keys_of_its_groups_alone,
    ),
    "a key has any length": UnitMutant(
        ((rendezvous_keys, "MAX_VALUE_CHARS", math.inf),),
        _with_monkeypatch(test_rendezvous_keys.test_what_an_exchange_holds_is_bounded),
    ),
    "a script that never worked is tried again": UnitMutant(
        ((Restarts, "failed", _failed_as_if_committed),),
        lambda: test_restarts.test_restart_1_a_rank_that_has_committed_nothing_ends_the_job(5),
    ),
    "a step may fail twice": UnitMutant(
        ((Restarts, "_add", _always(None)),),
        test_restarts.test_restart_2_a_step_that_fails_on_another_rank_ends_the_job_however_late,
    ),
    "a rank may fail before its first step again": UnitMutant(
        ((Restarts, "failed", _failed_as_if_first),),
        test_restarts.test_restart_3_a_restarted_rank_that_cannot_begin_a_step_ends_the_job,
    ),
    "restarts are not counted": UnitMutant(
        ((Restarts, "failed", _failed_as_if_often_allowed),),
        lambda: test_restarts.test_restart_4_each_rank_has_restarts_of_its_own(2),
    ),
    "failures count for ever": UnitMutant(
        ((restarts, "WINDOW_S", math.inf),),
        test_restarts.test_restart_4_failures_of_more_than_an_hour_ago_do_not_count,
    ),
    "every CUDA error is a fault of the device": UnitMutant(
        ((device_errors, "_FAULTS", ("",)),),
        lambda: test_device_errors.test_other_errors_are_the_scripts_own_or_a_lost_peers(
            RuntimeError("CUDA error: out of memory")
        ),
    ),
    "a fault of the device is an error of the script": UnitMutant(
        ((device_errors, "_FAULTS", ()),),
        lambda: test_device_errors.test_errors_after_which_a_process_cannot_use_its_device(
            RuntimeError, test_device_errors.ILLEGAL
        ),
    ),
    "faults of a device are not counted": UnitMutant(
        ((Devices, "faulted", _faulted_as_if_first),),
        lambda: test_devices.test_device_1_a_rank_starts_on_its_device_again_so_often(1),
    ),
    "faults of a device count for ever": UnitMutant(
        ((devices, "WINDOW_S", math.inf),),
        test_devices.test_device_1_faults_of_more_than_an_hour_ago_do_not_count,
    ),
    "a rank starts on a quarantined device": UnitMutant(
        ((Devices, "of", lambda _, local_rank: local_rank),),
        lambda: test_devices.test_device_2_without_a_spare_device_the_rank_has_none((0, 1)),
    ),
    "a rank without a device is started after a rejoin": UnitMutant(
        ((AgentLifecycle, "device_of", _always(0)),),
        test_agent_state_devices.test_a_rank_without_a_device_is_not_started_after_a_rejoin,
    ),
    "a step may fault on every device": UnitMutant(
        ((Devices, "faulted", _faulted_as_if_in_another_step),),
        test_devices.test_device_3_a_step_that_faults_on_another_device_in_a_later_generation_is_the_scripts_fault,
    ),
    "a fault of the device is dropped with a lost step": UnitMutant(
        ((member_lifecycle, "device_fault", _always(None)),),
        lambda: test_member_lifecycle.test_a_fault_of_the_device_is_not_dropped_with_a_lost_step(True),
    ),
    "a rank that is blocked may hang": UnitMutant(
        ((HangDetector, "_is_excused", _always(False)),),
        _with_host(test_hang_detector.test_ranks_blocked_on_each_other_do_not_hang),
    ),
    "every edge blocks every rank": UnitMutant(
        ((HangDetector, "_blocks", _always(True)),),
        _with_host(test_hang_detector.test_an_edge_of_another_generation_or_group_does_not_count),
    ),
    "nobody is blocked in a collective": UnitMutant(
        ((hang_detector, "_blocked_on", _always(())),),
        _with_host(test_hang_detector.test_the_rank_at_the_end_of_a_chain_of_waits_hangs),
    ),
    "the agent's own standstill counts": UnitMutant(
        ((HangDetector, "_advance", _count_all_time),),
        _with_host(test_hang_detector.test_time_in_which_the_agent_did_not_run_is_no_standstill),
    ),
    "paused time counts": UnitMutant(
        ((HangDetector, "detect", _detect_in_pauses),),
        _with_host(test_hang_detector.test_paused_time_does_not_count),
    ),
    "a hung comm process costs its rank": UnitMutant(
        ((HangDetector, "_check_comm", _always(None)),),
        _with_host(test_hang_detector.test_a_hung_comm_process_is_killed_alone),
    ),
    "a standstill is reported at every look": UnitMutant(
        ((HangDetector, "standstill", _standstill_at_every_look),),
        _with_host(test_hang_detector.test_a_standstill_of_all_in_their_own_code_is_reported_at_growing_intervals),
    ),
}
