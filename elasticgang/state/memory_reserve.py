"""Memory for what a restarted rank does not have yet of its state: what the optimizer keeps for each parameter.

RESERVE-1  The first write to a page takes several times as long as a later one. The other ranks would wait for that in
    a heal. A thread has the kernel map the pages while the script starts, and the rank requests its first record once
    that is done: until then, the others train without it.
RESERVE-2  Each tensor has a storage of its own in the memory, of a size that does not change. What no tensor has taken
    is given back to the kernel once the rank has its state, or takes it from elsewhere: a checkpoint, or another
    layout. What was taken lives as long as any of its tensors.
RESERVE-3  The size is what another rank of the host says, or the former one of this place. It is a hint: if it is too
    small, the host has not so much memory left, or the kernel cannot do it, the rest is allocated in the heal.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
from collections.abc import Sequence

import psutil
import torch
from torch import Tensor

from elasticgang.process.memory_group import MemoryGroups

log = logging.getLogger("elasticgang")

MIN_BYTES = 16 << 20  # below, it would gain less than 10 ms
RESERVE_TIMEOUT_S = 20.0
_PIECE_BYTES = 16 << 20
_ALIGNMENT = 64  # bytes, as torch's own tensors on the CPU
_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MemoryReserve:
    """`take` and `release` belong to one thread."""

    def __init__(self, num_bytes: int) -> None:
        """Nothing is reserved if `num_bytes` is small, or more than the host has available."""
        self._memory: mmap.mmap | None = None
        self.num_taken = 0  # bytes, up to the end of the last tensor
        self._populated = threading.Event()
        self._is_released = threading.Event()
        if MIN_BYTES <= num_bytes <= _available_bytes(groups := MemoryGroups()):
            self._populate(num_bytes, groups)
        else:
            self._populated.set()

    def _populate(self, num_bytes: int, groups: MemoryGroups) -> None:
        """RESERVE-1."""
        try:
            # Private: a forked child must not write to this rank's tensors.
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            thread = threading.Thread(target=self._map_pages, args=(memory, groups), name="memory-reserve", daemon=True)
            thread.start()
        except (OSError, RuntimeError) as exc:  # no memory, or no thread is left
            log.debug("could not reserve memory for the state: %r", exc)
            self._populated.set()
        else:
            self._memory = memory

    def _map_pages(self, memory: mmap.mmap, groups: MemoryGroups) -> None:
        try:
            address = _address_of(memory)
            for start in range(0, len(memory), _PIECE_BYTES):
                size = min(_PIECE_BYTES, len(memory) - start)
                left = _available_bytes(groups)  # other ranks reserve memory too
                if (
                    self._is_released.is_set()
                    or size > left
                    or _libc.madvise(address + start, size, _MADV_POPULATE_WRITE)
                ):
                    return
        finally:
            self._populated.set()

    def wait(self, timeout_s: float = RESERVE_TIMEOUT_S) -> bool:
        """Wait until the pages are there. Returns whether they are, or cannot be. If not, drop the reserve: its thread
        ends soon."""
        if not self._populated.wait(timeout_s):
            log.warning(
                "the memory for the state was not there after %g s: the rest is allocated in the heal", timeout_s
            )
            self._is_released.set()
        return self._populated.is_set()

    @property
    def is_populated(self) -> bool:
        return self._populated.is_set()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A tensor on the CPU, not initialized; None if too little is left (RESERVE-2)."""
        count = math.prod(shape)
        start = _aligned(self.num_taken)
        if self._memory is None or not count or start + count * dtype.itemsize > len(self._memory):
            return None
        self.num_taken = start + count * dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).reshape(tuple(shape))

    def release(self) -> None:
        """Give back what was not taken. The taken memory lives as long as a tensor in it."""
        self._is_released.set()
        memory, self._memory = self._memory, None
        if memory is None or not self._populated.wait(RESERVE_TIMEOUT_S):
            return  # the thread has it; it goes with the thread
        start = -(-self.num_taken // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.num_taken and start < len(memory):
            _libc.madvise(_address_of(memory) + start, len(memory) - start, mmap.MADV_DONTNEED)


def room_for(tensor: Tensor) -> int:
    """How many bytes of a reserve such a tensor takes."""
    return _aligned(tensor.nbytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _available_bytes(groups: MemoryGroups) -> int:
    """What the host has left, and the process's control groups."""
    left, in_groups = psutil.virtual_memory().available, groups.available_bytes()
    return left if in_groups is None else min(left, in_groups)


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
