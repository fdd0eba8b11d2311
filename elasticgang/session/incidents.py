"""Counts and logs rejected connections.

INCIDENT-ONCE  A rejection is logged once for each host and reason, and counted. At most `_MAX_INCIDENTS` pairs are
               kept; further ones share one entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

_MAX_INCIDENTS = 1024


class Incidents:
    """INCIDENT-ONCE"""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self.counts: Counter[tuple[str, str]] = Counter()

    def note(self, host: str, reason: str) -> None:
        key = (host, reason)
        if key not in self.counts and len(self.counts) >= _MAX_INCIDENTS:
            key = ("other hosts", "more of the same")
        self.counts[key] += 1
        if self.counts[key] == 1:
            self._log(f"rejected a connection from {key[0]}: {key[1]}")
