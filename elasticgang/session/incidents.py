"""Counts and logs why connections of peers were closed.

INCIDENT-ONCE  A reason is logged once for each host and reason, and counted. At most `_MAX_INCIDENTS` pairs are
               kept; further ones share one entry.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

_MAX_INCIDENTS = 1024


class Incidents:
    """INCIDENT-ONCE"""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._lock = threading.Lock()  # connections have threads of their own
        self.counts: Counter[tuple[str, str]] = Counter()

    def note(self, host: str, reason: str) -> None:
        key = (host, reason)
        with self._lock:
            if key not in self.counts and len(self.counts) >= _MAX_INCIDENTS:
                key = ("other hosts", "more of the same")
            self.counts[key] += 1
            is_first = self.counts[key] == 1
        if is_first:
            self._log(f"closed a connection from {key[0]}: {key[1]}")
