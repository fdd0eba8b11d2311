"""The gradients of each slot of a step, for wrappers with `reduction="reproducible"` or `keep=True`.

SLOTS-1  `Slots` says which slot is under way. When the next one begins, the gradient of the one before is taken from
    the parameters, so that backward never adds the gradients of two slots (REPRODUCIBLE-1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from elasticgang.errors import InvalidOperationError
from elasticgang.gang import Gang
from elasticgang.member.manager import QuorumManager
from elasticgang.member.step import Step
from elasticgang.protocol.member_state import Share
from elasticgang.state.dtensor import gradient_dtype, like, local, local_gradient
from elasticgang.train.partition import slots_of
from elasticgang.train.plain_sum import PlainSum
from elasticgang.train.reproducible import ReproducibleSum
from elasticgang.train.slot_sum import SlotSum
from elasticgang.train.summation_tree import leaves_of

REDUCTIONS = ("sum", "reproducible")


def check_reduction(reduction: str) -> None:
    """Raises ValueError: `reduction` is unknown."""
    if reduction not in REDUCTIONS:
        raise ValueError(f'`reduction` must be "sum" or "reproducible", but is {reduction!r} instead.')


class SlotGradients:
    """Sums the gradients of a wrapper's parameters over the slots of the step under way, and over `manager.gangs.dp` or
    `manager.gangs.rdp`."""

    def __init__(
        self,
        manager: QuorumManager,
        over: str,
        groups: Sequence[Sequence[Tensor]],
        reduction: str,
        *,
        keeps: bool = False,
        num_loose: int = 0,
    ) -> None:
        """`groups`: the parameters whose gradients are reduced together, each of one dtype. `keeps`, `num_loose`: as of
        `SlotSum`."""
        self._manager, self._over, self._groups = manager, over, groups
        kind = ReproducibleSum if reduction == "reproducible" else PlainSum
        self._sums: list[SlotSum[Any]] = [
            kind([local(each) for each in group], self._empty(group[0]), keeps=keeps, num_loose=num_loose)
            for group in groups
        ]
        self._step: Step | None = None  # the step whose slots the sums have
        self._numbers: Sequence[int] = ()  # the slots that this rank computes
        self._leaves: Sequence[int] = ()  # and their leaves
        self._slot: int | None = None  # whose gradient the parameters have
        self._num_slots = 0
        self._divided: tuple[Sequence[Share | None], int, list[range]] = (), 0, []
        self._reduced: set[int] = set()  # groups

    def _empty(self, parameter: Tensor) -> Callable[[int], Tensor]:
        dtype, device = gradient_dtype(parameter), local(parameter).device
        return partial(self._manager.empty, dtype=dtype, device=device)

    @property
    def _gang(self) -> Gang:
        return self._manager.reduction(self._over)

    def begin(self) -> None:
        """The slots of the step under way begin now, and not with `enter_slot`: forward of several comes first."""
        self._begin(self._manager.step)

    def enter_slot(self) -> None:
        """Forward and backward of the slot under way begin (SLOTS-1).

        Raises:
            InvalidOperationError: none is under way, or a later one was before.
        """
        step = self._manager.step
        if step.slot is None:
            raise InvalidOperationError(
                '`reduction="reproducible"` and `keep=True` must know the slot of each backward: use `accumulate` in a '
                "loop over `batches.slots(step)`, where `batches` is a `GlobalBatch` or a `DataLoader`."
            )
        self._begin(step)
        if step.num_slots != self._num_slots:
            raise InvalidOperationError(
                f"step {step.index} has slots of a batch of {self._num_slots} slots and of one of {step.num_slots}; "
                "use one `GlobalBatch` in a step."
            )
        if self._slot is not None and step.slot < self._slot:
            raise InvalidOperationError(f"slot {step.slot} was used after slot {self._slot}; use them in order.")
        if self._slot is not None and step.slot > self._slot:
            for index, group in enumerate(self._groups):
                self._add(index, [local_gradient(each) for each in group])
            self._clear()
        self._slot = step.slot

    def check_forward(self) -> None:
        """Raises InvalidOperationError: a backward of the forward that begins would be of no slot."""
        if torch.is_grad_enabled() and (self._step is None or self._slot is None):
            raise InvalidOperationError(
                'with `reduction="reproducible"` or `keep=True`, call the model inside `accumulate`, or inside '
                "`torch.no_grad()`."
            )

    def _begin(self, step: Step) -> None:
        if self._step is step:
            return
        if step.num_slots is None:
            raise InvalidOperationError(
                f"the ranks do not know the slots of step {step.index}: call `batches.slots(step)` of the same "
                "`GlobalBatch` on every rank."
            )
        self._step, self._slot, self._num_slots = step, None, step.num_slots
        self._reduced = set()
        self._clear()  # what is left of the step before lies in memory that is used again
        self._begin_sums(step)

    def _begin_sums(self, step: Step) -> None:
        num, leaves = self._num_slots, self._leaves_of_ranks(step)
        own, self._leaves = step.share, leaves[self._gang.rank]
        self._numbers = range(0) if own is None else slots_of(num, own.index, own.count, own.group_size)
        for total in self._sums:
            total.begin(leaves, self._gang.rank)

    def _leaves_of_ranks(self, step: Step) -> list[range]:
        """Found once for the same shares, which are one object in the steps of a generation until a learner becomes
        active: of 8,000 ranks, it takes 9 ms."""
        num, (shares, former, leaves) = self._num_slots, self._divided
        if shares is not step.shares or former != num:
            manager, shares = self._manager, step.shares
            leaves = [
                range(0)
                if share is None
                else leaves_of(num, share.index, share.count, share.group_size, of_group=self._over == "rdp")
                for share in (shares if self._over == "dp" else shares[manager.gangs.sdp.rank :: manager.layout.sdp])
            ]
            self._divided = shares, num, leaves
        return leaves

    def _add(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        if self._slot is not None:
            self._sums[index].add(self._leaves[self._numbers.index(self._slot)], gradients)

    def _clear(self) -> None:
        for group in self._groups:
            for parameter in group:
                parameter.grad = None

    def reduce(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Start to reduce group `index`. `gradients`: of the last slot, if this rank has slots."""
        self._begin(self._manager.step)
        self._add(index, gradients)
        self._reduced.add(index)
        self._sums[index].reduce(self._gang)

    def finish(self) -> None:
        """Wait for the reduction, and give the parameters their gradients."""
        for total in self._sums:
            total.gather(self._gang)
        for group, total in zip(self._groups, self._sums, strict=True):
            gradients = total.finish()
            if gradients is not None:
                for parameter, gradient in zip(group, gradients, strict=True):
                    parameter.grad = like(gradient, parameter)
        self._step = None

    def close(self) -> None:
        """The wrapper is used no more."""

    def drop(self) -> None:
        """Drop the gradients of the step."""
        for total in self._sums:
            total.drop()
        self._step = None
