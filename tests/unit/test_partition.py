"""Positions to passes, and slots to parts: pure arithmetic, checked against the slow way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticgang.train.partition import likely_parts, slots_of


@given(num_slots=st.integers(0, 200), count=st.integers(1, 50))
def test_the_parts_are_all_slots_once_in_order_and_as_even_as_possible(num_slots: int, count: int) -> None:
    parts = [slots_of(num_slots, index, count) for index in range(count)]
    assert [slot for part in parts for slot in part] == list(range(num_slots))
    assert {len(part) for part in parts} <= {num_slots // count, -(-num_slots // count)}


@given(runs=st.integers(0, 40), num_groups=st.integers(1, 10), alike=st.integers(1, 5))
def test_parts_of_a_group_have_equal_size_and_take_turns_at_its_slots(runs: int, num_groups: int, alike: int) -> None:
    parts = [slots_of(runs * alike, index, num_groups * alike, alike) for index in range(num_groups * alike)]
    divided = []
    for group in range(num_groups):
        of_group = parts[group * alike : (group + 1) * alike]
        assert len({len(part) for part in of_group}) == 1
        divided += [slot for at_one_time in zip(*of_group, strict=True) for slot in at_one_time]
    assert divided == list(range(runs * alike))
    assert {len(part) for part in parts} <= {runs // num_groups, -(-runs // num_groups)}


@given(num_groups=st.integers(1, 8), alike=st.integers(1, 3), changed=st.integers(0, 8), joins=st.booleans())
def test_what_a_part_becomes_when_a_group_leaves_or_joins_is_likely(
    num_groups: int, alike: int, changed: int, joins: bool
) -> None:
    """`changed`: the group that leaves, or before which one joins."""
    before = list(range(num_groups))
    after = [*before[:changed], "joined", *before[changed:]] if joins else [*before[:changed], *before[changed + 1 :]]
    for group in set(before) & set(after) if len(after) != len(before) else ():
        for place in range(alike):
            part = after.index(group) * alike + place, len(after) * alike
            assert part in likely_parts(group * alike + place, num_groups * alike, alike)


def test_only_parts_that_exist_are_likely() -> None:
    assert likely_parts(0, 1) == [(0, 2), (1, 2)]
    assert likely_parts(1, 2) == [(0, 1), (1, 3), (2, 3)]
    assert likely_parts(3, 4, group_size=2) == [(1, 2), (3, 6), (5, 6)]


@pytest.mark.parametrize(("num_slots", "count"), [(7, 4), (8, 3)])
def test_an_uneven_division_within_a_group_is_refused(num_slots: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{num_slots} slots in {count} parts cannot be divided so that each 2 parts"):
        slots_of(num_slots, 0, count, 2)


@pytest.mark.parametrize(("index", "count"), [(-1, 4), (4, 4), (5, 4), (0, 0)])
def test_an_index_outside_is_refused_with_both_numbers(index: int, count: int) -> None:
    with pytest.raises(ValueError, match=rf"less than `count` \({count}\), but is {index} instead"):
        slots_of(8, index, count)
