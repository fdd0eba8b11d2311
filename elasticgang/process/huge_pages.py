"""Moves a process's memory to huge pages, so that its forks start and exit in a third of the time.

A fork copies a page table entry for each page, and an exit frees one: 40,000 of 4 kB with torch imported.

HUGE-1  The kernel takes half a second to move what `import torch` allocates. A second thread moves it while the imports
    go on. It is gone before the process forks: not only joined, but exited.
HUGE-2  The kernel moves `_PIECE_BYTES` in one call, which nothing interrupts. The thread ends after such a piece: on a
    busy machine all of the memory takes many seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator

_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1
_PIECE_BYTES = 64 << 20
_EVERY_S = 0.1
_EXIT_S = 60.0


@contextlib.contextmanager
def collapsing() -> Iterator[None]:
    """Move the memory that the body allocates. Raises RuntimeError: the thread that does it does not end."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(_EVERY_S):
            collapse(ended.is_set)

    thread = threading.Thread(target=repeat, name="huge-pages")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        _wait_exited(thread)
    collapse()


def _wait_exited(thread: threading.Thread) -> None:
    """HUGE-1. A thread that is joined has left Python; it runs for another moment."""
    deadline_s = time.monotonic() + _EXIT_S
    thread.join(_EXIT_S)
    while str(thread.native_id) in os.listdir("/proc/self/task"):
        if time.monotonic() > deadline_s:
            raise RuntimeError("the thread that moves the memory to huge pages does not end")
        time.sleep(0.001)


def collapse(is_over: Callable[[], bool] = lambda: False) -> None:
    """Move all anonymous memory that fills huge pages, or what comes before `is_over` returns True. Where the kernel
    cannot, it stays as it is."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in _anonymous():
        begin, end = -(-begin // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
        for piece in range(begin, end, _PIECE_BYTES):
            if is_over():  # HUGE-2
                return
            madvise(piece, min(_PIECE_BYTES, end - piece), _MADV_COLLAPSE)


def _anonymous() -> Iterator[tuple[int, int]]:
    """The private, writable mappings without a file, but not the stack."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            addresses, mode, _, _, _, *name = line.split(maxsplit=5)
            if mode == "rw-p" and (not name or name[0].strip() == "[heap]" or name[0].startswith("[anon:")):
                begin, end = (int(address, 16) for address in addresses.split("-"))
                found.append((begin, end))
    yield from found
