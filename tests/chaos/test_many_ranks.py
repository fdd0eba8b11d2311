"""Groups of so many ranks that two of them connect only when they first exchange something (WORKER-5)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elasticgang.comm.worker import EAGER_SIZE
from tests.support import REPOSITORY, Job

SIZE = EAGER_SIZE + 2


@pytest.mark.timeout(300)
def test_ranks_connect_when_they_exchange_something_and_a_death_among_them_costs_a_step(tmp_path: Path) -> None:
    with Job(tmp_path / "job", REPOSITORY / "tests/chaos/many_ranks_job.py", str(tmp_path), ranks=SIZE) as job:
        assert job.wait(240.0) == 0, job.stderr
        job.assert_nothing_left()
    for rank in range(SIZE):
        found = json.loads((tmp_path / f"rank{rank}").read_text())
        assert found["exchanges"]
        assert all(found["exchanges"].values()), (rank, found)
        if rank != 1:
            assert 0 < found["connections"] < 2 * (SIZE - 1), "a connection to every other rank, in each of two groups"
            assert len(found["sizes"]) == 6
            assert SIZE - 1 in found["sizes"], "the others went on without the rank that was killed"
