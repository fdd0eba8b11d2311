"""Seats the members after a change of the layout so that as much of the state as possible is in place (PLAN-8).

Pure; `planner.py` defines the terms. Seats are numbered as in `retention.py`.

With blocks of one seat, hosts do not matter, and the seating with the most state in place is a maximum-weight matching
between the parts that members hold and the parts of the new layout. Larger blocks are filled one by one, the host and
position with the most state in place first; where the seating of newcomers leaves more in place, that is taken.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from elasticgang.layout.max_weight_matching import Claim, max_weight_matching
from elasticgang.layout.overlap import Part, common_shares
from elasticgang.layout.parallel_layout import ParallelLayout
from elasticgang.layout.retention import BlockLayout
from elasticgang.layout.seat_plan import Member


class OverlapSeating:
    """`weight_of`: what a member would have in place in a seat, in units that make all weights whole numbers."""

    def __init__(self, layout: ParallelLayout, blocks_of_group: BlockLayout, kept: Mapping[str, Part]) -> None:
        """`kept`: the part that each holder keeps, also of another layout."""
        self.unit = layout.unit
        self._cut, self._kept = blocks_of_group, kept
        self._sizes = layout.pp, layout.sdp, layout.tp
        every = {self._sizes, *(part.sizes for part in kept.values())}
        self._scale = math.prod(math.lcm(*along) for along in zip(*every, strict=True))
        self._weights: dict[Part, dict[int, int]] = {}
        self._position_of = {place: at for at, places in enumerate(blocks_of_group.places) for place in places}

    def weight_of(self, member: Member, place: int) -> int:
        """`place`: the model index of the seat."""
        kept = self._kept.get(member.id)
        return 0 if kept is None else self._weights_of(kept).get(place, 0)

    def in_place(self, seats: Sequence[Member]) -> int:
        """What all members have in place. `seats`: by replica group."""
        return sum(self.weight_of(member, number % self.unit) for number, member in enumerate(seats))

    def seat(self, everyone: Sequence[Member], num_groups: int) -> list[Member]:
        """The members by replica group. Their hosts must have room for `num_groups` groups."""
        if self._cut.block_size == 1:
            return self._matched(everyone, num_groups)
        return self._filled(everyone, num_groups)

    def _weights_of(self, kept: Part) -> dict[int, int]:
        """By place, without those of weight 0."""
        if kept not in self._weights:
            shares = common_shares(kept, self._sizes)
            self._weights[kept] = {place: int(share * self._scale) for place, share in shares.items()}
        return self._weights[kept]

    def _matched(self, everyone: Sequence[Member], num_groups: int) -> list[Member]:
        alike: dict[Part | None, deque[Member]] = defaultdict(deque)
        for member in everyone:
            alike[self._kept.get(member.id)].append(member)
        claims, rows = [], {}
        for number, (kept, members) in enumerate(alike.items()):
            rows[str(number)] = members
            for place, weight in ({} if kept is None else self._weights_of(kept)).items():
                claims += [Claim(str(number), place, weight)] * min(len(members), num_groups)
        room = {row: len(members) for row, members in rows.items()}
        chosen = max_weight_matching(claims, room, [num_groups] * self.unit)
        columns: list[list[Member]] = [[] for _ in range(self.unit)]
        for claim, is_chosen in zip(claims, chosen, strict=True):
            if is_chosen:
                columns[claim.column].append(rows[claim.row].popleft())
        seated = {member.id for column in columns for member in column}
        rest = (member for member in everyone if member.id not in seated)
        for column in columns:
            column += [next(rest) for _ in range(num_groups - len(column))]
        return [column[group] for group in range(num_groups) for column in columns]

    def _filled(self, everyone: Sequence[Member], num_groups: int) -> list[Member]:
        idle: dict[str, list[Member]] = defaultdict(list)
        for member in everyone:
            idle[member.host].append(member)
        hosts = list(idle)
        blocks: list[list[dict[int, Member]]] = [[] for _ in self._cut.places]
        offers = [
            (-self._block(idle[host], self._cut.places[position])[0], number, position)
            for number, host in enumerate(hosts)
            for position in self._positions_of(idle[host])
        ]
        heapq.heapify(offers)
        while offers:
            offered, number, position = heapq.heappop(offers)
            members, filled = idle[hosts[number]], blocks[position]
            if len(filled) == num_groups or len(members) < self._cut.block_size:
                continue
            weight, block = self._block(members, self._cut.places[position])
            if -weight == offered:
                _take(block, members, filled)
                weight, _ = self._block(members, self._cut.places[position])
            if weight:
                heapq.heappush(offers, (-weight, number, position))  # a block of this host may have taken its members
        for members, (filled, places) in itertools.product(idle.values(), zip(blocks, self._cut.places, strict=True)):
            while len(filled) < num_groups and len(members) >= self._cut.block_size:  # nothing is in place
                _take(self._block(members, places)[1], members, filled)
        seats: list[Member] = []
        for group in range(num_groups):
            held = {place: member for of_position in blocks for place, member in of_position[group].items()}
            seats += [held[place] for place in range(self.unit)]
        return seats

    def _positions_of(self, members: Sequence[Member]) -> set[int]:
        """The positions in which any of the members has something in place."""
        kept = {part for member in members if (part := self._kept.get(member.id)) is not None}
        return {self._position_of[place] for part in kept for place in self._weights_of(part)}

    def _block(self, members: Sequence[Member], places: Sequence[int]) -> tuple[int, dict[int, Member]]:
        """What a block of these members has in place, and who sits where; members without state fill the rest."""
        pairs = [
            (-weight, turn, place)
            for turn, member in enumerate(members)
            for place in places
            if (weight := self.weight_of(member, place))
        ]
        block: dict[int, Member] = {}
        taken: set[int] = set()
        total = 0
        for negative, turn, place in sorted(pairs):
            if turn not in taken and place not in block:
                block[place], total = members[turn], total - negative
                taken.add(turn)
        rest = [member for turn, member in enumerate(members) if turn not in taken]
        rest.sort(key=lambda member: member.id in self._kept)
        block.update(zip((place for place in places if place not in block), rest, strict=False))
        return total, block


def _take(block: dict[int, Member], members: list[Member], filled: list[dict[int, Member]]) -> None:
    """Put the block, which is of some of `members`, behind those that are filled."""
    filled.append(block)
    taken = {member.id for member in block.values()}
    members[:] = [member for member in members if member.id not in taken]
