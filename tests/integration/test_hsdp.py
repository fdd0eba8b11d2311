"""The HSDP recipe of PyTorch's DeviceMesh tutorial, under torchrun and under `elasticgang run`."""

from __future__ import annotations

import json
import sys

import pytest

from tests.exhaustive import always_without
from tests.support import run_preloaded

RECIPE = "tests/integration/hsdp_recipe.py"
MESH = "tests/integration/mesh_ranks.py"
LAUNCHERS = {
    "none": [sys.executable],
    "torchrun": [sys.executable, "-m", "tests.integration.forked_ranks", "--train", "4"],
    "elasticgang": [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", "4"],
}
DEADLINE_S = 120


def run(launcher: str, script: str, *arguments: str) -> str:
    command = [*LAUNCHERS[launcher], script, "--launcher", launcher, *arguments]
    done = run_preloaded(command, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


FORMS = {"torchrun": ("by-hand", "fsdp1", "fsdp2", "from-gangs"), "elasticgang": ("by-hand", "fsdp1", "fsdp2")}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, list[float]]]]:
    """By launcher, of each rank."""
    found = {}
    for launcher in LAUNCHERS:
        output = tmp_path_factory.mktemp(launcher) / "losses"
        forms = ["--form", *FORMS[launcher]] if launcher in FORMS else []
        printed = run(launcher, RECIPE, "--output", str(output), *forms)
        assert "Warning" not in printed
        found[launcher] = [json.loads(line) for line in output.read_text().splitlines()]
    return found


@pytest.mark.parametrize(
    ("launcher", "form"), [(launcher, form) for launcher, forms in FORMS.items() for form in forms]
)
def test_the_losses_are_those_of_the_unsharded_model(
    launcher: str, form: str, losses: dict[str, list[dict[str, list[float]]]]
) -> None:
    (alone,) = losses["none"]
    assert len(losses[launcher]) == 4
    for rank in losses[launcher]:
        assert rank[form] == pytest.approx(alone["alone"], rel=1e-6)  # sums of float32 in another order


@pytest.mark.parametrize("launcher", always_without(LAUNCHERS, {"torchrun"}))
def test_a_mesh_of_gangs_is_what_torch_takes(launcher: str) -> None:
    """DDP, DTensor, tensor parallelism and functional collectives, with the gangs' own groups and true sizes."""
    assert run(launcher, MESH).count("mesh kept") == (1 if launcher == "none" else 4)
