"""`ManagedProcessGroup` in a real job: its size is the number of active members, and its errors are the manager's."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration import managed_ranks
from tests.support import Job


def test_an_average_is_over_the_active_members_while_one_dies_and_comes_back(tmp_path: Path) -> None:
    with Job(tmp_path / "job", Path(managed_ranks.__file__), str(tmp_path), ranks=3) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
    assert (tmp_path / "died").exists()
    found = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(3)]
    assert len({rank["weight"] for rank in found}) == 1
    for rank in found[:2]:
        sizes = [tuple(size) for size in rank["sizes"]]
        lost = sizes.index((2, 2))
        assert (3, 3) in sizes[:lost]
        assert sizes[lost:] == [(2, 2), (2, 3), (3, 3)]  # the newcomer takes part before it counts
        assert rank["errors"] >= 1
    assert found[2]["sizes"][-1] == [3, 3]
