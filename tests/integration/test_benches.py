"""Each bench measures to its end, with the smallest arguments it takes."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.documents import REPOSITORY
from tests.exhaustive import exhaustive

SMALLEST = {
    "comm": ["--rounds=1", "--baby-rounds=1", "--budget=0"],
    "coordinator": ["--agents=3", "--ranks=2", "--processes=2", "--changes=1", "--idle=0.5", "--tls"],
    "hangs": ["--stops=1"],
    "joins": ["--joins=1"],
    "loading": ["--steps=30", "--step-ms=20"],
    "long_steps": ["--slots=16", "--depth=50", "--kills=2", "--every=5"],
    "memory": ["--ranks=1", "--steps=2"],
    "planner": ["--members=8192", "--tries=1"],
    "recovery": ["--ranks=2", "--kills=1", "--peer-kills=1", "--rank-bytes=1000000"],
    "repair": ["--kills=1"],
    "reshape": ["--rounds=1", "--dim=32"],
    "scale": ["--hosts", "2", "10", "--changes=1"],
    "start": ["--turns=1"],
    "state": ["--mib=8", "--rounds=1", "--turn=4", "--step-ms=30", "--dim=64", "--demo-steps=40"],
    "steady": ["--ranks=2", "--steps=40", "--rounds=1", "--dim=32", "--busy=1"],
    "votes": ["--ranks", "4", "--hosts", "1", "2", "--sums=20"],
}


def test_every_bench_is_listed() -> None:
    assert sorted(SMALLEST) == sorted(path.stem for path in (REPOSITORY / "scripts/benches").glob("[!_]*.py"))


@exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SMALLEST)
def test_a_bench_measures_to_its_end(name: str) -> None:
    done = subprocess.run(
        [REPOSITORY / "scripts/bench", name, *SMALLEST[name]],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert figures
    assert all(isinstance(each, dict) for each in figures)
