"""SIGINT and SIGTERM while a process starts.

STOP-HELD  They stay pending from before the imports of a long-running command until its event loop handles them.
           Python raises KeyboardInterrupt wherever it is. In a callback of a weak reference, of which every import has
           one, it prints the exception and forgets it: the command would run on.
"""

from __future__ import annotations

import signal

STOP_SIGNALS = frozenset((signal.SIGINT, signal.SIGTERM))


def hold_stop_signals() -> None:
    """STOP-HELD. A process that is started meanwhile holds them too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def release_stop_signals() -> None:
    """Those that came meanwhile are delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
