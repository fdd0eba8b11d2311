"""The gradients of slots that a rank keeps when a step is tried again, for wrappers with `keep=True`.

A slot's gradient does not depend on who computes it. If a generation ends before its step is committed, each rank
therefore keeps the sums that it has. In the first step of the next generation, all ranks sum who holds which slot, and
divide those that no replica group holds (`slot_division.py`). Each rank of a group keeps its own part of the gradient:
its shard, its columns or its stage.

KEEP-1  The gradients are kept only if the generation has ended. A step that is dropped in a generation that goes on is
    computed anew: a rank has reported an error. If the generation ends in the same step, that rank keeps nothing.
KEEP-2  A slot is kept once the script has asked for the next one. If the script used a gang in the slot, the generation
    must not have ended by then: collectives that end with it have no result.
KEEP-3  Nothing is kept of a try in which a slot changed a buffer of the module: the change is undone with the step, and
    would be lost.
KEEP-4  Where a replica group has several ranks, one may have finished a slot that another has not: at most one slot for
    each stage, if the ranks need each other in each slot. So many last slots stay apart (SUM-2), and one more: the
    gradient of the slot under way is added too, before it is known that the slot does not finish.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor, nn

from elasticgang.member.manager import QuorumManager
from elasticgang.member.step import Step
from elasticgang.protocol.slot_division import Basis, Part, divide, holding, max_ahead
from elasticgang.state.dtensor import lay_out_gradient, local_gradient
from elasticgang.train.slot_gradients import SlotGradients

log = logging.getLogger("elasticgang")


class KeptGradients(SlotGradients):
    """`SlotGradients` that outlive a try of a step."""

    def __init__(
        self, manager: QuorumManager, over: str, module: nn.Module, groups: Sequence[Sequence[Tensor]], reduction: str
    ) -> None:
        ahead = max_ahead(manager.layout)
        num_loose = ahead + 1 if ahead else 0  # KEEP-4
        super().__init__(manager, over, groups, reduction, keeps=True, num_loose=num_loose)
        self._module = module
        self._basis: Basis | None = None  # of the gradients in the sums; None: they are of no committed state
        self._try: Step | None = None  # the last step
        self._parts: list[Part] | None = None  # of the groups in the step under way, if any group keeps slots
        self._finished = -1  # the last slot that is finished (KEEP-2)
        self._num_collectives = 0  # when it was finished
        self._buffers: list[Tensor] = []  # when the first slot began
        self._versions: list[int] = []  # of these
        self._changes_buffers = self._has_warned = False

    def divide(self, step: Step) -> Part | None:
        """The slots of this rank in `step`. None: those of its share, because no group keeps any.

        Raises:
            GangError: the generation has ended.
        """
        manager = self._manager
        assert manager.record is not None
        assert step.num_slots is not None
        basis = Basis.of(step.index, manager.tip, manager.record, step.num_slots, manager.member)
        if not step.is_first or self._basis is None or not self._basis.allows(basis):  # DIVISION-5
            self._release()
        self._basis, self._try, self._parts = basis, step, None
        self._slot, self._finished, self._reduced = None, -1, set()
        self._num_collectives, self._changes_buffers = manager.num_collectives, False
        if not step.is_first:
            return None
        layout, gangs = manager.layout, manager.gangs
        if step.num_slots % layout.sdp:
            return None  # the share says why it cannot be divided
        num_runs, group = step.num_slots // layout.sdp, gangs.rdp.rank
        is_active = [share is not None for share in step.shares[:: layout.sdp]]
        firm, loose = ([self._run_of(leaf, num_runs) for leaf in leaves] for leaves in self._held())
        # A group without slots says nothing: the others compute what its ranks have.
        held = holding(num_runs, group, firm, loose) if is_active[group] else holding(num_runs, group)
        parts = divide(manager.sum_over_ranks(held), layout.unit, is_active)
        if not any(part.kept for part in parts):
            return None
        self._parts = parts
        own, place = parts[group], gangs.sdp.rank
        return Part(*(tuple(run * layout.sdp + place for run in runs) for runs in (own.kept, own.due)))

    def _held(self) -> tuple[list[int], list[int]]:
        """The leaves that this rank has the gradients of, firm and loose."""
        return self._sums[0].firm, self._sums[0].loose

    def _run_of(self, leaf: int, num_runs: int) -> int:
        return leaf % num_runs if self._over == "dp" else leaf

    def _begin_sums(self, step: Step) -> None:
        self._buffers = list(self._module.buffers())
        self._versions = [buffer._version for buffer in self._buffers]
        if self._parts is None:
            super()._begin_sums(step)
            return
        sdp, gangs = self._manager.layout.sdp, self._manager.gangs
        num_runs, place, own = self._num_slots // sdp, gangs.sdp.rank, self._parts[gangs.rdp.rank]
        places = range(sdp) if self._over == "dp" else [0]
        leaves = [tuple(at * num_runs + run for run in part.numbers) for part in self._parts for at in places]
        first = place * num_runs if self._over == "dp" else 0
        self._numbers = [run * sdp + place for run in own.due]
        self._leaves = [first + run for run in own.due]
        for total in self._sums:
            total.begin(leaves, self._gang.rank, [first + run for run in own.kept])

    def end_slot(self, slot: int) -> None:
        """The script has asked for the slot after `slot` (KEEP-2, KEEP-3)."""
        for group in self._groups:
            for parameter in group:
                lay_out_gradient(parameter)  # its collectives must have a result too
        manager = self._manager
        num_collectives = manager.num_collectives
        self._changes_buffers = self._changes_buffers or (self._step is not None and not self._are_unchanged())
        if num_collectives == self._num_collectives or not manager.poisoned:
            self._finished = slot
        self._num_collectives = num_collectives

    def _are_unchanged(self) -> bool:
        """The buffers."""
        present = list(self._module.buffers())
        return len(present) == len(self._buffers) and all(
            buffer is before and buffer._version == version
            for buffer, before, version in zip(present, self._buffers, self._versions, strict=True)
        )

    def drop(self) -> None:
        """Drop the gradients of the step, or keep those of its finished slots."""
        keeps = self._basis is not None and self._is_usable() and not self._has_changed_buffers()
        if keeps and self._step is not None and self._slot is not None:
            self._separate(self._slot)
        super().drop()
        if not keeps or any((total.firm, total.loose) != self._held() for total in self._sums):
            self._release()  # an exception may have left the gradient of a slot in some of the sums

    def _is_usable(self) -> bool:
        """KEEP-1."""
        step, manager = self._try, self._manager
        assert step is not None
        return not step.has_failed and (manager.poisoned or manager.generation != step.generation)

    def _has_changed_buffers(self) -> bool:
        if self._changes_buffers and not self._has_warned:
            self._has_warned = True
            log.warning("the slots change buffers of the module, so that none is kept when a step is tried again")
        return self._changes_buffers

    def _separate(self, slot: int) -> None:
        """The last slot is finished: the sums get its gradient, which the parameters still have, where it is not yet
        added. Otherwise none has it; it was added within its backward, which an exception may have left."""
        leaf = self._leaves[self._numbers.index(slot)]
        if slot > self._finished:
            for total in self._sums:
                total.discard(leaf)
            return
        for index, group in enumerate(self._groups):
            total = self._sums[index]
            if leaf not in total.loose and leaf not in total.firm:
                self._add(index, [local_gradient(each) for each in group])

    def close(self) -> None:
        self._manager.slot_keeper = None

    def _release(self) -> None:
        for total in self._sums:
            total.release()


def slot_gradients(
    manager: QuorumManager,
    over: str,
    module: nn.Module,
    groups: Sequence[Sequence[Tensor]],
    reduction: str,
    *,
    keep: bool,
) -> SlotGradients | None:
    """What sums the gradients of slots for a wrapper of `module`. None: the wrapper itself reduces their sum."""
    if keep:
        manager.slot_keeper = kept = KeptGradients(manager, over, module, groups, reduction)
        return kept
    return SlotGradients(manager, over, groups, reduction) if reduction == "reproducible" else None
