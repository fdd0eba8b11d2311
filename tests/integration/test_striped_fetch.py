"""Healing from all holders at once, over real loopback TCP: shared out, cut off, corrupted, and in disagreement."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

from elasticgang import testing
from elasticgang.errors import OperationalError
from elasticgang.protocol.commit import Attempt
from elasticgang.state import received_chunks, serving, staging, striped_fetch, transport
from elasticgang.state.received_chunks import ReceivedChunks
from elasticgang.state.serialization import flatten
from tests.integration.state_ranks import AT, DEADLINE_S, FIRST, Background, Rank, Wire, same
from tests.support import wait_until

SIZE = 20_000  # 3 floats each, thrice with the optimizer's state: 180 chunks of 4000 bytes


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[striped_fetch.StripedFetch]:
    """Every pull, of states of any size, in small chunks."""
    made: list[striped_fetch.StripedFetch] = []

    class Seen(striped_fetch.StripedFetch):
        """No holder gives anything before each has been asked for something, or is gone."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)
            self._asked: set[threading.Thread] = set()

        def _take(self, waits: bool) -> Any:
            taken = super()._take(waits)
            with self._changed:
                self._asked.add(threading.current_thread())
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: len(self._asked) >= self._num_live or self.is_over, 20)
            return taken

    monkeypatch.setattr(striped_fetch, "StripedFetch", Seen)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(striped_fetch, "STRIPE_BYTES", 1)
    return made


def holders(num: int, attempt: Attempt = AT) -> list[Rank]:
    """With one state, but for what forward changes."""
    found = [Rank(2, size=SIZE) for _ in range(num)]
    for index, rank in enumerate(found):
        rank.counter.state["count"] = index
        rank.model[1].running_mean.fill_(index)  # type: ignore[operator]
        rank.server.begin(attempt)
    return found


def addresses(ranks: list[Rank]) -> list[str]:
    return [rank.server.address for rank in ranks]


def assert_healed(healer: Rank, sources: list[Rank]) -> None:
    assert same(healer.large(), sources[0].large())
    assert same(healer.optim.state_dict(), sources[0].optim.state_dict())
    count = healer.counter.state["count"]
    assert same(healer.small(), sources[count].small())  # FETCH-2: all of it from one


def test_each_holder_sends_a_part(pulls: list[striped_fetch.StripedFetch]) -> None:
    sources, healer = holders(3), Rank(1, size=SIZE)

    def wait_for_all() -> None:
        wait_until(lambda: pulls[0].num_from.keys() == set(addresses(sources)), "a chunk from each holder")

    with testing.fail_at("chunk_received", wait_for_all):
        assert healer.server.heal(addresses(sources), AT)
    assert_healed(healer, sources)
    (only,) = pulls
    assert sum(only.num_from.values()) > 150


# FETCH-3
@pytest.mark.parametrize("cut", [0, 6_000])
def test_chunks_of_a_dead_holder_come_from_the_others(pulls: list[striped_fetch.StripedFetch], cut: int) -> None:
    sources, healer = holders(3), Rank(1, size=SIZE)
    wire = Wire(sources[0], cut=cut)
    assert healer.server.heal([wire.address, *addresses(sources[1:])], AT)
    assert wire.done.wait(20)
    assert_healed(healer, sources)
    assert sum(pulls[0].num_from.values()) - pulls[0].num_from.get(wire.address, 0) > 50


def test_a_wrong_chunk_is_fetched_from_another_holder(
    pulls: list[striped_fetch.StripedFetch], caplog: pytest.LogCaptureFixture
) -> None:
    sources, healer = holders(2), Rank(1, size=SIZE)
    wire = Wire(sources[0], flip=1000)  # behind the answer to a request for a turn
    with caplog.at_level(logging.WARNING, "elasticgang"):
        assert healer.server.heal([wire.address, *addresses(sources[1:])], AT)
    assert_healed(healer, sources)
    assert f"could not heal from {wire.address}: the digest of " in caplog.text


# FETCH-11
def test_why_a_source_cannot_be_used_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    healer, address = Rank(1, size=SIZE), "127.0.0.1:1"
    with caplog.at_level(logging.WARNING, "elasticgang"):
        for _ in range(3):
            assert not healer.server.heal([address], AT)
    assert caplog.text.count(f"could not heal from {address}: ") == 1


# FETCH-1
def test_a_holder_of_another_state_is_not_used(
    pulls: list[striped_fetch.StripedFetch], caplog: pytest.LogCaptureFixture
) -> None:
    sources, healer = holders(3), Rank(1, size=SIZE)
    with torch.no_grad():
        sources[1].model[0].weight[5] += 1  # type: ignore[index, operator]
    with caplog.at_level(logging.WARNING, "elasticgang"):
        assert healer.server.heal(addresses(sources), AT)
    assert "its state differs from another holder's state of the same step" in caplog.text
    given = set(pulls[0].num_from)
    weight = healer.model[0].weight
    assert any(same(weight, sources[index].model[0].weight) for index in (0, 1))
    assert (sources[1].server.address in given) == same(weight, sources[1].model[0].weight)
    assert given != set(addresses(sources))


# HEALER-1, HEALER-4
@pytest.mark.parametrize("attempt", [FIRST, AT])
def test_a_heal_fails_if_all_holders_die(attempt: Attempt, pulls: list[striped_fetch.StripedFetch]) -> None:
    sources, healer = holders(2, attempt), Rank(1, size=SIZE)
    before = healer.large(), healer.small()
    wires = [Wire(source, cut=6_000) for source in sources]
    assert not healer.server.heal([wire.address for wire in wires], attempt)
    assert same(healer.small(), before[1])
    assert attempt.step > 0 or same(healer.large(), before[0])
    assert healer.server.heal(addresses(sources), attempt)
    assert_healed(healer, sources)


def test_a_fetch_ends_with_the_generation(pulls: list[striped_fetch.StripedFetch]) -> None:
    sources, healer = [Rank(2, size=SIZE), Rank(2, size=SIZE)], Rank(1, size=SIZE)  # in no step: they do not answer
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    assert not healer.server.heal(addresses(sources), AT, cancelled.is_set)


def test_an_apply_waits_for_a_fetch_within_its_limit(pulls: list[striped_fetch.StripedFetch]) -> None:
    sources, healer = holders(2), Rank(1, size=SIZE)
    assert healer.server.heal(addresses(sources), AT)
    for source in sources:
        with source.server.exclusive():
            source.train()
    assert not same(healer.large(), sources[0].large())


def num_small_chunks(source: Rank) -> int:
    return sum(-(-buffer.nbytes // staging.CHUNK_BYTES) for buffer in source.model.buffers())


def num_chunks(rank: Rank) -> int:
    return sum(len(transport.chunks(tensor)) for tensor in flatten(rank.large())[1])


# FETCH-5
def test_chunks_received_before_a_cancel_are_not_requested_again(
    pulls: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, healer = holders(2), Rank(1, size=SIZE)
    came: list[int] = []
    cancelled = threading.Event()
    receive = ReceivedChunks.receive

    def counted(arrived: ReceivedChunks, index: int, *rest: Any) -> None:
        came.append(index)
        if len(came) >= 50:  # two threads may come at once
            cancelled.set()
        receive(arrived, index, *rest)

    monkeypatch.setattr(ReceivedChunks, "receive", counted)
    assert not healer.server.heal(addresses(sources), AT, cancelled.is_set)
    assert healer.server.heal(addresses(sources), AT)
    assert_healed(healer, sources)
    assert len(came) <= num_chunks(sources[0]) + len(sources)  # what was under way comes twice


# FETCH-4
def test_a_cancelled_fetch_ends_once_no_thread_writes_to_the_state(
    pulls: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk is half here when the fetch is cancelled; the thread that receives it is held up."""
    (source,), healer = holders(1), Rank(1, size=SIZE)
    cancelled, held, goes_on = threading.Event(), threading.Event(), threading.Event()
    receive = transport.receive_into

    def slow(sock: Any, view: memoryview) -> None:
        if len(view) == 4000:
            cancelled.set()
            held.set()
            assert goes_on.wait(DEADLINE_S)
        receive(sock, view)

    with monkeypatch.context() as patched:
        patched.setattr(transport, "receive_into", slow)
        healing = Background(lambda: healer.server.heal(addresses([source]), AT, cancelled.is_set))
        assert held.wait(DEADLINE_S)
        wait_until(lambda: pulls[0].is_over, "the end of the fetch")
        assert healing.running
        goes_on.set()
        assert healing.result() is False
    assert healer.progress[-1] == (0, 0)
    assert healer.server.heal(addresses([source]), AT)
    assert_healed(healer, [source])
    received, total = healer.progress[-1]
    assert received == total > 0


# FETCH-4
def test_a_thread_that_does_not_end_ends_the_rank(
    pulls: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striped_fetch, "WRITE_END_S", 0.05)
    (source,), healer = holders(1), Rank(1, size=SIZE)
    cancelled, goes_on = threading.Event(), threading.Event()

    def hang(*args: Any) -> None:
        cancelled.set()
        assert goes_on.wait(DEADLINE_S)

    monkeypatch.setattr(ReceivedChunks, "receive", hang)
    try:
        with pytest.raises(OperationalError, match="still receives state"):
            healer.server.heal(addresses([source]), AT, cancelled.is_set)
    finally:
        goes_on.set()


# FETCH-6
def test_a_small_state_comes_from_one_holder(
    pulls: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striped_fetch, "STRIPE_BYTES", 16 << 20)
    sources, healer = holders(3), Rank(1, size=SIZE)
    wire = Wire(sources[0], cut=6_000)
    assert healer.server.heal([wire.address, *addresses(sources[1:])], AT)
    assert_healed(healer, sources)
    assert set(pulls[0].num_from) <= {wire.address, sources[1].server.address}


def test_unchanged_chunks_of_another_attempt_are_kept(pulls: list[striped_fetch.StripedFetch]) -> None:
    sources, healer = holders(2), Rank(1, size=SIZE)
    wires = [Wire(source, cut=600_000) for source in sources]
    assert not healer.server.heal([wire.address for wire in wires], AT)
    num_kept = healer.server.num_received - num_small_chunks(sources[0])
    assert num_kept > 40
    later = Attempt(AT.step + 1, AT.generation)
    for source in sources:
        with source.server.exclusive(), torch.no_grad():
            source.model[0].weight[0] += 1  # type: ignore[index, operator]
        source.server.begin(later)
    assert healer.server.heal(addresses(sources), later)
    assert_healed(healer, sources)
    assert sum(pulls[1].num_from.values()) <= num_chunks(sources[0]) - num_kept + 1
    assert healer.server.num_received == 0


@pytest.mark.parametrize(("cut", "is_contiguous"), [(600_000, True), (360_000, False)])
def test_a_fetch_from_one_holder_resumes(
    cut: int, is_contiguous: bool, pulls: list[striped_fetch.StripedFetch]
) -> None:
    """Also in the middle of a tensor that is received in a copy."""
    sources, healer = holders(1), Rank(1, size=SIZE)
    if not is_contiguous:
        weight = healer.model.get_parameter("0.weight")
        weight.data = weight.data.t().contiguous().t()
    assert not healer.server.heal([Wire(sources[0], cut=cut).address], AT)
    num_kept = healer.server.num_received - num_small_chunks(sources[0])
    assert num_kept > 40
    assert healer.server.heal(addresses(sources), AT)
    assert_healed(healer, sources)
    assert sum(pulls[1].num_from.values()) == num_chunks(sources[0]) - num_kept


# RECEIVED-2
@pytest.mark.parametrize("attempt", [FIRST, AT])
@pytest.mark.parametrize("num_rows", [0, 7])
def test_chunks_that_a_rank_has_by_itself_are_not_requested(
    num_rows: int, attempt: Attempt, pulls: list[striped_fetch.StripedFetch]
) -> None:
    """Of its first weight all, of which `num_rows` at the end differ: as a rank has that starts with the same seed."""
    (source,), healer = holders(1, attempt), Rank(2, size=SIZE)
    with torch.no_grad():
        healer.model.get_parameter("0.weight")[SIZE - num_rows :] += 1
        healer.model.get_parameter("0.bias").zero_()
    before = healer.large()
    wire = Wire(source, cut=1000)
    assert not healer.server.heal([wire.address], attempt)
    assert same(healer.large(), before)
    assert healer.server.heal(addresses([source]), attempt)
    assert_healed(healer, [source])
    num_wanted = len(transport.chunks(source.model.get_parameter("0.bias"))) + (num_rows > 0)
    assert sum(pulls[1].num_from.values()) == num_wanted
    assert healer.progress[-1][0] == healer.progress[-1][1] > 0


# RECEIVED-2
def test_a_rank_that_has_trained_looks_at_few_of_its_own_chunks(
    pulls: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received_chunks, "MAX_STRANGE", 3)
    (source,), healer = holders(1), Rank(1, size=SIZE)
    looked: list[int] = []
    is_here = ReceivedChunks.is_here

    def look(self: ReceivedChunks, index: int, reader: staging.Reader) -> bool:
        return is_here(self, index, SeenReader(looked))

    monkeypatch.setattr(ReceivedChunks, "is_here", look)
    assert healer.server.heal(addresses([source]), AT)
    assert_healed(healer, [source])
    assert len(looked) == 3


class SeenReader(staging.Reader):
    def __init__(self, looked: list[int]) -> None:
        super().__init__(None)
        self._looked = looked

    def read(self, tensor: torch.Tensor, start: int, end: int) -> memoryview:
        self._looked.append(start)
        return super().read(tensor, start, end)


# FETCH-12
def test_a_holder_sends_chunks_to_few_ranks_at_a_time_and_those_to_others_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "MAX_SERVED", 2)
    (source,), goes_on = holders(1), threading.Event()
    served = threading.Semaphore(0)

    def stand() -> None:
        served.release()
        assert goes_on.wait(DEADLINE_S)

    ranks = [Rank(1, size=SIZE) for _ in range(3)]
    with testing.fail_at("chunk_received", stand):
        first = [Background(functools.partial(rank.server.heal, addresses([source]), AT)) for rank in ranks[:2]]
        for _ in first:
            assert served.acquire(timeout=DEADLINE_S)
        before = ranks[2].large()
        assert not ranks[2].server.heal(addresses([source]), AT)
        assert ranks[2].server.awaits_turn
        assert same(ranks[2].large(), before)
        goes_on.set()
        assert all(each.result() for each in first)
    for rank in ranks[:2]:
        rank.server.begin(AT)
    assert ranks[2].server.heal(addresses([source, *ranks[:2]]), AT)
    assert not ranks[2].server.awaits_turn
    for rank in ranks:
        assert same(rank.large(), source.large())


# FETCH-12
def test_a_holder_that_does_not_answer_for_a_turn_stops_the_others_only_for_a_while(
    pulls: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, healer = holders(2), Rank(1, size=SIZE)
    take, stands, goes_on = serving.Turn.take, threading.Lock(), threading.Event()

    def take_late(turn: serving.Turn, fetch: str, *, is_served: bool) -> bool:
        if stands.acquire(blocking=False):
            assert goes_on.wait(2 * DEADLINE_S)
        return take(turn, fetch, is_served=is_served)

    monkeypatch.setattr(serving.Turn, "take", take_late)
    monkeypatch.setattr(transport, "CONNECT_TIMEOUT_S", 1.0)
    try:
        assert Background(lambda: healer.server.heal(addresses(sources), AT)).result()
    finally:
        goes_on.set()
    assert_healed(healer, sources)
    assert len(pulls[0].num_from) == 1


# FETCH-12
def test_what_a_rank_has_needs_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_SERVED", 0)
    (source,) = holders(1)
    assert Rank(2, size=SIZE).server.heal(addresses([source]), AT)
    assert not Rank(1, size=SIZE).server.heal(addresses([source]), AT)


# FETCH-12
def test_a_rank_that_one_holder_serves_takes_no_turn_of_another_that_serves_somebody() -> None:
    turns = serving.Turns()
    with turns.of_connection() as first, turns.of_connection() as second:
        assert first.take("a", is_served=False)
        assert not second.take("b", is_served=True)
        assert second.take("a", is_served=True)  # by another interface
        with turns.of_connection() as third:
            assert third.take("b", is_served=False)
    with turns.of_connection() as fourth:
        assert fourth.take("b", is_served=True)


# FETCH-10
def test_many_small_tensors_take_few_requests() -> None:
    source, healer = Rank(2), Rank(1)
    for rank in (source, healer):
        more = nn.ParameterList(nn.Parameter(torch.full((2,), float(number))) for number in range(600))
        rank.server.register(more=more)
    source.server.begin(AT)
    with Wire(source) as wire:
        assert healer.server.heal([wire.address], AT)
    assert same(healer.server.registered.large(), source.server.registered.large())
    num_frames, rest = 0, wire.from_healer
    while rest:
        num_frames, rest = num_frames + 1, rest[4 + int.from_bytes(rest[:4], "big") :]
    assert num_frames < 12  # three of them requests for chunks


# FETCH-13
def test_a_heal_without_a_thread_fails_and_the_next_one_delivers(
    pulls: list[striped_fetch.StripedFetch], caplog: pytest.LogCaptureFixture
) -> None:
    sources, healer = holders(2), Rank(1, size=SIZE)
    usual = threading.stack_size(1 << 47)  # more than there is
    try:
        with caplog.at_level(logging.WARNING, "elasticgang"):
            assert not healer.server.heal(addresses(sources), AT)
            assert not healer.server.heal(addresses(sources), AT)
    finally:
        threading.stack_size(usual)
    assert caplog.text.count("could not heal from any rank: can't start new thread") == 1
    assert healer.server.heal(addresses(sources), AT)
    assert_healed(healer, sources)
