"""Rules of members that are not ours, each with the unit test that shows what it breaks.

They are about checkpoints, the state that moves, rendezvous keys, routes of sums, positions of samples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

from elasticgang.errors import GangError
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol import (
    member_lifecycle,
    packed_counts,
    recovery,
    rendezvous_keys,
    sum_route,
)
from elasticgang.protocol.member_instructions import Do
from elasticgang.protocol.member_lifecycle import MemberLifecycle, Routine
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import SPARE, CheckpointRef, Record, Seat
from elasticgang.protocol.rendezvous_keys import Asked, Key, KeyExchange
from elasticgang.protocol.sample_positions import BatchShape, SamplePositions
from elasticgang.protocol.sum_route import SumRoute
from tests.unit import (
    test_member_checkpoints,
    test_member_lifecycle,
    test_packed_counts,
    test_recovery,
    test_rendezvous_keys,
    test_reshape,
    test_sample_positions,
    test_sum_route,
)
from tests.unit.patches import always, with_monkeypatch
from tests.unit.unit_mutant import UnitMutant

_enter = MemberState.enter
_ask = KeyExchange._ask
_put = KeyExchange._put
_take = KeyExchange.take
_sum_route = sum_route.sum_route


def _all_exchange(record: Record, rank: int) -> SumRoute:
    return _sum_route(record, rank)._replace(firsts=tuple(range(record.plan.size)))


def _own_host_is_left_out(record: Record, rank: int) -> SumRoute:
    route = _sum_route(record, rank)
    return route._replace(firsts=tuple(first for first in route.firsts if first not in route.local))


def _shared_by_host(record: Record, rank: int) -> SumRoute:
    seats = tuple(seat._replace(agent=seat.host) for seat in record.seats)
    return _sum_route(replace(record, seats=seats, agents=tuple(dict.fromkeys(seat.agent for seat in seats))), rank)


def _as_one_size(self: SamplePositions, step: int, shape: BatchShape) -> int:
    return step * shape.size


def _saves_without_rounds(self: MemberLifecycle) -> Routine[None]:
    yield Do.SAVE_LAST
    self._has_saved = True


def _saves_blindly(self: MemberLifecycle) -> Routine[None]:
    with contextlib.suppress(GangError):
        yield Do.SAVE_LAST
        yield do.StartSum("save", (0.0, 0.0))
        yield Do.AWAIT_SUMS
        self._has_saved = True


def _counts_steps_alone(self: MemberLifecycle) -> bool:
    return self._num_lost >= self.max_lost_steps


def _gives_up_as_any(self: MemberLifecycle) -> bool:
    return self._num_lost + self._num_not_entered >= self.max_lost_steps


def _was_slow(self: MemberLifecycle) -> bool:
    return self.observed.connecting_s >= member_lifecycle.LATE_S


def _without_digest(checkpoint: CheckpointRef) -> recovery.CommittedState:
    return recovery.CommittedState(checkpoint.attempt, rolled_back=True)


def _enters_by_attempt(self: MemberState, record: Record, seat: Seat) -> None:
    _enter(self, replace(record, checkpoint=""), seat)


def _keeps_nothing(*_: object) -> Routine[None]:
    yield from ()


def _put_last(self: KeyExchange[Hashable], key: Key, party: Hashable) -> bool:
    self._keys.get(key.group, {}).pop(key.name, None)
    return _put(self, key, party)


def _take_for_all(
    self: KeyExchange[Hashable],
    party: Hashable,
    groups: Iterable[str],
    keys: Iterable[Key],
    asked: Iterable[Asked] = (),
) -> Any:
    for group in groups:
        self._parties.setdefault(group, {})[party] = None
    others = {other for joined in self._parties.values() for other in joined if other != party}
    new = [key for key in keys if self._put(key, party)]
    return {other: new for other in others if new}


def _ask_for_all(self: KeyExchange[Hashable], party: Hashable, group: str, name: str) -> list[Key]:
    _ask(self, party, group, name)
    return [key for key, source in self._keys.get(group, {}).values() if source != party]


def _take_each_question(
    self: KeyExchange[Hashable],
    party: Hashable,
    groups: Iterable[str] = (),
    keys: Iterable[Key] = (),
    asked: Iterable[Asked] = (),
) -> Any:
    found = _take(self, party, groups, keys, asked)
    again = [key for each in asked for key in _take(self, party, asked=[each]).get(party, [])]
    return {**found, party: again} if again else found


MEMBER_MUTANTS = {
    "a script goes on in the generation in which an exception has left a step": UnitMutant(
        ((MemberLifecycle, "_end_left_step", _keeps_nothing),),
        lambda: test_member_lifecycle.test_a_script_that_goes_on_after_an_exception_has_left_a_step_ends_the_generation(
            False
        ),
    ),
    "numbers of other names are added": UnitMutant(
        ((member_lifecycle, "_check_names", always(None)),),
        test_member_lifecycle.test_other_names_of_numbers_are_an_error_before_anything_is_prepared,
    ),
    "generations that are not connected do not count": UnitMutant(
        ((MemberLifecycle, "_gives_up", property(_counts_steps_alone)),),
        test_member_lifecycle.test_it_gives_up_when_too_many_generations_in_a_row_are_not_connected,
    ),
    "a rank without state costs the others as many generations as any": UnitMutant(
        ((MemberLifecycle, "_gives_up", property(_gives_up_as_any)),),
        test_member_lifecycle.test_a_rank_without_state_gives_up_sooner_on_generations_that_are_not_connected,
    ),
    "what other hosts end counts for a rank without state": UnitMutant(
        ((do.Observed, "ended_elsewhere", property(always(False))),),
        test_member_lifecycle.test_a_rank_without_state_does_not_give_up_on_what_other_hosts_end,
    ),
    "a rank that has fewer steps than its peers ends their generations": UnitMutant(
        ((MemberLifecycle, "_is_past_end", always(False)),),
        test_member_lifecycle.test_a_rank_whose_script_takes_fewer_steps_than_the_job_has_ends_alone,
    ),
    "a generation that was not connected is requested again at once": UnitMutant(
        ((member_lifecycle, "_NUM_AT_ONCE", math.inf),),
        test_member_lifecycle.test_it_waits_before_it_requests_after_some_generations_that_were_not_connected,
    ),
    "a generation that takes long to be not connected counts as a quick one": UnitMutant(
        ((member_lifecycle, "LATE_S", math.inf),),
        test_member_lifecycle.test_generations_that_take_long_to_be_not_connected_count_for_several,
    ),
    "a generation that ends by a short time limit counts as a quick one": UnitMutant(
        ((MemberLifecycle, "_was_late", property(_was_slow)),),
        test_member_lifecycle.test_generations_that_end_by_the_time_limit_count_for_several_however_short_it_is,
    ),
    "a rank whose heals get no further tries again for ever": UnitMutant(
        ((member_lifecycle, "MAX_STUCK_S", math.inf),),
        test_member_lifecycle.test_a_rank_ends_when_the_others_have_waited_for_long_for_heals_that_got_no_further,
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
    "the last holders leave without a save": UnitMutant(
        ((MemberLifecycle, "_saves_before_loss", property(always(False))),),
        test_member_checkpoints.test_the_state_is_saved_before_the_last_that_hold_it_leave,
    ),
    "a job begins without its checkpoint": UnitMutant(
        ((recovery, "newest_checkpoint", always(None)),),
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
    "other state is built over the kept one": UnitMutant(
        ((MemberLifecycle, "_keep_former", _keeps_nothing),),
        test_reshape.test_a_rank_keeps_its_state_before_it_builds_another_and_fetches_that,
    ),
    "state of another layout is not fetched": UnitMutant(
        ((MemberLifecycle, "_loads", False),),
        test_reshape.test_a_rank_that_cannot_fetch_ends_the_generation,
    ),
    "the last value of a key stays": UnitMutant(
        ((KeyExchange, "_put", _put_last),), test_rendezvous_keys.test_the_first_value_stays
    ),
    "keys are sent to all": UnitMutant(
        ((KeyExchange, "take", _take_for_all),),
        test_rendezvous_keys.test_a_party_gets_the_keys_of_its_groups_alone,
    ),
    "who asks for a key gets those of its group": UnitMutant(
        ((KeyExchange, "_ask", _ask_for_all),),
        test_rendezvous_keys.test_a_party_gets_the_keys_that_it_has_asked_for_alone,
    ),
    "a key that comes later is not sent to who has asked for it": UnitMutant(
        ((KeyExchange, "_answer", always(())),),
        test_rendezvous_keys.test_a_party_gets_the_keys_that_it_has_asked_for_alone,
    ),
    "who has left waits for a key": UnitMutant(
        ((KeyExchange, "_stop_asking", always(None)),),
        test_rendezvous_keys.test_a_party_that_leaves_waits_for_no_key,
    ),
    "each question is answered": UnitMutant(
        ((KeyExchange, "take", _take_each_question),),
        test_rendezvous_keys.test_a_key_is_sent_once_for_each_message_that_asks_for_it,
    ),
    "any number of keys is waited for": UnitMutant(
        ((rendezvous_keys, "MAX_ASKED", math.inf),),
        with_monkeypatch(test_rendezvous_keys.test_what_an_exchange_holds_is_bounded),
    ),
    "a key has any length": UnitMutant(
        ((rendezvous_keys, "MAX_VALUE_CHARS", math.inf),),
        with_monkeypatch(test_rendezvous_keys.test_what_an_exchange_holds_is_bounded),
    ),
    "every rank exchanges the sums of its host": UnitMutant(
        ((sum_route, "sum_route", _all_exchange),), test_sum_route.test_the_numbers_of_every_rank_are_in_the_sum_once
    ),
    "a host's sums are exchanged by nobody": UnitMutant(
        ((sum_route, "sum_route", _own_host_is_left_out),),
        test_sum_route.test_the_numbers_of_every_rank_are_in_the_sum_once,
    ),
    "agents of one host share memory": UnitMutant(
        ((sum_route, "sum_route", _shared_by_host),), test_sum_route.test_two_agents_of_one_host_share_no_memory
    ),
    "a count runs over into the next one": UnitMutant(
        ((packed_counts, "_base", always(4)),),
        lambda: test_packed_counts.test_the_sum_of_packed_counts_has_the_sums_of_all_counts(5, 4),
    ),
    "more counts share a number than it holds exactly": UnitMutant(
        ((packed_counts, "_num_each", always(64)),),
        lambda: test_packed_counts.test_the_sum_of_packed_counts_has_the_sums_of_all_counts(200, 1),
    ),
    "all steps take the same number of samples": UnitMutant(
        ((SamplePositions, "take", _as_one_size),),
        lambda: test_sample_positions.test_a_job_that_is_resumed_with_another_size_goes_on_where_the_samples_were(8),
    ),
    "any number of samples goes on": UnitMutant(
        ((SamplePositions, "_resume", always(48)),),
        test_sample_positions.test_a_job_is_not_resumed_with_another_number_of_samples_of_one_seed,
    ),
    "a rank heals with any global batch": UnitMutant(
        ((SamplePositions, "_check_healed", always(None)),),
        lambda: test_sample_positions.test_a_rank_that_heals_with_another_global_batch_takes_no_samples(
            test_sample_positions.shape(size=8)
        ),
    ),
}
