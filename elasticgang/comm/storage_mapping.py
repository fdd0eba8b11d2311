"""Large tensors whose memory the comm process shares, so that nothing is copied.

Gradient buckets are allocated in a block (`allocate`). A block is mapped at the address of any other large tensor when
it is given to a collective for the second time: the storage keeps its address, and all of its views stay valid. Only
the pages change, from anonymous memory to those of the block. The first and the last page, which may also hold other
data, are not replaced; their bytes are copied at each call. The first time everything is copied, because a mapping
costs more than that and a tensor may be used only once.

`scripts/bench comm` measures the benefit of both.

MAPPING-1  A storage is mapped only while a tensor that covers all of it is given to a collective. The caller may not
    write to it then, so no write is lost between the copy and the mapping.
MAPPING-2  Only a chunk that glibc has mapped individually is replaced: the allocator unmaps it when it is freed, and
    never reuses it. All other memory (small tensors, other allocators, files) is copied. glibc maps every chunk above
    32 MiB individually, and a smaller one until the process frees a mapped chunk that is larger.
MAPPING-3  Before each use, the block must still be mapped at the storage's address. The storage may have been freed and
    allocated again (`resize_`) at the same address, unless it was allocated in the block: it then has a fixed size.
MAPPING-4  A forked child gets private pages: its writes do not reach the parent. The parent's later writes reach the
    pages that the child has not written to: a copy at each fork would cost as much memory as all gradients.
MAPPING-5  A block belongs to its storage for as long as the storage exists, in whichever generation and whatever
    happens to comm processes. A pending work holds its tensors until its process is dead (ARENA-2).
MAPPING-6  Memory that may outlive its storage is copied: that of a NumPy array or a `bytearray`, for example. torch can
    resize no such storage. A block that is still mapped after the end of its storage is never reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from elasticgang.comm.arena import PAGE, Arena, Block, map_memory, max_descriptors
from elasticgang.torch_private import storage_of

SMALLEST_BYTES = 1 << 20
_SHARE_OF_DESCRIPTORS = 4  # at most one descriptor in so many belongs to a mapped block
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_POPULATE = 0x01, 0x02, 0x10, 0x8000
_ENTRY = struct.Struct("=Q")
_PRESENT, _OF_FILE = 1 << 63, 1 << 61  # bits of an entry in /proc/self/pagemap that need no privilege
_IS_MMAPPED = 0x2  # a flag in the size field of a glibc malloc chunk

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


@dataclass(eq=False)
class _Region:
    """A block mapped at the storage at `address`. Block and storage have the same offset within a page.
    `is_allocated`: the storage was allocated in the block."""

    storage: StorageWeakRef
    block: Block
    address: int
    num_bytes: int
    is_allocated: bool

    @classmethod
    def of(cls, storage: torch.UntypedStorage, block: Block, *, is_allocated: bool) -> _Region:
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return cls(weak, block, storage.data_ptr(), storage.nbytes(), is_allocated)

    @property
    def base(self) -> int:
        return self.address // PAGE * PAGE

    @property
    def first(self) -> int:
        """The start of the shared memory, which consists of whole pages; it ends at `last`."""
        return -(-self.address // PAGE) * PAGE

    @property
    def last(self) -> int:
        return (self.address + self.num_bytes) // PAGE * PAGE

    def is_alive(self) -> bool:
        """Whether the storage exists and reports the same address."""
        storage = storage_of(self.storage.cdata)
        return storage is not None and storage.data_ptr() == self.address

    def map(self, flags: int) -> None:
        self._check(_libc.mmap(self.first, self.last - self.first, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED,
                               self.block.slab.fd, self.first - self.base))  # fmt: skip

    def _check(self, result: int) -> None:
        if result != self.first:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def lies_beneath(self) -> bool:
        """Whether the block is still mapped, according to the kernel (MAPPING-3). Accesses no memory there. If no other
        arena has mapped a block at the address since, a live storage there has either this block or, if it was
        allocated again, anonymous memory, which no file backs."""
        if _newest.get(self.address) is not self or not self.is_alive():
            return False
        if self.is_allocated:
            return True
        of_file = _is_of_file(self.first)
        return self._is_mapped() if of_file is None else of_file

    def is_left_behind(self) -> bool:
        """Whether the block is still mapped, though the storage no longer exists or has other memory (MAPPING-6)."""
        return _libc.mincore(self.first, PAGE, ctypes.create_string_buffer(1)) == 0 and self._is_mapped()

    def _is_mapped(self) -> bool:
        return _mapped_at(self.first) == self.block.slab.path


@dataclass(frozen=True)
class MappedTensor:
    """The place of a tensor in a block. `edges`: pairs of (the tensor's bytes, the block's bytes) that are not
    shared."""

    block: Block
    offset: int
    edges: tuple[tuple[Tensor, Tensor], ...]


class StorageMappings:
    """The mapped storages of one arena. Thread-safe."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._regions: dict[int, _Region] = {}
        self._used_once: dict[int, StorageWeakRef] = {}  # by address
        _all.add(self)

    def allocate(self, num_bytes: int) -> Tensor | None:
        """New memory as a uint8 tensor, uninitialized, with a storage of its own; None: it is small, or there is no
        block for it."""
        if num_bytes < SMALLEST_BYTES:
            return None
        with self._lock:
            self._forget_dead()
            block = self._take(-(-num_bytes // PAGE) * PAGE)
            if block is None:
                return None
            try:
                tensor = map_memory(block.slab.fd, block.size)  # its own mapping, which ends with the storage
            except OSError:  # too many mappings
                self._arena.give_back(block)
                return None
            self._add(_Region.of(tensor.untyped_storage(), block, is_allocated=True))
        return tensor[:num_bytes]

    def find(self, tensor: Tensor) -> MappedTensor | None:
        """The place of `tensor` in shared memory, mapped now if this is its second time; None if it must be copied.
        `tensor` must be an argument of a collective, which no other thread accesses (MAPPING-1)."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < SMALLEST_BYTES or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        if tensor.is_conj() or tensor.is_neg():  # its memory does not hold its values
            return None
        storage = tensor.untyped_storage()
        address, start = storage.data_ptr(), tensor.data_ptr()
        with self._lock:
            region = self._regions.get(address)
            if region is not None and not region.lies_beneath():
                self._forget(region)
                region = None
            if region is None:
                self._forget_dead()
                if num_bytes != storage.nbytes() or not storage.resizable():  # MAPPING-1, MAPPING-6
                    return None
                if not _is_own_mapping(address, num_bytes) or not self._is_used_again(storage):  # MAPPING-2
                    return None
                region = self._take_over(storage)
        return None if region is None else _mapped_tensor(region, tensor, start, num_bytes)

    def _is_used_again(self, storage: torch.UntypedStorage) -> bool:
        address, weak = storage.data_ptr(), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        before = self._used_once.pop(address, None)
        if before is not None and before.cdata == weak.cdata:  # as long as `before` exists, no other storage has it
            return True
        self._used_once[address] = weak
        return False

    def _take(self, size: int) -> Block | None:
        if len(self._regions) >= max_descriptors() // _SHARE_OF_DESCRIPTORS:
            return None
        try:
            return self._arena.take_whole(size)
        except OSError:
            return None

    def _take_over(self, storage: torch.UntypedStorage) -> _Region | None:
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        base = address // PAGE * PAGE
        block = self._take(-(-(address + num_bytes) // PAGE) * PAGE - base)
        if block is None:
            return None
        region = _Region.of(storage, block, is_allocated=False)
        with torch.no_grad():
            contents = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            block.bytes[address - base : address - base + num_bytes].copy_(contents)
        try:
            region.map(_MAP_SHARED | _MAP_POPULATE)
        except OSError:  # too many mappings
            self._arena.give_back(block)
            return None
        self._add(region)
        return region

    def _add(self, region: _Region) -> None:
        self._regions[region.address] = _newest[region.address] = region

    def _forget_dead(self) -> None:
        """Forget storages that no longer exist, and release their blocks (MAPPING-5)."""
        for region in list(self._regions.values()):
            if not region.is_alive():
                self._forget(region)
        for address, storage in list(self._used_once.items()):
            if storage_of(storage.cdata) is None:
                del self._used_once[address]

    def _forget(self, region: _Region) -> None:
        del self._regions[region.address]
        if _newest.get(region.address) is region:
            del _newest[region.address]
        if region.is_left_behind():  # MAPPING-6
            self._arena.discard(region.block)
        else:
            self._arena.give_back(region.block)

    def _separate(self) -> None:
        """MAPPING-4. Runs in a forked child, which has no other thread."""
        self._lock = threading.Lock()  # a thread of the parent may have held the old one
        for region in self._regions.values():
            if region.is_alive():
                region.map(_MAP_PRIVATE)
        self._regions.clear()


_newest: weakref.WeakValueDictionary[int, _Region] = weakref.WeakValueDictionary()  # by address, over all arenas
_all: weakref.WeakSet[StorageMappings] = weakref.WeakSet()


def _separate_all() -> None:
    for storages in list(_all):
        storages._separate()
    _newest.clear()


os.register_at_fork(after_in_child=_separate_all)


def _mapped_tensor(region: _Region, tensor: Tensor, start: int, num_bytes: int) -> MappedTensor:
    offset = start - region.base
    edges = []
    end = start + num_bytes
    flat = tensor.detach().view(-1).view(torch.uint8)
    for low, high in ((start, min(end, region.first)), (max(start, region.last), end)):
        if low < high:
            inside = region.block.bytes[low - region.base : high - region.base]
            edges.append((flat[low - start : high - start], inside))
    return MappedTensor(region.block, offset, tuple(edges))


def _is_of_file(address: int) -> bool | None:
    """Whether a file or shared memory backs the page at `address`; None if the page is not present or unknown."""
    entry = b""
    with contextlib.suppress(OSError):
        pages = os.open("/proc/self/pagemap", os.O_RDONLY)  # opened each time: it belongs to the process that opened it
        try:
            entry = os.pread(pages, _ENTRY.size, address // PAGE * _ENTRY.size)
        finally:
            os.close(pages)
    if len(entry) != _ENTRY.size:
        return None
    (flags,) = _ENTRY.unpack(entry)
    return bool(flags & _OF_FILE) if flags & _PRESENT else None


def _mapped_at(address: int) -> str:
    """The path of the file that is mapped at `address`; "" without one."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, *_, path = line.rstrip("\n").split(" ", 5)
            low, high = (int(bound, 16) for bound in bounds.split("-"))
            if low <= address < high:
                return path.lstrip()
    return ""


def _is_own_mapping(address: int, num_bytes: int) -> bool:
    """Whether glibc's malloc has mapped the chunk at `address` individually, according to the chunk's header
    (MAPPING-2)."""
    if address % PAGE < 16:  # the header would be in the previous page, which may not exist
        return False
    before = ctypes.c_size_t.from_address(address - 16).value
    field = ctypes.c_size_t.from_address(address - 8).value
    start, size = address - 16 - before, (field & ~7) + before
    slack = size - before - 16 - num_bytes
    return bool(field & _IS_MMAPPED) and start % PAGE == 0 and size % PAGE == 0 and 0 <= slack <= 2 * PAGE
