"""Fills the free blocks in a process's memory, so that its forks copy fewer pages.

Python puts a new object into a free block of a page that is in use already. What the imports have freed lies scattered
over the pages that all forks share, and a fork copies each page to which it writes. Without free blocks, its objects
lie side by side. A rank of a small job then has 19 MB of its own in place of 23, a coordinator 9 in place of 11.
"""

from __future__ import annotations

from itertools import pairwise, repeat
from typing import Any

_SIZES = range(16, 513, 16)  # of the blocks: larger objects come from malloc
_POOL_BYTES = 16384 - 48  # of blocks of one size, side by side: less its header
_BYTES_HEADER = 33
_MAX_BATCHES = 256  # of a size, where the blocks come from another allocator


def fill_free_blocks() -> list[Any]:
    """Allocate small objects of all sizes until they lie side by side. They fill the blocks as long as the caller keeps
    them. After the imports of a rank they take 2 MB."""
    kept: list[Any] = []
    for size in _SIZES:
        num = _POOL_BYTES // size
        for _ in range(_MAX_BATCHES):
            kept.append(batch := _make(size, 4 * num))
            if _longest_run(batch, size) >= num - 1:
                break
    return kept


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
