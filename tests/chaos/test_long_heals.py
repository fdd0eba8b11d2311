"""A state that takes longer to come than a generation lives: it comes over several."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.long_heal_job import MAX_LOST
from tests.support import Job

SCRIPT = Path(__file__).parent / "long_heal_job.py"


# FETCH-9
@pytest.mark.parametrize("what", ["chunks", "digests"])
def test_a_heal_longer_than_the_collective_timeout_ends(what: str, tmp_path: Path) -> None:
    options = ["--collective-timeout=1"]
    with (
        (tmp_path / "stdout").open("w") as stdout,
        Job(tmp_path, SCRIPT, what, ranks=2, options=options, stdout=stdout.fileno()) as job,
    ):
        assert job.wait() == 0, job.stderr
    told = [line.partition("finished ")[2] for line in (tmp_path / "stdout").read_text().splitlines()]
    digests = [line for line in told if line]
    assert len(digests) == 2
    assert len(set(digests)) == 1
    generations = [event for event in job.events() if event["event"] == "generation"]
    assert len(generations) > MAX_LOST + 1  # more tries than may be lost in a row
    causes = [event["cause"] for event in job.events() if event["event"] == "generation_change"]
    assert any(cause.endswith("timed out in a collective") for cause in causes), causes
    late = [event for event in job.events() if event["event"] == "collective_timed_out"]
    stopped = [rank["stopped_at"] for event in late for rank in event["ranks"]]
    assert what != "chunks" or any(where.startswith("while it healed (") for where in stopped), stopped


# MANAGER-21
def test_a_rank_that_gets_nothing_of_the_state_ends_and_says_so(tmp_path: Path) -> None:
    with Job(tmp_path, SCRIPT, "nothing", ranks=2, options=["--collective-timeout=1"]) as job:
        assert job.wait() == 1, job.stderr
        job.assert_nothing_left()
    assert "UnhealedError: nothing more of the training state of step 0 has come from the ranks of " in job.stderr
    assert "rank 1 exited with code 1 before its first committed step" in job.stderr
