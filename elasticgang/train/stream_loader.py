"""`StreamLoader`: the samples of this rank's slots, read from streams that keep their own state.

The data consists of a fixed number of splits. Slot j of a step reads its samples from one split, which depends on j and
the step's index alone, so that the splits move with the slots when ranks come and go.

STREAM-1  Every rank has the state of every split at the committed step. It is registered state: a healer fetches it, a
    dropped step restores it, a checkpoint contains it.
STREAM-2  No two slots of a step read from the same split, so that no rank waits for what another rank reads.
STREAM-3  A rank votes on a step only with the states of all splits that the step has read: a rank that dies takes no
    state along. It raises an error where the script has left the loop over the slots early.
STREAM-4  A split is read from its state at the committed step, or, for a later step, from where the reading before it
    ends. What was read from another state is read again.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from elasticgang.errors import InvalidOperationError, OperationalError, StepAborted
from elasticgang.gang import Gang
from elasticgang.integers import required_integer
from elasticgang.member.manager import QuorumManager
from elasticgang.member.step import Step
from elasticgang.protocol.member_state import Share
from elasticgang.train.data import Slot, Slots, mixed, numbers_of, sizes
from elasticgang.train.data_loader import Closing, LoadedSlots, worker_options
from elasticgang.train.data_worker import Fetched, Request, WorkerOptions, context_of, fetch_here, timeouts
from elasticgang.train.fetch_pool import FetchPool
from elasticgang.train.prefetch import Key, divided
from elasticgang.train.stream_reader import MAX_STATES_BYTES, Reading, Split, StreamFetcher

_LENGTH_BYTES, _ROW_BYTES = 8, 2048  # what a rank sends in the first collective of an exchange


class StreamLoader:
    """Reads this rank's share of each step from streams, in worker processes ahead of the step that needs it.

        loader = eg.StreamLoader(manager, open_split, num_splits=64, size=64, slot=8, num_workers=2)
        manager.register_state(model=model, optim=optim, stream=loader)
        for step in manager.steps(1000):
            with step:
                for slot, batch in loader.slots(step):
                    ...

    Each pass over a split takes every sample of it once, whichever ranks read it. Use the loader in every step: one
    that does not use it passes over the splits of that step, and a loader that is used in every second step may never
    read half of them. The samples of a slot depend on the streams alone: not on the rank, the worker, or the number of
    either.
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
        num_workers: int = 0,
        prefetch: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        """`open_split`: opens the split of a number below `num_splits`, at its beginning. `size`: samples in a global
        batch. `slot`: samples in a slot. `num_splits`: a multiple of `size // slot`, the same in every job that
        continues this one. `seed`: of torch's, Python's and numpy's generators while samples are read.

        `num_workers`: processes of this rank, each of which reads splits of its own; 0: the step itself reads. A worker
        cannot start processes: a split reads within its own. `prefetch`: steps ahead of the present one for which this
        rank's slots are read. `timeout`: seconds that a worker may need for one slot, with the opening of its split.
        The default is as of `DataLoader`, with 300 s for a worker's first slot of each split. The rest is as of torch's
        `DataLoader`.

        Raises:
            ValueError: a number is too small, or not an integer, `size` is not a multiple of `slot`, or `num_splits` is
                not one of `size // slot`; or there is no such multiprocessing context.
        """
        num_splits = required_integer("num_splits", num_splits, 1)
        size, slot = sizes(size, slot)
        seed = required_integer("seed", seed)
        num_workers, prefetch = worker_options(num_workers, prefetch, timeout)
        if num_splits % (size // slot):  # STREAM-2
            raise ValueError(
                f"`num_splits` must be a multiple of `size // slot` ({size // slot}), so that each slot of a step has "
                f"a split of its own, but is {num_splits} instead."
            )
        self.size, self.slot, self.seed, self.num_splits = size, slot, seed, num_splits
        self._manager, self._prefetch, self._closing = manager, prefetch, Closing()
        self._fetcher = StreamFetcher(open_split, collate_fn)
        options = WorkerOptions(pin_memory, *timeouts(timeout), worker_init_fn, context_of(multiprocessing_context))
        self._pool = FetchPool(self._fetcher, options, num_workers) if num_workers else None
        if self._pool is not None:
            weakref.finalize(self, self._pool.close)
        self._states: dict[int, str] = {}  # STREAM-1; of the splits that were ever read
        self._read: dict[int, str] = {}  # by this rank in the step under way
        self._numbers: Sequence[int] = ()  # of this rank's slots
        self._workers: dict[int, int] = {}  # by split
        self._is_registered = False
        self._unfinished: int | None = None  # the step whose slots are not all read

    @property
    def num_slots(self) -> int:
        """Slots in a global batch."""
        return self.size // self.slot

    def slots(self, step: Step) -> LoadedSlots:
        """This rank's share of `step`. Iterating over it yields `(slot, batch)`; `slot.index` counts the samples of the
        job. Iterate over all slots (or call `load`) on every rank, also on one without slots: the ranks exchange the
        states of the splits with the last one (STREAM-3). With `pp`, each stage reads the samples of its replica group.

        Raises:
            InvalidOperationError: the loader is not registered.
            OperationalError: the loader is closed.

        Raises, while iterating:
            StepAborted: the step is lost; `with step` catches it.
            OperationalError: a split cannot be read; the ranks have read other splits than the step has; or the loader
                is closed.
        """
        self._closing.check()
        if not self._is_registered:
            raise InvalidOperationError("register the loader before the first step: `register_state(stream=loader)`")
        step.num_slots = self.num_slots
        step.seeds.add(self.seed)
        numbers = range(0) if step.share is None else numbers_of(self.num_slots, self.slot, step.share)
        self._unfinished, self._read = step.index, {}
        step.unread.add(self)
        requests = self._requests(step.index, numbers)
        if self._pool is not None:
            self._pool.want(requests)
        by_key = {request.key: request for request in requests}
        slots = [self._slot(step.index, number, number == numbers[-1]) for number in numbers]
        return _StreamedSlots(
            Slots(slots, step),
            lambda slot: self._batch(step, slot, by_key[step.index, slot.number]),
            lambda: self._exchange(step),
        )

    def close(self) -> None:
        """End the workers, which also end with this object and with the process. The loader cannot be used any more;
        its state can be saved."""
        self._closing.close()
        if self._pool is not None:
            self._pool.close()
            self._pool.join()

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
        return Slot(
            number, torch.arange(first, first + self.slot, device="cpu"), mixed(self.seed, step_index, number), last
        )

    def _split_of(self, step_index: int, slot: int) -> int:
        return slot + self.num_slots * (step_index % (self.num_splits // self.num_slots))

    def _requests(self, step_index: int, numbers: Sequence[int]) -> list[Request]:
        """What to read for the slots `numbers` of this step, and with workers of the next ones (STREAM-4)."""
        cycle = self.num_splits // self.num_slots
        if self._pool is not None and numbers != self._numbers:
            splits = [self._split_of(index, number) for index in range(cycle) for number in numbers]
            self._numbers, self._workers = numbers, divided(splits, self._workers, self._pool.num_workers)
        ahead = 0 if self._pool is None else self._prefetch
        latest: dict[int, Key] = {}
        requests = []
        for index in range(step_index, step_index + 1 + ahead):
            for number in numbers:
                split, key = self._split_of(index, number), (index, number)
                follows = latest.get(split)
                requests.append(
                    Request(
                        key,
                        Reading(split, self.slot, len(numbers) * cycle, MAX_STATES_BYTES // self.num_splits),
                        mixed(self.seed, *key),
                        start=self._states.get(split) if follows is None else None,
                        follows=follows,
                        worker=self._workers.get(split),
                        source=split,
                    )
                )
                latest[split] = key
        return requests

    def _batch(self, step: Step, slot: Slot, request: Request) -> Any:
        fetched: Fetched
        if self._pool is None:
            step.check()
            self._closing.check()
            fetched = fetch_here(self._fetcher, request)
        else:
            fetched = self._pool.take(step, slot)
        number = request.samples.number
        if fetched.error:
            raise OperationalError(
                f"slot {slot.number} of step {step.index} cannot be read from split {number}:\n{fetched.error}"
            ) from fetched.cause
        assert fetched.end is not None
        self._read[number] = fetched.end
        return fetched.batch

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
        step.unread.discard(self)


class _StreamedSlots(LoadedSlots):
    def __init__(self, slots: Slots, take: Callable[[Slot], Any], finish: Callable[[], None]) -> None:
        super().__init__(slots, take)
        self._finish = finish

    def __iter__(self) -> Iterator[tuple[Slot, Any]]:
        """The states are exchanged before the script gets the last slot, as far as there is one: it need not ask for
        the end of the loop, and `zip` with another loader does not."""
        if not len(self):
            self._finish()
        for slot, batch in super().__iter__():
            if slot.last:
                self._finish()
            yield slot, batch

    def load(self) -> list[Any]:
        batches = super().load()
        self._finish()
        return batches


def _are_shared(shares: Sequence[Share | None]) -> bool:
    return any(share is not None for share in shares)


def _gather(gang: Gang, data: bytes) -> list[bytes]:
    """`data` of every rank of `gang`, in rank order. Nothing is unpickled. One collective if all of it is short.

    Raises:
        StepAborted: the generation has ended.
    """
    row = len(data).to_bytes(_LENGTH_BYTES, "big") + data[: _ROW_BYTES - _LENGTH_BYTES]
    rows = _gather_rows(gang, row, _ROW_BYTES)
    lengths = [int.from_bytes(each[:_LENGTH_BYTES], "big") for each in rows]
    if max(lengths) > _ROW_BYTES - _LENGTH_BYTES:
        rows = _gather_rows(gang, data, max(lengths))
    else:
        rows = [each[_LENGTH_BYTES:] for each in rows]
    return [each[:length] for each, length in zip(rows, lengths, strict=True)]


def _gather_rows(gang: Gang, row: bytes, size: int) -> list[bytes]:
    mine = torch.frombuffer(bytearray(row.ljust(size)), dtype=torch.uint8).to(gang.device)
    gathered = torch.zeros(gang.size * size, dtype=torch.uint8, device=gang.device)
    gang.all_gather(gathered, mine)
    if gang.is_poisoned:
        raise StepAborted("the generation ended before the ranks had exchanged the states of the splits")
    return [each.numpy().tobytes() for each in gathered.cpu().view(gang.size, size)]
