"""Elastic jobs over NCCL, one rank to a device. They need two devices, and take up to four."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.chaos.training_scripts import script
from tests.gpu.test_jobs import DETERMINISTIC, HEAD, PARTS, STAGES, TENSORS, await_entry, digests, run, trains
from tests.support import Job

NUM_DEVICES = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(600),
]
SHARED = 'device="cuda:0", process_group="isolated-gloo"'
KINDS = ["nccl", "isolated-nccl"]


def over(kind: str, text: str) -> str:
    """The job with a device for each rank."""
    assert SHARED in text
    return text.replace(SHARED, f"process_group={kind!r}")


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_killed_at_random_and_end_in_the_bits_of_one(kind: str, tmp_path: Path) -> None:
    text = over(kind, trains(400))
    undisturbed = run(tmp_path / "alone", text, ranks=1)
    attacked = run(tmp_path / "attacked", text, ranks=min(NUM_DEVICES, 4), num_kills=3)
    assert len(digests(undisturbed)) == 1
    assert digests(attacked) == digests(undisturbed)


# PASSED-1
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_stops_is_found_while_the_devices_of_the_others_wait_for_it(kind: str, tmp_path: Path) -> None:
    """Without `--hang-timeout`, the others would wait for the timeout of their collectives."""
    path = script(tmp_path, HEAD.format(here=str(tmp_path)) + over(kind, trains(2000)))
    options = ["--hang-timeout", "10", "--collective-timeout", "300"]
    with Job(tmp_path, path, ranks=2, options=options, env=DETERMINISTIC) as job:
        pids = [await_entry(job, rank) for rank in range(2)]
        os.kill(pids[1], signal.SIGSTOP)
        job.expect("hung", local_rank=1)
        assert job.wait(500) == 0, job.stderr
        assert len(digests(job)) == 1


# DATA-8
@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_that_no_peer_joins_times_out(kind: str, tmp_path: Path) -> None:
    """Rank 1 sleeps once, in a step, for longer than the timeout of collectives and less than that of hangs."""
    sleeps = "        if step.index == 5 and rank == 1 and not (here / 'slept').exists():\n"
    sleeps += "            (here / 'slept').touch()\n            time.sleep(30)\n"
    first = "        tried.append(step.index)\n"
    text = over(kind, trains(40))
    assert first in text
    path = script(tmp_path, HEAD.format(here=str(tmp_path)) + text.replace(first, first + sleeps))
    options = ["--hang-timeout", "120", "--collective-timeout", "8"]
    with Job(tmp_path, path, ranks=2, options=options, env=DETERMINISTIC) as job:
        assert job.wait(500) == 0, job.stderr
        assert "timed out in a collective" in job.stderr
        assert len(digests(job)) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("text", "ranks"), [(TENSORS, 4), (STAGES, 2), (STAGES, 4)], ids=["parts", "stages", "two"])
def test_parts_and_stages_train_and_one_is_killed(kind: str, text: str, ranks: int, tmp_path: Path) -> None:
    """The messages of neighbouring stages would wait for each other, one by one (TABLE-4)."""
    if ranks > NUM_DEVICES:
        pytest.skip(f"needs {ranks} devices")
    may_die = "rank == 0 and manager.gangs.rdp.size > 1"
    parts = PARTS.replace("rank == 0", may_die)
    assert may_die in parts
    job = run(tmp_path / "job", over(kind, text + parts), ranks=ranks)
    assert job.stdout.count("finished 20") == ranks
