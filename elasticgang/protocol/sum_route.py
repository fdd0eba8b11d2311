"""By which ranks the sums of a generation go: votes, and the totals of steps. Pure.

ROUTE-1  The ranks that one agent has started add up their numbers in shared memory. The first of them, by rank, then
    exchanges the sums with the first ranks of the other agents. So each rank's numbers are in the sum exactly once.
ROUTE-2  All ranks derive the same from the record alone: the agent of each seat. The name or address of a host says
    nothing about shared memory, because two containers of one machine may have the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from elasticgang.protocol.record import SPARE, Record, Seat


class SumRoute(NamedTuple):
    """`local`: the ranks that share memory with this one, and itself, in order. `firsts`: the first one of each agent,
    in order. Both are of the ranks with a seat."""

    local: tuple[int, ...]
    firsts: tuple[int, ...]

    @property
    def has_block(self) -> bool:
        """Whether the ranks of `local` use a block of shared memory."""
        return len(self.local) > 1


def sum_route(record: Record, rank: int) -> SumRoute:
    """The way of the sums for `rank`."""
    by_agent: dict[str, list[range]] = {}  # ROUTE-2
    own, first = "", 0
    for agent, _, count, _ in itertools.takewhile(lambda span: span.status != SPARE, record.spans):
        ranks = range(first, first + count)
        by_agent.setdefault(agent, []).append(ranks)
        if rank in ranks:
            own = agent
        first += count
    firsts = tuple([ranks[0].start for ranks in by_agent.values()])  # ROUTE-1
    return SumRoute(tuple(itertools.chain.from_iterable(by_agent[own])), firsts)


def sharing_members(own_seats: Sequence[Seat]) -> tuple[str, ...]:
    """The members of one agent that use a block, by its seats in a record; () if there is none."""
    seated = tuple(seat.member for seat in own_seats if seat.status != SPARE)
    return seated if len(seated) > 1 else ()
