"""A worker process that fetches the samples of slots, and the thread that feeds it.

torch's `DataLoader` does the work, one with a single worker for each of ours: the death of a worker then costs no
other worker its queue, and only what it had not yet delivered is fetched again.

DATAWORKER-1  What a slot's samples look like depends on the slot alone: the generators of torch, `random` and numpy are
    seeded with the slot's seed before it is fetched, in a worker and without one.
DATAWORKER-2  A worker is started only while the thread that wants its batches waits for one. A fork copies locks that
    other threads hold, and that thread could be anywhere in torch.
DATAWORKER-3  The feeding thread owns its torch `DataLoader`. Therefore torch installs no handler of SIGCHLD, which
    would raise a RuntimeError wherever the main thread is when a worker dies.
DATAWORKER-4  A feeding thread that reads the rest of a batch looks at no clock. The thread that waits for the batch
    kills a worker that is late by `_LATE_S`, and the end of its connections ends the reading.
DATAWORKER-5  This process takes no lock that a worker may hold when it is killed. Therefore `FetchPool` pins batches:
    torch's thread that pins them shares a lock with the worker.
DATAWORKER-6  By default a worker may need half of the job's collective timeout for a slot: the other ranks still wait
    when another worker has fetched it. The first slot of a worker, and the first one from a split, may take `OPEN_S`:
    files are opened then, and modules imported.
DATAWORKER-7  A worker that starts has a seed that no other one has, of any rank or job: for generators that
    `worker_init_fn` gives the dataset, which nobody seeds for a slot.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import multiprocessing.queues
import pickle
import random
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch.utils.data import default_collate, get_worker_info

from elasticgang.member.rank_context import inherited
from elasticgang.process.stop_signals import ignore_stop_signals_here
from elasticgang.torch_private import close_result_writer, replace_done_event, set_worker_info, shut_down_loader
from elasticgang.train.prefetch import Key

_POLL_S = 0.25
_EXIT_S = 5.0
_LATE_S = 1.0  # beyond the timeout of a slot
OPEN_S = 300.0  # by default, for a slot for which a worker opens something
_NUM_IN_FLIGHT = 1  # of two, nobody could say at which the worker died
_TIMED_OUT = "DataLoader timed out"  # how torch's error begins

Collate = Callable[[list[Any]], Any]


class Request(NamedTuple):
    """A slot to fetch. `samples`: which ones, as its fetcher takes them.

    The rest is of streams. `source`: what the worker opens for it, and keeps open. `start`: the state to read from.
    `follows`: the request whose end is that state, once it is known. `worker`: the number of the worker that has to
    fetch it; None: any.
    """

    key: Key
    samples: Any
    seed: int
    start: str | None = None
    follows: Key | None = None
    worker: int | None = None
    source: int | None = None


class Fetched(NamedTuple):
    """`error`: the traceback of the user's exception, which is `cause` if that pickles. `start`, `end`: the states of
    the stream before and after."""

    key: Key | None
    batch: Any = None
    error: str = ""
    cause: BaseException | None = None
    start: str | None = None
    end: str | None = None


class Fetcher(ABC):
    """Fetches the samples of slots. In a worker it is the dataset of torch's `DataLoader`, whose "samples" are
    requests."""

    def __getitems__(self, requests: Sequence[Request | None]) -> list[Fetched]:
        return [Fetched(None) if request is None else self.fetch(request) for request in requests]

    def fetch(self, request: Request) -> Fetched:
        try:
            seed_all(request.seed)
            batch, end = self.read(request)
            return Fetched(request.key, batch, start=request.start, end=end)
        except Exception as exc:
            error = traceback.format_exc().rstrip()
            return Fetched(request.key, error=error, cause=_pickled(exc), start=request.start)

    @abstractmethod
    def worker_info(self, number: int, num_workers: int) -> tuple[int, int, Any]:
        """What torch's `get_worker_info` says in worker `number`: its id, how many there are, and the dataset."""

    @abstractmethod
    def read(self, request: Request) -> tuple[Any, str | None]:
        """The batch, and the state of the stream after it. May raise anything."""


class DatasetFetcher(Fetcher):
    """The samples of a request are indices into `dataset`."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self._collate = dataset, collate or default_collate

    def worker_info(self, number: int, num_workers: int) -> tuple[int, int, Any]:
        return number, num_workers, self.dataset

    def read(self, request: Request) -> tuple[Any, None]:
        index = list(request.samples)
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(index) if callable(many) else [self.dataset[each] for each in index]
        if len(samples) != len(index):
            raise ValueError(
                f"`__getitems__` of the dataset has returned {len(samples)} samples for {len(index)} indices"
            )
        try:
            return self._collate(samples), None
        except Exception as exc:
            if self._collate is default_collate and len(shapes := {_shapes(sample) for sample in samples}) > 1:
                raise ValueError(  # torch's own message depends on which sample comes first
                    f"the samples of a slot have different shapes ({' and '.join(sorted(shapes)[:2])}): give the "
                    "loader a `collate_fn` that makes a batch of them"
                ) from exc
            raise


def _shapes(sample: Any) -> str:
    """The shapes of its tensors and arrays."""
    if isinstance(sample, Mapping):
        return ", ".join(_shapes(each) for each in sample.values())
    if isinstance(sample, list | tuple):
        return ", ".join(map(_shapes, sample))
    return str(list(getattr(sample, "shape", ())))


def fetch_here(fetcher: Fetcher, request: Request) -> Fetched:
    """Without a worker. The generators of this process keep their state."""
    with kept_generators():
        return fetcher.fetch(request)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, `random` and numpy (DATAWORKER-1)."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


@contextmanager
def kept_generators() -> Iterator[None]:
    """After this context, the generators have the state from before."""
    numpy = sys.modules.get("numpy")
    of_torch, of_random = torch.default_generator.get_state(), random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_random)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _pickled(exc: Exception) -> Exception | None:
    """`exc`, if it comes through a queue; torch's and users' exceptions may not."""
    try:
        return exc if isinstance(pickle.loads(pickle.dumps(exc)), type(exc)) else None
    except Exception:
        return None


# -- the thread's side


class WorkerLost(Exception):
    """The worker delivers nothing more. `kind`: it "died", "hung", or "failed" to start or to send. `why` says more.
    `blamed`: what it was fetching."""

    def __init__(self, kind: str, why: str, blamed: Key | None) -> None:
        super().__init__(why)
        self.kind, self.why, self.blamed = kind, why, blamed


@dataclass(frozen=True)
class WorkerOptions:
    """As of torch's `DataLoader`. `pin_memory`: for `FetchPool`. `timeout`: seconds for one slot. `open_timeout`: for
    one for which the worker opens something. `context`: as `context_of` returns it."""

    pin_memory: bool
    timeout: float
    open_timeout: float
    worker_init_fn: Callable[[int], None] | None
    context: Any


class Worker:
    """One worker process. One thread, which is not the main one (DATAWORKER-3), uses it; any thread may call `kill`."""

    def __init__(
        self, number: int, num_workers: int, options: WorkerOptions, next_request: Callable[[], Request | None]
    ) -> None:
        """It is `number` of `num_workers`. `next_request` says what to fetch next; None: nothing now."""
        self._number, self._num_workers, self._options = number, num_workers, options
        self._next_request = next_request
        self.in_flight: deque[Request | None] = deque()
        self._context = _recording(options.context)
        self._batches: Iterator[Fetched] | None = None
        self._done_event: Any = None  # while the worker may open it
        self._is_late_at, self._was_late = math.inf, False
        self._opened: set[object] = set()  # DATAWORKER-6

    def start(self, fetcher: Fetcher) -> None:
        """Raises WorkerLost: no process can be started."""
        init = functools.partial(_init_worker, self._options.worker_init_fn, self._number, self._num_workers)
        generator = torch.Generator()  # the seed of its workers is no draw from the script's generator
        generator.seed()  # DATAWORKER-7
        try:
            self._batches = iter(
                torch.utils.data.DataLoader(
                    fetcher,  # type: ignore[arg-type]
                    batch_sampler=self._requests(),
                    collate_fn=_single,
                    num_workers=1,
                    prefetch_factor=_NUM_IN_FLIGHT,
                    timeout=_POLL_S,
                    worker_init_fn=init,
                    multiprocessing_context=self._context,
                    generator=generator,
                )
            )
            close_result_writer(self._batches)
            self._done_event = replace_done_event(self._batches)  # DATAWORKER-5
        except Exception as exc:
            raise WorkerLost("failed", f"cannot be started ({type(exc).__name__}: {exc})", None) from exc

    @property
    def _process(self) -> Any:
        return self._context.started[0]

    @property
    def pid(self) -> int | None:
        """None: it was not started."""
        return self._process.pid if self._context.started else None

    @property
    def has_started(self) -> bool:
        return self._batches is not None

    @property
    def is_idle(self) -> bool:
        return not any(self.in_flight)

    def _requests(self) -> Iterator[list[Request | None]]:
        """torch's loader takes the next one when it hands over a result."""
        while True:
            request = self._next_request()
            self.in_flight.append(request)
            yield [request]

    def receive(self) -> Fetched:
        """Wait for the next result, in the order of the requests. One without a key answers a request for nothing.

        Raises:
            WorkerLost: there will be none.
        """
        begun_at, head = time.monotonic(), self.in_flight[0]
        opens = None if head is None else head.source
        timeout = self._options.timeout if opens in self._opened else self._options.open_timeout  # DATAWORKER-6
        self._is_late_at = begun_at + timeout + _LATE_S
        try:
            fetched = self._receive(begun_at, timeout)
        finally:
            self._is_late_at = math.inf
        if head is not None:
            self._opened.add(opens)
        return fetched

    def _receive(self, begun_at: float, timeout: float) -> Fetched:
        assert self._batches is not None
        while True:
            head = self.in_flight[0]
            blamed = None if head is None else head.key
            if not self._process.is_alive():
                raise WorkerLost("died", f"has {_describe(self._process.exitcode)}", blamed)
            try:
                fetched = next(self._batches)
            except Exception as exc:
                if isinstance(exc, EOFError | ConnectionError) or (isinstance(exc, OSError) and exc.errno is None):
                    # It has closed its files, perhaps in the middle of a message, and exits.
                    self._process.join(_EXIT_S)
                if not (self._was_late or self._process.is_alive()):
                    raise WorkerLost("died", f"has {_describe(self._process.exitcode)}", blamed) from exc
                if self._was_late or time.monotonic() - begun_at > timeout:
                    raise WorkerLost("hung", f"has not answered for {timeout:g} s", blamed) from exc
                if not str(exc).startswith(_TIMED_OUT):
                    raise WorkerLost("failed", f"cannot be read ({type(exc).__name__}: {exc})", blamed) from exc
                continue
            self.in_flight.popleft()
            return fetched

    def kill(self) -> None:
        """What it has in flight is lost, and `receive` raises."""
        if self.pid is not None:
            self._process.kill()

    def kill_if_late(self) -> None:
        """DATAWORKER-4."""
        if time.monotonic() > self._is_late_at:
            self._was_late = True
            self.kill()

    def end(self) -> None:
        """Kill it, and free what this process has of it, at once: the objects of torch and multiprocessing refer to one
        another, and would wait for the garbage collector."""
        self.kill()
        if self._batches is not None:
            with suppress(Exception):
                shut_down_loader(self._batches)  # its threads and queues
        self._batches = self._done_event = None
        if self.pid is not None:
            self._process.join(_POLL_S)
            with suppress(ValueError):  # it is still alive, in a system call that cannot be interrupted
                self._process.close()


def timeouts(timeout: float | None) -> tuple[float, float]:
    """The seconds that a worker may need for a slot, and for one for which it opens something (DATAWORKER-6)."""
    if timeout is not None:
        return timeout, timeout
    context = inherited()
    usual = OPEN_S if context is None else context.collective_timeout / 2
    return usual, max(usual, OPEN_S)


def _init_worker(init: Callable[[int], None] | None, number: int, num_workers: int, _: int) -> None:
    """In the worker. Of torch, it is the only one, and has a fetcher for its dataset."""
    ignore_stop_signals_here()  # STOP-ALL
    info: Any = get_worker_info()
    set_worker_info(*info.dataset.worker_info(number, num_workers))
    if init is not None:
        init(number)


def _single(found: list[Fetched]) -> Fetched:
    return found[0]


def _describe(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with code {code}"
    return f"been killed by signal {-code}"


class _ReportingQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]  # it takes no argument
    """A queue of a worker's batches. One that does not pickle is answered with the error: multiprocessing would print
    it, drop the batch, and leave this process waiting."""

    def _on_queue_feeder_error(self, e: Exception, obj: Any) -> None:
        number, fetched = obj if isinstance(obj, tuple) and len(obj) == 2 else (None, None)
        if not isinstance(fetched, Fetched) or fetched.error:
            super()._on_queue_feeder_error(e, obj)  # type: ignore[misc]
            return
        error = "the batch cannot be sent by the worker:\n" + "".join(traceback.format_exception(e)).rstrip()
        self.put((number, Fetched(fetched.key, error=error, cause=_pickled(e), start=fetched.start)))


def context_of(context: Any) -> Any:
    """`context`: as of torch's `DataLoader`: a context, the name of one, or None. Raises ValueError: unknown name."""
    return multiprocessing.get_context(context) if context is None or isinstance(context, str) else context


def _recording(base: Any) -> Any:
    """`base`, a multiprocessing context, as one whose `started` lists the processes made with it."""
    started: list[Any] = []

    class Recording(type(base)):  # type: ignore[misc]
        def Process(self, *args: Any, **kwargs: Any) -> Any:  # multiprocessing's name
            started.append(process := base.Process(*args, **kwargs))
            return process

        def Queue(self, maxsize: int = 0) -> Any:  # multiprocessing's name
            return _ReportingQueue(maxsize, ctx=base)

    recording = Recording.__new__(Recording)
    recording.__dict__.update(base.__dict__)
    recording.started = started
    return recording
