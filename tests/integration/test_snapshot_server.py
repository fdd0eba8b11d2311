"""Healing over real loopback TCP: whole, in part, refused, corrupted, cut off, and waited for."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pickle
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elasticgang.errors import OperationalError
from elasticgang.protocol.commit import Attempt
from elasticgang.state import snapshot_server as keeper_module
from elasticgang.state import transport
from elasticgang.state.snapshot_server import SnapshotServer
from tests.support import wait_until

DEADLINE_S = 20.0
HERE = "127.0.0.1"
AT = Attempt(3, 2)


class Counter:
    """Some object of the user's."""

    def __init__(self, count: int = 0) -> None:
        self.state: dict[str, Any] = {"count": count, "seen": [1, 2], ("nested"): {"pair": (1, None)}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Rank:
    """A snapshot server with a model, an optimizer with state, and an object."""

    def __init__(self, seed: int, host: str | None = HERE, size: int = 4) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, size), nn.BatchNorm1d(size))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1 * (seed + 1))
        self.counter = Counter(seed)
        for _ in range(seed):
            self.train()
        self.server = SnapshotServer(host)
        self.server.register(model=self.model, optim=self.optim, counter=self.counter)

    def train(self) -> None:
        self.model(torch.randn(5, 3)).sum().backward()
        self.optim.step()
        self.optim.zero_grad()

    def large(self) -> Any:
        return [p.detach().clone() for p in self.model.parameters()], self.optim.state_dict()["state"]

    def small(self) -> Any:
        return [b.clone() for b in self.model.buffers()], copy.deepcopy(self.counter.state)


Ranks = Callable[..., Rank]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made: list[Rank] = []

    def make(*args: Any, **kwargs: Any) -> Rank:
        made.append(Rank(*args, **kwargs))
        return made[-1]

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for a core that another test has make this ten times slower
    yield make
    torch.set_num_threads(num_threads)
    for rank in made:
        rank.server.close()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


class Background:
    """A call in a thread; `result` waits for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._outcome.append(function()))
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(DEADLINE_S)
        assert not self.running, "it hangs"
        return self._outcome[0]


class FakeSource:
    """Answers one healer by `serve`, which is given the connection once the request was read."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server((HERE, 0))
        self.address = f"{HERE}:{self._listener.getsockname()[1]}"
        self.request: dict[str, Any] = {}
        self._serve = serve
        self._background = Background(self._run)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            with sock:
                self.request = json.loads(transport.receive(sock, 1 << 16))
                self._serve(sock)

    def __enter__(self) -> FakeSource:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._background.result()


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


def test_what_forward_changed_is_waited_for(ranks: Ranks) -> None:
    source, learner = ranks(3), ranks(1)
    source.server.begin(Attempt(2, 2))
    source.server.forward_done()  # of another step
    source.server.begin(AT)
    fetching = Background(lambda: learner.server.fetch_after([source.server.address], AT))
    source.counter.state["count"] = 99
    source.server.forward_done()
    fetching.result()()
    assert learner.counter.state["count"] == 99


class _WatchedCondition(threading.Condition):
    """Says when somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_on = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_on.set()
        return super().wait(timeout)


def test_a_forward_that_takes_longer_than_a_step_takes_to_begin_is_waited_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "_READY_TIMEOUT_S", 0.0)
    source, learner = ranks(3), ranks(1)
    source.server._changed = changed = _WatchedCondition()
    source.server.begin(AT)
    fetching = Background(lambda: learner.server.fetch_after([source.server.address], AT))
    assert changed.waited_on.wait(DEADLINE_S)
    with changed:  # so the wait has begun
        source.counter.state["count"] = 99
    source.server.forward_done()
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

    monkeypatch.setattr(keeper_module, "_READY_TIMEOUT_S", 0.05)
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
    source.server._changed = changed = _WatchedCondition()
    source.server.begin(AT)
    fetching = Background(lambda: learner.server.fetch_after([source.server.address], AT))
    assert changed.waited_on.wait(DEADLINE_S)
    source.server.begin(Attempt(4, 2))
    assert fetching.result() is None
    assert "ended, and it serves the state after step 4 of generation 2 now" in caplog.text


def test_what_forward_changed_comes_from_nobody_who_is_gone(ranks: Ranks) -> None:
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


def test_what_is_served_is_what_was_there_when_the_step_began(ranks: Ranks) -> None:
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
    monkeypatch.setattr(keeper_module, "_READY_TIMEOUT_S", 0.05)
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
    monkeypatch.setattr(keeper_module, "_READY_TIMEOUT_S", 0.05)
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


def test_nothing_is_asked_of_further_sources_once_cancelled(ranks: Ranks) -> None:
    healer = ranks(1)
    with FakeSource(lambda sock: None) as source:
        assert not healer.server.heal([source.address], AT, lambda: True)
        assert source.request == {}


# -- sources that fail


def record_of(rank: Rank) -> bytes:
    """What a source sends for its whole state."""
    rank.server.begin(AT)
    ours, theirs = socket.socketpair()
    with ours:
        sent = bytearray()
        reader = Background(lambda: sent.extend(b"".join(iter(lambda: ours.recv(1 << 16), b""))))
        with theirs:
            rank.server._send_state(theirs, False)
        reader.result()
    return bytes(sent)


def test_a_dead_source_is_passed_over(ranks: Ranks) -> None:
    source, healer, dead = ranks(3), ranks(1), ranks(2)
    dead.server.close()
    source.server.begin(AT)
    assert healer.server.heal([dead.server.address, source.server.address], AT)
    assert same(healer.large(), source.large())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_source_that_dies_in_the_middle_is_followed_by_the_next(ranks: Ranks, share: float) -> None:
    source, healer = ranks(3), ranks(1)
    whole = record_of(ranks(2))
    with FakeSource(lambda sock: sock.sendall(whole[: int(len(whole) * share)])) as dying:
        source.server.begin(AT)
        assert healer.server.heal([dying.address, source.server.address], AT)
        assert dying.request["attempt"] == list(AT)
    assert same(healer.large(), source.large())
    assert same(healer.small(), source.small())


def test_with_no_source_that_answers_nothing_changes(ranks: Ranks) -> None:
    healer = ranks(1)
    before = healer.large(), healer.small()
    whole = record_of(ranks(2))
    with FakeSource(lambda sock: sock.sendall(whole[:-1])) as dying:
        assert not healer.server.heal([dying.address], AT)
    assert same((healer.large(), healer.small()), before)
    assert not healer.server.heal([], AT)


@pytest.mark.parametrize("place", [-1, -200, -20])
def test_a_changed_bit_is_found_and_the_next_source_used(ranks: Ranks, place: int) -> None:
    """SNAPSHOT-3: in the last chunk, so that all others have arrived whole. The last 16 bytes before it are its
    digest."""
    source, healer = ranks(3), ranks(1)
    before = healer.large()
    damaged = bytearray(record_of(ranks(2)))
    damaged[place] ^= 1
    with FakeSource(lambda sock: sock.sendall(damaged)) as liar:
        assert not healer.server.heal([liar.address], AT)
    assert same(healer.large(), before)
    with FakeSource(lambda sock: sock.sendall(damaged)) as liar:
        source.server.begin(AT)
        assert healer.server.heal([liar.address, source.server.address], AT)
    assert same(healer.large(), source.large())


def answer(manifest: object) -> bytes:
    body = json.dumps(manifest).encode()
    return struct.pack("!Q", len(body)) + body


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(struct.pack("!Q", 1 << 60), id="a size over the limit"),
        pytest.param(struct.pack("!Q", 4) + b"nope", id="no json"),
        pytest.param(struct.pack("!Q", 40) + pickle.dumps(Evil()).ljust(40), id="a pickle"),
        pytest.param(answer({}), id="no tensors"),
        pytest.param(answer([]), id="a list"),
        pytest.param(answer({"spec": {"dict": []}, "tensors": []}), id="no state"),
        pytest.param(answer({"spec": {"tensor": 5}, "tensors": []}), id="a tensor that was not sent"),
        pytest.param(answer({"spec": None, "tensors": [[[-3], "float32"]]}), id="a negative shape"),
        pytest.param(answer({"spec": None, "tensors": [[[3], "load"]]}), id="a dtype that is a function"),
        pytest.param(answer({"spec": None, "tensors": [[[3], "no_such"]]}), id="a dtype that is none"),
        pytest.param(answer({"spec": None, "tensors": [[[1 << 62], "float32"]]}), id="a tensor beyond all memory"),
        pytest.param(answer({"refused": "it has another attempt"}), id="a refusal"),
        pytest.param(answer({"spec": {"dict": [["small", {"dict": []}]]}, "tensors": []}), id="a state without parts"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(struct.pack("!Q", 200_000) + b"[" * 200_000, id="deep nesting"),
    ],
)
def test_what_is_not_a_state_changes_nothing_and_the_next_source_is_used(ranks: Ranks, sent: bytes) -> None:
    source, healer = ranks(3), ranks(1)
    before = healer.large(), healer.small()
    with FakeSource(lambda sock: sock.sendall(sent)) as liar:
        assert not healer.server.heal([liar.address], AT)
    assert same((healer.large(), healer.small()), before)
    with FakeSource(lambda sock: sock.sendall(sent)) as liar:
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
        struct.pack("!Q", 1 << 40),
        struct.pack("!Q", 60_000) + b"[" * 60_000,
    ],
)
def test_a_source_outlives_any_request(ranks: Ranks, request_bytes: bytes) -> None:
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    host, _, port = source.server.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    with sock, contextlib.suppress(OSError):  # it may have closed before we have
        sock.sendall(request_bytes)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    assert healer.server.heal([source.server.address], AT)
    with source.server.exclusive():
        pass


# -- holding back the apply


class SlowReader:
    """A healer that has been let in and reads no further than the first byte."""

    def __init__(self, source: Rank) -> None:
        host, _, port = source.server.address.rpartition(":")
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect((host, int(port)))
        transport.send(self.sock, json.dumps({"attempt": list(AT), "after": False}).encode())
        self.first = self.sock.recv(1)

    def rest(self) -> int:
        """Reads to the end; how many bytes came."""
        count = 0
        with contextlib.suppress(ConnectionError):
            while data := self.sock.recv(1 << 20):
                count += len(data)
        self.sock.close()
        return count


LARGE = 400_000  # 3 floats each: more than the buffers of a socket hold


def test_an_apply_waits_for_those_who_read(ranks: Ranks) -> None:
    source = ranks(0, size=LARGE)
    source.server.begin(AT)
    reader = SlowReader(source)
    applied = threading.Event()

    def apply() -> None:
        with source.server.exclusive():
            applied.set()

    applying = Background(apply)
    assert not applied.wait(0.1)
    assert reader.rest() > LARGE * 12
    applying.result()
    assert applied.is_set()


def test_an_apply_waits_no_longer_than_its_limit_and_drops_the_slow(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "EXCLUSIVE_TIMEOUT_S", 0.1)
    source = ranks(0, size=LARGE)
    source.server.begin(AT)
    reader = SlowReader(source)

    def apply() -> bool:
        with source.server.exclusive():
            return True

    assert Background(apply).result()
    assert reader.rest() < LARGE * 12  # what it read is not whole, and it knows


def test_nobody_is_let_in_between_an_apply_and_the_next_step(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "_READY_TIMEOUT_S", 0.05)
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    with source.server.exclusive():
        assert not healer.server.heal([source.server.address], AT)
    assert not healer.server.heal([source.server.address], AT)
    source.server.begin(Attempt(4, 2))
    assert healer.server.heal([source.server.address], Attempt(4, 2))


def test_a_reader_that_does_not_end_when_it_is_dropped_keeps_the_apply_from_happening(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "EXCLUSIVE_TIMEOUT_S", 0.05)
    source, healer = ranks(1), ranks(0)
    reads, ends = threading.Event(), threading.Event()

    def read(*_: object) -> None:
        reads.set()
        assert ends.wait(DEADLINE_S)

    monkeypatch.setattr(source.server, "_send_state", read)
    source.server.begin(AT)
    healing = Background(lambda: healer.server.heal([source.server.address], AT))
    try:
        assert reads.wait(DEADLINE_S)
        applying = Background(lambda: _raised(OperationalError, source.server))
        assert applying.result()
    finally:
        ends.set()
    assert healing.result() is False


def _raised(kind: type[Exception], state_server: SnapshotServer) -> bool:
    try:
        with state_server.exclusive():
            return False
    except kind:
        return True


def test_a_source_out_of_descriptors_serves_again_once_there_are_some(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    source, healer = ranks(1), ranks(0)
    source.server.begin(AT)
    host, port = source.server.address.split(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as early, caplog.at_level(logging.DEBUG, "elasticgang"):
        lowest = os.dup(early.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            early.connect((host, int(port)))
            wait_until(lambda: "could not be served" in caplog.text, "an accept that fails", DEADLINE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())


def test_after_close_nobody_is_served(ranks: Ranks) -> None:
    source, healer = ranks(3), ranks(1)
    source.server.begin(AT)
    source.server.close()
    assert not healer.server.heal([source.server.address], AT)
    source.server.close()


# -- putting back


def test_a_dropped_step_puts_back_what_forward_changed(ranks: Ranks) -> None:
    rank = ranks(2)
    rank.server.begin(AT)
    before = rank.small()
    rank.model(torch.randn(5, 3))
    rank.counter.state["count"] = 99
    rank.counter.state["seen"].append(3)
    rank.server.restore()
    assert same(rank.small(), before)
    assert rank.counter.state["seen"] == [1, 2]
    rank.counter.state["seen"].append(4)  # what was put back is not what is kept
    rank.server.restore()
    assert rank.counter.state["seen"] == [1, 2]


def test_what_is_kept_is_of_the_step_that_began_last(ranks: Ranks) -> None:
    rank = ranks(2)
    rank.server.begin(AT)
    rank.counter.state["count"] = 5
    rank.server.begin(Attempt(4, 2))
    rank.counter.state["count"] = 6
    rank.server.restore()
    assert rank.counter.state["count"] == 5


def test_without_state_it_is_put_back_too(ranks: Ranks) -> None:
    """Before the first committed step, a rank that holds nothing may be designated as the one that all take it from."""
    rank = ranks(2)
    before = rank.small()
    rank.server.begin(None)
    rank.counter.state["count"] = 99
    rank.server.restore()
    assert same(rank.small(), before)


def test_what_was_healed_in_a_dropped_step_stays(ranks: Ranks) -> None:
    source, healer = ranks(1), ranks(2)
    source.server.begin(AT)
    healer.server.begin(None)
    healer.counter.state["count"] = 99
    assert healer.server.heal([source.server.address], AT)
    healer.counter.state["count"] = 100
    healer.server.restore()
    assert same(healer.small(), source.small())


def test_a_keeper_without_a_host_listens_nowhere(ranks: Ranks) -> None:
    alone = ranks(1, host=None)
    assert alone.server.address == ""
    alone.server.begin(AT)
    with alone.server.exclusive():
        pass


# -- registering


def test_a_name_is_registered_once(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="a state named 'model' is registered already"):
        ranks(1).server.register(model=nn.Linear(1, 1))


def test_an_object_without_state_is_refused(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="thing \\(int\\) must have state_dict"):
        ranks(1).server.register(thing=3)


def test_an_object_whose_state_cannot_be_sent_is_refused_when_it_is_registered(ranks: Ranks) -> None:
    counter = Counter()
    counter.state["handle"] = object()
    with pytest.raises(TypeError, match=r"state\['handle'\] is of object"):
        ranks(1).server.register(other=counter)
