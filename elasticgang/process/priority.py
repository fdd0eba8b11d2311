"""The priority of a process that answers within a lease, beside the ranks, which compute on every core; and that of the
ranks beside other jobs.

PRIORITY-OWN   Only the calling thread has it. Processes and threads that it starts have the default.
PRIORITY-USER  A policy or niceness that the user chose is kept. The niceness that the user gave to a session goes on to
               the sessions that processes of it start.
PRIORITY-SESSION
    Where the kernel divides the processor time between sessions (`autogroup` in sched(7)), each worker of torchrun is a
    session of its own. The ranks of an agent are one session together, which gets the weight of so many. The session
    of a machine's or a container's first process has no weight of its own unless `setsid` was called: its `autogroup`
    is empty.
PRIORITY-LEADER
    There, niceness counts only within a session. A rank that exits would compete with its agent at the weight of all
    ranks, whatever its niceness. An agent or a coordinator that leads its session therefore gives it the largest
    weight. A session that another process leads, such as a shell, keeps its weight: there may be other work in it.
PRIORITY-LAST
    A process that gives way to the ranks is in a session of its own. It makes that as nice as itself, or as the user
    made the session of the process that started it, whichever is nicer.

Without the right to lower its niceness, the process asks for short slices, which Linux 6.12 grants to anybody: a thread
that wakes up then runs before threads with longer ones. An older kernel ignores that.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import struct
import time
from pathlib import Path

NICENESS = -10
SLICE_NS = 100_000  # the shortest that Linux takes
_CALLS = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # sched_setattr
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")  # of `struct sched_attr`
_RESET_ON_FORK = 1
_LEVEL = 1.25  # by which a step of niceness changes a weight
_LOWEST = -20
# Of all sessions of a machine, Linux changes one in 0.1 s for a process without CAP_SYS_ADMIN.
_NUM_TRIES, _PAUSE_S = 10, 0.11


def raise_priority(pid: int = 0) -> None:
    """Of process `pid`'s first thread, or of the calling one, as far as it is permitted."""
    if _is_chosen(pid):  # PRIORITY-USER
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))  # PRIORITY-OWN
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    _shorten_slices(pid, os.getpriority(os.PRIO_PROCESS, pid))


def session_niceness() -> int:
    """What the user chose for this process's session; 0 for nothing. The lowest is not the user's: the session's leader
    has called `weigh_own_session`."""
    try:
        niceness = _session_niceness(0) or 0
    except OSError:
        return 0
    return 0 if niceness == _LOWEST else niceness


def weigh_session(pid: int, num: int, chosen: int = 0) -> None:
    """PRIORITY-SESSION, as far as it is permitted; it may take a second. `pid`: a process of the session, which counts
    as `num`. The largest weight is that of 86. `chosen`: the niceness that it gets instead, if it is not 0
    (PRIORITY-USER)."""
    niceness = chosen or max(_LOWEST, -round(math.log(num, _LEVEL)))
    with contextlib.suppress(OSError):
        if niceness != 0 and (chosen or not _is_chosen(pid)):  # PRIORITY-USER
            _set_session_niceness(pid, niceness)


def weigh_own_session() -> None:
    """PRIORITY-LEADER, on a thread that has not called `raise_priority`, as far as it is permitted; it may take a
    second."""
    with contextlib.suppress(OSError):
        if os.getsid(0) == os.getpid() and not _is_chosen(0):  # PRIORITY-USER
            _set_session_niceness(0, _LOWEST)


def give_way(niceness: int, chosen: int = 0) -> None:
    """PRIORITY-LAST, of a process that has just started. Its niceness grows by `niceness`; `chosen`: that of the
    session of the process that started it."""
    own = os.nice(niceness)
    with contextlib.suppress(OSError):
        if os.getsid(0) == os.getpid():
            _set_session_niceness(0, max(own, chosen))


def _is_chosen(pid: int) -> bool:
    """Whether the user has chosen a policy or a niceness for process `pid`'s first thread, or for the calling one."""
    return os.sched_getscheduler(pid) != os.SCHED_OTHER or os.getpriority(os.PRIO_PROCESS, pid) != 0


def _session_niceness(pid: int) -> int | None:
    """None: the session has no weight of its own (PRIORITY-SESSION). Raises OSError: the kernel has no autogroups."""
    told = _autogroup(pid).read_text()  # "/autogroup-21 nice 0"
    return int(told.split()[-1]) if told else None


def _autogroup(pid: int) -> Path:
    """`pid`: 0 for this process, whose id may be another one in `/proc`."""
    return Path(f"/proc/{pid or 'self'}/autogroup")


def _set_session_niceness(pid: int, niceness: int) -> None:
    """Unless the user has set one, or there is nothing to set. Raises OSError: it is not permitted, or the kernel has
    no autogroups."""
    if _session_niceness(pid) != 0:  # PRIORITY-USER
        return
    path = _autogroup(pid)
    for _ in range(_NUM_TRIES):
        with contextlib.suppress(BlockingIOError):
            path.write_text(str(niceness))
            return
        time.sleep(_PAUSE_S)


def _shorten_slices(pid: int, niceness: int) -> None:
    call = _CALLS.get(platform.machine())
    if call is not None:
        size = _ATTRIBUTES.size
        wanted = _ATTRIBUTES.pack(size, os.SCHED_OTHER, _RESET_ON_FORK, niceness, 0, SLICE_NS, 0, 0, 0, 0)
        ctypes.CDLL(None).syscall(call, pid, wanted, 0)
