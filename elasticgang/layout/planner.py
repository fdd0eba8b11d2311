"""Members -> plan: assigns seats for the next generation so that as few members as possible move or fetch state.

Pure: no clocks, sockets or torch. `assignment.py` assigns the seats, `holder_repair.py` ensures PLAN-7.

PLAN-1  Equal members, layout and previous plan give equal plans, in whatever order the members are given, on every host
    and in every Python version.
PLAN-2  As many replica groups are seated as the members and `within_host` allow, up to `max_replicas`.
PLAN-3  A member fetches state if its seat has other model coordinates (pp, sdp, tp) than in the previous plan. No
    assignment of equally many groups has fewer fetches. With blocks of one seat there is at most one fetch for each
    hole in the kept groups; there are fewer if a member of a dissolved group fills a hole at its own coordinates.
PLAN-4  The kept groups are those with the fewest holes, then the lowest `rdp`, in their previous order. New groups
    follow them.
PLAN-5  A waiting member fills a hole before a member that would have to leave a seat, and a member on the hole's host
    before one elsewhere.
PLAN-6  A previous plan with other model sizes is ignored: its members are seated like newcomers, but for PLAN-8.
PLAN-7  For each held part of the state, a holder sits at its coordinates. Otherwise the plan would lose that part. This
    rule has precedence over PLAN-3 to PLAN-5 and over `within_host`.
PLAN-8  Without a previous plan of these model sizes, members sit where most of the state that they keep is in place,
    and never less than if they were seated like newcomers. With blocks of one seat no seating has more in place.

A *block* is a set of seats of a replica group that differ only along `within_host`: all are on one host. If
`within_host` is empty, or its sizes are 1, a block is one seat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

from elasticgang.errors import LayoutError
from elasticgang.layout.assignment import assign_seats
from elasticgang.layout.axes import groups_over
from elasticgang.layout.holder_repair import repair_holders
from elasticgang.layout.overlap import Part, sizes_of
from elasticgang.layout.overlap_seating import OverlapSeating
from elasticgang.layout.parallel_layout import ParallelLayout
from elasticgang.layout.retention import BlockLayout, PreviousSeats
from elasticgang.layout.seat_plan import Member, ModelCoordinates, Plan

__all__ = ["Member", "Plan", "is_filled", "plan"]

T = TypeVar("T")

MAX_HOSTS_NAMED = 8


def plan(
    members: Iterable[Member],
    layout: ParallelLayout,
    previous: Plan | None = None,
    *,
    max_replicas: int | None = None,
    holds: Mapping[str, ModelCoordinates] | None = None,
    kept: Mapping[str, Part] | None = None,
) -> Plan:
    """Seat `members` for the next generation by the rules above, in O(n log n) for n members.

    `holds`: the part of the state that each holder among `members` has.
    `kept`: the part that each holder among `members` has of the layout that it is of, which may be another one.
    `max_replicas`: seat no more replica groups; the remaining members are spares. None for no limit.

    Raises:
        LayoutError: a member id appears twice, or the members do not fill `min_replicas` replica groups. The message
            says how many members are missing, and on which hosts.
    """
    present = _by_id(members)
    blocks_of_group = _blocks(layout)
    on_host = Counter(member.host for member in present.values())
    replicas = _num_replicas(on_host, blocks_of_group)
    if max_replicas is not None:
        replicas = min(replicas, max(max_replicas, layout.min_replicas))
    if replicas < layout.min_replicas:
        raise LayoutError(_shortage(present, on_host, layout, blocks_of_group, previous))
    if previous is not None and sizes_of(previous.shape) != (layout.pp, layout.sdp, layout.tp):  # PLAN-6
        previous = None
    previous_seats = [] if previous is None else _swap_outer(previous.seats, layout.pp, previous.shape[1])
    left = PreviousSeats(
        [present.get(member.id) for member in previous_seats], [member.host for member in previous_seats]
    )
    waiting = _waiting(present, previous)
    seats, idle = assign_seats(blocks_of_group, replicas, waiting, left)
    if previous is None and kept:
        seats, idle = _in_place(OverlapSeating(layout, blocks_of_group, kept), waiting, seats)
    shape = (layout.pp, replicas, layout.sdp, layout.tp)
    in_rank_order = _swap_outer(seats, replicas, layout.pp)
    repair_holders(layout, in_rank_order, idle, holds or {})
    return Plan(shape, tuple(in_rank_order), tuple(member.id for member in idle), layout.views)


def _in_place(
    seating: OverlapSeating, everyone: Sequence[Member], as_newcomers: list[Member]
) -> tuple[list[Member], list[Member]]:
    """PLAN-8. The members by replica group, and those without a seat."""
    seats = seating.seat(everyone, len(as_newcomers) // seating.unit)
    if seating.in_place(seats) <= seating.in_place(as_newcomers):
        seats = as_newcomers
    seated = {member.id for member in seats}
    return seats, [member for member in everyone if member.id not in seated]


def is_filled(layout: ParallelLayout, on_host: Mapping[str, int]) -> bool:
    """Whether so many members on each host fill `layout.min_replicas` replica groups (PLAN-2)."""
    return _num_replicas(on_host, _blocks(layout)) >= layout.min_replicas


def _blocks(layout: ParallelLayout) -> BlockLayout:
    return BlockLayout(groups_over((layout.pp, 1, layout.sdp, layout.tp), layout.within_host))


def _num_replicas(on_host: Mapping[str, int], blocks_of_group: BlockLayout) -> int:
    return sum(num // blocks_of_group.block_size for num in on_host.values()) // blocks_of_group.num_blocks


def _by_id(members: Iterable[Member]) -> dict[str, Member]:
    given = list(members)
    present = {member.id: member for member in given}
    if len(present) != len(given):
        twice = min(id for id, times in Counter(member.id for member in given).items() if times > 1)
        raise LayoutError(f"`members` must have an id each, but {twice!r} appears more than once.")
    return present


def _waiting(present: Mapping[str, Member], previous: Plan | None) -> list[Member]:
    """Members without a seat in `previous`: its spares in their order, then newcomers by host and id (PLAN-1)."""
    if previous is None:
        spares, known = [], frozenset[str]()
    else:
        spares = [present[id] for id in previous.spares if id in present]
        known = frozenset((*previous.spares, *previous.ranks))
    newcomers = [member for id, member in present.items() if id not in known]
    return spares + sorted(newcomers, key=attrgetter("host", "id"))


def _swap_outer(seats: Sequence[T], outer: int, inner: int) -> list[T]:
    """`seats` as [outer][inner][rest] -> [inner][outer][rest]: from rank order to replica groups, or back."""
    rest = len(seats) // (outer * inner)
    starts = ((i * inner + j) * rest for j in range(inner) for i in range(outer))
    return [seat for start in starts for seat in seats[start : start + rest]]


def _shortage(
    present: Mapping[str, Member],
    on_host: Mapping[str, int],
    layout: ParallelLayout,
    blocks_of_group: BlockLayout,
    previous: Plan | None,
) -> str:
    """The message that says how many members are missing; hosts that lack the fewest for a block come first."""
    size = blocks_of_group.block_size
    blocks = layout.min_replicas * blocks_of_group.num_blocks - sum(num // size for num in on_host.values())
    partial = sorted((size - num % size, host) for host, num in on_host.items() if num % size)[:blocks]
    lacking = {host: lack for lack, host in partial}
    elsewhere = (blocks - len(partial)) * size
    missing = sum(lacking.values()) + elsewhere
    where = [_on_hosts(lacking)] if lacking else []
    if elsewhere:
        where.append(f"{elsewhere} on any host" + (f", in blocks of {size} to a host" if size > 1 else ""))
    lost = Counter(member.host for member in previous.seats if member.id not in present) if previous else {}
    return (
        f"the layout ({layout.sizes}) needs {layout.num_needed} rank{'' if layout.num_needed == 1 else 's'}"
        + (f", in blocks of {size} on one host each" if size > 1 else "")
        + f"; {len(present)} {'is' if len(present) == 1 else 'are'} present, and {missing} more "
        + f"{'is' if missing == 1 else 'are'} needed: {', '.join(where)}."
        + (f" Lost since the previous plan: {_on_hosts(lost)}." if lost else "")
    )


def _on_hosts(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{num} on {host}" for host, num in ordered[:MAX_HOSTS_NAMED]]
    rest = ordered[MAX_HOSTS_NAMED:]
    return ", ".join(named + ([f"{sum(num for _, num in rest)} on {len(rest)} more hosts"] if rest else []))
