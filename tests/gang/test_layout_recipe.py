"""The README's job for a layout in which ranks hold parts of the model: parameters on two meshes, and their norm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gang.layout_recipe import OPTIMIZERS, STEPS
from tests.support import REPOSITORY

RECIPE = "tests/gang/layout_recipe.py"
LAUNCHER = ["-m", "elasticgang", "run", "--nproc-per-node", "4"]
DEADLINE_S = 180


def run(output: Path, optimizer: str, launcher: list[str], *layout: str) -> list[dict[str, Any]]:
    command = [sys.executable, *launcher, RECIPE, "--output", str(output), "--optimizer", optimizer, *layout]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_a_model_on_two_meshes_is_clipped_and_applied_as_one_rank_does(optimizer: str, tmp_path: Path) -> None:
    (alone,) = run(tmp_path / "alone", optimizer, [])
    ranks = run(tmp_path / "ranks", optimizer, LAUNCHER, "--sdp", "2", "--tp", "2")
    assert len(ranks) == 4
    assert len(alone["losses"]) == STEPS
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        assert rank["parameters"].keys() == alone["parameters"].keys()
        for name, values in alone["parameters"].items():
            assert rank["parameters"][name] == pytest.approx(values, rel=1e-9, abs=1e-9), name
