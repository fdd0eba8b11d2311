"""Counts and logs why connections of peers were closed.

INCIDENT-ONCE  A reason is logged once for each host and reason, and counted. At most `_MAX_INCIDENTS` pairs are
               kept; further ones share one entry. Then those that were first noted `FORGET_S` ago make room: a job of
               weeks still tells of new ones, and whoever has many addresses fills no log.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable

FORGET_S = 3600.0
_MAX_INCIDENTS = 1024


class Incidents:
    """INCIDENT-ONCE. `clock`: seconds."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()  # connections have threads of their own
        self._noted_s: dict[tuple[str, str], float] = {}  # when first, the oldest first
        self.counts: Counter[tuple[str, str]] = Counter()

    def note(self, host: str, reason: str) -> None:
        key = (host, reason)
        with self._lock:
            if key not in self.counts and len(self.counts) >= _MAX_INCIDENTS and not self._forget():
                key = ("other hosts", "more of the same")
            self.counts[key] += 1
            is_first = self.counts[key] == 1
            if is_first:
                self._noted_s[key] = self._clock()
        if is_first:
            self._log(f"closed a connection from {key[0]}: {key[1]}")

    def _forget(self) -> bool:
        """Whether there is room for a further pair."""
        until_s = self._clock() - FORGET_S
        for key in list(itertools.takewhile(lambda key: self._noted_s[key] <= until_s, self._noted_s)):
            del self._noted_s[key], self.counts[key]
        return len(self.counts) < _MAX_INCIDENTS
