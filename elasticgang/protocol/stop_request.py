"""Signals that ask a rank or an agent to leave in order. Pure.

REPEAT-1  Those that follow the first one within `REPEATED_S` count as the same request. A service manager that stops a
    service, a machine that shuts down, and some batch systems send SIGTERM to every process, and SIGHUP too: a rank
    then gets it from there and from its agent. A later one demands an end at once.
"""

from __future__ import annotations

REPEATED_S = 1.0


def is_repeated(since_s: float) -> bool:
    """REPEAT-1. `since_s`: the seconds since the first one."""
    return since_s < REPEATED_S
