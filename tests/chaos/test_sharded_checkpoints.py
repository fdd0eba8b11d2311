"""Jobs whose model is divided over `sdp` are killed whole, and go on with other numbers of ranks and other layouts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elasticgang.checkpoint import listing
from elasticgang.checkpoint.locations import storage_at
from elasticgang.launch.cli import main
from tests.chaos.resumed_sharded_job import Model, assembled
from tests.chaos.test_checkpoints import kill_whole, newest
from tests.exhaustive import exhaustive
from tests.support import REPOSITORY, Job, kill, wait_until

pytestmark = pytest.mark.timeout(400)  # several jobs, one after another

SCRIPT = REPOSITORY / "tests" / "chaos" / "resumed_sharded_job.py"
STEPS, EVERY = 30, 10
TOLERANCE = 1e-9  # of sums of doubles in another order, over 30 steps of AdamW


@contextlib.contextmanager
def job(directory: Path, name: str, ranks: int, sdp: int) -> Iterator[Job]:
    (here := directory / name).mkdir()
    options = ["--checkpoint-dir", str(directory / "checkpoints")]
    arguments = map(str, (directory, sdp, STEPS, EVERY))
    with Job(here, SCRIPT, *arguments, ranks=ranks, options=options) as running:
        yield running


def results(directory: Path) -> list[dict[str, list[float]]]:
    found = assembled([json.loads(path.read_text()) for path in sorted(directory.glob("done-*"))])
    for path in directory.glob("done-*"):
        path.unlink()
    return found


def losses(directory: Path) -> dict[int, set[float]]:
    """Of each committed step, what the ranks say."""
    found: dict[int, set[float]] = {}
    for path in directory.glob("steps-*"):
        for line in path.read_text().splitlines():
            step, loss = line.split()
            found.setdefault(int(step), set()).add(float(loss))
    return found


@cache
def alone() -> tuple[dict[str, list[float]], dict[int, set[float]]]:
    """What one undisturbed rank leaves."""
    with TemporaryDirectory() as name, job(directory := Path(name), "alone", 1, 1) as running:
        assert running.wait() == 0, running.stderr
        (result,) = results(directory)
        return result, losses(directory)


def check(directory: Path, ranks: int) -> None:
    """Bit for bit among the ranks; and what one undisturbed rank has, but for the order of summation."""
    wanted, wanted_losses = alone()
    first, *others = results(directory)
    assert len(others) == ranks - 1
    assert all(other == first for other in others)
    assert first.keys() == wanted.keys()
    for name, values in wanted.items():
        assert first[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name
    found = losses(directory)
    assert sorted(found) == list(range(STEPS))
    for step, of_ranks in found.items():
        (wanted_loss,) = wanted_losses[step]
        assert all(loss == pytest.approx(wanted_loss, rel=TOLERANCE) for loss in of_ranks), step


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((4, 2), (2, 2), marks=exhaustive),
        pytest.param((2, 2), (4, 2), marks=exhaustive),
        pytest.param((2, 2), (1, 1), marks=exhaustive),
        pytest.param((1, 1), (2, 2), marks=exhaustive),
        pytest.param((2, 2), (4, 4), marks=exhaustive),
        ((4, 4), (2, 1)),
    ],
    ids=lambda each: f"{each[0]} ranks sdp={each[1]}",
)
def test_a_divided_model_goes_on_from_its_checkpoint(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    (tmp_path / "hold").write_text(str(EVERY + 5))
    with job(tmp_path, "first", *first) as running:
        wait_until(lambda: newest(tmp_path) == EVERY, "a checkpoint")
        kill_whole(running)
    (tmp_path / "hold").unlink()
    with job(tmp_path, "second", *second) as running:
        assert running.wait() == 0, running.stderr
        assert "loaded the checkpoint" in running.stderr
    check(tmp_path, second[0])
    check_export(tmp_path)


# MANAGER-22
def test_a_part_of_the_model_is_saved_before_the_only_rank_that_has_it_leaves(tmp_path: Path) -> None:
    """The other rank, which stays, writes its part too."""
    (tmp_path / "hold").write_text(str(EVERY + 5))
    with job(tmp_path, "first", 2, 2) as running:
        wait_until(lambda: newest(tmp_path) == EVERY, "a checkpoint")
        os.kill(running.rank_pid(0), signal.SIGTERM)
        (tmp_path / "hold").unlink()
        running.expect("exited", local_rank=0, status=0)
        saved = newest(tmp_path)
        assert saved > EVERY
        assert sorted(losses(tmp_path)) == list(range(saved))
        assert running.wait() == 1, running.stderr  # the layout needs both
    with job(tmp_path, "second", 2, 2) as running:
        assert running.wait() == 0, running.stderr
        assert f"; continues at the checkpoint of step {saved}; " in running.stderr
    check(tmp_path, 2)


def check_export(directory: Path) -> None:
    """`elasticgang export` gives the whole tensors, which the plain model takes."""
    assert newest(directory) == STEPS
    wanted, _ = alone()
    output = directory / "weights.safetensors"
    assert main(["export", str(directory / "checkpoints"), str(output)]) == 0
    weights: dict[str, Any] = load_file(output)
    model = Model()
    model.load_state_dict(weights)
    for name, parameter in model.named_parameters():
        assert parameter.detach().flatten().tolist() == pytest.approx(wanted[name], rel=TOLERANCE, abs=TOLERANCE)
    assert torch.equal(model.scale, Model().scale)


@exhaustive  # tests of reshapes lose a shard, too
def test_a_shard_without_holders_comes_back_from_the_checkpoint(tmp_path: Path) -> None:
    """Both ranks that hold one shard die, and the other shard's ranks go back with them."""
    (tmp_path / "hold").write_text(str(EVERY + 5))
    with job(tmp_path, "job", 4, 2) as running:
        wait_until(lambda: newest(tmp_path) == EVERY, "a checkpoint")
        for rank in (1, 3):  # sdp=1 of each replica group
            kill(running.rank_pid(rank))
        running.expect("spawned", count=6)
        (tmp_path / "hold").unlink()
        assert running.wait() == 0, running.stderr
        assert "loaded the checkpoint" in running.stderr
    check(tmp_path, 4)
    found = next(listing.scan(storage_at(tmp_path / "checkpoints")))
    assert found.manifest is not None
    placements = {tensor.placement for tensor in found.manifest.tensors if re.match(r"model\..*weight", tensor.name)}
    assert placements
    assert all(each.startswith("sdp: S") for each in placements), placements
