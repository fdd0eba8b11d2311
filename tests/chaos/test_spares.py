"""A spare waits at no cost, takes the place of a rank that dies, and ends with the job."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest

from scripts.chaos_runs.soaking.comm_processes import comm_processes
from tests.chaos.sharded import Reference, Sizes, check, histories, moved, reference_in, run, seats, start
from tests.chaos.test_kills import BACK, at, soon
from tests.exhaustive import exhaustive
from tests.support import wait_until

PAIRS = Sizes(active=4, spares=1, tp=2)
MOST_TRIES = 2  # of a measurement: a standby that was quiet before it warmed up (WORKER-7) does so in the first one


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_in(tmp_path_factory.mktemp("reference"))


def test_a_spare_takes_the_seat_of_a_dead_rank_at_once_and_nobody_else_moves(
    tmp_path: Path, reference: Reference
) -> None:
    faults = [at("forward", 3), at("body", 4), at("totals_received", 0), BACK]
    job = run(tmp_path, PAIRS, faults)
    check(job, PAIRS, faults, reference)
    found = histories(tmp_path)
    assert moved(found) == []
    committed_in = {line["generation"] for lines in found.values() for line in lines if line["kind"] == "committed"}
    assert all(len(seats(found)[generation]) == 4 for generation in committed_in), "a step was done without all"
    exits = [event for event in job.events() if event["event"] == "exited"]
    assert sorted(event["status"] for event in exits) == [-9] * 3 + [0] * 5
    waits = {event["local_rank"]: event["reason"] for event in job.events() if event["event"] == "spare"}
    assert waits.keys() == {4, 3, 0}  # the first one, and who came back
    assert "4 ranks fill 2 replica groups of 2" in waits[4]


def test_with_plain_data_parallelism_spares_wait_too_and_take_seats_in_their_order(
    tmp_path: Path, reference: Reference
) -> None:
    sizes, faults = Sizes(active=3, spares=2), [at("body", 1, [1, 2]), at("votes_received", 0)]
    job = run(tmp_path, sizes, faults)
    check(job, sizes, faults, reference)
    found = histories(tmp_path)
    assert moved(found) == []
    turns = {event["reason"].rpartition(", ")[2] for event in job.events() if event["event"] == "spare"}
    assert turns >= {"as number 1 of 2 that waits", "as number 2 of 2 that waits"}


def test_the_death_of_a_spare_costs_nobody_a_step(tmp_path: Path, reference: Reference) -> None:
    faults = [soon("record_received", 4)]
    job = run(tmp_path, PAIRS, faults)
    check(job, PAIRS, faults, reference)
    lines = [line for written in histories(tmp_path).values() for line in written]
    prepared, committed = (
        {(line["step"], line["generation"]) for line in lines if line["kind"] == kind}
        for kind in ("prepared", "committed")
    )
    assert prepared == committed
    exited = next(event for event in job.events() if event["event"] == "exited")
    assert (exited["local_rank"], exited["status"]) == (4, -9)


@exhaustive
def test_a_spare_that_waits_costs_no_time(tmp_path: Path) -> None:
    """Its standby is there, and neither of the two does anything."""
    with start(tmp_path, PAIRS, [], steps=1_000_000) as job:
        member = job.expect("spare")["member"]
        pid = next(event["pid"] for event in job.events() if event["event"] == "spawned" and event["member"] == member)
        wait_until(lambda: comm_processes(pid), "its standby")
        waiting = [psutil.Process(each) for each in (pid, *comm_processes(pid))]
        measured: list[tuple[float, float]] = []
        while not measured or measured[-1][0] > 0.02 + 0.01 * measured[-1][1]:  # of each process in hundredths
            assert len(measured) < MOST_TRIES, f"seconds of CPU, and in how many: {measured}"
            wait_until(lambda: all(process.num_threads() == len(asleep(process)) for process in waiting), "quiet")
            before, since = cpu_seconds(waiting), time.monotonic()
            time.sleep(2.0)  # what is measured
            measured.append((cpu_seconds(waiting) - before, time.monotonic() - since))
        assert [process.pid for process in waiting[1:]] == comm_processes(pid)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def asleep(process: psutil.Process) -> list[int]:
    found = []
    for thread in process.threads():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends at this moment
            if psutil.Process(thread.id).status() == psutil.STATUS_SLEEPING:
                found.append(thread.id)
    return found
