"""Healing from all holders at once, over real loopback TCP: shared out, cut off, corrupted, and in disagreement."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any

import pytest
import torch

from elasticgang.protocol.commit import Attempt
from elasticgang.state import healer as healer_module
from elasticgang.state import striped_fetch, transport
from elasticgang.state.serialization import flatten
from tests.integration.state_ranks import AT, HERE, Rank, connected, pass_frame, pass_handshake, same

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

        def _take(self) -> tuple[bool, list[int]]:
            taken = super()._take()
            with self._changed:
                self._asked.add(threading.current_thread())
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: len(self._asked) >= self._num_live or self._is_over, 20)
            return taken

    monkeypatch.setattr(striped_fetch, "StripedFetch", Seen)
    monkeypatch.setattr(transport, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(healer_module, "BY_RANGE_FROM_BYTES", 0)
    return made


def holders(num: int) -> list[Rank]:
    """With one state, but for what forward changes."""
    found = [Rank(2, size=SIZE) for _ in range(num)]
    for index, rank in enumerate(found):
        rank.counter.state["count"] = index
        rank.model[1].running_mean.fill_(index)  # type: ignore[operator]
        rank.server.begin(AT)
    return found


def addresses(ranks: list[Rank]) -> list[str]:
    return [rank.server.address for rank in ranks]


class Wire:
    """A holder behind a wire that is cut, or flips a bit, so many bytes after its manifest."""

    def __init__(self, source: Rank, *, cut: int | None = None, flip: int | None = None) -> None:
        self._to = source.server.address
        self._cut, self._flip = cut, flip
        self._listener = socket.create_server((HERE, 0))
        self.address = f"{HERE}:{self._listener.getsockname()[1]}"
        self.done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        healer, _ = self._listener.accept()
        with healer, connected(self._to) as source:
            threading.Thread(target=self._forward, args=(healer, source), daemon=True).start()
            num_sent = 0
            with contextlib.suppress(OSError):
                pass_handshake(source, healer)
                pass_frame(source, healer, transport.MAX_MANIFEST_BYTES)
                while self._cut != 0 and (data := bytearray(source.recv(1000))):
                    if self._flip is not None and num_sent <= self._flip < num_sent + len(data):
                        data[self._flip - num_sent] ^= 1
                    num_sent += len(data)
                    healer.sendall(data)
                    if self._cut is not None and num_sent >= self._cut:
                        break
            for sock in (healer, source):
                transport.shut(sock)
        self._listener.close()
        self.done.set()

    @staticmethod
    def _forward(healer: socket.socket, source: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := healer.recv(1000):
                source.sendall(data)


def assert_healed(healer: Rank, sources: list[Rank]) -> None:
    assert same(healer.large(), sources[0].large())
    assert same(healer.optim.state_dict(), sources[0].optim.state_dict())
    count = healer.counter.state["count"]
    assert same(healer.small(), sources[count].small())  # FETCH-2: all of it from one


def test_each_holder_sends_a_part(pulls: list[striped_fetch.StripedFetch]) -> None:
    sources, healer = holders(3), Rank(1, size=SIZE)
    assert healer.server.heal(addresses(sources), AT)
    assert_healed(healer, sources)
    (only,) = pulls
    assert set(only.num_from) == set(addresses(sources))
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
    wire = Wire(sources[0], flip=10)
    with caplog.at_level(logging.WARNING, "elasticgang"):
        assert healer.server.heal([wire.address, *addresses(sources[1:])], AT)
    assert_healed(healer, sources)
    assert f"could not heal from {wire.address}: the digest of " in caplog.text


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


# FETCH-4
def test_nothing_changes_if_all_holders_die(pulls: list[striped_fetch.StripedFetch]) -> None:
    sources, healer = holders(2), Rank(1, size=SIZE)
    before = healer.large(), healer.small()
    wires = [Wire(source, cut=6_000) for source in sources]
    assert not healer.server.heal([wire.address for wire in wires], AT)
    assert same((healer.large(), healer.small()), before)


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


def num_chunks(rank: Rank) -> int:
    return sum(len(transport.chunks(tensor)) for tensor in flatten(rank.large())[1])


# FETCH-5
def test_chunks_received_before_a_cancel_are_not_requested_again(
    pulls: list[striped_fetch.StripedFetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, healer = holders(2), Rank(1, size=SIZE)
    came: list[int] = []
    cancelled = threading.Event()
    put = striped_fetch.ReceivedChunks.put

    def counted(arrived: striped_fetch.ReceivedChunks, index: int, *rest: Any) -> bool:
        came.append(index)
        if len(came) == 50:
            cancelled.set()
        return put(arrived, index, *rest)

    monkeypatch.setattr(striped_fetch.ReceivedChunks, "put", counted)
    assert not healer.server.heal(addresses(sources), AT, cancelled.is_set)
    assert healer.server.heal(addresses(sources), AT)
    assert_healed(healer, sources)
    assert len(came) <= num_chunks(sources[0]) + 2 * 2 * striped_fetch.RUN  # what was under way comes twice


def test_unchanged_chunks_of_another_attempt_are_kept(pulls: list[striped_fetch.StripedFetch]) -> None:
    sources, healer = holders(2), Rank(1, size=SIZE)
    wires = [Wire(source, cut=600_000) for source in sources]
    assert not healer.server.heal([wire.address for wire in wires], AT)
    num_kept = healer.server.num_received
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


def test_a_fetch_from_one_holder_resumes(pulls: list[striped_fetch.StripedFetch]) -> None:
    sources, healer = holders(1), Rank(1, size=SIZE)
    assert not healer.server.heal([Wire(sources[0], cut=600_000).address], AT)
    num_kept = healer.server.num_received
    assert num_kept > 40
    assert healer.server.heal(addresses(sources), AT)
    assert_healed(healer, sources)
    assert sum(pulls[1].num_from.values()) == num_chunks(sources[0]) - num_kept
