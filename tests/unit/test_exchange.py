"""The rounds of an exchange: everybody's number reaches everybody once, in few messages, also where ranks die."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping

import pytest

from elasticgang.collectives.exchange import rounds

Sum = tuple[int, ...]  # of which ranks, in ascending order; one that is in it twice stands there twice


def exchanged(size: int, last_rounds: Mapping[int, int] | None = None) -> list[Sum | None]:
    """The sum of each rank once nothing moves any more; None of one that has none. `last_rounds`: of ranks that die,
    the number of rounds that each ends; its message of the next one still arrives."""
    totals: list[Sum] = [(rank,) for rank in range(size)]
    todo = [deque(rounds(rank, size)) for rank in range(size)]
    sent: dict[tuple[int, int], deque[Sum]] = {pair: deque() for pair in itertools.permutations(range(size), 2)}
    num_done, has_sent, moved = [0] * size, [False] * size, True
    while moved:
        moved = False
        for rank in range(size):
            if not todo[rank]:
                continue
            now = todo[rank][0]
            if now.sends and not has_sent[rank]:
                sent[rank, now.peer].append(totals[rank])
                has_sent[rank] = moved = True
            if num_done[rank] >= (last_rounds or {}).get(rank, size):
                continue
            if now.receives:
                if not sent[now.peer, rank]:
                    continue
                part = sent[now.peer, rank].popleft()
                totals[rank] = tuple(sorted(totals[rank] + part)) if now.adds else part
            todo[rank].popleft()
            num_done[rank] += 1
            has_sent[rank], moved = False, True
    assert last_rounds is not None or not any(sent.values())
    return [None if todo[rank] else totals[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [*range(1, 34), 100, 128])
def test_each_number_reaches_each_rank_once(size: int) -> None:
    assert exchanged(size) == [tuple(range(size))] * size


@pytest.mark.parametrize(("size", "most"), [(8, 3), (9, 4), (32, 5), (33, 6), (1000, 10), (4096, 12)])
def test_the_messages_of_a_rank_grow_with_the_logarithm(size: int, most: int) -> None:
    assert max(sum(each.sends for each in rounds(rank, size)) for rank in range(size)) == most


@pytest.mark.parametrize("size", range(2, 12))
def test_who_has_a_sum_has_it_of_everybody_though_ranks_die(size: int) -> None:
    """EXCHANGE-2, so that the commit rule's model holds: some members hear that a vote has passed, all of its ballots
    were given then, and the others are in doubt."""
    everybody = tuple(range(size))
    in_doubt = 0
    for dead in itertools.combinations(range(size), 2 if size > 2 else 1):
        for last in itertools.product(range(4), repeat=len(dead)):
            sums = exchanged(size, dict(zip(dead, last, strict=True)))
            assert set(sums) <= {everybody, None}
            in_doubt += 0 < sums.count(None) < size
    assert in_doubt  # the case occurs in which some know and others do not
