"""Where the ranks of an agent have the sockets of Python's `multiprocessing`, so that none outlives them.

A worker of torch's `DataLoader` sends tensors over a socket in a directory of its own. It removes that only if it ends
by itself; a worker whose rank ends is killed.

LEFT-1  Each rank has a directory below the agent's, for all processes that its script starts by `multiprocessing`. The
    agent deletes it when the rank has ended, and its own at its end.
LEFT-2  An agent that is killed leaves its directory. The next agent of this user deletes those whose lock nobody holds.

Without such a directory, the job runs: `multiprocessing` makes its own ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from elasticgang.environment import is_own_directory

_PREFIX = "eg-mp-"


class LeftFiles:
    """The agent's directory. Not thread-safe, but for `remove`."""

    def __init__(self) -> None:
        self.path = ""  # "": there is none
        self._lock = -1

    def open(self) -> None:
        """Make the directory, and delete those of agents that were killed. `path` stays "" if it cannot be made."""
        with contextlib.suppress(OSError):
            self._prune()
            path = tempfile.mkdtemp(prefix=_PREFIX)
            try:
                self._lock = _locked(path)
            except OSError:  # an agent that starts now deletes it, or the file system has no locks
                shutil.rmtree(path, ignore_errors=True)
                raise
            self.path = path

    def remove(self, pid: int) -> None:
        """LEFT-1. Of the rank with that process id, which has ended. Any thread may call it."""
        if self.path:
            shutil.rmtree(os.path.join(self.path, str(pid)), ignore_errors=True)

    def close(self) -> None:
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self.path = ""

    @staticmethod
    def _prune() -> None:
        """LEFT-2."""
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if is_own_directory(path):
                    lock = _locked(str(path))
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)


def _locked(path: str) -> int:
    """Raises OSError: it is locked, or was deleted meanwhile."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(path)
    except OSError:
        os.close(fd)
        raise
    return fd
