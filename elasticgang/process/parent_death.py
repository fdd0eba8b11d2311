"""The end of a process with the thread that has started it, by the kernel (PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # looked up here: not between a fork and an exec


def signal_at_parent_death(number: int) -> None:
    """Let this process get the signal `number` when the thread that has started it ends; 0: nothing. An exec keeps
    that, a fork does not. A parent that has ended before goes unnoticed: compare `os.getppid` afterwards."""
    _prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
