"""`StreamLoader`: the samples of this rank's slots, read from streams that keep their own state.

The data consists of a fixed number of splits. Slot j of a step reads its samples from one split, which depends on j and
the step's index alone, so that the splits move with the slots when ranks come and go.

STREAM-1  Every rank has the state of every split at the committed step. It is registered state: a healer fetches it, a
    dropped step restores it, a checkpoint contains it.
STREAM-2  No two slots of a step read from the same split, so that no rank waits for what another rank reads.
STREAM-3  A rank votes on a step only with the states of all splits that the step has read: a rank that dies takes no
    state along.
STREAM-4  A split is read from the state at the committed step. An open stream in any other state is dropped, and the
    split is opened anew.
"""

from __future__ import annotations

import base64
import itertools
import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from elasticgang.errors import InvalidOperationError, NotSupportedError, OperationalError, StepAborted
from elasticgang.gang import Gang
from elasticgang.member.manager import QuorumManager, Step
from elasticgang.protocol.member_state import Share
from elasticgang.state.serialization import as_bytes, flatten, unflatten
from elasticgang.state.transport import empty, shapes_of
from elasticgang.train.data import Slot, Slots, check_sizes, mixed, numbers_of
from elasticgang.train.data_loader import LoadedSlots
from elasticgang.train.data_worker import kept_generators, seed_all


class Split(Protocol):
    """A stream of samples, such as torchdata's `StatefulDataLoader`. `state_dict` is of the samples that its iterator
    has yielded. After `load_state_dict`, iterating yields the samples that follow; after the last one, iterating again
    yields the samples of the next pass."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class StreamLoader:
    """Reads this rank's share of each step from streams.

        loader = eg.StreamLoader(manager, open_split, num_splits=64, size=64, slot=8)
        manager.register_state(model=model, optim=optim, stream=loader)
        for step in manager.steps(1000):
            with step:
                for slot, batch in loader.slots(step):
                    ...

    Each pass over a split takes every sample of it once, whichever ranks read it. The samples of a slot depend on the
    streams alone: not on the rank, or the number of ranks.
    """

    def __init__(
        self,
        manager: QuorumManager,
        open_split: Callable[[int], Split],
        *,
        num_splits: int,
        size: int,
        slot: int,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """`open_split`: opens the split of a number below `num_splits`, at its beginning. `size`: samples in a global
        batch. `slot`: samples in a slot. `num_splits`: a multiple of `size // slot`, the same in every job that
        continues this one. `seed`: of torch's, Python's and numpy's generators while samples are read. `collate_fn`: as
        of torch's `DataLoader`.

        Raises:
            ValueError: a number is below 1, `size` is not a multiple of `slot`, or `num_splits` is not one of
                `size // slot`.
            NotSupportedError: the layout has `pp`.
        """
        check_sizes(num_splits=num_splits, size=size, slot=slot)
        if num_splits % (size // slot):  # STREAM-2
            raise ValueError(
                f"`num_splits` must be a multiple of `size // slot` ({size // slot}), so that each slot of a step has "
                f"a split of its own, but is {num_splits} instead."
            )
        if manager.layout.pp > 1:
            raise NotSupportedError("`StreamLoader` does not support a layout with `pp`.")
        self.size, self.slot, self.seed, self.num_splits = size, slot, seed, num_splits
        self._manager, self._open_split, self._collate = manager, open_split, collate_fn or default_collate
        self._states: dict[int, str] = {}  # STREAM-1; of the splits that were ever read
        self._read: dict[int, str] = {}  # by this rank in the step under way
        self._opened: dict[int, _OpenSplit] = {}
        self._is_registered = False
        self._unfinished: int | None = None  # the step whose slots are not all read

    @property
    def num_slots(self) -> int:
        """Slots in a global batch."""
        return self.size // self.slot

    def slots(self, step: Step) -> LoadedSlots:
        """This rank's share of `step`. Iterating over it yields `(slot, batch)`; `slot.index` counts the samples of the
        job. Iterate to the end on every rank, also on one without slots: the ranks exchange the states of the splits
        there (STREAM-3).

        Raises:
            InvalidOperationError: the loader is not registered; or the loop over the slots of the step before was left
                early.

        Raises, while iterating:
            StepAborted: the step is lost; `with step` catches it.
            OperationalError: a split cannot be read; or the ranks have read other splits than the step has.
        """
        if not self._is_registered:
            raise InvalidOperationError("register the loader before the first step: `register_state(stream=loader)`")
        if self._unfinished is not None and self._unfinished < step.index:
            raise InvalidOperationError(
                f"the loop over the slots of step {self._unfinished} was left early, so that the states of the splits "
                "were not exchanged"
            )
        step.num_slots = self.num_slots
        numbers = range(0) if step.share is None else numbers_of(self.num_slots, self.slot, step.share)
        kept = {number for slot in numbers for number in range(slot, self.num_splits, self.num_slots)}
        self._opened = {number: split for number, split in self._opened.items() if number in kept}
        self._unfinished, self._read = step.index, {}
        slots = [self._slot(step.index, number, number == numbers[-1]) for number in numbers]
        return _StreamedSlots(Slots(slots, step), lambda slot: self._batch(step, slot), lambda: self._exchange(step))

    def state_dict(self) -> dict[str, Any]:
        """The states of all splits at the committed step."""
        self._is_registered = True
        return {"num_splits": self.num_splits, "splits": dict(self._states)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError: the state is of another number of splits."""
        if state_dict["num_splits"] != self.num_splits:
            raise ValueError(
                f"`num_splits` must be {state_dict['num_splits']}, as in the job that this one continues, but is "
                f"{self.num_splits} instead."
            )
        self._states, self._unfinished = dict(state_dict["splits"]), None

    def _slot(self, step_index: int, number: int, last: bool) -> Slot:
        first = step_index * self.size + number * self.slot
        return Slot(number, torch.arange(first, first + self.slot), mixed(self.seed, step_index, number), last)

    def _split_of(self, step_index: int, slot: int) -> int:
        return slot + self.num_slots * (step_index % (self.num_splits // self.num_slots))

    def _batch(self, step: Step, slot: Slot) -> Any:
        number = self._split_of(step.index, slot.number)
        try:
            with kept_generators():
                seed_all(slot.seed)
                split = self._opened.pop(number, None)  # one that raises is not used again
                state = self._states.get(number)
                if split is None or split.state != state:  # STREAM-4
                    split = _OpenSplit(self._open_split(number), state)
                batch = self._collate(split.read(self.slot))
        except Exception as exc:
            raise OperationalError(
                f"slot {slot.number} of step {step.index} cannot be read from split {number}:\n"
                f"{traceback.format_exc().rstrip()}"
            ) from exc
        assert split.state is not None
        self._opened[number], self._read[number] = split, split.state
        return batch

    def _exchange(self, step: Step) -> None:
        """STREAM-3."""
        if self._unfinished != step.index:
            raise InvalidOperationError("the slots of a step can be iterated over once: the splits have been read")
        found: dict[int, str] = {}
        for data in _gather(self._manager.gangs.dp, json.dumps(list(self._read.items())).encode()):
            found.update((int(number), str(state)) for number, state in json.loads(data))
        slots = range(self.num_slots) if _are_shared(step.shares) else ()
        wanted = {self._split_of(step.index, slot) for slot in slots}
        if set(found) != wanted:
            raise OperationalError(
                f"the ranks have read the splits {sorted(found)} in step {step.index}, but the step has the splits "
                f"{sorted(wanted)}: make the loader alike on every rank"
            )
        self._states.update(found)
        self._unfinished = None


class _StreamedSlots(LoadedSlots):
    def __init__(self, slots: Slots, take: Callable[[Slot], Any], finish: Callable[[], None]) -> None:
        super().__init__(slots, take)
        self._finish = finish

    def __iter__(self) -> Iterator[tuple[Slot, Any]]:
        yield from super().__iter__()
        self._finish()


class _OpenSplit:
    """`state`: after the last read, as text; None at the beginning."""

    def __init__(self, split: Split, state: str | None) -> None:
        self.state = state
        if state is not None:
            split.load_state_dict(_from_text(state))
        self._split, self._samples = split, iter(split)

    def read(self, count: int) -> list[Any]:
        samples = list(itertools.islice(self._samples, count))
        while len(samples) < count:
            self._samples = iter(self._split)  # the next pass
            further = list(itertools.islice(self._samples, count - len(samples)))
            if not further:
                raise ValueError("the split has no samples")
            samples += further
        self.state = _to_text(self._split.state_dict())
        return samples


def _are_shared(shares: list[Share | None]) -> bool:
    return any(share is not None for share in shares)


def _gather(gang: Gang, data: bytes) -> list[bytes]:
    """`data` of every rank of `gang`, in rank order. Nothing is unpickled.

    Raises:
        StepAborted: the generation has ended.
    """
    device = gang.device
    sizes = torch.zeros(gang.size, dtype=torch.int64, device=device)
    gang.all_gather(sizes, torch.tensor([len(data)], device=device))
    if not gang.is_poisoned:
        most = int(sizes.max())
        padded = torch.frombuffer(bytearray(data.ljust(most)), dtype=torch.uint8).to(device)
        gathered = torch.zeros(gang.size * most, dtype=torch.uint8, device=device)
        gang.all_gather(gathered, padded)
    if gang.is_poisoned:
        raise StepAborted("the generation ended before the ranks had exchanged the states of the splits")
    rows = gathered.cpu().view(gang.size, most)
    return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def _to_text(state: object) -> str:
    """Raises TypeError: `state` has a value that is neither plain nor a tensor."""
    spec, tensors = flatten(state)
    data = [base64.b64encode(as_bytes(tensor)).decode() for tensor in tensors]
    return json.dumps([spec, shapes_of(tensors), data])


def _from_text(text: str) -> Any:
    spec, shapes, data = json.loads(text)
    tensors: list[Tensor] = []
    for (shape, dtype), encoded in zip(shapes, data, strict=True):
        tensor = empty(shape, dtype)
        if tensor.numel():
            as_bytes(tensor)[:] = base64.b64decode(encoded)
        tensors.append(tensor)
    return unflatten(spec, tensors)
