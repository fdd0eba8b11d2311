"""Repair of holders: seats a holder of each held part of the state at that part's coordinates.

Pure; `planner.py` defines the terms and the rule (PLAN-7). A member seldom holds another part than the previous plan
says: after several deaths in a row, or as a spare that has kept the state of its last seat.

For each part without a seated holder, two members swap places. Neither sits where its own part is, so no other part
loses its seated holder.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from elasticgang.layout.axes import groups_over
from elasticgang.layout.parallel_layout import ParallelLayout
from elasticgang.layout.seat_plan import Member, ModelCoordinates


def repair_holders(
    layout: ParallelLayout, seats: list[Member], spares: list[Member], holds: Mapping[str, ModelCoordinates]
) -> None:
    """Change `seats`, in rank order, and `spares`, in their order, as little as PLAN-7 requires.

    `holds`: the part of the state that each holder has.
    """
    num_groups = len(seats) // layout.unit
    held = set(holds.values())
    parts = itertools.product(range(layout.pp), range(layout.sdp), range(layout.tp))
    for model in filter(held.__contains__, itertools.starmap(ModelCoordinates, parts)):
        ranks = _ranks_of(layout, num_groups, model)
        if not any(holds.get(seats[rank].id) == model for rank in ranks):
            holders = [member for member in (*spares, *seats) if holds.get(member.id) == model]
            holder, rank = _choose(layout, seats, holders, ranks)
            _swap(seats, spares, holder, rank)


def _ranks_of(layout: ParallelLayout, num_groups: int, model: ModelCoordinates) -> range:
    """The rank of the seat for `model` in each replica group."""
    size = layout.sdp * layout.tp
    first = model.pp * num_groups * size + model.sdp * layout.tp + model.tp
    return range(first, first + num_groups * size, size)


def _choose(
    layout: ParallelLayout, seats: Sequence[Member], holders: Sequence[Member], ranks: Sequence[int]
) -> tuple[Member, int]:
    """The holder to seat, and its rank: on its own host if possible, otherwise in a block that spans hosts already.
    Earlier holders and ranks have precedence."""
    first_on = {member.host: member for member in reversed(holders)}
    for rank in ranks:
        if (holder := first_on.get(seats[rank].host)) is not None:
            return holder, rank
    shape = (layout.pp, len(seats) // layout.unit, layout.sdp, layout.tp)
    spans = {
        rank: len({seats[other].host for other in block}) > 1
        for block in groups_over(shape, layout.within_host)
        for rank in block
    }
    return holders[0], max(ranks, key=lambda rank: (spans[rank], -rank))


def _swap(seats: list[Member], spares: list[Member], holder: Member, rank: int) -> None:
    """Seat `holder` at `rank`. A member that a spare replaces becomes the last spare."""
    if holder in spares:
        spares.remove(holder)
        spares.append(seats[rank])
    else:
        seats[seats.index(holder)] = seats[rank]
    seats[rank] = holder
