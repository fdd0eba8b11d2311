"""What one change of the members does to a plan: who leaves, moves, waits, and fetches state from whom. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticgang.layout.parallel_layout import ParallelLayout
from elasticgang.layout.planner import plan
from elasticgang.layout.seat_plan import Member, ModelCoordinates, Plan


@dataclass(frozen=True)
class PlanChange:
    """`left`: members that are gone. `waiting`: those that lose their seat and become spares. `fetching`: for each
    member that must heal, the part that it fetches. `sources`: how many members hold each part that is fetched.
    `lost`: the parts that nobody holds; the job then goes back to a checkpoint."""

    plan: Plan
    left: tuple[str, ...]
    waiting: tuple[str, ...]
    fetching: Mapping[str, ModelCoordinates]
    sources: Mapping[ModelCoordinates, int]
    lost: tuple[ModelCoordinates, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_json(),
            "left": list(self.left),
            "waiting": list(self.waiting),
            "fetching": [
                {"member": member, "part": part._asdict(), "sources": self.sources.get(part, 0)}
                for member, part in self.fetching.items()
            ],
            "lost": [part._asdict() for part in self.lost],
        }


def part_of(plan: Plan, member: str) -> ModelCoordinates:
    """The part of the model in the member's seat. Raises KeyError: it has none."""
    at = plan.coordinates(member)
    return ModelCoordinates(at["pp"], at["sdp"], at["tp"])


def change_plan(
    members: Iterable[Member], layout: ParallelLayout, previous: Plan, *, max_replicas: int | None = None
) -> PlanChange:
    """What becomes of `previous` when `members` are there. Every seated member of `previous` holds its part, and a
    spare holds none.

    Raises:
        LayoutError: the members do not fill `layout.min_replicas` replica groups.
    """
    present = list(members)
    ids = {member.id for member in present}
    holds = {member: part_of(previous, member) for member in previous.ranks if member in ids}
    following = plan(present, layout, previous, max_replicas=max_replicas, holds=holds)
    holders: defaultdict[ModelCoordinates, int] = defaultdict(int)
    for part in holds.values():
        holders[part] += 1
    parts = {part_of(previous, member) for member in previous.ranks}
    seated = {member: part_of(following, member) for member in following.ranks}
    fetching = {member: part for member, part in seated.items() if holds.get(member) != part}
    return PlanChange(
        following,
        tuple(member for member in (*previous.ranks, *previous.spares) if member not in ids),
        tuple(member for member in following.spares if member in previous.ranks),
        fetching,
        {part: holders[part] for part in fetching.values()},
        tuple(sorted(part for part in parts if not holders[part])),
    )
