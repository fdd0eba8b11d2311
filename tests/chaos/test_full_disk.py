"""A disk that fills in the middle of a save, or cannot be written any more: a small file system of the test's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.test_checkpoints import EVERY, STEPS, alone, hold_in, job, newest, results
from tests.support import Job, kill, wait_until

WIDTH = "4096"  # 4 MiB of parameters, and as much of momentum
_DISK_BYTES = 96 << 20
_ROOM = 2 << 20  # less than a rank's share of a save


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Where the job saves. Skips the test where nothing may be mounted."""
    mounted = tmp_path / "checkpoints"
    mounted.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(mounted)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, timeout=20)
    if done.returncode:
        pytest.skip(f"nothing may be mounted here: {done.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True, timeout=20)


def fill(disk: Path) -> Path:
    """Leave `_ROOM`. Returns the file that takes the rest."""
    left = os.statvfs(disk)
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize - _ROOM)
    return filler


def wait_in(running: Job, directory: Path, step: int) -> None:
    """Until all ranks have committed the steps before."""

    def are_there() -> bool:
        assert running.process.poll() is None, running.stderr
        found = [path.read_text().split() for path in directory.glob("steps-*")]
        return len(found) == 2 and all(lines[-1:] == [str(step - 1)] for lines in found)

    wait_until(are_there, f"both ranks in step {step}")


def warnings_of(running: Job) -> list[str]:
    return [line for line in running.stderr.splitlines() if "is not saved" in line]


def test_a_disk_that_fills_in_the_middle_of_a_save_costs_that_save_alone(tmp_path: Path, disk: Path) -> None:
    second, third = 2 * EVERY, 3 * EVERY
    hold_in(tmp_path, second - 1)
    with job(tmp_path, "first", 2, width=WIDTH, await_saves="1") as running:
        wait_in(running, tmp_path, second - 1)
        wait_until(lambda: newest(tmp_path) == EVERY, "the first checkpoint")
        filler = fill(disk)
        hold_in(tmp_path, third - 1)
        wait_in(running, tmp_path, third - 1)  # training goes on
        wait_until(lambda: bool(warnings_of(running)), "a warning")
        assert newest(tmp_path) == EVERY
        filler.unlink()
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / "hold").unlink()
        assert running.wait() == 0, running.stderr
        (warning,) = warnings_of(running)
        assert f"step {second} is not saved: " in warning
        assert "No space left on device" in warning
    assert newest(tmp_path) == STEPS
    assert results(tmp_path) == {alone(STEPS, WIDTH)}


def remount(disk: Path, option: str) -> None:
    """It may have a file that is being written."""
    command = ["mount", "-o", f"remount,{option}", str(disk)]
    wait_until(lambda: subprocess.run(command, capture_output=True, timeout=20).returncode == 0, option)


# SAVER-8
def test_a_rank_that_dies_while_the_disk_is_read_only_comes_back(tmp_path: Path, disk: Path) -> None:
    """As ext4 makes it after an error. The rank is not given up, and what it saves later is there."""
    second, third = 2 * EVERY, 3 * EVERY
    hold_in(tmp_path, second - 1)
    with job(tmp_path, "first", 2, width=WIDTH, await_saves="1") as running:
        wait_in(running, tmp_path, second - 1)
        wait_until(lambda: newest(tmp_path) == EVERY, "the first checkpoint")
        remount(disk, "ro")
        kill(running.rank_pid(1))
        running.expect_line(f"cannot write to the checkpoint directory {disk}; this rank takes part all the same")
        hold_in(tmp_path, third - 1)
        running.expect("entered", local_rank=1, count=2)
        wait_until(lambda: bool(warnings_of(running)), "a warning")
        remount(disk, "rw")
        (tmp_path / "hold").unlink()
        assert running.wait() == 0, running.stderr
        assert all(f"step {second} is not saved: " in line for line in warnings_of(running))
    assert newest(tmp_path) == STEPS
    assert results(tmp_path) == {alone(STEPS, WIDTH)}
