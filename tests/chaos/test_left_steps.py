"""A module of torch's `fully_shard` that a lost step has left, or an evaluation: the next step finds nothing of it
there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import sharded
from tests.chaos.sharded import Reference, Sizes
from tests.chaos.test_kills import BACK, at
from tests.exhaustive import exhaustive

NUM_STEPS = 6


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return sharded.reference_in(tmp_path_factory.mktemp("reference"), NUM_STEPS)


# SHARDED-5
def test_gradients_that_fully_shard_adds_are_forgotten_with_a_lost_step(tmp_path: Path, reference: Reference) -> None:
    """It reduces them in the last slot of a rank's four. When the first slot of the killed rank is done, the others
    have done at least three."""
    sizes, faults = Sizes(active=4, sdp=2, fsdp=True), [at("slot", 1, slots=3, step=2), at("slot", 2, "comm", slots=3)]
    job = sharded.run(tmp_path, sizes, faults, steps=NUM_STEPS, options=["--adds", "--slot", "1"])
    sharded.check(job, sizes, faults, reference, steps=NUM_STEPS)


# SHARDED-5
@exhaustive  # the test before has the same sums without stages
def test_gradients_that_a_sharded_stage_adds_are_forgotten_with_a_lost_step(
    tmp_path: Path, reference: Reference
) -> None:
    """torch's stages let it reduce after the last slot. A collective in the fifth forward or later ends the step."""
    sizes, faults = Sizes(active=4, pp=2, sdp=2, fsdp=True), [at("slot", 0, "comm", step=2), at("slot", 3, "comm")]
    options = ["--schedule", "--sums", "--slot", "1"]
    job = sharded.run(tmp_path, sizes, faults, steps=NUM_STEPS, options=options)
    sharded.check(job, sizes, faults, reference, steps=NUM_STEPS)


# SHARDED-6
def test_the_order_of_a_forward_is_forgotten_with_a_lost_step(tmp_path: Path, reference: Reference) -> None:
    """A collective behind the forward ends the step of the killed rank's peer, whose backward does not begin. The new
    rank beside it has had no forward."""
    sizes, faults = Sizes(active=4, sdp=2, fsdp=True), [at("forward", 1, step=2), BACK]
    job = sharded.run(tmp_path, sizes, faults, steps=NUM_STEPS, options=["--sums"])
    sharded.check(job, sizes, faults, reference, steps=NUM_STEPS)
    assert "timed out" not in job.stderr


# SHARDED-6
def test_an_evaluation_in_each_step_changes_nothing_when_a_rank_heals(tmp_path: Path, reference: Reference) -> None:
    """It gathers the root's parameters from before the heal, or from before the update, and no backward follows it."""
    sizes, faults = Sizes(active=4, sdp=2, fsdp=True), [at("forward", 1, step=1), at("body", 2)]
    job = sharded.run(tmp_path, sizes, faults, steps=NUM_STEPS, options=["--evaluates"])
    sharded.check(job, sizes, faults, reference, steps=NUM_STEPS)
    assert "timed out" not in job.stderr
