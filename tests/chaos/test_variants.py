"""Kills leave no trace in what models and optimizers have beside plain parameters: tied weights, frozen layers, several
parameter groups, an average of the weights, a scale of the losses, and each kind of optimizer; on whole models, and on
uneven shards."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.chaos.test_kills import at, histories
from tests.chaos.variants_job import OPTIMIZERS
from tests.exhaustive import exhaustive
from tests.support import REPOSITORY, Job, run_preloaded

JOB = REPOSITORY / "tests" / "chaos" / "variants_job.py"
NUM_STEPS = 12
TOLERANCE = 1e-9  # of sums of doubles in another order, over 12 steps
FAULTS = [at("body", 1), at("totals_received", 2), at("votes_received", 0), at("applied", 1)]
WHOLE = [name for name in OPTIMIZERS if name != "sgd"]  # `test_kills.py` has momentum
SHARDED = [name for name in OPTIMIZERS if "adafactor" not in name]  # torch's Adafactor does not take DTensors
# Of those: other cases, and checkpoints, have these optimizers.
EXHAUSTIVELY = ["sgd", "adamw", "adamw, fused"]

Lines = list[list[dict[str, Any]]]
Values = dict[str, list[float]]


@cache
def alone(optimizer: str) -> tuple[dict[int, float], Values]:
    """The losses and the final state of one undisturbed process."""
    with TemporaryDirectory() as name:
        command = [sys.executable, str(JOB), *options(Path(name), optimizer)]
        done = run_preloaded(command, ends_at_once=True)
        assert done.returncode == 0, done.stderr
        found = histories(Path(name))
        return losses(found), whole(found, 1)


def options(directory: Path, optimizer: str, num_steps: int = NUM_STEPS) -> list[str]:
    return ["--steps", str(num_steps), "--optimizer", optimizer, "--output-dir", str(directory)]


def losses(found: Lines) -> dict[int, float]:
    lines = [line for history in found for line in history]
    generation_of = {line["step"]: line["generation"] for line in lines if line["kind"] == "committed"}
    summed: defaultdict[int, float] = defaultdict(float)
    for line in lines:
        if line["kind"] == "prepared" and generation_of.get(line["step"]) == line["generation"]:
            summed[line["step"]] += line["loss"]
    return dict(summed)


def whole(found: Lines, num_parts: int) -> Values:
    """The final state, which is equal bit for bit on all ranks that hold the same part of it."""
    parts: dict[int, Values] = {}
    for line in (line for history in found for line in history if line["kind"] == "finished"):
        assert parts.setdefault(line["part"], line["state"]) == line["state"]
    assert sorted(parts) == list(range(num_parts))
    # A scalar, such as a number of steps, is the same on all parts.
    return {
        name: values if name.startswith("step.") else [each for part in range(num_parts) for each in parts[part][name]]
        for name, values in parts[0].items()
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sdp", "optimizer"),
    [
        *((0, name) for name in WHOLE if name != "adafactor, foreach"),
        pytest.param(0, "adafactor, foreach", marks=exhaustive),
        *((2, name) for name in SHARDED if name not in EXHAUSTIVELY),
        *(pytest.param(2, name, marks=exhaustive) for name in EXHAUSTIVELY),
    ],
    ids=str,
)
def test_kills_leave_no_trace_in_any_kind_of_state(sdp: int, optimizer: str, tmp_path: Path) -> None:
    script = [*options(tmp_path, optimizer), "--sdp", str(sdp), "--faults", json.dumps(FAULTS)]
    with Job(tmp_path, JOB, *script, ranks=4 if sdp else 3) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
    assert len(list(tmp_path.glob("fired-*"))) == len(FAULTS)
    found, (wanted_losses, wanted) = histories(tmp_path), alone(optimizer)
    found_losses = losses(found)
    assert sorted(found_losses) == list(range(NUM_STEPS))
    for step, loss in found_losses.items():
        assert math.isclose(loss, wanted_losses[step], rel_tol=TOLERANCE), f"step {step}"
    state = whole(found, max(sdp, 1))
    assert state.keys() == wanted.keys()
    for name, values in wanted.items():
        assert state[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name
    model = {name.removeprefix("model."): values for name, values in wanted.items() if name.startswith("model.")}
    assert all(wanted[f"ema.{name}"] != values for name, values in model.items() if "frozen" not in name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("optimizer", "first", "second"),
    [
        ("adamw, fused", 2, 4),
        ("sgd, scaled", 4, 0),
        pytest.param("adamw, foreach", 0, 2, marks=exhaustive),
        pytest.param("adafactor", 0, 0, marks=exhaustive),
    ],
)
def test_a_checkpoint_has_any_kind_of_state_for_any_division(
    optimizer: str, first: int, second: int, tmp_path: Path
) -> None:
    """Four ranks hold shards of 3, 3, 3 and no rows. The first job ends in the middle."""
    checkpoints = ["--checkpoints", str(tmp_path / "checkpoints")]
    for name, sdp, steps in (("first", first, NUM_STEPS // 2), ("second", second, NUM_STEPS)):
        directory = tmp_path / name
        directory.mkdir()
        script = [*options(directory, optimizer, steps), "--sdp", str(sdp), *checkpoints]
        with Job(directory, JOB, *script, ranks=max(2, sdp) + (name == "second" and not sdp)) as job:
            assert job.wait() == 0, job.stderr
    assert f"continues at the checkpoint of step {NUM_STEPS // 2}" in job.stderr
    found, (wanted_losses, wanted) = histories(directory), alone(optimizer)
    found_losses = losses(found)
    assert sorted(found_losses) == list(range(NUM_STEPS // 2, NUM_STEPS))
    for step, loss in found_losses.items():
        assert math.isclose(loss, wanted_losses[step], rel_tol=TOLERANCE), f"step {step}"
    state = whole(found, max(second, 1))
    assert state.keys() == wanted.keys()
    for name, values in wanted.items():
        assert state[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name


COMMUNICATES = """
import torch
import elasticgang as eg
from torch.distributed.fsdp import fully_shard

manager = eg.join(layout=eg.ParallelLayout(sdp=2))

def build(seat):
    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=manager.gangs.device_mesh("sdp"))
    model = eg.ShardedDataParallel(manager, model)
    return {"model": model, "optim": eg.Optimizer(manager, torch.optim.Muon(model.parameters()))}

state = manager.build(build)
batches = eg.GlobalBatch(8, size=8, slot=2)
for step in manager.steps(3):
    with step:
        slots = batches.slots(step)
        for slot in slots:
            with state.model.accumulate(last=slot.last):
                state.model(torch.ones(2, 4)).sum().backward()
        print("applied", state.optim.step(weight=slots.num_samples), flush=True)
"""


# RULE-10
def test_an_optimizer_that_communicates_in_an_apply_is_refused(tmp_path: Path) -> None:
    """If a rank died there, the others would apply what an ended collective has left in memory."""
    path = tmp_path / "script.py"
    path.write_text(COMMUNICATES)
    with Job(tmp_path, path, ranks=2) as job:
        assert job.wait() == 1
        assert "The gang sdp cannot be used to communicate while a step is applied" in job.stderr
        assert "applied" not in job.stdout
        job.assert_nothing_left()
