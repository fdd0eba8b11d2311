"""A bit of the state flips on one rank: what `--compare-state` finds of it, and what follows."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from elasticgang.checkpoint import listing
from elasticgang.checkpoint.locations import storage_at
from tests.chaos.several import Coordinator
from tests.support import REPOSITORY, Job

SCRIPT = REPOSITORY / "tests" / "chaos" / "flipping_job.py"
FOUND = "elasticgang: of the training states after step "


def run(
    directory: Path,
    *script: str,
    flip: tuple[int, int, str] | None = None,
    kill: tuple[int, int] | None = None,
    compare: int = 3,
    ranks: int = 3,
    options: tuple[str, ...] = (),
) -> Job:
    """The job, ended. `flip`, `kill`: as the script has them."""
    args = ["--output-dir", str(directory), "--flip", json.dumps(flip), "--kill", json.dumps([kill] if kill else [])]
    options = ("--compare-state", str(compare), *options) if compare else options
    with Job(directory, SCRIPT, *args, *script, ranks=ranks, options=options) as job:
        job.wait()
        job.assert_nothing_left()
    return job


def digests(job: Job) -> list[tuple[str, str]]:
    """The part of the model and the digest of its parameters, of each rank that has finished."""
    return re.findall(r"digest (\d+) (\d+)", job.stdout)


def found(job: Job) -> list[str]:
    return [line.partition(FOUND)[2] for line in job.stderr.splitlines() if line.startswith(FOUND)]


# COMPARE-5, COMPARE-6
def test_a_rank_whose_optimizer_differs_from_two_others_is_restarted_and_heals(tmp_path: Path) -> None:
    job = run(tmp_path, "--back-by", "9", flip=(1, 4, "optimizer"))
    assert job.process.returncode == 0, job.stderr
    (line,) = found(job)
    who = "that of rank 1 on 127.0.0.1 differs from that of rank 0 on 127.0.0.1, rank 2 on 127.0.0.1"
    where = "in 'module.0.weight' of 'model' and 1 more"
    assert line == f"6, {who} {where}; after step 3 they were alike"
    assert job.stderr.count("DamagedStateError: this rank's training state is not that of its replicas") >= 1
    assert len(digests(job)) == 3
    assert len(set(digests(job))) == 1
    exits = [event["local_rank"] for event in job.events() if event["event"] == "exited" and event["status"]]
    assert exits == [1]
    assert {event["step"] for event in job.events() if event["event"] == "state_differs"} == {6}


# COMPARE-3, COMPARE-5, AGENT-13
def test_of_two_ranks_that_differ_nobody_goes_on_and_the_next_start_has_no_damage(tmp_path: Path) -> None:
    """Though the script catches the error."""
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"))
    every = ("--every", "3")
    job = run(tmp_path, *every, "--catches", flip=(1, 7, "parameter"), compare=50, ranks=2, options=checkpoints)
    assert job.process.returncode == 1
    sides = "those of rank 0 on 127.0.0.1 and of rank 1 on 127.0.0.1 differ in 'module.0.weight' of 'model'"
    assert f"elasticgang: error: of the training states after step 9, {sides}; after step 6 they were" in job.stderr
    assert "nobody can say which is right: the job ends" in job.stderr
    assert len([event for event in job.events() if event["event"] == "spawned"]) == 2
    saved = [found.attempt.step for found in listing.scan(storage_at(tmp_path / "checkpoints"))]
    assert saved == [] or max(saved) <= 6
    job = run(tmp_path, *every, compare=50, ranks=2, options=checkpoints)
    assert job.process.returncode == 0, job.stderr
    (tmp_path / "undisturbed").mkdir()
    undisturbed = run(tmp_path / "undisturbed", compare=0, ranks=2)
    assert digests(job) == digests(undisturbed) != []


# COMPARE-2
def test_only_ranks_with_the_same_shard_are_compared(tmp_path: Path) -> None:
    job = run(tmp_path, "--layout", '{"sdp": 2}', flip=(3, 4, "optimizer"), ranks=4)
    assert job.process.returncode == 1
    assert "after step 6, those of rank 1 on 127.0.0.1 and of rank 3 on 127.0.0.1 differ" in job.stderr
    assert digests(job) == []


# AGENT-13
@pytest.mark.parametrize("all_know", [True, False])
def test_every_agent_says_that_nobody_knows_who_is_right_and_ends(tmp_path: Path, all_know: bool) -> None:
    with contextlib.ExitStack() as stack:
        for name in ("coordinator", "one", "other"):
            (tmp_path / name).mkdir()
        address = stack.enter_context(Coordinator(tmp_path / "coordinator")).address
        options = ["--coordinator", address, "--job-id", "job", "--compare-state", "3"]
        agents = []
        for name in ("one", "other"):
            args = ["--output-dir", str(tmp_path / "one"), "--layout", '{"min_replicas": 2}']
            args += ["--flip", '[0, 4, "parameter"]'] if name == "other" else []
            args += ["--lose", "1"] if name == "one" and not all_know else []
            agents.append(stack.enter_context(Job(tmp_path / name, SCRIPT, *args, ranks=1, options=options)))
        assert [agent.wait() for agent in agents] == [1, 1]
        for agent in agents:
            assert "error: of the training states after step 6, those of rank 0 on 127.0.0.1 and of" in agent.stderr
            agent.assert_nothing_left()


# COMPARE-1, COMPARE-4
def test_a_flip_in_the_last_step_is_found_though_a_rank_that_is_right_dies_then(tmp_path: Path) -> None:
    job = run(tmp_path, flip=(1, 11, "parameter"), kill=(0, 2), compare=50)
    assert job.process.returncode == 0, job.stderr
    (line,) = found(job)
    assert line.startswith("12, that of rank 1 on 127.0.0.1 differs")
    assert len(digests(job)) == 1


# COMPARE-4
def test_a_damaged_rank_that_dies_before_it_can_say_so_does_not_take_the_news_with_it(tmp_path: Path) -> None:
    job = run(tmp_path, "--back-by", "9", flip=(1, 4, "parameter"), kill=(1, 1))
    assert job.process.returncode == 0, job.stderr
    (line,) = found(job)
    assert line.startswith("6, that of rank 1 on 127.0.0.1 differs")
    assert len(digests(job)) == 3
    assert len(set(digests(job))) == 1


# COMPARE-3
def test_a_warning_says_what_is_not_saved_because_a_script_has_left_its_loop(tmp_path: Path) -> None:
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"))
    job = run(tmp_path, "--every", "3", "--break-after", "5", compare=50, ranks=2, options=checkpoints)
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path / "checkpoints"))] == [3]
    assert job.stderr.count("the checkpoint of step 6 is not saved, because its state was not compared") == 1
