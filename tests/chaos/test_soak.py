"""`scripts/chaos soak`: random faults on a job of two agents breaks no promise, nor do some on a job
whose ranks hold shards.

`scripts/chaos soak --minutes 60` does more of the same.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.chaos_runs.soak import main, num_steps_at, parse_args
from scripts.chaos_runs.soaking.fleet import Fleet, FleetSpec
from tests.exhaustive import exhaustive
from tests.support import run_preloaded

SOAK = [sys.executable, "-m", "scripts.chaos_runs.soak"]


def soak(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return run_preloaded([*SOAK, *arguments], timeout=timeout_s, ends_at_once=True)


@pytest.mark.timeout(600)
def test_random_faults_break_no_promise(tmp_path: Path) -> None:
    options = ["--minutes", "0.25", "--pause", "0.2", "--seed", "7"]  # the pause leaves the cores to the tests beside
    options += ["--min-faults", "5", "--every", "1"]  # a slow machine needs longer for them
    options += ["--reproducible"]  # and so the result is checked to the last bit
    done = soak(*options, "--output-dir", str(tmp_path), timeout_s=570)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
    assert summary["passed"] is True
    assert summary["num_faults"] >= 5
    assert len(summary["by_kind"]) >= 3
    assert summary["generations"] >= summary["num_faults"] / 3


def test_nobody_else_gets_the_port_of_a_fleet_between_two_coordinators(tmp_path: Path) -> None:
    fleet = Fleet(FleetSpec(agents=1, ranks_per_agent=2, directory=tmp_path, train_args=[]))
    host, _, port = fleet.address.rpartition(":")
    with contextlib.closing(fleet), socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind((host, int(port)))


def test_a_job_whose_speed_was_measured_in_a_slow_moment_lasts_for_its_faults() -> None:
    args = parse_args(["--minutes", "0.5", "--pause", "0.1", "--min-faults", "8", "--every", "1"])
    assert num_steps_at(args, rate=0.5) * args.pause > 2 * args.min_faults * args.every


@exhaustive  # tests of reshapes and of reproducible jobs compare the bits of shards, too
@pytest.mark.timeout(420)
def test_random_faults_on_shards_leave_no_trace_in_the_bits(tmp_path: Path) -> None:
    """With a fallback layout, in which each rank holds the whole model."""
    options = ["--layout", "sdp=2,min_replicas=2/sdp=1", "--reproducible", "--steps", "32", "--pause", "0.15"]
    options += ["--every", "1", "--seed", "4"]
    done = soak(*options, "--output-dir", str(tmp_path), timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["passed"], summary["steps"]) == (True, 32)
    assert summary["num_faults"] >= 1


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        (["--minutes", "0"], "must be greater than 0"),
        (["--pause", "-1"], "at least 0"),
        (["--min-faults", "-1"], "at least 0"),
        (["--reproducible", "--reference-steps", "5"], "needs the whole undisturbed run"),
        (["--agents", "1", "--ranks", "1"], "at least two ranks"),
        (["--agents", "3", "--ranks", "1", "--layout", "sdp=2"], "at least 4 ranks, so that each part survives"),
        (["--layout", "sdp=1,min_replicas=5/sdp=2"], "at least 5 ranks to fill the first layout"),
        (["--layout", "sdp=3"], "sdp must divide 4"),
        (["--layout", "sdp=2,tp=2", "--agents", "4", "--reproducible"], "leave out tp and pp"),
    ],
)
def test_what_cannot_be_soaked_is_refused(argument: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argument)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
