"""Waits for the change of a word in shared memory, in the kernel, without the GIL.

FUTEX-1  On a CPU that `SYSTEM_CALL` does not list there is no wake-up: `wait` returns after `_POLL_S`.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import time

SYSTEM_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # its number
_WAIT, _WAKE = 0, 1
_ALL = (1 << 31) - 1
_POLL_S = 0.001

_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_available() -> bool:
    return SYSTEM_CALL is not None


def wait(word: ctypes.c_uint32, value: int, timeout_s: float) -> None:
    """Wait until `word`, which was `value`, is changed and woken; `timeout_s` seconds at most. Returns at once if it
    has changed already, and early at any time: the caller checks the word again."""
    if SYSTEM_CALL is None:  # FUTEX-1
        time.sleep(min(max(timeout_s, 0.0), _POLL_S))
        return
    nanoseconds = max(int(timeout_s * 1e9), 0)
    timeout = _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
    _call(word, _WAIT, value, ctypes.byref(timeout))


def wake(word: ctypes.c_uint32) -> None:
    """Wake all processes that wait for the change of `word`."""
    if SYSTEM_CALL is not None:
        _call(word, _WAKE, _ALL, None)


def fence() -> None:
    """Order the accesses to shared memory before this call before those after it, for every process.

    A lock that is released and taken again is a store with release and a load with acquire semantics, which no CPU
    swaps. aarch64 may otherwise let another process see a later store first.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def _call(word: ctypes.c_uint32, operation: int, value: int, timeout: object) -> None:
    _libc.syscall(
        ctypes.c_long(SYSTEM_CALL or 0),
        ctypes.byref(word),
        ctypes.c_int(operation),
        ctypes.c_uint32(value),
        timeout,
        None,
        ctypes.c_uint32(0),
    )
