"""Meshes along the replica groups, which a sharded module must not have in an elastic job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import run_preloaded

JOB = """
import sys
import torch
from torch.distributed.fsdp import fully_shard
import elasticgang as eg

names, is_wrapped = sys.argv[1], sys.argv[2] == "wrapped"
manager = eg.join()

def build(seat):
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 4)
    fully_shard(module, **({"mesh": manager.gangs.device_mesh(*names.split(","))} if names else {}))
    model = eg.ShardedDataParallel(manager, module) if is_wrapped else module
    return {"model": model, "optim": eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))}

state = manager.build(build)
for step in manager.steps(1):
    with step:
        state.optim.step(weight=1.0)
"""
ADDED_TWICE = "ValueError: the mesh of weight must not lie along the replica groups, but does along "
DIVIDED = "ValueError: weight of 'model' must not be sharded over the replica groups, but is over the gang "


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script.write_text(JOB)
    launcher = ["-m", "elasticgang", "run", "--nproc-per-node", "2", "--layout", "sdp=2"]
    return run_preloaded([sys.executable, *launcher, str(script), *arguments], timeout=60)


# SHARDED-9
@pytest.mark.parametrize(("names", "gang"), [("", "root"), ("dp", "dp"), ("rdp,sdp", "rdp"), ("rdp", "rdp")])
def test_a_wrapped_module_on_a_mesh_along_the_replica_groups_is_refused(names: str, gang: str, tmp_path: Path) -> None:
    """Also where there is but one group so far."""
    done = run(tmp_path / "job.py", names, "wrapped")
    assert done.returncode == 1
    assert f"{ADDED_TWICE}`{gang}`" in done.stderr


# SEATSTATE-4
@pytest.mark.parametrize(("names", "gang"), [("", "root"), ("dp", "dp")])
def test_a_module_that_is_sharded_over_the_replica_groups_is_refused(names: str, gang: str, tmp_path: Path) -> None:
    done = run(tmp_path / "job.py", names, "bare")
    assert done.returncode == 1
    assert f"{DIVIDED}`{gang}`" in done.stderr


@pytest.mark.parametrize(("names", "form"), [("sdp", "wrapped"), ("sdp", "bare"), ("rdp,sdp", "bare")])
def test_other_meshes_pass(names: str, form: str, tmp_path: Path) -> None:
    """A script may reduce gradients over the replica groups by itself, in a module that is replicated along them."""
    done = run(tmp_path / "job.py", names, form)
    assert done.returncode == 0, done.stderr
