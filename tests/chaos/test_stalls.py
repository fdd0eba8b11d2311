"""`scripts/chaos stalls`: a command runs on, while its core is taken away."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from scripts.chaos_runs.stalls import may_stall
from tests.documents import REPOSITORY

STALLS = [str(REPOSITORY / "scripts" / "chaos"), "stalls"]
# Prints the cores that real-time processes beside it take, once there is one for each.
CORES = """
import os, time, psutil
cores = set()
while len(cores) < len(os.sched_getaffinity(0)):
    beside = [each.pid for each in psutil.Process(os.getppid()).children() if each.pid != os.getpid()]
    takers = [pid for pid in beside if os.sched_getscheduler(pid) == os.SCHED_FIFO]
    cores = {core for pid in takers for core in os.sched_getaffinity(pid)}
    time.sleep(0.01)
print(sorted(cores))
"""
# Prints once it has stood still for 30 ms of its own processor's time.
STANDS_STILL = """
import time
while True:
    began, ran = time.monotonic(), time.process_time()
    while time.process_time() - ran < 0.001:
        pass
    if time.monotonic() - began > 0.03:
        break
print("stood still")
"""

SHORT = ("--stall-ms", "0", "1")  # which stalls no test beside these

pytestmark = pytest.mark.skipif(not may_stall(), reason="may not have a real-time priority")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STALLS, *arguments], capture_output=True, text=True, timeout=100, check=False)


def test_the_command_stands_still_and_runs_on() -> None:
    done = run("--stall-ms", "50", "60", "--", sys.executable, "-c", STANDS_STILL)
    assert (done.returncode, done.stdout) == (0, "stood still\n"), done.stderr


def test_each_core_is_taken() -> None:
    done = run(*SHORT, "--", sys.executable, "-c", CORES)
    assert (done.returncode, done.stdout) == (0, f"{sorted(os.sched_getaffinity(0))}\n"), done.stderr


def test_its_exit_code_is_the_commands() -> None:
    assert run(*SHORT, "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7


def test_a_signal_that_ended_the_command_is_told() -> None:
    assert run(*SHORT, "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)").returncode == 137


def test_a_command_that_does_not_exist_is_named() -> None:
    done = run(*SHORT, "--", "no-such-command")
    assert done.returncode == 127
    assert "no-such-command" in done.stderr


def test_times_out_of_range_are_refused() -> None:
    done = run("--stall-ms", "300", "20", "--", "true")
    assert done.returncode == 2
    assert "must be 0 <= MIN <= MAX" in done.stderr
