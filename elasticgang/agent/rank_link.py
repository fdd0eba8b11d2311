"""The agent's end of the socket to one rank: handles each message in the event loop's turn that reads it.

RANKLINK-1  A failure to send loses no message that the rank has sent. asyncio reads no more after it, so the rest is
    read when the connection is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import termios
from collections.abc import Callable
from typing import Any, cast

from elasticgang.errors import WireError
from elasticgang.process import framing

_CHUNK = 1 << 18  # bytes


class RankLink(asyncio.Protocol):
    """Reads nothing before `follow`."""

    def __init__(self) -> None:
        self._sock: socket.socket
        self._buffer = bytearray()
        self._is_cut = False
        self._is_closed = asyncio.get_running_loop().create_future()
        self._on_message: Callable[[dict[str, Any]], None]
        self._on_invalid: Callable[[Exception], None]
        self._transport: asyncio.Transport
        self._when_read: Callable[[], None] | None = None

    @staticmethod
    async def open(sock: socket.socket) -> RankLink:
        """Owns `sock` from now on."""
        _, link = await asyncio.get_running_loop().create_unix_connection(RankLink, sock=sock)
        link._sock = sock
        return link

    def follow(self, on_message: Callable[[dict[str, Any]], None], on_invalid: Callable[[Exception], None]) -> None:
        """`on_message` raises WireError, KeyError, TypeError or ValueError for an invalid message. `on_invalid` is then
        called, and the link closed."""
        self._on_message, self._on_invalid = on_message, on_invalid
        self._transport.resume_reading()

    def send(self, message: bytes) -> None:
        self._transport.write(message)

    def close(self) -> None:
        """Handle no more messages."""
        self._is_cut = True
        self._transport.close()

    async def wait_closed(self, timeout: float) -> None:
        """Until all messages of the rank, which has exited, are handled; `timeout` seconds at most."""
        await asyncio.wait([self._is_closed], timeout=timeout)

    def when_read(self, callback: Callable[[], None]) -> None:
        """Call `callback` once every message is handled that the rank has sent until now."""
        self._when_read = callback
        self._check_read()

    def _check_read(self) -> None:
        if self._when_read is None or self._num_unread():
            return
        callback, self._when_read = self._when_read, None
        callback()

    def _num_unread(self) -> int:
        """Bytes in the socket that are still to be handled."""
        if self._is_cut or self._is_closed.done():
            return 0
        return int.from_bytes(fcntl.ioctl(self._sock.fileno(), termios.FIONREAD, bytes(4)), "little")

    def _read_rest(self) -> None:
        """RANKLINK-1."""
        with contextlib.suppress(OSError):  # there is no more, or the rank has left data unread
            while not self._is_cut and (data := self._sock.recv(_CHUNK)):
                self.data_received(data)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := framing.take(self._buffer)) is not None:
                self._on_message(message)
        except (WireError, KeyError, TypeError, ValueError) as exc:
            self._buffer.clear()
            self._is_cut = True
            self._transport.abort()
            self._on_invalid(exc)
        self._check_read()

    def connection_lost(self, exc: Exception | None) -> None:
        self._read_rest()
        if not self._is_closed.done():
            self._is_closed.set_result(None)
