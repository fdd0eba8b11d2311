"""Rules of agents that are not ours, each with the unit test that shows what it breaks.

They are about starts and restarts, devices, failures of scripts, ranks that differ, hangs.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from elasticgang.protocol import (
    agent_lifecycle,
    agent_state,
    device_errors,
    devices,
    form,
    hang_detector,
    member_lifecycle,
    reach,
    restarts,
    stop_request,
)
from elasticgang.protocol.agent_events import Committed, Event, Fail, PeerNotice, Restart
from elasticgang.protocol.agent_lifecycle import AgentLifecycle
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.devices import Devices, Fault, FaultOutcome, Taken
from elasticgang.protocol.hang_detector import BlockedOn, HangDetector, HangReport, Reading, Standstill
from elasticgang.protocol.restarts import Failure, Restarts
from tests.unit import (
    test_agent_lifecycle,
    test_agent_state,
    test_agent_state_devices,
    test_agent_state_exits,
    test_agent_state_joins,
    test_coordinator_state,
    test_device_errors,
    test_devices,
    test_form,
    test_hang_detector,
    test_member_lifecycle,
    test_reach,
    test_reshape,
    test_restarts,
)
from tests.unit.agent_hosts import LAYOUT
from tests.unit.patches import always
from tests.unit.unit_mutant import UnitMutant

_decide = AgentLifecycle._decide
_survivor_committed = AgentLifecycle._survivor_committed
_peer_noticed = AgentState._peer_noticed
_backoff = AgentState._backoff
_detect = HangDetector.detect
_standstill = HangDetector.standstill
_failed = Restarts.failed
_faulted = Devices.faulted
_fence = AgentSession._fence


def _backoff_of_unseated(self: AgentState, rank: Any, now_s: float) -> float:
    return 0.0 if rank.generation else _backoff(self, rank, now_s)


def _fence_for_the_lease_alone(self: AgentSession, reason: str, over: str) -> Any:
    return _fence(self, reason, over) if "lease" in over else []


def _decide_without_waiting(self: AgentLifecycle, event: Event) -> Any:
    out = _decide(self, event)
    for delayed in self._delayed.values():
        delayed.at_s = min(delayed.at_s, self._now_s + delayed.delay_s)
    return out


def _committed_in_any_generation(self: AgentLifecycle, event: Committed) -> None:
    if self.state.record is not None:
        attempt = Attempt(event.attempt.step, self.state.record.generation)
        _survivor_committed(self, replace(event, attempt=attempt))


def _noticed_of_any_generation(self: AgentState, event: PeerNotice) -> Any:
    return _peer_noticed(self, event if self.record is None else replace(event, generation=self.record.generation))


def _failed_as_if_committed(self: Restarts, failure: Failure) -> str | None:
    self._have_committed.add(failure.local_rank)
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


AGENT_MUTANTS = {
    "a rank that dies in each of its first steps is restarted at once": UnitMutant(
        ((AgentState, "_backoff", _backoff_of_unseated),),
        test_agent_state_exits.test_a_rank_that_dies_in_each_of_its_first_steps_is_restarted_later,
    ),
    "early deaths are never forgotten": UnitMutant(
        ((agent_state, "WINDOW_S", math.inf),),
        test_agent_state_exits.test_early_deaths_of_more_than_an_hour_ago_do_not_delay_a_restart,
    ),
    "a firewall is blamed for what something else has ended": UnitMutant(
        ((AgentState, "_note_cause", always(None)),),
        lambda: test_reach.test_generations_that_something_else_has_ended_do_not_count_as_unconnected(""),
    ),
    "sigterm that every process gets stops the ranks": UnitMutant(
        ((stop_request, "REPEATED_S", 0.0),),
        test_agent_lifecycle.test_sigterm_that_every_process_gets_is_one_request_to_leave,
    ),
    "ranks stay at an address that is lost": UnitMutant(
        ((AgentSession, "_fence", _fence_for_the_lease_alone),),
        test_coordinator_state.test_the_loss_of_the_host_s_address_kills_the_ranks_and_ends_the_generation_at_once,
    ),
    "an agent reports before it knows which hosts it reaches": UnitMutant(
        ((AgentState, "_try_all_hosts", always([])),),
        test_reach.test_an_agent_reports_only_once_it_knows_which_hosts_it_reaches,
    ),
    "a host is reached as soon as it answers": UnitMutant(
        ((reach, "SETTLE_S", 0.0),),
        test_reach.test_a_path_that_comes_and_goes_counts_only_once_it_lasts_and_ever_later,
    ),
    "a restart waits for no survivor": UnitMutant(
        ((AgentLifecycle, "_decide", _decide_without_waiting),),
        test_agent_lifecycle.test_a_restart_waits_until_a_survivor_has_entered,
    ),
    "a restart always waits as long as it may": UnitMutant(
        ((AgentLifecycle, "_survivor_entered", always(None)),),
        test_agent_lifecycle.test_a_restart_waits_until_a_survivor_has_entered,
    ),
    "a restart takes the cores of the first commit": UnitMutant(
        ((agent_lifecycle, "COMMIT_TIMEOUT_S", 0.0),),
        test_agent_lifecycle.test_a_restart_waits_for_the_first_commit_of_the_next_generation,
    ),
    "a commit of any generation starts a rank": UnitMutant(
        ((AgentLifecycle, "_survivor_committed", _committed_in_any_generation),),
        test_agent_lifecycle.test_a_restart_waits_for_the_first_commit_of_the_next_generation,
    ),
    "a notice is about any generation": UnitMutant(
        ((AgentState, "_peer_noticed", _noticed_of_any_generation),),
        lambda: test_agent_state_joins.test_an_end_notice_about_another_generation_is_ignored(1),
    ),
    "a finished job fails for a rank in doubt": UnitMutant(
        ((AgentState, "_part_of", always(None)),),
        test_agent_state.test_a_rank_in_doubt_is_retired_when_another_has_finished_with_its_part,
    ),
    "a kill after the last step is nothing": UnitMutant(
        ((AgentState, "_killed_at_end", always([])),),
        lambda: test_agent_state_exits.test_a_rank_that_is_killed_after_its_last_step_is_told_of_and_no_other_is_ended(
            signal.SIGKILL
        ),
    ),
    "a lost state ends ranks that have left their loop": UnitMutant(
        ((AgentState, "_lose_state", lambda _, reason: [Fail(1, reason)]),),
        test_agent_state.test_a_lost_state_ends_no_rank_that_has_left_its_loop,
    ),
    "a rank that differs ends the others": UnitMutant(
        ((AgentState, "_refuse", lambda self, member, rank, what: [Fail(2, what)]),),
        lambda: test_agent_state.test_a_rank_that_comes_back_with_other_settings_is_refused_alone(
            test_agent_state.OF_MORE, LAYOUT, "loops over 200 steps, but the other ranks over 10"
        ),
    ),
    "a rank that differs is restarted": UnitMutant(
        ((AgentState, "_go_on_without", lambda self, rank, is_known: [Restart(rank.local_rank, 0.0)]),),
        test_agent_state.test_a_rank_whose_state_is_of_another_form_is_refused_alone,
    ),
    "what a rank cannot say differs": UnitMutant(
        ((form, "difference", lambda own, other: None if sorted(own) == sorted(other) else "an item"),),
        test_form.test_what_one_rank_cannot_say_is_no_difference,
    ),
    "the order of a form counts": UnitMutant(
        ((form, "difference", lambda own, other: None if own == other else "the order"),),
        test_form.test_the_order_of_the_items_does_not_count,
    ),
    "no layout waits for ranks that start": UnitMutant(
        ((AgentState, "num_starting", 0),),
        test_reshape.test_a_report_says_how_many_ranks_are_being_started_until_they_are_late,
    ),
    "a rank that raises is not waited for": UnitMutant(
        ((agent_state._Rank, "restarts", property(lambda rank: rank.phase is agent_state._Phase.EXITING)),),
        test_reshape.test_a_rank_whose_loop_an_exception_has_left_is_waited_for_before_it_has_exited,
    ),
    "ranks that start are never late": UnitMutant(
        ((AgentLifecycle, "_awaits_starts", False),),
        test_reshape.test_ranks_that_are_being_started_are_late_after_the_start_timeout,
    ),
    "a signal stops no start": UnitMutant(
        ((AgentState, "_has_stopped_starts", property(always(False), always(None))),),
        lambda: test_reshape.test_a_layout_waits_for_no_restart_that_a_signal_has_dropped(False),
    ),
    "a script that never worked is tried again": UnitMutant(
        ((Restarts, "failed", _failed_as_if_committed),),
        lambda: test_restarts.test_restart_1_a_rank_that_has_committed_nothing_ends_the_job(5),
    ),
    "a step may fail twice": UnitMutant(
        ((Restarts, "_add", always(None)),),
        test_restarts.test_restart_2_a_step_that_fails_on_another_rank_ends_the_job_however_late,
    ),
    "a rank may fail before its first step again": UnitMutant(
        ((Restarts, "gives_up", lambda self, failure: False),),
        test_restarts.test_restart_3_a_restarted_rank_that_cannot_begin_a_step_is_given_up,
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
        ((AgentLifecycle, "device_of", always(0)),),
        test_agent_state_devices.test_a_rank_without_a_device_is_not_started_after_a_rejoin,
    ),
    "faults count for the agent's index": UnitMutant(
        ((Taken, "uuid", property(always(""), lambda taken, uuid: None)),),
        test_devices.test_device_4_faults_count_for_the_uuid_whatever_rank_or_index_has_it,
    ),
    "a rank that chooses its device is moved": UnitMutant(
        ((Taken, "is_chosen", property(always(False), lambda taken, is_chosen: None)),),
        test_devices.test_device_4_a_rank_that_chooses_its_device_is_not_moved,
    ),
    "a rank that drains takes a spare device": UnitMutant(
        ((Fault, "restarts", property(always(True), lambda fault, restarts: None)),),
        test_devices.test_device_2_a_rank_that_does_not_start_again_takes_no_spare_device,
    ),
    "ranks that do not leave are killed without a word": UnitMutant(
        ((AgentLifecycle, "_say_late", always([])),),
        test_agent_lifecycle.test_one_line_tells_of_ranks_that_drain_and_do_not_leave,
    ),
    "a used device holds up other starts": UnitMutant(
        ((AgentLifecycle, "_device_used", always([])),),
        test_agent_lifecycle.test_a_rank_whose_device_is_used_lets_the_others_start,
    ),
    "a step may fault on every device": UnitMutant(
        ((Devices, "faulted", _faulted_as_if_in_another_step),),
        test_devices.test_device_3_a_step_that_faults_on_another_device_in_a_later_generation_is_the_scripts_fault,
    ),
    "a fault of the device is dropped with a lost step": UnitMutant(
        ((member_lifecycle, "device_fault", always(None)),),
        lambda: test_member_lifecycle.test_a_fault_of_the_device_is_not_dropped_with_a_lost_step(True),
    ),
    "a rank that is blocked may hang": UnitMutant(
        ((HangDetector, "_is_excused", always(False)),),
        _with_host(test_hang_detector.test_ranks_blocked_on_each_other_do_not_hang),
    ),
    "every edge blocks every rank": UnitMutant(
        ((HangDetector, "_blocks", always(True)),),
        _with_host(test_hang_detector.test_an_edge_of_another_generation_or_group_does_not_count),
    ),
    "nobody is blocked in a collective": UnitMutant(
        ((hang_detector, "_blocked_on", always(())),),
        _with_host(test_hang_detector.test_the_rank_at_the_end_of_a_chain_of_waits_hangs),
    ),
    "a rank that goes on is killed once it was found to hang": UnitMutant(
        ((hang_detector, "_sign", always(0)),),
        test_hang_detector.test_a_member_goes_on_once_it_acts_pauses_or_leaves_but_not_by_its_pulse_alone,
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
        ((HangDetector, "_check_comm", always(None)),),
        _with_host(test_hang_detector.test_a_hung_comm_process_is_killed_alone),
    ),
    "a standstill is reported at every look": UnitMutant(
        ((HangDetector, "standstill", _standstill_at_every_look),),
        _with_host(test_hang_detector.test_a_standstill_of_all_in_their_own_code_is_reported_at_growing_intervals),
    ),
}
