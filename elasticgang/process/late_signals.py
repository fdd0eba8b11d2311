"""Waits of the thread that runs Python's signal handlers, which is a process's first one.

SIGNAL-LATE  A signal does not interrupt a wait if it arrives after Python's last look for one and before the wait
    begins in the kernel, or if another thread takes it. Its handler runs once the wait ends. So no such wait is longer
    than `LONGEST_WAIT_S`; the waiter waits again.
"""

from __future__ import annotations

LONGEST_WAIT_S = 0.1
