"""Callbacks that wait for collectives three deep, in processes of their own, of which one dies inside."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import pytest

from tests.integration import callback_ranks
from tests.support import Command, Job, reserved_port

SIZE = 3
pytestmark = pytest.mark.timeout(240)  # processes import torch, on whatever the machine has left


@pytest.mark.parametrize("process_group", ["isolated-gloo", "gloo"])
def test_nested_waits_of_an_elastic_job_end_when_a_rank_dies_inside(process_group: str, tmp_path: Path) -> None:
    options = ["--process-group", process_group]
    with Job(tmp_path / "job", Path(callback_ranks.__file__), str(tmp_path), ranks=SIZE, options=options) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
    assert (tmp_path / "died").exists()
    found = [(tmp_path / f"rank{rank}").read_text().split() for rank in range(SIZE - 1)]
    assert [int(steps) for steps, _ in found] == [callback_ranks.STEPS] * (SIZE - 1)
    assert all(int(lost) >= 1 for _, lost in found)


# STATIC-2
def test_nested_waits_over_the_backend_end_when_a_rank_dies_inside(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.callback_ranks", str(tmp_path), "backend"]
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        env = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(SIZE)}
        ranks = [
            stack.enter_context(
                Command(tmp_path / f"command{rank}", command, env={**env, "RANK": str(rank)}, preloaded=True)
            )
            for rank in range(SIZE)
        ]
        assert [rank.wait() for rank in ranks] == [0] * (SIZE - 1) + [-signal.SIGKILL], ranks[0].stderr
    for rank in range(SIZE - 1):
        assert "RuntimeError" in (tmp_path / f"rank{rank}").read_text()
