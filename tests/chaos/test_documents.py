"""The documents' blocks that are parts of an elastic job run under `elasticgang run`, on small data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import JOBS, reports
from tests.support import Job


@pytest.mark.parametrize("name", JOBS)
def test_the_blocks_of_a_job_run(name: str, tmp_path: Path) -> None:
    program = JOBS[name]
    script = tmp_path / "train.py"
    script.write_text(program.script())
    with Job(tmp_path, script, ranks=program.num_ranks, env={"REPORTS": str(tmp_path)}) as job:
        assert job.wait() == 0, job.stderr
    assert reports(tmp_path) == [program.expected] * program.num_ranks
