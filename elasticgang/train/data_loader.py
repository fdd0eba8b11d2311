"""`DataLoader`: the samples of this rank's slots, fetched by worker processes ahead of the step that needs them.

DATALOADER-1  What a step gets is what `GlobalBatch` says for this rank's present share of it. A worker's death, a
    change of the share and a lost step change only when it is fetched, and by whom.
DATALOADER-2  A batch that the script may have changed in place is not handed out a second time: a step that is tried
    again fetches it anew. One whose tensors are unchanged is used again.
DATALOADER-3  Every wait ends: with the batch, when the step is lost, or when a worker has failed at a slot for the
    third time. A worker that needs longer than `timeout` for a slot is killed and replaced.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from elasticgang.errors import OperationalError
from elasticgang.member.manager import Step
from elasticgang.train.data import GlobalBatch, Slot, Slots
from elasticgang.train.data_worker import Fetched, Fetcher, Request, Worker, WorkerLost, WorkerOptions, fetch_here
from elasticgang.train.prefetch import MAX_ATTEMPTS, Prefetch

_CHECK_S = 0.02  # while a step waits for data
_JOIN_S = 5.0

log = logging.getLogger("elasticgang")


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

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[tuple[Slot, Any]]:
        for slot in self._slots:
            yield slot, self._take(slot)


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
        timeout: float = 300.0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        """`dataset`: as of torch's `DataLoader`, with `__getitem__` or `__getitems__`, and `len(dataset)` equal to
        `batches.num_samples`. `num_workers`: processes of this rank; 0: the step itself fetches. `prefetch`: steps
        ahead of the present one for which this rank's slots are fetched. `prefetch_likely`: once all of these are
        there, fetch for the same steps the slots that this rank gets when one replica group leaves or joins, so that
        the first step after a death need not wait for data. In the middle of few ranks these are more than its own, and
        most are never used. `timeout`: seconds that a worker may need for
        one slot. The rest is as of torch's `DataLoader`.

        Raises:
            ValueError: a number is too small, or the dataset has another number of samples than `batches`.
        """
        for name, value, least in (("num_workers", num_workers, 0), ("prefetch", prefetch, 0)):
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, but is {value} instead.")
        if not timeout > 0:
            raise ValueError(f"`timeout` must be greater than 0, but is {timeout} instead.")
        if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
            raise ValueError(f"`dataset` must have `__getitem__` (a map-style dataset), but {type(dataset)} has not.")
        if hasattr(dataset, "__len__") and len(dataset) != batches.num_samples:
            raise ValueError(
                f"`batches` is for {batches.num_samples} samples, but `dataset` has {len(dataset)}: make it with "
                "`GlobalBatch(len(dataset), ...)`."
            )
        self.batches = batches
        self._prefetch, self._prefetches_likely = prefetch, prefetch_likely
        self._fetcher = Fetcher(dataset, collate_fn)
        options = WorkerOptions(pin_memory, timeout, worker_init_fn, multiprocessing_context)
        self._pool = _Pool(self._fetcher, options, num_workers) if num_workers else None
        if self._pool is not None:
            weakref.finalize(self, self._pool.close)
            _pools.add(self._pool)

    def slots(self, step: Step) -> LoadedSlots:
        """This rank's share of `step`. Iterating over it yields `(slot, batch)`.

        Raises, while iterating:
            StepAborted: the step is lost; `with step` catches it.
            OperationalError: the dataset or the collate function has raised, which is its cause; or workers have died
                or timed out at the same slot three times.
        """
        slots = self.batches.slots(step)  # DATALOADER-1
        if self._pool is None:
            return LoadedSlots(slots, lambda slot: _batch(fetch_here(self._fetcher, _request(step.index, slot)), slot))
        following = range(step.index + 1, step.index + 1 + self._prefetch)
        ahead = [(step.index, slots), *((index, self.batches.share(index, step.share)) for index in following)]
        if self._prefetches_likely:
            ahead += [(index, self.batches.likely(index, step.share)) for index in (step.index, *following)]
        # By place: an iteration over slots seeds torch's generators.
        requests = [_request(index, of_step[place]) for index, of_step in ahead for place in range(len(of_step))]
        self._pool.want(requests)
        pool = self._pool
        return LoadedSlots(slots, lambda slot: pool.take(step, slot))

    def close(self) -> None:
        """End the workers. They also end with this object and with the process."""
        if self._pool is not None:
            self._pool.close()
            self._pool.join()


_pools: weakref.WeakSet[_Pool] = weakref.WeakSet()


@atexit.register
def _end_pools() -> None:
    """A thread that is still in torch when the interpreter ends would end the process by SIGABRT."""
    for pool in list(_pools):
        pool.close()
        pool.join()


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


class _Loaded:
    """A batch that has come from a worker, and the versions of its tensors."""

    def __init__(self, fetched: Fetched) -> None:
        self.fetched = fetched
        self._versions: list[tuple[Tensor, int]] | None = None

    def hand_out(self) -> Fetched | None:
        """The batch, in containers of its own. None: it may have been changed since the last time (DATALOADER-2)."""
        if self.fetched.error:
            return self.fetched
        if self._versions is not None and any(tensor._version != version for tensor, version in self._versions):
            return None
        tensors: list[Tensor] = []
        try:
            copied = _copied(self.fetched.batch, tensors)
        except _NotCopiedError:
            if self._versions is not None:
                return None
            copied = self.fetched.batch
        if self._versions is None:
            self._versions = [(tensor, tensor._version) for tensor in tensors]
        return self.fetched._replace(batch=copied)


class _NotCopiedError(Exception):
    """An object of unknown type, which the script may change."""


def _copied(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with new containers around the same tensors, which are appended to `tensors`."""
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return value
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return value
    if kind is dict:
        return {name: _copied(each, tensors) for name, each in value.items()}
    if kind in (list, tuple):
        return kind(_copied(each, tensors) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(_copied(each, tensors) for each in value))
    raise _NotCopiedError


class _Pool:
    """The workers, and the threads that feed them. It does not refer to the loader, whose end ends it."""

    def __init__(self, fetcher: Fetcher, options: WorkerOptions, num_workers: int) -> None:
        self._fetcher, self._options, self._num_workers = fetcher, options, num_workers
        self._changed = threading.Condition()
        self._prefetch: Prefetch[_Loaded] = Prefetch()
        self._requests: dict[tuple[int, int], Request] = {}
        self._threads: list[threading.Thread] = []
        self._workers: set[Worker] = set()
        self._is_awaited = False  # DATAWORKER-2
        self._is_closed = False

    def want(self, requests: Sequence[Request]) -> None:
        with self._changed:
            if self._is_closed:
                raise OperationalError("the data loader is closed")
            self._requests = {request.key: request for request in requests}
            self._prefetch.want(self._requests)
            if not self._threads:
                for number in range(self._num_workers):
                    thread = threading.Thread(
                        target=self._feed, args=(number,), name=f"data-loader-{number}", daemon=True
                    )
                    self._threads.append(thread)
                    thread.start()
            self._changed.notify_all()

    def take(self, step: Step, slot: Slot) -> Any:
        """Wait for the batch of `slot` (DATALOADER-3)."""
        key = (step.index, slot.number)
        with self._changed:
            self._is_awaited = True
            self._changed.notify_all()
            try:
                while True:
                    loaded = self._prefetch.get(key)
                    if loaded is not None:
                        fetched = loaded.hand_out()
                        if fetched is not None:
                            break
                        self._prefetch.drop(key)
                        self._changed.notify_all()
                    self._changed.wait(_CHECK_S)
                    step.check()
            finally:
                self._is_awaited = False
        return _batch(fetched, slot)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()
            self._changed.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(_JOIN_S)

    # -- the feeding threads

    def _feed(self, number: int) -> None:
        while self._await(lambda: self._is_awaited and self._prefetch.has_next()):
            worker = Worker(number, self._options, self._assign)
            try:
                if self._start(worker):
                    while self._await(functools.partial(self._has_work, worker)):
                        self._arrived(worker.receive())
            except WorkerLost as lost:
                self._lost(number, worker, lost)
            finally:
                with self._changed:
                    self._workers.discard(worker)
                worker.end()

    def _start(self, worker: Worker) -> bool:
        """DATAWORKER-2: nobody leaves `take` without the lock. False: it is too late."""
        with self._changed:
            if not self._is_awaited or self._is_closed:
                return False
            self._workers.add(worker)
            worker.start(self._fetcher)
            return True

    def _has_work(self, worker: Worker) -> bool:
        return not worker.is_idle or self._prefetch.has_next()

    def _await(self, condition: Callable[[], bool]) -> bool:
        """Wait for `condition`. False: the loader is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or condition())
            return not self._is_closed

    def _assign(self) -> Request | None:
        with self._changed:
            key = self._prefetch.assign()
            return None if key is None else self._requests[key]

    def _arrived(self, fetched: Fetched) -> None:
        if fetched.key is not None:
            with self._changed:
                self._prefetch.arrived(fetched.key, _Loaded(fetched))
                self._changed.notify_all()

    def _lost(self, number: int, worker: Worker, lost: WorkerLost) -> None:
        """PREFETCH-3."""
        with self._changed:
            if self._is_closed:
                return
            keys = [request.key for request in worker.in_flight if request is not None]
            self._prefetch.returned(keys)
            blamed = lost.blamed if worker.has_started else self._prefetch.first()
            if blamed is not None and not self._prefetch.interrupted(blamed):
                what = f"{MAX_ATTEMPTS} data workers were lost at it; the last one {lost.why}"
                self._prefetch.arrived(blamed, _Loaded(Fetched(blamed, error=what)))
            where = "" if lost.blamed is None else f" at slot {lost.blamed[1]} of step {lost.blamed[0]}"
            process = "" if worker.pid is None else f" (process {worker.pid})"
            log.warning("data worker %d%s %s%s: replacing it", number, process, lost.why, where)
            self._changed.notify_all()
