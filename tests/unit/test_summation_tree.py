"""The summation tree: whoever divides its leaves, the order of the additions is the same."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from elasticgang.train.partition import slots_of
from elasticgang.train.summation_tree import insert, leaves_of, nodes_of, total_of

# A sum is written as the tree of its additions, so that two of them are equal only if all their additions are.
Sum = list[str]


def add(left: Sum, right: Sum) -> None:
    left[:] = [f"({left[0]}+{right[0]})"]


def nodes_with_sums(leaves: Iterable[int]) -> dict[range, Sum]:
    nodes: dict[range, Sum] = {}
    for leaf in leaves:
        insert(nodes, range(leaf, leaf + 1), [str(leaf)], add)
    return nodes


def divided(num: int, cuts: list[int]) -> str:
    """The sum of leaves that are divided at `cuts`: each part along its nodes, then these along the rest."""
    at = [0, *sorted(cut % (num + 1) for cut in cuts), num]
    return total_of_parts([range(first, last) for first, last in itertools.pairwise(at)])


def total_of_parts(parts: Iterable[Iterable[int]]) -> str:
    nodes: dict[range, Sum] = {}
    for part in parts:
        for node, total in nodes_with_sums(part).items():
            insert(nodes, node, total, add)
    return total_of(nodes, add)[0]


# TREE-1
@given(num=st.integers(1, 130), cuts=st.lists(st.integers(0, 1000), max_size=9))
def test_any_division_of_the_leaves_adds_in_the_same_order(num: int, cuts: list[int]) -> None:
    assert divided(num, cuts) == divided(num, [])


# TREE-1
@given(ranks=st.lists(st.integers(0, 4), min_size=1, max_size=70), order=st.randoms(use_true_random=False))
def test_leaves_in_any_order_on_any_rank_are_added_in_the_same_order(ranks: list[int], order: Random) -> None:
    """A rank that has kept leaves of an earlier try computes any others."""
    parts: list[list[int]] = [[] for _ in range(5)]
    for leaf, rank in enumerate(ranks):
        parts[rank].append(leaf)
    for part in parts:
        order.shuffle(part)
    order.shuffle(parts)
    assert total_of_parts(parts) == divided(len(ranks), [])


# TREE-1
def test_the_order_of_seven_leaves_is_written_here() -> None:
    assert divided(7, [3]) == "((((0+1)+(2+3))+(4+5))+6)"


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40), cuts=st.lists(st.integers(0, 1000), max_size=6))
def test_any_division_gives_the_same_bits(values: list[float], cuts: list[int]) -> None:
    """Non-finite values too. NaN is one value here: its sign and payload are those of the processor."""

    def add_floats(left: list[float], right: list[float]) -> None:
        left[0] += right[0]

    def total(cuts: list[int]) -> bytes:
        num = len(values)
        at = [0, *sorted(cut % (num + 1) for cut in cuts), num]
        nodes: dict[range, list[float]] = {}
        for first, last in itertools.pairwise(at):
            own: dict[range, list[float]] = {}
            for leaf in range(first, last):
                insert(own, range(leaf, leaf + 1), [values[leaf]], add_floats)
            for node, value in own.items():
                insert(nodes, node, value, add_floats)
        found = total_of(nodes, add_floats)[0]
        return b"nan" if found != found else struct.pack("d", found)

    assert total(cuts) == total([])


@given(first=st.integers(0, 300), num=st.integers(0, 300))
def test_the_nodes_of_a_range_are_aligned_few_and_make_it_up(first: int, num: int) -> None:
    nodes = nodes_of(range(first, first + num))
    assert [leaf for node in nodes for leaf in node] == list(range(first, first + num))
    for node in nodes:
        assert len(node).bit_count() == 1
        assert node.start % len(node) == 0
    assert len(nodes) <= max(1, 2 * num.bit_length())
    if first == 0:
        assert len(nodes) == num.bit_count()
    assert nodes_of(tuple(range(first, first + num))) == nodes


@given(num_runs=st.integers(1, 60), num_groups=st.integers(1, 8), size=st.integers(1, 4))
def test_the_leaves_of_all_parts_are_the_tree_in_whichever_order(num_runs: int, num_groups: int, size: int) -> None:
    """And a slot is the same leaf for every number of groups."""
    num, count = num_runs * size, num_groups * size
    leaf_of: dict[int, int] = {}
    for index in range(count):
        leaves, slots = (
            leaves_of(num, index, count, size, of_group=False),
            slots_of(num, index, count, size),
        )
        leaf_of.update(zip(slots, leaves, strict=True))
    assert sorted(leaf_of) == sorted(leaf_of.values()) == list(range(num))
    alone: dict[int, int] = {}
    for place in range(size):
        alone.update(
            zip(slots_of(num, place, size, size), leaves_of(num, place, size, size, of_group=False), strict=True)
        )
    assert leaf_of == alone


@given(num_runs=st.integers(1, 60), num_groups=st.integers(1, 8), size=st.integers(1, 4))
def test_the_slots_of_a_replica_group_at_one_time_are_one_leaf(num_runs: int, num_groups: int, size: int) -> None:
    num, count = num_runs * size, num_groups * size
    for index in range(count):
        leaves, slots = leaves_of(num, index, count, size, of_group=True), slots_of(num, index, count, size)
        assert [slot // size for slot in slots] == list(leaves)
