"""The wire format of healing: messages are a length and JSON; tensors are chunks with a digest."""

from __future__ import annotations

import contextlib
import hashlib
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elasticgang.errors import WireError
from elasticgang.state.serialization import as_bytes

HEAL_TIMEOUT_S = 30.0
FORWARD_TIMEOUT_S = 600.0  # only a guard: the hang detector or a collective's timeout ends a forward that hangs
CHUNK_BYTES = 4 << 20
DIGEST_BYTES = 16
MAX_MANIFEST_BYTES = 64 << 20
_CANCEL_POLL_MS = 5
_LENGTH = struct.Struct("!Q")


def digest(data: memoryview | bytearray) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket, limit: int) -> bytearray:
    header = bytearray(_LENGTH.size)
    receive_into(sock, memoryview(header))
    (size,) = _LENGTH.unpack(header)
    if size > limit:
        raise WireError(f"a message of {size} bytes is over the limit of {limit}")
    data = bytearray(size)
    receive_into(sock, memoryview(data))
    return data


def receive_into(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise WireError("the peer closed in the middle of a message")
        view = view[count:]


def connect(source: str) -> socket.socket:
    host, _, port = source.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=HEAL_TIMEOUT_S)
    at_once(sock)
    return sock


def at_once(sock: socket.socket) -> None:
    """Send the last segment of a message without waiting for the acknowledgement of the one before (40 ms on Linux)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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


def shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def shapes_of(tensors: Sequence[Tensor]) -> list[Any]:
    return [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]


def empty(shape: list[int], dtype: str) -> Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise WireError(f"there is no dtype {dtype!r}")
    return torch.empty(shape, dtype=kind)


def chunks(tensor: Tensor) -> list[memoryview]:
    """The bytes of a tensor on the CPU, in order."""
    data = as_bytes(tensor)
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
