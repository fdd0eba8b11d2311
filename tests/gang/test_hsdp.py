"""The HSDP recipe of PyTorch's DeviceMesh tutorial, under torchrun and under `elasticgang run`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY

RECIPE = "tests/gang/hsdp_recipe.py"
MESH = "tests/gang/mesh_ranks.py"
LAUNCHERS = {
    "none": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"],
    "elasticgang": [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", "4"],
}
DEADLINE_S = 120


def run(launcher: str, script: str, *arguments: str) -> str:
    command = [*LAUNCHERS[launcher], script, "--launcher", launcher, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    output = tmp_path_factory.mktemp("alone") / "losses"
    run("none", RECIPE, "--output", str(output))
    losses: list[float] = json.loads(output.read_text())
    return losses


@pytest.mark.parametrize(
    ("launcher", "form"),
    [
        ("torchrun", "by-hand"),
        ("torchrun", "fsdp1"),
        ("torchrun", "fsdp2"),
        ("torchrun", "from-gangs"),
        ("elasticgang", "by-hand"),
        ("elasticgang", "fsdp1"),
        ("elasticgang", "fsdp2"),
    ],
)
def test_the_losses_are_those_of_the_unsharded_model(
    launcher: str, form: str, unsharded: list[float], tmp_path: Path
) -> None:
    printed = run(launcher, RECIPE, "--form", form, "--output", str(tmp_path / "losses"))
    ranks = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    assert len(ranks) == 4
    for losses in ranks:
        assert losses == pytest.approx(unsharded, rel=1e-6)  # sums of float32 in another order
    assert "Warning" not in printed


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_a_mesh_of_gangs_is_what_torch_takes(launcher: str) -> None:
    """DDP, DTensor, tensor parallelism and functional collectives, with the gangs' own groups and true sizes."""
    assert run(launcher, MESH).count("mesh kept") == (1 if launcher == "none" else 4)
