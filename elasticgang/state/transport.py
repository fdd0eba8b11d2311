"""The wire format of healing: messages are JSON in frames; tensors are chunks with a digest."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elasticgang.errors import WireError
from elasticgang.session.frames import FrameReader, FrameWriter
from elasticgang.session.handshake import SessionKeys
from elasticgang.state import staging
from elasticgang.state.serialization import as_bytes

HEAL_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
PATH_TIMEOUT_S = 5.0
FORWARD_TIMEOUT_S = 600.0  # only a guard: the hang detector or a collective's timeout ends a forward that hangs
DIGEST_BYTES = 16
MAX_MANIFEST_BYTES = 64 << 20
_CANCEL_POLL_MS = 5
_MAX_DIMS = 64
_MAX_SIZE = (1 << 63) - 1
_LENGTH = struct.Struct("!I")


def digest(data: memoryview | bytearray) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


class Channel:
    """One end of an authenticated connection between a healer and a source (see `authentication.py`).

    CHANNEL-1  A message is a frame of the session room: bounded, in order, and under a MAC.
    CHANNEL-2  A chunk that `send_chunk` sends has a digest under the key of its direction, with its place in the
        stream. A chunk without one counts only if its digest stands in a message.
    CHANNEL-3  Shapes that a peer sends are checked before memory of their size is allocated.
    """

    def __init__(self, sock: socket.socket, keys: SessionKeys, *, is_server: bool) -> None:
        self.sock = sock
        read_key, write_key = keys.to_server, keys.to_client
        if not is_server:
            read_key, write_key = write_key, read_key
        self._reader, self._writer = FrameReader(read_key), FrameWriter(write_key, MAX_MANIFEST_BYTES)
        self._read_chunks, self._written_chunks = _ChunkDigests(read_key), _ChunkDigests(write_key)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()

    def send(self, message: Any) -> None:
        self.send_payload(json.dumps(message).encode())

    def send_payload(self, payload: bytes) -> None:
        self.sock.sendall(self._writer.frame(payload))

    def receive(self, limit: int) -> Any:
        """The next message. Raises WireError, ValueError or RecursionError: it is none, or over the limit."""
        return json.loads(self._reader.payload(receive_body(self.sock, limit + FrameReader.OVERHEAD_BYTES)))

    def send_chunk(self, chunk: memoryview) -> None:
        self.sock.sendall(self._written_chunks.next(chunk))
        self.sock.sendall(chunk)

    def receive_chunk(self, chunk: memoryview) -> None:
        """Raises WireError: the digest is wrong."""
        expected = bytearray(DIGEST_BYTES)
        receive_into(self.sock, memoryview(expected))
        receive_into(self.sock, chunk)
        if not hmac.compare_digest(self._read_chunks.next(chunk), bytes(expected)):
            raise WireError("the digest of a chunk is wrong")

    def shut(self) -> None:
        shut(self.sock)


class _ChunkDigests:
    """CHANNEL-2"""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def next(self, chunk: memoryview) -> bytes:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        return hashlib.blake2b(chunk, digest_size=DIGEST_BYTES, key=self._key, salt=number).digest()


def receive_body(sock: socket.socket, limit: int) -> bytes:
    header = bytearray(_LENGTH.size)
    receive_into(sock, memoryview(header))
    (size,) = _LENGTH.unpack(header)
    if size > limit:
        raise WireError(f"a frame of {size} bytes is over the limit of {limit}")
    body = bytearray(size)
    receive_into(sock, memoryview(body))
    return bytes(body)


def receive_into(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise WireError("the peer closed in the middle of a message")
        view = view[count:]


def at_once(sock: socket.socket) -> None:
    """Send the last segment of a message without waiting for the acknowledgement of the one before (40 ms on Linux)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def notice_lost_path(sock: socket.socket) -> None:
    """The connection fails `PATH_TIMEOUT_S` after the kernel of the peer has stopped to acknowledge. A process there
    that stands still does not matter, unless it lets the connection fill up for so long."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PATH_TIMEOUT_S * 1000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, 1)


def await_answer(sock: socket.socket, cancelled: Callable[[], bool], timeout_s: float = HEAL_TIMEOUT_S) -> None:
    """Wait until the source begins its step, but no longer than the generation lasts: the source may have left it and
    wait for this rank to leave too."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    while not poll.poll(_CANCEL_POLL_MS):
        if cancelled():
            raise WireError("the generation ended before the source answered")
        if time.monotonic() > deadline:
            raise WireError(f"the source did not answer within {timeout_s:g} s")


def has_data(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def shut(sock: socket.socket) -> None:
    """From any thread. With TLS too, whoever reads or writes fails then."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS's own would go on without TLS


def shapes_of(tensors: Sequence[Tensor]) -> list[Any]:
    return [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]


def allocate(shapes: list[Any]) -> list[Tensor]:
    """CHANNEL-3. Tensors of the `shapes` that a peer has sent (`shapes_of`). Raises WireError, as `check_shapes`."""
    return list(itertools.starmap(empty, check_shapes(shapes)))


def check_shapes(shapes: list[Any], num_chunks: int | None = None) -> list[tuple[list[int], torch.dtype]]:
    """CHANNEL-3. The `shapes` that a peer has sent (`shapes_of`). `num_chunks`: how many it says there are.

    Raises:
        WireError: they are not shapes and dtypes, take more bytes than the host has, or more or fewer chunks.
    """
    kinds: list[torch.dtype] = []
    sizes: list[int] = []
    for shape, dtype in shapes:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise WireError(f"there is no dtype {dtype!r}")
        if len(shape) > _MAX_DIMS or any(type(size) is not int or not 0 <= size <= _MAX_SIZE for size in shape):
            raise WireError(f"{shape!r:.200} is no shape")
        kinds.append(kind)
        sizes.append(math.prod(shape) * kind.itemsize)
    if sum(sizes) > (limit := _memory_bytes()):
        raise WireError(f"a state of {sum(sizes)} bytes does not fit into the {limit} bytes of this host's memory")
    needed = sum(-(-size // staging.CHUNK_BYTES) for size in sizes)
    if num_chunks is not None and num_chunks != needed:
        raise WireError(f"{num_chunks} digests do not match {needed} chunks")
    return [(shape, kind) for (shape, _), kind in zip(shapes, kinds, strict=True)]


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """On the CPU whatever the default device is: the bytes are received in it."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def chunks(tensor: Tensor) -> list[memoryview]:
    """The bytes of a tensor on the CPU, in order."""
    data = as_bytes(tensor)
    size = staging.CHUNK_BYTES
    return [data[start : start + size] for start in range(0, len(data), size)]
