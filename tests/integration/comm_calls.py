"""Collectives of a `World` of comm processes, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import Future

import torch
from torch import Tensor

from elasticgang.collectives.collective import Collective, ReduceOperation
from elasticgang.comm.arena import Arena
from elasticgang.comm.comm_process import CommProcess
from elasticgang.comm.work import CommWork
from elasticgang.process.death_watch import of_all_threads
from elasticgang.process.forkserver import ForkServerClient
from tests.integration.conftest import World
from tests.support import wait_until

GUARD_S = 20.0
AT_ONCE_S = 10.0  # no timeout of these groups, which are 60 s; a machine may stand still for seconds


def started_comm(forkserver: ForkServerClient, store: str, timeout: float) -> Future[CommProcess]:
    """A process that is ready, as a `GroupSet` launches one."""
    started: Future[CommProcess] = Future()
    comm = CommProcess(forkserver, Arena(), store=store, host="127.0.0.1", timeout=timeout, group=0)
    comm.wait_ready()
    started.set_result(comm)
    return started


def all_reduce(world: World, tensors: list[Tensor], op: str = "SUM", group: str = "all") -> None:
    def reduce(rank: int) -> None:
        tensor = (tensors[rank],)
        world.comms[rank].submit(group, Collective("all_reduce", tensor, tensor, ReduceOperation[op])).wait(GUARD_S)

    world.each(reduce)


def broadcast(world: World, tensors: list[Tensor], root: int) -> None:
    def send(rank: int) -> None:
        tensor = (tensors[rank],)
        world.comms[rank].submit("all", Collective("broadcast", tensor, tensor, peer=root)).wait(GUARD_S)

    world.each(send)


def all_gather(world: World, tensors: list[Tensor]) -> list[list[Tensor]]:
    def gather(rank: int) -> list[Tensor]:
        outputs = [torch.empty_like(tensors[rank]) for _ in tensors]
        start_gather(world.comms[rank], outputs, tensors[rank]).wait(GUARD_S)
        return outputs

    return world.each(gather)


def start_sum(comm: CommProcess, tensor: Tensor, group: str = "all") -> CommWork:
    return comm.submit(group, Collective("all_reduce", (tensor,), (tensor,)))


def start_gather(comm: CommProcess, outputs: list[Tensor], tensor: Tensor) -> CommWork:
    return comm.submit("all", Collective("all_gather", tuple(outputs), (tensor,)))


def kill(comm: CommProcess) -> None:
    os.kill(comm.pid, signal.SIGKILL)


def settle(pid: int) -> None:
    """Wait until no thread is being started: such a thread blocks all signals (STOP-2)."""

    def is_settled() -> bool:
        with contextlib.suppress(OSError):
            return of_all_threads(pid, lambda _, fields: fields[29] == b"0")
        return False

    wait_until(is_settled, "its threads are started", GUARD_S)
