"""Where healers connect: each connection is authenticated in a thread of its own before it is served.

STATELISTEN-1  At most `MAX_PENDING` connections wait to be authenticated: one more ends the oldest of them.
STATELISTEN-2  Without a secret or TLS it listens on loopback only, unless `insecure` says otherwise.
STATELISTEN-3  A connection by one of several interfaces ends `PATH_TIMEOUT_S` after the peer's host has stopped to
    answer there, so that no apply waits for it longer. That peer may have got everything by another interface.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from elasticgang.errors import WireError
from elasticgang.session.addresses import family_of
from elasticgang.session.incidents import Incidents
from elasticgang.state import transport
from elasticgang.state.authentication import Authenticator
from elasticgang.state.transport import Channel

log = logging.getLogger("elasticgang")

MAX_PENDING = 64
_ACCEPT_RETRY_S = 0.1


class StateListener:
    """Calls `serve` with each authenticated connection, on its thread, and closes it then."""

    def __init__(
        self,
        host: str,
        authenticator: Authenticator,
        serve: Callable[[Channel], None],
        *,
        is_one_of_several: bool = False,
    ) -> None:
        """`is_one_of_several`: healers use other addresses of this rank too (STATELISTEN-3).

        Raises:
            OperationalError: STATELISTEN-2.
            OSError: it cannot listen at `host`.
        """
        authenticator.credentials.check_address(
            host, f"a rank serves its state to peers on loopback only, not at {host!r}"
        )
        self._authenticator, self._serve_channel = authenticator, serve
        self._is_one_of_several = is_one_of_several
        self._listener = socket.create_server((host, 0), family=family_of(host))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, None] = {}
        self.incidents = Incidents(log.warning)
        threading.Thread(target=self._accept, name="state-server", daemon=True).start()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def close(self) -> None:
        self._closed.set()
        transport.shut(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, peer = self._listener.accept()
                self._start(sock, peer[0])
            except (OSError, RuntimeError) as exc:  # no descriptor or thread is left, or the listener is closed
                log.debug("could not serve a healer: %r", exc)
                self._closed.wait(_ACCEPT_RETRY_S)

    def _start(self, raw: socket.socket, host: str) -> None:
        with contextlib.ExitStack() as failed:
            failed.enter_context(raw)
            if self._is_one_of_several:  # STATELISTEN-3
                transport.notice_lost_path(raw)
            try:
                sock = failed.enter_context(self._authenticator.wrap(raw))
            except OSError:  # the healer has gone
                return
            self._admit(sock, host)
            failed.callback(self._forget, sock)
            threading.Thread(target=self._serve, args=(sock, host), name="state-reader", daemon=True).start()
            failed.pop_all()

    def _admit(self, sock: socket.socket, host: str) -> None:
        """STATELISTEN-1"""
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                oldest = next(iter(self._pending))
                del self._pending[oldest]
                transport.shut(oldest)  # its thread closes it
                self.incidents.note(host, f"more than {MAX_PENDING} connections wait to be authenticated")
            self._pending[sock] = None

    def _forget(self, sock: socket.socket) -> bool:
        """False: the connection was ended already, to make room."""
        with self._lock:
            return self._pending.pop(sock, self) is None

    def _serve(self, sock: socket.socket, host: str) -> None:
        with sock:
            try:
                channel = self._authenticator.accept(sock)
            except (OSError, WireError) as exc:
                if self._forget(sock) and not self._closed.is_set():
                    self.incidents.note(host, str(exc))
                return
            finally:  # STATELISTEN-1, whatever the error
                self._forget(sock)
            self._serve_channel(channel)
