"""Which processes the kernel kills first for want of memory, as it shows that."""

from __future__ import annotations

import multiprocessing
import subprocess
from pathlib import Path

from elasticgang.process.memory_group import FirstToDie


def score(pid: int | str = "self") -> str:
    return Path(f"/proc/{pid}/oom_score_adj").read_text()


# GROUP-3
def test_processes_that_a_rank_forks_or_starts_before_it_has_state_are_no_longer_first() -> None:
    """A rank's script may start a logger, for example, which stays for as long as the rank."""
    usual, first = score(), FirstToDie()
    reader, writer = multiprocessing.Pipe()
    forked = multiprocessing.get_context("fork").Process(target=lambda: writer.send(score()))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as started:
        assert score() == score(started.pid) == "1000\n"
        forked.start()
        assert reader.recv() == usual
        first.end()
        assert score() == score(started.pid) == usual
        started.communicate()
    forked.join()
