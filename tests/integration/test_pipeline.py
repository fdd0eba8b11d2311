"""`PipelineParallel`: the schedules of torch.distributed.pipelining over the gang `pp`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pipeline_recipe import BATCH_SIZE, STEPS
from tests.support import run_preloaded

RECIPE = "tests/integration/pipeline_recipe.py"
DEADLINE_S = 180


def run(output: Path, ranks: int, slot: int, dropout: float = 0.0, *more: str) -> list[dict[str, Any]]:
    """What each rank wrote. One rank has both stages, and no pipeline."""
    launcher = ["-m", "elasticgang", "run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    pp = ["--pp", "2"] if ranks > 1 else []
    given = ["--output", str(output), "--slot", str(slot), "--dropout", str(dropout)]
    command = [sys.executable, *launcher, RECIPE, *pp, *given, *more]
    done = run_preloaded(command, timeout=DEADLINE_S, ends_at_once=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in output.read_text().splitlines()]


def flat(value: Any) -> list[float]:
    return [each for part in value for each in flat(part)] if isinstance(value, list) else [value]


def check(ranks: list[dict[str, Any]], losses: dict[str, float], parameters: list[list[float]]) -> None:
    """`losses` and `parameters`: those of the whole model."""
    found = {rank["stage"]: rank["parameters"] for rank in ranks}
    assert flat([found[stage] for stage in sorted(found)]) == pytest.approx(flat(parameters), rel=1e-9, abs=1e-12)
    for rank in ranks:
        assert rank["parameters"] == found[rank["stage"]]
        assert len(losses) == STEPS
        assert rank["losses"] == pytest.approx({step: losses[step] for step in rank["losses"]}, rel=1e-9)


# PIPELINE-2
@pytest.mark.parametrize("slot", [1, BATCH_SIZE])
def test_a_pipeline_trains_as_one_rank_does(slot: int, tmp_path: Path) -> None:
    """With more slots than stages, and with fewer."""
    (alone,) = run(tmp_path / "alone", 1, slot)
    ranks = run(tmp_path / "ranks", 2, slot)
    assert len(ranks) == 2
    check(ranks, alone["losses"], alone["parameters"])


# PIPELINE-4
def test_messages_between_two_computations_start_together(tmp_path: Path) -> None:
    """For each slot of a step, each stage sends and receives two messages. Torch exchanges some before the first, as
    many for any number of slots."""

    def num_started(slot: int) -> dict[int, int]:
        return {rank["stage"]: rank["num_started"] for rank in run(tmp_path / str(slot), 2, slot)}

    num_of_two, num_of_four = num_started(BATCH_SIZE // 2), num_started(BATCH_SIZE // 4)
    assert sorted(num_of_two) == sorted(num_of_four) == [0, 1]
    assert all(0 < num_of_four[stage] - num_of_two[stage] < 4 for stage in (0, 1)), (num_of_two, num_of_four)


# PIPELINE-1
def test_random_numbers_of_a_slot_do_not_depend_on_the_number_of_pipelines(tmp_path: Path) -> None:
    """The second replica group heals in the first step, and has half of the slots from the second one on."""
    one = run(tmp_path / "one", 2, 1, dropout=0.5)
    two = run(tmp_path / "two", 4, 1, dropout=0.5)
    assert len(two) == 4
    whole = {rank["stage"]: rank["parameters"] for rank in one}
    check(two, one[0]["losses"], whole[0] + whole[1])
    (undropped,) = run(tmp_path / "undropped", 1, 1)
    assert undropped["losses"] != one[0]["losses"]


@pytest.mark.parametrize("loader", ["dataset", "stream"])
def test_workers_load_for_all_stages_also_when_a_rank_is_killed(loader: str, tmp_path: Path) -> None:
    """Two replica groups of two stages. The survivor of the killed rank's group heals with its successor."""
    (alone,) = run(tmp_path / "alone", 1, 1, 0.0, "--loader", loader)
    ranks = run(tmp_path / "ranks", 4, 1, 0.0, "--loader", loader, "--kill", "2")
    assert (tmp_path / "ranks.killed").exists()
    check(ranks, alone["losses"], alone["parameters"])


# PIPELINE-5
@pytest.mark.parametrize("more", [["--kill", "2"], ["--kill", "2", "--keep"]])
def test_a_tied_parameter_gets_the_gradients_of_all_its_stages(more: list[str], tmp_path: Path) -> None:
    """Two replica groups of two stages, which have one weight. One of the ranks is killed."""
    (alone,) = run(tmp_path / "alone", 1, 1, 0.0, "--tied")
    ranks = run(tmp_path / "ranks", 4, 1, 0.0, "--tied", *more)
    assert (tmp_path / "ranks.killed").exists()
    check(ranks, alone["losses"], alone["parameters"])
    assert len({tuple(rank["parameters"][0]) for rank in ranks}) == 1, "the weights differ"


# PIPELINE-5
def test_a_parameter_that_some_stages_have_counts_once_in_the_norm(tmp_path: Path) -> None:
    """Two of three have it."""
    (alone,) = run(tmp_path / "alone", 1, 1, 0.0, "--tied", "--num-stages", "3")
    ranks = run(tmp_path / "ranks", 3, 1, 0.0, "--tied", "--num-stages", "3", "--pp", "3")
    assert {rank["stage"] for rank in ranks} == {0, 1, 2}
    check(ranks, alone["losses"], alone["parameters"])


# PIPELINE-6
@pytest.mark.parametrize(
    ("otherwise", "message"),
    [
        ("names", r"must name all stages that have a parameter, but names \[[01]\] for `0.weight` instead"),
        ("none", r"stages 0 and 1 .* must have the same parameters in `tied`, but have others"),
        ("twice", r"must name a parameter once, but `same` is one that it has named before"),
        ("values", r"stages 0 and 1 .* must have the same parameters in `tied`, but have other values of these"),
    ],
)
def test_stages_that_tie_otherwise_are_refused_in_the_first_step(otherwise: str, message: str, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", "2", RECIPE, "--pp", "2", "--slot", "1"]
    given = ["--output", str(tmp_path / "ranks"), "--tied", "--tied-otherwise", otherwise]
    done = run_preloaded([*launcher, *given], timeout=DEADLINE_S, ends_at_once=True)
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr
