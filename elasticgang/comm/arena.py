"""Memory that a rank process and its comm process share.

A slab is a memfd (not `/dev/shm`, which is 64 MB in a default container). Its descriptor is sent once to each comm
process; later messages name its id. Blocks are parts of slabs, and are reused. Small and strided tensors are copied
through blocks; a slab of one block can also be the memory of a large tensor (`storage_mapping.py`).

ARENA-1  A block is free, belongs to exactly one pending work, or is the memory of one storage.
ARENA-2  A block that a killed comm process could still write to is not reused: the owner frees blocks only when the
    process writes to none any more (DEATH-5).
ARENA-3  The arena uses few descriptors and keeps little free memory: blocks of up to 16 MiB share slabs of 64 blocks,
    but of at least 1 and at most 64 MiB. The kernel allocates pages on the first write.
"""

from __future__ import annotations

import itertools
import mmap
import os
import resource
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_SMALLEST_BLOCK = 256
_LARGEST_IN_SLAB = 1 << 24
_SMALLEST_SLAB, _LARGEST_SLAB = 1 << 20, 1 << 26
_BLOCKS_IN_SLAB = 64
_MAX_FREE_BYTES = 1 << 29
_IDLE_SHARE = 8  # at most one descriptor in so many belongs to a slab without a taken block
_arenas = itertools.count()


@dataclass(eq=False)
class Slab:
    """`bytes`: the slab as a uint8 tensor. `fd`: open as long as the slab exists. `path`: the unique path of its
    mappings in /proc/self/maps."""

    id: int
    size: int
    bytes: Tensor = field(repr=False)
    fd: int
    path: str
    num_carved_bytes: int = 0
    num_taken: int = 0

    def close(self) -> None:
        """Close the descriptor. The kernel frees the pages after the last mapping has gone."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


@dataclass(eq=False)
class Block:
    """`size` bytes of a slab from `offset` on. `bytes`: these bytes as a uint8 tensor."""

    slab: Slab
    offset: int
    size: int
    bytes: Tensor = field(repr=False)
    is_whole: bool
    _views: dict[tuple[torch.Size, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    def as_tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The block as a contiguous tensor."""
        key = (shape, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 16:
                self._views.clear()
            view = self._views[key] = bytes_as(self.bytes, shape, dtype, 0)
        return view


def bytes_as(memory: Tensor, shape: torch.Size, dtype: torch.dtype, offset: int) -> Tensor:
    """`memory` (uint8) from `offset` on as a contiguous tensor."""
    num_bytes = shape.numel() * dtype.itemsize
    return memory[offset : offset + num_bytes].view(dtype).view(shape)


def map_memory(fd: int, size: int) -> Tensor:
    """A memfd as a uint8 tensor. The caller may close the descriptor."""
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


def max_descriptors() -> int:
    """The limit of open descriptors of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Arena:
    """The rank's side: allocates blocks (ARENA-1). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = next(_arenas)
        self._free: dict[tuple[int, bool], list[Block]] = defaultdict(list)
        self._growing: dict[int, Slab] = {}  # by block size: the slab that still has uncarved blocks
        self._next_id = 0
        self._free_bytes = self._num_idle = 0
        self.discarded: list[int] = []  # ids of closed slabs, in order, for comm processes to unmap

    def take(self, num_bytes: int) -> Block:
        """A block of at least `num_bytes`. Sizes are powers of two, so that there are few. Raises OSError: there is no
        memory or descriptor left."""
        size = max(_SMALLEST_BLOCK, 1 << (num_bytes - 1).bit_length())
        return self._take(size, is_whole=size > _LARGEST_IN_SLAB)

    def take_whole(self, size: int) -> Block:
        """A slab of exactly `size` bytes, as one block."""
        return self._take(size, is_whole=True)

    def _take(self, size: int, *, is_whole: bool) -> Block:
        with self._lock:
            free = self._free[size, is_whole]
            if free:
                block = free.pop()
                self._free_bytes -= size
                self._num_idle -= not block.slab.num_taken
            else:
                block = self._carve(size, is_whole)
            block.slab.num_taken += 1
            return block

    def _carve(self, size: int, is_whole: bool) -> Block:
        slab = None if is_whole else self._growing.get(size)
        if slab is None:
            slab = self._make(size if is_whole else min(max(_SMALLEST_SLAB, size * _BLOCKS_IN_SLAB), _LARGEST_SLAB))
        offset = slab.num_carved_bytes
        slab.num_carved_bytes += size
        if not is_whole:
            self._growing[size] = slab
            if slab.num_carved_bytes == slab.size:
                del self._growing[size]
        return Block(slab, offset, size, slab.bytes[offset : offset + size], is_whole)

    def _make(self, size: int) -> Slab:
        self._next_id += 1
        name = f"elasticgang-{os.getpid()}-{self._number}-{self._next_id}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            memory = map_memory(fd, size)
        except OSError:
            os.close(fd)
            raise
        return Slab(self._next_id, size, memory, fd, f"/memfd:{name} (deleted)")

    def give_back(self, block: Block) -> None:
        """Free the block (ARENA-1). A slab without taken blocks may be closed (ARENA-3)."""
        slab = block.slab
        with self._lock:
            slab.num_taken -= 1
            self._free[block.size, block.is_whole].append(block)
            self._free_bytes += block.size
            if slab.num_taken:
                return
            self._num_idle += 1
            too_many = self._num_idle > 1 and self._num_idle > max_descriptors() // _IDLE_SHARE
            if self._free_bytes > _MAX_FREE_BYTES or too_many:
                self._discard(slab, block)

    def discard(self, block: Block) -> None:
        """Close the slab of `block`, which is a whole one, and never reuse it."""
        with self._lock:
            self._close(block.slab)

    def _discard(self, slab: Slab, block: Block) -> None:
        key = block.size, block.is_whole
        self._free[key] = [free for free in self._free[key] if free.slab is not slab]
        self._free_bytes -= slab.num_carved_bytes
        self._num_idle -= 1
        if self._growing.get(block.size) is slab:
            del self._growing[block.size]
        self._close(slab)

    def _close(self, slab: Slab) -> None:
        self.discarded.append(slab.id)
        slab.close()
