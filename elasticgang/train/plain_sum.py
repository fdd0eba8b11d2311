"""Sums of all slots' gradients by one all-reduce, in any order of additions.

A rank has one node: all of its leaves but the loose ones (SUM-2). The all-reduce is in place, so that it has memory of
its own (SUM-1): a copy of the node. That copy holds the gradients of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elasticgang.collectives.collective import Collective
from elasticgang.gang import Gang
from elasticgang.train.slot_sum import SlotSum, Vector


class PlainSum(SlotSum[tuple[int, ...]]):
    """See `SlotSum`. All ranks reduce equally many bytes; those without leaves reduce zeros."""

    def _add_to_nodes(self, leaf: int, gradients: Sequence[Tensor | None]) -> None:
        if self._nodes:
            ((leaves, total),) = self._nodes.items()
            total.add(gradients)
            self._nodes = {(*leaves, leaf): total}
        else:
            total = self._take(self._num)
            total.set(gradients)
            self._nodes = {(leaf,): total}

    def _insert(self, leaf: int, vector: Vector) -> None:
        if self._nodes:
            ((leaves, total),) = self._nodes.items()
            self._merge(total, vector)
            self._nodes = {(*leaves, leaf): total}
        else:
            self._nodes = {(leaf,): vector}

    @torch.no_grad()
    def reduce(self, gang: Gang) -> None:
        self._complete()
        if not self._num or not any(self._leaves):
            return
        have = [*self._nodes.values(), *self._loose.values()]
        self._result = self._copy(have[0], self._num) if have else self._take(self._num)
        if not have:
            self._result.flat[: self._num] = 0
        for vector in have[1:]:
            self._add_up(self._result, vector)
        if gang.size > 1:
            flat = self._result.flat[: self._num]
            self._works = [gang.start(Collective("all_reduce", (flat,), (flat,)))]

    def gather(self, gang: Gang) -> None:
        """Nothing is left to do."""
