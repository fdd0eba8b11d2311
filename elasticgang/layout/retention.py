"""Retention: which survivors of the previous plan stay at their model coordinates.

Pure; `planner.py` defines the terms and the rules (PLAN-3, PLAN-4). Seats are numbered by replica group, and in rank
order within a group: a seat is `group * unit + model index`.

The survivors of each block claim to stay, and the matching grants the heaviest claims that fit
(`max_weight_matching.py`). An undisputed block takes no part in the matching: a whole block of a kept group, on a host
that lost no member. Such a block has the greatest possible weight, and its host has room for all of its blocks, so some
best choice contains it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elasticgang.layout.max_weight_matching import Claim, max_weight_matching
from elasticgang.layout.seat_plan import Member


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of a replica group. `places`: for each position, the model indices of the block there."""

    places: tuple[tuple[int, ...], ...]
    num_blocks: int = field(init=False)
    block_size: int = field(init=False)
    unit: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_blocks", len(self.places))
        object.__setattr__(self, "block_size", len(self.places[0]))
        object.__setattr__(self, "unit", self.num_blocks * self.block_size)


class PreviousSeats(NamedTuple):
    """The previous plan by seat: the member if it is still present, and the host."""

    survivors: Sequence[Member | None]
    hosts: Sequence[str]


class Block(NamedTuple):
    """Members of one host in one block. `held`: model index -> member. `group`: their former group."""

    host: str
    group: int
    position: int
    held: dict[int, Member]


class Retention(NamedTuple):
    """`kept`: the former groups that stay, ascending. Their survivors keep their seats, except in `disputed` blocks.

    `granted`: the disputed blocks, of kept and of other groups, that stay together at their model coordinates.
    """

    kept: Sequence[int]
    disputed: Sequence[Block]
    granted: Sequence[Block]


def choose_retained(
    blocks_of_group: BlockLayout, num_groups: int, room: Mapping[str, int], previous_seats: PreviousSeats
) -> Retention:
    """Choose for `num_groups` replica groups. `room`: the number of blocks that each host's members can fill."""
    groups = range(len(previous_seats.survivors) // blocks_of_group.unit)
    starts = [group * blocks_of_group.unit for group in groups]
    crowded_hosts = _crowded_hosts(blocks_of_group, previous_seats)
    crowded = [
        block
        for group, start in zip(groups, starts, strict=True)
        if not crowded_hosts.isdisjoint(previous_seats.hosts[start : start + blocks_of_group.unit])
        for block in _blocks(blocks_of_group, previous_seats, group, crowded_hosts.__contains__)
    ]
    held = [len(list(filter(None, previous_seats.survivors[start : start + blocks_of_group.unit]))) for start in starts]
    for block in _leaving_their_host(crowded, room, held):
        held[block.group] -= len(block.held)
    kept = sorted(sorted(groups, key=lambda group: (-held[group], group))[:num_groups])
    others = sorted(set(groups).difference(kept))
    disputed = crowded + [
        block
        for group in others
        for block in _blocks(blocks_of_group, previous_seats, group, lambda host: host not in crowded_hosts)
    ]
    granted = _granted(
        disputed, set(kept), room, _column_room(blocks_of_group, num_groups, previous_seats, kept, disputed)
    )
    return Retention(kept, disputed, granted)


def _crowded_hosts(blocks_of_group: BlockLayout, previous_seats: PreviousSeats) -> set[str]:
    """Hosts whose blocks may claim more room than there is: those that lost a member, unless blocks are single seats.

    All hosts, if a block spanned hosts, or a survivor has changed its host.
    """
    if blocks_of_group.block_size == 1:
        return set()
    for member, host in zip(previous_seats.survivors, previous_seats.hosts, strict=True):
        if member is not None and member.host != host:
            return set(previous_seats.hosts)
    for start in range(0, len(previous_seats.hosts), blocks_of_group.unit):
        for places in blocks_of_group.places:
            host = previous_seats.hosts[start + places[0]]
            if any(previous_seats.hosts[start + place] != host for place in places):
                return set(previous_seats.hosts)
    return {host for member, host in zip(previous_seats.survivors, previous_seats.hosts, strict=True) if member is None}


def _blocks(
    blocks_of_group: BlockLayout, previous_seats: PreviousSeats, group: int, wanted: Callable[[str], bool]
) -> Iterator[Block]:
    """The survivors of the group's blocks on wanted hosts; a block that spans hosts is split by host."""
    start = group * blocks_of_group.unit
    for position, places in enumerate(blocks_of_group.places):
        if not wanted(previous_seats.hosts[start + places[0]]):
            continue
        parts: dict[str, dict[int, Member]] = {}
        for place in places:
            member = previous_seats.survivors[start + place]
            if member is not None:
                parts.setdefault(member.host, {})[place] = member
        for host, held in parts.items():
            yield Block(host, group, position, held)


def _leaving_their_host(blocks: Sequence[Block], room: Mapping[str, int], held: Sequence[int]) -> Iterator[Block]:
    """The blocks that would have to leave if each host decided alone: those that have lost the most members."""
    by_host: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        by_host[block.host].append(block)
    for host, own in by_host.items():
        if len(own) > room[host]:
            own.sort(key=lambda block: (-len(block.held), -held[block.group], block.group, block.position))
            yield from own[room[host] :]


def _column_room(
    blocks_of_group: BlockLayout,
    num_groups: int,
    previous_seats: PreviousSeats,
    kept: Sequence[int],
    disputed: Sequence[Block],
) -> list[int]:
    """For each position, the number of blocks that disputed blocks can fill."""
    if not disputed:
        return []
    contested = {(block.group, block.position) for block in disputed}
    return [
        num_groups
        - sum(
            previous_seats.survivors[group * blocks_of_group.unit + places[0]] is not None
            and (group, position) not in contested
            for group in kept
        )
        for position, places in enumerate(blocks_of_group.places)
    ]


def _granted(
    disputed: Sequence[Block], kept: Collection[int], room: Mapping[str, int], column_room: Sequence[int]
) -> list[Block]:
    """The blocks that stay: as many members as possible (PLAN-3); among such choices, as many blocks of kept groups as
    possible."""
    alike: dict[tuple[str, int], list[Block]] = defaultdict(list)
    for block in disputed:
        alike[block.host, block.position].append(block)
    scale = len(disputed) + 1  # one member outweighs any number of blocks of kept groups
    claims = []
    for (host, position), similar in alike.items():
        favours = sum(block.group in kept for block in similar)
        for rank, num_held in enumerate(_gains(similar)):
            claims.append(Claim(host, position, num_held * scale + (rank < favours)))
    taken = Counter[tuple[str, int]]()
    for claim, grant in zip(claims, max_weight_matching(claims, room, column_room), strict=True):
        taken[claim.row, claim.column] += grant
    granted = []
    for key, similar in alike.items():
        similar.sort(key=lambda block: (block.group not in kept, -len(block.held), block.group))
        retention, leaving = similar[: taken[key]], similar[taken[key] :]
        for block in leaving:
            _hand_over(block, retention)
        granted += retention
    return granted


def _gains(similar: Sequence[Block]) -> list[int]:
    """How many further members stay with the first, second, ... of the blocks at one position and on one host."""
    if len(similar) == 1:
        return [len(similar[0].held)]
    holders = Counter(place for block in similar for place in block.held).values()
    return [sum(num > rank for num in holders) for rank in range(max(holders))]


def _hand_over(leaving: Block, retention: Sequence[Block]) -> None:
    """Let members of a leaving block fill holes at their own model coordinates in other blocks of their host."""
    for block in retention:
        for place in [place for place in leaving.held if place not in block.held]:
            block.held[place] = leaving.held.pop(place)
