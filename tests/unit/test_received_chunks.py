"""However chunks arrive, the state that has been received is the expected one, and nothing else has been written to."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elasticgang.errors import WireError
from elasticgang.state import staging
from elasticgang.state.received_chunks import ReceivedChunks
from elasticgang.state.serialization import as_bytes

CHUNK, ROWS, COLUMNS, NUM_STATES = 8, 3, 4, 3
FORMS = ("in place", "not contiguous", "elsewhere", "absent")
NUM_CHUNKS = ROWS * COLUMNS // CHUNK + 1  # of each tensor


def digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def tensor_of(values: list[int]) -> Tensor:
    """One value for each chunk: two states may have the same in one."""
    return torch.tensor(values, dtype=torch.uint8).repeat_interleave(CHUNK)[: ROWS * COLUMNS].view(ROWS, COLUMNS)


class Reader(staging.Reader):
    def read(self, tensor: Tensor, start: int, end: int) -> memoryview:
        assert tensor.is_contiguous(), "it makes a copy of all of it, in each thread that receives"
        return super().read(tensor, start, end)


def write(data: memoryview) -> Callable[[memoryview], None]:
    def into(buffer: memoryview) -> None:
        buffer[:] = data

    return into


def bytes_of(chunks: ReceivedChunks, index: int, state: list[Tensor]) -> memoryview:
    place = chunks.place(index)
    return as_bytes(state[place.tensor])[place.start : place.end]


VALUES = st.lists(st.integers(0, 1), min_size=NUM_CHUNKS, max_size=NUM_CHUNKS)


# RECEIVED-1, RECEIVED-2, RECEIVED-3, HEALER-4
@settings(max_examples=80)
@given(data=st.data(), forms=st.lists(st.sampled_from(FORMS), min_size=1, max_size=3))
def test_a_state_is_whole_whatever_arrives_in_which_order(data: st.DataObject, forms: list[str]) -> None:
    def draw_state() -> list[Tensor]:
        return [tensor_of(data.draw(VALUES)) for _ in forms]

    states, targets, own = [draw_state() for _ in range(NUM_STATES)], draw_state(), list[Tensor | None]()
    for number, form in enumerate(forms):
        if form == "not contiguous":
            targets[number] = targets[number].t().contiguous().t()
        own.append({"elsewhere": tensor_of(data.draw(VALUES)), "absent": None}.get(form, targets[number]))
    before = [None if each is None else each.clone() for each in own]
    with mock.patch.object(staging, "CHUNK_BYTES", CHUNK):
        chunks = ReceivedChunks(lambda *request: (targets, own), digest)
        for state in states:  # the last one arrives whole
            with chunks.changed:
                chunks.expect(None, [])
            places = range(NUM_CHUNKS * len(forms))
            writer, reader = staging.ChunkWriter(), Reader(None)
            for index in data.draw(st.sets(st.sampled_from(places)), "early"):
                chunks.receive(index, writer, write(bytes_of(chunks, index, data.draw(st.sampled_from(states)))))
            with chunks.changed:
                chunks.expect_digests([digest(bytes_of(chunks, index, state)) for index in places])
            wrong = data.draw(st.sets(st.sampled_from(places)), "wrong")
            for index in data.draw(st.permutations(places), "order"):
                if index in wrong and index in chunks.missing:
                    with contextlib.suppress(WireError):
                        chunks.receive(index, writer, write(memoryview(bytes(bytes_of(chunks, index, state).nbytes))))
                if state is not states[-1] and data.draw(st.booleans()):
                    continue
                if index in chunks.missing and not chunks.is_here(index, reader):
                    chunks.receive(index, writer, write(bytes_of(chunks, index, state)))
        assert not chunks.missing
    assert all(map(torch.equal, targets, states[-1]))
    for form, former, present in zip(forms, before, own, strict=True):
        assert form != "elsewhere" or (former is not None and present is not None and torch.equal(former, present))
