"""Healing from the memory of holders on the same host: other processes, which die, refuse, and train on."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticgang import testing
from elasticgang.errors import WireError
from elasticgang.session.credentials import Credentials
from elasticgang.state import peer_memory, snapshot_server, striped_fetch
from elasticgang.state.peer_memory import Lender, Offer, PeerMemory, UnreadableError
from tests.integration.memory_heals import SIZE, address_of, assert_healed, healer_chunks, process
from tests.integration.memory_holder import CHUNK, after
from tests.integration.state_ranks import AT, Background, Rank, same
from tests.support import DEADLINE_S, wait_until

MANY = 150
pytestmark = pytest.mark.usefixtures("fetches")  # in small chunks


def test_a_holder_on_this_host_is_read_from_its_memory(fetches: list[striped_fetch.StripedFetch]) -> None:
    with process("holder") as holder:
        healer = Rank(1, size=SIZE)
        assert healer.server.heal([address_of(holder)], AT)
    assert_healed(healer)
    assert fetches[0].num_from_memory == healer_chunks(healer)
    assert healer.progress[-1][0] == healer.progress[-1][1] > 0


# FETCH-3, PEERMEM-1
def test_a_holder_that_is_killed_in_the_middle_is_replaced_by_another(
    fetches: list[striped_fetch.StripedFetch],
) -> None:
    with process("holder") as first, process("holder") as second:
        addresses = [address_of(first), address_of(second)]
        with testing.fail_at("chunk_received", after(10, first.kill)):
            healer = Rank(1, size=SIZE)
            assert healer.server.heal(addresses, AT)
    assert_healed(healer)


# FETCH-5, RECEIVED-2
def test_chunks_read_before_the_holder_was_killed_are_kept(
    fetches: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striped_fetch, "NUM_MEMORY_READERS", 1)
    healer = Rank(1, size=SIZE)
    with process("holder") as first:

        def end() -> None:
            first.kill()
            first.wait(DEADLINE_S)

        with testing.fail_at("chunk_received", after(50, end)):
            assert not healer.server.heal([address_of(first)], AT)
    num_kept = fetches[0].num_from_memory
    assert num_kept >= 40
    with process("holder") as second:
        assert healer.server.heal([address_of(second)], AT)
    assert_healed(healer)
    assert fetches[1].num_from_memory == healer_chunks(healer) - num_kept


# SNAPSHOT-2
def test_a_healer_that_is_killed_in_the_middle_does_not_hold_up_an_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_server, "EXCLUSIVE_TIMEOUT_S", DEADLINE_S)
    source = Rank(2, size=SIZE)
    source.server.begin(AT)
    with process("victim", source.server.address, seed=1) as victim:
        assert victim.wait(DEADLINE_S) == -signal.SIGKILL
        with source.server.exclusive():
            pass
    source.server.begin(AT)
    healer = Rank(1, size=SIZE)
    assert healer.server.heal([source.server.address], AT)
    assert_healed(healer)


# SNAPSHOT-2, RECEIVED-2
def test_bytes_of_a_holder_that_trains_on_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The healer stands still after a chunk, for longer than the holder waits."""
    monkeypatch.setattr(snapshot_server, "EXCLUSIVE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(striped_fetch, "NUM_MEMORY_READERS", 1)
    source, healer = Rank(2, size=SIZE), Rank(1, size=SIZE)
    source.server.begin(AT)
    standing, goes_on = threading.Event(), threading.Event()

    def stand() -> None:
        standing.set()
        assert goes_on.wait(DEADLINE_S)

    with testing.fail_at("chunk_received", stand):
        healing = Background(lambda: healer.server.heal([source.server.address], AT))
        assert standing.wait(DEADLINE_S)
        with source.server.exclusive():
            with torch.no_grad():
                for parameter in source.model.parameters():
                    parameter.add_(1)
            goes_on.set()
            assert healing.result() is False
    with process("holder") as other:
        assert healer.server.heal([address_of(other)], AT)
    assert_healed(healer)


# PEERMEM-4
@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows the number of the system call of x86-64 alone")
def test_a_healer_that_may_not_read_heals_over_the_connection() -> None:
    source = Rank(2, size=SIZE)
    source.server.begin(AT)
    with process("refused", source.server.address, seed=1) as healer:
        output, errors = healer.communicate(timeout=DEADLINE_S)
    assert (healer.returncode, output.strip()) == (0, "0"), errors
    assert "its memory cannot be read: process" in errors
    assert "Operation not permitted" in errors


# FETCH-7, FETCH-5
def test_memory_that_cannot_be_read_any_more_is_sent(
    fetches: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, healer = Rank(2, size=SIZE), Rank(1, size=SIZE)
    source.server.begin(AT)
    read, lock, num = PeerMemory.read, threading.Lock(), 0

    def at_first(memory: PeerMemory, *place: Any) -> None:
        nonlocal num
        with lock:
            num += 1
            if num > 50:
                raise UnreadableError("not permitted any more")
        read(memory, *place)

    monkeypatch.setattr(PeerMemory, "read", at_first)
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())
    assert (fetches[0].num_from_memory, len(fetches)) == (50, 1)
    assert sum(fetches[0].num_from.values()) == healer_chunks(healer)


# PEERMEM-4, FETCH-7
def test_a_holder_on_another_host_sends_its_part(fetches: list[striped_fetch.StripedFetch]) -> None:
    with process("holder") as here, process("elsewhere") as there:
        addresses = [address_of(here), address_of(there)]
        healer = Rank(1, size=SIZE)

        def wait_for_both() -> None:
            wait_until(lambda: fetches[0].num_from.keys() == set(addresses), "a chunk from each holder")

        with testing.fail_at("chunk_received", wait_for_both):
            assert healer.server.heal(addresses, AT)
    assert_healed(healer)
    assert fetches[0].num_from[addresses[1]] > 0
    assert 0 < fetches[0].num_from_memory < healer_chunks(healer)


# PEERMEM-4
def test_a_tensor_that_is_not_contiguous_comes_over_the_connection(fetches: list[striped_fetch.StripedFetch]) -> None:
    source, healer = Rank(2, size=SIZE), Rank(1, size=SIZE)
    for rank in (source, healer):
        weight = rank.model[0].weight
        assert isinstance(weight, torch.Tensor)
        weight.data = weight.data.t().contiguous().t()
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())
    num_on_wire = -(-SIZE * 3 * 4 // CHUNK)
    assert MANY < fetches[0].num_from_memory <= healer_chunks(healer) - num_on_wire


# -- what a holder announces


class Child:
    """A process with `nonce` in its memory, where this process has `at`: a fork of it."""

    def __init__(self, nonce: bytes, number: int | None = None) -> None:
        self.memory = ctypes.create_string_buffer(nonce, peer_memory.NONCE_BYTES)
        self.pid = os.fork() if number is None else _fork_as(number)
        if self.pid == 0:
            signal.pause()
            os._exit(0)

    @property
    def at(self) -> int:
        return ctypes.addressof(self.memory)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _fork_as(number: int) -> int:
    """A fork with this process id (clone3 with set_tid)."""
    ids = (ctypes.c_int * 1)(number)
    arguments = (ctypes.c_uint64 * 11)(0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(ids), 1, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    pid = int(libc.syscall(435, arguments, ctypes.sizeof(arguments)))
    if pid < 0:
        pytest.skip(f"clone3: {os.strerror(ctypes.get_errno())}")
    return pid


def announced(child: Child, **other: Any) -> dict[str, Any]:
    return {"pid": child.pid, "nonce": child.at, "tensors": [child.at], **other}


# PEERMEM-1
def test_a_process_without_the_nonce_is_not_read() -> None:
    offer, child = Offer(), Child(b"")
    try:
        with pytest.raises(UnreadableError, match="is not the peer"):
            PeerMemory(announced(child), offer, [32])
    finally:
        child.end()


# PEERMEM-1
@pytest.mark.parametrize("is_reused", [False, True])
def test_a_process_that_has_the_id_of_the_holder_is_not_read(*, is_reused: bool) -> None:
    offer = Offer()
    child = Child(offer.nonce)
    with PeerMemory(announced(child), offer, [32]) as memory:
        data = bytearray(32)
        memory.read(memoryview(data), 0, 0)
        assert data == offer.nonce
        child.end()
        other = Child(b"other", child.pid) if is_reused else None
        try:
            with pytest.raises(UnreadableError, match="exited" if is_reused else "No such process"):
                memory.read(memoryview(data), 0, 0)
        finally:
            if other is not None:
                other.end()


# PEERMEM-2
@pytest.mark.parametrize(("start", "length"), [(0, 33), (32, 1), (-1, 1), (1, 32)])
def test_bytes_beside_an_announced_tensor_are_not_read(start: int, length: int) -> None:
    offer = Offer()
    child = Child(offer.nonce)
    try:
        with (
            PeerMemory(announced(child), offer, [32]) as memory,
            pytest.raises(UnreadableError, match="were not announced"),
        ):
            memory.read(memoryview(bytearray(length)), 0, start)
    finally:
        child.end()


# PEERMEM-2
@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"tensors": []}, id="too few"),
        pytest.param({"tensors": [1, 1]}, id="too many"),
        pytest.param({"tensors": [-1]}, id="negative"),
        pytest.param({"tensors": [True]}, id="no integer"),
        pytest.param({"tensors": [(1 << 57) - 31]}, id="beyond all memory"),
        pytest.param({"nonce": 1.5}, id="no address"),
        pytest.param({"pid": 1 << 22}, id="no process id"),
        pytest.param({"pid": 0}, id="a process group"),
    ],
)
def test_an_invalid_announcement_is_refused(other: dict[str, Any]) -> None:
    child = Child(b"")
    try:
        with pytest.raises(WireError, match=r"is no process id or address|addresses do not match"):
            PeerMemory(announced(child, **other), Offer(), [32])
    finally:
        child.end()


# PEERMEM-3
def test_one_authenticated_healer_at_a_time_is_named_as_tracer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named: list[int] = []

    def name(pid: int) -> bool:
        named.append(pid)
        return True

    monkeypatch.setattr(peer_memory, "name_tracer", name)
    monkeypatch.setattr(peer_memory, "YAMA_SCOPE", tmp_path / "ptrace_scope")
    (tmp_path / "ptrace_scope").write_text("1\n")
    offer, lender = {**Offer().to_json(), "pid": os.getpid() + 1}, Lender(are_authenticated=True)
    with lender.lend(offer, []) as first, lender.lend(offer, []) as second:
        assert (first is not None, second) == (True, None)
        assert named == [offer["pid"]]
    assert named == [offer["pid"], 0]
    with lender.lend(offer, []) as third, Lender(are_authenticated=False).lend(offer, []) as unauthenticated:
        assert (third is not None, unauthenticated) == (True, None)
    (tmp_path / "ptrace_scope").write_text("0\n")
    with Lender(are_authenticated=False).lend(offer, []) as fourth:
        assert fourth is not None
    assert named == [offer["pid"], 0] * 2


# PEERMEM-3
def test_a_kernel_that_names_no_tracer_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ptrace_scope").write_text("1\n")
    monkeypatch.setattr(peer_memory, "YAMA_SCOPE", tmp_path / "ptrace_scope")
    offer = {**Offer().to_json(), "pid": (1 << 22) - 1}  # there is no such process
    with Lender(are_authenticated=True).lend(offer, []) as found:
        assert found is None


def test_a_small_state_comes_over_the_connection(
    fetches: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_memory, "MIN_BYTES", 16 << 20)
    with process("holder") as holder:
        healer = Rank(1, size=SIZE)
        assert healer.server.heal([address_of(holder)], AT)
    assert_healed(healer)
    assert fetches[0].num_from_memory == 0


def test_without_credentials_memory_is_read_on_loopback(fetches: list[striped_fetch.StripedFetch]) -> None:
    source, healer = Rank(2, size=SIZE, credentials=Credentials()), Rank(1, size=SIZE, credentials=Credentials())
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    assert fetches[0].num_from_memory == healer_chunks(healer)
