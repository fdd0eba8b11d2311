"""A rank that drains: after SIGTERM or `manager.leave()`, it leaves at a step boundary (MANAGER-10).

DRAIN-1  The agent reads on the status page that the rank drains, and does not restart it, however it exits.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from elasticgang.process.status_page import StatusPage


class Drain:
    """Signal handlers and any thread may call `request`. All else is for the training thread.

    `requested`: the rank leaves at a step boundary. `by_signal`: its process then exits too.
    """

    def __init__(self, page: StatusPage) -> None:
        self.requested = self.by_signal = False
        self.in_loop = False
        self.wake: Callable[[], None] = lambda: None
        self.page = page

    def request(self) -> None:
        self.page.mark_draining()
        self.requested = True
        self.wake()

    # -- SIGTERM

    def install(self) -> None:
        """Handle SIGTERM in this process, which is the rank itself, and not in its forked children."""
        signal.signal(signal.SIGTERM, self._on_signal)
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The agent forwards the end of the job, or this is the second SIGTERM.
        if self.page.job_ending or self.by_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.by_signal = True
        self.request()
        if not self.in_loop:
            raise SystemExit(0)
