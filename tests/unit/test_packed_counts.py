"""Counts that share the numbers of a sum."""

from __future__ import annotations

import random

import pytest

from elasticgang.protocol.packed_counts import PackedCounts


def total(packed: PackedCounts, of_ranks: list[dict[int, int]], source: random.Random) -> list[float]:
    """The ranks' numbers, added up in any order."""
    numbers = [packed.pack(counts) for counts in of_ranks]
    source.shuffle(numbers)
    return [sum(column) for column in zip(*numbers, strict=True)]


# PACK-1
@pytest.mark.parametrize("max_count", [1, 2, 3, 4, 9, 1000, 12_500, 2**52])
@pytest.mark.parametrize("num_counts", [1, 5, 52, 53, 54, 200])
def test_the_sum_of_packed_counts_has_the_sums_of_all_counts(num_counts: int, max_count: int) -> None:
    """Also if all are as large as they may be."""
    source, packed, num_ranks = random.Random(0), PackedCounts(num_counts, max_count), 40
    of_ranks: list[dict[int, int]] = [{} for _ in range(num_ranks)]
    expected = {index: source.choice([0, max_count, source.randint(0, max_count)]) for index in range(num_counts)}
    for index, left in expected.items():
        while left:
            part = source.randint(1, left)
            counts, left = source.choice(of_ranks), left - part
            counts[index] = counts.get(index, 0) + part
    found = packed.unpack(total(packed, of_ranks, source))
    assert found == {index: count for index, count in expected.items() if count}


def test_thousands_of_counts_need_few_numbers() -> None:
    """Of the parts of a model that 8,000 ranks have in 4 copies, and of as many learners."""
    assert PackedCounts(2000, 4).num_numbers == 91
    assert PackedCounts(8000, 1).num_numbers == 151
    assert PackedCounts(0, 1).pack({}) == []
