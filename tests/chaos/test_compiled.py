"""Compiled collectives of a job whose size changes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.chaos.compiled_job import CALLS, STEPS
from tests.exhaustive import exhaustive
from tests.support import REPOSITORY, Job

pytestmark = pytest.mark.timeout(300)  # three ranks compile; with four it took 112 s on a busy machine

JOB = REPOSITORY / "tests" / "chaos" / "compiled_job.py"


@pytest.mark.parametrize("calls", [pytest.param(CALLS, marks=exhaustive), ("group", "mesh"), ("part",)], ids="-".join)
def test_compiled_collectives_follow_three_ranks_to_two_and_back(calls: tuple[str, ...], tmp_path: Path) -> None:
    """After rank 1's death the ranks above it are others, also when three are there again: the code of a mesh's part,
    which runs no collective, would go on with another rank's."""
    arguments = ["--backend", "aot_eager", "--output-dir", str(tmp_path), "--calls", *calls]
    with Job(tmp_path, JOB, *arguments, ranks=3, imports=["torch._inductor.compile_fx"]) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
    seen = {
        path.name: [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
        for path in tmp_path.glob("rank-*")
    }
    assert len(seen) == 4, "one of the ranks was started again"
    lasted = [lines for name, lines in seen.items() if not name.startswith("rank-1-")]
    assert len(lasted) == 2
    for lines in lasted:
        assert {index for index, _, _ in lines} >= set(range(1, STEPS))  # one that healed in the first step skips it
        assert [size for size, _ in itertools.groupby(size for _, size, _ in lines)] == [3, 2, 3]
    ranks = [(lines[0][2], lines[-1][2]) for lines in lasted]
    assert any(first != last for first, last in ranks), f"all kept their ranks: {ranks}"
