"""DTensors of a new seat, after code has used those of the former one in the same generation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import elasticgang as eg
from elasticgang.layout import ModelCoordinates
from elasticgang.member.driver import MemberDriver
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.seat_state import SeatState
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.member_lifecycle import Routine
from elasticgang.state.snapshot_server import SnapshotServer

pytestmark = pytest.mark.usefixtures("no_default_group")

CPU = torch.device("cpu")


def build(seat: ModelCoordinates) -> dict[str, nn.Module]:
    """A parameter that a pair of ranks hold alike; this rank is the one of its coordinate."""
    gangs = eg.create_parallel_gangs(eg.FakeGang(CPU, rank=seat.tp, size=2), tp_size=2)
    module = nn.Module()
    whole = DTensor.from_local(torch.ones(4), gangs.device_mesh("tp"), [Replicate()], run_check=False)
    module.weight = nn.Parameter(whole)
    return {"module": module}


# REGISTRY-4
def test_results_of_operations_are_on_the_mesh_of_the_new_seat() -> None:
    """Both meshes have the same ranks and names, so that torch takes one for the other."""
    server = SnapshotServer()
    driver = MemberDriver(LocalRendezvous(eg.ParallelLayout(), CPU), server, CPU)
    state = driver.seat_state = SeatState(build)

    def move() -> Routine[None]:
        yield do.BuildSeat((0, 0, 1), 0)
        used = state.module.weight.detach().clone()  # as code after the vote does, or the copy of a buffer
        assert used.device_mesh.get_coordinate() == (1,)
        yield do.BuildSeat((0, 0, 0), 0)

    driver.run(move())
    used = state.module.weight.detach().clone()
    assert used.device_mesh.get_coordinate() == (0,)
