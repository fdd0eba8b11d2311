"""Messages between an agent and its ranks, and between agents: a length, then JSON, over a stream socket.

Invalid bytes and incomplete messages raise `WireError`; the reader then closes the connection.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from elasticgang.errors import WireError

_HEADER = struct.Struct("!4sI")
_MAGIC = b"EG1\n"
MAX_BYTES = 16 << 20
HEADER_BYTES = _HEADER.size


def pack(kind: str, **fields: Any) -> bytes:
    body = json.dumps({"kind": kind, **fields}).encode()
    if len(body) > MAX_BYTES:
        raise WireError(f"a {kind} message of {len(body)} bytes is over the limit of {MAX_BYTES}")
    return _HEADER.pack(_MAGIC, len(body)) + body


def body_size(header: bytes, limit: int = MAX_BYTES) -> int:
    """The number of bytes that follow `header`. Raises WireError: the header is invalid, or the size exceeds
    `limit`."""
    magic, size = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise WireError(f"not an elasticgang message: it starts with {header[:4]!r}")
    if size > limit:
        raise WireError(f"a message of {size} bytes is over the limit of {limit}")
    return int(size)


def unpack(body: bytes) -> dict[str, Any]:
    """Raises WireError: `body` is not the JSON of a message."""
    try:
        message = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as exc:
        raise WireError(f"a message is not JSON: {exc}") from exc
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise WireError("a message has no kind")
    return message


def take(buffer: bytearray, limit: int = MAX_BYTES) -> dict[str, Any] | None:
    """Remove the first message from `buffer`; None if it is not whole yet. Raises WireError: it is invalid."""
    if len(buffer) < HEADER_BYTES:
        return None
    end = HEADER_BYTES + body_size(bytes(buffer[:HEADER_BYTES]), limit)
    if len(buffer) < end:
        return None
    body = bytes(buffer[HEADER_BYTES:end])
    del buffer[:end]
    return unpack(body)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a valid number")


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """Block until the next message; None if the peer has closed the connection between two messages."""
    header = _read(sock, HEADER_BYTES, at_start=True)
    return None if header is None else unpack(_read(sock, body_size(header)) or b"")


def _read(sock: socket.socket, size: int, *, at_start: bool = False) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            if at_start and not data:
                return None
            raise WireError(f"the peer closed after {len(data)} of {size} bytes")
        data += chunk
    return bytes(data)
