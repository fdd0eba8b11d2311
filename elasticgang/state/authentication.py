"""Authenticates the ranks of a job to each other, before any state is sent.

PEER-1  Each end proves that it holds the job's secret, by the handshake of an agent's session, in the role of a rank. A
    proof is valid for this job, role and nonce only. With TLS, each end also checks the other's certificate.
PEER-2  A handshake ends after `HANDSHAKE_S`.
PEER-3  Who is `cancelled` waits no longer for a connection: on a path that drops what is sent, that takes
    `CONNECT_TIMEOUT_S`, and the other ranks of a generation that has ended would wait for this one.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable

from elasticgang.errors import WireError
from elasticgang.protocol.record import PROTOCOL
from elasticgang.session.credentials import Credentials
from elasticgang.session.frames import body_frame
from elasticgang.session.handshake import (
    MAX_HANDSHAKE_BYTES,
    NONCE_BYTES,
    RANK,
    ClientHandshake,
    Identity,
    ServerHandshake,
    SessionKeys,
)
from elasticgang.session.tls import explain, looks_like_tls
from elasticgang.state import transport
from elasticgang.state.transport import Channel

HANDSHAKE_S = 10.0
_DRAIN_S = 0.5
_CANCEL_POLL_S = 0.005
_MAX_DRAINED_BYTES = 1 << 16


class Authenticator:
    """Both ends of connections between the ranks of one job."""

    def __init__(self, job: str, credentials: Credentials) -> None:
        self.credentials = credentials
        self._identity = Identity(job, RANK, PROTOCOL)
        self._decoy = secrets.token_bytes(NONCE_BYTES)
        if (tls := credentials.tls) is not None:  # they are made, or fail, here
            tls.server_context(), tls.client_context(checks_name=False)

    def connect_unless(self, cancelled: Callable[[], bool], source: str) -> Channel:
        """As `connect`. PEER-3. Raises OSError or WireError, also once `cancelled`."""
        opening = _Opening(functools.partial(self.connect, source))
        while not opening.ended.wait(_CANCEL_POLL_S):
            if cancelled():
                opening.abandon()
                raise WireError(f"the generation ended before {source} had answered")
        return opening.result()

    def connect(self, source: str) -> Channel:
        """Raises OSError or WireError."""
        host, _, port = source.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=transport.CONNECT_TIMEOUT_S)
        try:
            transport.at_once(sock)
            transport.notice_lost_path(sock)
            if (tls := self.credentials.tls) is not None:  # TLS-NEWEST
                sock = tls.client_context(checks_name=False).wrap_socket(sock, do_handshake_on_connect=False)
            keys = self._within_limits(sock, self._answer_challenge, "the source")
            sock.settimeout(transport.HEAL_TIMEOUT_S)
            return Channel(sock, keys, is_server=False)
        except BaseException:
            sock.close()
            raise

    def wrap(self, sock: socket.socket) -> socket.socket:
        """Wrap the socket of a healer, for `accept`. Takes ownership of `sock`. Does not block."""
        transport.at_once(sock)
        if (tls := self.credentials.tls) is None:
            return sock
        return tls.server_context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def accept(self, sock: socket.socket) -> Channel:
        """Raises OSError or WireError: the healer is not authenticated."""
        keys = self._within_limits(sock, self._challenge, "a healer")
        sock.settimeout(transport.HEAL_TIMEOUT_S)
        return Channel(sock, keys, is_server=True)

    def _within_limits(
        self, sock: socket.socket, shake_hands: Callable[[_Bodies], SessionKeys], peer: str
    ) -> SessionKeys:
        bodies = _Bodies(sock, peer)
        try:
            if isinstance(sock, ssl.SSLSocket):
                sock.settimeout(HANDSHAKE_S)
                sock.do_handshake()
            return shake_hands(bodies)
        except ssl.SSLError as exc:
            _drain(sock)
            tls = self.credentials.tls
            raise WireError(explain(exc, peer, "" if tls is None else tls.path)) from exc
        except ConnectionError as exc:
            raise WireError(_closed(peer)) from exc
        except TimeoutError as exc:  # PEER-2
            raise WireError(f"the handshake with {peer} was not done after {HANDSHAKE_S:g} s") from exc

    def _answer_challenge(self, bodies: _Bodies) -> SessionKeys:
        nonce = secrets.token_bytes(NONCE_BYTES)
        handshake = ClientHandshake(self._identity, self.credentials.key, nonce, server="the source")
        bodies.send(handshake.hello())
        bodies.send(handshake.answer(bodies.receive()))
        return handshake.finish(bodies.receive())

    def _challenge(self, bodies: _Bodies) -> SessionKeys:
        handshake = ServerHandshake(self._secret_of, secrets.token_bytes(NONCE_BYTES), self._decoy, (RANK,))
        bodies.send(handshake.challenge(bodies.receive()))
        proof, keys = handshake.finish(bodies.receive())
        bodies.send(proof)
        return keys

    def _secret_of(self, job: str) -> bytes | None:
        """PEER-1"""
        return self.credentials.key if job == self._identity.job else None


class _Opening:
    """Opens a connection on a thread of its own. Raises WireError: there is no thread."""

    def __init__(self, connect: Callable[[], Channel]) -> None:
        self.ended = threading.Event()
        self._connect = connect
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._channel: Channel | None = None
        self._error: Exception | None = None
        try:
            threading.Thread(target=self._run, name="elasticgang-connect", daemon=True).start()
        except RuntimeError as exc:
            raise WireError(f"no thread for a connection: {exc}") from exc

    def _run(self) -> None:
        try:
            channel = self._connect()
            with self._lock:
                if not self._is_abandoned:
                    self._channel = channel
                    return
            channel.sock.close()
        except Exception as exc:
            self._error = exc
        finally:
            self.ended.set()

    def abandon(self) -> None:
        """The connection is closed, now or once it is open."""
        with self._lock:
            self._is_abandoned = True
            if self._channel is not None:
                self._channel.sock.close()

    def result(self) -> Channel:
        """Once it has `ended`. Raises what the thread has met."""
        if self._error is not None:
            raise self._error
        assert self._channel is not None
        return self._channel


class _Bodies:
    """The frames of a handshake, which have no MAC, within its deadline."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock, self._peer = sock, peer
        self._deadline_s = time.monotonic() + HANDSHAKE_S

    def send(self, body: bytes) -> None:
        self._limit()
        self._sock.sendall(body_frame(body))

    def receive(self) -> bytes:
        header = self._read(4)
        size = int.from_bytes(header, "big")
        if size > MAX_HANDSHAKE_BYTES:
            if looks_like_tls(header) and not isinstance(self._sock, ssl.SSLSocket):
                raise WireError(f"{self._peer} speaks TLS, and this end does not: both need `--tls-cert`, or neither")
            raise WireError(f"a frame of {size} bytes is over the limit of {MAX_HANDSHAKE_BYTES}")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._limit()
            part = self._sock.recv(size - len(data))
            if not part:
                raise WireError(_closed(self._peer))
            data += part
        return data

    def _limit(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)


def _closed(peer: str) -> str:
    return f"{peer} closed the connection during the handshake: it may hold another secret, or require TLS"


def _drain(sock: socket.socket) -> None:
    """Read the remaining bytes before a close. Unread bytes would reset the connection, and the peer would lose the
    TLS alert."""
    deadline_s, num_bytes = time.monotonic() + _DRAIN_S, 0
    with contextlib.suppress(OSError):  # past TLS: the alert was sent
        socket.socket.shutdown(sock, socket.SHUT_WR)
        while num_bytes < _MAX_DRAINED_BYTES and (left_s := deadline_s - time.monotonic()) > 0:
            sock.settimeout(left_s)
            data = socket.socket.recv(sock, 4096)
            if not data:
                return
            num_bytes += len(data)
