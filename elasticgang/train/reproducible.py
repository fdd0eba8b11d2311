"""Sums of all slots' gradients that are the same, bit for bit, for every number of ranks and every division of slots.

A rank sums its slots along the nodes of the summation tree (`summation_tree.py`). In a first exchange, each rank gets
its part of the elements of all nodes, and sums it along the rest of the tree. In a second one, each rank gets all
parts. Both together send as many bytes as an all-reduce does if each rank has one node.

REPRODUCIBLE-1  A gradient is added to another slot's along the tree only. A parameter without a gradient in a slot has
    the gradient 0.0 there.
REPRODUCIBLE-2  Every rank knows the leaves of all ranks, so that all start the same collectives with the same sizes.
REPRODUCIBLE-3  `reduce` never waits. All ranks call `gather` in the same order.

REPRODUCIBLE-4  With `keeps`, no exchange changes the sums of this rank's nodes. They stay after the step, until
    `begin` or `release` drops them.

A rank holds up to `log2(slots) + 1` sums of its slots (twice that if they begin in the middle of a node; as many for
each of several runs of slots). It sends and receives as many as the rank that has the most. With `keeps`, it holds one
sum more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.work import Work
from elasticgang.gang import Gang
from elasticgang.train.summation_tree import insert, nodes_of, sibling_of, total_of

_PADDING = 64  # elements: so many ranks divide a vector into equal parts without new memory


class _Vector:
    """Memory for gradients in the shapes of `like`, and their views."""

    def __init__(self, flat: Tensor, like: Sequence[Tensor]) -> None:
        self.flat = flat
        parts = torch.split(flat[: sum(map(Tensor.numel, like))], [each.numel() for each in like])
        self.views = [_as(part, each) for part, each in zip(parts, like, strict=True)]

    def set(self, gradients: Iterable[Tensor | None]) -> None:
        for view, gradient in zip(self.views, gradients, strict=True):
            _ = view.zero_() if gradient is None else view.copy_(gradient)

    def add(self, gradients: Iterable[Tensor | None]) -> None:
        for view, gradient in zip(self.views, gradients, strict=True):
            view.add_(0.0 if gradient is None else gradient)  # REPRODUCIBLE-1: both make 0.0 of -0.0


def _as(flat: Tensor, like: Tensor) -> Tensor:
    """`flat` in the shape of `like`, and in its order of dimensions in memory."""
    dims = sorted(range(like.dim()), key=like.stride, reverse=True)
    return flat.view([like.shape[dim] for dim in dims]).permute([dims.index(dim) for dim in range(like.dim())])


def _add(left: Tensor, right: Tensor) -> None:
    left.add_(right)


class ReproducibleSum:
    """The sum of one group of gradients, which are reduced together. In each step: `begin`, `add` for each slot,
    `reduce`, `gather`, `finish`, or `drop` at any time.

    `like`: tensors in the shapes of the gradients, of one dtype and device. `empty`: allocates a vector of so many
    elements. `keeps`: the nodes outlive the step (REPRODUCIBLE-4).
    """

    def __init__(self, like: Sequence[Tensor], empty: Callable[[int], Tensor], *, keeps: bool = False) -> None:
        self._like, self._empty, self._keeps = [each.detach() for each in like], empty, keeps
        self._num = sum(map(Tensor.numel, like))
        self._free: list[_Vector] = []
        self._result: _Vector | None = None  # the gradients lie in it until the next `begin`
        self._sent = self._received = torch.empty(0, dtype=like[0].dtype)
        self._nodes: dict[range, _Vector] = {}
        self._forget()

    def _forget(self) -> None:
        self._leaves: Sequence[Sequence[int]] = ()
        self._due: deque[int] = deque()  # the leaves of this rank that are not added
        self._works: list[Work] = []

    @property
    def nodes(self) -> Collection[range]:
        """The nodes whose sums this rank has."""
        return self._nodes.keys()

    @torch.no_grad()
    def begin(self, leaves: Sequence[Sequence[int]], rank: int, kept: Collection[range] = ()) -> None:
        """A step begins. `leaves`: of each rank of the gang, ascending, each a range or a tuple. `kept`: the nodes of
        this rank whose sums stay. The gradients of the step before are no longer valid."""
        self._leaves = leaves
        self.release(except_for=kept)
        for node, vector in self._nodes.items():
            if vector.flat.numel() < (length := self._padded(len(leaves))):
                self._nodes[node] = longer = self._take(length)
                longer.flat[: self._num] = vector.flat[: self._num]
                self._give_back(vector)
        self._due = deque(leaf for leaf in leaves[rank] if not any(leaf in node for node in self._nodes))
        self._give_back(self._result)
        self._result = None

    def release(self, except_for: Collection[range] = ()) -> None:
        """Drop the sums of all nodes, or of all others than these."""
        for node in [node for node in self._nodes if node not in except_for]:
            self._give_back(self._nodes.pop(node))

    @torch.no_grad()
    def add(self, leaf: int, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradient of a leaf of this rank; None: zeros. So are those of leaves that are left out."""
        while (due := self._due.popleft()) < leaf:
            self._add(due, [None] * len(self._like))
        self._add(leaf, gradients)

    def _add(self, leaf: int, gradients: Sequence[Tensor | None]) -> None:
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

    def _merge(self, left: _Vector, right: _Vector) -> None:
        self._add_to(left, right)
        self._give_back(right)

    def _add_to(self, left: _Vector, right: _Vector) -> None:
        left.flat[: self._num].add_(right.flat[: self._num])

    def _complete(self) -> None:
        if self._due:
            self.add(self._due[-1], [None] * len(self._like))

    @torch.no_grad()
    def reduce(self, gang: Gang) -> None:
        """Start the first exchange (REPRODUCIBLE-3). All gradients of this rank are added."""
        self._complete()
        most = self._most_nodes()
        if gang.size == 1 or not self._num or not most:
            return
        length = most * self._padded(gang.size)
        self._received = self._room(self._received, length)
        exchange = Collective("all_to_all", (self._received[:length],), (self._sent_by(gang, most),))
        self._works = [gang.start(exchange)]

    def _sent_by(self, gang: Gang, most: int) -> Tensor:
        """For each rank in turn, its part of each of this rank's nodes, and anything in the place of those that other
        ranks have more: parts of one size need no copy in the comm process."""
        length, num = self._padded(gang.size), len(self._nodes)
        nodes = [self._nodes[node] for node in nodes_of(self._leaves[gang.rank])]
        if num == most == 1:
            return nodes[0].flat[:length]
        self._sent = self._room(self._sent, most * length)
        sent = self._sent[: most * length]
        for place, total in enumerate(nodes):
            sent.view(gang.size, most, -1)[:, place] = total.flat[:length].view(gang.size, -1)
        return sent

    @torch.no_grad()
    def gather(self, gang: Gang) -> None:
        """Wait for the first exchange, and start the second one."""
        if gang.size == 1 or not self._num:
            if self._nodes:
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

    def _total(self) -> _Vector:
        """The sum of this rank's nodes, which are the whole tree."""
        if not self._keeps:
            nodes, self._nodes = self._nodes, {}
            return total_of(nodes, self._merge)
        total, first = self._take(self._padded(1)), min(self._nodes, key=lambda node: node.start)
        total.flat[: self._num] = self._nodes[first].flat[: self._num]
        return total_of({**self._nodes, first: total}, self._add_to)

    def _most_nodes(self) -> int:
        """That a rank has (REPRODUCIBLE-2)."""
        return max(len(nodes_of(leaves)) for leaves in self._leaves)

    def finish(self) -> list[Tensor] | None:
        """Wait for the second exchange. Returns the gradients; None if no rank has slots, or the gang is poisoned."""
        result, is_alone = self._result, not self._works
        is_whole = self._wait() or is_alone
        self._end()
        return result.views if result is not None and is_whole else None

    def _wait(self) -> bool:
        """Wait for the exchange under way. False: the gang is poisoned, or none is under way."""
        completed = [work.wait() for work in self._works]
        return all(completed) and len(completed) > 0

    def drop(self) -> None:
        """Drop the sums of this step, but for the nodes with `keeps`."""
        self._wait()
        self._give_back(self._result)
        self._result = None
        self._end()

    def _end(self) -> None:
        if not self._keeps:
            self.release()
        self._forget()

    def _padded(self, size: int) -> int:
        """The elements, with as many more as `size` equal parts need."""
        return -(-self._num // size) * size

    def _room(self, vector: Tensor, length: int) -> Tensor:
        """`vector`, or a longer one."""
        return vector if vector.numel() >= length else self._empty(length)

    def _take(self, length: int) -> _Vector:
        while self._free:
            vector = self._free.pop()
            if vector.flat.numel() >= length:
                return vector
        flat = self._empty(max(length, self._num + _PADDING))
        flat[self._num :] = 0
        return _Vector(flat, self._like)

    def _give_back(self, vector: _Vector | None) -> None:
        if vector is not None and vector not in self._free:
            self._free.append(vector)
