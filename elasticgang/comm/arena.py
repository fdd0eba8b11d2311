"""Memory that a rank process and its comm process both see.

A block is a memfd of its own (not `/dev/shm`, which is 64 MB in a default container), and reused: its descriptor
travels once to each comm process, later messages name its id. Small and strided tensors are copied through blocks; a
block can also be mapped beneath a large tensor (`shared.py`).

M1  A block is free, belongs to exactly one pending work, or lies beneath one storage.
M2  A block that a killed comm process could still write to is not reused: the owner frees blocks only after the kill
    was waited for.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_MAX_ODD_BYTES = 1 << 29
_arenas = itertools.count()


@dataclass(eq=False)
class Block:
    """`bytes`: the whole block as a uint8 tensor. `fd`: of the rank's side, open as long as the block is. `path`: what
    the kernel calls a mapping of it, and of nothing else."""

    id: int
    size: int
    bytes: Tensor = field(repr=False)
    fd: int = -1
    path: str = ""
    _views: dict[tuple[int, torch.Size, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    def close(self) -> None:
        """Close the descriptor. The pages are free once nobody has them mapped."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def as_tensor(self, shape: torch.Size, dtype: torch.dtype, offset: int = 0) -> Tensor:
        """The block from byte `offset` on as a contiguous tensor."""
        key = (offset, shape, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 16:
                self._views.clear()
            view = self._views[key] = bytes_as(self.bytes, shape, dtype, offset)
        return view


def bytes_as(memory: Tensor, shape: torch.Size, dtype: torch.dtype, offset: int) -> Tensor:
    """`memory` (uint8) from `offset` on as a contiguous tensor; a copy where `offset` does not suit the dtype."""
    num_bytes = shape.numel() * dtype.itemsize
    return memory[offset : offset + num_bytes].view(dtype).view(shape)


def map_block(id: int, fd: int, size: int) -> Block:
    """The block of a memfd, which the caller may close."""
    memory = mmap.mmap(fd, size)
    return Block(id, size, torch.frombuffer(memory, dtype=torch.uint8))


class Arena:
    """The rank's side: allocates blocks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = next(_arenas)
        self._free: dict[int, list[Block]] = defaultdict(list)
        self._next_id = 0
        self._odd_bytes = 0
        self.discarded: list[int] = []  # ids of blocks that are no more, in order: comm processes unmap them

    def take(self, num_bytes: int) -> Block:
        """A block of at least so many bytes: of a power of two, so that few sizes are kept."""
        return self.take_exactly(max(PAGE, 1 << (num_bytes - 1).bit_length()))

    def take_exactly(self, size: int) -> Block:
        with self._lock:
            free = self._free[size]
            if free:
                self._odd_bytes -= _is_odd(size) * size
                return free.pop()
            self._next_id += 1
            id = self._next_id
        name = f"elasticgang-{os.getpid()}-{self._number}-{id}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        block = map_block(id, fd, size)
        block.fd, block.path = fd, f"/memfd:{name} (deleted)"
        return block

    def give_back(self, block: Block) -> None:
        """The block may be taken again. Of those whose size is no power of two few bytes are kept."""
        with self._lock:
            if not _is_odd(block.size):
                self._free[block.size].append(block)
            elif self._odd_bytes + block.size <= _MAX_ODD_BYTES:
                self._odd_bytes += block.size
                self._free[block.size].append(block)
            else:
                self.discarded.append(block.id)
                block.close()


def _is_odd(size: int) -> bool:
    return bool(size & (size - 1))
