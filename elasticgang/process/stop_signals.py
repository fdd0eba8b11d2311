"""SIGINT, SIGTERM and SIGHUP of a long-running command, and of the processes that it starts.

STOP-HELD  They stay pending from before the imports of a long-running command until its event loop handles them.
           Python raises KeyboardInterrupt wherever it is. In a callback of a weak reference, of which every import has
           one, it prints the exception and forgets it: the command would run on.
STOP-LATE  Once the command's exit code is known, they change nothing. An event loop that closes would restore their
           defaults, and leave behind what the command still waits for.
STOP-HUP   SIGHUP comes when the terminal or the login is gone. It is handled as the others are, so that an agent ends
           in order, unless it was ignored when the command was started, as by `nohup`.
STOP-ALL   Processes that serve a rank or an agent ignore them: each ends with its owner, which may need it to leave in
           order. A service manager that stops a service sends SIGTERM to every process. Where code of the user runs, a
           handler that does nothing ignores them: what it starts has the defaults again.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


def ignore_stop_signals() -> None:
    """STOP-ALL. In a process that its owner ends."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def ignore_stop_signals_here() -> None:
    """STOP-ALL. Likewise, but the programs that this process executes, and its forked children, do not ignore them."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _do_nothing)
            signal.siginterrupt(number, False)
    os.register_at_fork(after_in_child=functools.partial(forget_handler, _do_nothing))


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler."""


def forget_handler(handler: Callable[[int, FrameType | None], object]) -> None:
    """In a forked child: what `handler` handles has its default again."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == handler:
            signal.signal(number, signal.SIG_DFL)


def hold_stop_signals() -> None:
    """STOP-HELD. A process that is started meanwhile holds them too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def handle_stop_signals(handle: Callable[[int], object]) -> None:
    """From now on call `handle` with each, between two instructions of the first thread. Those that came meanwhile are
    delivered now."""
    for number in signals_to_handle():
        signal.signal(number, lambda number, _: handle(number))
    release_stop_signals()


def signals_to_handle() -> list[signal.Signals]:
    """STOP-HUP"""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def release_stop_signals() -> None:
    """Those that came meanwhile are delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
