"""Seats after a change of the layout: as much state as possible stays where it is."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticgang.layout import Member, ModelCoordinates, ParallelLayout, Plan, is_filled, plan
from elasticgang.layout.overlap import Part, common_share, common_shares
from tests.unit.planner_model import model_seats, models_of, violations

SIZES = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3), (6, 1), (4, 2)]


def in_place(planned: Plan, layout: ParallelLayout, kept: dict[str, Part]) -> Fraction:
    """What all members have of their parts, in copies of the whole model."""
    seated = ((id, Part.of(layout, model)) for id, model in models_of(planned).items() if id in kept)
    return sum((common_share(kept[id], part) for id, part in seated), Fraction(0))


def most_in_place(members: list[Member], layout: ParallelLayout, num_groups: int, kept: dict[str, Part]) -> Fraction:
    """Of all seatings, where hosts do not matter."""
    seats = [Part.of(layout, model) for model in model_seats(layout)] * num_groups
    return max(
        sum(
            (common_share(kept[m.id], seat) for m, seat in zip(chosen, seats, strict=True) if m.id in kept), Fraction(0)
        )
        for chosen in itertools.permutations(members, len(seats))
    )


@st.composite
def moves(draw: st.DrawFn, most: int, within: list[tuple[str, ...]]) -> tuple[Any, ...]:
    """Members on few hosts, the part of another layout that each keeps, if any, and the layout to take."""
    pp = draw(st.integers(1, 2))
    (sdp, tp), (former_sdp, former_tp) = draw(st.lists(st.sampled_from(SIZES), min_size=2, max_size=2, unique=True))
    layout = ParallelLayout(pp=pp, sdp=sdp, tp=tp, within_host=draw(st.sampled_from(within)))
    former = ParallelLayout(pp=pp, sdp=former_sdp, tp=former_tp)
    hosts = st.sampled_from("ABC"[: draw(st.integers(1, 3))])
    members = [Member(f"m{index}", draw(hosts)) for index in range(draw(st.integers(1, most)))]
    parts = st.none() | st.sampled_from(model_seats(former))
    drawn = {member.id: draw(parts) for member in members}
    kept = {id: Part.of(former, model) for id, model in drawn.items() if model is not None}
    return layout, members, kept, draw(st.none() | st.integers(1, 4))


def test_common_shares_are_those_with_each_part_that_overlaps() -> None:
    for (sdp, tp), (other_sdp, other_tp) in itertools.product(SIZES, SIZES):
        former, later = ParallelLayout(pp=2, sdp=sdp, tp=tp), ParallelLayout(pp=2, sdp=other_sdp, tp=other_tp)
        parts = [Part.of(later, model) for model in model_seats(later)]
        for one in (Part.of(former, model) for model in model_seats(former)):
            shares = {place: common_share(one, part) for place, part in enumerate(parts)}
            assert common_shares(one, (2, other_sdp, other_tp)) == {at: share for at, share in shares.items() if share}


# PLAN-8
@pytest.mark.parametrize(
    ("former", "later"),
    [
        (ParallelLayout(sdp=1024), ParallelLayout(sdp=512)),
        (ParallelLayout(sdp=1000, tp=8), ParallelLayout(sdp=500, tp=8)),
    ],
    ids=lambda layout: layout.text,
)
def test_a_large_replica_group_changes_its_layout_within_a_moment(
    former: ParallelLayout, later: ParallelLayout
) -> None:
    """The coordinator answers no agent meanwhile, and a lease is eight seconds."""
    members = [Member(f"m{index}", f"host{index // 8}") for index in range(former.unit)]
    kept = {member.id: Part.of(former, model) for member, model in zip(members, model_seats(former), strict=True)}
    began = time.process_time()
    planned = plan(members[8:], later, kept=kept)
    assert time.process_time() - began < 2.0
    assert planned.shape == (1, 1, later.sdp, later.tp)


# PLAN-8
@settings(max_examples=300, deadline=None)
@given(moves(24, [(), ("tp",), ("sdp",), ("sdp", "tp"), ("pp", "sdp", "tp")]))
def test_a_plan_never_moves_more_than_that_of_newcomers(case: tuple[Any, ...]) -> None:
    layout, members, kept, most = case
    if not is_filled(layout, Counter(member.host for member in members)):
        return
    planned = plan(members, layout, kept=kept, max_replicas=most)
    as_newcomers = plan(members, layout, max_replicas=most)
    assert not list(violations(planned, members, layout))
    assert planned.shape == as_newcomers.shape
    assert sorted([*planned.ranks, *planned.spares]) == sorted(member.id for member in members)
    assert in_place(planned, layout, kept) >= in_place(as_newcomers, layout, kept)
    assert plan(members[::-1], layout, kept=kept, max_replicas=most) == planned  # PLAN-1


# PLAN-8
@settings(max_examples=200, deadline=None)
@given(moves(6, [()]))
def test_no_seating_has_more_in_place_where_hosts_do_not_matter(case: tuple[Any, ...]) -> None:
    layout, members, kept, most = case
    if not is_filled(layout, Counter(member.host for member in members)):
        return
    planned = plan(members, layout, kept=kept, max_replicas=most)
    assert in_place(planned, layout, kept) == most_in_place(members, layout, planned.shape[1], kept)


# PLAN-8
def test_a_host_whose_ranks_keep_the_parts_of_a_block_fills_it() -> None:
    """Two hosts of four ranks each, whose pairs of `tp` become groups of four on one host."""
    former, layout = ParallelLayout(sdp=2, tp=2), ParallelLayout(tp=4)
    names = [f"{host}{rank}" for host in "ab" for rank in range(4)]
    members = [Member(name, name[0]) for name in names]
    kept = {name: Part.of(former, (0, rank // 2, rank % 2)) for name, rank in zip(names, [3, 2, 1, 0] * 2, strict=True)}
    planned = plan(members, layout, kept=kept)
    assert in_place(planned, layout, kept) == 8 * Fraction(1, 8), "each has half of its quarter"
    for name in names:
        assert planned.coordinates(name)["tp"] // 2 == kept[name].coordinates.tp


def test_a_member_that_keeps_nothing_is_a_spare_before_one_that_keeps_something() -> None:
    members = [Member(name, "a") for name in ("m0", "m1", "m2")]
    kept = {name: Part.of(ParallelLayout(), (0, 0, 0)) for name in ("m1", "m2")}
    planned = plan(members, ParallelLayout(sdp=2), kept=kept)
    assert planned.spares == ("m0",)


def test_the_seats_of_a_plan_of_the_same_sizes_stay() -> None:
    members = [Member(name, "a") for name in ("m0", "m1")]
    layout = ParallelLayout(sdp=2)
    before = plan(members, layout)
    kept = {"m0": Part.of(layout, (0, 1, 0)), "m1": Part.of(layout, (0, 0, 0))}
    assert plan(members, layout, before, kept=kept) == before


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        (((1, 2, 1), (0, 0, 0)), ((1, 4, 1), (0, 1, 0)), Fraction(1, 4)),
        (((1, 2, 1), (0, 0, 0)), ((1, 4, 1), (0, 2, 0)), Fraction(0)),
        (((1, 2, 1), (0, 1, 0)), ((1, 3, 1), (0, 1, 0)), Fraction(1, 6)),
        (((1, 2, 1), (0, 1, 0)), ((1, 1, 2), (0, 0, 1)), Fraction(1, 4)),
        (((2, 1, 1), (1, 0, 0)), ((2, 2, 2), (1, 0, 1)), Fraction(1, 8)),
        (((2, 1, 1), (1, 0, 0)), ((2, 2, 2), (0, 0, 1)), Fraction(0)),
    ],
)
def test_what_two_parts_have_in_common(one: Any, other: Any, share: Fraction) -> None:
    first, second = (Part(sizes, ModelCoordinates(*at)) for sizes, at in (one, other))
    assert common_share(first, second) == common_share(second, first) == share
