"""Copies between a device and the host, over a stand-in whose copies happen when somebody waits (`fake_device.py`)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import elasticgang as eg
from elasticgang.checkpoint.capture import capture
from elasticgang.checkpoint.placed import Seated
from elasticgang.protocol.commit import Attempt
from elasticgang.state import staging, state_bits
from elasticgang.state.registered_state import RegisteredState
from elasticgang.state.serialization import as_bytes
from elasticgang.state.staging import NUM_BUFFERS, Chunks, Reader, Writer
from tests.integration.fake_device import FakeDevice
from tests.integration.state_ranks import AT, FIRST, Rank, same

CHUNK = 1000


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(staging, "device", fake)
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK)
    return fake


def tensor_of(num_bytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), generator=generator).to(torch.uint8)


# PINNED-1
@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK, CHUNK + 1, 5 * CHUNK - 1])
def test_a_reader_returns_all_bytes_through_two_buffers(num_bytes: int, device: FakeDevice) -> None:
    tensor = tensor_of(num_bytes)
    device.put(tensor)
    read = [bytes(chunk) for chunk in Reader(device.mark()).chunks(tensor)]
    assert b"".join(read) == bytes(as_bytes(tensor))
    assert all(len(chunk) == CHUNK for chunk in read[:-1])
    assert device.num_pinned_bytes <= NUM_BUFFERS * CHUNK


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_chunks_are_read_in_any_order_of_any_layout(dtype: torch.dtype, is_on_device: bool, device: FakeDevice) -> None:
    tensors = [torch.arange(900).reshape(30, 30).t().to(dtype), torch.ones(0), torch.arange(700.0), torch.tensor(3.0)]
    if is_on_device:
        device.put(*(tensor for tensor in tensors if tensor.numel()))
    parts = Chunks(tensors, device.mark())
    expected = [bytes(as_bytes(tensor)) for tensor in tensors]
    whole = [data[at : at + CHUNK] for data in expected for at in range(0, len(data), CHUNK)]
    assert [bytes(parts[number]) for number in reversed(range(len(parts)))] == whole[::-1]
    assert [bytes(part) for part in parts] == whole


# PINNED-5
def test_buffers_are_pinned_when_a_state_on_a_device_is_registered(device: FakeDevice) -> None:
    module = torch.nn.Linear(2, 2)
    RegisteredState().register(model=module)
    assert device.num_pinned_bytes == 0
    device.put(module.weight)
    RegisteredState().register(model=module)
    assert device.num_pinned_bytes == 2 * NUM_BUFFERS * CHUNK


# PINNED-2
def test_a_reader_sees_what_was_queued_before_its_mark(device: FakeDevice) -> None:
    tensor, new = tensor_of(3 * CHUNK), tensor_of(3 * CHUNK, seed=1)
    device.put(tensor)
    with device.on(device.present):
        tensor.copy_(new, non_blocking=True)
        written = device.mark()
    assert not torch.equal(tensor, new), "the stand-in has not copied yet"
    assert b"".join(bytes(chunk) for chunk in Reader(written).chunks(tensor)) == bytes(as_bytes(new))


# PINNED-2
def test_nothing_is_under_way_after_a_reader_that_is_given_up(device: FakeDevice) -> None:
    tensor = tensor_of(5 * CHUNK)
    device.put(tensor)
    reader = Reader(device.mark())
    chunks = reader.chunks(tensor)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    stream = reader.stream
    assert stream.num_queued == stream.num_done > 0


def test_a_writer_copies_into_a_view_whose_bytes_are_not_those_of_its_values(device: FakeDevice) -> None:
    """Its bytes as a vector are a copy: what was written to them was lost."""
    base = torch.zeros(2 * CHUNK, dtype=torch.complex64)
    target, source = base.conj(), torch.arange(len(base)).to(base.dtype)
    device.put(base)
    writer = Writer()
    writer.copy(target, source)
    writer.finish()
    assert torch.equal(target, source)


# PINNED-1, PINNED-3
@pytest.mark.parametrize("num_bytes", [0, CHUNK, CHUNK + 1, 7 * CHUNK - 1])
def test_a_writer_copies_all_bytes_through_two_buffers(num_bytes: int, device: FakeDevice) -> None:
    writer, targets = Writer(), [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(3)]
    device.put(*(target for target in targets if target.numel()))
    with device.on(device.present):
        for seed, target in enumerate(targets):
            writer.copy(target, tensor_of(num_bytes, seed))
    writer.finish()
    assert all(torch.equal(target, tensor_of(num_bytes, seed)) for seed, target in enumerate(targets))
    assert device.num_pinned_bytes <= NUM_BUFFERS * CHUNK


def on_device(rank: Rank, device: FakeDevice) -> Rank:
    moments = [value for of in rank.optim.state_dict()["state"].values() for value in of.values() if value.dim()]
    device.put(*rank.model.parameters(), *rank.model.buffers(), *moments)
    return rank


def addresses(rank: Rank) -> list[int]:
    """Of the large tensors of the parameters and of the optimizer's state."""
    moments = [value for of in rank.optim.state_dict()["state"].values() for value in of.values()]
    tensors = [*rank.model.parameters(), *moments]
    return [tensor.data_ptr() for tensor in tensors if tensor.nbytes > CHUNK]


# PINNED-1, PINNED-4
@pytest.mark.parametrize("attempt", [FIRST, AT])
def test_a_state_on_devices_is_healed_to_the_bit(attempt: Attempt, device: FakeDevice) -> None:
    source, healer = on_device(Rank(3, size=700), device), on_device(Rank(1, size=700), device)
    try:
        source.server.begin(attempt)
        before = addresses(healer)
        assert healer.server.heal([source.server.address], attempt)
        assert same(healer.large(), source.large())
        assert same(healer.small(), source.small())
        assert addresses(healer) == before, "the device holds one copy of the large state"
        assert device.num_pinned_bytes <= 3 * NUM_BUFFERS * CHUNK, "the two trees of the source, and the healer"
    finally:
        source.server.close()
        healer.server.close()


# PINNED-2
def test_a_checkpoint_of_a_state_on_a_device_is_copied_through_two_buffers(device: FakeDevice) -> None:
    rank = on_device(Rank(2, size=700), device)
    registered = rank.server.registered
    registered.small.keep()
    seated = Seated(eg.ParallelLayout(), (0, 0, 0))
    shares = []
    for _ in range(2):
        captured = capture(registered.tree(), seated, 0, 1)
        assert captured is not None
        data = bytearray(captured.shard.num_bytes)
        assert captured.copy_to(memoryview(data), lambda: False, registered.small.written)
        shares.append(bytes(data))
        assert device.num_pinned_bytes == NUM_BUFFERS * CHUNK
        device.put_none()
    assert shares[0] == shares[1], "as from the CPU"
    rank.server.close()


# PINNED-2, SMALLSTATE-4
def test_a_reader_sees_parameters_that_the_code_of_the_loop_before_a_step_has_changed(device: FakeDevice) -> None:
    rank = on_device(Rank(2), device)
    registered, weight = rank.server.registered, next(rank.model.parameters()).detach()
    new = torch.full_like(weight, 7.0)
    try:
        registered.small.reach()
        with device.present:
            weight.copy_(new, non_blocking=True)
        rank.server.begin(None)
        read = b"".join(bytes(chunk) for chunk in Reader(registered.small.written).chunks(weight))
        assert read == bytes(as_bytes(new))
    finally:
        rank.server.close()


# BITS-2
def test_the_digests_of_a_device_are_those_of_the_host_through_two_buffers(device: FakeDevice) -> None:
    tensors = {str(size): tensor_of(size, 1) for size in (1, 37, 3 * staging.CHUNK_BYTES // 4 + 1)}
    large = {"parameters": {"model": tensors}, "optimizers": {}}
    wanted = state_bits.digest(large, lambda: None)
    device.put(*tensors.values())
    for tensor in tensors.values():
        tensor.fill_(0.0)
    with device.present:  # the last apply is still to come on the device
        for tensor in tensors.values():
            tensor.copy_(tensor_of(tensor.numel(), 1), non_blocking=True)
    assert state_bits.digest(large, lambda: None) == wanted
    assert device.num_pinned_bytes == NUM_BUFFERS * staging.CHUNK_BYTES


def test_a_cancelled_copy_ends_between_two_chunks(device: FakeDevice) -> None:
    rank = on_device(Rank(2, size=700), device)
    registered = rank.server.registered
    registered.small.keep()
    captured = capture(registered.tree(), Seated(eg.ParallelLayout(), (0, 0, 0)), 0, 1)
    assert captured is not None
    looks = iter([False, False, True])
    assert not captured.copy_to(memoryview(bytearray(captured.shard.num_bytes)), lambda: next(looks), device.mark())
    rank.server.close()
