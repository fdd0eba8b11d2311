"""A learner heals from peers: what it gets, which attempt it gets, and what comes of sources that fail."""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elasticgang import testing
from elasticgang.protocol.commit import Attempt
from elasticgang.state import healer as healer_module
from elasticgang.state import snapshot_server as keeper_module
from elasticgang.state import transport
from elasticgang.state.snapshot_server import MAX_REQUEST_BYTES
from elasticgang.state.transport import Channel
from tests.integration.state_ranks import (
    AT,
    AUTHENTICATOR,
    DEADLINE_S,
    Background,
    FakeSource,
    Ranks,
    Relay,
    same,
)

# -- healing


def test_the_whole_state_is_healed_to_the_bit(ranks: Ranks) -> None:
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())
    assert same(healer.small(), source.small())
    assert same(healer.optim.state_dict(), source.optim.state_dict())
    for rank in (source, healer):
        torch.manual_seed(9)
        rank.train()
    assert same(healer.large(), source.large())


# HEALER-3
@pytest.mark.parametrize("by_range", [False, True])
def test_a_fault_of_the_device_is_not_taken_for_a_source_that_fails(
    by_range: bool, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(state: dict[str, Any]) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    if by_range:
        monkeypatch.setattr(healer_module, "BY_RANGE_FROM_BYTES", 0)
    source, healer = ranks(3), ranks(1)
    monkeypatch.setattr(healer.counter, "load_state_dict", load)
    source.server.begin(AT)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        healer.server.heal([source.server.address], AT)


def test_a_learner_gets_what_forward_changed_to_load_when_it_applies(ranks: Ranks) -> None:
    source, learner = ranks(3), ranks(1)
    source.server.begin(AT)
    source.model(torch.randn(5, 3))
    source.counter.state["count"] = 99
    before = learner.large(), learner.small()
    source.server.forward_done()
    load = learner.server.fetch_after([source.server.address], AT)
    assert load is not None
    assert same((learner.large(), learner.small()), before)
    expected = source.small()
    with source.server.exclusive():
        source.model(torch.randn(5, 3))
    load()
    assert same(learner.small(), expected)
    assert learner.counter.state["count"] == 99
    assert same(learner.large(), before[0])


def test_a_learner_waits_for_the_state_after_forward(ranks: Ranks) -> None:
    source, learner = ranks(3), ranks(1)
    source.server.begin(Attempt(2, 2))
    source.server.forward_done()  # of another step
    source.server.begin(AT)
    fetching = Background(lambda: learner.server.fetch_after([source.server.address], AT))
    source.counter.state["count"] = 99
    source.server.forward_done()
    fetching.result()()
    assert learner.counter.state["count"] == 99


def test_a_forward_that_takes_longer_than_a_step_takes_to_begin_is_waited_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "READY_TIMEOUT_S", 0.0)
    source, learner = ranks(3), ranks(1)
    awaited = threading.Event()
    source.server.begin(AT)
    with testing.fail_at("forward_awaited", awaited.set):
        fetching = Background(lambda: learner.server.fetch_after([source.server.address], AT))
        assert awaited.wait(DEADLINE_S)
    source.counter.state["count"] = 99
    source.server.forward_done()  # needs the lock: the wait has begun by then
    load = fetching.result()
    assert load is not None
    load()
    assert learner.counter.state["count"] == 99


def test_a_refusal_says_what_is_served_or_what_is_waited_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusal(call: Callable[[], object]) -> str:
        caplog.clear()
        assert not call()
        (record,) = caplog.records
        return record.getMessage().partition(": ")[2]

    monkeypatch.setattr(keeper_module, "READY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(transport, "FORWARD_TIMEOUT_S", 0.05)
    source, learner = ranks(3), ranks(1)
    address = [source.server.address]
    asked = "the state after step 3 of generation 2"
    assert refusal(lambda: learner.server.heal(address, AT)) == f"it serves no state, not {asked}"
    source.server.begin(Attempt(3, 1))
    its = "the state after step 3 of generation 1"
    assert refusal(lambda: learner.server.heal(address, AT)) == f"it serves {its}, not {asked}"
    source.server.begin(AT)
    waited = refusal(lambda: learner.server.fetch_after(address, AT))
    assert waited == f"the forward of its step on {asked} did not end within 0.05 s"


def test_a_wait_for_a_forward_ends_with_the_step(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    source, learner = ranks(3), ranks(1)
    awaited = threading.Event()
    source.server.begin(AT)
    with testing.fail_at("forward_awaited", awaited.set):
        fetching = Background(lambda: learner.server.fetch_after([source.server.address], AT))
        assert awaited.wait(DEADLINE_S)
    source.server.begin(Attempt(4, 2))
    assert fetching.result() is None
    assert "ended, and it serves the state after step 4 of generation 2 now" in caplog.text


def test_the_state_after_forward_is_not_fetched_from_a_dead_source(ranks: Ranks) -> None:
    source, learner = ranks(3), ranks(1)
    source.server.begin(AT)
    source.server.forward_done()
    source.server.close()
    assert learner.server.fetch_after([source.server.address], AT) is None


def test_a_healer_gets_copies(ranks: Ranks) -> None:
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    healer.server.heal([source.server.address], AT)
    expected = healer.large(), healer.small()
    source.train()
    source.counter.state["seen"].append(3)
    assert same((healer.large(), healer.small()), expected)


def test_the_served_small_state_is_from_the_beginning_of_the_step(ranks: Ranks) -> None:
    """SNAPSHOT-1: forward has changed the buffers and the object since."""
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    expected = source.small()
    source.model(torch.randn(5, 3))
    source.counter.state["count"] = 99
    source.counter.state["seen"].append(3)
    assert healer.server.heal([source.server.address], AT)
    assert healer.counter.state["count"] == 3
    assert healer.counter.state["seen"] == [1, 2]
    assert same(healer.small()[0], expected[0])


def test_large_states_come_in_many_chunks(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CHUNK_BYTES", 1000)
    source, healer = ranks(1, size=700), ranks(0, size=700)
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())


def test_many_heal_from_one_at_once(ranks: Ranks) -> None:
    source, healers = ranks(2), [ranks(0) for _ in range(6)]
    source.server.begin(AT)
    waiting = [
        Background(lambda healer=healer: healer.server.heal([source.server.address], AT))  # type: ignore[misc]
        for healer in healers
    ]
    assert all(each.result() for each in waiting)
    assert all(same(healer.large(), source.large()) for healer in healers)


# -- which attempt


@pytest.mark.parametrize("wrong", [Attempt(3, 1), Attempt(4, 2), Attempt(2, 2)])
def test_another_attempt_is_refused_and_nothing_changes(
    ranks: Ranks, wrong: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "READY_TIMEOUT_S", 0.05)
    source, healer = ranks(3), ranks(1)
    before = healer.large(), healer.small()
    source.server.begin(AT)
    assert not healer.server.heal([source.server.address], wrong)
    assert same((healer.large(), healer.small()), before)


def test_a_healer_waits_until_the_source_begins_the_step(ranks: Ranks) -> None:
    source, healer = ranks(3), ranks(1)
    healing = Background(lambda: healer.server.heal([source.server.address], AT))
    source.server.begin(Attempt(2, 2))
    source.server.begin(AT)
    assert healing.result()
    assert same(healer.large(), source.large())


def test_a_source_without_state_serves_nobody(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "READY_TIMEOUT_S", 0.05)
    source, healer = ranks(3), ranks(1)
    source.server.begin(None)
    assert not healer.server.heal([source.server.address], AT)


def test_a_wait_for_the_source_ends_with_the_generation(ranks: Ranks) -> None:
    """The source may have left the generation, and wait for this rank to leave it too."""
    source, healer = ranks(3), ranks(1)
    over = threading.Event()
    healing = Background(lambda: healer.server.heal([source.server.address], AT, over.is_set))
    over.set()
    assert healing.result() is False


def test_no_source_is_asked_after_a_cancel(ranks: Ranks) -> None:
    healer = ranks(1)
    with FakeSource(lambda channel: None) as source:
        assert not healer.server.heal([source.address], AT, lambda: True)
        assert source.request == {}


# -- sources that fail


def lying(ranks: Ranks, change: Callable[[bytes], bytes]) -> Relay:
    """Between a source and the healer."""
    source = ranks(2)
    source.server.begin(AT)
    return Relay(source, change)


def test_a_dead_source_is_skipped(ranks: Ranks) -> None:
    source, healer, dead = ranks(3), ranks(1), ranks(2)
    dead.server.close()
    source.server.begin(AT)
    assert healer.server.heal([dead.server.address, source.server.address], AT)
    assert same(healer.large(), source.large())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_source_that_dies_in_the_middle_is_followed_by_the_next(ranks: Ranks, share: float) -> None:
    source, healer = ranks(3), ranks(1)
    with lying(ranks, lambda whole: whole[: int(len(whole) * share)]) as dying:
        source.server.begin(AT)
        assert healer.server.heal([dying.address, source.server.address], AT)
        assert dying.from_healer
    assert same(healer.large(), source.large())
    assert same(healer.small(), source.small())


def test_nothing_changes_if_no_source_answers(ranks: Ranks) -> None:
    healer = ranks(1)
    before = healer.large(), healer.small()
    with lying(ranks, lambda whole: whole[:-1]) as dying:
        assert not healer.server.heal([dying.address], AT)
    assert same((healer.large(), healer.small()), before)
    assert not healer.server.heal([], AT)


@pytest.mark.parametrize("place", [-1, -200, -20])
def test_a_corrupt_chunk_is_found_and_the_next_source_is_used(ranks: Ranks, place: int) -> None:
    """HEALER-1: in the last chunk, so that all others have arrived whole. The last 16 bytes before it are its
    digest."""
    source, healer = ranks(3), ranks(1)
    before = healer.large()

    def damaged(whole: bytes) -> bytes:
        changed = bytearray(whole)
        changed[place] ^= 1
        return bytes(changed)

    with lying(ranks, damaged) as liar:
        assert not healer.server.heal([liar.address], AT)
    assert same(healer.large(), before)
    with lying(ranks, damaged) as liar:
        source.server.begin(AT)
        assert healer.server.heal([liar.address, source.server.address], AT)
    assert same(healer.large(), source.large())


def answer(manifest: object) -> bytes:
    return json.dumps(manifest).encode()


def raw(sent: bytes) -> Callable[[Channel], None]:
    return lambda channel: channel.sock.sendall(sent)


def framed(payload: bytes) -> Callable[[Channel], None]:
    """As a member of the job may send it."""
    return lambda channel: channel.send_payload(payload)


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    "send",
    [
        pytest.param(raw(struct.pack("!I", (1 << 32) - 1)), id="a size over the limit"),
        pytest.param(framed(b"nope"), id="no json"),
        pytest.param(framed(pickle.dumps(Evil())), id="a pickle"),
        pytest.param(framed(answer({})), id="no tensors"),
        pytest.param(framed(answer([])), id="a list"),
        pytest.param(framed(answer({"spec": {"dict": []}, "tensors": []})), id="no state"),
        pytest.param(framed(answer({"spec": {"tensor": 5}, "tensors": []})), id="a tensor that was not sent"),
        pytest.param(framed(answer({"spec": None, "tensors": [[[-3], "float32"]]})), id="a negative shape"),
        pytest.param(framed(answer({"spec": None, "tensors": [[[3], "load"]]})), id="a dtype that is a function"),
        pytest.param(framed(answer({"spec": None, "tensors": [[[3], "no_such"]]})), id="a dtype that is none"),
        pytest.param(
            framed(answer({"spec": None, "tensors": [[[1 << 62], "float32"]]})), id="a tensor beyond all memory"
        ),
        pytest.param(framed(answer({"refused": "it has another attempt"})), id="a refusal"),
        pytest.param(
            framed(answer({"spec": {"dict": [["small", {"dict": []}]]}, "tensors": []})), id="a state without parts"
        ),
        pytest.param(raw(b"GET / HTTP/1.1\r\n\r\n"), id="another protocol"),
        pytest.param(raw(struct.pack("!I", 48) + b"x" * 48), id="a wrong MAC"),
        pytest.param(framed(b"[" * 200_000), id="deep nesting"),
    ],
)
def test_an_invalid_state_changes_nothing_and_the_next_source_is_used(
    ranks: Ranks, send: Callable[[Channel], None]
) -> None:
    source, healer = ranks(3), ranks(1)
    before = healer.large(), healer.small()
    with FakeSource(send) as liar:
        assert not healer.server.heal([liar.address], AT)
    assert same((healer.large(), healer.small()), before)
    with FakeSource(send) as liar:
        source.server.begin(AT)
        assert healer.server.heal([liar.address, source.server.address], AT)
    assert same(healer.large(), source.large())


def test_a_model_of_another_shape_is_not_loaded_in_part(ranks: Ranks) -> None:
    source, healer = ranks(3, size=5), ranks(1, size=4)
    before = healer.large(), healer.small()
    source.server.begin(AT)
    assert not healer.server.heal([source.server.address], AT)
    assert same((healer.large(), healer.small()), before)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        answer({}),
        answer({"attempt": 3}),
        answer({"attempt": list(AT)}),
        b"[" * 60_000,
        b"x" * (MAX_REQUEST_BYTES + 1),
    ],
)
def test_a_source_outlives_any_request(ranks: Ranks, request_bytes: bytes) -> None:
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    with (
        AUTHENTICATOR.connect(source.server.address) as channel,
        contextlib.suppress(OSError),  # it may have closed before we have
    ):
        channel.send_payload(request_bytes)
        while channel.sock.recv(1 << 16):
            pass
    assert healer.server.heal([source.server.address], AT)
    with source.server.exclusive():
        pass
