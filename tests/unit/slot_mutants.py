"""Rules that are not ours for the slots that replica groups keep, each with the unit test that shows what it breaks."""

from __future__ import annotations

from collections.abc import Sequence

from elasticgang.protocol import slot_division
from tests.unit import test_slot_division
from tests.unit.unit_mutant import UnitMutant


def _mean_group(holders: int, groups: int, _: int) -> int:
    return groups // holders


def _by_the_first(runs: Sequence[int], index: int, _: int) -> Sequence[int]:
    return () if index else runs


SLOT_MUTANTS = {
    "runs of two groups are kept": UnitMutant(
        ((slot_division, "_group_of", _mean_group),),
        test_slot_division.test_no_group_keeps_anything_if_as_many_ranks_of_two_groups_hold_one_run,
    ),
    "the first group computes what is missing": UnitMutant(
        ((slot_division, "_even_part", _by_the_first),),
        test_slot_division.test_a_spare_that_takes_a_seat_holds_nothing_of_what_its_group_has,
    ),
    "a sum is kept with a run that the group has not": UnitMutant(
        ((slot_division, "_is_broken", lambda group, broken: False),),
        test_slot_division.test_a_rank_that_is_ahead_leaves_out_what_is_loose_alone,
    ),
}
