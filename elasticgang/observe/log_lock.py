"""The lock on a directory of events: one agent at a time writes there, and a reader sees whether that agent runs.

LOGLOCK-1  The agent holds the lock for as long as it lives. The kernel releases it, however the agent ends.
LOGLOCK-2  A reader takes no lock: an agent that starts at that moment would be refused.
LOGLOCK-3  Where the file system has no locks, an agent writes without one, and a reader knows of none.
"""

from __future__ import annotations

import fcntl
import os
import struct

from elasticgang.errors import OperationalError

_NAME = "events.lock"
_FLOCK = "hhqqi4x"  # Linux's struct flock: type, whence, start, length, process id


def hold(directory: str) -> int:
    """Lock `directory`. Returns the descriptor that holds the lock until it is closed. The lock is the process's, so
    that no fork keeps it; it ends if this process closes any other descriptor of the file, as `holder` does.

    Raises:
        OperationalError: another process holds it.
        OSError: the file cannot be created.
    """
    fd = os.open(os.path.join(directory, _NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # LOGLOCK-1
    except (BlockingIOError, PermissionError):
        os.close(fd)
        raise OperationalError(
            f"another agent writes its events to --log-dir {directory}: each agent needs a directory of its own"
        ) from None
    except OSError:  # LOGLOCK-3
        pass
    return fd


def holder(directory: str) -> int | None:
    """The id of the process that holds the lock. It is 0 or negative if this process cannot see that one, because it is
    in another container or on another host. None: no process holds it, or nobody can tell."""
    try:
        fd = os.open(os.path.join(directory, _NAME), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, wanted))  # LOGLOCK-2
    except OSError:  # LOGLOCK-3
        return None
    finally:
        os.close(fd)
    return None if kind == fcntl.F_UNLCK else int(pid)
