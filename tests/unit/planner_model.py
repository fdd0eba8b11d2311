"""The planner's rules, restated slowly: for a handful of members by every choice, for more by the simplest flow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from elasticgang.layout import Member, ParallelLayout, Plan

Model = tuple[int, int, int]


def model_seats(layout: ParallelLayout) -> list[Model]:
    return [(pp, sdp, tp) for pp in range(layout.pp) for sdp in range(layout.sdp) for tp in range(layout.tp)]


def block_of(model: Model, layout: ParallelLayout) -> Model:
    """Where the block of `model` begins: its coordinates, 0 along `within_host`."""
    pp, sdp, tp = (0 if axis in layout.within_host else at for axis, at in zip(("pp", "sdp", "tp"), model, strict=True))
    return pp, sdp, tp


def models_of(plan: Plan | None) -> dict[str, Model]:
    """The model coordinates of each active member."""
    if plan is None:
        return {}
    seats = ((id, plan.coordinates(id)) for id in plan.ranks)
    return {id: (at["pp"], at["sdp"], at["tp"]) for id, at in seats}


def num_fetches(before: Plan | None, after: Plan) -> int:
    """Members at model coordinates that they did not have before."""
    held = models_of(before)
    return sum(held.get(id) != model for id, model in models_of(after).items())


def fewest_fetches(
    members: Sequence[Member], layout: ParallelLayout, previous: Plan | None, num_groups: int
) -> int | None:
    """Of all seatings of `num_groups` replica groups; None when there is none."""
    held = models_of(previous)
    seats = [(group, model) for group in range(num_groups) for model in model_seats(layout)]
    best: int | None = None

    def seat(index: int, free: frozenset[Member], hosts: dict[tuple[int, Model], str], fetches: int) -> None:
        nonlocal best
        if best is not None and fetches >= best:
            return
        if index == len(seats):
            best = fetches
            return
        group, model = seats[index]
        block = (group, block_of(model, layout))
        for member in free:
            if hosts.get(block, member.host) == member.host:
                more = held.get(member.id) != model
                seat(index + 1, free - {member}, {**hosts, block: member.host}, fetches + more)

    seat(0, frozenset(members), {}, 0)
    return best


def fewest_fetches_by_flow(
    members: Sequence[Member], layout: ParallelLayout, previous: Plan | None, num_groups: int
) -> int:
    """As `fewest_fetches`, for more members: hosts send blocks to positions, one by one along the cheapest path."""
    size = sum(block_of(model, layout) == (0, 0, 0) for model in model_seats(layout))
    host_of = {member.id: member.host for member in members}
    held: dict[tuple[str, Model], Counter[Model]] = {}
    for id, model in models_of(previous).items():
        if id in host_of:
            held.setdefault((host_of[id], block_of(model, layout)), Counter())[model] += 1
    arcs: list[list[Any]] = []  # from, to, capacity, cost; each followed by its reverse
    for host, num in Counter(host_of.values()).items():
        arcs += [["source", host, num // size, 0], [host, "source", 0, 0]]
    for position in {block_of(model, layout) for model in model_seats(layout)}:
        arcs += [[position, "sink", num_groups, 0], ["sink", position, 0, 0]]
    for (host, position), counts in held.items():
        for rank in range(max(counts.values())):
            gain = sum(num > rank for num in counts.values())
            arcs += [[host, position, 1, -gain], [position, host, 0, gain]]
    return num_groups * layout.unit + sum(iter(lambda: _send_one(arcs), 0))


def _send_one(arcs: list[list[Any]]) -> int:
    """Send one block along the cheapest path, found by Bellman and Ford's rule; its cost, 0 when none gains."""
    cost, via = {"source": 0}, dict[Any, int]()
    changed = True
    while changed:
        changed = False
        for index, (start, end, capacity, price) in enumerate(arcs):
            if capacity and start in cost and cost[start] + price < cost.get(end, math.inf):
                cost[end], via[end], changed = cost[start] + price, index, True
    if cost.get("sink", 0) >= 0:
        return 0
    node: Any = "sink"
    while node != "source":
        arcs[via[node]][2] -= 1
        arcs[via[node] ^ 1][2] += 1
        node = arcs[via[node]][0]
    return cost["sink"]


def most_groups(members: Sequence[Member], layout: ParallelLayout) -> int:
    """The most replica groups that can be seated at all."""
    counts = range(len(members) // layout.unit, 0, -1)
    return next((count for count in counts if fewest_fetches(members, layout, None, count) is not None), 0)


def violations(plan: Plan, members: Sequence[Member], layout: ParallelLayout) -> Iterator[str]:
    """What is wrong with `plan` as such, without a look at the one before."""
    if plan.shape != (layout.pp, plan.shape[1], layout.sdp, layout.tp):
        yield f"shape {plan.shape}"
    if plan.size != plan.shape[1] * layout.unit:
        yield f"{plan.size} seats"
    if sorted([*plan.ranks, *plan.spares]) != sorted(member.id for member in members):
        yield "a member is missing, or there twice"
    if not set(plan.seats) <= set(members):
        yield "a member's host is not its own"
    hosts: dict[tuple[int, Model], set[str]] = {}
    models = models_of(plan)
    for member in plan.seats:
        block = (plan.coordinates(member.id)["rdp"], block_of(models[member.id], layout))
        hosts.setdefault(block, set()).add(member.host)
    if any(len(on) > 1 for on in hosts.values()):
        yield f"a block spans hosts: {hosts}"
