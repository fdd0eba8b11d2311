"""Comm processes that had time to warm up before their first groups (WORKER-7)."""

from __future__ import annotations

import psutil
import torch

from elasticgang.comm.comm_process import CommProcess
from tests.integration.comm_calls import all_reduce
from tests.integration.conftest import Worlds
from tests.support import wait_until

NUM_PREPARED = 2


def num_listening(comm: CommProcess) -> int:
    connections = psutil.Process(comm.pid).net_connections("tcp")
    return sum(connection.status == psutil.CONN_LISTEN for connection in connections)


def test_an_idle_process_listens_before_it_is_configured_and_its_groups_do_their_work(worlds: Worlds) -> None:
    world = worlds(2, names=None)
    for comm in world.comms:
        assert wait_until(lambda comm=comm: num_listening(comm) == NUM_PREPARED, "warmed up")  # type: ignore[misc]
    world.configure(("all", "other"))
    assert [num_listening(comm) for comm in world.comms] == [NUM_PREPARED] * 2  # its groups took these sockets
    for group in ("all", "other"):
        tensors = [torch.full((5,), 1.0), torch.full((5,), 2.0)]
        all_reduce(world, tensors, group=group)
        assert [tensor.tolist() for tensor in tensors] == [[3.0] * 5] * 2
    world.configure(("all", "other", "third"))
    tensors = [torch.full((5,), 1.0), torch.full((5,), 2.0)]
    all_reduce(world, tensors, group="third")
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 5] * 2
