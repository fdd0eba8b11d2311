from __future__ import annotations

import mmap
import platform
import resource
from pathlib import Path

import psutil
import pytest
import torch

from elasticgang.layout import ParallelLayout
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.protocol.member_instructions import Instruction, SendRequest
from elasticgang.protocol.record import Record
from elasticgang.state.memory_reserve import MIN_BYTES, MemoryReserve
from elasticgang.state.snapshot_server import SnapshotServer
from elasticgang.train.optimizer import Optimizer

SIZE = 4 * MIN_BYTES
maps_pages = pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="this kernel has no MADV_POPULATE_WRITE"
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def populated(num_bytes: int) -> MemoryReserve:
    reserve = MemoryReserve(num_bytes)
    assert reserve.wait(60)
    assert reserve.is_populated
    return reserve


# RESERVE-1
@maps_pages
def test_the_first_write_to_a_reserved_tensor_finds_its_pages() -> None:
    tensor = populated(SIZE).take((MIN_BYTES // 4,), torch.float32)
    assert tensor is not None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.fill_(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < MIN_BYTES // mmap.PAGESIZE // 4


# RESERVE-2
def test_each_tensor_has_a_storage_of_its_own_where_torch_would_have_aligned_it() -> None:
    reserve = populated(SIZE)
    kinds = [((3,), torch.bfloat16), ((5, 7), torch.float32), ((), torch.float64), ((1000, 1000), torch.int64)]
    tensors = [reserve.take(shape, dtype) for shape, dtype in kinds]
    for number, ((shape, dtype), tensor) in enumerate(zip(kinds, tensors, strict=True)):
        assert tensor is not None
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.fill_(number)
    assert all(tensor is not None and bool((tensor == number).all()) for number, tensor in enumerate(tensors))


# RESERVE-2
@maps_pages
def test_what_was_not_taken_is_given_back_and_what_was_stays() -> None:
    reserve = populated(SIZE)
    tensor = reserve.take((MIN_BYTES // 4,), torch.float32)
    assert tensor is not None
    tensor.fill_(7.0)
    before = resident_bytes()
    reserve.release()
    assert before - resident_bytes() > (SIZE - MIN_BYTES) * 0.8
    assert reserve.take((1,), torch.float32) is None
    del reserve
    assert bool((tensor == 7.0).all())


# RESERVE-3
def test_a_reserve_that_is_too_small_gives_what_it_has() -> None:
    reserve = populated(MIN_BYTES)
    assert reserve.take((MIN_BYTES,), torch.float32) is None
    assert reserve.take((MIN_BYTES,), torch.uint8) is not None
    assert reserve.take((1,), torch.uint8) is None
    assert reserve.take((0, 3), torch.float32) is None


# RESERVE-3
@pytest.mark.parametrize("num_bytes", [0, MIN_BYTES - 1, 2 * psutil.virtual_memory().total, 1 << 62])
def test_nothing_is_reserved_that_is_small_or_does_not_fit(num_bytes: int) -> None:
    reserve = MemoryReserve(num_bytes)
    assert reserve.is_populated
    assert reserve.take((1,), torch.float32) is None
    reserve.release()


# RESERVE-1
def test_a_rank_has_the_memory_before_it_reports_and_requests_a_record() -> None:
    done: list[str] = []

    class Server(SnapshotServer):
        def wait_for_memory(self) -> None:
            done.append("memory")

    class Requests(LocalRendezvous):
        def perform(self, instruction: Instruction) -> Record | None:
            if isinstance(instruction, SendRequest):
                done.append("request")
            return super().perform(instruction)

    layout, device = ParallelLayout(), torch.device("cpu")
    manager = QuorumManager(Requests(layout, device), Server(), layout, device)
    model = torch.nn.Linear(2, 2)
    optim = Optimizer(manager, torch.optim.AdamW(model.parameters()))
    manager.register_state(model=model, optim=optim)
    for step in manager.steps(2):
        with step:
            model(torch.ones(1, 2)).sum().backward()
            optim.step(weight=1.0)
    assert done == ["memory", "request"]
