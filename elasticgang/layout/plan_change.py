"""What one change of the members does to a plan: who leaves, moves, waits, and fetches state from whom. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from elasticgang.layout.overlap import Part, common_share, sizes_of
from elasticgang.layout.parallel_layout import ParallelLayout
from elasticgang.layout.planner import is_filled, plan
from elasticgang.layout.seat_plan import Member, ModelCoordinates, Plan


@dataclass(frozen=True)
class PlanChange:
    """`layout`: the one in force afterwards. `left`: members that are gone. `waiting`: those that lose their seat and
    become spares. `fetching`: for each member that must fetch state, its part. `sources`: how many members hold each
    part that is fetched; if the layout changes, the parts are made of others, and it is empty. `lost`: the parts of the
    former plan that nobody holds; the job then goes back to a checkpoint. `moved`: if the layout changes, what the
    members fetch from others, in copies of the whole model; None otherwise."""

    layout: ParallelLayout
    plan: Plan
    left: tuple[str, ...]
    waiting: tuple[str, ...]
    fetching: Mapping[str, ModelCoordinates]
    sources: Mapping[ModelCoordinates, int]
    lost: tuple[ModelCoordinates, ...]
    moved: Fraction | None = None

    @property
    def held(self) -> Fraction:
        """What all seats hold, in copies of the whole model."""
        return Fraction(self.plan.shape[1])

    def to_json(self) -> dict[str, Any]:
        """ "sources" of a part is None if the layout changes."""
        return {
            "layout": self.layout.text,
            "plan": self.plan.to_json(),
            "left": list(self.left),
            "waiting": list(self.waiting),
            "fetching": [
                {"member": member, "part": part._asdict(), "sources": self.sources.get(part)}
                for member, part in self.fetching.items()
            ],
            "lost": [part._asdict() for part in self.lost],
            "moved_copies": None if self.moved is None else float(self.moved),
        }


def layout_filled(layout: ParallelLayout, members: Iterable[Member]) -> ParallelLayout:
    """The first of the layout and its fallback that the members fill; the first one if they fill none."""
    on_host = Counter(member.host for member in members)
    return next((option for option in layout.options if is_filled(option, on_host)), layout.options[0])


def change_plan(
    members: Iterable[Member], layout: ParallelLayout, previous: Plan, *, max_replicas: int | None = None
) -> PlanChange:
    """What becomes of `previous` when `members` are there, and no rank is being started. Every seated member of
    `previous` holds its part, and a spare holds none. `max_replicas`: of the first layout; a fallback has as many seats
    at most.

    Raises:
        LayoutError: the members do not fill `min_replicas` replica groups of any of the layouts.
    """
    present = list(members)
    ids = {member.id for member in present}
    taken = layout_filled(layout, present)
    held = {member: previous.part_of(member) for member in previous.ranks if member in ids}
    parts = {previous.part_of(member) for member in previous.ranks}
    lost = tuple(sorted(parts.difference(held.values())))
    if max_replicas is not None:
        max_replicas = max_replicas * layout.unit // taken.unit
    stays = sizes_of(previous.shape) == (taken.pp, taken.sdp, taken.tp)
    kept = None if stays else {member: Part(sizes_of(previous.shape), part) for member, part in held.items()}
    following = plan(present, taken, previous, max_replicas=max_replicas, holds=held if stays else None, kept=kept)
    seated = {member: following.part_of(member) for member in following.ranks}
    fetching, moved = _fetched_in_place(seated, held) if stays else _fetched_anew(following, seated, previous, held)
    holders: defaultdict[ModelCoordinates, int] = defaultdict(int)
    for part in held.values() if stays else ():
        holders[part] += 1
    return PlanChange(
        taken,
        following,
        tuple(member for member in (*previous.ranks, *previous.spares) if member not in ids),
        tuple(member for member in following.spares if member in previous.ranks),
        fetching,
        {part: holders[part] for part in fetching.values()} if stays else {},
        lost,
        moved,
    )


def _fetched_in_place(
    seated: Mapping[str, ModelCoordinates], held: Mapping[str, ModelCoordinates]
) -> tuple[dict[str, ModelCoordinates], None]:
    return {member: part for member, part in seated.items() if held.get(member) != part}, None


def _fetched_anew(
    following: Plan, seated: Mapping[str, ModelCoordinates], previous: Plan, held: Mapping[str, ModelCoordinates]
) -> tuple[dict[str, ModelCoordinates], Fraction]:
    """Who fetches something when the layout changes, and how much all fetch together."""
    before, after = sizes_of(previous.shape), sizes_of(following.shape)
    fetching, moved = {}, Fraction(0)
    for member, part in seated.items():
        own = Part(after, part)
        lacking = own.share - (common_share(Part(before, held[member]), own) if member in held else 0)
        moved += lacking
        if lacking:
            fetching[member] = part
    return fetching, moved
