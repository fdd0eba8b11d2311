"""The global batch: its size is constant, it consists of slots of one size, and the active ranks divide the slots.

EMPTYLOOP-1  Where a loop over slots ends of which this rank has none, it reduces its zeros, as the others reduce their
    gradients in the last backward. Not inside `torch.no_grad()`, as in an evaluation: the training may follow. The
    slots of such a loop are none whose gradients are kept, and do not take the place of the one under way.
EMPTYLOOP-2  Of the slots that are asked for inside `torch.no_grad()` none is left out as kept: their gradients are not
    those of an earlier try.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import torch
from torch import Tensor

from elasticgang.integers import required_integer
from elasticgang.member.step import Step
from elasticgang.protocol.member_state import Share
from elasticgang.protocol.sample_positions import BatchShape
from elasticgang.train.partition import likely_parts, slots_of
from elasticgang.train.shuffled_order import ShuffledOrder

Sampler = Callable[[int, int], Tensor | Sequence[int]]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
    When the step is lost, it raises StepAborted before the next slot.

    `kept`: the slots of this share whose gradients this rank has kept from an earlier try of the step
    (`keep=True` of `DistributedDataParallel` and its like). The sequence leaves them out; this process has computed
    them.
    """

    def __init__(self, slots: Sequence[Slot], step: Step | None = None, kept: Sequence[Slot] = ()) -> None:
        self._slots = tuple(slots)
        self._step = step
        self.kept = tuple(kept)

    @property
    def num_samples(self) -> int:
        """Samples in this share, with those of `kept`: the `weight` of a loss that is summed over samples."""
        return sum(slot.num_samples for slot in self._slots + self.kept)

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
        step = self._step
        trained = step if torch.is_grad_enabled() else None  # EMPTYLOOP-1
        for slot in self._slots:
            if step is not None:
                step.check()
            if trained is not None:
                trained.slot = slot.number
            seed_generators(slot.seed)
            yield slot
            if trained is not None:
                trained.end_slot()
        if trained is not None:
            trained.slot = None
        if step is not None:
            step.check()
        if trained is not None and not self._slots:
            trained.contribute()


class GlobalBatch:
    """The samples of every step, in an order that depends on `seed` alone (RULE-5).

    Each pass over the data has its own order and contains each sample exactly once. If `size` does not divide
    `num_samples`, a batch can contain the tail of one pass and the head of the next. With a `sampler`, each step has
    the samples that the sampler returns for it.

    Use it in every step: one that does not use it passes over its samples. A job that goes on at a checkpoint may have
    another `size`: its samples follow those that were taken. It must have the same `num_samples`, or another `seed`,
    with which the samples count as other data. While it runs, a rank that restarts must have the same of all.
    """

    def __init__(
        self, num_samples: int, *, size: int, slot: int, seed: int = 0, sampler: Sampler | None = None
    ) -> None:
        """`size`: samples in a global batch, a multiple of `slot`. `slot`: samples in a slot. `sampler`: a function of
        (seed, the step's index) that returns the step's `size` samples in order, as indices below `num_samples`. It
        must be pure: every process calls it, for whichever steps it needs, and a step that is tried again again. A
        `DataLoader` with workers calls it for the steps after the last one of the loop too; where it raises, nothing is
        fetched ahead.

        Raises:
            ValueError: a number is not an integer, or below 1, or `size` is not a multiple of `slot`.
        """
        self.num_samples = required_integer("num_samples", num_samples, 1)
        self.size, self.slot = sizes(size, slot)
        self.seed = required_integer("seed", seed)
        self._sampler, self._is_tried = sampler, False
        self._start = (0, 0)  # a step, and the position of its first sample
        self._order = lru_cache(maxsize=2)(self._order_of)
        self._sampled = lru_cache(maxsize=8)(self._sampled_of)

    @property
    def num_slots(self) -> int:
        """Slots in a global batch."""
        return self.size // self.slot

    def slots(self, step: Step) -> Slots:
        """This rank's share of `step`. It depends only on the seed, the step's index and the rank's share, on the slots
        that ranks keep (`Slots.kept`), and on where a job with another `size` was that this one continues.

        For an evaluation, ask for them inside `torch.no_grad()`, before `optim.step`, or use `share`.

        Raises:
            ValueError: as `share`; or the job goes on at a checkpoint of another `num_samples`.
            InvalidOperationError: the step is committed.
            MismatchError: this rank has healed, and the others have another `GlobalBatch`.
            GangError: ranks may keep slots, and the generation has ended before they agreed which; `with step` catches
                it.
        """
        shape = BatchShape(self.num_samples, self.size, self.slot, self.seed, self._sampler is not None)
        self._start = step.index, step.take_samples(shape)
        own = step.divide(self.num_slots) if torch.is_grad_enabled() else None  # EMPTYLOOP-2
        if own is None:
            return Slots(self.share(step.index, step.share), step)
        due, kept = own
        return Slots(self._slots(step.index, due), step, self._slots(step.index, kept, has_last=False))

    def share(self, step_index: int, share: Share | None) -> Slots:
        """The slots of the part `share` of step `step_index`; empty for None. Where the job continues one of another
        `size`, it is right for the steps from then on, once `slots` was called.

        Raises:
            ValueError: the ranks of an sdp gang would have different numbers of slots; or the sampler has returned
                something else than `size` indices, or two results for one step.
        """
        if share is None:
            return Slots(())
        return Slots(self._slots(step_index, numbers_of(self.num_slots, self.slot, share)))

    def has_samples(self, step_index: int) -> bool:
        """Whether there are samples for the step: False if the sampler raises. What it raises is raised again where
        the step asks for them."""
        if self._sampler is None:
            return True
        try:
            self._sampled(step_index)
        except Exception:  # of the script
            return False
        return True

    def likely(self, step_index: int, share: Share | None) -> Slots:
        """The slots of step `step_index` beside those of `share` that its rank gets when one replica group leaves or
        joins; empty for None."""
        if share is None:
            return Slots(())
        numbers = likely_numbers(self.num_slots, self.slot, share)
        return Slots(self._slots(step_index, numbers, has_last=False))

    def samples(self, step_index: int) -> Tensor:
        """All samples of a step, in order: int64 `[size]`."""
        return self._samples(step_index, torch.arange(self.size, device="cpu"))

    def _slots(self, step_index: int, numbers: Sequence[int], *, has_last: bool = True) -> list[Slot]:
        """Those of these numbers. `has_last`: the last of them is the last of the share."""
        if not numbers:
            return []
        firsts = self.slot * torch.tensor(numbers, device="cpu")
        samples = self._samples(step_index, (firsts[:, None] + torch.arange(self.slot, device="cpu")).flatten())
        return [
            Slot(number, index.clone(), mixed(self.seed, step_index, number), has_last and number == numbers[-1])
            for number, index in zip(numbers, torch.split(samples, self.slot), strict=True)
        ]

    def _samples(self, step_index: int, places: Tensor) -> Tensor:
        """Those at these places of the global batch."""
        if self._sampler is not None:
            return self._sampled(step_index)[places]
        of_step, position = self._start
        begin = position + (step_index - of_step) * self.size
        first, last = ((begin + int(place)) // self.num_samples for place in torch.aminmax(places))
        if first == last:  # the usual case, which takes a third of the time
            return self._order(first).at(places + (begin - first * self.num_samples))
        places = places + begin
        passes = places // self.num_samples
        samples = torch.empty_like(places)
        for pass_index in torch.unique(passes).tolist():
            where = passes == pass_index
            samples[where] = self._order(pass_index).at(places[where] - pass_index * self.num_samples)
        return samples

    def _sampled_of(self, step_index: int) -> Tensor:
        samples = self._called(step_index)
        if not self._is_tried:
            self._is_tried = True
            if not torch.equal(samples, self._called(step_index)):
                raise ValueError(
                    f"`sampler` must return the same samples whenever it is called for a step, but has returned others "
                    f"the second time for step {step_index}: draw with a `torch.Generator` that is seeded with `seed` "
                    "and the step's index."
                )
        return samples

    def _called(self, step_index: int) -> Tensor:
        assert self._sampler is not None
        samples = torch.as_tensor(self._sampler(self.seed, step_index), device="cpu")
        if samples.shape != (self.size,) or samples.dtype not in _INTEGERS:
            raise ValueError(
                f"`sampler` must return the {self.size} indices of a global batch, but has returned "
                f"{samples.dtype} of shape {tuple(samples.shape)} for step {step_index}."
            )
        low, high = int(samples.min()), int(samples.max())
        if low < 0 or high >= self.num_samples:
            raise ValueError(
                f"`sampler` must return indices from 0 to {self.num_samples - 1}, but has returned "
                f"{low if low < 0 else high} for step {step_index}."
            )
        return samples.to(torch.int64)

    def _order_of(self, pass_index: int) -> ShuffledOrder:
        return ShuffledOrder(self.num_samples, mixed(self.seed, pass_index))


def sizes(size: object, slot: object) -> tuple[int, int]:
    """Raises ValueError: a number is not an integer, or below 1, or `size` is not a multiple of `slot`."""
    of_batch, of_slot = required_integer("size", size, 1), required_integer("slot", slot, 1)
    if of_batch % of_slot:
        raise ValueError(f"`size` must be a multiple of `slot` ({of_slot}), but is {of_batch} instead.")
    return of_batch, of_slot


def numbers_of(num_slots: int, slot: int, share: Share) -> range:
    """The numbers of the slots of `share`. `slot`: samples in a slot.

    Raises:
        ValueError: the ranks of an sdp gang would have different numbers of slots.
    """
    if num_slots % share.group_size:
        raise ValueError(
            f"`size` must be a multiple of `slot` x `sdp` ({slot} x {share.group_size}), so that the ranks of an sdp "
            f"gang have equally many slots, but is {num_slots * slot} instead."
        )
    return slots_of(num_slots, share.index, share.count, share.group_size)


def likely_numbers(num_slots: int, slot: int, share: Share) -> list[int]:
    """The numbers of the slots that are not of `share`, but of what it becomes when a replica group leaves or joins."""
    own = set(numbers_of(num_slots, slot, share))
    parts = likely_parts(share.index, share.count, share.group_size)
    found = {number for part in parts for number in numbers_of(num_slots, slot, Share(*part, share.group_size))}
    return sorted(found - own)


def seed_generators(seed: int) -> None:
    """Seed torch's generators. While CUDA is not initialized, `torch.manual_seed` would also store each seed with its
    caller's traceback for later, which takes milliseconds and memory for every slot."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def mixed(*numbers: int) -> int:
    """A seed for torch from several numbers, equal in every process."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
