"""Ranks whose scripts run different code: their collectives time out, and the job says where they have stopped."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.chaos.several import Coordinator
from tests.chaos.training_scripts import training
from tests.support import Job, wait_until

pytestmark = pytest.mark.timeout(300)

OPTIONS = ["--collective-timeout", "2"]
REDUCE = "gang.all_reduce(torch.ones(3), eg.ReduceOperation.SUM)"
BODY = f"gang = manager.gangs.dp; gang.rank == 0 and step.index == 4 and {REDUCE}"


def places(path: Path) -> list[str]:
    """Where the rank that calls the collective stops, and where the other one does."""
    calls, votes = (
        next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)
        for text in (REDUCE, "optim.step")
    )
    return [
        f"in all_reduce of 3 float32 by SUM (number 1 of gang root, dp, rdp), at {path.name}:{calls}",
        f"in a sum over all ranks (a vote, or totals), at {path.name}:{votes}",
    ]


# LATE-1
@pytest.mark.parametrize("group", ["isolated-gloo", "gloo"])
def test_a_collective_that_one_rank_alone_calls(group: str, tmp_path: Path) -> None:
    path = training(tmp_path, steps=6, body=BODY)
    with Job(tmp_path, path, options=[*OPTIONS, "--process-group", group]) as job:
        events = [job.expect("collective_timed_out", step=4, num_times=times) for times in (1, 2, 3)]
        told = [line for line in job.stderr.splitlines() if "a collective has timed out" in line]
    for event in events:
        assert sorted(rank["stopped_at"] for rank in event["ranks"]) == sorted(places(path))
    begins = ["elasticgang: a collective has timed out in step 4: rank ", ", 2 times in a row: rank "]
    assert len(told) == 2
    assert all(begin in line for begin, line in zip(begins, told, strict=True))
    assert all(f" stopped {place}" in told[0] for place in places(path))


# LATE-2
def test_collectives_of_other_sizes_which_end_a_comm_process_at_once(tmp_path: Path) -> None:
    """Gloo ends a process that gets more than it expects."""
    body = "gang = manager.gangs.dp; step.index == 4 and gang.broadcast(torch.ones(7 if gang.rank else 700), 0)"
    with Job(tmp_path, training(tmp_path, steps=6, body=body)) as job:
        wait_until(lambda: ", 2 times in a row: " in job.stderr, "the line")
        (told,) = (line for line in job.stderr.splitlines() if "a collective has failed in step 4" in line)
    assert "in broadcast of 7 float32" in told


# LATE-1
@pytest.mark.parametrize("then", ["", "; time.sleep(0.5)"])  # then, one rank only loses its connection by the timeout
def test_each_host_says_where_its_own_ranks_have_stopped(then: str, tmp_path: Path) -> None:
    path = training(tmp_path, steps=6, body=f"{BODY}{then}")
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(Coordinator(tmp_path / "coordinator"))
        hosts = []
        for name in "ab":
            (tmp_path / name).mkdir()
            options = [*OPTIONS, "--coordinator", coordinator.address, "--nnodes", "2", "--job-id", "job"]
            hosts.append(stack.enter_context(Job(tmp_path / name, path, ranks=1, options=options)))
        told = [host.expect("collective_timed_out", step=4, num_times=2)["ranks"] for host in hosts]
        for host in hosts:
            wait_until(lambda host=host: ", 2 times in a row: rank 0 stopped in " in host.stderr, "the line")  # type: ignore[misc]
    assert sorted(rank["stopped_at"] for ranks in told for rank in ranks) == sorted(places(path))
