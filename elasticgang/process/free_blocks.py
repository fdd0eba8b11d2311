"""Fills the free blocks in a process's memory, so that its forks copy fewer pages.

Python and malloc put something new into a free block of a page that is in use already. What the imports have freed lies
scattered over the pages that all forks share, and a fork copies each page to which it writes. Without free blocks, what
a fork allocates lies side by side. A rank of a small job then has 5 MB less of its own, a coordinator 1.6.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise, repeat
from typing import Any

_SIZES = range(16, 513, 16)  # of the blocks: larger objects come from malloc
_POOL_BYTES = 16384 - 48  # of blocks of one size, side by side: less its header
_BYTES_HEADER = 33
_MAX_BATCHES = 16  # of a size, 64 kB each; the imports of a rank need 4. Blocks of another allocator never lie so
# Bytes for malloc, a chunk's header not included, the largest first: it may cut a chunk of one size from a larger one.
_CHUNK_SIZES = (*(1 << power for power in range(16, 10, -1)), *range(1016, 23, -16))


def fill_free_blocks() -> list[Any]:
    """Allocate small objects of all sizes until they lie side by side. They fill the blocks as long as the caller keeps
    them. After the imports of a rank they take 2 MB. The chunks of malloc are filled for ever."""
    _fill_chunks()
    kept: list[Any] = []
    for size in _SIZES:
        num = _POOL_BYTES // size
        for _ in range(_MAX_BATCHES):
            kept.append(batch := _make(size, 4 * num))
            if _longest_run(batch, size) >= num - 1:
                break
    return kept


class _Usage(ctypes.Structure):
    """`struct mallinfo2` of glibc: `fordblks` bytes are free, `keepcost` of them at the end of the heap."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


def _fill_chunks() -> None:
    """Allocate what is free below the end of the heap. It writes to no page of it, but for the headers of chunks."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):  # not glibc, or one before 2.33
        return
    libc.mallinfo2.restype = _Usage
    for function in (libc.malloc, libc.sbrk):
        function.restype = ctypes.c_size_t
    libc.malloc.argtypes = libc.free.argtypes = (ctypes.c_size_t,)
    usage = libc.mallinfo2()
    end, free = libc.sbrk(0) - usage.keepcost, usage.fordblks
    for size in _CHUNK_SIZES:
        while free > 0:  # also if another malloc is in the place of glibc's
            chunk = libc.malloc(size)
            if chunk >= end:  # none of that size is left
                libc.free(chunk)
                break
            free -= size


def _make(size: int, num: int) -> list[Any]:
    """Nothing else may be allocated between two of them, such as the numbers of a range."""
    if size == 16:
        return [object() for _ in repeat(None, num)]
    if size == 32:
        value = 1.5
        return [value * 3.0 for _ in repeat(None, num)]
    length = size - _BYTES_HEADER
    return [bytes(length) for _ in repeat(None, num)]


def _longest_run(batch: list[Any], size: int) -> int:
    longest = run = 0
    for before, after in pairwise(map(id, batch)):
        run = run + 1 if after - before == size else 0
        longest = max(longest, run)
    return longest
