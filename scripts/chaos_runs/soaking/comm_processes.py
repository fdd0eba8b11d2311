"""The comm processes of a rank, as faults find them from outside."""

from __future__ import annotations

import contextlib
import os

import psutil

from elasticgang.process.stop_fence import is_over


def comm_processes(rank_pid: int) -> list[int]:
    """The comm processes of a rank, oldest first: in use, then the standby. They are of its process group. Without one
    of a former generation that is halted (COMM-6) or exits."""
    found = []
    for pid in psutil.pids():  # psutil.process_iter remembers processes whose ids others have now
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            is_comm = os.getpgid(pid) == rank_pid and process.name().startswith("eg-comm")
            if is_comm and not is_over(pid):
                found.append((process.create_time(), pid))
    return [pid for _, pid in sorted(found)]
