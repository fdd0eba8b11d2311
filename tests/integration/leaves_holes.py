"""What a fork server imports in a test: it leaves free blocks of all sizes, each between two that are in use."""

from __future__ import annotations

import json
import os
from itertools import pairwise, repeat
from typing import Any

_LENGTHS = {size: size - 33 for size in range(48, 513, 16)}  # of bytes objects of that size

_CHUNKS = (600, 900, 3000)  # bytes of each for malloc

_kept = [bytes(length) for length in (*_LENGTHS.values(), *_CHUNKS) for _ in repeat(None, 2000)]
del _kept[::2]


def neighbours(args: dict[str, Any], fds: list[int]) -> int:
    """Writes to the first of `fds`, by size, how many of 100 new objects lie beside the one before."""
    found = {}
    for size, length in _LENGTHS.items():
        made = [bytes(length) for _ in repeat(None, 101)]
        found[size] = sum(after - before == size for before, after in pairwise(map(id, made)))
    for length in _CHUNKS:
        made = [bytes(length - 33) for _ in repeat(None, 101)]
        found[length] = sum(after - before < length + 32 for before, after in pairwise(map(id, made)) if after > before)
    os.write(fds[0], json.dumps(found).encode())
    return 0
