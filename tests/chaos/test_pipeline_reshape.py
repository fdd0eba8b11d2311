"""Jobs whose layouts have other pipeline stages: the state moves between them in memory, or by checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from safetensors.torch import load_file

from elasticgang.launch.cli import main
from tests.chaos.reshaping import HeldJob, loads
from tests.chaos.resumed_sharded_job import assembled
from tests.chaos.several import SLOW_S
from tests.chaos.test_checkpoints import kill_whole, newest
from tests.exhaustive import exhaustive
from tests.support import REPOSITORY, Job, kill, wait_until

pytestmark = pytest.mark.timeout(600)

SCRIPT = REPOSITORY / "tests" / "chaos" / "staged_job.py"
STEPS, HOLD, HOLD_AGAIN, EVERY = 24, 8, 16, 5
TOLERANCE = 1e-9  # of sums of doubles in another order, over 24 steps of AdamW

Result = dict[str, list[float]]


class Staged(HeldJob):
    """Agents of `staged_job.py`."""

    def __init__(self, directory: Path, layout: str, every: int = 0) -> None:
        super().__init__(directory, SCRIPT, layout, STEPS, every)


def check(directory: Path, *agents: Job, ranks: int, losses: bool = True, late: int = 0) -> None:
    """They end well, and what they have is what an undisturbed rank has, but for the order of summation. `losses`: they
    say all of them. `late`: so many ranks more may have come back before the end."""
    for agent in agents:
        assert agent.wait(SLOW_S) == 0, agent.stderr
        agent.assert_nothing_left()
    wanted, wanted_losses = alone()
    found = results(directory)
    assert ranks <= len(found) <= ranks + late
    merged: Result = {}
    for name, values in itertools.chain(*(each.items() for each in found)):
        assert merged.setdefault(name, values) == values, f"{name} is not the same on all ranks"
    assert merged.keys() == wanted.keys()
    for name, values in wanted.items():
        assert merged[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name
    assert {step for step, *_ in steps(directory)} == wanted_losses.keys()
    for step, _, loss, _ in steps(directory) if losses else ():
        assert loss == pytest.approx(wanted_losses[step], rel=TOLERANCE), step


def results(directory: Path) -> list[Result]:
    return assembled([json.loads(path.read_text()) for path in sorted(directory.glob("done-*"))])


def steps(directory: Path) -> Iterator[tuple[int, int, float, str]]:
    """Each committed step, the generation, its loss, and the sizes of pp and sdp then, as each rank says."""
    for path in directory.glob("steps-*"):
        for line in path.read_text().splitlines():
            step, loss, sizes, generation = line.split()
            yield int(step), int(generation), float(loss), sizes


def sizes(directory: Path) -> list[str]:
    """Those of pp and sdp in each generation that has committed a step, without repetition."""
    by_generation = {generation: found for _, generation, _, found in steps(directory)}
    return [found for found, _ in itertools.groupby(by_generation[number] for number in sorted(by_generation))]


@cache
def alone() -> tuple[Result, dict[int, float]]:
    """What one undisturbed rank leaves."""
    with TemporaryDirectory() as name, run(directory := Path(name), "alone", 1, "sdp=1") as running:
        assert running.wait(SLOW_S) == 0, running.stderr
        (result,) = results(directory)
        return result, {step: loss for step, _, loss, _ in steps(directory)}


@contextlib.contextmanager
def run(
    directory: Path, name: str, ranks: int, layout: str, every: int = 0, env: dict[str, str] | None = None
) -> Iterator[Job]:
    """One agent."""
    (here := directory / name).mkdir()
    options = ["--checkpoint-dir", str(directory / "checkpoints")] if every else []
    arguments = map(str, (directory, layout, STEPS, every))
    with Job(here, SCRIPT, *arguments, ranks=ranks, options=options, env=env) as running:
        yield running


# MOVE-5
@pytest.mark.parametrize(
    ("fallback", "active", "env", "found"),
    [
        pytest.param("pp=1", 3, {}, "1x1", marks=exhaustive),
        pytest.param("pp=1", 3, {"OWN_NAMES": "mapped"}, "1x1", marks=exhaustive),
        ("pp=1", 3, {"KEEP": "1"}, "1x1"),
        pytest.param("pp=3", 3, {}, "3x1", marks=exhaustive),
        ("sdp=2", 2, {}, "1x2"),
    ],
    ids=["one rank", "names of its own", "kept slots", "three stages", "sharded"],
)
def test_a_lost_host_changes_the_stages_and_a_new_one_changes_them_back_in_memory(
    tmp_path: Path, fallback: str, active: int, env: dict[str, str], found: str
) -> None:
    """Two pipelines of two stages lose one rank of four: three hold a whole copy among them, and `active` of them take
    part in the fallback layout."""
    with Staged(tmp_path, f"pp=2,min_replicas=2/{fallback}") as job:
        first = job.lose_the_second_host(3, env, step=HOLD)
        job.hold(HOLD_AGAIN)
        job.reached(HOLD_AGAIN, active)
        third = job.start(1, env)
        job.join_noticed(HOLD_AGAIN, active)
        job.release()
        check(tmp_path, first, third, ranks=4, losses="KEEP" not in env)
        assert sizes(tmp_path) == ["2x1", found, "2x1"]
        assert not loads(job.agents)


def test_a_holder_of_a_stage_that_dies_while_the_state_moves_costs_nothing(tmp_path: Path) -> None:
    """The rank 2 of the first host is one of two that keep its stage."""
    env = {"DIE_MOVING": "2"}
    with Staged(tmp_path, "pp=2,min_replicas=2/pp=1") as job:
        first = job.lose_the_second_host(3, env, step=HOLD)
        job.release()
        check(tmp_path, first, ranks=2, late=1)
        assert (tmp_path / "died-moving").exists()
        assert sizes(tmp_path) == ["2x1", "1x1"]


def test_a_rank_that_leaves_hands_its_stage_over(tmp_path: Path) -> None:
    with Staged(tmp_path, "pp=2/pp=1") as job:
        job.hold(HOLD)
        agent = job.start(2)
        job.reached(HOLD, 2)
        (tmp_path / f"leave-{agent.rank_pid(1)}").touch()
        job.release()
        check(tmp_path, agent, ranks=1)
        assert sizes(tmp_path) == ["2x1", "1x1"]


def test_a_lost_stage_comes_back_from_the_checkpoint_in_another_layout(tmp_path: Path) -> None:
    with Staged(tmp_path, "pp=2/pp=1", EVERY) as job:
        first = job.lose_the_second_host(1, step=HOLD)
        job.hold(HOLD_AGAIN)
        job.reached(HOLD_AGAIN, 1)
        first.expect_line("loaded the checkpoint")
        third = job.start(1)
        job.join_noticed(HOLD_AGAIN, 1)
        job.release()
        check(tmp_path, first, third, ranks=2)
        assert sizes(tmp_path) == ["2x1", "1x1", "2x1"]
        assert not loads([third])


def leave_checkpoint(directory: Path, ranks: int, layout: str, env: dict[str, str]) -> None:
    """A job writes one, and is killed whole."""
    (hold := directory / "hold").write_text(str(EVERY + 2))
    with run(directory, "first", ranks, layout, EVERY, env) as running:
        wait_until(lambda: newest(directory) == EVERY, "a checkpoint")
        kill_whole(running)
    hold.unlink()


# PLACED-1, PLACED-2
@pytest.mark.parametrize(
    ("first", "second", "env"),
    [
        pytest.param((2, "pp=2"), (1, "pp=1"), {}, marks=exhaustive),
        ((2, "pp=2"), (1, "pp=1"), {"OWN_NAMES": "mapped"}),
        pytest.param((1, "pp=1"), (2, "pp=2"), {}, marks=exhaustive),
        pytest.param((2, "pp=2"), (4, "pp=4"), {}, marks=exhaustive),
        pytest.param((3, "pp=3"), (2, "pp=2"), {}, marks=exhaustive),
        pytest.param((4, "pp=2,sdp=2"), (2, "sdp=2"), {}, marks=exhaustive),
        ((2, "sdp=2"), (4, "pp=2,sdp=2"), {}),
    ],
    ids=str,
)
def test_a_job_goes_on_from_a_checkpoint_of_other_stages(
    tmp_path: Path, first: tuple[int, str], second: tuple[int, str], env: dict[str, str]
) -> None:
    leave_checkpoint(tmp_path, *first, env)
    with run(tmp_path, "second", *second, EVERY, env) as running:
        assert running.wait(SLOW_S) == 0, running.stderr
        assert "loaded the checkpoint" in running.stderr
    check(tmp_path, ranks=second[0])
    check_export(tmp_path)


def check_export(directory: Path) -> None:
    """One whole model, by its own names."""
    wanted, _ = alone()
    output = directory / "weights.safetensors"
    assert main(["export", str(directory / "checkpoints"), str(output)]) == 0
    weights = load_file(output)
    parameters = {name: values for name, values in wanted.items() if ":" not in name}
    buffers = {"bias", *(f"blocks.{number}.scale" for number in range(4))}
    assert weights.keys() == parameters.keys() | buffers
    for name, values in parameters.items():
        assert weights[name].flatten().tolist() == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name


# LOADER-3
def test_stages_that_call_different_tensors_alike_do_not_move(tmp_path: Path) -> None:
    """The job ends, and says which tensors; a job of the same stages goes on."""
    env = {"OWN_NAMES": "alone"}
    leave_checkpoint(tmp_path, 2, "pp=2", env)
    with run(tmp_path, "other", 1, "pp=1", EVERY, env) as running:
        assert running.wait(SLOW_S) == 1, running.stderr
    name = "model.module.blocks.0.norm.weight"
    assert (
        f"two stages have different tensors of the name {name} ({name}@pp=0 and {name}@pp=1 differ)" in running.stderr
    )
    with run(tmp_path, "same", 2, "pp=2", EVERY, env) as running:
        assert running.wait(SLOW_S) == 0, running.stderr
        assert "loaded the checkpoint" in running.stderr
    check(tmp_path, ranks=2)


FORGOTTEN = r"no stage of the layout \(pp=3\) has model.module.blocks.3.down.bias and [0-9]+ more"


def check_forgotten(directory: Path, job: Job) -> None:
    """The job says what no stage has, and has trained nothing without it."""
    assert re.search(FORGOTTEN, job.stderr), job.stderr
    assert newest(directory) == EVERY
    assert {step for step, *_, pipeline in steps(directory) if pipeline == "3x1"} == set()


# COVERAGE-1
def test_a_block_that_no_stage_has_is_not_lost_without_a_word(tmp_path: Path) -> None:
    """At a checkpoint."""
    env = {"FORGETS": "1"}
    leave_checkpoint(tmp_path, 2, "pp=2", env)
    with run(tmp_path, "second", 3, "pp=3", EVERY, env) as running:
        assert running.wait(SLOW_S) == 1, running.stderr
    check_forgotten(tmp_path, running)


# COVERAGE-1
def test_a_block_that_no_stage_has_is_not_lost_by_a_death_before_the_first_step(tmp_path: Path) -> None:
    """The generation that has loaded the checkpoint ends in its first step; the next one loads nothing."""
    env = {"FORGETS": "1"}
    leave_checkpoint(tmp_path, 2, "pp=2", env)
    (hold := tmp_path / "hold").write_text(str(EVERY))
    with run(tmp_path, "second", 6, "pp=3", EVERY, env) as running:
        wait_until(lambda: len(list(tmp_path.glob(f"at-{EVERY}-*"))) == 6, "six ranks", SLOW_S)
        kill(running.rank_pid(5))
        running.expect("generation", generation=running.expect("generation")["generation"] + 1)
        hold.unlink()
        assert running.wait(SLOW_S) == 1, running.stderr
    check_forgotten(tmp_path, running)


# COVERAGE-1
def test_a_block_that_no_stage_of_a_fallback_layout_has_ends_the_job(tmp_path: Path) -> None:
    env = {"FORGETS": "1"}
    with Staged(tmp_path, "pp=2,min_replicas=2/pp=3") as job:
        first = job.lose_the_second_host(3, env, step=HOLD)
        job.release()
        assert first.wait(SLOW_S) == 1, first.stderr
        assert re.search(FORGOTTEN, first.stderr), first.stderr
        assert sizes(tmp_path) == ["2x1"]
