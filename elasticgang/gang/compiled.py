"""When code that torch.compile made must be made anew, because a gang has another rank or size.

torch reads the rank and size of a process group, or of a mesh, when it traces, and puts them into the code as
constants. Its guards do not look at them again: the code would go on with a wrong size, or with another rank's part.

COMPILED-1  Compiled code runs only with the ranks and sizes that it was traced with: when one of those that were read
    has changed, all compiled code is dropped, between two generations. torch can drop it only as a whole.
COMPILED-2  Code that has read no gang's rank or size is not dropped, as long as no other has.
"""

from __future__ import annotations

import logging
import sys
import weakref

import torch

from elasticgang.gang.base import Gang
from elasticgang.torch_private import is_tracing, logging_file

_LOG_FRAMES = 4  # from the group's method over `torch.distributed.get_rank` to the log

log = logging.getLogger("elasticgang")

_read: weakref.WeakKeyDictionary[Gang, tuple[int, int] | None] = weakref.WeakKeyDictionary()  # None: it has ended


def note(gang: Gang) -> None:
    """Something keeps `gang`'s rank and size that compiled code may read instead, as a mesh does."""
    _read.setdefault(gang, (gang.rank, gang.size))


def note_if_tracing(gang: Gang) -> None:
    """Code may be compiled at this moment, with the rank or size that is asked for."""
    if is_tracing() and not _is_for_a_log():
        note(gang)


def _is_for_a_log() -> bool:
    """Torch's logs name the default group's rank, also while it compiles."""
    frame = sys._getframe(2)
    for _ in range(_LOG_FRAMES):
        if frame.f_code.co_filename == logging_file():
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def end(gang: Gang) -> None:
    """`gang` ends: code that was traced with it cannot run any more."""
    if gang in _read:
        _read[gang] = None


def drop_stale() -> bool:
    """Between two generations: drop all compiled code when a rank or size that it may have read has changed. Whether
    it was dropped."""
    changed = {gang: seen for gang, seen in list(_read.items()) if seen is None or (gang.rank, gang.size) != seen}
    if not changed:
        return False
    _read.clear()
    if "torch._dynamo" not in sys.modules:
        return False
    torch.compiler.reset()
    names = sorted(map(repr, changed))
    log.debug("compiled code is dropped and compiled anew: its gangs have changed: %s", ", ".join(names))
    return True
