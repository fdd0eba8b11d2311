"""The tree in which `reduction="reproducible"` sums the gradients of a step's slots.

Pure. The leaves are the slots in order. A node is a range of `2**i` leaves that starts at a multiple of `2**i`; its sum
is the sum of its left half plus the sum of its right half. The nodes without a sibling are summed from left to right.

TREE-1  The order of all additions depends on the number of leaves alone, not on the ranks that divide them: a rank sums
    the nodes that its leaves fill, and who has all nodes goes on as one rank with all leaves would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from elasticgang.train.partition import slots_of

_T = TypeVar("_T")


def sibling_of(node: range) -> range:
    """The other half of the node that has `node` as one half."""
    start = node.start ^ len(node)
    return range(start, start + len(node))


def insert(nodes: dict[range, _T], node: range, value: _T, add: Callable[[_T, _T], None]) -> None:
    """Put a node and its sum into `nodes`, and merge siblings (TREE-1). `add(left, right)` adds `right` to `left`."""
    while (other := sibling_of(node)) in nodes:
        left, right = (value, nodes.pop(other)) if node.start < other.start else (nodes.pop(other), value)
        add(left, right)
        start = min(node.start, other.start)
        node, value = range(start, start + 2 * len(node)), left
    nodes[node] = value


def total_of(nodes: Mapping[range, _T], add: Callable[[_T, _T], None]) -> _T:
    """The sum of nodes that `insert` has left, which are all leaves of the tree."""
    total, *others = (nodes[node] for node in sorted(nodes, key=_start))
    for value in others:
        add(total, value)
    return total


def nodes_of(leaves: Sequence[int]) -> list[range]:
    """The nodes that `insert` leaves of `leaves`, in order. `leaves`: a range or a tuple."""
    return list(_nodes_of(leaves))


@lru_cache(maxsize=1 << 14)  # every bucket asks for those of every rank, in every step
def _nodes_of(leaves: Sequence[int]) -> tuple[range, ...]:
    nodes: dict[range, None] = {}
    for leaf in leaves:
        insert(nodes, range(leaf, leaf + 1), None, lambda left, right: None)
    return tuple(sorted(nodes, key=_start))


def _start(node: range) -> int:
    return node.start


def leaves_of(num_slots: int, index: int, count: int, group_size: int, *, of_group: bool) -> range:
    """The leaves of the slots of part `index` of `count` (`slots_of`).

    `of_group`: the ranks of a replica group compute one gradient of `group_size` slots, which is one leaf. Otherwise
    each slot is a leaf, and those of the parts at one place in their groups are consecutive.
    """
    num_runs = num_slots // group_size
    group, place = divmod(index, group_size)
    runs = slots_of(num_runs, group, count // group_size)
    first = 0 if of_group else place * num_runs
    return range(first + runs.start, first + runs.stop)
