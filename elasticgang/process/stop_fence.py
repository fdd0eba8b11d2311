"""Ends what a process does at once, and leaves its end for later.

When a process is killed, the kernel frees its memory: 3 ms of a core for one that has imported torch. A stopped process
costs nothing, and runs no code either, until it is continued or killed.

STOP-1  A process is halted once each of its threads is stopped and has the signal `_END` pending. A stopped thread is
    in no other system call. Should anything continue the process, each thread takes its pending signal before its next
    instruction, and this ends the process. So it runs no code any more, whatever signals come.
STOP-2  A process is not halted if a thread refuses `_END`: one that is being started blocks all signals. Nor is it if a
    debugger has stopped it. It is killed instead.
STOP-3  A process is halted only by its own number: where /proc shows the numbers of another namespace, it is not.
STOP-4  A halted process is killed by whoever has halted it. It does not notice the end of the process that it belongs
    to: the kernel must kill it with its parent, or its process group must be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import select
import signal

from elasticgang.process.death_watch import Pauses, fields_of, has_begun_to_exit, of_all_threads, pid_of

_TGKILL = {"x86_64": 234, "aarch64": 131}.get(platform.machine())  # the system call's number; glibc has it from 2.30 on
_END = signal.SIGVTALRM
_BIT = 1 << (_END - 1)

_STATE = 0
_PENDING, _BLOCKED, _IGNORED, _CAUGHT = 28, 29, 30, 31  # fields of /proc/PID/task/TID/stat behind the name
_STOPPED, _DEAD = b"T", (b"Z", b"X")

_libc = ctypes.CDLL(None)


def halt(pid: int, pidfd: int, timeout: float) -> bool:
    """Wait until a process that was sent SIGSTOP is halted (STOP-1) or gone, for at most `timeout` seconds. False: it
    may still write to shared memory; kill it."""
    try:
        if _TGKILL is None or pid_of(pidfd) != pid:  # STOP-3
            return False
    except OSError:  # it is reaped, or its number cannot be read
        return False
    pauses = Pauses(timeout)  # only the parent of a process is told that it has stopped
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    armed: set[int] = set()

    def arm(thread: int, fields: list[bytes]) -> bool:
        """Send the signal to a thread that is stopped."""
        if fields[_STATE] == _STOPPED and thread not in armed:
            _send(pid, thread)
            armed.add(thread)
        return fields[_STATE] in (_STOPPED, *_DEAD)

    def is_armed(thread: int, fields: list[bytes]) -> bool:
        """STOP-1, STOP-2. What counts is this look at the thread, after the signal: it may have run before."""
        refused = int(fields[_BLOCKED]) | int(fields[_IGNORED]) | int(fields[_CAUGHT])
        is_pending = thread in armed and bool(int(fields[_PENDING]) & _BIT & ~refused)
        return fields[_STATE] in _DEAD or (fields[_STATE] == _STOPPED and is_pending)

    while not poll.poll(0):
        with contextlib.suppress(OSError):  # the process or a thread has ended meanwhile: look again
            if of_all_threads(pid, arm):
                return of_all_threads(pid, is_armed)
        if not pauses.sleep():
            return False
    return True


def is_halted(pid: int) -> bool:
    """Whether the main thread of a process is halted. Raises OSError: it is gone."""
    fields = fields_of(f"/proc/{pid}/task/{pid}")
    return fields[_STATE] == _STOPPED and bool(int(fields[_PENDING]) & _BIT)


def is_over(pid: int) -> bool:
    """Whether a process runs no code any more: it is halted, or exits, or is gone."""
    try:
        is_pending = bool(int(fields_of(f"/proc/{pid}/task/{pid}")[_PENDING]) & _BIT)
    except OSError:
        return True
    return is_pending or has_begun_to_exit(pid)


def _send(pid: int, thread: int) -> None:
    _libc.syscall(ctypes.c_long(_TGKILL or 0), ctypes.c_int(pid), ctypes.c_int(thread), ctypes.c_int(_END))
