"""Ranks that live and do not get on: the one that is behind is ended alone, and what only takes long is let be.

Where a rank stands still is decided by the job itself (`job.py`), so that each place is met every time.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elasticgang.launch.cli import main
from tests.chaos.test_kills import BACK, NUM_STEPS, Fault, alone, at, check, run, soon
from tests.chaos.training_scripts import training
from tests.support import Job, is_alive, wait_until

__all__ = ["alone"]  # the fixture

LIMIT_S = 3.0  # more than what a machine stands still, of which one rank may be struck alone


def hung(job: Job) -> list[tuple[int, bool]]:
    """The ranks that were ended for standing still, in order, and whether it was by their comm process alone."""
    return [(event["local_rank"], event["comm"] is not None) for event in job.events() if event["event"] == "hung"]


# A rank is not judged before it has computed some steps.
SCENARIOS: dict[str, tuple[list[Fault], list[tuple[int, bool]]]] = {
    "stopped": (
        [
            at("body", 1, "stop", step=3),
            at("totals_received", 0, "stop", step=8),
            at("applied", 2, "stop", step=13),
            BACK,
        ],
        [(1, False), (0, False), (2, False)],
    ),
    "alive, and nothing comes of it": (
        [
            at("step", 1, "lock", step=3),
            at("body", 0, "gil", step=8),
            at("torn", 2, "lock", step=13),
            at("votes_received", 1, "gil-asleep", step=18),
            BACK,
        ],
        [(1, False), (0, False), (2, False), (1, False)],
    ),
    "the comm process stopped": (
        [
            at("body", 1, "stop-comm", step=3),
            at("totals_received", 0, "stop-comm", step=8),
            at("votes_received", 2, "stop-all", step=13),
            BACK,
        ],
        [(1, True), (0, True), (2, False)],
    ),
    "stopped on the way to the next generation": (
        [
            at("body", 1, step=3),
            soon("requested", 2, "stop"),
            at("body", 1, step=8),
            soon("configuring", 0, "stop"),
            at("body", 1, step=13),
            soon("chunk_received", 1, "stop"),
            BACK,
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
    for event in job.events():
        if event["event"] == "hung" and event["comm"] is None:
            assert job.stderr.count(f"rank {event['local_rank']} (pid {event['pid']}): no progress for ") == 1
            assert f"(pid {event['pid']}) was killed" not in job.stderr
    spawned = Counter(event["local_rank"] for event in job.events() if event["event"] == "spawned")
    assert spawned == Counter(range(3)) + killed + Counter(rank for rank, by_comm in expected if not by_comm)


def test_one_that_stands_still_at_the_very_end_is_ended_too(tmp_path: Path, alone: str) -> None:
    """The others have finished, and wait for nobody."""
    faults = [at("applied", 1, "stop", step=NUM_STEPS)]
    job = run(tmp_path, faults, options=[f"--hang-timeout={LIMIT_S:g}"])
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
        soon("step", 1, "busy", step=0, **{"for": 2 * LIMIT_S}),
        at("step", 0, "paused", step=4, full=False, **{"for": 2 * LIMIT_S}),
        *(at("step", rank, "busy", step=8, full=False, free=True, **{"for": 2 * LIMIT_S}) for rank in range(3)),
    ]
    job = run(tmp_path, faults, options=[f"--hang-timeout={LIMIT_S:g}"])
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
    faults = [at("body", 1, "paused", **{"for": 2 * LIMIT_S})]
    job = run(tmp_path, faults, options=[f"--hang-timeout={LIMIT_S:g}", "--collective-timeout=1.5"])
    check(job, faults, alone)
    assert hung(job) == []


# What the ranks do, how many they are, and how many reports are waited for.
STUCK = {
    "while True: pass": ("while True: pass", 1, 1),  # it takes a core from the tests beside
    "time.sleep": ("time.sleep(1000)", 4, 3),
    "a lock that nobody releases": ("wait_for_lock()", 4, 3),
}


def stuck(directory: Path, statement: str) -> Path:
    """Every rank stands still in step 4, unless the file `go` is there."""
    return training(
        directory,
        setup=f"""
        import threading
        def wait_for_lock():
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        def stand_still():
            {statement}""",
        body="""
                if step.index == 4 and not (here / "go").exists():
                    stand_still()""",
        steps=8,
    )


@pytest.mark.parametrize("name", STUCK)
def test_when_all_ranks_stand_still_their_stacks_are_told_and_nobody_is_killed(name: str, tmp_path: Path) -> None:
    statement, num_ranks, num_reports = STUCK[name]
    with Job(tmp_path, stuck(tmp_path, statement), ranks=num_ranks, options=[f"--hang-timeout={LIMIT_S:g}"]) as job:
        reports = [job.expect("standstill", count=count + 1) for count in range(num_reports)]
        job.expect_line(f"made progress for {reports[-1]['stalled_s']:.1f} s.")
        told = job.stderr
        alive = [job.rank_pid(rank) for rank in range(num_ranks) if is_alive(job.rank_pid(rank))]
    assert [report["stalled_s"] >= 2**number * LIMIT_S for number, report in enumerate(reports)] == [True] * num_reports
    for report in reports:
        assert [rank["local_rank"] for rank in report["ranks"]] == list(range(num_ranks))
        assert {rank["pid"] for rank in report["ranks"]} == set(alive)
        assert all("in stand_still" in rank["stack"] for rank in report["ranks"])
    assert hung(job) == []
    stalled_s = f"{reports[0]['stalled_s']:.1f}"
    warning = told[told.index(f"elasticgang: warning: no rank of this host has made progress for {stalled_s} s.") :]
    first = warning[: warning.find("elasticgang: warning", 1)]
    ranks = r"^rank 0 \(pid \d+\):$" if num_ranks == 1 else r"^ranks 0, 1, 2, 3 \(pids \d+, \d+, \d+, \d+\):$"
    assert re.search(ranks, first, re.MULTILINE)
    assert first.count("in stand_still") == 1  # one stack for all
    assert "elasticgang/" not in first.partition("frame first:")[2]  # nothing of the runtime
    warned_s = [float(stalled_s) for stalled_s in re.findall(r"warning: no rank .* progress for ([\d.]+) s", told)]
    assert warned_s[:num_reports] == [float(f"{report['stalled_s']:.1f}") for report in reports]  # none between
    assert [later >= 2 * earlier - 0.2 for earlier, later in pairwise(warned_s)] == [True] * (len(warned_s) - 1)


def test_when_all_ranks_are_stopped_that_is_told_and_they_go_on(tmp_path: Path) -> None:
    path = stuck(
        tmp_path, "(here / f'at-{rank}').touch(); [time.sleep(0.01) for _ in iter((here / 'go').exists, True)]"
    )
    with Job(tmp_path, path, ranks=4, options=[f"--hang-timeout={LIMIT_S:g}"]) as job:
        pids = [wait_until(lambda rank=rank: at_hold(job, rank), "the rank's stop") for rank in range(4)]  # type: ignore[misc]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        stopped = [{"local_rank": rank, "pid": pid, "stack": "stopped (state T)"} for rank, pid in enumerate(pids)]
        wait_until(lambda: any(report["ranks"] == stopped for report in standstills(job)), "the report")
        job.expect_line(f"ranks 0, 1, 2, 3 (pids {', '.join(map(str, pids))}): stopped (state T)")
        (tmp_path / "go").touch()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert job.wait() == 0, job.stderr
    assert hung(job) == []
    assert Counter(event["local_rank"] for event in job.events() if event["event"] == "spawned") == Counter(range(4))


def at_hold(job: Job, rank: int) -> int | None:
    return job.rank_pid(rank) if (job.directory / f"at-{rank}").exists() else None


def standstills(job: Job) -> list[dict[str, Any]]:
    return [event for event in job.events() if event["event"] == "standstill"]
