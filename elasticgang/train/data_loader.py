"""`DataLoader`: the samples of this rank's slots, fetched by worker processes ahead of the step that needs them.

DATALOADER-1  What a step gets is what `GlobalBatch` says for this rank's present share of it. A worker's death, a
    change of the share and a lost step change only when it is fetched, and by whom.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from elasticgang.errors import OperationalError
from elasticgang.integers import required_integer
from elasticgang.member.step import Step
from elasticgang.train.data import GlobalBatch, Slot, Slots
from elasticgang.train.data_worker import (
    DatasetFetcher,
    Fetched,
    Request,
    WorkerOptions,
    context_of,
    fetch_here,
    timeouts,
)
from elasticgang.train.fetch_pool import CLOSED, FetchPool


class LoadedSlots:
    """One rank's share of a step, with its samples. Iterating yields `(slot, batch)`; see `Slots` for the rest."""

    def __init__(self, slots: Slots, take: Callable[[Slot], Any]) -> None:
        self._slots, self._take = slots, take

    @property
    def num_samples(self) -> int:
        """Samples in this share, with those of `kept`: the `weight` of a loss that is summed over samples."""
        return self._slots.num_samples

    @property
    def kept(self) -> tuple[Slot, ...]:
        """As of `Slots`."""
        return self._slots.kept

    @property
    def slots(self) -> Slots:
        """The slots without their samples."""
        return self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[tuple[Slot, Any]]:
        for slot in self._slots:
            yield slot, self._take(slot)

    def load(self) -> list[Any]:
        """The batches of all slots, in order; [] for a learner. In place of the loop, for `PipelineParallel.run`: it
        needs them before the first forward. Call it on every rank.

        Raises what the loop raises.
        """
        return [self._take(self._slots[place]) for place in range(len(self._slots))]


class DataLoader:
    """Fetches this rank's share of each step from a map-style dataset.

        loader = eg.DataLoader(dataset, batches, num_workers=2)
        for step in manager.steps(1000):
            with step:
                for slot, batch in loader.slots(step):
                    ...

    The samples of a slot, random augmentation included, depend on the slot alone: not on the rank, the worker, or the
    number of either.
    """

    def __init__(
        self,
        dataset: Any,
        batches: GlobalBatch,
        *,
        num_workers: int = 0,
        prefetch: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_likely: bool = False,
        timeout: float | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        """`dataset`: as of torch's `DataLoader`, with `__getitem__` or `__getitems__`, and `len(dataset)` equal to
        `batches.num_samples`. `num_workers`: processes of this rank; 0: the step itself fetches. `prefetch`: steps
        ahead of the present one for which this rank's slots are fetched. `prefetch_likely`: once all of these are
        there, fetch for the same steps the slots that this rank gets when one replica group leaves or joins, so that
        the first step after a death need not wait for data. In the middle of few ranks these are more than its own, and
        most are never used. `timeout`: seconds that a worker may need for
        one slot; a hung one is replaced then. The default is half of `--collective-timeout` (30 s), so that the other
        ranks still wait when the slot is there, but 300 s for the first slot of a worker, and always in a job without
        an agent. The rest is as of torch's `DataLoader`.

        The generators that are seeded for each slot are those of torch, of `random`, and numpy's global one. A
        generator that `worker_init_fn` makes is not: what it draws depends on the worker, and is other in every job.

        Raises:
            ValueError: a number is too small, or not an integer, the dataset has another number of samples than
                `batches`, or there is no such multiprocessing context.
        """
        num_workers, prefetch = worker_options(num_workers, prefetch, timeout)
        by_index = getattr(type(dataset), "__getitem__", None) not in (None, Dataset.__getitem__)
        if not (by_index or hasattr(dataset, "__getitems__")):
            raise ValueError(
                f"`dataset` must have `__getitem__` (a map-style dataset), but {type(dataset)} has not: streams are "
                "for `eg.StreamLoader`."
            )
        if hasattr(dataset, "__len__") and len(dataset) != batches.num_samples:
            raise ValueError(
                f"`batches` is for {batches.num_samples} samples, but `dataset` has {len(dataset)}: make it with "
                "`GlobalBatch(len(dataset), ...)`."
            )
        self.batches = batches
        self._prefetch, self._prefetches_likely = prefetch, prefetch_likely
        self._closing = Closing()
        self._fetcher = DatasetFetcher(dataset, collate_fn)
        options = WorkerOptions(pin_memory, *timeouts(timeout), worker_init_fn, context_of(multiprocessing_context))
        self._pool = FetchPool(self._fetcher, options, num_workers) if num_workers else None
        if self._pool is not None:
            weakref.finalize(self, self._pool.close)

    def slots(self, step: Step) -> LoadedSlots:
        """This rank's share of `step`. Iterating over it yields `(slot, batch)`.

        Raises:
            OperationalError: the loader is closed.

        Raises, while iterating:
            StepAborted: the step is lost; `with step` catches it.
            OperationalError: the dataset or the collate function has raised, which is its cause; workers have died or
                timed out at the same slot three times; or the loader is closed.
        """
        self._closing.check()
        slots = self.batches.slots(step)  # DATALOADER-1
        if self._pool is None:
            return LoadedSlots(slots, lambda slot: self._fetch_here(step, slot))
        ahead = [(step.index, slots)]
        for index in range(step.index + 1, step.index + 1 + self._prefetch):
            if self.batches.has_samples(index):  # of the last step, a sampler need not know the next
                ahead.append((index, self.batches.share(index, step.share)))
        if self._prefetches_likely:
            ahead += [(index, self.batches.likely(index, step.share)) for index, _ in tuple(ahead)]
        # By place: an iteration over slots seeds torch's generators.
        requests = [_request(index, of_step[place]) for index, of_step in ahead for place in range(len(of_step))]
        self._pool.want(requests)
        return LoadedSlots(slots, lambda slot: self._take(step, slot))

    def _take(self, step: Step, slot: Slot) -> Any:
        assert self._pool is not None
        return _batch(self._pool.take(step, slot), slot)

    def _fetch_here(self, step: Step, slot: Slot) -> Any:
        step.check()
        self._closing.check()
        return _batch(fetch_here(self._fetcher, _request(step.index, slot)), slot)

    def close(self) -> None:
        """End the workers, which also end with this object and with the process. The loader cannot be used any more."""
        self._closing.close()
        if self._pool is not None:
            self._pool.close()
            self._pool.join()


class Closing:
    """Whether a loader is closed."""

    def __init__(self) -> None:
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True

    def check(self) -> None:
        """Raises OperationalError: it is closed."""
        if self._is_closed:
            raise OperationalError(CLOSED)


def worker_options(num_workers: object, prefetch: object, timeout: float | None) -> tuple[int, int]:
    """Raises ValueError: a number is too small, or not an integer."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"`timeout` must be greater than 0, but is {timeout} instead.")
    return required_integer("num_workers", num_workers, 0), required_integer("prefetch", prefetch, 0)


def _request(step_index: int, slot: Slot) -> Request:
    return Request((step_index, slot.number), tuple(slot.index.tolist()), slot.seed)


def _batch(fetched: Fetched, slot: Slot) -> Any:
    if fetched.error:
        step_index, number = fetched.key or (0, slot.number)
        raise OperationalError(
            f"slot {number} of step {step_index} (the samples {_shortened(slot.index)}) cannot be loaded:\n"
            f"{fetched.error}"
        ) from fetched.cause
    return fetched.batch


def _shortened(index: Tensor, most: int = 8) -> str:
    numbers = [str(each) for each in index[:most].tolist()]
    return ", ".join(numbers) + (", ..." if index.numel() > most else "")
