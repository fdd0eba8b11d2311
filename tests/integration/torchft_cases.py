"""torchft's own test cases, from its installed test module, with our classes in the places of torchft's.

A case runs as torchft wrote it; only the names that it looks up in its module are other ones meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
import torchft.process_group
import torchft.process_group_test as theirs

from elasticgang.comm.comm_process import CommProcess
from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
from tests.support import is_alive


@contextlib.contextmanager
def in_place_of(**classes: type) -> Iterator[None]:
    """Run torchft's cases with other classes under the names that they use."""
    with contextlib.ExitStack() as patches:
        for name, cls in classes.items():
            patches.enter_context(mock.patch.object(theirs, name, cls))
        yield


def run(case: str, **classes: type) -> None:
    """Run one case of torchft's `ProcessGroupTest`, and raise as it does."""
    with in_place_of(**classes):
        try:
            theirs.ProcessGroupTest(case).debug()
        finally:
            if dist.is_initialized():  # some cases leave a default group behind
                dist.destroy_process_group()


@contextlib.contextmanager
def time_to_connect() -> Iterator[None]:
    """Let a client connect to its store for as long as that takes, whatever time the group has for all that follows.
    `test_gloo_timeout` gives 10 ms to both, and wants the error of a rank that never comes: a late client gets another.
    """
    connect = torchft.process_group.create_store_client

    def create_store_client(store_addr: str, timeout: timedelta) -> Any:
        store = connect(store_addr, timedelta(seconds=60))
        store.set_timeout(timeout)
        return store

    with mock.patch.object(torchft.process_group, "create_store_client", create_store_client):
        yield


class WithInternals(ProcessGroupIsolatedGloo):
    """Shows the parts of a configuration under the names that torchft's have: `test_reconfigure_baby_process_group`
    wants all of them to be other ones after each `configure`, and the former ones to be gone."""

    def __init__(self, timeout: float | timedelta = 60.0) -> None:
        super().__init__(timeout, reuse=False)

    @property
    def _running(self) -> CommProcess:
        assert self.comm_process is not None
        return self.comm_process

    @property
    def _p(self) -> _Process:
        return _Process(self._running.pid)

    @property
    def _future_thread(self) -> threading.Thread:
        name = f"comm-{self._running.pid}"
        (thread,) = (thread for thread in threading.enumerate() if thread.name == name)
        return thread

    @property
    def _future_pipe(self) -> _Pipe:
        return _Pipe(self._running)


class _Process:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def is_alive(self) -> bool:
        return is_alive(self.pid)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Process) and other.pid == self.pid

    __hash__ = None  # type: ignore[assignment]


class _Pipe:
    def __init__(self, comm: CommProcess) -> None:
        self.comm = comm

    def closed(self) -> bool:
        return self.comm.fileno() < 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pipe) and other.comm is self.comm

    __hash__ = None  # type: ignore[assignment]


class MultiCases(theirs.BabyGlooMultiPgTest):  # type: ignore[misc]  # torchft ships no types
    """`BabyGlooMultiPgTest`: every collective of three ranks, and again after one of them has gone."""

    @classmethod
    def setUpClass(cls) -> None:
        with in_place_of(ProcessGroupBabyGloo=ProcessGroupIsolatedGloo):
            super().setUpClass()


class SkippedCases(theirs.MultiPgBaseTest):  # type: ignore[misc]  # torchft ships no types
    """The same with the collectives that torchft skips, because its Gloo refuses them."""

    BACKEND = "baby_gloo"
    WORLD_SIZE = 3

    @classmethod
    def setUpClass(cls) -> None:
        with in_place_of(ProcessGroupBabyGloo=ProcessGroupIsolatedGloo):
            super().setUpClass()

    @theirs.parameterized.expand(theirs.BabyGlooMultiPgTest.SKIP)  # type: ignore[untyped-decorator]
    def test_collective(self, collective: str) -> None:
        self._run_parallel(collective)

    # On the CPU torchft's case for reduce_scatter does nothing, where an error is expected.
    @theirs.parameterized.expand(["alltoall_base", "reduce_scatter_tensor_coalesced"])  # type: ignore[untyped-decorator]
    def test_collective_with_resiliency(self, collective: str) -> None:
        self._run_with_resiliency(collective)
