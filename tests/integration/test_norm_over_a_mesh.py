"""`Optimizer.step(max_norm=)` over a DTensor whose parts lie on several ranks, in a layout that divides no model."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import elasticgang as eg
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.state.dtensor import local_gradient
from elasticgang.state.snapshot_server import SnapshotServer
from tests.support import run_preloaded

SIZE = 2
DEADLINE_S = 120
MAX_NORM = 0.5
PLAIN = 3.0


# SHARDED-3
def test_every_rank_clips_by_the_norm_of_all_parts() -> None:
    command = [sys.executable, "-m", "tests.integration.forked_ranks", "--train", str(SIZE)]
    done = run_preloaded([*command, "-m", "tests.integration.test_norm_over_a_mesh"], timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("clipped alike") == SIZE


def clip_as_rank() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("parts",))
    own = torch.full((2, 2), 1.0 + dist.get_rank())
    divided = nn.Parameter(DTensor.from_local(own.clone(), mesh, [Shard(0)]))
    divided.grad = divided.detach().clone()
    plain = nn.Parameter(torch.full((2, 2), PLAIN))
    plain.grad = plain.detach().clone()
    layout, cpu = eg.ParallelLayout(), torch.device("cpu")
    manager = QuorumManager(LocalRendezvous(layout, cpu), SnapshotServer(), layout, cpu)
    optim = eg.Optimizer(manager, torch.optim.SGD([divided, plain], lr=1.0))
    manager.register_state(parameters=nn.ParameterList([divided, plain]), optim=optim)
    for step in manager.steps(1):
        with step:
            assert optim.step(weight=1.0, max_norm=MAX_NORM)
    norm = math.sqrt(4 * (sum((1.0 + rank) ** 2 for rank in range(SIZE)) + PLAIN**2))
    applied = divided.to_local().detach()  # type: ignore[attr-defined]
    assert float((own / (own - applied)).mean()) * MAX_NORM == pytest.approx(norm, rel=1e-5)
    assert float((PLAIN / (PLAIN - plain.detach())).mean()) * MAX_NORM == pytest.approx(norm, rel=1e-5)
    take_partial_sums(mesh)
    print("clipped alike")


def take_partial_sums(mesh: DeviceMesh) -> None:
    """A gradient is laid out as its parameter is, whatever its own placements (SHARDED-3)."""
    for placement in (Replicate(), Shard(0)):
        parameter = nn.Parameter(
            DTensor.from_local(torch.zeros(4, 2), mesh, [Replicate()]).redistribute(mesh, [placement])
        )
        parameter.grad = DTensor.from_local(torch.full((4, 2), 1.0 + dist.get_rank()), mesh, [Partial()])
        part = local_gradient(parameter)
        assert part is not None
        assert part.shape == parameter.to_local().shape  # type: ignore[attr-defined]
        assert (part == sum(1.0 + rank for rank in range(SIZE))).all()


if __name__ == "__main__":
    clip_as_rank()
