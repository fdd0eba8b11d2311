"""Notices that a process has begun to exit, before the kernel has freed its memory.

A pidfd, and a closed socket, tell of a death only after the process's memory is freed: 100 ms and more for each
gigabyte. The kernel releases a robust mutex at the beginning of the exit, whatever the process holds.

DEATH-1  A thread that lives as long as its process locks the mutex and never unlocks it. The main thread may end
    before the process does. A fork inherits no lock, and a stopped process keeps it.
DEATH-2  The watcher reads one word and waits for its change. It calls no function of glibc on the mutex, because these
    follow pointers in the shared memory: a process that overwrites its own page harms nobody else.
DEATH-3  A notice is also given when the process executes another program (exec) or overwrites its word. So whoever acts
    on a notice first kills the process; after that it runs no code.
DEATH-4  A notice may be missing: on other CPUs than `_FUTEX` lists, and while the kernel writes a core dump. The pidfd
    says when the process is gone, in any case.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable

NUM_WORDS = 8  # of 8 bytes: room for a `pthread_mutex_t`, which begins with the 4 bytes of its futex
_RECHECK_S = 10

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # the number of the system call
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_WAITERS, _OWNER_DIED, _TID = 1 << 31, 1 << 30, (1 << 30) - 1
_ROBUST = _PROCESS_SHARED = 1

_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


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


class DeathWatch:
    """Calls `on_death` once, on a thread of its own, when the process that holds the mutex in `words` begins to exit.

    The thread ends then, or with `close`. While nobody holds the mutex it waits.
    """

    def __init__(self, words: memoryview, on_death: Callable[[], None], name: str) -> None:
        self._word = ctypes.c_uint32.from_buffer(words)
        self._on_death = on_death
        self._is_closed = False
        if _FUTEX is not None:
            threading.Thread(target=self._wait, name=name, daemon=True).start()

    def close(self) -> None:
        """The process is dead, and nobody needs a notice any more."""
        self._is_closed = True
        self._word.value = _OWNER_DIED  # it may have died without the mutex
        _futex(self._word, _FUTEX_WAKE, 1)

    def _wait(self) -> None:
        """DEATH-2."""
        while not (word := self._word.value) & _OWNER_DIED:
            _futex(self._word, _FUTEX_WAIT, word)  # returns at once if the word has changed
        if not self._is_closed:
            self._on_death()


def _futex(word: ctypes.c_uint32, operation: int, value: int) -> None:
    """Returns early at any time: the caller checks the word again."""
    if _FUTEX is not None:
        timeout = _Timespec(_RECHECK_S, 0)
        _libc.syscall(
            ctypes.c_long(_FUTEX),
            ctypes.byref(word),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            ctypes.byref(timeout),
            None,
            ctypes.c_uint32(0),
        )
