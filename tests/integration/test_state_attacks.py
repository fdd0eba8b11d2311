"""Who may fetch a rank's state, and who may send one: an attacker gets nothing, costs nothing and fills no log."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from elasticgang.errors import OperationalError, WireError
from elasticgang.protocol.record import PROTOCOL
from elasticgang.session.credentials import Credentials
from elasticgang.session.frames import body_frame
from elasticgang.session.handshake import AGENT, RANK, ClientHandshake, Identity
from elasticgang.session.secret import Secret
from elasticgang.state import authentication, state_listener, transport
from elasticgang.state.authentication import Authenticator
from elasticgang.state.digests import digest_for
from elasticgang.state.snapshot_server import MAX_REQUEST_BYTES
from elasticgang.state.state_listener import StateListener
from elasticgang.state.transport import Channel
from tests.integration.certificates import Authority
from tests.integration.state_ranks import (
    AT,
    AUTHENTICATOR,
    CREDENTIALS,
    DEADLINE_S,
    FIRST,
    HERE,
    JOB,
    Rank,
    Ranks,
    Wire,
    connected,
    same,
)
from tests.support import wait_until

WRONG = Credentials(Secret(b"another secret of it"))
HELLO = Identity(JOB, RANK, PROTOCOL)
NOT_UNICODE = ClientHandshake(HELLO, b"", b"n" * 32).hello().replace(f'"job":"{JOB}"'.encode(), rb'"job":"\ud800"')


class Source:
    """A listener whose authenticated healers get one message."""

    def __init__(self, credentials: Credentials = CREDENTIALS) -> None:
        self.num_served = 0
        self.listener = StateListener(HERE, Authenticator(JOB, credentials), self._serve)
        self.address = self.listener.address

    def _serve(self, channel: Channel) -> None:
        self.num_served += 1
        with contextlib.suppress(OSError, WireError):
            channel.send(channel.receive(MAX_REQUEST_BYTES))

    def raw(self, sent: bytes) -> socket.socket:
        sock = connected(self.address)
        sock.sendall(sent)
        return sock


@pytest.fixture
def source(caplog: pytest.LogCaptureFixture) -> Iterator[Source]:
    with caplog.at_level(logging.WARNING, "elasticgang"):
        source = Source()
        yield source
        source.listener.close()


def is_served(source: Source, authenticator: Authenticator = AUTHENTICATOR) -> bool:
    with authenticator.connect(source.address) as channel:
        channel.send("hello")
        return bool(channel.receive(MAX_REQUEST_BYTES) == "hello")


def ended(sock: socket.socket) -> bytes:
    """What comes before the connection ends."""
    with sock, contextlib.suppress(ConnectionError):
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))
    return b""


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What listeners have said. A thread of another test may warn of something else meanwhile."""
    return [line for line in caplog.messages if line.startswith("closed a connection from")]


def logged(caplog: pytest.LogCaptureFixture, num: int, source: Source) -> str:
    """The one line, once `num` incidents were counted."""
    counts = source.listener.incidents.counts
    wait_until(lambda: sum(counts.values()) == num, f"{num} incidents, but they are {counts}")
    (line,) = lines(caplog)
    return line


# -- the secret


# PEER-1
def test_a_healer_without_the_secret_gets_nothing(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    rank = ranks(3)
    rank.server.begin(AT)
    for credentials in (WRONG, Credentials()):
        healer = Rank(1, credentials=credentials)
        before = healer.large(), healer.small()
        assert not healer.server.heal([rank.server.address], AT)
        assert same((healer.large(), healer.small()), before)
        healer.server.close()
    assert "it may hold another secret" in caplog.text
    assert caplog.text.count("a client does not hold the secret of the job that it names") == 1
    honest = ranks(1)
    assert honest.server.heal([rank.server.address], AT)
    assert same(honest.large(), rank.large())


# PEER-1
def test_a_healer_takes_nothing_from_a_source_without_the_secret(caplog: pytest.LogCaptureFixture) -> None:
    """It sends back the healer's own proof."""
    with socket.create_server((HERE, 0)) as listener:

        def impostor() -> None:
            sock, _ = listener.accept()
            with sock:
                transport.receive_body(sock, 1024)
                sock.sendall(body_frame(os.urandom(32)))
                sock.sendall(body_frame(transport.receive_body(sock, 1024)))
                ended(sock)

        thread = threading.Thread(target=impostor)
        thread.start()
        healer = Rank(1)
        before = healer.large(), healer.small()
        assert not healer.server.heal([f"{HERE}:{listener.getsockname()[1]}"], AT)
        thread.join(20)
        assert not thread.is_alive()
    assert "the source does not hold the secret of this job" in caplog.text
    assert same((healer.large(), healer.small()), before)
    healer.server.close()


# PEER-1
@pytest.mark.parametrize(
    ("identity", "complaint"),
    [
        (Identity("other", RANK, PROTOCOL), "the secret"),
        (Identity(JOB, AGENT, PROTOCOL), "role agent"),
    ],
)
def test_the_right_secret_for_another_job_or_role_is_refused(
    source: Source, caplog: pytest.LogCaptureFixture, identity: Identity, complaint: str
) -> None:
    for _ in range(3):
        handshake = ClientHandshake(identity, CREDENTIALS.key, os.urandom(32))
        sock = source.raw(body_frame(handshake.hello()))
        with contextlib.suppress(OSError, WireError):
            sock.sendall(body_frame(handshake.answer(transport.receive_body(sock, 1024))))
        assert ended(sock) == b""
    assert complaint in logged(caplog, 3, source)
    assert source.num_served == 0


# PEER-1
def test_a_recorded_heal_is_worthless(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    rank, healer = ranks(3), ranks(1)
    rank.server.begin(AT)
    with Wire(rank) as wire:
        assert healer.server.heal([wire.address], AT)
    assert len(wire.from_healer) > 100
    sock = connected(rank.server.address)
    sock.sendall(wire.from_healer)
    transport.receive_body(sock, 1024)  # another challenge
    assert ended(sock) == b""
    wait_until(lambda: "a client does not hold the secret" in caplog.text, "the line of a replay")


# CHANNEL-2
def test_a_chunk_that_was_changed_with_its_digest_is_found(ranks: Ranks) -> None:
    """The digest of the first chunk, of 4 floats, stands before it; whoever changes both has no key."""
    rank, healer = ranks(3), ranks(1)
    rank.server.begin(FIRST)
    before = healer.large(), healer.small()

    def forged(sent: bytes) -> bytes:
        chunk = bytearray(sent[transport.DIGEST_BYTES :])
        chunk[0] ^= 1
        return transport.digest(chunk) + bytes(chunk)

    with Wire(rank, forge=(transport.DIGEST_BYTES + 16, forged)) as wire:
        assert not healer.server.heal([wire.address], FIRST)
    assert same((healer.large(), healer.small()), before)


# DIGEST-1
def test_without_tls_a_secret_has_digests_that_nobody_can_match(tmp_path: Path) -> None:
    data = memoryview(b"a chunk")
    tls = Authority(tmp_path).issue("a").read()
    strong = hashlib.sha256(data).hexdigest()[:32]
    weak = xxhash.xxh3_128_hexdigest(data)
    secret = CREDENTIALS.secret
    for credentials, expected in (
        (Credentials(secret), strong),
        (Credentials(secret, tls), weak),
        (Credentials(tls=tls), weak),
        (Credentials(), weak),
    ):
        assert digest_for(credentials)(data) == expected


# -- floods


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of 1195725856 bytes is over the limit of 1024"),
        (struct.pack("!I", 2 << 30), "a frame of 2147483648 bytes is over the limit of 1024"),
        (body_frame(os.urandom(300)), "the first frame is not a hello"),
        (body_frame(NOT_UNICODE), "a job's name must be Unicode text"),
        (body_frame(ClientHandshake(HELLO, b"", b"n" * 32).hello()) + body_frame(b"x" * 32), "not hold the secret"),
        (b"\x16\x03\x01\x02\x00" + b"x" * 512, "a healer speaks TLS, and this end does not"),
    ],
)
def test_what_is_not_from_a_rank_is_cut_off_and_logged_once(
    source: Source, caplog: pytest.LogCaptureFixture, sent: bytes, complaint: str
) -> None:
    for _ in range(20):
        ended(source.raw(sent))
    assert complaint in logged(caplog, 20, source)
    assert source.num_served == 0
    assert is_served(source)


# STATELISTEN-1
def test_a_connection_whose_authentication_fails_does_not_stay_pending(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_raised = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: has_raised.set())
    with monkeypatch.context() as failing:
        failing.setattr(Authenticator, "accept", lambda *_: 1 // 0)
        assert ended(source.raw(b"")) == b""
    assert source.listener.num_pending == 0
    assert is_served(source)
    assert has_raised.wait(DEADLINE_S)  # not once the hook is pytest's again


# CHANNEL-1
def test_a_huge_frame_of_a_rank_ends_its_connection(source: Source) -> None:
    with AUTHENTICATOR.connect(source.address) as channel:
        channel.sock.sendall(struct.pack("!I", 2 << 30) + b"x" * 1000)
        assert ended(channel.sock) == b""
    assert is_served(source)


# STATELISTEN-1
def test_half_open_connections_are_bounded_and_keep_nobody_out(
    source: Source, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_listener, "MAX_PENDING", 8)
    num_threads = threading.active_count()
    opened = []
    for number in range(100):
        opened.append(source.raw(b"\0"))
        assert source.listener.num_pending <= 8
        if number % 25 == 24:
            assert is_served(source)
    for sock in opened[:80]:
        assert ended(sock) == b""
    wait_until(lambda: threading.active_count() <= num_threads + 12, "the end of their threads")
    assert lines(caplog) == [f"closed a connection from {HERE}: more than 8 connections wait to be authenticated"]
    for sock in opened[80:]:
        sock.close()
    # Each warns of that. The next test would take a late line for one of its own.
    wait_until(lambda: threading.active_count() <= num_threads, "the end of the other threads")


# PEER-2
def test_a_handshake_that_drips_has_a_deadline(
    source: Source, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "HANDSHAKE_S", 0.3)
    hello = body_frame(ClientHandshake(HELLO, CREDENTIALS.key, b"n" * 32).hello())
    with source.raw(b"") as sock, contextlib.suppress(OSError):
        sock.settimeout(0.05)
        for byte in hello:  # more bytes than the deadline has twentieths
            sock.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                if sock.recv(1) == b"":
                    break
        else:
            pytest.fail("the whole hello was read")
    assert "the handshake with a healer was not done after 0.3 s" in logged(caplog, 1, source)


# -- TLS


def test_a_state_is_healed_over_tls_without_a_secret(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    source = Rank(3, credentials=Credentials(tls=authority.issue("a").read()))
    healer = Rank(1, credentials=Credentials(tls=authority.issue("b").read()))
    source.server.begin(AT)
    assert healer.server.heal([source.server.address], AT)
    assert same(healer.large(), source.large())
    assert same(healer.small(), source.small())
    with source.server.exclusive():
        pass
    for rank in (source, healer):
        rank.server.close()


def test_an_apply_drops_a_slow_healer_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed under the thread that writes to it."""
    from elasticgang.state import snapshot_server

    monkeypatch.setattr(snapshot_server, "EXCLUSIVE_TIMEOUT_S", 0.5)
    credentials = Credentials(tls=Authority(tmp_path).issue().read())
    source = Rank(0, size=400_000, credentials=credentials)
    source.server.begin(AT)
    with Authenticator(JOB, credentials).connect(source.server.address) as channel:
        channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        channel.send({"attempt": list(AT), "after": False})
        channel.receive(transport.MAX_MANIFEST_BYTES)
        channel.send({"turn": ["slow", 0]})
        assert channel.receive(transport.MAX_MANIFEST_BYTES)["turn"]
        channel.send([0, 1])
        channel.sock.recv(1)
        with source.server.exclusive():
            pass
        assert len(ended(channel.sock)) < 400_000 * 12
    source.server.close()


# TLS-BOTH
def test_ranks_of_another_ca_refuse_each_other_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine, theirs = Authority(tmp_path), Authority(tmp_path, "other")
    source = Source(Credentials(tls=mine.issue().read()))
    own = Authenticator(JOB, Credentials(tls=theirs.issue().read()))
    with pytest.raises(WireError, match="the certificate of the source is refused: another CA has signed it"):
        own.connect(source.address)
    wait_until(lambda: len(lines(caplog)) == 1, "the source's line")
    assert "a healer refuses the certificate" in caplog.text
    lenient = theirs.issue()._replace(ca=mine.ca)  # accepts the source's, and shows another CA's
    with pytest.raises(WireError, match=r"the source refuses the certificate .*: another CA has signed it"):
        Authenticator(JOB, Credentials(tls=lenient.load())).connect(source.address)
    wait_until(lambda: len(lines(caplog)) == 2, "the source's line")
    assert "the certificate of a healer is refused: another CA has signed it" in caplog.text
    assert source.num_served == 0
    source.listener.close()


def test_a_healer_without_a_certificate_and_plain_text_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Authority(tmp_path).issue()
    credentials = Credentials(tls=files.read())
    source = Source(credentials)
    context = ssl.create_default_context(cafile=str(files.ca))
    context.check_hostname = False
    for _ in range(10):
        with contextlib.suppress(OSError), context.wrap_socket(connected(source.address)) as sock:
            sock.recv(1)
        ended(source.raw(b"GET / HTTP/1.1\r\n\r\n"))
    counts = source.listener.incidents.counts
    wait_until(lambda: sum(counts.values()) == 20, "their incidents")
    assert len(lines(caplog)) == 2
    assert "a healer shows no certificate" in caplog.text
    assert "a healer does not speak TLS 1.3" in caplog.text
    with pytest.raises(WireError, match="it may hold another secret, or require TLS"):
        AUTHENTICATOR.connect(source.address)
    assert is_served(source, Authenticator(JOB, credentials))
    source.listener.close()


# -- where it listens


# STATELISTEN-2, CRED-LOCAL
@pytest.mark.parametrize("make", [lambda: Credentials(), lambda: Credentials(insecure=True), lambda: CREDENTIALS])
def test_without_a_secret_state_is_served_on_loopback_only(make: Callable[[], Credentials]) -> None:
    credentials = make()
    if credentials.are_given or credentials.insecure:
        StateListener("0.0.0.0", Authenticator(JOB, credentials), lambda channel: None).close()
        return
    with pytest.raises(OperationalError) as refused:
        StateListener("0.0.0.0", Authenticator(JOB, credentials), lambda channel: None)
    assert str(refused.value) == (
        "without a secret or TLS a rank serves its state to peers on loopback only, not at '0.0.0.0': give "
        "`--secret-file` or `--tls-cert`, or `--insecure` in a network that you trust"
    )
