"""Rules that are not ours for the comparison of states, each with the unit test that shows what it breaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from elasticgang.protocol import member_instructions as do
from elasticgang.protocol import state_comparison
from elasticgang.protocol.agent_events import Fail, StateDiffers, Warn
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.member_instructions import Do
from elasticgang.protocol.member_lifecycle import MemberLifecycle, Next, Routine
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import Record
from elasticgang.protocol.restarts import Failure, Restarts
from elasticgang.protocol.state_comparison import Finding, StateComparison
from tests.unit import test_agent_state_exits, test_restarts, test_state_comparison
from tests.unit.patches import always
from tests.unit.unit_mutant import UnitMutant

_find, _compare, _compare_parts = state_comparison.find, StateComparison.compare, StateComparison._compare
_text, _pass_boundary, _failed = StateComparison._text, MemberLifecycle.pass_boundary, Restarts.failed


def _compare_but_for_saves(self: StateComparison, num_steps: int) -> Routine[None]:
    routine, outcome = _compare(self, num_steps), None
    while (instruction := routine.send(outcome)) is not Do.IS_SAVE_DUE:
        outcome = yield instruction


def _compare_but_for_the_last(self: StateComparison, _: int) -> Routine[None]:
    yield from _compare(self, 1 << 40)


def _as_one_part(sums: Sequence[float], parts: Sequence[Sequence[int]]) -> list[Finding]:
    return _find(sums, [[rank for part in parts for rank in part]])


def _compare_until_a_sum_fails(self: StateComparison, parts: Sequence[Sequence[str]]) -> Routine[bool]:
    routine, outcome = _compare_parts(self, parts), None
    while True:
        outcome = yield routine.send(outcome)  # no error is thrown in


def _compare_and_go_on(self: StateComparison, parts: Sequence[Sequence[str]]) -> Routine[bool]:
    routine, outcome = _compare_parts(self, parts), None
    while not isinstance(instruction := routine.send(outcome), do.Poison):
        outcome = yield instruction
    return True


def _text_for_all(self: StateComparison, finding: Finding, record: Record, where: str) -> str:
    self._alike = self._alike[0] or 1, frozenset(record.plan.ranks)
    return _text(self, finding, record, where)


def _leave_first(self: MemberLifecycle, num_steps: int) -> Routine[Next]:
    if self.at_boundary(num_steps) is Next.LEAVE:
        return Next.LEAVE
    return (yield from _pass_boundary(self, num_steps))


def _failed_by_step(self: Restarts, failure: Failure) -> str | None:
    return _failed(self, replace(failure, heals=False))


def _fails_alone(_: AgentState, event: StateDiffers) -> list[Any]:
    return [Fail(1, event.text)]


def _warned_each_time(_: AgentState, event: StateDiffers) -> list[Any]:
    return [Warn(event.text)]


COMPARISON_MUTANTS = {
    "what is saved is not compared": UnitMutant(
        ((StateComparison, "compare", _compare_but_for_saves),),
        lambda: test_state_comparison.test_states_are_compared_every_so_many_steps_and_before_a_save(11, True, True),
    ),
    "the last state is not compared": UnitMutant(
        ((StateComparison, "compare", _compare_but_for_the_last),),
        test_state_comparison.test_the_last_state_is_compared_before_it_is_saved_and_before_ranks_finish,
    ),
    "the most ranks are right": UnitMutant(
        ((Finding, "right", property(lambda self: self.sides[0])),),
        lambda: test_state_comparison.test_what_more_than_half_of_those_with_a_state_have_is_right(
            "AABB", (), (0, 1, 2, 3)
        ),
    ),
    "ranks are compared with all others": UnitMutant(
        ((state_comparison, "find", _as_one_part),),
        test_state_comparison.test_ranks_of_other_parts_end_their_generation_and_say_nothing,
    ),
    "a boundary is passed without its comparison": UnitMutant(
        ((StateComparison, "has_passed", property(always(True))),),
        test_state_comparison.test_a_boundary_is_passed_after_one_comparison_in_each_generation,
    ),
    "a rank goes on if others may not know the difference": UnitMutant(
        ((StateComparison, "_compare", _compare_until_a_sum_fails),),
        test_state_comparison.test_a_rank_that_knows_it_does_not_go_on_though_the_others_may,
    ),
    "a damaged rank keeps its state": UnitMutant(
        ((MemberState, "damaged", always(None)),),
        test_state_comparison.test_the_damaged_rank_has_no_state_any_more_and_the_others_begin_nothing,
    ),
    "the others go on beside a damaged rank": UnitMutant(
        ((StateComparison, "_compare", _compare_and_go_on),),
        test_state_comparison.test_the_damaged_rank_has_no_state_any_more_and_the_others_begin_nothing,
    ),
    "ranks that came later were alike before": UnitMutant(
        ((StateComparison, "_text", _text_for_all),),
        test_state_comparison.test_nothing_is_said_of_a_rank_that_came_later_or_after_a_state_was_loaded,
    ),
    "a rank leaves before it has compared": UnitMutant(
        ((MemberLifecycle, "pass_boundary", _leave_first),),
        test_state_comparison.test_a_rank_that_leaves_takes_part_before,
    ),
    "a difference is told by each rank": UnitMutant(
        ((AgentState, "_state_differs", _warned_each_time),),
        test_agent_state_exits.test_agent_13_a_difference_is_told_once,
    ),
    "an agent goes on without anybody who is right": UnitMutant(
        ((AgentState, "_state_differs", _warned_each_time),),
        test_agent_state_exits.test_agent_13_without_anybody_who_is_right_all_agents_fail,
    ),
    "one agent fails alone": UnitMutant(
        ((AgentState, "_state_differs", _fails_alone),),
        test_agent_state_exits.test_agent_13_without_anybody_who_is_right_all_agents_fail,
    ),
    "ranks that heal fail a step": UnitMutant(
        ((Restarts, "failed", _failed_by_step),),
        test_restarts.test_restart_2_does_not_count_ranks_that_heal_because_their_state_is_wrong,
    ),
}
