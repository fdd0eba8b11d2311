"""Where sessions come in, and how many connections may wait to be authenticated.

LISTEN-BOUND  At most `MAX_PENDING` connections wait for their handshake: one more ends the oldest of them.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import Callable

from elasticgang.session.connection import Connection, ServerConnection, SessionUser
from elasticgang.session.frames import MAX_PAYLOAD_BYTES
from elasticgang.session.handshake import AGENT
from elasticgang.session.incidents import Incidents
from elasticgang.session.tls import Tls, TlsStream

MAX_PENDING = 256


class Listener:
    """Authenticated connections go to `user`; the others never reach it."""

    def __init__(
        self,
        user: SessionUser,
        secret_of: Callable[[str], bytes | None],
        log: Callable[[str], None],
        roles: tuple[str, ...] = (AGENT,),
        max_bytes: int = MAX_PAYLOAD_BYTES,
        tls: Tls | None = None,
    ) -> None:
        self._user, self._secret_of, self._roles, self._max_bytes = user, secret_of, roles, max_bytes
        self._context: ssl.SSLContext | None = None if tls is None else tls.server_context()
        self._certificate = "" if tls is None else tls.path
        self._decoy = secrets.token_bytes(32)
        self._pending: dict[Connection, None] = {}
        self._open: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self.incidents = Incidents(log)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port, backlog=4096)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in [*self._pending, *self._open]:
            connection.abort("the coordinator stops")
        if self._server is not None:
            await self._server.wait_closed()

    def _accept(self) -> Connection:
        while len(self._pending) >= MAX_PENDING:
            oldest = next(iter(self._pending))
            oldest.abort(f"more than {MAX_PENDING} connections wait for their handshake")
            self._pending.pop(oldest, None)
        stream = None if self._context is None else TlsStream(self._context, is_server=True)
        connection = ServerConnection(
            self, self._secret_of, self._decoy, self._roles, self._max_bytes, stream, self._certificate
        )
        self._pending[connection] = None
        return connection

    # -- of its connections

    def opened(self, connection: Connection) -> None:
        self._pending.pop(connection, None)
        self._open.add(connection)
        self._user.opened(connection)

    def received(self, connection: Connection, payload: bytes) -> None:
        self._user.received(connection, payload)

    def closed(self, connection: Connection, reason: str) -> None:
        if connection in self._open:
            self._open.discard(connection)
            self._user.closed(connection, reason)
            return
        self._pending.pop(connection, None)
        if reason:
            self.incidents.note(connection.peer.rsplit(":", 1)[0], reason)
