"""Notices that a process has begun to exit, before the kernel has freed its memory.

A pidfd, and a closed socket, tell of a death only after the process's memory is freed: 100 ms and more for each
gigabyte. The kernel releases a robust mutex at the beginning of the exit, whatever the process holds.

DEATH-1  A thread that lives as long as its process locks the mutex and never unlocks it. The main thread may end
    before the process does. A fork inherits no lock, and a stopped process keeps it.
DEATH-2  The watcher reads one word and waits for its change. It calls no function of glibc on the mutex, because these
    follow pointers in the shared memory: a process that overwrites its own page harms nobody else.
DEATH-3  A notice is also given when the process executes another program (exec) or overwrites its word. So whoever acts
    on a notice first kills the process; after that it runs no code.
DEATH-4  A notice may be missing: on a CPU without wake-ups (FUTEX-1), and while the kernel writes a core dump. The
    pidfd says when the process is gone, in any case.
DEATH-5  A killed process writes to no shared memory any more, but for its mutex here, once each of its threads has the
    kernel's flag PF_EXITING. A thread sets it at the beginning of its exit, after its last instruction and its last
    system call, and a killed process starts no thread. This says nothing of a device that works for the process.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from collections.abc import Callable

from elasticgang.process import futex
from elasticgang.process.priority import raise_priority

NUM_WORDS = 8  # of 8 bytes: room for a `pthread_mutex_t`, which begins with the 4 bytes of its futex
_RECHECK_S = 10
_FIRST_POLL_S, _POLL_S = 0.0001, 0.001

_WAITERS, _OWNER_DIED, _TID = 1 << 31, 1 << 30, (1 << 30) - 1
_ROBUST = _PROCESS_SHARED = 1

_PF_EXITING = 4
_FLAGS, _NUM_THREADS = 6, 17  # fields of /proc/PID/stat behind the name
_MAX_STAT = 4096  # bytes

_libc = ctypes.CDLL(None)


def hold(words: memoryview) -> None:
    """Lock the mutex in `words`, which are zero, for the rest of the calling thread's life (DEATH-1).

    Raises OSError: the C library cannot. Without the lock there is no notice (DEATH-4).
    """
    attributes = ctypes.create_string_buffer(64)
    mutex = (ctypes.c_char * (NUM_WORDS * 8)).from_buffer(words)
    for error in (
        _libc.pthread_mutexattr_init(attributes),
        _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED),
        _libc.pthread_mutexattr_setrobust(attributes, _ROBUST),
        _libc.pthread_mutex_init(mutex, attributes),
        _libc.pthread_mutex_lock(mutex),
    ):
        if error:
            raise OSError(error, os.strerror(error))
    word = ctypes.c_uint32.from_buffer(mutex)
    if word.value & _TID == threading.get_native_id():
        word.value |= _WAITERS  # otherwise the kernel wakes nobody


def has_begun_to_exit(pid: int) -> bool:
    """Whether the process exits or is gone. The kernel sets its flag before it closes a descriptor of the process or
    releases its memory, on the host or on a device. `pid` must not be of another process yet."""
    try:
        return bool(int(fields_of(f"/proc/{pid}")[_FLAGS]) & _PF_EXITING)
    except OSError:
        return True


def wait_writes_nothing(pidfd: int, timeout: float) -> bool:
    """Wait until a process that was killed by SIGKILL writes to no shared memory any more (DEATH-5), for at most
    `timeout` seconds. The kernel frees its own memory later. False: the process may still write."""
    pauses = Pauses(timeout)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    while not (poll.poll(0) or _only_exits(pidfd)):
        if not pauses.sleep():
            return False
    return True


class Pauses:
    """Between looks at the threads of another process, for whose exit or stop there is no event. It takes 0.2 ms where
    a core is free: the first pauses are short."""

    def __init__(self, timeout: float) -> None:
        self._deadline_s = time.monotonic() + timeout
        self._next_s = _FIRST_POLL_S

    def sleep(self) -> bool:
        """False: the time is over."""
        if time.monotonic() >= self._deadline_s:
            return False
        time.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, _POLL_S)
        return True


def _only_exits(pidfd: int) -> bool:
    """Whether all threads of the process exit. False if this cannot be read."""
    try:
        return of_all_threads(pid_of(pidfd), lambda _, fields: bool(int(fields[_FLAGS]) & _PF_EXITING))
    except OSError:
        return False


def pid_of(pidfd: int) -> int:
    """The process's number in this /proc. Raises OSError: it has none, or is reaped."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        pid = next((int(line.split()[1]) for line in file if line.startswith("Pid:")), -1)
    if pid <= 0:
        raise ProcessLookupError(f"no process has the descriptor {pidfd}")
    return pid


def of_all_threads(pid: int, holds: Callable[[int, list[bytes]], bool]) -> bool:
    """Whether something holds of each thread of a process: by its number, and its fields of `stat` behind the name.
    Raises OSError: the process or a thread is gone."""
    threads = os.listdir(f"/proc/{pid}/task")  # may leave some out while others end
    for thread in threads:
        fields = fields_of(f"/proc/{pid}/task/{thread}")
        if int(fields[_NUM_THREADS]) != len(threads) or not holds(int(thread), fields):
            return False
    return True


def fields_of(directory: str) -> list[bytes]:
    """The fields of `stat` of a process or a thread, behind the name of the command. Raises OSError."""
    file = os.open(f"{directory}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _MAX_STAT).rpartition(b")")[2].split()
    finally:
        os.close(file)


class DeathWatch:
    """Calls `on_death` once, on a thread of its own, when the process that holds the mutex in `words` begins to exit.

    The thread ends then, or with `close`. While nobody holds the mutex it waits.
    """

    def __init__(self, words: memoryview, on_death: Callable[[], None], name: str) -> None:
        self._word = ctypes.c_uint32.from_buffer(words)
        self._on_death = on_death
        self._is_closed = False
        if futex.is_available():
            threading.Thread(target=self._wait, name=name, daemon=True).start()

    def close(self) -> None:
        """The process is dead, and nobody needs a notice any more."""
        self._is_closed = True
        self._word.value = _OWNER_DIED  # it may have died without the mutex
        futex.wake(self._word)

    def _wait(self) -> None:
        """DEATH-2."""
        raise_priority()  # the agent's loop waits for this thread
        while not (word := self._word.value) & _OWNER_DIED:
            futex.wait(self._word, word, _RECHECK_S)  # returns at once if the word has changed
        if not self._is_closed:
            self._on_death()
