"""The calls of a signal's handler, which interrupts another call of the same thread at any point.

REENTRY-1  A thread that starts a collective, allocates shared memory or processes a message may hold a lock, and what
    the lock guards is half-changed. A handler's collective would wait for its own thread: it gets InvalidOperationError
    at once. A thread that only waits holds no such lock.
REENTRY-2  The mark is set inside the `try` whose `finally` removes it, each by one assignment: no handler that raises
    leaves it behind.
"""

from __future__ import annotations

import threading

from elasticgang.errors import InvalidOperationError


class _Here(threading.local):
    is_inside = False


here = _Here()


def check_reentry() -> None:
    """Raises InvalidOperationError: this is a signal's handler, and its thread is where REENTRY-1 says."""
    if here.is_inside:
        raise InvalidOperationError(
            "a signal's handler interrupted another call of a process group, and cannot call one itself; let it set a "
            "flag, and act on the flag after the call"
        )
