"""A holder computes digests for learners: before they are requested, and not beside an apply."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import xxhash
from torch import Tensor

from elasticgang.state import digests, snapshot_server, staging, transport
from elasticgang.state.serialization import flatten
from tests.integration.state_ranks import AT, DEADLINE_S, Background, Rank, Wire, same
from tests.support import wait_until

SIZE = 20_000
CHUNK = 4000


class Counted:
    """The digest of a holder. `before` is called for each chunk."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.num = 0
        self._before, self._lock = before, threading.Lock()

    def __call__(self, data: memoryview) -> str:
        self._before()
        with self._lock:
            self.num += 1
        return xxhash.xxh3_128_hexdigest(data)


class LastReader:
    """Waits to be shut."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self.is_shut = rank, threading.Event()
        rank.server.lend(self)

    def shut(self) -> None:
        self.is_shut.set()
        # The caller holds the server's lock.
        threading.Thread(target=self._rank.server.give_back, args=(self,)).start()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK)


def holder_with(digest: Counted, monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(snapshot_server, "digest_for", lambda credentials: digest)
    return Rank(2, size=SIZE)


def num_chunks(rank: Rank) -> int:
    return sum(len(transport.chunks(tensor)) for tensor in flatten(rank.large())[1])


# SNAPSHOT-4
def test_prepared_digests_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = Counted()
    source = holder_with(digest, monkeypatch)
    source.server.prepare(AT)
    wait_until(lambda: digest.num == num_chunks(source), "the digests")
    source.server.begin(AT)
    monkeypatch.setattr("elasticgang.state.healer.digest_for", lambda credentials: xxhash.xxh3_128_hexdigest)
    healer = Rank(1, size=SIZE)
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())
    assert digest.num == num_chunks(source)


# SNAPSHOT-4
def test_an_apply_stops_the_preparation_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_server, "EXCLUSIVE_TIMEOUT_S", 0.5)
    begun, goes_on = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        assert goes_on.wait(DEADLINE_S)

    digest = Counted(block)
    source = holder_with(digest, monkeypatch)
    source.server.prepare(AT)
    assert begun.wait(DEADLINE_S)
    last = LastReader(source)
    applying = Background(lambda: apply_once(source))
    assert last.is_shut.wait(DEADLINE_S)
    goes_on.set()
    assert applying.result()
    assert digest.num <= digests.NUM_DIGESTERS


def apply_once(rank: Rank) -> bool:
    with rank.server.exclusive():
        return True


# SNAPSHOT-3
def test_an_apply_stops_digests_that_a_healer_has_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take longer than the apply waits."""
    monkeypatch.setattr(snapshot_server, "EXCLUSIVE_TIMEOUT_S", 1.0)
    begun = threading.Event()

    def take_long() -> None:
        begun.set()
        time.sleep(0.1)

    digest = Counted(take_long)
    source = holder_with(digest, monkeypatch)
    source.server.begin(AT)
    healer = Rank(1, size=SIZE)
    healing = Background(lambda: healer.server.heal([source.server.address], AT))
    assert begun.wait(DEADLINE_S)
    assert apply_once(source)
    assert healing.result() is False
    assert 0 < digest.num < num_chunks(source)


# DIGEST-3
def test_a_failure_is_raised_once_every_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "TELL_S", 0.01)
    begun, waits, returned, ended = (threading.Event() for _ in range(4))
    first = threading.current_thread()

    def digest(data: memoryview) -> str:
        if threading.current_thread() is first:
            assert begun.wait(DEADLINE_S)
            raise ValueError("the first")
        begun.set()
        waits.wait(DEADLINE_S)  # until the first thread, which has noted its error, waits for this one
        returned.wait(0.2)  # is set if nobody waits for this thread
        ended.set()
        raise ValueError("the second")

    tensors = [torch.zeros(4 * CHUNK)]
    of = digests.Digests(digest)
    with pytest.raises(ValueError, match="the first"):
        of.of(AT, tensors, staging.Chunks(tensors, None), tell=lambda num: waits.set())
    has_ended = ended.is_set()
    returned.set()
    waits.set()
    assert has_ended
    assert not of.are_begun(AT)


# DIGEST-3
def test_a_failure_of_a_further_thread_ends_the_others() -> None:
    failing, failed, num = threading.Event(), threading.Event(), 0
    first = threading.current_thread()

    def digest(data: memoryview) -> str:
        nonlocal num
        if threading.current_thread() is not first:
            failing.set()
            raise ValueError("the second")
        assert failing.wait(DEADLINE_S)
        failed.wait(0.01)  # the other thread notes its error
        num += 1
        return "a digest"

    tensors = [torch.zeros(600 * CHUNK)]
    chunks = staging.Chunks(tensors, None)
    with pytest.raises(ValueError, match="the second"):
        digests.Digests(digest).of(AT, tensors, chunks)
    assert num < len(chunks) // digests.NUM_DIGESTERS - 200  # of the first thread's: the other one has 10 s


# RECEIVED-2
def test_chunks_that_were_received_into_memory_which_is_replaced_are_not_used() -> None:
    """A weight that was not contiguous is half received, in a copy, when a contiguous one takes its place."""
    source, healer = Rank(2, size=SIZE), Rank(1, size=SIZE)
    weight = healer.model[0].weight
    assert isinstance(weight, Tensor)
    weight.data = weight.data.t().contiguous().t()
    source.server.begin(AT)
    with Wire(source, cut=300_000) as wire:
        assert not healer.server.heal([wire.address], AT)
    assert healer.server.num_received > 10
    weight.data = weight.data.clone().contiguous()
    assert weight.is_contiguous()
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())


def test_an_object_that_is_no_longer_registered_has_no_received_chunks() -> None:
    source, healer = Rank(2, size=SIZE), Rank(1, size=SIZE)
    source.server.begin(AT)
    with Wire(source, cut=300_000) as wire:
        assert not healer.server.heal([wire.address], AT)
    assert healer.server.num_received > 10
    with healer.server.exclusive():
        healer.server.unregister(["model", "optim", "counter"])
    assert healer.server.num_received == 0
    assert not healer.server.registered.objects.is_registered(healer.model)
