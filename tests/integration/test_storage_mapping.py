"""Large tensors in shared memory: nothing is copied, and nothing about the tensor changes."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from torch import Tensor

from elasticgang.comm.arena import Arena
from elasticgang.comm.storage_mapping import SMALLEST_BYTES, MappedTensor, StorageMappings
from tests.support import run_preloaded

NUM = 1 << 20  # 4 MiB of float32
HOLE_BYTES = 8 << 20  # above malloc's threshold (tests/conftest.py), and less than a tensor of these tests has
IS_MAPPED = 2  # in the word before the memory


@pytest.fixture(scope="module", autouse=True)
def own_mappings() -> Iterator[None]:
    """Large memory has a mapping of its own, whatever the tests before have left on the heap: no hole there is large
    enough for it. malloc takes a hole before it makes a mapping, however large the memory is."""
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
    gc.collect()
    taken = [libc.malloc(HOLE_BYTES)]
    while not ctypes.c_size_t.from_address(taken[-1] - 8).value & IS_MAPPED:
        taken.append(libc.malloc(HOLE_BYTES))
        assert len(taken) < 1000, "this malloc makes no mappings"
    yield
    for address in taken:
        libc.free(address)


@pytest.fixture
def storages() -> StorageMappings:
    arena = Arena()
    made = StorageMappings(arena)
    made.__dict__["kept"] = arena
    return made


def fresh(num: int = NUM) -> Tensor:
    return torch.arange(float(max(num, 9 << 20)))


def found(storages: StorageMappings, tensor: Tensor) -> MappedTensor | None:
    """Its place at the second use."""
    return storages.find(tensor) or storages.find(tensor)


def in_block(span: MappedTensor, like: Tensor) -> Tensor:
    """What the comm process would see."""
    num_bytes = like.numel() * like.element_size()
    return span.block.bytes[span.offset : span.offset + num_bytes].view(like.dtype).view(like.shape)


def copy_edges(span: MappedTensor, *, out: bool = False) -> None:
    for outside, inside in span.edges:
        _ = outside.copy_(inside) if out else inside.copy_(outside)


def test_what_one_side_writes_the_other_sees(storages: StorageMappings) -> None:
    tensor = fresh()
    view, address, expected = tensor[5:], tensor.data_ptr(), tensor.clone()
    span = found(storages, tensor)
    assert span is not None
    copy_edges(span)
    assert torch.equal(in_block(span, tensor), expected)
    assert tensor.data_ptr() == address
    assert not tensor.is_shared()  # type: ignore[no-untyped-call]
    in_block(span, tensor).mul_(2)
    copy_edges(span, out=True)
    assert torch.equal(tensor, expected * 2)
    assert torch.equal(view, expected[5:] * 2)
    assert sum(outside.numel() for outside, _ in span.edges) < 2 * 4096
    again = storages.find(tensor)
    assert again is not None
    assert again.block is span.block


def test_a_tensor_is_copied_at_its_first_use(storages: StorageMappings) -> None:
    """A mapping costs more than a copy. A storage at the address of another one that was used has its own first use."""
    tensor = fresh()
    assert storages.find(tensor) is None
    address = tensor.data_ptr()
    del tensor
    another = fresh()
    assert another.data_ptr() == address
    assert storages.find(another) is None
    assert storages.find(another) is not None


def test_a_view_of_a_shared_storage_is_shared_too(storages: StorageMappings) -> None:
    tensor = fresh()
    assert found(storages, tensor[NUM:]) is None, "others may write to the rest of the storage"
    assert found(storages, tensor) is not None
    half = tensor[NUM // 2 + 3 :]
    span = found(storages, half)
    assert span is not None
    copy_edges(span)
    assert torch.equal(in_block(span, half), half)


# MAPPING-1, MAPPING-2
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(SMALLEST_BYTES // 4 - 1),
        torch.zeros(4, 4 << 20)[:, ::2],
        torch.zeros(4 << 20).share_memory_(),  # type: ignore[no-untyped-call]
        torch.frombuffer(bytearray(16 << 20), dtype=torch.uint8)[64:],
        torch.empty(NUM, device="meta"),
    ],
    ids=["small", "strided", "shared", "foreign", "meta"],
)
def test_whatever_else_is_copied(storages: StorageMappings, tensor: Tensor) -> None:
    assert found(storages, tensor) is None


# MAPPING-6
@pytest.mark.parametrize("memory", [np.ones(36 << 20, np.uint8), bytearray(36 << 20)], ids=["array", "bytearray"])
def test_memory_that_may_outlive_its_tensor_is_copied(
    storages: StorageMappings, memory: npt.NDArray[np.uint8] | bytearray
) -> None:
    for _ in range(2):
        assert found(storages, torch.frombuffer(memory, dtype=torch.uint8)) is None
        assert found(storages, torch.from_numpy(np.frombuffer(memory, np.uint8))) is None


# MAPPING-6
def test_a_block_that_is_still_mapped_is_not_used_again(storages: StorageMappings) -> None:
    """The first storage ends. A copy-on-write clone has its memory."""
    first = fresh()
    expected = first.clone()
    span = found(storages, first)
    assert span is not None
    clone = torch._lazy_clone(first)
    del first
    gc.collect()
    second = fresh().fill_(-1)
    other = found(storages, second)
    assert other is not None
    assert other.block is not span.block
    assert torch.equal(clone, expected)


# MAPPING-3
def test_memory_that_was_made_anew_at_the_same_address_is_noticed(storages: StorageMappings) -> None:
    """FSDP does this: the storage object lives on, its memory does not."""
    tensor = fresh()
    first = found(storages, tensor)
    assert first is not None
    num_bytes = tensor.untyped_storage().nbytes()
    for value in range(5):
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(num_bytes)
        tensor.fill_(value)
        span = found(storages, tensor)
        if span is None:  # the allocator had other memory for it
            continue
        copy_edges(span)
        assert bool((in_block(span, tensor) == value).all())


READ_ONLY = """
import ctypes, torch
from elasticgang.comm.arena import Arena
from elasticgang.comm.storage_mapping import StorageMappings

arena = Arena()
storages, tensor = StorageMappings(arena), torch.arange(float(9 << 20))
assert storages.find(tensor) is None
block = storages.find(tensor).block
mprotect = ctypes.CDLL(None).mprotect
mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
assert mprotect(block.bytes.data_ptr(), block.size, 1) == 0  # PROT_READ: who writes to it dies
assert storages.find(tensor).block is block
assert storages.find(tensor[1 << 20 :]).block is block
"""


def test_looking_for_a_tensor_writes_nothing_to_it(tmp_path: Path) -> None:
    """Another collective may read it at that moment."""
    (script := tmp_path / "script.py").write_text(READ_ONLY)
    done = run_preloaded([sys.executable, str(script)], timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_block_is_found_whatever_was_done_to_its_mapping(storages: StorageMappings) -> None:
    tensor = fresh()
    first = found(storages, tensor)
    assert first is not None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    dont_fork = 10
    page = tensor.data_ptr() // 4096 * 4096 + 4096 * 5
    assert madvise(page, 4096, dont_fork) == 0  # it is three mappings now
    again = storages.find(tensor)
    assert again is not None
    assert again.block is first.block


def test_two_arenas_take_turns_beneath_one_tensor(storages: StorageMappings) -> None:
    """As of two groups. Each sees that its block is no longer there."""
    tensor, kept = fresh(), Arena()
    other = StorageMappings(kept)
    for value in range(4):
        tensor.fill_(value)
        span = found((storages, other)[value % 2], tensor)
        assert span is not None
        copy_edges(span)
        assert bool((in_block(span, tensor) == value).all())


def test_blocks_of_dead_tensors_are_used_again(storages: StorageMappings) -> None:
    blocks = set()
    for value in range(20):
        tensor = fresh().fill_(value)
        span = found(storages, tensor)
        assert span is not None
        copy_edges(span)
        assert bool((in_block(span, tensor) == value).all())
        blocks.add(span.block.slab.id)
        del tensor, span
        gc.collect()
    assert len(blocks) <= 2


def allocated(storages: StorageMappings, num: int = NUM) -> Tensor:
    memory = storages.allocate(4 * num)
    assert memory is not None
    return memory.view(torch.float32)


def test_allocated_memory_is_shared_from_the_start(storages: StorageMappings) -> None:
    tensor = allocated(storages, NUM + 5).fill_(3)
    span = storages.find(tensor)
    assert span is not None
    assert span.edges == ()
    assert bool((in_block(span, tensor) == 3).all())
    in_block(span, tensor).mul_(2)
    assert bool((tensor == 6).all())
    half = tensor[NUM // 2 + 3 :]
    of_half = storages.find(half)
    assert of_half is not None
    assert of_half.edges == ()
    assert in_block(of_half, half).data_ptr() == in_block(span, tensor)[NUM // 2 + 3 :].data_ptr()
    other = StorageMappings(kept := Arena())
    assert found(other, tensor) is None, "it belongs to the other arena"
    del kept


# MAPPING-5
def test_the_block_of_allocated_memory_is_used_again_after_its_storage(storages: StorageMappings) -> None:
    tensor = allocated(storages).fill_(1)
    first = storages.find(tensor)
    assert first is not None
    view = tensor[7:]
    del tensor
    another = allocated(storages).fill_(2)
    second = storages.find(another)
    assert second is not None
    assert second.block is not first.block
    assert bool((view == 1).all())
    del view
    third = storages.find(allocated(storages))
    assert third is not None
    assert third.block is first.block


FEW_DESCRIPTORS = """if True:
    import os, resource
    from elasticgang.comm.arena import Arena
    from elasticgang.comm.storage_mapping import SMALLEST_BYTES, StorageMappings

    arena = Arena()
    storages = StorageMappings(arena)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert storages.allocate(SMALLEST_BYTES - 1) is None
    kept = []
    # A block takes three: there are descriptors left when a quarter of this is reached.
    limit = 4 * (len(os.listdir("/proc/self/fd")) + 64)
    assert soft == resource.RLIM_INFINITY or limit <= soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    while (memory := storages.allocate(SMALLEST_BYTES)) is not None:
        kept.append(memory)
    assert len(kept) == limit // 4, (len(kept), limit)
    assert len({memory.data_ptr() for memory in kept}) == len(kept)
"""


def test_no_more_memory_is_allocated_than_descriptors_allow(tmp_path: Path) -> None:
    """In a process of its own: threads of other tests may open descriptors meanwhile."""
    (script := tmp_path / "script.py").write_text(FEW_DESCRIPTORS)
    done = run_preloaded([sys.executable, str(script)], timeout=60)
    assert done.returncode == 0, done.stderr


def test_memory_is_given_back() -> None:
    """Whatever sizes come, what is kept stays within a limit."""
    process = psutil.Process()
    before = process.memory_info().rss
    arena = Arena()
    storages = StorageMappings(arena)
    for number in range(40):
        tensor = fresh((9 << 20) + number * 4096)
        assert found(storages, tensor) is not None
        del tensor
    assert len(arena.discarded) >= 20
    del storages, arena
    gc.collect()
    assert process.memory_info().rss - before < 1200 << 20


# MAPPING-4
@pytest.mark.parametrize("is_allocated", [False, True])
def test_a_forked_child_has_the_memory_for_itself(storages: StorageMappings, is_allocated: bool) -> None:
    tensor = allocated(storages).copy_(torch.arange(float(NUM))) if is_allocated else fresh()
    span = found(storages, tensor)
    assert span is not None
    few = tensor[:: tensor.numel() // 100]  # a parallel operation would hang in a forked child
    expected = few.clone()
    pid = os.fork()
    if pid == 0:
        same = torch.equal(few, expected)
        few.fill_(-1)
        os._exit(0 if same and few.sum().item() == -few.numel() else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert torch.equal(tensor, torch.arange(float(tensor.numel())))


# STAGING-1
def test_gradients_and_versions_are_untouched(storages: StorageMappings) -> None:
    tensor = torch.zeros(9 << 20, requires_grad=True)
    version = tensor._version
    assert found(storages, tensor) is not None
    assert tensor._version == version
    assert tensor.is_leaf
    assert tensor.requires_grad
    torch.autograd.backward((tensor * 2).sum())
    assert tensor.grad is not None
    assert bool((tensor.grad == 2).all())
