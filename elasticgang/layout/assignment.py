"""Assigns a member to each seat: members that stay, and members that fill the rest.

Pure; `planner.py` defines the terms and the rules (PLAN-2 to PLAN-5). Seats are numbered as in `retention.py`; a block
has the number `group * num_blocks + position`.

The steps: kept groups stay. Granted blocks of other groups move to where a block is missing at the same model
coordinates, which copies no state. Idle members of the same host fill the holes within blocks. Blocks of idle members
fill the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elasticgang.layout.retention import Block, BlockLayout, PreviousSeats, Retention, choose_retained
from elasticgang.layout.seat_plan import Member

NO_HOST = ""


def assign_seats(
    blocks_of_group: BlockLayout, num_groups: int, waiting: Sequence[Member], previous_seats: PreviousSeats
) -> tuple[list[Member], list[Member]]:
    """The member of each seat of `num_groups` replica groups, and the members without a seat.

    `waiting`: members without a former seat, in the order in which to seat them. Members without a seat are returned in
    this order, followed by those that lost their seat. The hosts must have members for `num_groups` groups.
    """
    everyone = [*waiting, *filter(None, previous_seats.survivors)]
    room = {
        host: num // blocks_of_group.block_size for host, num in Counter(member.host for member in everyone).items()
    }
    retention = choose_retained(blocks_of_group, num_groups, room, previous_seats)
    board = _Board(blocks_of_group, num_groups, retention, previous_seats)
    board.place(retention.granted)
    board.fill(everyone, len(waiting))
    seats = list(filter(None, board.seats))
    return seats, _without(everyone, seats)


class _Board:
    """The partly filled seats.

    `hosts`: the former host of each block of a kept group; NO_HOST for blocks of new groups. `taken`: whether each
    block has a member. `begun`: block -> its host, for taken blocks with empty places.
    """

    def __init__(
        self, blocks_of_group: BlockLayout, num_groups: int, retention: Retention, previous_seats: PreviousSeats
    ) -> None:
        unit = blocks_of_group.unit
        self.cut = blocks_of_group
        self.seats: list[Member | None] = []
        self.hosts: list[str] = []
        self.begun: dict[int, str] = {}
        self.index_of = {group: index for index, group in enumerate(retention.kept)}
        for start in (group * unit for group in retention.kept):
            self.seats += previous_seats.survivors[start : start + unit]
            self.hosts += [previous_seats.hosts[start + places[0]] for places in blocks_of_group.places]
        self.seats += [None] * (num_groups * unit - len(self.seats))
        self.hosts += [NO_HOST] * (num_groups * blocks_of_group.num_blocks - len(self.hosts))
        for block in retention.disputed:
            if block.group in self.index_of:
                for seat in self._seats_of(self._former_index(block)):
                    self.seats[seat] = None
        firsts = [places[0] for places in blocks_of_group.places]
        self.taken = [
            self.seats[start + first] is not None for start in range(0, len(self.seats), unit) for first in firsts
        ]

    def place(self, granted: Sequence[Block]) -> None:
        """Put each block where it was if its group is kept and that place is empty, otherwise where a block is
        missing."""
        moving: dict[int, list[Block]] = defaultdict(list)
        for block in sorted(granted, key=lambda block: -len(block.held)):
            if block.group in self.index_of and not self.taken[self._former_index(block)]:
                self._put(self._former_index(block), block)
            else:
                moving[block.position].append(block)
        for position, blocks in moving.items():
            slots = [i for i in range(position, len(self.taken), self.cut.num_blocks) if not self.taken[i]]
            for index, number in self._paired(slots, [block.host for block in blocks]):
                self._put(index, blocks[number])

    def fill(self, everyone: Sequence[Member], num_waiting: int) -> None:
        """Fill the holes in blocks from their hosts, then whole blocks; waiting members first (PLAN-5)."""
        seated = {member.id for member in filter(None, self.seats)}
        idle: dict[str, deque[tuple[int, Member]]] = defaultdict(deque)
        for turn, member in enumerate(everyone):
            if member.id not in seated:
                idle[member.host].append((turn, member))
        for index, host in self.begun.items():
            for seat in self._seats_of(index):
                if self.seats[seat] is None:
                    self.seats[seat] = idle[host].popleft()[1]
        bundles = _bundles(idle, self.cut.block_size)
        num_waited = bisect_left(bundles, num_waiting, key=lambda bundle: bundle.turn)
        for offered in (bundles[:num_waited], bundles[num_waited:]):
            slots = [index for index, taken in enumerate(self.taken) if not taken]
            for index, number in self._paired(slots, [bundle.members[0].host for bundle in offered]):
                for seat, member in zip(self._seats_of(index), offered[number].members, strict=True):
                    self.seats[seat] = member
                self.taken[index] = True

    def _paired(self, slots: Sequence[int], hosts: Sequence[str]) -> list[tuple[int, int]]:
        """Pairs of a slot and the number of an offer, as many as possible. An offer on the slot's host has precedence.

        `hosts`: the host of each offer. Slots and offers are used in their order.
        """
        wanted = {self.hosts[slot] for slot in slots} - {NO_HOST}
        on_host: dict[str, deque[int]] = defaultdict(deque)
        for number, host in enumerate(hosts if wanted else ()):
            if host in wanted:
                on_host[host].append(number)
        pairs = [(slot, on_host[host].popleft()) for slot in slots if on_host.get(host := self.hosts[slot])]
        paired, chosen = {slot for slot, _ in pairs}, {number for _, number in pairs}
        elsewhere = (number for number in range(len(hosts)) if number not in chosen)
        return pairs + list(zip((slot for slot in slots if slot not in paired), elsewhere, strict=False))

    def _put(self, index: int, block: Block) -> None:
        start = index // self.cut.num_blocks * self.cut.unit
        for place, member in block.held.items():
            self.seats[start + place] = member
        self.taken[index] = True
        if len(block.held) < self.cut.block_size:
            self.begun[index] = block.host

    def _former_index(self, block: Block) -> int:
        return self.index_of[block.group] * self.cut.num_blocks + block.position

    def _seats_of(self, index: int) -> list[int]:
        group, position = divmod(index, self.cut.num_blocks)
        return [group * self.cut.unit + place for place in self.cut.places[position]]


class _Bundle(NamedTuple):
    """Idle members of one host that can fill a block. `turn`: the position of the last of them in the seating order."""

    turn: int
    members: list[Member]


def _bundles(idle: Mapping[str, deque[tuple[int, Member]]], size: int) -> list[_Bundle]:
    """As many bundles as possible, in the seating order."""
    bundles = []
    for waiting in idle.values():
        turns = list(waiting)
        for end in range(size, len(turns) + 1, size):
            bundles.append(_Bundle(turns[end - 1][0], [member for _, member in turns[end - size : end]]))
    return sorted(bundles, key=lambda bundle: bundle.turn)


def _without(everyone: Sequence[Member], seated: Sequence[Member]) -> list[Member]:
    if len(seated) == len(everyone):
        return []
    ids = {member.id for member in seated}
    return [member for member in everyone if member.id not in ids]
