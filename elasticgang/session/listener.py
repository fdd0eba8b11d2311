"""Where sessions come in, and how many connections may wait to be authenticated.

LISTEN-BOUND  At most `MAX_PENDING` connections wait for their handshake. Further ones stay in the kernel's queue until
              one of these is done, or the oldest has had `MIN_PENDING_S` and is ended. So the agents of a large job can
              all come at once, and an attacker's connections keep nobody out for long.
LISTEN-SPARE  Connections leave `NUM_SPARE` descriptors to the process: a coordinator that cannot open the file of its
              next decision ends. Where a connection would take one of these, it is closed, and makes room as above.
LISTEN-TURN   The sessions that are open have their turn after each `ACCEPT_S` in which connections are accepted.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import resource
import secrets
import socket
from collections.abc import Callable

from elasticgang.session.connection import Connection, ServerConnection, SessionUser
from elasticgang.session.frames import MAX_PAYLOAD_BYTES
from elasticgang.session.handshake import AGENT
from elasticgang.session.incidents import Incidents
from elasticgang.session.tls import Tls, TlsStream

MAX_PENDING = 1024
MIN_PENDING_S = 0.5
ACCEPT_S = 0.01
NUM_SPARE = 16
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # an `accept` that may succeed later
_MAX_QUEUED = 4096
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # this host has no such address: another one of the name may do
_RETRY_S = 0.5  # while the process has no descriptor to spare


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
        self._tls = tls
        if tls is not None:
            tls.server_context()  # it is made, or fails, here
        self._decoy = secrets.token_bytes(32)
        self._pending: dict[Connection, float] = {}  # when it was accepted
        self._open: set[Connection] = set()
        self._sockets: list[socket.socket] = []
        self._accepted: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self.incidents = Incidents(log)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def port(self) -> int:
        return int(self._sockets[0].getsockname()[1])

    async def start(self, host: str, port: int) -> None:
        """Raises OSError, and listens nowhere then."""
        find = functools.partial(socket.getaddrinfo, host or None, port, type=socket.SOCK_STREAM)
        try:
            found = find(flags=socket.AI_PASSIVE | socket.AI_NUMERICHOST)
        except socket.gaierror:  # it is a name; a thread takes memory
            found = await asyncio.to_thread(find, flags=socket.AI_PASSIVE)
        errors = []
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                self._sockets.append(socket.create_server(address[:2], family=family, backlog=_MAX_QUEUED))
            except OSError as exc:
                errors.append(exc)
            else:
                self._sockets[-1].setblocking(False)
        taken = [error for error in errors if error.errno not in _ABSENT]
        if taken or not self._sockets:
            self._close()
            raise (taken or errors)[0]
        self._resume()

    async def stop(self) -> None:
        self._close()
        for connection in [*self._pending, *self._open]:
            connection.abort("the coordinator stops")
        for task in self._accepted:
            task.cancel()
        await asyncio.gather(*self._accepted, return_exceptions=True)

    def _close(self) -> None:
        self._stop_accepting()
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()

    def _resume(self) -> None:
        self._stop_accepting()
        for listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _stop_accepting(self, for_s: float | None = None) -> None:
        """`for_s`: None for until it is resumed."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            loop.remove_reader(listening)
        if for_s is not None:
            self._pause = loop.call_later(for_s, self._resume)

    def _accept(self, listening: socket.socket) -> None:
        """Take what waits, for `ACCEPT_S` at most, and the rest in the next turn of the loop: with one for each turn,
        many that come at once would wait for a turn each, in which all others are served."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + ACCEPT_S
        for _ in range(_MAX_QUEUED):
            if (wait_s := self._make_room(loop.time())) > 0.0:
                self._stop_accepting(wait_s)
                return
            try:
                accepted, address = listening.accept()
            except (InterruptedError, ConnectionAbortedError):
                continue
            except BlockingIOError:
                return
            except OSError as exc:
                what = f"it cannot be accepted: {exc}"
                if exc.errno in EXHAUSTED:
                    self._lack_descriptors(what)
                else:
                    self.incidents.note("an unknown host", what)
                    self._stop_accepting(_RETRY_S)
                return
            # A descriptor gets the lowest number that is free.
            if accepted.fileno() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - NUM_SPARE:
                accepted.close()
                self._lack_descriptors(f"it cannot be accepted: {NUM_SPARE} descriptors are left (ulimit -n)")
                return
            self._serve(accepted, address)
            if loop.time() >= until_s:  # LISTEN-TURN
                return

    def _serve(self, accepted: socket.socket, address: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        tls, stream, certificate = self._tls, None, ""
        if tls is not None:  # TLS-NEWEST
            stream, certificate = TlsStream(tls.server_context(), is_server=True), tls.path
        connection = ServerConnection(
            self, self._secret_of, self._decoy, self._roles, self._max_bytes, stream, certificate
        )
        connection.peer = f"{address[0]}:{address[1]}"  # it may be ended before it is made
        self._pending[connection] = loop.time()
        task = loop.create_task(loop.connect_accepted_socket(lambda: connection, accepted))
        self._accepted.add(task)
        task.add_done_callback(lambda done: self._handed_over(connection, accepted, done))

    def _handed_over(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[object]) -> None:
        self._accepted.discard(task)
        if task.cancelled():  # maybe before its first step: no transport owns the socket then
            accepted.close()
        elif (failure := task.exception()) is not None:
            connection.abort(str(failure))
            accepted.close()

    def _lack_descriptors(self, reason: str) -> None:
        """LISTEN-SPARE."""
        self.incidents.note("an unknown host", reason)
        wait_s = self._end_oldest("no descriptor is left for it", asyncio.get_running_loop().time())
        self._stop_accepting(min(wait_s, _RETRY_S))

    def _make_room(self, now_s: float) -> float:
        """Returns how long to wait before the oldest connection may be ended, 0 if there is room."""
        if len(self._pending) < MAX_PENDING:
            return 0.0
        return self._end_oldest(f"more than {MAX_PENDING} connections wait for their handshake", now_s)

    def _end_oldest(self, reason: str, now_s: float) -> float:
        """End the oldest connection that waits for its handshake. Returns in how many seconds it may be ended; 0 if it
        is."""
        if not self._pending:
            return _RETRY_S
        oldest, since_s = next(iter(self._pending.items()))
        if (wait_s := since_s + MIN_PENDING_S - now_s) > 0.0:
            return wait_s
        oldest.abort(reason)
        self._forget(oldest)
        return 0.0

    def _forget(self, connection: Connection) -> None:
        """LISTEN-BOUND"""
        if self._pending.pop(connection, None) is not None and self._pause is not None and self._sockets:
            self._resume()

    # -- of its connections

    def opened(self, connection: Connection) -> None:
        self._forget(connection)
        self._open.add(connection)
        self._user.opened(connection)

    def received(self, connection: Connection, payload: bytes) -> None:
        self._user.received(connection, payload)

    def closed(self, connection: Connection, reason: str) -> None:
        if connection in self._open:
            self._open.discard(connection)
            self._user.closed(connection, reason)
            return
        self._forget(connection)
        if reason:
            self.incidents.note(connection.peer.rsplit(":", 1)[0], reason)
