"""Memory that a rank process and its comm process both see.

A block is a memfd of its own (not `/dev/shm`, which is 64 MB in a default container), of a power of two of bytes and
reused: its descriptor travels once to each comm process, later messages name its id.

M1  A block is free, or belongs to exactly one pending work, or was lent for good by `empty`.
M2  A block that a killed comm process could still write to is not reused: the owner frees blocks only after the kill
    was waited for.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

_SMALLEST_BYTES = 4096


@dataclass(eq=False)
class Block:
    """`bytes`: the whole block as a uint8 tensor. `fd` stays open as long as the arena."""

    id: int
    fd: int
    size: int
    bytes: Tensor = field(repr=False)

    def as_tensor(self, like: Tensor) -> Tensor:
        """The start of the block as a contiguous tensor of the shape and dtype of `like`."""
        return self.bytes[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def map_block(id: int, fd: int, size: int) -> Block:
    memory = mmap.mmap(fd, size)
    return Block(id, fd, size, torch.frombuffer(memory, dtype=torch.uint8))


class Arena:
    """The rank's side: allocates blocks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Block]] = defaultdict(list)
        self._next_id = 0

    def take(self, num_bytes: int) -> Block:
        size = _SMALLEST_BYTES
        while size < num_bytes:
            size *= 2
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
            self._next_id += 1
            id = self._next_id
        fd = os.memfd_create(f"elasticgang-{id}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return map_block(id, fd, size)

    def give_back(self, block: Block) -> None:
        with self._lock:
            self._free[block.size].append(block)
