"""A rank that drains: after SIGTERM, SIGHUP or `manager.leave()`, it leaves at a step boundary (MANAGER-10).

DRAIN-1  The agent reads on the status page that the rank drains, and does not restart it, however it exits.
DRAIN-2  A forked child has no part in that: such a signal ends it. One that comes before the child has forgotten the
    handler is held until then: Python drops it otherwise, and who waits for the child waits for ever.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from elasticgang.process.status_page import StatusPage
from elasticgang.process.stop_signals import forget_handler
from elasticgang.protocol.stop_request import is_repeated

_HANDLED = {signal.SIGTERM, signal.SIGHUP}


class Drain:
    """Signal handlers and any thread may call `request`. All else is for the training thread.

    `requested`: the rank leaves at a step boundary. `by_signal`: its process then exits too.
    """

    def __init__(self, page: StatusPage) -> None:
        self.requested = self.by_signal = False
        self.in_loop = False
        self.wake: Callable[[], None] = lambda: None
        self.page = page
        self._held = threading.local()
        self._signalled_s = 0.0

    def request(self) -> None:
        self.page.mark_draining()
        self.requested = True
        self.wake()

    # -- signals

    def install(self) -> None:
        """Handle SIGTERM in this process, which is the rank itself, and not in its forked children; and SIGHUP, unless
        it is ignored (STOP-HUP)."""
        signal.signal(signal.SIGTERM, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_signal)
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._forget)

    def _hold(self) -> None:
        """DRAIN-2"""
        self._held.numbers = _HANDLED - signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._held.numbers)

    def _forget(self) -> None:
        forget_handler(self._on_signal)
        self._release()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.by_signal and not self.page.job_ending and is_repeated(time.monotonic() - self._signalled_s):
            return
        # The agent forwards the end of the job, or this is the second SIGTERM.
        if self.page.job_ending or self.by_signal:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.by_signal, self._signalled_s = True, time.monotonic()
        self.request()
        if not self.in_loop:
            raise SystemExit(0)
