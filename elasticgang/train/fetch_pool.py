"""Worker processes that fetch slots ahead of the step that needs them: what `DataLoader` and `StreamLoader` share.

FETCHPOOL-1  A step that is tried again gets each batch as it came from its worker, whatever the script has done to what
    it got before: the script gets private copies, which share memory with what came until one of both is written to. A
    batch of a type that cannot be copied so is fetched anew.
FETCHPOOL-2  Every wait ends: with the batch, when the step is lost, when the loader is closed or has failed, or when a
    worker has failed at a slot for the third time. A worker that needs longer than `timeout` for a slot is killed and
    replaced.
FETCHPOOL-3  A batch that was read from another state of its split than the step says is not handed out.
"""

from __future__ import annotations

import atexit
import copy
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from elasticgang.errors import OperationalError
from elasticgang.member.step import Step
from elasticgang.torch_private import copy_on_write, pinned, sends_descriptors, storage_key
from elasticgang.train.data import Slot
from elasticgang.train.data_worker import Fetched, Fetcher, Request, Worker, WorkerLost, WorkerOptions
from elasticgang.train.prefetch import MAX_ATTEMPTS, Key, Prefetch

_CHECK_S = 0.02  # while a step waits for data
_JOIN_S = 5.0
_MAX_REASON = 500
SLOW_S = 10.0
CLOSED = "the data loader is closed"

log = logging.getLogger("elasticgang")

_pools: weakref.WeakSet[FetchPool] = weakref.WeakSet()


@atexit.register
def _end_pools() -> None:
    """A thread that is still in torch when the interpreter ends would end the process by SIGABRT."""
    for pool in list(_pools):
        pool.close()
        pool.join()


class _Loaded:
    """A batch that has come from a worker (FETCHPOOL-1). `pins`: the script gets it in pinned memory."""

    def __init__(self, fetched: Fetched, *, pins: bool = False) -> None:
        self.fetched, self._pins = fetched, pins
        self._is_handed_out = False  # itself, and not a copy
        self._ready = self._copy() if pins else None  # ahead

    def hand_out(self) -> Fetched | None:
        """A copy for the script. None: the batch has to be fetched again."""
        ready, self._ready = self._ready or self._copy(), None
        return ready

    def _copy(self) -> Fetched | None:
        if self.fetched.error:
            return self.fetched
        if self._is_handed_out:
            return None
        try:
            batch = _copied(self.fetched.batch, {}, {})
        except _NotCopiedError:
            self._is_handed_out, batch = True, self.fetched.batch
        return self.fetched._replace(batch=pinned(batch) if self._pins else batch)


class _NotCopiedError(Exception):
    """An object of unknown type, which the script may change."""


def _copied(value: Any, storages: dict[int, torch.UntypedStorage], memo: dict[int, Any]) -> Any:
    """`value` with new containers and tensors. `storages`: copies by the keys of the originals. `memo`: as of
    `deepcopy`. So tensors that share memory still do."""
    kind = type(value)
    if isinstance(value, Tensor):
        return _copied_tensor(value, storages) if _is_sent(value) else copy.deepcopy(value, memo)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return value
    if kind is dict:
        return {name: _copied(each, storages, memo) for name, each in value.items()}
    if kind in (list, tuple):
        return kind(_copied(each, storages, memo) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(_copied(each, storages, memo) for each in value))
    raise _NotCopiedError


def _is_sent(tensor: Tensor) -> bool:
    """Whether it is a plain tensor in memory that came by a descriptor, as torch sends it by default."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain or tensor.device.type != "cpu" or not sends_descriptors():
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() > 0 and storage.is_shared()


def _copied_tensor(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    storage = tensor.untyped_storage()
    key = storage_key(storage)
    if key not in storages:
        storages[key] = copy_on_write(storage)
    copied = torch.empty(0, dtype=tensor.dtype, device="cpu")
    copied.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
    return copied.requires_grad_(tensor.requires_grad)


class _SlowWarning:
    """Warns of a long wait for a batch, at growing intervals."""

    def __init__(self, begun_at: float) -> None:
        self._begun_at, self._interval_s = begun_at, SLOW_S

    def warn(self, key: Key, workers: Iterable[Worker], now: float) -> None:
        if now < self._begun_at + self._interval_s:
            return
        waited_s, self._interval_s = now - self._begun_at, 3 * self._interval_s
        pids = ", ".join(str(worker.pid) for worker in workers if worker.pid is not None)
        log.warning(
            "slot %d of step %d has not come from the data workers (%s) for %.0f s", key[1], key[0], pids, waited_s
        )


def _ignore(loss: dict[str, Any]) -> None: ...


class FetchPool:
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
        self._report: Callable[[dict[str, Any]], None] = _ignore  # of a step: tells the agent of a lost worker
        self._fault: Exception | None = None  # of a feeding thread
        _pools.add(self)

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def want(self, requests: Sequence[Request]) -> None:
        """From now on fetch exactly `requests`, the one that is needed first at the beginning.

        Raises:
            OperationalError: the pool is closed.
        """
        with self._changed:
            self._check_open()
            self._requests = {request.key: request for request in requests}
            self._prefetch.want(
                self._requests,
                {request.key: request.follows for request in requests if request.follows is not None},
                {request.key: request.worker for request in requests if request.worker is not None},
            )
            for request in requests:  # in order: what follows a stale one is stale too
                loaded = self._prefetch.get(request.key)
                if loaded is not None and not self._is_current(loaded.fetched):
                    self._prefetch.drop(request.key)
            if not self._threads:
                for number in range(self._num_workers):
                    thread = threading.Thread(
                        target=self._feed, args=(number,), name=f"data-loader-{number}", daemon=True
                    )
                    self._threads.append(thread)
                    thread.start()
            self._changed.notify_all()

    def take(self, step: Step, slot: Slot) -> Fetched:
        """Wait for `slot` (FETCHPOOL-2).

        Raises:
            StepAborted: the step is lost.
            OperationalError: the pool is closed.
        """
        key = (step.index, slot.number)
        slow = _SlowWarning(time.monotonic())
        with self._changed:
            self._is_awaited, self._report = True, step.data_worker_lost
            self._changed.notify_all()
            try:
                while True:
                    self._check_open()
                    loaded = self._prefetch.get(key)
                    if loaded is not None:
                        fetched = loaded.hand_out()
                        if fetched is not None:
                            break
                        self._prefetch.drop(key)
                        self._changed.notify_all()
                    for worker in self._workers:
                        worker.kill_if_late()
                    slow.warn(key, self._workers, time.monotonic())
                    self._changed.wait(_CHECK_S)
                    step.check()
            finally:
                self._is_awaited = False
        return fetched

    def _check_open(self) -> None:
        if self._is_closed:
            raise OperationalError(CLOSED)
        if self._fault is not None:
            raise OperationalError(f"the data loader has failed: {self._fault!r}") from self._fault

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._requests = {}
            self._prefetch.want(())  # the batches are in shared memory, each with a descriptor
            for worker in self._workers:
                worker.kill()
            self._changed.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(_JOIN_S)

    # -- the feeding threads

    def _feed(self, number: int) -> None:
        try:
            self._run_workers(number)
        except Exception as exc:  # FETCHPOOL-2
            with self._changed:
                self._fault = exc
                self._changed.notify_all()

    def _run_workers(self, number: int) -> None:
        while self._await(lambda: self._is_awaited and self._prefetch.has_next(number)):
            worker = Worker(number, self._num_workers, self._options, functools.partial(self._assign, number))
            try:
                if self._start(worker):
                    while self._await(functools.partial(self._has_work, number, worker)):
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

    def _has_work(self, number: int, worker: Worker) -> bool:
        return not worker.is_idle or self._prefetch.has_next(number)

    def _await(self, condition: Callable[[], bool]) -> bool:
        """Wait for `condition`. False: the loader is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or condition())
            return not self._is_closed

    def _assign(self, number: int) -> Request | None:
        with self._changed:
            key = self._prefetch.assign(number)
            if key is None:
                return None
            request = self._requests[key]
            before = None if request.follows is None else self._prefetch.get(request.follows)
            return request if before is None else request._replace(start=before.fetched.end)

    def _arrived(self, fetched: Fetched) -> None:
        if fetched.key is not None:
            loaded = _Loaded(fetched, pins=self._options.pin_memory)
            with self._changed:
                if self._is_current(fetched):
                    self._prefetch.arrived(fetched.key, loaded)
                else:
                    self._prefetch.returned([fetched.key])
                self._changed.notify_all()

    def _is_current(self, fetched: Fetched) -> bool:
        """FETCHPOOL-3. Also of one that nobody wants any more."""
        request = None if fetched.key is None else self._requests.get(fetched.key)
        if request is None:
            return True
        if request.follows is None:
            return fetched.start == request.start
        before = self._prefetch.get(request.follows)
        return before is not None and fetched.start == before.fetched.end

    def _lost(self, number: int, worker: Worker, lost: WorkerLost) -> None:
        """PREFETCH-3. The agent is told of it without the lock: it could be slow to read."""
        with self._changed:
            if self._is_closed:
                return
            report = self._report
            keys = [request.key for request in worker.in_flight if request is not None]
            self._prefetch.returned(keys)
            blamed = lost.blamed if worker.has_started else self._prefetch.first(number)
            if blamed is not None and not self._prefetch.interrupted(blamed):
                hint = "; the loader's `timeout` is how long one may take" if lost.kind == "hung" else ""
                what = f"{MAX_ATTEMPTS} data workers were lost at it; the last one {lost.why}{hint}"
                self._prefetch.arrived(blamed, _Loaded(Fetched(blamed, error=what)))
            step, slot = lost.blamed or (None, None)
            where = "" if lost.blamed is None else f" at slot {slot} of step {step}"
            process = "" if worker.pid is None else f" (process {worker.pid})"
            log.warning("data worker %d%s %s%s: replacing it", number, process, lost.why, where)
            self._changed.notify_all()
        reason = lost.why[:_MAX_REASON]
        report({"worker": number, "pid": worker.pid, "kind": lost.kind, "reason": reason, "step": step, "slot": slot})
