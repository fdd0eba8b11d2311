"""The planner's rules, restated slowly: every choice is tried. For a handful of members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
