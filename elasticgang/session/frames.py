"""Frames of a session: a length, a sequence number, a payload and its HMAC-SHA256. Pure: bytes in, bytes out.

FRAME-BOUND  A frame over `limit` bytes is refused by its length, before its body is read.
FRAME-MAC    A payload is returned only after its MAC was checked, with the key of its direction. The MAC covers the
             SHA-256 of the payload, of which the length is fixed, and through it every byte.
FRAME-ORDER  The MAC covers the sequence number, which counts from 0. A replayed, missing or reordered frame is refused.
FRAME-SHARED A payload for many sessions is hashed once. Only the MAC, over 40 bytes, is computed for each session.

The caller closes the session after a `WireError`.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from elasticgang.errors import WireError

MAX_PAYLOAD_BYTES = 16 << 20
MAC_BYTES = 32

_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
_HEAD = struct.Struct("!IQ")  # the length of what follows it, and the sequence number, which is a part of that


class Payload:
    """A message, and its digest: made once for all sessions to which it goes (FRAME-SHARED)."""

    __slots__ = ("data", "digest")

    def __init__(self, data: bytes) -> None:
        self.data, self.digest = data, _digest(data)


class FrameBuffer:
    """Splits a byte stream into frame bodies of at most `limit` bytes. `limit` may be raised between two frames."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> bytes | None:
        """The next body; None until it is complete. Raises WireError: it is over the limit."""
        if len(self._data) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._data)
        if size > self.limit:
            raise WireError(f"a frame of {size} bytes is over the limit of {self.limit}")
        end = _LENGTH.size + size
        if len(self._data) < end:
            return None
        body = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return body

    @property
    def num_bytes(self) -> int:
        return len(self._data)


def body_frame(body: bytes) -> bytes:
    """A frame of the handshake: a length and `body`, without a sequence number or a MAC."""
    return _LENGTH.pack(len(body)) + body


class FrameWriter:
    """The sending end of one direction of a session."""

    def __init__(self, key: bytes, limit: int = MAX_PAYLOAD_BYTES) -> None:
        self._key, self._limit, self._number = key, limit, 0

    def frame(self, payload: bytes | Payload) -> bytes:
        """The next frame of the session. Raises WireError: `payload` is over the limit."""
        shared = payload if isinstance(payload, Payload) else Payload(payload)
        size = len(shared.data)
        if size > self._limit:
            raise WireError(f"a message of {size} bytes is over the limit of {self._limit}")
        head = _HEAD.pack(_NUMBER.size + size + MAC_BYTES, self._number)
        self._number += 1
        return b"".join((head, shared.data, _mac(self._key, head[_LENGTH.size :], shared.digest)))


class FrameReader:
    """The receiving end of one direction of a session."""

    OVERHEAD_BYTES = _NUMBER.size + MAC_BYTES

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def payload(self, body: bytes) -> bytes:
        """The payload of `body`. Raises WireError: its MAC or sequence number is wrong (FRAME-MAC, FRAME-ORDER)."""
        if len(body) < self.OVERHEAD_BYTES:
            raise WireError(f"a frame of {len(body)} bytes is too short for a MAC")
        number, payload, mac = body[: _NUMBER.size], body[_NUMBER.size : -MAC_BYTES], body[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._key, number, _digest(payload))):
            raise WireError("the MAC of a frame is wrong")
        (found,) = _NUMBER.unpack(number)
        if found != self._number:
            raise WireError(f"frame {found} came in place of frame {self._number}")
        self._number += 1
        return payload


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()


def _mac(key: bytes, number: bytes, digest: bytes) -> bytes:
    """FRAME-MAC"""
    return hmac.digest(key, number + digest, "sha256")
