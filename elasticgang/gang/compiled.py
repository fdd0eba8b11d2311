"""Drops code made by torch.compile when the rank or size of a gang has changed.

While torch traces, it reads the rank and size of a process group or mesh, and puts them into the code as constants. Its
guards do not check them: the code would go on with a wrong size, or with another rank's part.

COMPILED-1  Compiled code runs only with the ranks and sizes that it was traced with. When one of those that were read
    has changed, all compiled code is dropped between two generations; torch can only drop all of it.
COMPILED-2  If no compiled code has read the rank or size of a gang, none is dropped.
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

_read: weakref.WeakKeyDictionary[Gang, tuple[int, int] | None] = weakref.WeakKeyDictionary()  # None: closed


def note(gang: Gang) -> None:
    """Record that an object such as a mesh has copied `gang`'s rank and size, where compiled code may read them."""
    _read.setdefault(gang, (gang.rank, gang.size))


def note_if_tracing(gang: Gang) -> None:
    """COMPILED-2: record that `gang`'s rank or size is read while torch traces."""
    if is_tracing() and not _is_for_a_log():
        note(gang)


def _is_for_a_log() -> bool:
    """Whether torch's logging reads the rank, which it also does while it compiles."""
    frame = sys._getframe(2)
    for _ in range(_LOG_FRAMES):
        if frame.f_code.co_filename == logging_file():
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def end(gang: Gang) -> None:
    """`gang` is closed: code that was traced with it must not run any more."""
    if gang in _read:
        _read[gang] = None


def drop_stale() -> bool:
    """COMPILED-1, between two generations: drop all compiled code if a rank or size that it may have read has changed.
    Returns whether it was dropped."""
    changed = {gang: old for gang, old in list(_read.items()) if old is None or (gang.rank, gang.size) != old}
    if not changed:
        return False
    _read.clear()
    if "torch._dynamo" not in sys.modules:
        return False
    torch.compiler.reset()
    names = sorted(map(repr, changed))
    log.debug("dropping all compiled code, because these gangs have changed: %s", ", ".join(names))
    return True
