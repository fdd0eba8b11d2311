"""The job of docs/layouts.md, whose ranks hold parts of the model: parameters on two meshes, and their norm."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exhaustive import always_without
from tests.integration.layout_recipe import OPTIMIZERS, STEPS
from tests.support import run_preloaded

RECIPE = "tests/integration/layout_recipe.py"
LAUNCHER = ["-m", "elasticgang", "run", "--nproc-per-node", "4"]
DEADLINE_S = 180


def run(output: Path, optimizer: str, launcher: list[str], *layout: str) -> list[dict[str, Any]]:
    command = [sys.executable, *launcher, RECIPE, "--output", str(output), "--optimizer", optimizer, *layout]
    done = run_preloaded(command, timeout=DEADLINE_S, ends_at_once=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in output.read_text().splitlines()]


def check(rank: dict[str, Any], alone: dict[str, Any]) -> None:
    assert rank["losses"] == pytest.approx({step: alone["losses"][step] for step in rank["losses"]}, rel=1e-9)
    assert rank["parameters"].keys() == rank["losses"].keys()
    for step, parameters in rank["parameters"].items():
        if parameters:  # the rank did not heal in this step
            assert parameters.keys() == alone["parameters"][step].keys()
            for name, values in alone["parameters"][step].items():
                assert parameters[name] == pytest.approx(values, rel=1e-9, abs=1e-9), (step, name)


@pytest.mark.parametrize("optimizer", always_without(OPTIMIZERS, {"sgd"}))
def test_a_model_on_two_meshes_is_clipped_and_applied_as_one_rank_does(optimizer: str, tmp_path: Path) -> None:
    (alone,) = run(tmp_path / "alone", optimizer, [])
    ranks = run(tmp_path / "ranks", optimizer, LAUNCHER, "--sdp", "2", "--tp", "2")
    assert [len(each["losses"]) for each in (alone, *ranks)] == [STEPS] * 5
    for rank in ranks:
        check(rank, alone)
        assert all(rank["parameters"].values())


def test_a_kill_does_not_show_in_what_is_clipped_on_two_meshes(tmp_path: Path) -> None:
    """Two replica groups of two. One takes the step; in the other, the survivor and the peer's successor heal."""
    (alone,) = run(tmp_path / "alone", "sgd", [])
    ranks = run(tmp_path / "ranks", "sgd", LAUNCHER, "--tp", "2", "--kill", "2")
    assert (tmp_path / "ranks.killed").exists()
    assert sum(len(rank["losses"]) == STEPS for rank in ranks) in (2, 3)
    for rank in ranks:
        check(rank, alone)
