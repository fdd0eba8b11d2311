"""What stays of a device's memory, and what copies of it take. One device is enough."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticgang.comm import create_process_group
from elasticgang.state import staging
from elasticgang.state.staging import CHUNK_BYTES, NUM_BUFFERS, Reader, Writer, device
from scripts.benches.comm import open_store
from tests.gpu.figures import note
from tests.integration.rings import SUM, Ring

CUDA: Any = torch.cuda
MIB = 1 << 20
NUM_CONFIGURATIONS = 100


def used_bytes() -> int:
    """By all processes of the device."""
    CUDA.synchronize()
    free, total = CUDA.mem_get_info()
    return int(total - free)


@pytest.fixture(params=["nccl", "isolated-nccl"])
def ring(request: pytest.FixtureRequest) -> Iterator[Ring]:
    with open_store() as store:
        ring = Ring(lambda: create_process_group(request.param, 60.0), 1, store)
        yield ring
        ring.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("aborts", [False, True])
def test_a_hundred_configurations_leave_no_memory_behind(
    aborts: bool, ring: Ring, request: pytest.FixtureRequest
) -> None:
    tensor = torch.ones(MIB, device="cuda")

    def configure() -> None:
        if aborts:
            ring[0].allreduce([tensor], SUM)
            ring[0].abort()
        ring.configure()
        ring[0].allreduce([tensor], SUM).wait()
        CUDA.synchronize()

    for _ in range(5):
        configure()
    before, began = used_bytes(), time.monotonic()
    for _ in range(NUM_CONFIGURATIONS):
        configure()
    seconds, grown = time.monotonic() - began, used_bytes() - before
    note(
        f"{NUM_CONFIGURATIONS} configurations of size 1",
        case=request.node.name,
        seconds_each=round(seconds / NUM_CONFIGURATIONS, 3),
        grown_mib=grown // MIB,
    )
    assert grown < 64 * MIB


# Prints whether a stream passes an event of a killed process within 10 s. The event would pass after a minute.
EVENT = """\
import os, signal, subprocess, sys, time
import torch

if sys.argv[1:]:
    event = torch.cuda.Event(interprocess=True)
    torch.cuda._sleep(100_000_000_000)
    event.record()
    print(event.ipc_handle().hex(), flush=True)
    time.sleep(600)
process = subprocess.Popen([sys.executable, __file__, "late"], stdout=subprocess.PIPE, text=True)
event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), bytes.fromhex(process.stdout.readline()))
stream = torch.cuda.Stream()
stream.wait_event(event)
assert not stream.query()
process.kill()
process.wait()
deadline = time.monotonic() + 10
while not stream.query() and time.monotonic() < deadline:
    time.sleep(0.01)
print("passes" if stream.query() else "waits", flush=True)
os.kill(os.getpid(), signal.SIGKILL)  # an end in order would wait for the stream
"""


# NCCL-2
@pytest.mark.timeout(300)
def test_a_stream_that_waits_for_an_event_of_a_killed_process_waits_forever(tmp_path: Path) -> None:
    """Therefore no stream of a rank waits for its comm process. In a process of its own, whose device stands."""
    path = tmp_path / "event.py"
    path.write_text(EVENT)
    done = subprocess.run([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, timeout=200)
    note("a stream that waits for an event of a killed process", does=done.stdout.strip())
    assert done.stdout.strip() == "waits"


def test_a_state_is_read_and_written_through_pinned_buffers_alone() -> None:
    source = torch.randn(256 * MIB // 4, device="cuda")
    target = torch.empty_like(source)
    host = bytearray(b"x") * source.nbytes  # memory that is there
    staging.prepare()
    CUDA.reset_peak_memory_stats()
    before = CUDA.memory_allocated()
    began = time.monotonic()
    offset = 0
    for chunk in Reader(device.mark()).chunks(source):
        host[offset : offset + len(chunk)] = chunk
        offset += len(chunk)
    reading = time.monotonic() - began
    writer = Writer()
    began = time.monotonic()
    writer.copy(target, torch.frombuffer(host, dtype=torch.float32))
    writer.finish()
    writing = time.monotonic() - began
    assert CUDA.max_memory_allocated() - before < MIB, "nothing is allocated on the device"
    assert torch.equal(target, source)
    rate = source.nbytes / 1e9
    note("copies through pinned buffers", read_gb_s=round(rate / reading, 2), write_gb_s=round(rate / writing, 2))
    assert NUM_BUFFERS * CHUNK_BYTES == 8 * MIB


def test_a_copy_runs_beside_kernels_of_the_training_stream() -> None:
    """The copy of a checkpoint must not wait for forward and backward."""
    source = torch.ones(64 * MIB // 4, device="cuda")
    staging.prepare()  # PINNED-5
    mark = device.mark()
    CUDA.synchronize()
    CUDA._sleep(4_000_000_000)  # some seconds of the training stream
    began = time.monotonic()
    for _ in Reader(mark).chunks(source):
        pass
    copied = time.monotonic() - began
    is_busy = not CUDA.current_stream().query()
    CUDA.synchronize()
    assert is_busy, "the copy has ended first"
    note("a copy of 64 MiB beside a busy stream", seconds=round(copied, 3))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of torch, at the end of the refused capture
def test_a_graph_with_a_collective_of_a_gang_is_refused() -> None:
    from elasticgang.errors import NotSupportedError
    from elasticgang.gang import ElasticGang, ReduceOperation
    from elasticgang.gang.elastic import Binding

    gang = ElasticGang("dp", torch.device("cuda", 0))
    gang.bind(Binding(0, (0,), None))
    tensor = torch.ones(4, device="cuda")
    gang.all_reduce(tensor, ReduceOperation.SUM)

    def capture() -> None:
        with CUDA.graph(CUDA.CUDAGraph()):
            gang.all_reduce(tensor, ReduceOperation.SUM)

    with pytest.raises(NotSupportedError, match="a CUDA graph cannot hold"):
        capture()
    CUDA.synchronize()
    assert tensor.tolist() == [1.0] * 4
