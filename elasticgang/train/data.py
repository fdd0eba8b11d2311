"""The global batch: its size is constant, it consists of slots of one size, and the active ranks divide the slots."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import torch
from torch import Tensor

from elasticgang.member.manager import Step
from elasticgang.protocol.member_state import Share
from elasticgang.train.partition import pass_ranges, slots_of


@dataclass(frozen=True)
class Slot:
    """One microbatch.

    `index`: the samples, int64 `[slot]`. `seed`: unique to this slot and independent of the rank that computes it.
    `last`: whether it is the last slot of this rank's share.
    """

    number: int
    index: Tensor
    seed: int
    last: bool

    @property
    def num_samples(self) -> int:
        return self.index.numel()


class Slots(Sequence[Slot]):
    """One rank's share of a step's slots; empty for a learner. The iteration seeds torch's generators for each slot.
    When the step is lost, it raises StepAborted before the next slot."""

    def __init__(self, slots: Sequence[Slot], step: Step | None = None) -> None:
        self._slots = tuple(slots)
        self._step = step

    @property
    def num_samples(self) -> int:
        """Samples in this share: the `weight` of a loss that is summed over samples."""
        return sum(slot.num_samples for slot in self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, index: int) -> Slot: ...

    @overload
    def __getitem__(self, index: slice) -> Slots: ...

    def __getitem__(self, index: int | slice) -> Slot | Slots:
        if isinstance(index, slice):
            return Slots(self._slots[index], self._step)
        return self._slots[index]

    def __iter__(self) -> Iterator[Slot]:
        for slot in self._slots:
            if self._step is not None:
                self._step.check()
            _seed(slot.seed)
            yield slot
        if self._step is not None:
            self._step.check()
            if not self._slots:
                self._step.contribute()


class GlobalBatch:
    """The samples of every step, in an order that depends on `seed` alone (RULE-5).

    Each pass over the data has its own order and contains each sample exactly once. If `size` does not divide
    `num_samples`, a batch can contain the tail of one pass and the head of the next.
    """

    def __init__(self, num_samples: int, *, size: int, slot: int, seed: int = 0) -> None:
        """`size`: samples in a global batch, a multiple of `slot`. `slot`: samples in a slot.

        Raises:
            ValueError: a number is below 1, or `size` is not a multiple of `slot`.
        """
        for name, value in (("num_samples", num_samples), ("size", size), ("slot", slot)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {value} instead.")
        if size % slot:
            raise ValueError(f"`size` must be a multiple of `slot` ({slot}), but is {size} instead.")
        self.num_samples, self.size, self.slot, self.seed = num_samples, size, slot, seed
        self._order = lru_cache(maxsize=2)(self._order_of)

    @property
    def num_slots(self) -> int:
        """Slots in a global batch."""
        return self.size // self.slot

    def slots(self, step: Step) -> Slots:
        """This rank's share of `step`. It depends only on the seed, the step's index and the rank's share."""
        return Slots(self.share(step.index, step.share), step)

    def share(self, step_index: int, share: Share | None) -> Slots:
        """The slots of the part `share` of step `step_index`; empty for None.

        Raises:
            ValueError: the ranks of an sdp gang would have different numbers of slots.
        """
        if share is None:
            return Slots(())
        if self.num_slots % share.group_size:
            raise ValueError(
                f"`size` must be a multiple of `slot` x `sdp` ({self.slot} x {share.group_size}), so that the ranks of "
                f"an sdp gang have equally many slots, but is {self.size} instead."
            )
        numbers = slots_of(self.num_slots, share.index, share.count, share.group_size)
        return Slots([self._slot(step_index, number, number == numbers[-1]) for number in numbers])

    def samples(self, step_index: int) -> Tensor:
        """All samples of a step, in order: int64 `[size]`."""
        return self._samples(step_index * self.size, self.size)

    def _slot(self, step_index: int, number: int, last: bool) -> Slot:
        index = self._samples(step_index * self.size + number * self.slot, self.slot)
        return Slot(number, index, _mix(self.seed, step_index, number), last)

    def _samples(self, first: int, count: int) -> Tensor:
        return torch.cat(
            [self._order(run.pass_index)[run.start : run.stop] for run in pass_ranges(first, count, self.num_samples)]
        )

    def _order_of(self, pass_index: int) -> Tensor:
        generator = torch.Generator().manual_seed(_mix(self.seed, pass_index))
        return torch.randperm(self.num_samples, generator=generator)


def _seed(seed: int) -> None:
    """Seed torch's generators. While CUDA is not initialized, `torch.manual_seed` would also store each seed with its
    caller's traceback for later, which takes milliseconds and memory for every slot."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def _mix(*numbers: int) -> int:
    """A seed for torch from several numbers, equal in every process."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
