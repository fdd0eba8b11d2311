"""A worker process that fetches the samples of slots, and the thread that feeds it.

torch's `DataLoader` does the work, one with a single worker for each of ours: the death of a worker then costs no
other worker its queue, and only what it had not yet delivered is fetched again.

DATAWORKER-1  What a slot's samples look like depends on the slot alone: the generators of torch, `random` and numpy are
    seeded with the slot's seed before it is fetched, in a worker and without one.
DATAWORKER-2  A worker is started only while the thread that wants its batches waits for one. A fork copies locks that
    other threads hold, and that thread could be anywhere in torch.
DATAWORKER-3  The feeding thread owns its torch `DataLoader`. Therefore torch installs no handler of SIGCHLD, which
    would raise a RuntimeError wherever the main thread is when a worker dies.
"""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import random
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch.utils.data import default_collate

_POLL_S = 0.25
_NUM_IN_FLIGHT = 1  # of two, nobody could say at which the worker died
_TIMED_OUT = "DataLoader timed out"  # how torch's error begins

Collate = Callable[[list[Any]], Any]


class Request(NamedTuple):
    """`samples`: the indices of a slot's samples."""

    key: tuple[int, int]
    samples: tuple[int, ...]
    seed: int


class Fetched(NamedTuple):
    """`error`: the traceback of the dataset's or the collate function's exception, which is `cause` if that pickles."""

    key: tuple[int, int] | None
    batch: Any = None
    error: str = ""
    cause: BaseException | None = None


@dataclass(frozen=True)
class Fetcher:
    """Fetches the samples of a slot. In a worker it is the dataset of torch's `DataLoader`, whose "samples" are
    requests."""

    dataset: Any
    collate: Collate | None

    def __getitems__(self, requests: Sequence[Request | None]) -> list[Fetched]:
        return [Fetched(None) if request is None else self.fetch(request) for request in requests]

    def fetch(self, request: Request) -> Fetched:
        try:
            seed_all(request.seed)
            index = list(request.samples)
            many = getattr(self.dataset, "__getitems__", None)
            samples = many(index) if callable(many) else [self.dataset[each] for each in index]
            return Fetched(request.key, (self.collate or default_collate)(samples))
        except Exception as exc:
            return Fetched(request.key, error=traceback.format_exc().rstrip(), cause=_pickled(exc))


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
    """The worker has died, hangs, or delivers nothing. `why` says so. `blamed`: what it was fetching."""

    def __init__(self, why: str, blamed: tuple[int, int] | None) -> None:
        super().__init__(why)
        self.why, self.blamed = why, blamed


@dataclass(frozen=True)
class WorkerOptions:
    """As of torch's `DataLoader`. `timeout`: seconds for one slot."""

    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    context: Any


class Worker:
    """One worker process. One thread, which is not the main one (DATAWORKER-3), uses it; any thread may call `kill`."""

    def __init__(self, number: int, options: WorkerOptions, next_request: Callable[[], Request | None]) -> None:
        """`next_request` says what to fetch next; None: nothing now."""
        self._number, self._options = number, options
        self._next_request = next_request
        self.in_flight: deque[Request | None] = deque()
        self._context = _recording(options.context)
        self._batches: Iterator[Fetched] | None = None

    def start(self, fetcher: Fetcher) -> None:
        """Raises WorkerLost: no process can be started."""
        options, init = self._options, self._options.worker_init_fn
        try:
            self._batches = iter(
                torch.utils.data.DataLoader(
                    fetcher,  # type: ignore[arg-type]
                    batch_sampler=self._requests(),
                    collate_fn=_single,
                    num_workers=1,
                    prefetch_factor=_NUM_IN_FLIGHT,
                    pin_memory=options.pin_memory,
                    timeout=_POLL_S,
                    worker_init_fn=None if init is None else functools.partial(_init_worker, init, self._number),
                    multiprocessing_context=self._context,
                    generator=torch.Generator(),  # the seed of its workers is no draw from the script's generator
                )
            )
        except Exception as exc:
            raise WorkerLost(f"cannot be started ({type(exc).__name__}: {exc})", None) from exc

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
        assert self._batches is not None
        begun_at = time.monotonic()
        while True:
            head = self.in_flight[0]
            blamed = None if head is None else head.key
            if not self._process.is_alive():
                raise WorkerLost(f"has {_describe(self._process.exitcode)}", blamed)
            try:
                fetched = next(self._batches)
            except Exception as exc:
                if not self._process.is_alive():
                    raise WorkerLost(f"has {_describe(self._process.exitcode)}", blamed) from exc
                if not str(exc).startswith(_TIMED_OUT):
                    raise WorkerLost(f"cannot be read ({type(exc).__name__}: {exc})", blamed) from exc
                if time.monotonic() - begun_at > self._options.timeout:
                    raise WorkerLost(f"has not answered for {self._options.timeout:g} s", blamed) from exc
                continue
            self.in_flight.popleft()
            return fetched

    def kill(self) -> None:
        """What it has in flight is lost, and `receive` raises."""
        if self.pid is not None:
            self._process.kill()

    def end(self) -> None:
        self.kill()
        self._batches = None  # torch ends its threads and queues


def _init_worker(init: Callable[[int], None], number: int, _: int) -> None:
    init(number)


def _single(found: list[Fetched]) -> Fetched:
    return found[0]


def _describe(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with code {code}"
    return f"been killed by signal {-code}"


def _recording(context: Any) -> Any:
    """A multiprocessing context whose `started` lists the processes made with it."""
    base: Any = multiprocessing.get_context(context) if context is None or isinstance(context, str) else context
    started: list[Any] = []

    class Recording(type(base)):  # type: ignore[misc]
        def Process(self, *args: Any, **kwargs: Any) -> Any:  # multiprocessing's name
            started.append(process := base.Process(*args, **kwargs))
            return process

    recording = Recording.__new__(Recording)
    recording.__dict__.update(base.__dict__)
    recording.started = started
    return recording
