"""One end of a session over asyncio: the handshake, frames, and limits on the memory that a peer can make it use.

CONN-DEADLINE  Both ends close a connection whose handshake is not complete after `HANDSHAKE_S`. That is long: if a
               coordinator is slow because many come at once, one that gives up loses its place, and makes the
               coordinator slower.
CONN-ALIVE     An end whose peer's kernel has not answered for `ALIVE_S` closes the connection: its host is down, or
               cut off. A process that answers late is not mistaken for that, but one that reads nothing for so long
               while much is sent to it is: the kernel counts a full window as no answer.
CONN-NODELAY   Each message is sent at once. Otherwise the kernel would keep a small one back until the peer has
               acknowledged the one before, for up to 40 ms: asyncio tells it so for connections that it has opened,
               and not for accepted ones.
CONN-UNREAD    A connection whose peer leaves more than `MAX_UNSENT_BYTES` unread is closed.
CONN-BOUND     A frame has at most `MAX_HANDSHAKE_BYTES` during the handshake, not counting the padding of a proof, and
               at most `max_bytes` after it.
CONN-PATH      Both ends pad their proofs by `PADDING_BYTES`, more than any usual network has in a packet. So no session
               begins over a path that loses large packets (a wrong MTU), on which short messages would pass, but no
               record: an agent there would join the job, and stop it, again and again.
CONN-TURN      What came on one connection is handled for `TURN_S` at a time. Until all of it is, nothing more is read
               from it, and every other connection has its turns.
CONN-LINGER    Who closes a connection goes on reading, and drops what it reads, until the peer has closed its end too,
               for `LINGER_S` at most. Otherwise what the peer sends meanwhile resets the connection, and asyncio,
               which then stops reading there, loses the last messages. What the peer has not read by then is dropped.
CONN-TLS       With TLS, nothing is sent or accepted before the TLS handshake is complete, within the same deadline.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol

from elasticgang.errors import WireError
from elasticgang.session.credentials import Credentials
from elasticgang.session.frames import MAX_PAYLOAD_BYTES, FrameBuffer, FrameReader, FrameWriter, Payload, body_frame
from elasticgang.session.handshake import (
    MAX_HANDSHAKE_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    ClientHandshake,
    Identity,
    ServerHandshake,
    SessionKeys,
)
from elasticgang.session.open_socket import open_socket
from elasticgang.session.tls import TlsStream, explain, looks_like_tls, name_to_check

HANDSHAKE_S = 40.0
ALIVE_S = 5
LINGER_S = 1.0
TURN_S = 0.01
MAX_UNSENT_BYTES = 32 << 20
PADDING_BYTES = 10_000

_PROBES = 3
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),  # CONN-NODELAY
    # CONN-ALIVE: probes while nothing is under way, and a deadline for what is sent and not acknowledged
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE_S - _PROBES),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * ALIVE_S),
)


class SessionUser(Protocol):
    """What a connection calls on its owner."""

    def opened(self, connection: Connection) -> None:
        """The peer is authenticated: messages may be sent."""

    def received(self, connection: Connection, payload: bytes) -> None:
        """Take one message. Raises WireError to end the session."""

    def closed(self, connection: Connection, reason: str) -> None:
        """Called once, whether the connection was opened or not. `reason`: "" if the peer closed it normally."""


class Connection(asyncio.Protocol):
    """What both ends share."""

    _PEER: str  # the peer's name in messages

    def __init__(self, user: SessionUser, max_bytes: int, tls: TlsStream | None, certificate: str) -> None:
        self._user, self._max_bytes = user, max_bytes
        self._tls, self._certificate = tls, certificate
        self._is_begun = False
        self._buffer = FrameBuffer(MAX_HANDSHAKE_BYTES)
        self._reader: FrameReader | None = None
        self._writer: FrameWriter | None = None
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._reason = ""
        self.is_explained = False  # the reason names the cause
        self._has_data = self._is_at_padding = False  # padding was sent, and nothing has come since
        self._is_closing = self._is_closed = False
        self.identity: Identity | None = None
        self.peer = "?"
        self.host = ""  # the address of this end
        self.num_bytes_sent = 0

    @property
    def is_open(self) -> bool:
        return self._writer is not None and not self._is_over()

    @property
    def transport(self) -> asyncio.Transport | None:
        """None before the connection is made."""
        return self._transport

    @property
    def has_data(self) -> bool:
        """The peer has sent something."""
        return self._has_data

    def _is_over(self) -> bool:
        """Nothing that comes is taken any more."""
        return self._is_closing or self._is_closed

    @property
    def num_unread_bytes(self) -> int:
        """Received bytes of an incomplete frame."""
        return self._buffer.num_bytes

    def send(self, payload: bytes | Payload) -> None:
        """Queue a message. It is dropped if the session is not open, or the connection has just broken: asyncio tells
        that later, and meanwhile warns of each write."""
        if self._writer is None or self._transport is None or not self.is_open or self._transport.is_closing():
            return
        frame = self._writer.frame(payload)
        try:
            self.num_bytes_sent += self._write(frame)
        except ssl.SSLError as error:
            self._end_tls(error)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort(f"it leaves more than {MAX_UNSENT_BYTES} bytes unread")

    def close(self) -> None:
        """Close the connection once the peer has read all queued bytes, after `LINGER_S` at most (CONN-LINGER)."""
        if self._transport is None or self._is_closing:
            return
        self._is_closing = True
        try:
            self._transport.write_eof()
        except OSError:  # it is not connected any more
            self._transport.close()
            return
        self._cancel_deadline()
        # Not `close`, which would wait for the peer.
        self._deadline = asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def abort(self, reason: str) -> None:
        """Close the connection at once. Queued bytes are dropped; the owner gets `reason`."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()
        self._end()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._is_closed:  # the listener dropped it before it began
            transport.abort()
            return
        if (sock := _tcp_socket(transport)) is not None:
            for level, option, value in _OPTIONS:
                sock.setsockopt(level, option, value)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple) and len(peer) >= 2:
            self.peer = f"{peer[0]}:{peer[1]}"
        own = transport.get_extra_info("sockname")
        self.host = str(own[0]) if isinstance(own, tuple) else ""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(
            HANDSHAKE_S, lambda: self.abort(f"its handshake was not complete after {HANDSHAKE_S:g} s")
        )
        try:
            self._take(b"")
        except ssl.SSLError as error:
            self._end_tls(error)

    def data_received(self, data: bytes) -> None:
        if self._is_over():
            return
        if not self._has_data and self._tls is None and looks_like_tls(data):
            self.abort(f"{self._PEER} speaks TLS, and this end does not: both ends need `--tls-cert`, or neither")
            return
        self._has_data = True
        self._handle(data)

    def _handle(self, data: bytes) -> None:
        """Handle the frames that are complete with `data` (CONN-TURN)."""
        until_s = time.monotonic() + TURN_S
        try:
            self._take(data)
            while not self._is_over() and (body := self._buffer.next()) is not None:
                self._is_at_padding = False
                if self._reader is None:
                    self._shake_hands(body)
                else:
                    self._user.received(self, self._reader.payload(body))
                if time.monotonic() > until_s:
                    self._pause()
                    return
        except ssl.SSLError as error:
            self._end_tls(error)
        except WireError as error:
            self.abort(str(error))

    def _pause(self) -> None:
        if not self._is_over() and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()  # also if it lingers (CONN-LINGER)
        if not self._is_over():
            self._handle(b"")

    def _take(self, data: bytes) -> None:
        """CONN-TLS"""
        if self._tls is not None:
            data = self._tls.receive(data)
        if not self._is_begun and (self._tls is None or self._tls.is_open):
            self._is_begun = True
            self._begin()
        self._flush()
        self._buffer.feed(data)

    def _write(self, data: bytes) -> int:
        """Returns the number of bytes on the wire."""
        if self._tls is not None:
            self._tls.send(data)
            return self._flush()
        assert self._transport is not None
        self._transport.write(data)
        return len(data)

    def _flush(self) -> int:
        data = b"" if self._tls is None else self._tls.outgoing()
        if data and self._transport is not None:
            self._transport.write(data)
        return len(data)

    def _end_tls(self, error: ssl.SSLError) -> None:
        """Close the connection after the TLS alert that names the error is sent."""
        self._flush()
        self._reason = self._reason or explain(error, self._PEER, self._certificate)
        self.is_explained = True
        self.close()
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        if self._is_closing:
            pass
        elif exc is not None:
            early = self._tls is not None and self._reader is None
            doubt = f": {self._PEER} may refuse the certificate {self._certificate}" if early else ""
            self.is_explained = early or self._is_at_padding
            if self._is_at_padding:
                doubt = ": its network may lose large packets: compare the MTU of both hosts"
            self._reason = self._reason or f"the connection broke: {exc}{doubt}"
        elif self._reader is None:
            self._reason = self._reason or self._lost_early()
        self._end()

    def _end(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if not self._is_closing:
            self._cancel_deadline()
        self._user.closed(self, self._reason)

    def _lost_early(self) -> str:
        """The likely reason for which the peer closed the connection before it was opened; "" for a probe, which sends
        nothing."""
        return "it closed the connection during the handshake" if self._has_data else ""

    def _begin(self) -> None: ...

    def _shake_hands(self, body: bytes) -> None:
        raise NotImplementedError

    def _write_body(self, body: bytes) -> None:
        self._write(body_frame(body))

    def _write_proof(self, proof: bytes) -> None:
        """CONN-PATH"""
        self._write_body(proof + bytes(PADDING_BYTES))
        self._is_at_padding = True

    def _expect_proof(self) -> None:
        self._buffer.limit = PROOF_BYTES + PADDING_BYTES

    def _open(self, read_key: bytes, write_key: bytes) -> None:
        self._reader = FrameReader(read_key)
        self._writer = FrameWriter(write_key, self._max_bytes)
        self._buffer.limit = self._max_bytes + FrameReader.OVERHEAD_BYTES
        self._cancel_deadline()
        self._user.opened(self)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class ServerConnection(Connection):
    """The end that checks a client. `secret_of`, `decoy` and `roles`: see `ServerHandshake`."""

    _PEER = "a client"

    def __init__(
        self,
        user: SessionUser,
        secret_of: Callable[[str], bytes | None],
        decoy: bytes,
        roles: tuple[str, ...],
        max_bytes: int = MAX_PAYLOAD_BYTES,
        tls: TlsStream | None = None,
        certificate: str = "",
    ) -> None:
        super().__init__(user, max_bytes, tls, certificate)
        self._handshake = ServerHandshake(secret_of, secrets.token_bytes(NONCE_BYTES), decoy, roles)
        self._is_challenged = False

    def _shake_hands(self, body: bytes) -> None:
        if not self._is_challenged:
            self._is_challenged = True
            self._expect_proof()
            self._write_body(self._handshake.challenge(body))
            return
        proof, keys = self._handshake.finish(body)
        self.identity = self._handshake.identity
        self._write_proof(proof)
        self._open(keys.to_server, keys.to_client)


class ClientConnection(Connection):
    """The end that connects, as `identity`. `secret`: the job's, b"" without one."""

    _PEER = "the coordinator"

    def __init__(
        self,
        user: SessionUser,
        identity: Identity,
        secret: bytes,
        tls: TlsStream | None = None,
        certificate: str = "",
    ) -> None:
        super().__init__(user, MAX_PAYLOAD_BYTES, tls, certificate)
        self.identity = identity
        self._handshake = ClientHandshake(identity, secret, secrets.token_bytes(NONCE_BYTES))
        self._is_proved = False

    def _lost_early(self) -> str:
        if self._tls is None and not self._has_data:
            return (
                "it closed the connection at the first bytes: it may require TLS (`--tls-cert`), or run another "
                "version of elasticgang"
            )
        return super()._lost_early()

    def _begin(self) -> None:
        self._write_body(self._handshake.hello())

    def _shake_hands(self, body: bytes) -> None:
        if not self._is_proved:
            self._is_proved = True
            self._expect_proof()
            self._write_proof(self._handshake.answer(body))
            return
        keys: SessionKeys = self._handshake.finish(body)
        self._open(keys.to_client, keys.to_server)


def _tcp_socket(transport: asyncio.BaseTransport) -> Any:
    """None if it is of another kind."""
    sock = transport.get_extra_info("socket")
    return sock if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6) else None


def client_of(user: SessionUser, identity: Identity, credentials: Credentials, host: str) -> ClientConnection:
    """A connection for the coordinator at `host` (TLS-NAME)."""
    tls = credentials.tls
    if tls is None:
        return ClientConnection(user, identity, credentials.key)
    name = name_to_check(host)
    stream = TlsStream(tls.client_context(checks_name=name is not None), is_server=False, name=name)
    return ClientConnection(user, identity, credentials.key, stream, tls.path)


async def connect(make: Callable[[], ClientConnection], host: str, port: int) -> None:
    """Open a connection that `make` makes. Raises OSError (ADDRESS-ALL)."""
    sock = await open_socket(host, port)
    await asyncio.get_running_loop().create_connection(make, sock=sock)
