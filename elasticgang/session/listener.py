"""Where sessions come in: who may listen where, how many strangers at once, and what is logged about them.

LISTEN-LOCAL  Without a secret only loopback is listened on, unless `insecure` says otherwise.
LISTEN-BOUND  At most `MAX_PENDING` connections wait for their handshake: one more ends the oldest of them.
LISTEN-ONCE   What goes wrong with unauthenticated peers is logged once for each host and reason, and counted.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections import Counter
from collections.abc import Callable

from elasticgang.errors import OperationalError
from elasticgang.session.connection import Connection, ServerConnection, SessionUser
from elasticgang.session.frames import MAX_PAYLOAD_BYTES
from elasticgang.session.handshake import AGENT

MAX_PENDING = 256
_MAX_INCIDENTS = 1024


def check_listen_address(host: str, has_secret: bool, insecure: bool = False) -> None:
    """Raises OperationalError when sessions without authentication would be open to other hosts."""
    if not (has_secret or insecure or is_loopback(host)):
        raise OperationalError(
            f"without a secret the coordinator listens on loopback only, but was to listen on {host!r}: give it "
            "`--secret-file`, or `--insecure` in a network that you trust"
        )


def is_loopback(host: str) -> bool:
    """Raises OSError: it is no name of a host."""
    addresses = {info[4][0] for info in socket.getaddrinfo(host or "0.0.0.0", None)}
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in addresses)


class Incidents:
    """LISTEN-ONCE"""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self.counts: Counter[tuple[str, str]] = Counter()

    def note(self, host: str, reason: str) -> None:
        key = (host, reason)
        if key not in self.counts and len(self.counts) >= _MAX_INCIDENTS:
            key = ("other hosts", "more of the same")
        self.counts[key] += 1
        if self.counts[key] == 1:
            self._log(f"rejected a connection from {key[0]}: {key[1]}")


class Listener:
    """Authenticated connections go to `user`; the others never reach it."""

    def __init__(
        self,
        user: SessionUser,
        secret_of: Callable[[str], bytes | None],
        log: Callable[[str], None],
        roles: tuple[str, ...] = (AGENT,),
        max_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._user, self._secret_of, self._roles, self._max_bytes = user, secret_of, roles, max_bytes
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

    async def start(self, host: str, port: int, *, has_secret: bool, insecure: bool = False) -> None:
        check_listen_address(host, has_secret, insecure)
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
        connection = ServerConnection(self, self._secret_of, self._decoy, self._roles, self._max_bytes)
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
