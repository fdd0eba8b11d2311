"""Chunks that are read from memory before their holder has computed the digests: nothing of them is used before."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import xxhash

from elasticgang import testing
from elasticgang.protocol.commit import Attempt
from elasticgang.state import digests, peer_memory, snapshot_server, striped_fetch, transport
from elasticgang.state.peer_memory import PeerMemory
from tests.integration.memory_heals import SIZE, address_of, assert_healed, healer_chunks, process
from tests.integration.memory_holder import after
from tests.integration.state_ranks import AT, FIRST, Background, Rank, same
from tests.support import DEADLINE_S, wait_until

pytestmark = pytest.mark.usefixtures("fetches")  # in small chunks


class Gate:
    """A holder's digest that waits until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.num_digests, self._lock = threading.Event(), 0, threading.Lock()
        monkeypatch.setattr(snapshot_server, "digest_for", lambda credentials: self._digest)
        monkeypatch.setattr("elasticgang.state.healer.digest_for", lambda credentials: xxhash.xxh3_128_hexdigest)

    def opens_as_digests_are_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For an apply (SNAPSHOT-3), which has closed the connections of all healers by then."""
        stop = digests.Digests.stop

        def stop_and_open(of: digests.Digests) -> None:
            stop(of)
            self.opened.set()

        monkeypatch.setattr(digests.Digests, "stop", stop_and_open)

    def _digest(self, data: memoryview) -> str:
        assert self.opened.wait(DEADLINE_S)
        with self._lock:
            self.num_digests += 1
        return xxhash.xxh3_128_hexdigest(data)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def begun(seed: int, attempt: Attempt = AT) -> Rank:
    rank = Rank(seed, size=SIZE)
    rank.server.begin(attempt)
    return rank


def healing(healer: Rank, sources: list[str], attempt: Attempt = AT) -> Background:
    return Background(lambda: healer.server.heal(sources, attempt))


def wait_for_chunks(fetches: list[striped_fetch.StripedFetch], num: int) -> None:
    wait_until(lambda: bool(fetches) and sum(fetches[-1].num_from.values()) >= num, "chunks")


# FETCH-8, RECEIVED-3, SERVING-1
@pytest.mark.parametrize("attempt", [FIRST, AT])
def test_all_chunks_are_read_before_a_digest_is_known(
    attempt: Attempt, fetches: list[striped_fetch.StripedFetch], gate: Gate
) -> None:
    source, healer = begun(2, attempt), Rank(1, size=SIZE)
    before = healer.small(), healer.optim.state_dict()["param_groups"]
    running = healing(healer, [source.server.address], attempt)
    wait_for_chunks(fetches, healer_chunks(source))
    assert gate.num_digests == 0
    assert same((healer.small(), healer.optim.state_dict()["param_groups"]), before)
    gate.opened.set()
    assert running.result() is True
    assert_healed(healer)
    assert fetches[0].num_from_memory == gate.num_digests == healer_chunks(source)
    assert healer.progress[-1][0] == healer.progress[-1][1] > 0


# FETCH-1, FETCH-8
def test_a_holder_killed_before_it_has_a_digest_is_replaced_by_another(
    fetches: list[striped_fetch.StripedFetch],
) -> None:
    with process("digesting") as first, process("holder") as second:
        addresses = [address_of(first), address_of(second)]
        with testing.fail_at("chunk_received", after(100, first.kill)):
            healer = Rank(1, size=SIZE)
            assert healer.server.heal(addresses, AT)
    assert_healed(healer)


# FETCH-8, RECEIVED-2
@pytest.mark.parametrize("num", [1, 60, None])
def test_chunks_of_a_holder_that_was_killed_before_its_digests_are_kept(
    num: int | None, fetches: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`num`: it is killed after so many chunks; None: after the last one."""
    monkeypatch.setattr(striped_fetch, "NUM_MEMORY_READERS", 1)
    healer = Rank(1, size=SIZE)
    num = num or healer_chunks(Rank(2, None, size=SIZE))
    with process("digesting") as first:

        def end() -> None:
            first.kill()
            first.wait(DEADLINE_S)

        with testing.fail_at("chunk_received", after(num, end)):
            assert not healer.server.heal([address_of(first)], AT)
    assert healer.server.num_received == num
    with process("holder") as second:
        assert healer.server.heal([address_of(second)], AT)
    assert_healed(healer)
    assert fetches[1].num_from_memory == healer_chunks(healer) - num


# FETCH-8
def test_the_digests_of_one_holder_are_enough(fetches: list[striped_fetch.StripedFetch], gate: Gate) -> None:
    """The one that has begun is asked, whichever is asked first for its manifest."""
    sources, healer = [begun(2), begun(2), begun(2)], Rank(1, size=SIZE)
    sources[1].server.prepare(AT)
    running = healing(healer, [source.server.address for source in sources])
    wait_for_chunks(fetches, healer_chunks(sources[0]))
    gate.opened.set()
    assert running.result() is True
    assert_healed(healer)
    assert gate.num_digests <= 2 * healer_chunks(healer)  # another may have been asked before that one had begun


# DIGEST-2
def test_digests_that_two_healers_wait_for_are_computed_once(
    fetches: list[striped_fetch.StripedFetch], gate: Gate
) -> None:
    source, healers = begun(2), [Rank(1, size=SIZE), Rank(1, size=SIZE)]
    running = [healing(healer, [source.server.address]) for healer in healers]
    wait_until(lambda: len(fetches) == len(healers), "healers")
    for fetch in fetches:
        wait_until(lambda fetch=fetch: fetch.num_from_memory == healer_chunks(source), "chunks")  # type: ignore[misc]
    gate.opened.set()
    assert all(each.result() is True for each in running)
    for healer in healers:
        assert_healed(healer)
    assert gate.num_digests == healer_chunks(source)


# RECEIVED-3
def test_chunks_that_do_not_have_their_digest_are_read_again(
    fetches: list[striped_fetch.StripedFetch], gate: Gate
) -> None:
    source, healer = begun(2), Rank(1, size=SIZE)
    running = healing(healer, [source.server.address])
    wait_for_chunks(fetches, healer_chunks(source))
    weight = source.model[0].weight
    with torch.no_grad():
        weight[5] += 1  # type: ignore[index, operator]
        weight[SIZE - 1] += 1  # type: ignore[index, operator]
    gate.opened.set()
    assert running.result() is True
    assert same(healer.large(), source.large())
    assert fetches[0].num_from_memory == healer_chunks(source) + 2


# FETCH-8, RECEIVED-3
@pytest.mark.parametrize("is_right", [True, False])
def test_a_digest_that_is_learnt_while_its_chunk_is_read_counts(
    is_right: bool, fetches: list[striped_fetch.StripedFetch], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, healer = begun(2), Rank(1, size=SIZE)
    read, agreed = PeerMemory.read, threading.Event()
    held: list[int] = []

    def stand(memory: PeerMemory, data: memoryview, tensor: int, start: int) -> None:
        read(memory, data, tensor, start)
        if threading.current_thread().name == "memory-reader" and not held:
            held.append(start)
            data[0] = data[0] if is_right else data[0] ^ 1
            gate.opened.set()
            assert agreed.wait(DEADLINE_S)

    monkeypatch.setattr(PeerMemory, "read", stand)
    with testing.fail_at("digests_agreed", agreed.set):
        assert healer.server.heal([source.server.address], AT)
    assert held
    assert_healed(healer)


# RECEIVED-3
def test_a_digest_that_is_learnt_right_after_its_chunk_was_read_is_not_lost(
    fetches: list[striped_fetch.StripedFetch], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk is wrong, and no thread has it in its hands any more."""
    source, healer = begun(2), Rank(1, size=SIZE)
    read, agreed = PeerMemory.read, threading.Event()
    held: list[int] = []

    def corrupt(memory: PeerMemory, data: memoryview, tensor: int, start: int) -> None:
        read(memory, data, tensor, start)
        if threading.current_thread().name == "memory-reader" and not held:
            held.append(start)
            data[0] ^= 1

    def stand() -> None:
        if threading.current_thread().name == "memory-reader" and not agreed.is_set():
            gate.opened.set()
            assert agreed.wait(DEADLINE_S)

    monkeypatch.setattr(PeerMemory, "read", corrupt)
    with testing.fail_at("digests_agreed", agreed.set), testing.fail_at("chunk_read", stand):
        assert healer.server.heal([source.server.address], AT)
    assert held
    assert_healed(healer)


# FETCH-1, FETCH-8
def test_digests_are_requested_of_another_holder_once_the_first_is_dropped(
    fetches: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is read from the first one is wrong. The second has the step only once the first is dropped."""
    first, second, healer = begun(2), Rank(2, size=SIZE), Rank(1, size=SIZE)
    read, is_dropped, expired = PeerMemory.read, threading.Event(), threading.Event()

    def corrupt(memory: PeerMemory, data: memoryview, tensor: int, start: int) -> None:
        read(memory, data, tensor, start)
        if not is_dropped.is_set():
            data[0] ^= 1

    def begin() -> None:
        text = f"could not heal from {first.server.address}"
        wait_until(lambda: any(text in message for message in caplog.messages), "the first is dropped")
        is_dropped.set()
        second.server.begin(AT)

    monkeypatch.setattr(PeerMemory, "read", corrupt)
    timer = threading.Timer(DEADLINE_S, expired.set)
    timer.start()
    beginning = Background(begin)
    assert healer.server.heal([first.server.address, second.server.address], AT, expired.is_set)
    timer.cancel()
    beginning.result()
    assert_healed(healer)


# FETCH-8, PEERMEM-4
def test_digests_are_requested_of_a_holder_whose_memory_cannot_be_read(
    fetches: list[striped_fetch.StripedFetch], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(memory: PeerMemory, *args: Any) -> None:
        raise peer_memory.UnreadableError("not permitted")

    monkeypatch.setattr(PeerMemory, "read", refuse)
    source, healer = begun(2), Rank(1, size=SIZE)
    gate.opened.set()
    assert healer.server.heal([source.server.address], AT)
    assert_healed(healer)
    assert fetches[0].num_from_memory == 0


# SNAPSHOT-2, SNAPSHOT-3
def test_a_healer_that_is_killed_before_it_has_digests_does_not_hold_up_an_apply(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_server, "EXCLUSIVE_TIMEOUT_S", 0.5)
    source = begun(2)
    with process("victim", source.server.address, seed=1) as victim:
        assert victim.wait(DEADLINE_S) == -signal.SIGKILL
        assert gate.num_digests == 0
        gate.opens_as_digests_are_stopped(monkeypatch)
        with source.server.exclusive():
            pass
    assert gate.num_digests <= digests.NUM_DIGESTERS
    gate.opened.set()  # also where the holder had not begun to serve the victim before the apply
    source.server.begin(AT)
    healer = Rank(1, size=SIZE)
    # The holder may still be giving up the digests for the victim: the healer then tries again, as in its next step.
    wait_until(lambda: healer.server.heal([source.server.address], AT), "the healer has the state")
    assert_healed(healer)


# SNAPSHOT-2, RECEIVED-3
def test_an_apply_before_the_digests_leaves_nothing_that_counts(
    fetches: list[striped_fetch.StripedFetch], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder does not wait for its healer, and trains on. What was read is of the step before."""
    monkeypatch.setattr(snapshot_server, "EXCLUSIVE_TIMEOUT_S", 0.2)
    source, healer = begun(2), Rank(1, size=SIZE)
    running = healing(healer, [source.server.address])
    wait_for_chunks(fetches, healer_chunks(source))
    gate.opens_as_digests_are_stopped(monkeypatch)
    with source.server.exclusive():
        source.train()
    assert running.result() is False
    assert healer.progress[-1] == (0, 0)
    later = Attempt(AT.step + 1, AT.generation)
    source.server.begin(later)
    assert healer.server.heal([source.server.address], later)
    assert same(healer.large(), source.large())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have each digest of a holder take so long."""
    monkeypatch.setattr(digests, "TELL_S", 0.2)
    monkeypatch.setattr(transport, "HEAL_TIMEOUT_S", 2.0)

    def make(digest_s: float) -> None:
        def digest(data: memoryview) -> str:
            time.sleep(digest_s)
            return xxhash.xxh3_128_hexdigest(data)

        monkeypatch.setattr(snapshot_server, "digest_for", lambda credentials: digest)
        monkeypatch.setattr("elasticgang.state.healer.digest_for", lambda credentials: xxhash.xxh3_128_hexdigest)

    return make


# FETCH-9, SERVING-2
@pytest.mark.parametrize("min_bytes", [0, 1 << 40])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_holder_may_compute_digests_for_longer_than_a_heal_waits(
    min_bytes: int, is_prepared: bool, slow: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`min_bytes`: 0 to read from memory."""
    monkeypatch.setattr(peer_memory, "MIN_BYTES", min_bytes)
    slow(0.04)
    source, healer = Rank(2, size=SIZE), Rank(1, size=SIZE)
    if is_prepared:
        source.server.prepare(AT)
    source.server.begin(AT)
    begun_at = time.monotonic()
    assert healer.server.heal([source.server.address], AT)
    assert time.monotonic() - begun_at > transport.HEAL_TIMEOUT_S
    assert_healed(healer)


# FETCH-9
def test_a_holder_that_gets_no_further_with_its_digests_is_given_up(
    gate: Gate, slow: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, healer = begun(2), Rank(1, size=SIZE)
    assert not healer.server.heal([source.server.address], AT)
    assert gate.num_digests == 0
