"""Ranks that live and do not get on: the one that is behind is ended alone, and what only takes long is let be.

Where a rank stands still is decided by the job itself (`job.py`), so that each place is met every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from elasticgang.launch.cli import main
from tests.chaos.test_kills import NUM_STEPS, Fault, alone, at, check, run, soon
from tests.support import Job

__all__ = ["alone"]  # the fixture

LIMIT_S = 2.0


def hung(job: Job) -> list[tuple[int, bool]]:
    """The ranks that were ended for standing still, in order, and whether it was by their comm process alone."""
    return [(event["local_rank"], event["comm"] is not None) for event in job.events() if event["event"] == "hung"]


# A rank is not judged before it has computed some steps.
SCENARIOS: dict[str, tuple[list[Fault], list[tuple[int, bool]]]] = {
    "stopped": (
        [at("body", 1, "stop", step=3), at("summed", 0, "stop", step=8), at("applied", 2, "stop", step=13)],
        [(1, False), (0, False), (2, False)],
    ),
    "alive, and nothing comes of it": (
        [
            at("step", 1, "lock", step=3),
            at("body", 0, "gil", step=8),
            at("torn", 2, "lock", step=13),
            at("voted", 1, "gil", step=18),
        ],
        [(1, False), (0, False), (2, False), (1, False)],
    ),
    "the comm process stopped": (
        [
            at("body", 1, "stop-comm", step=3),
            at("summed", 0, "stop-comm", step=8),
            at("voted", 2, "stop-all", step=13),
        ],
        [(1, True), (0, True), (2, False)],
    ),
    "stopped on the way to the next generation": (
        [
            at("body", 1, step=3),
            soon("asked", 2, "stop"),
            at("body", 1, step=8),
            soon("configure", 0, "stop"),
            at("body", 1, step=13),
            soon("half-healed", 1, "stop"),
        ],
        [(2, False), (0, False), (1, False)],
    ),
}


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Job]]]:
    """The jobs of all scenarios that were selected, two at a time: they stand still for most of their time."""
    selected = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_the_one_that_is_behind_is_ended_alone
    ]
    with ThreadPoolExecutor(2) as pool:
        directories = {name: tmp_path_factory.mktemp("job") for name in selected}
        options = [f"--hang-timeout={LIMIT_S:g}"]
        yield {name: pool.submit(run, directories[name], SCENARIOS[name][0], 3, options) for name in selected}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_one_that_is_behind_is_ended_alone(name: str, jobs: dict[str, Future[Job]], alone: str) -> None:
    job = jobs[name].result()
    faults, expected = SCENARIOS[name]
    check(job, faults, alone)
    killed = Counter(fault["rank"] for fault in faults if fault["kill"] == "self")
    assert hung(job) == expected, job.stderr
    spawned = Counter(event["local_rank"] for event in job.events() if event["event"] == "spawned")
    assert spawned == Counter(range(3)) + killed + Counter(rank for rank, by_comm in expected if not by_comm)


def test_one_that_stands_still_at_the_very_end_is_ended_too(tmp_path: Path, alone: str) -> None:
    """The others have finished, and wait for nobody."""
    faults = [at("applied", 1, "stop", step=NUM_STEPS)]
    job = run(tmp_path, faults, options=["--hang-timeout=1"])
    check(job, faults, alone)
    assert hung(job) == [(1, False)]


@pytest.mark.parametrize("given", ["0.03", "0.499"])
def test_a_limit_that_those_who_are_well_exceed_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", f"--hang-timeout={given}", "train.py"])
    told = capsys.readouterr().err
    assert f"error: argument --hang-timeout: must be at least 0.5, but is {given} instead" in told


def test_what_takes_long_is_let_be(tmp_path: Path, alone: str) -> None:
    """A compilation in the first step, an evaluation on one rank, data that comes late on all."""
    faults = [
        soon("step", 1, "busy", step=0, **{"for": 2.5}),
        at("step", 0, "paused", step=4, full=False, **{"for": 2.5}),
        *(at("step", rank, "busy", step=8, full=False, free=True, **{"for": 2.5}) for rank in range(3)),
    ]
    job = run(tmp_path, faults, options=["--hang-timeout=1"])
    check(job, faults, alone)
    assert hung(job) == []
    assert Counter(event["local_rank"] for event in job.events() if event["event"] == "spawned") == Counter(range(3))


def test_by_default_seconds_on_one_rank_are_no_hang(tmp_path: Path, alone: str) -> None:
    """A checkpoint that nobody has announced."""
    faults = [at("applied", 0, "busy", **{"for": 5})]
    job = run(tmp_path, faults)
    check(job, faults, alone)
    assert hung(job) == []


def test_a_pause_outlasts_the_collective_timeout(tmp_path: Path, alone: str) -> None:
    """Those who wait try the step again; nobody is ended, nothing is lost."""
    faults = [at("body", 1, "paused", **{"for": 4})]
    job = run(tmp_path, faults, options=["--hang-timeout=1", "--collective-timeout=1.5"])
    check(job, faults, alone)
    assert hung(job) == []
