"""The gradients of slots that a rank keeps when a step is tried again, for `DistributedDataParallel(keep=True)`.

Neither a slot's gradient nor the tree along which it is summed depends on who computes it. If a generation ends before
its step is committed, each rank therefore keeps the nodes of the tree that it has. In the first step of the next
generation, all ranks sum who holds which slot, and divide those that nobody holds (`division.py`).

KEEP-1  A gradient is used only for the same step on the same committed attempt, and never at step 0: before the first
    commit, one attempt may name the initial states of two ranks.
KEEP-2  The gradients are kept only if the generation has ended. A step that is dropped in a generation that goes on is
    computed anew: a rank has reported an error.
KEEP-3  A slot is kept once the script has asked for the next one. If the script used a gang in the slot, the generation
    must not have ended by then: collectives that end with it have no result.
KEEP-4  Nothing is kept of a try in which a slot changed a buffer of the module: the change is undone with the step, and
    would be lost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor, nn

from elasticgang.member.manager import QuorumManager, Step
from elasticgang.protocol.commit import Attempt
from elasticgang.state.dtensor import local_gradient
from elasticgang.train.division import Part, divide, holding
from elasticgang.train.slot_gradients import SlotGradients
from elasticgang.train.summation_tree import nodes_of

log = logging.getLogger("elasticgang")

_Key = tuple[int, Attempt, str, int]


class KeptGradients(SlotGradients):
    """`SlotGradients` of a job whose ranks all hold the whole model."""

    def __init__(self, manager: QuorumManager, module: nn.Module, groups: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(manager, "dp", groups, keeps=True)
        self._module = module
        self._key: _Key | None = None  # of the gradients in the sums; None: they are of no committed state
        self._generation = 0  # of the last step
        self._parts: list[Part] | None = None  # of the step under way, if anybody keeps slots
        self._finished = -1  # the last slot that is finished (KEEP-3)
        self._num_collectives = 0  # when it was finished
        self._buffers: list[Tensor] = []  # when the first slot began
        self._versions: list[int] = []  # of these
        self._changes_buffers = self._has_warned = False

    def divide(self, step: Step) -> Part | None:
        """The slots of this rank in `step`. None: those of its share, because nobody keeps any.

        Raises:
            GangError: the generation has ended.
        """
        key = self._key_of(step)
        if not step.is_first or key is None or key != self._key:  # KEEP-1
            self._release()
        self._key, self._generation, self._parts = key, step.generation, None
        self._slot, self._finished, self._reduced = None, -1, set()
        self._num_collectives, self._changes_buffers = self._manager.num_collectives, False
        if not step.is_first:
            return None
        assert step.num_slots is not None
        rank = self._gang.rank
        held = [slot for node in self._sums[0].nodes for slot in node]
        parts = divide(
            self._manager.sum_over_ranks(holding(step.num_slots, rank, held)),
            [share is not None for share in step.shares],
        )
        if not any(part.kept for part in parts):
            return None
        self._parts = parts
        return parts[rank]

    def _key_of(self, step: Step) -> _Key | None:
        manager = self._manager
        tip, record = manager.tip, manager.record
        if tip is None or not tip.step or record is None or step.num_slots is None:
            return None
        return step.index, tip, record.checkpoint, step.num_slots

    def _begin_sums(self, step: Step) -> None:
        self._buffers = list(self._module.buffers())
        self._versions = [buffer._version for buffer in self._buffers]
        if self._parts is None:
            super()._begin_sums(step)
            return
        own = self._parts[self._gang.rank]
        self._numbers = self._leaves = own.due
        kept = nodes_of(own.kept)
        for total in self._sums:
            total.begin([part.slots for part in self._parts], self._gang.rank, kept)

    def end_slot(self, slot: int) -> None:
        """The script has asked for the slot after `slot` (KEEP-3, KEEP-4)."""
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
        has_ended = self._manager.poisoned or self._manager.generation != self._generation  # KEEP-2
        keeps = self._key is not None and has_ended and self._are_finished()
        if keeps and self._step is not None:
            self._add_finished()
        super().drop()
        if not keeps:
            self._release()

    def _are_finished(self) -> bool:
        """Whether the sums have finished slots alone. The last slot is added within its backward, which an exception
        may have left."""
        if self._changes_buffers:
            if not self._has_warned:
                self._has_warned = True
                log.warning("the slots change buffers of the module, so that none is kept when a step is tried again")
            return False
        return not self._reduced or self._slot is None or self._slot <= self._finished

    def _add_finished(self) -> None:
        """Add the last finished slot's gradient, which the parameters still have, where it is not yet added."""
        if self._slot is None or self._slot > self._finished:
            return
        for index, group in enumerate(self._groups):
            if not any(self._slot in node for node in self._sums[index].nodes):
                self._add(index, [local_gradient(each) for each in group])

    def _release(self) -> None:
        for total in self._sums:
            total.release()
