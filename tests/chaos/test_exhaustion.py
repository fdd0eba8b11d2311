"""A host on which nothing more can be had for a while: descriptors, here."""

from __future__ import annotations

import resource
from pathlib import Path

from tests.chaos.training_scripts import training
from tests.support import Job, kill, wait_until

BODY = 'time.sleep(0.01); (here / f"at-{rank}").write_text(f"{step.index}\\n")'


def allow_descriptors(pid: int, limit: int) -> int:
    """The former limit."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    return soft


# DOOR-4
def test_a_rank_that_cannot_be_started_comes_back_once_it_can(tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, steps=100_000, body=BODY), ranks=2) as job:
        job.expect_file(tmp_path / "at-1")
        former = allow_descriptors(job.process.pid, 3)  # those that it has, it keeps
        kill(job.rank_pid(1))
        job.expect("warned", count=2)
        job.expect("generation", generation=2)
        step = int(job.expect_file(tmp_path / "at-0"))
        wait_until(lambda: int(job.expect_file(tmp_path / "at-0")) > step + 3, "further steps")
        allow_descriptors(job.process.pid, former)
        job.expect("entered", local_rank=1, count=2)
        told = [line for line in job.stderr.splitlines() if "rank 1 could not be started" in line]
        assert told[0].endswith("trying again in 1 s: [Errno 24] Too many open files")
        assert len(told) == len([event for event in job.events() if event["event"] == "warned"])
        assert "Traceback" not in job.stderr
        job.process.terminate()
        assert job.wait() == 143


def test_the_coordinator_is_started_again_once_it_can_be(tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, steps=100_000, body=BODY), ranks=2) as job:
        job.expect_file(tmp_path / "at-1")
        former = allow_descriptors(job.process.pid, 3)
        kill(job.coordinator().pid)
        job.expect_line("elasticgang: the coordinator could not be started; trying again: [Errno 24]")
        allow_descriptors(job.process.pid, former)
        job.expect("coordinator reachable")
        kill(job.rank_pid(1))
        job.expect("entered", local_rank=1, count=2)
        job.process.terminate()
        assert job.wait() == 143


def test_the_end_of_the_job_needs_nothing_more(tmp_path: Path) -> None:
    setup = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"  # so that there is somebody left to be ended
    path = training(tmp_path, steps=100_000, setup=setup, body=BODY)
    with Job(tmp_path, path, ranks=2, options=["--grace-period=0.1"]) as job:
        job.expect_file(tmp_path / "at-1")
        allow_descriptors(job.process.pid, 3)
        job.process.terminate()
        assert job.wait() == 143
        job.assert_nothing_left()
        assert "Traceback" not in job.stderr
