"""A snapshot server: an apply waits for its readers, a dropped step is put back, objects are registered."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import threading

import pytest
import torch
from torch import nn

from elasticgang import testing
from elasticgang.errors import OperationalError
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.form import Form, FormOf
from elasticgang.state import authentication, form_exchange, transport
from elasticgang.state import snapshot_server as keeper_module
from elasticgang.state.snapshot_server import SnapshotServer
from tests.integration.state_ranks import (
    AT,
    AUTHENTICATOR,
    DEADLINE_S,
    FIRST,
    Background,
    Counter,
    FakeSource,
    Rank,
    Ranks,
    same,
)
from tests.support import wait_until

# -- holding back the apply


class SlowReader:
    """A healer that has been let in, asks for all chunks, and reads no further than the first byte."""

    def __init__(self, source: Rank) -> None:
        channel = AUTHENTICATOR.connect(source.server.address)
        self.sock = channel.sock
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        channel.send({"attempt": list(AT), "after": False})
        manifest = channel.receive(transport.MAX_MANIFEST_BYTES)
        channel.send({"turn": ["reader", 0]})
        assert channel.receive(transport.MAX_MANIFEST_BYTES)["turn"]
        channel.send(list(range(len(manifest["large"][2]))))
        self.first = self.sock.recv(1)

    def rest(self, num_bytes: int) -> int:
        """Reads so many bytes, or to the end; how many came."""
        count = 0
        with contextlib.suppress(ConnectionError):
            while count < num_bytes and (data := self.sock.recv(1 << 20)):
                count += len(data)
        self.sock.close()
        return count


LARGE = 400_000  # 3 floats each: more than the buffers of a socket hold


# SNAPSHOT-2
def test_an_apply_waits_for_readers(ranks: Ranks) -> None:
    source = ranks(0, size=LARGE)
    source.server.begin(AT)
    reader = SlowReader(source)
    applied = threading.Event()

    def apply() -> None:
        with source.server.exclusive():
            applied.set()

    applying = Background(apply)
    assert not applied.wait(0.1)
    assert reader.rest(LARGE * 12) >= LARGE * 12
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
    assert reader.rest(LARGE * 12) < LARGE * 12  # what it read is not whole, and it knows


def test_no_reader_is_admitted_between_an_apply_and_the_next_step(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "READY_TIMEOUT_S", 0.05)
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
    monkeypatch.setattr(keeper_module, "READER_END_TIMEOUT_S", 0.05)
    source, healer = ranks(1), ranks(0)
    reads, ends = threading.Event(), threading.Event()

    def read() -> None:
        reads.set()
        assert ends.wait(DEADLINE_S)

    source.server.begin(AT)
    with testing.fail_at("serving", read):
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
        # 0, 1 and 2 stay open, whatever a thread of the test before still closes
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            early.connect((host, int(port)))
            wait_until(lambda: "could not serve" in caplog.text, "an accept that fails", DEADLINE_S)
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


# MANAGER-4
def test_a_dropped_step_puts_back_what_forward_changed(ranks: Ranks) -> None:
    rank = ranks(2)
    rank.server.begin(AT)
    before = rank.small()
    rank.model(torch.randn(5, 3))
    rank.counter.state["count"] = 99
    rank.counter.state["seen"].append(3)
    rank.server.registered.restore()
    assert same(rank.small(), before)
    assert rank.counter.state["seen"] == [1, 2]
    rank.counter.state["seen"].append(4)  # what was put back is not what is kept
    rank.server.registered.restore()
    assert rank.counter.state["seen"] == [1, 2]


def test_the_snapshot_is_from_the_last_step_that_began(ranks: Ranks) -> None:
    rank = ranks(2)
    rank.server.begin(AT)
    rank.counter.state["count"] = 5
    rank.server.begin(Attempt(4, 2))
    rank.counter.state["count"] = 6
    rank.server.registered.restore()
    assert rank.counter.state["count"] == 5


def test_without_state_it_is_put_back_too(ranks: Ranks) -> None:
    """Before the first committed step, a rank that holds nothing may be designated as the one that all take it from."""
    rank = ranks(2)
    before = rank.small()
    rank.server.begin(None)
    rank.counter.state["count"] = 99
    rank.server.registered.restore()
    assert same(rank.small(), before)


def test_state_healed_in_a_dropped_step_stays(ranks: Ranks) -> None:
    source, healer = ranks(1), ranks(2)
    source.server.begin(AT)
    healer.server.begin(None)
    healer.counter.state["count"] = 99
    assert healer.server.heal([source.server.address], AT)
    healer.counter.state["count"] = 100
    healer.server.registered.restore()
    assert same(healer.small(), source.small())


def test_a_server_without_a_host_does_not_listen(ranks: Ranks) -> None:
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


# -- forms


FORM = (("parameter 'weight' of 'model'", "[3] of float32"),)


# FORMEXCHANGE-1
def test_a_peer_gets_the_form_once_the_rank_has_its_part(ranks: Ranks) -> None:
    source, peer = ranks(0), ranks(0)
    source.server.forms.announce(FormOf.STATE, (0, 0, 0, 0), lambda: (("another", "part"),))
    asked = threading.Event()

    def is_cancelled() -> bool:
        asked.set()
        return False

    fetched = Background(
        lambda: peer.server.forms.fetch(source.server.address, FormOf.STATE, (0, 0, 0, 1), (), is_cancelled)
    )
    assert asked.wait(DEADLINE_S)
    source.server.forms.withdraw(FormOf.STATE)
    source.server.forms.announce(FormOf.STATE, (0, 0, 0, 1), lambda: FORM)
    assert fetched.result() == FORM


# FORMEXCHANGE-1
def test_a_peer_asks_again_where_the_rank_takes_long_to_build_its_part(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_exchange, "BUILT_S", 0.01)
    source, peer = ranks(0), ranks(0)
    num_looks = 0

    def is_cancelled() -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 10:
            source.server.forms.announce(FormOf.STATE, (0, 0, 0, 0), lambda: FORM)
        return False

    assert peer.server.forms.fetch(source.server.address, FormOf.STATE, (0, 0, 0, 0), (), is_cancelled) == FORM


# FORMEXCHANGE-1
def test_nobody_waits_for_a_form_longer_than_the_generation_or_the_peer_lasts(ranks: Ranks) -> None:
    source, peer = ranks(0), ranks(0)
    ended = threading.Event()
    fetched = Background(
        lambda: peer.server.forms.fetch(source.server.address, FormOf.STATE, (0, 0, 0, 0), (), ended.is_set)
    )
    ended.set()
    assert fetched.result() is None
    with FakeSource(lambda channel: channel.send({"is_alike": False, "form": [["a"]]})) as invalid:
        assert peer.server.forms.fetch(invalid.address, FormOf.STATE, (0, 0, 0, 0), (), lambda: False) is None
    assert peer.server.forms.fetch("127.0.0.1:1", FormOf.STATE, (0, 0, 0, 0), (), lambda: False) is None


# PEER-3
def test_nobody_waits_longer_than_the_generation_lasts_for_a_peer_that_does_not_shake_hands(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "HANDSHAKE_S", 2 * DEADLINE_S)
    peer, ended = ranks(0), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        form = Background(lambda: peer.server.forms.fetch(address, FormOf.STATE, (0, 0, 0, 0), (), ended.is_set))
        settings = Background(lambda: peer.server.forms.fetch(address, FormOf.SETTINGS, AT, (), ended.is_set))
        connections = [silent.accept()[0] for _ in range(2)]
        ended.set()
        assert form.result() is None
        assert settings.result() is None
        for connection in connections:
            connection.close()


# FORMEXCHANGE-3
def test_a_form_like_that_of_the_peer_is_not_sent(ranks: Ranks) -> None:
    source, peer = ranks(0), ranks(0)
    form = tuple((f"parameter {number}", "[3] of float32") for number in range(3))
    source.server.forms.announce(FormOf.STATE, (0, 0, 0, 0), lambda: form)
    own = form[::-1]
    assert peer.server.forms.fetch(source.server.address, FormOf.STATE, (0, 0, 0, 0), own, lambda: False) is own
    assert peer.server.forms.fetch(source.server.address, FormOf.STATE, (0, 0, 0, 0), own[1:], lambda: False) == form


# FORMEXCHANGE-2
def test_settings_are_read_while_they_count_alone(ranks: Ranks) -> None:
    source, peer = ranks(0), ranks(0)
    reading, go_on = threading.Event(), threading.Event()

    def settings() -> Form:
        reading.set()
        assert go_on.wait(DEADLINE_S)
        return FORM

    source.server.forms.announce(FormOf.SETTINGS, AT, settings)
    fetched = Background(lambda: peer.server.forms.fetch(source.server.address, FormOf.SETTINGS, AT, (), lambda: False))
    assert reading.wait(DEADLINE_S)
    withdrawing = Background(lambda: source.server.forms.withdraw(FormOf.SETTINGS))
    assert withdrawing.running
    go_on.set()
    assert fetched.result() == FORM
    withdrawing.result()


# FORMEXCHANGE-1
def test_no_settings_are_those_of_another_attempt(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_exchange, "BUILT_S", 0.01)
    source, peer = ranks(0), ranks(0)
    source.server.forms.announce(FormOf.SETTINGS, AT, lambda: FORM)
    assert peer.server.forms.fetch(source.server.address, FormOf.SETTINGS, FIRST, (), lambda: False) is None
    assert peer.server.forms.fetch(source.server.address, FormOf.SETTINGS, AT, (), lambda: False) == FORM
    source.server.forms.withdraw(FormOf.SETTINGS)
    assert peer.server.forms.fetch(source.server.address, FormOf.SETTINGS, AT, (), lambda: False) is None
