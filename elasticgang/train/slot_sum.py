"""The sum of the gradients of a rank's slots, apart from the parameters, and over the ranks of a gang.

A rank sums the leaves that it has in nodes. A leaf is a slot, or the slots that the ranks of a replica group compute at
one time. `reproducible.py` and `plain_sum.py` say what is a node, and how the ranks' nodes are added.

SUM-1  With `keeps`, no exchange changes the nodes of this rank. They stay after the step, until `begin` or `release`
    drops them.
SUM-2  The last `num_loose` leaves of this rank are in no node, so that it can leave them out again: another rank of its
    replica group may not have finished them. `begin` puts those into nodes that all of them have.
SUM-3  Behind the gradients, a vector counts for each of them the leaves that have it, and the counts are summed with
    the gradients. So all ranks know which gradient no leaf has: it is None, and no optimizer changes its parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from elasticgang.collectives.work import Work
from elasticgang.gang import Gang
from elasticgang.torch_private import add_all, copy_all

_PADDING = 64  # elements: so many ranks divide a vector into equal parts without new memory


class Vector:
    """Memory for gradients in the shapes of `like`, and their views; and for their counts (SUM-3)."""

    def __init__(self, flat: Tensor, like: Sequence[Tensor]) -> None:
        self.flat = flat
        *parts, self._counts = torch.split(flat[: length_of(like)], [*(each.numel() for each in like), len(like)])
        self.views = [_as(part, each) for part, each in zip(parts, like, strict=True)]

    def set(self, gradients: Sequence[Tensor | None]) -> None:
        if whole := _whole(gradients):
            copy_all(self.views, whole)
            self._counts.fill_(1.0)
            return
        for view, gradient in zip(self.views, gradients, strict=True):
            _ = view.zero_() if gradient is None else view.copy_(gradient)
        self._counts.copy_(self._counts_of(gradients))

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        if whole := _whole(gradients):
            add_all(self.views, whole)
            self._counts.add_(1.0)
            return
        for view, gradient in zip(self.views, gradients, strict=True):
            view.add_(0.0 if gradient is None else gradient)  # REPRODUCIBLE-1: both make 0.0 of -0.0
        self._counts.add_(self._counts_of(gradients))

    def _counts_of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        return counts_of(gradients, self.flat.dtype, self.flat.device)

    def gradients(self) -> list[Tensor | None]:
        """SUM-3. Waits for the device."""
        return [view if count else None for view, count in zip(self.views, self._counts.tolist(), strict=True)]


def _whole(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """All of them; none of them if one is None."""
    found = [gradient for gradient in gradients if gradient is not None]
    return found if len(found) == len(gradients) else []


def counts_of(gradients: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 for each gradient, and 0 for each None."""
    return torch.tensor([gradient is not None for gradient in gradients], dtype=dtype, device=device)


def length_of(like: Sequence[Tensor]) -> int:
    """The elements of a vector for gradients in the shapes of `like`."""
    return sum(map(Tensor.numel, like)) + len(like)


def _as(flat: Tensor, like: Tensor) -> Tensor:
    """`flat` in the shape of `like`, and in its order of dimensions in memory."""
    dims = sorted(range(like.dim()), key=like.stride, reverse=True)
    return flat.view([like.shape[dim] for dim in dims]).permute([dims.index(dim) for dim in range(like.dim())])


Node = TypeVar("Node", range, tuple[int, ...])


class SlotSum(ABC, Generic[Node]):
    """The sum of one group of gradients, which are reduced together. In each step: `begin`, `add` for each leaf,
    `reduce`, `gather`, `finish`, or `drop` at any time.

    `like`: tensors in the shapes of the gradients, of one dtype and device. `empty`: allocates a vector of so many
    elements. `keeps`: the nodes outlive the step (SUM-1). `num_loose`: with `keeps`, as in SUM-2.
    """

    def __init__(
        self, like: Sequence[Tensor], empty: Callable[[int], Tensor], *, keeps: bool = False, num_loose: int = 0
    ) -> None:
        self._like, self._empty, self._keeps = [each.detach() for each in like], empty, keeps
        self._num_loose = num_loose
        self._num = length_of(like)
        self._free: list[Vector] = []
        self._result: Vector | None = None  # the gradients lie in it until the next `begin`
        self._nodes: dict[Node, Vector] = {}
        self._loose: dict[int, Vector] = {}  # by leaf, in order of time (SUM-2)
        self._forget()

    def _forget(self) -> None:
        self._leaves: Sequence[Sequence[int]] = ()
        self._due: deque[int] = deque()  # the leaves of this rank that are not added
        self._works: list[Work] = []

    @property
    def firm(self) -> list[int]:
        """The leaves in nodes of this rank."""
        return [leaf for node in self._nodes for leaf in node]

    @property
    def loose(self) -> list[int]:
        """The leaves that this rank has beside them (SUM-2)."""
        return list(self._loose)

    @torch.no_grad()
    def begin(self, leaves: Sequence[Sequence[int]], rank: int, kept: Collection[int] = ()) -> None:
        """A step begins. `leaves`: of each rank of the gang, ascending, each a range or a tuple. `kept`: the leaves of
        this rank whose gradients stay; a node stays as a whole. The gradients of the step before are no longer
        valid."""
        self._leaves, kept = leaves, frozenset(kept)
        for node in [node for node in self._nodes if not kept.issuperset(node)]:
            self._give_back(self._nodes.pop(node))
        for leaf in list(self._loose):
            vector = self._loose.pop(leaf)
            if leaf in kept:
                self._insert(leaf, vector)
            else:
                self._give_back(vector)
        for node, vector in self._nodes.items():
            if vector.flat.numel() < (length := self._padded(len(leaves))):
                self._nodes[node] = longer = self._take(length)
                longer.flat[: self._num] = vector.flat[: self._num]
                self._give_back(vector)
        held = set(self.firm)
        self._due = deque(leaf for leaf in leaves[rank] if leaf not in held)
        self._give_back(self._result)
        self._result = None

    def release(self) -> None:
        """Drop all that this rank has."""
        for vector in (*self._nodes.values(), *self._loose.values()):
            self._give_back(vector)
        self._nodes, self._loose = {}, {}

    def discard(self, leaf: int) -> None:
        """Drop the gradient of `leaf`, if this rank has it: it may be wrong. If it is in a node, drop everything."""
        if leaf in self._loose:
            self._give_back(self._loose.pop(leaf))
        elif any(leaf in node for node in self._nodes):
            self.release()

    @torch.no_grad()
    def add(self, leaf: int, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradient of a leaf of this rank; None: zeros. So are those of leaves that are left out."""
        while (due := self._due.popleft()) < leaf:
            self._add(due, [None] * len(self._like))
        self._add(leaf, gradients)

    def _add(self, leaf: int, gradients: Sequence[Tensor | None]) -> None:
        if not self._num_loose:
            self._add_to_nodes(leaf, gradients)
            return
        vector = self._take(self._padded(len(self._leaves)))
        vector.set(gradients)
        self._loose[leaf] = vector
        if len(self._loose) > self._num_loose:
            oldest = next(iter(self._loose))
            self._insert(oldest, self._loose.pop(oldest))

    @abstractmethod
    def _add_to_nodes(self, leaf: int, gradients: Sequence[Tensor | None]) -> None:
        """As `_insert`, for gradients that are in no vector."""

    @abstractmethod
    def _insert(self, leaf: int, vector: Vector) -> None:
        """Put a leaf into the nodes. `vector`: its gradient, which may be changed."""

    def _merge(self, left: Vector, right: Vector) -> None:
        self._add_up(left, right)
        self._give_back(right)

    def _add_up(self, left: Vector, right: Vector) -> None:
        left.flat[: self._num].add_(right.flat[: self._num])

    def _copy(self, vector: Vector, length: int) -> Vector:
        copy = self._take(length)
        copy.flat[: self._num] = vector.flat[: self._num]
        return copy

    def _complete(self) -> None:
        if self._due:
            self.add(self._due[-1], [None] * len(self._like))

    @abstractmethod
    def reduce(self, gang: Gang) -> None:
        """Start to reduce, and do not wait. All gradients of this rank are added."""

    @abstractmethod
    def gather(self, gang: Gang) -> None:
        """Go on with the reduction. All ranks call it in the same order of sums."""

    def finish(self) -> list[Tensor | None] | None:
        """Wait for the reduction. Returns the gradients, and None for those that no leaf has (SUM-3); None instead of
        all if no rank has slots, or the gang is poisoned."""
        result, is_alone = self._result, not self._works
        is_whole = self._wait() or is_alone
        self._end()
        return result.gradients() if result is not None and is_whole else None

    def _wait(self) -> bool:
        """Wait for the exchange under way. False: the gang is poisoned, or none is under way."""
        completed = [work.wait() for work in self._works]
        return all(completed) and len(completed) > 0

    def drop(self) -> None:
        """Drop the sums of this step, but for the leaves that this rank has with `keeps`."""
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

    def _take(self, length: int) -> Vector:
        while self._free:
            vector = self._free.pop()
            if vector.flat.numel() >= length:
                return vector
        flat = self._empty(max(length, self._num + _PADDING))
        flat[self._num :] = 0
        return Vector(flat, self._like)

    def _give_back(self, vector: Vector | None) -> None:
        if vector is not None and vector not in self._free:
            self._free.append(vector)
