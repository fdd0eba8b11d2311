"""`scripts/chaos soak`: half a minute of random faults on a job of two agents breaks no promise.

`scripts/chaos soak --minutes 60` does more of the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import run_preloaded

SOAK = [sys.executable, "-m", "scripts.chaos_runs.soak"]


def soak(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return run_preloaded([*SOAK, *arguments], timeout=timeout_s)


@pytest.mark.timeout(420)
def test_random_faults_break_no_promise(tmp_path: Path) -> None:
    options = ["--minutes", "0.5", "--pause", "0.1", "--seed", "7"]  # the pause leaves the cores to the tests beside
    options += ["--reproducible"]  # and so the result is checked to the last bit
    done = soak(*options, "--output-dir", str(tmp_path), timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
    assert summary["passed"] is True
    assert summary["num_faults"] >= 8
    assert len(summary["by_kind"]) >= 4
    assert summary["generations"] >= summary["num_faults"] / 3


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        (["--minutes", "0"], "must be greater than 0"),
        (["--pause", "-1"], "at least 0"),
        (["--reproducible", "--reference-steps", "5"], "needs the whole undisturbed run"),
        (["--agents", "1", "--ranks", "1"], "at least two ranks"),
    ],
)
def test_what_cannot_be_soaked_is_refused(argument: list[str], told: str) -> None:
    done = soak(*argument, timeout_s=60)
    assert done.returncode == 2
    assert told in done.stderr
