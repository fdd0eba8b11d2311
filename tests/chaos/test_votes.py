"""Votes through shared memory, and between hosts: kills, stops and lost comm processes at each place within a vote."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from elasticgang.process.sum_block import MAX_VALUES
from tests.chaos.network import Network
from tests.chaos.several import Cluster, Coordinator
from tests.chaos.summing_job import numbers_of
from tests.chaos.test_exhaustion import BODY, allow_descriptors
from tests.chaos.test_hangs import LIMIT_S, hung
from tests.chaos.test_kills import Fault, alone, at, check, run
from tests.chaos.training_scripts import training
from tests.support import REPOSITORY, Job, kill, wait_until

__all__ = ["alone"]  # the fixture

SUMMING_JOB = REPOSITORY / "tests" / "chaos" / "summing_job.py"

pytestmark = pytest.mark.timeout(600)


def in_vote(place: str, rank: int | None, what: str = "self") -> Fault:
    return at(place, rank, what, votes=True)


# BLOCK-1, SUMS-3
def test_a_rank_or_a_comm_process_dies_at_each_place_of_a_vote(tmp_path: Path, alone: str) -> None:
    faults = [
        in_vote("sum_written", 1),  # nobody can count, and nobody commits
        in_vote("sum_published", 2),  # all others may count
        at("sum_written", 0),  # of the totals
        in_vote("sum_published", 1, "comm"),
        in_vote("sum_written", 0, "comm"),
        in_vote("sum_published", 2, "comms"),
    ]
    job = run(tmp_path, faults)
    check(job, faults, alone)


# SUMS-4
def test_a_rank_that_is_stopped_in_a_vote_is_ended_alone(tmp_path: Path, alone: str) -> None:
    faults = [
        at("sum_written", 1, "stop", votes=True, step=5),  # the others wait for its numbers
        at("sum_published", 0, "stop", votes=True, step=10),  # they count, and wait in the next step
    ]
    job = run(tmp_path, faults, options=[f"--hang-timeout={LIMIT_S:g}", "--collective-timeout=900"])
    check(job, faults, alone)
    assert hung(job) == [(1, False), (0, False)], job.stderr


def run_on_two_hosts(directory: Path, faults: Sequence[Fault], alone: str, options: Sequence[str] = ()) -> list[Job]:
    """Two ranks on each of two hosts, the second of which has the faults. All end well."""
    with Network(["c", "a", "b"]) as network:
        cluster = Cluster(directory, host=network.addresses["c"], prefix=network.on("c"))
        with cluster:
            first = cluster.start(nnodes="2:9", options=options, prefix=network.on("a"))
            script_options = ["--num-ranks", "4", "--faults", json.dumps(faults)]
            second = cluster.start(nnodes="2:9", options=options, script_options=script_options, prefix=network.on("b"))
            ends_well = [first] if faults[-1]["kill"] == "agent" else [first, second]
            cluster.check(alone, ends_well)
            fired = {path.name for path in cluster.output.glob("fired-*")}
            assert fired == {f"fired-{number}" for number in range(len(faults))}
            return [first, second]


# SUMS-1
def test_ranks_of_one_of_two_hosts_die_at_each_place_of_a_vote(tmp_path: Path, alone: str) -> None:
    faults = [
        in_vote("sum_written", 1),
        in_vote("sum_collected", None),  # the first rank of its host has told no other host
        in_vote("sum_exchanged", None),  # the other host commits; the other rank of its own is in doubt
        in_vote("sum_exchanged", None, "comm"),
        in_vote("sum_collected", None, "comm"),
        at("sum_exchanged", None),  # of the totals
    ]
    run_on_two_hosts(tmp_path, faults, alone)


def test_a_host_dies_when_only_the_other_one_can_count(tmp_path: Path, alone: str) -> None:
    run_on_two_hosts(tmp_path, [in_vote("sum_exchanged", None, "agent")], alone)


# SUMS-4
def test_the_first_rank_of_a_host_that_is_stopped_in_a_vote_is_ended_alone(tmp_path: Path, alone: str) -> None:
    faults = [
        at("sum_collected", None, "stop", votes=True, step=5),
        at("sum_exchanged", None, "stop", votes=True, step=10),
    ]
    first, second = run_on_two_hosts(
        tmp_path, faults, alone, [f"--hang-timeout={LIMIT_S:g}", "--collective-timeout=900"]
    )
    assert hung(first) == []
    assert [by_comm for _, by_comm in hung(second)] == [False, False], second.stderr


def check_sums(directory: Path, size: int, num: int) -> list[int]:
    """All ranks have the same sums, bit by bit. Returns how many comm processes each had stopped."""
    found = [json.loads((directory / f"sums-{rank}").read_text()) for rank in range(size)]
    sums = [each[1:] for each in found]
    assert all(each == sums[0] for each in sums)
    assert sums[0][0] == sums[0][1] == sums[0][2]
    columns = zip(*(numbers_of(rank, num) for rank in range(size)), strict=True)
    assert sums[0][0] == pytest.approx([math.fsum(column) for column in columns])
    return [each[0] for each in found]


# SUMS-1
def test_the_ranks_of_one_host_vote_while_their_comm_processes_stand_still(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "3", "5", "--stop"]
    with Job(tmp_path / "job", SUMMING_JOB, *arguments, ranks=3) as job:
        assert job.wait() == 0, job.stderr
    assert min(check_sums(tmp_path, 3, 5)) > 0


# SUMS-2, ROUTE-1
def test_sums_of_more_numbers_than_a_block_holds_are_the_same_on_all_hosts(tmp_path: Path) -> None:
    """The hosts have three ranks, two, and one that has no block."""
    num = 2 * MAX_VALUES + 5
    with Coordinator(tmp_path / "coordinator") as coordinator, contextlib.ExitStack() as agents:
        options = ["--coordinator", coordinator.address, "--nnodes", "3:3", "--job-id", "sums"]
        jobs = [
            agents.enter_context(
                Job(
                    tmp_path / f"agent-{ranks}", SUMMING_JOB, str(tmp_path), "6", str(num), ranks=ranks, options=options
                )
            )
            for ranks in (3, 2, 1)
        ]
        for job in jobs:
            assert job.wait() == 0, job.stderr
    check_sums(tmp_path, 6, num)


def test_ranks_that_sum_different_numbers_of_numbers_lose_the_step(tmp_path: Path) -> None:
    body = "manager.generation > 1 or step.index < 2 or manager.sum_over_ranks([1.0] * (1 + rank))"
    with Job(tmp_path, training(tmp_path, body=body), ranks=2) as job:
        assert job.wait() == 0, job.stderr
        job.expect("generation", generation=2)
        assert not [event for event in job.events() if event["event"] == "exited" and event["status"] != 0]


# SUMS-6
def test_hosts_that_sum_different_numbers_of_numbers_get_no_sum(tmp_path: Path) -> None:
    """All rounds of one of them have the sizes of the other's first ones."""
    num, others = 2 * (MAX_VALUES - 2), 3 * (MAX_VALUES - 2)
    body = (
        f"sums = manager.sum_over_ranks([1.0] * ({num} if manager.gangs.root.rank else {others})) "
        "if step.index == 2 and manager.generation == 1 else []; "
        '(here / f"summed-{os.getpid()}").write_text("") if sums else None'
    )
    with Coordinator(tmp_path / "coordinator") as coordinator, contextlib.ExitStack() as agents:
        options = ["--coordinator", coordinator.address, "--nnodes", "2:2", "--job-id", "sums"]
        path = training(tmp_path, body=body)
        jobs = [
            agents.enter_context(Job(tmp_path / f"agent-{ranks}", path, ranks=ranks, options=options))
            for ranks in (1, 2)
        ]
        for job in jobs:
            assert job.wait() == 0, job.stderr
            job.expect("generation", generation=2)
            assert not [event for event in job.events() if event["event"] == "exited" and event["status"] != 0]
    assert not list(tmp_path.glob("summed-*"))


# BLOCK-5
def test_a_rank_keeps_nothing_of_the_blocks_of_former_generations(tmp_path: Path) -> None:
    """It collects no garbage."""
    body = (
        "time.sleep(0.01); "
        'num_mapped = open("/proc/self/maps").read().count("elasticgang-sums"); '
        'num_open = str([os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")])'
        '.count("elasticgang-sums"); '
        '(here / f"at-{rank}").write_text(f"{manager.generation} {num_mapped} {num_open}\\n")'
    )
    setup = "import gc; gc.disable()"

    def held_in(generation: int) -> list[int] | None:
        number, *held = map(int, job.expect_file(tmp_path / "at-0").split())
        return held if number >= generation else None

    with Job(tmp_path, training(tmp_path, steps=100_000, setup=setup, body=body), ranks=3) as job:
        assert wait_until(lambda: held_in(1), "a step") == [1, 1]
        job.expect("entered", local_rank=2)  # rank 0 may be in its first step before that
        for count in (2, 3):
            kill(job.rank_pid(2))
            last = int(job.expect("entered", local_rank=2, count=count)["generation"])
        assert last >= 3
        assert wait_until(lambda: held_in(last), "a step of the last generation") == [1, 1]
        job.process.terminate()
        assert job.wait() == 143


# SUMS-5
def test_ranks_without_memory_for_their_votes_go_on_once_there_is_some(tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, steps=100_000, body=BODY), ranks=4) as job:
        for rank in range(4):
            job.expect_file(tmp_path / f"at-{rank}")
        former = allow_descriptors(job.process.pid, 3)  # those that it has, it keeps
        kill(job.rank_pid(3))
        job.expect("generation", generation=2)  # has the block in reserve (DOOR-5)
        kill(job.rank_pid(2))
        job.expect_line("elasticgang: there is no memory for the votes of generation ")
        allow_descriptors(job.process.pid, former)
        check_goes_on(job)


# DOOR-4
def test_ranks_that_wait_for_a_descriptor_of_their_agent_go_on_once_there_is_one(tmp_path: Path) -> None:
    """Nobody waits for the timeout of the rendezvous."""
    options = ["--collective-timeout", "900"]
    with Job(tmp_path, training(tmp_path, steps=100_000, body=BODY), ranks=3, options=options) as job:
        for rank in range(3):
            job.expect_file(tmp_path / f"at-{rank}")
        former = allow_descriptors(job.process.pid, 3)
        kill(job.rank_pid(2))
        job.expect_line("elasticgang: ranks wait to be connected, this agent has no free descriptor: [Errno 24]")
        allow_descriptors(job.process.pid, former)
        check_goes_on(job)


def check_goes_on(job: Job) -> None:
    """The job commits further steps, then ends."""
    step = int(job.expect_file(job.directory / "at-0"))
    wait_until(lambda: int(job.expect_file(job.directory / "at-0")) > step + 3, "further steps")
    assert "Traceback" not in job.stderr
    job.process.terminate()
    assert job.wait() == 143
