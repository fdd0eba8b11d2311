"""Members -> plan: examples of each rule."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from elasticgang.errors import LayoutError
from elasticgang.layout import FAMILIES, Axes, Member, ModelCoordinates, ParallelLayout, Plan, plan
from tests.unit.members import crew, ids, without
from tests.unit.planner_model import (
    fewest_fetches,
    num_fetches,
    violations,
)

# ---------------------------------------------------------------- the plan as a value


# SEAT-2
def test_coordinates_and_groups_of_a_plan() -> None:
    layout = ParallelLayout(pp=2, sdp=1, tp=2)
    planned = plan(crew(A="a b c d", B="e f g h"), layout)
    assert planned.shape == (2, 2, 1, 2)
    assert planned.size == 8
    assert ids(planned) == "a b e f c d g h"  # a replica group on each host, pp outermost
    assert dict(planned.ranks) == {"a": 0, "b": 1, "e": 2, "f": 3, "c": 4, "d": 5, "g": 6, "h": 7}
    assert planned.coordinates("g") == {"pp": 1, "rdp": 1, "sdp": 0, "tp": 0}
    assert list(planned.coordinates("g")) == ["pp", "rdp", "sdp", "tp"]
    assert planned.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert planned.groups("replica") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert planned.groups("root") == (tuple(range(8)),)


def test_every_rank_is_in_one_group_of_each_family_with_its_coordinates() -> None:
    planned = plan(crew(A=" ".join(f"m{index}" for index in range(24))), ParallelLayout(pp=2, sdp=3, tp=2))
    at = [planned.coordinates(id) for id in planned.ranks]
    for family, along in FAMILIES.items():
        groups = planned.groups(family)
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        for group in groups:
            assert len({tuple(index for axis, index in at[rank].items() if axis not in along) for rank in group}) == 1
            assert len(group) == math.prod(planned.shape[list(at[0]).index(axis)] for axis in along)


def test_a_family_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="`family` must be one of root, dp, rdp, sdp, tp, pp, replica, but is 'cp'"):
        plan(crew(A="a"), ParallelLayout()).groups("cp")


def test_spares_have_no_coordinates() -> None:
    planned = plan(crew(A="a b c"), ParallelLayout(sdp=2))
    assert planned.spares == ("c",)
    with pytest.raises(KeyError, match="c"):
        planned.coordinates("c")


# SEAT-1
def test_a_plan_does_not_change() -> None:
    planned = plan(crew(A="a b"), ParallelLayout())
    with pytest.raises(FrozenInstanceError):
        planned.spares = ("b",)  # type: ignore[misc]
    with pytest.raises(TypeError):
        planned.ranks["c"] = 2  # type: ignore[index]


def test_a_plan_travels() -> None:
    planned = plan(crew(A="a b", B="c ü"), ParallelLayout(sdp=3, within_host=()))
    assert planned.digest
    for again in (Plan.from_json(json.loads(json.dumps(planned.to_json()))), pickle.loads(pickle.dumps(planned))):
        assert again == planned
        assert again.digest == planned.digest
        assert again.ranks == planned.ranks


def test_a_plan_carries_the_views_of_its_layout() -> None:
    layout = ParallelLayout(sdp=4, views=(Axes((2, 2), ("cp", "outer")),))
    planned = plan(crew(A="a b c d e f g h"), layout)
    again = Plan.from_json(json.loads(json.dumps(planned.to_json())))
    assert again == planned == pickle.loads(pickle.dumps(planned))
    assert again.groups("cp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert planned.digest not in ("", plan(crew(A="a b c d e f g h"), ParallelLayout(sdp=4)).digest)
    for views in ([{"shape": [2], "dim_names": ["cp"], "rank_offset": 0}], [{"shape": [4]}], 3):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Plan.from_json({**planned.to_json(), "views": views})


# SEAT-3
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"shape": [1, 2, 1]}, ValueError),
        ({"shape": [1, 3, 1, 1]}, ValueError),
        ({"shape": [-1, -2, 1, 1]}, ValueError),
        ({"shape": None}, TypeError),
        ({"seats": [["a", "A"], ["a", "A"]]}, ValueError),
        ({"seats": [["a", "A"], ["b"]]}, ValueError),
        ({"seats": [["a", "A"], 3]}, TypeError),
        ({"spares": ["a"]}, ValueError),
        ({"spares": 3}, TypeError),
    ],
)
def test_what_is_not_a_plan_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    data = plan(crew(A="a b"), ParallelLayout()).to_json()
    with pytest.raises(error):
        Plan.from_json({**data, **change})
    for key in data:
        with pytest.raises(KeyError, match=key):
            Plan.from_json({name: value for name, value in data.items() if name != key})


def test_the_digest_tells_plans_apart() -> None:
    members = crew(A="a b", B="c d")
    plans = [
        plan(members, ParallelLayout()),
        plan(members, ParallelLayout(sdp=2, within_host=())),
        plan(members, ParallelLayout(pp=2, within_host=())),
        plan(members[:3], ParallelLayout()),
        plan([*members[:3], Member("d", "C")], ParallelLayout()),
        plan([*members[:3], Member("D", "B")], ParallelLayout()),
        plan(members, ParallelLayout(sdp=3, within_host=())),
    ]
    assert len({planned.digest for planned in plans}) == len(plans)


# ---------------------------------------------------------------- who stays, who moves


def test_survivors_keep_their_order_and_newcomers_fill_holes() -> None:
    first = plan(crew(A="a b c d"), ParallelLayout())
    assert ids(first) == "a b c d"
    second = plan(crew(A="a c d"), ParallelLayout(), first)
    assert ids(second) == "a c d"
    third = plan(crew(A="a d x y"), ParallelLayout(), second)
    assert ids(third) == "a x d y"


def test_the_first_plan_fills_replica_groups_host_by_host() -> None:
    planned = plan(crew(B="c d", A="b a"), ParallelLayout(sdp=2, within_host=()))
    assert ids(planned) == "a b c d"


def test_spares_beyond_the_most_groups_take_the_seats_of_the_lost_and_nobody_moves() -> None:
    layout = ParallelLayout(tp=2)
    first = plan(crew(A="a b c d e f"), layout, max_replicas=2)
    assert (first.shape[1], ids(first), first.spares) == (2, "a b c d", ("e", "f"))
    second = plan(crew(A="a b d e f"), layout, first, max_replicas=2)
    assert (ids(second), second.spares) == ("a b e d", ("f",))
    third = plan(crew(A="a b d e f c"), layout, second, max_replicas=2)
    assert (ids(third), third.spares) == ("a b e d", ("f", "c"))
    assert plan(crew(A="a b"), ParallelLayout(min_replicas=2), max_replicas=1).shape[1] == 2


# PLAN-4
def test_the_groups_with_the_fewest_holes_stay() -> None:
    layout = ParallelLayout(sdp=3, within_host=())
    first = plan(crew(A="a b c d e f g h i"), layout)
    second = plan(without(first.seats, "b d e"), layout, first)  # groups abc, def, ghi: one, two, no holes
    assert ids(second) == "a f c g h i"
    assert num_fetches(first, second) == 1


def test_of_groups_with_as_many_holes_the_first_stay() -> None:
    layout = ParallelLayout(sdp=2, within_host=())
    first = plan(crew(A="a b c d e f"), layout)
    second = plan(without(first.seats, "b d"), layout, first)
    assert ids(second) == "a c e f"


def test_a_dissolved_member_fills_a_hole_at_its_own_coordinates_without_state() -> None:
    layout = ParallelLayout(sdp=2, within_host=())
    first = plan(crew(A="a b c d"), layout)
    second = plan([*without(first.seats, "b c"), Member("0", "A")], layout, first)
    assert ids(second) == "a d"
    assert num_fetches(first, second) == 0
    assert second.spares == ("0",)


# PLAN-5
def test_spares_fill_holes_before_groups_are_broken_up() -> None:
    layout = ParallelLayout(sdp=3, within_host=())
    first = plan(crew(A="a b c d e f g h"), layout)
    assert first.spares == ("g", "h")
    second = plan(without(crew(A="a b c d e f g h"), "b d"), layout, first)
    assert ids(second) == "a g c h e f"


def test_spares_come_before_other_members_of_dissolved_groups() -> None:
    layout = ParallelLayout(sdp=3, within_host=())
    first = plan(crew(A="a b c d e f", B="s"), layout)
    second = plan(without(crew(A="a b c d e f", B="s"), "a d e"), layout, first)  # groups abc, def and spare s
    assert ids(second) == "s b c"
    assert second.spares == ("f",)


def test_a_spare_on_the_host_of_the_hole_comes_first() -> None:
    layout = ParallelLayout(sdp=2, within_host=())
    first = plan(crew(A="a b", B="c d"), layout)
    second = plan([*crew(A="p", B="q", C="o"), *without(first.seats, "a d")], layout, first)
    assert ids(second) == "p b c q"
    assert second.spares == ("o",)


def test_a_hole_elsewhere_does_not_take_the_spare_of_a_later_hole() -> None:
    layout = ParallelLayout(sdp=2, within_host=())
    first = plan(crew(A="a b", B="c d"), layout)
    second = plan([*crew(B="q", C="r"), *without(first.seats, "a d")], layout, first)
    assert ids(second) == "r b c q"


def test_spares_wait_in_turn_and_unseated_members_come_last() -> None:
    layout = ParallelLayout(sdp=4, within_host=())
    first = plan(crew(A="a b c d y z"), layout)
    assert first.spares == ("y", "z")
    second = plan(crew(A="a b c y z x w"), layout, first)
    assert (ids(second), second.spares) == ("a b c y", ("z", "w", "x"))
    third = plan(crew(A="a b z y"), layout, second)
    assert (ids(third), third.spares) == ("a b z y", ())


# PLAN-6
def test_other_model_sizes_leave_nothing_to_keep() -> None:
    members = crew(A="d c b a")
    first = plan(members[:2], ParallelLayout())
    assert plan(members, ParallelLayout(tp=2), first) == plan(members, ParallelLayout(tp=2))


# ---------------------------------------------------------------- axes that stay on a host


def test_a_hole_is_filled_from_its_host() -> None:
    layout = ParallelLayout(tp=2)
    members = crew(A="a b x", B="c d y")
    first = plan(members, layout)
    assert (ids(first), first.spares) == ("a b c d", ("x", "y"))
    second = plan(without(members, "c"), layout, first)
    assert (ids(second), second.spares) == ("a b y d", ("x",))


def test_a_block_without_a_spare_on_its_host_leaves() -> None:
    layout = ParallelLayout(tp=2)
    first = plan(crew(A="a b", B="c d", C="e f"), layout)
    second = plan([*without(first.seats, "c"), Member("x", "C")], layout, first)
    assert ids(second) == "a b e f"
    assert second.spares == ("x", "d")
    third = plan([*without(first.seats, "c"), *crew(B="y", C="x")], layout, second)
    assert ids(third) == "a b e f d y"


def test_whole_spare_blocks_replace_a_block_of_a_replica_group() -> None:
    layout = ParallelLayout(pp=2, tp=2)
    members = crew(A="a b", B="c d", C="e f")
    first = plan(members, layout)
    assert (ids(first), first.spares) == ("a b c d", ("e", "f"))
    second = plan(without(members, "d"), layout, first)
    assert (ids(second), second.spares) == ("a b e f", ("c",))


def test_a_host_keeps_the_block_that_has_lost_the_fewest() -> None:
    layout = ParallelLayout(tp=3)
    first = plan(crew(A="a b c d e f", B="g h i"), layout)
    second = plan(without(first.seats, "a e f"), layout, first)
    assert (ids(second), second.spares) == ("d b c g h i", ())  # and d sits where it sat in the block that left
    assert num_fetches(first, second) == 0


def test_blocks_change_hosts_where_that_takes_the_least_state() -> None:
    """Dropping each host's worse block would leave two blocks of stage 0 and none of stage 1."""
    layout = ParallelLayout(pp=2, tp=2)
    first = plan(crew(A="a b c d", B="e f g h"), layout)  # stage 0: ab, ef; stage 1: cd, gh
    second = plan(without(first.seats, "c g h"), layout, first)
    assert num_fetches(first, second) == fewest_fetches(without(first.seats, "c g h"), layout, first, 1) == 1
    assert ids(second) == "e f a d"


def test_a_former_block_across_hosts_is_kept_as_far_as_one_host_goes() -> None:
    first = plan(crew(A="a b c", B="d"), ParallelLayout(tp=2, within_host=()))
    assert ids(first) == "a b c d"
    second = plan([*crew(A="a b c", B="d"), Member("e", "A")], ParallelLayout(tp=2), first)
    assert ids(second) == "a b c e"
    assert second.spares == ("d",)


def test_the_larger_part_of_a_former_block_across_hosts_keeps_its_group() -> None:
    first = plan(crew(A="a", B="b c"), ParallelLayout(tp=3, within_host=()))
    second = plan(crew(A="a p q", B="b c r"), ParallelLayout(tp=3), first)
    assert ids(second) == "r b c a p q"


def seated(shape: tuple[int, int, int, int], seats: str) -> Plan:
    """A plan by its seats in rank order; the host of a member is its first letter."""
    return Plan(shape, tuple(Member(id, id[0].upper()) for id in seats.split()))


def planned_after(previous: Plan, present: str, layout: ParallelLayout) -> str:
    return ids(plan([Member(id, id[0].upper()) for id in present.split()], layout, previous))


def test_of_blocks_with_as_many_members_a_host_keeps_that_of_a_kept_group() -> None:
    """Of stage 1 of the second group and stage 2 of the first, half of each is left, and A has room for one."""
    first = seated((3, 2, 1, 2), "x1 x2  c1 c2   x3 x4  a1 a2   a3 a4  x5 x6")
    assert planned_after(first, "a1 a3 b1 b2 c1 c2", ParallelLayout(pp=3, tp=2)) == "c1 c2 a1 a3 b1 b2"


def test_of_blocks_at_the_same_coordinates_that_of_a_kept_group_stays() -> None:
    first = seated((2, 2, 1, 2), "a1 a2  a3 a4   x1 x2  c1 c2")
    assert planned_after(first, "a1 a3 c1 c2", ParallelLayout(pp=2, tp=2)) == "a3 a1 c1 c2"


def test_members_that_cannot_stay_on_their_host_do_not_count_for_their_group() -> None:
    """The first group has two members left to the third one's one; but no host has a second for either of them."""
    first = seated((2, 3, 1, 2), "a1 a2  e1 e2  c1 c2   b1 b2  f1 f2  d1 d2")
    present = "a1 b1 e1 e2 f1 f2 c1 c3 d3 d4"
    assert planned_after(first, present, ParallelLayout(pp=2, tp=2)) == "e1 e2 c1 c3 f1 f2 d3 d4"


def test_a_survivor_on_another_host_than_before_is_where_it_is() -> None:
    first = plan(crew(A="a b", B="c d"), ParallelLayout(tp=2))
    second = plan(crew(A="b x", B="a c d"), ParallelLayout(tp=2), first)
    assert not list(violations(second, crew(A="b x", B="a c d"), ParallelLayout(tp=2)))
    assert ids(second) == "x b c d"
    assert second.spares == ("a",)


def test_a_spare_block_on_the_host_of_the_hole_comes_first() -> None:
    layout = ParallelLayout(pp=2, tp=2)
    first = plan(crew(A="a b", B="c d"), layout)
    second = plan(crew(A="a b p q", B="r s"), layout, first)
    assert (ids(second), second.spares) == ("a b r s", ("p", "q"))


def test_several_axes_within_a_host() -> None:
    layout = ParallelLayout(pp=2, sdp=2, tp=2, within_host=("pp", "tp"))
    planned = plan(crew(A="a b c d e", B="f g h i"), layout)
    assert planned.spares == ("e",)
    assert not list(violations(planned, crew(A="a b c d e", B="f g h i"), layout))
    assert {planned.coordinates(id)["sdp"] for id in "abcd"} == {0}


# ---------------------------------------------------------------- who holds the state


def test_the_only_holder_of_a_part_sits_at_its_coordinates() -> None:
    """b and c died: a and d hold what is left, and d, without its neighbour, would wait."""
    layout = ParallelLayout(tp=2)
    second = plan(crew(A="a x", B="d"), layout, None, holds=parts(a=(0, 0, 1), d=(0, 0, 0)))
    assert (ids(second), second.spares) == ("d a", ("x",))


def test_a_holder_changes_places_on_its_own_host_where_that_can_be() -> None:
    layout = ParallelLayout(tp=2)
    planned = plan(crew(A="a b", B="c d"), layout, None, holds=parts(c=(0, 0, 1)))
    assert ids(planned) == "a b d c"


def test_holders_from_elsewhere_break_up_one_block_not_two() -> None:
    layout = ParallelLayout(tp=2)
    planned = plan(crew(A="a b c d", E="e", F="f"), layout, None, holds=parts(e=(0, 0, 1), f=(0, 0, 0)))
    assert (ids(planned), planned.spares) == ("f e c d", ("a", "b"))


def test_a_part_with_several_holders_moves_no_member() -> None:
    layout = ParallelLayout(tp=2)
    first = plan(crew(A="a b", B="c d"), layout)
    holds = parts(a=(0, 0, 0), b=(0, 0, 1), c=(0, 0, 1), d=(0, 0, 0))
    assert plan(crew(A="a b", B="c d"), layout, first, holds=holds) == first


def parts(**holds: tuple[int, int, int]) -> dict[str, ModelCoordinates]:
    return {id: ModelCoordinates(*model) for id, model in holds.items()}


# ---------------------------------------------------------------- too few


def test_too_few_members_are_counted() -> None:
    with pytest.raises(LayoutError) as caught:
        plan(crew(A="a b c"), ParallelLayout(sdp=2, min_replicas=3, within_host=()))
    assert str(caught.value) == (
        "the layout (sdp=2, min_replicas=3) needs 6 ranks; 3 are present, and 3 more are needed: 3 on any host."
    )


def test_hosts_that_lack_the_fewest_are_named() -> None:
    members = crew(A="a b c", B="d e", C="f")
    with pytest.raises(LayoutError) as caught:
        plan(members, ParallelLayout(tp=4, min_replicas=2))
    assert str(caught.value) == (
        "the layout (tp=4, min_replicas=2) needs 8 ranks, in blocks of 4 on one host each; 6 are present, and 3 more "
        "are needed: 2 on B, 1 on A."
    )
    assert plan([*members, *crew(A="x", B="y z")], ParallelLayout(tp=4, min_replicas=2)).size == 8


def test_what_no_host_lacks_may_come_anywhere_in_blocks() -> None:
    first = plan(crew(A="a b", B="c d"), ParallelLayout(tp=2, min_replicas=2))
    with pytest.raises(LayoutError) as caught:
        plan(crew(A="a"), ParallelLayout(tp=2, min_replicas=2), first)
    assert str(caught.value) == (
        "the layout (tp=2, min_replicas=2) needs 4 ranks, in blocks of 2 on one host each; 1 is present, and 3 more "
        "are needed: 1 on A, 2 on any host, in blocks of 2 to a host. Lost since the previous plan: 2 on B, 1 on A."
    )


def test_a_long_list_of_hosts_is_cut_short() -> None:
    members = [Member(f"m{index:02}", f"h{index:02}") for index in range(20)]
    with pytest.raises(LayoutError, match=r"20 more are needed: 1 on h00, .* 1 on h07, 12 on 12 more hosts\.$"):
        plan(members, ParallelLayout(tp=2, min_replicas=20))


def test_nobody_is_too_few() -> None:
    with pytest.raises(LayoutError, match=r"needs 1 rank; 0 are present, and 1 more is needed: 1 on any host"):
        plan([], ParallelLayout())


def test_an_id_that_appears_twice_is_refused() -> None:
    with pytest.raises(LayoutError, match="'a' appears more than once"):
        plan(crew(A="b a", B="a"), ParallelLayout())
