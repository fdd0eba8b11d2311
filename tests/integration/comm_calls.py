"""Collectives of a `World` of comm processes, for tests."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor

from elasticgang.comm.comm_process import CommProcess
from elasticgang.comm.work import CommWork
from tests.integration.conftest import World

GUARD_S = 20.0
AT_ONCE_S = 1.0


def all_reduce(world: World, tensors: list[Tensor], op: str = "sum", group: str = "all") -> None:
    def reduce(rank: int) -> None:
        world.comms[rank].submit(group, "allreduce", [tensors[rank]], [tensors[rank]], op=op).wait(GUARD_S)

    world.each(reduce)


def broadcast(world: World, tensors: list[Tensor], root: int) -> None:
    def send(rank: int) -> None:
        world.comms[rank].submit("all", "broadcast", [tensors[rank]], [tensors[rank]], root=root).wait(GUARD_S)

    world.each(send)


def all_gather(world: World, tensors: list[Tensor]) -> list[list[Tensor]]:
    def gather(rank: int) -> list[Tensor]:
        outputs = [torch.empty_like(tensors[rank]) for _ in tensors]
        world.comms[rank].submit("all", "allgather", outputs, [tensors[rank]]).wait(GUARD_S)
        return outputs

    return world.each(gather)


def start_sum(comm: CommProcess, tensor: Tensor, group: str = "all") -> CommWork:
    return comm.submit(group, "allreduce", [tensor], [tensor], op="sum")


def kill(comm: CommProcess) -> None:
    os.kill(comm.pid, signal.SIGKILL)
