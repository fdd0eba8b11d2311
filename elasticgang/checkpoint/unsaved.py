"""What a rank says of saves that fail.

UNSAVED-1  While saves fail for one reason, a line tells of the 1st, 2nd, 4th, 8th of them and so on. Once one succeeds,
    a line says how many had failed. Those that were left out because an earlier one was under way are counted for as
    long as the rank runs: on a slow disk every other one succeeds.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

from elasticgang.protocol.shortened import has_line

log = logging.getLogger("elasticgang")


class UnsavedSteps:
    """Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: Counter[str] = Counter()  # by reason
        self._num_left_out = 0

    def failed(self, step: int, why: str, reason: str = "") -> None:
        """`reason`: what is equal in each `why` of this kind; by default `why`."""
        with self._lock:
            self._failed[reason or why] += 1
            number = self._failed[reason or why]
        _tell(step, why, number)

    def left_out(self, step: int, why: str) -> None:
        """An earlier save was under way."""
        with self._lock:
            self._num_left_out += 1
            number = self._num_left_out
        _tell(step, why, number)

    def succeeded(self, step: int) -> None:
        with self._lock:
            number = sum(self._failed.values())
            self._failed.clear()
        if number > 1:
            log.warning("step %d is saved again; %d were not before it", step, number)


def _tell(step: int, why: str, number: int) -> None:
    if has_line(number):  # UNSAVED-1
        log.warning("step %d is not saved%s: %s", step, f" ({number} so far)" if number > 1 else "", why)
