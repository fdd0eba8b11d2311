"""Jobs with scaled gradients under kills: all ranks agree which steps overflow, and keep one scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticgang import GlobalBatch
from elasticgang.train.loss_scale import next_state
from tests.chaos.job import BATCH_SIZE, INIT_SCALE, NUM_SAMPLES, SEED, SLOT, overflows
from tests.chaos.scaled_pairs_job import LR, WIDTH
from tests.chaos.test_kills import NUM_STEPS, at, check, histories, run, run_alone
from tests.exhaustive import exhaustive
from tests.support import Job

RULE = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
PAIRS = Path(__file__).with_name("scaled_pairs_job.py")
DIES_IN_STEPS_THAT_OVERFLOW = [
    at("body", 1, step=2),
    at("totals_received", 0, step=7),
    at("votes_received", 2, step=12),
    at("applied", 1, step=18),  # the next one: that which overflows is committed by then
    at("body", 0, step=23),  # its successor has the scale of a step that was not applied
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "reduction",
    [pytest.param(("sum",), marks=exhaustive), ("reproducible", "--real")],
    ids=lambda options: options[0],
)
def test_a_kill_leaves_no_trace_in_the_result(reduction: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--scaled", "--reduction", *reduction)
    directory = tmp_path / "alone"
    directory.mkdir()
    alone = run_alone(directory, *options)
    job = run(tmp_path, DIES_IN_STEPS_THAT_OVERFLOW, script_options=options)
    check(job, DIES_IN_STEPS_THAT_OVERFLOW, alone)
    scaler = scaler_after(NUM_STEPS)
    finished = [line for history in histories(tmp_path) for line in history if line["kind"] == "finished"]
    assert [line["scaler"] for line in finished] == [scaler] * len(finished)


# OPTIMIZER-1
@pytest.mark.timeout(300)
@pytest.mark.parametrize("max_norm", [pytest.param(None, marks=exhaustive), 1.0])
def test_a_part_of_the_model_is_not_applied_where_another_part_overflows(
    max_norm: float | None, tmp_path: Path
) -> None:
    places = [("body", 1, 7), ("totals_received", 2, 12), ("votes_received", 0, 17)]
    faults = [{**at(place, rank), "from": step} for place, rank, step in places]  # once the one before is healed
    options = [] if max_norm is None else ["--max-norm", str(max_norm)]
    arguments = ["--steps", str(NUM_STEPS), "--output-dir", str(tmp_path), "--faults", json.dumps(faults), *options]
    with Job(tmp_path, PAIRS, *arguments, ranks=4) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
    assert len(list(tmp_path.glob("fired-*"))) == len(faults)
    expected = pair_after(NUM_STEPS, max_norm)
    finished = [line for history in histories(tmp_path) for line in history if line["kind"] == "finished"]
    assert {line["part"] for line in finished} == {0, 1}
    for line in finished:
        assert line["scaler"] == scaler_after(NUM_STEPS)
        assert line["weight"] == pytest.approx(expected[line["part"]].tolist(), rel=1e-6)


def scaler_after(num_steps: int) -> dict[str, Any]:
    state = {"scale": INIT_SCALE, **RULE, "_growth_tracker": 0}
    for index in range(num_steps):
        state = next_state(state, overflows=overflows(index))
    return state


def pair_after(num_steps: int, max_norm: float | None) -> torch.Tensor:
    """The weights of both parts, computed by plain arithmetic."""
    batches = GlobalBatch(NUM_SAMPLES, size=BATCH_SIZE, slot=SLOT, seed=SEED)
    weights = torch.zeros(2, WIDTH, dtype=torch.float64)
    for index in range(num_steps):
        if not overflows(index):
            mean = (batches.samples(index)[:, None] + torch.arange(WIDTH)).to(torch.float64).mean(0)
            gradient = torch.stack([mean, 2 * mean])
            if max_norm is not None:
                gradient *= max_norm / (torch.linalg.vector_norm(gradient) + 1e-6)
            weights -= LR * gradient
    return weights
