"""The hang monitor kills comm processes of the rank alone."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from elasticgang.agent.hang_monitor import kill_comm


@contextmanager
def echo(group: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A process that echoes lines, in the process group `group`; 0 for a new one."""
    with subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, preexec_fn=lambda: os.setpgid(0, group)
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def echoes(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"x\n")
    return process.stdout.read(2) == b"x\n"


# MONITOR-1
def test_only_a_process_of_the_ranks_group_is_killed() -> None:
    with ExitStack() as processes:
        rank = processes.enter_context(echo())
        comm = processes.enter_context(echo(rank.pid))
        stranger = processes.enter_context(echo())
        kill_comm(comm.pid, rank.pid)
        assert comm.wait(10) == -signal.SIGKILL
        for pid in (stranger.pid, rank.pid, comm.pid):  # another group's, the rank itself, and one that is reaped
            kill_comm(pid, rank.pid)
        assert echoes(stranger)
        assert echoes(rank)
