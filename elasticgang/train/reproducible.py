"""Sums of all slots' gradients that are the same, bit for bit, for every number of ranks and every division of slots.

A rank sums its slots along the nodes of the summation tree (`summation_tree.py`). In a first exchange, each rank gets
its part of the elements of all nodes, and sums it along the rest of the tree. In a second one, each rank gets all
parts. Both together send as many bytes as an all-reduce does if each rank has one node.

REPRODUCIBLE-1  A gradient is added to another slot's along the tree only. A parameter without a gradient in a slot has
    the gradient 0.0 there.
REPRODUCIBLE-2  Every rank knows the leaves of all ranks, so that all start the same collectives with the same sizes.
REPRODUCIBLE-3  `reduce` never waits. All ranks call `gather` in the same order.

A rank holds up to `log2(slots) + 1` sums of its slots (twice that if they begin in the middle of a node; as many for
each of several runs of slots). It sends and receives as many as the rank that has the most. With `keeps`, it holds one
sum more, and two for each loose leaf (SUM-2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elasticgang.collectives.collective import Collective
from elasticgang.gang import Gang
from elasticgang.train.slot_sum import SlotSum, Vector
from elasticgang.train.summation_tree import insert, nodes_of, sibling_of, total_of


def _add(left: Tensor, right: Tensor) -> None:
    left.add_(right)


@dataclass
class _Sent:
    """The sum of a node as it is sent. `is_copy`: not in the memory of a node of this rank (SUM-1)."""

    vector: Vector
    is_copy: bool = False


class ReproducibleSum(SlotSum[range]):
    """See `SlotSum`. `reduce` starts the first exchange, `gather` waits for it and starts the second one
    (REPRODUCIBLE-3)."""

    def __init__(
        self, like: Sequence[Tensor], empty: Callable[[int], Tensor], *, keeps: bool = False, num_loose: int = 0
    ) -> None:
        self._sent = self._received = torch.empty(0, dtype=like[0].dtype, device=like[0].device)
        super().__init__(like, empty, keeps=keeps, num_loose=num_loose)

    def _forget(self) -> None:
        super()._forget()
        self._whole: dict[range, Vector] = {}  # the nodes of all leaves of this rank, from `reduce` on
        self._copies: list[Vector] = []  # those of them that are in memory of their own

    def _add_to_nodes(self, leaf: int, gradients: Sequence[Tensor | None]) -> None:
        node = range(leaf, leaf + 1)
        if (other := sibling_of(node)) in self._nodes:
            total = self._nodes.pop(other)
            total.add(gradients)
            start = min(leaf, other.start)
            insert(self._nodes, range(start, start + 2), total, self._merge)
        else:
            total = self._take(self._padded(len(self._leaves)))
            total.set(gradients)
            self._nodes[node] = total

    def _insert(self, leaf: int, vector: Vector) -> None:
        insert(self._nodes, range(leaf, leaf + 1), vector, self._merge)

    @torch.no_grad()
    def reduce(self, gang: Gang) -> None:
        self._complete()
        most = self._most_nodes()
        if not self._num or not most:
            return
        self._whole = self._with_loose() if self._loose else self._nodes
        if gang.size == 1:
            return
        length = most * self._padded(gang.size)
        self._received = self._room(self._received, length)
        exchange = Collective("all_to_all", (self._received[:length],), (self._sent_by(gang, most),))
        self._works = [gang.start(exchange)]

    def _with_loose(self) -> dict[range, Vector]:
        """The nodes, with the loose leaves in them. Sums that these are a part of are copies (SUM-1)."""
        sent = {node: _Sent(vector) for node, vector in self._nodes.items()}
        for leaf, vector in self._loose.items():
            copy = self._copy(vector, self._padded(len(self._leaves)))
            self._copies.append(copy)
            insert(sent, range(leaf, leaf + 1), _Sent(copy, is_copy=True), self._add_sent)
        return {node: each.vector for node, each in sent.items()}

    def _add_sent(self, left: _Sent, right: _Sent) -> None:
        """One of them is a copy: it has just been inserted, or is a sum with such a one."""
        if not left.is_copy:
            left.vector, right.vector = right.vector, left.vector
            left.is_copy = True
        self._add_up(left.vector, right.vector)

    def _sent_by(self, gang: Gang, most: int) -> Tensor:
        """For each rank in turn, its part of each of this rank's nodes, and anything in the place of those that other
        ranks have more: parts of one size need no copy in the comm process."""
        length, num = self._padded(gang.size), len(self._whole)
        nodes = [self._whole[node] for node in nodes_of(self._leaves[gang.rank])]
        if num == most == 1:
            return nodes[0].flat[:length]
        self._sent = self._room(self._sent, most * length)
        sent = self._sent[: most * length]
        for place, total in enumerate(nodes):
            sent.view(gang.size, most, -1)[:, place] = total.flat[:length].view(gang.size, -1)
        return sent

    @torch.no_grad()
    def gather(self, gang: Gang) -> None:
        if gang.size == 1 or not self._num:
            if self._whole:
                self._result = self._total()
        elif self._wait():
            length, most = self._padded(gang.size), self._most_nodes()
            received = self._received[: most * length].view(gang.size, most, -1)
            nodes: dict[range, Tensor] = {}
            for rank, leaves in enumerate(self._leaves):
                for place, node in enumerate(nodes_of(leaves)):
                    insert(nodes, node, received[rank, place], _add)
            if self._nodes and not self._keeps:
                self._result = self._nodes.pop(next(iter(self._nodes)))
            else:
                self._result = self._take(length)
            output, part = self._result.flat[:length], total_of(nodes, _add)
            self._works = [gang.start(Collective("all_gather_single", (output,), (part,)))]

    def _total(self) -> Vector:
        """The sum of this rank's nodes, which are the whole tree."""
        if not self._keeps:
            nodes, self._nodes = self._nodes, {}
            return total_of(nodes, self._merge)
        first = min(self._whole, key=lambda node: node.start)
        total = self._copy(self._whole[first], self._padded(1))
        return total_of({**self._whole, first: total}, self._add_up)

    def _end(self) -> None:
        for copy in self._copies:
            self._give_back(copy)
        super()._end()

    def _most_nodes(self) -> int:
        """That a rank has (REPRODUCIBLE-2)."""
        return max(len(nodes_of(leaves)) for leaves in self._leaves)

    def _room(self, vector: Tensor, length: int) -> Tensor:
        """`vector`, or a longer one."""
        return vector if vector.numel() >= length else self._empty(length)
