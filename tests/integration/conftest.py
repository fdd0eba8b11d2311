"""A fork server for all tests of this tier, and the comm processes that a test starts from it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

import elasticgang as eg
from elasticgang.checkpoint import plan
from elasticgang.comm.arena import Arena
from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
from elasticgang.errors import GangError
from elasticgang.process.forkserver import ForkServer, ForkServerClient
from elasticgang.state.striped_fetch import StripedFetch
from scripts.benches.comm import open_store
from tests.integration import memory_heals, saving
from tests.integration.loading import NUM_SAMPLES, SIZE, SLOT
from tests.integration.rings import Ring
from tests.integration.state_ranks import Rank, Ranks
from tests.support import DEADLINE_S, REPOSITORY

# Data workers that this server starts need not import torch, one by one.
multiprocessing.set_forkserver_preload(["tests.integration.loading"])

_T = TypeVar("_T")
_prefixes = itertools.count()


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[StripedFetch]:
    """Every fetch, of states of any size, in small chunks."""
    return memory_heals.record_fetches(monkeypatch)


@pytest.fixture
def no_default_group() -> Iterator[None]:
    """torch's default process group is none, and a test's own one ends with the test."""
    dist.distributed_c10d._update_default_pg(None)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    preload = ("elasticgang.comm.worker", "tests.integration.ranks")
    server = ForkServer(preload=preload, env={"PYTHONPATH": str(REPOSITORY)})
    server.wait_ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def small_forkserver() -> Iterator[ForkServer]:
    """A fork server without torch, for the processes of `dying`."""
    server = ForkServer(preload=("tests.integration.dying",), env={"PYTHONPATH": str(REPOSITORY)})
    server.wait_ready()
    yield server
    server.close()


@pytest.fixture(scope="session")
def store() -> Iterator[str]:
    """The address of a store."""
    with open_store() as address:
        yield address


class World:
    """Some comm processes with a group of each name, driven from this process. Rank `r` is `comms[r]`."""

    def __init__(
        self, forkserver: ForkServerClient, store: str, size: int, timeout: float, num_threads: int = 16
    ) -> None:
        """`num_threads`: as of `Ring`."""
        self._forkserver, self._store, self._timeout = forkserver, store, timeout
        self._threads = ThreadPoolExecutor(num_threads)
        self.arena = Arena()
        self.comms = [self.start() for _ in range(size)]
        self.prefix = ""
        self.errors: list[list[GangError]] = []
        self._aborts: list[threading.Thread] = []

    def start(self) -> CommProcess:
        comm = CommProcess(
            self._forkserver, self.arena, store=self._store, host="127.0.0.1", timeout=self._timeout, group=0
        )
        comm.wait_ready()
        return comm

    def each(self, function: Callable[[int], _T]) -> list[_T]:
        """`function` of every rank, at the same time."""
        return [future.result(DEADLINE_S) for future in self.begin_each(function)]

    def begin_each(self, function: Callable[[int], _T]) -> list[Any]:
        return [self._threads.submit(function, rank) for rank in range(len(self.comms))]

    def begin(self, function: Callable[[], _T]) -> Any:
        return self._threads.submit(function)

    def configure(self, names: Sequence[str] = ("all",), order: Sequence[int] | None = None) -> None:
        """Everyone in a group of each name; `order[i]` is the rank of `comms[i]`. An error aborts, as in a rank."""
        order = order or range(len(self.comms))
        prefix = self.prefix = f"test/{next(_prefixes)}"
        self.errors = [[] for _ in self.comms]

        def configure(index: int) -> None:
            specs = [GroupSpec(name, order[index], len(self.comms)) for name in names]
            self.comms[index].configure(prefix, specs, lambda error: self._on_error(index, error))

        self.each(configure)

    def _on_error(self, index: int, error: GangError) -> None:
        self.errors[index].append(error)
        self.comms[index].abort(error)

    def close(self) -> None:
        for comm in self.comms:
            comm.close()
        self._threads.shutdown()
        with contextlib.suppress(ChildProcessError):  # what else the fork server started here has become ours
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid == getattr(self._forkserver, "process").pid:  # noqa: B009
                    break
                os.waitid(os.P_PID, found.si_pid, os.WEXITED)


Worlds = Callable[..., World]


@pytest.fixture
def worlds(forkserver: ForkServer, store: str) -> Iterator[Worlds]:
    made: list[World] = []

    def make(
        size: int = 2, *, timeout: float = 30.0, names: Sequence[str] | None = ("all",), num_threads: int = 16
    ) -> World:
        made.append(World(forkserver, store, size, timeout, num_threads))
        if names is not None:
            made[-1].configure(names)
        return made[-1]

    yield make
    for world in made:
        world.close()


Rings = Callable[..., Ring]


@pytest.fixture
def rings(store: str) -> Iterator[Rings]:
    """Isolated groups, unless `make` makes others."""
    made: list[Ring] = []

    def make(size: int = 2, *, timeout: float = 30.0, make: Callable[[], Any] | None = None) -> Ring:
        made.append(Ring(make or (lambda: ProcessGroupIsolatedGloo(timeout)), size, store))
        return made[-1]

    yield make
    for ring in made:
        ring.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Ranks with a state, as the test makes them."""
    made: list[Rank] = []

    def make(*args: Any, **kwargs: Any) -> Rank:
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.server.close()


@pytest.fixture
def batches() -> eg.GlobalBatch:
    """Of the dataset of `loading.py`."""
    return eg.GlobalBatch(NUM_SAMPLES, size=SIZE, slot=SLOT, seed=3)


@pytest.fixture
def loaders() -> Iterator[list[eg.DataLoader]]:
    """They are closed after the test."""
    made: list[eg.DataLoader] = []
    yield made
    for loader in made:
        loader.close()


@pytest.fixture
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that both ranks of a small model write."""
    monkeypatch.setattr(plan, "MIN_SHARE_BYTES", 16)


@pytest.fixture
def saved(tmp_path: Path, small_shares: None) -> Path:
    """Steps 10 and 20, by both ranks."""
    for steps in (10, 20):
        other = saving.Rank(tmp_path, "b0").train(steps).begin()
        saving.Rank(tmp_path).save(steps)
        other.close()
    return tmp_path


@pytest.fixture
def no_writer_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "elasticgang")
    yield
    for writer in saving.writers():
        writer.kill()
        writer.wait()
