"""Reads the large state of a holder on the same host from its memory: one copy, and no socket.

PEERMEM-1  A healer reads only from the process at the other end of its connection. That process shows, at an address of
    its memory, the nonce that the healer sent. The healer opens its pidfd before it looks. Bytes count only if the
    process is alive after the read, so that no later process of the same id is read.
PEERMEM-2  A healer reads only inside the tensors that the holder announced. Their sizes are those of the manifest,
    which the healer has compared with its own tensors. The holder announces nothing else, and writes nowhere.
PEERMEM-3  Under Yama's ptrace_scope 1 the holder names the healer as its tracer (PR_SET_PTRACER): one healer at a
    time, an authenticated one, until it has closed its connection. Under other scopes the holder changes nothing.
PEERMEM-4  What cannot be read from memory comes over the connection: state on a device, tensors that are not
    contiguous, all of it if the kernel refuses. A log line says so once for each reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hmac
import logging
import os
import secrets
import select
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from torch import Tensor, strided

from elasticgang.errors import WireError
from elasticgang.state import staging

log = logging.getLogger("elasticgang")

MIN_BYTES = 16 << 20  # a smaller state comes over the connection
NONCE_BYTES = 32
YAMA_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_ANY_DECLARED: Final = 1  # of the scopes: a process may name its tracer
_PR_SET_PTRACER = 0x59616D61
_MAX_PID = 1 << 22
_MAX_ADDRESS = 1 << 57

_libc = ctypes.CDLL(None, use_errno=True)


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    *(ctypes.c_int, ctypes.POINTER(_Span), ctypes.c_ulong, ctypes.POINTER(_Span), ctypes.c_ulong, ctypes.c_ulong),
)


def host_id() -> str:
    """Names this boot of this host, and the namespace that process ids are of. Empty: there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class UnreadableError(WireError):
    """The memory of the peer cannot be read. Its connection may work."""


# -- the holder


class Lender:
    """Lets healers on this host read the memory of this process."""

    def __init__(self, *, are_authenticated: bool) -> None:
        self._are_authenticated = are_authenticated
        self._named = threading.Lock()  # PEERMEM-3: held while a healer is this process's tracer

    @contextlib.contextmanager
    def lend(self, offer: Any, tensors: Sequence[Tensor]) -> Iterator[dict[str, Any] | None]:
        """What to announce to the healer that has sent this `offer`; None: it cannot read. Raises WireError, TypeError
        or KeyError: the offer is invalid."""
        if offer is None or offer["host"] != (here := host_id()) or not here:
            yield None
            return
        pid = _checked(offer["pid"], _MAX_PID)
        nonce = ctypes.create_string_buffer(bytes.fromhex(offer["nonce"]), NONCE_BYTES)
        with self._readable_by(pid) as is_readable:
            yield (
                None
                if not is_readable
                else {
                    "pid": os.getpid(),
                    "nonce": ctypes.addressof(nonce),
                    "tensors": [tensor.data_ptr() if is_lendable(tensor) else None for tensor in tensors],
                }
            )

    @contextlib.contextmanager
    def _readable_by(self, pid: int) -> Iterator[bool]:
        """PEERMEM-3."""
        if _scope() != _ANY_DECLARED or pid == os.getpid():
            yield True
            return
        if not self._are_authenticated or not self._named.acquire(blocking=False):
            yield False
            return
        try:
            yield name_tracer(pid)
        finally:
            name_tracer(0)
            self._named.release()


def name_tracer(pid: int) -> bool:
    """Let the process `pid` read this one's memory under Yama's ptrace_scope 1; 0: no process."""
    return bool(_libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0)


def is_lendable(tensor: Tensor) -> bool:
    """Whether the bytes of `tensor` lie in this process's memory in order."""
    is_plain = tensor.layout is strided and not tensor.is_conj() and not tensor.is_neg()
    return staging.is_on_host(tensor) and is_plain and tensor.is_contiguous() and tensor.nbytes > 0


def _scope() -> int:
    try:
        return int(YAMA_SCOPE.read_text())
    except (OSError, ValueError):
        return 0


# -- the healer


class Offer:
    """What a healer sends to a source whose memory it would read."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)

    def to_json(self) -> dict[str, Any]:
        return {"host": host_id(), "pid": os.getpid(), "nonce": self.nonce.hex()}


class PeerMemory:
    """The memory of one peer. Several threads may read. Close it after the last read."""

    def __init__(self, announced: Any, offer: Offer, sizes: Sequence[int]) -> None:
        """`sizes`: of the tensors, in bytes.

        Raises:
            WireError: the announcement is invalid.
            UnreadableError: this process may not read there, or the peer is another process (PEERMEM-1).
        """
        self._pid = _checked(announced["pid"], _MAX_PID)
        self.is_stopped = False
        nonce_at = _checked(announced["nonce"], _MAX_ADDRESS)
        if len(announced["tensors"]) != len(sizes):
            raise WireError(f"{len(announced['tensors'])} addresses do not match {len(sizes)} tensors")
        self._tensors = [  # PEERMEM-2
            None if at is None else (_checked(at, _MAX_ADDRESS - size), size)
            for at, size in zip(announced["tensors"], sizes, strict=True)
        ]
        try:
            self._pidfd = os.pidfd_open(self._pid)
        except OSError as exc:
            raise UnreadableError(f"there is no process {self._pid}: {exc.strerror}") from exc
        try:
            found = bytearray(NONCE_BYTES)
            self._copy(memoryview(found), nonce_at)
            if not hmac.compare_digest(found, offer.nonce):
                raise UnreadableError(f"process {self._pid} is not the peer")
        except BaseException:
            os.close(self._pidfd)
            raise

    def __enter__(self) -> PeerMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._pidfd)

    def stop(self) -> None:
        """Have the threads that read beside each other end."""
        self.is_stopped = True

    def has(self, tensor: int) -> bool:
        return self._tensors[tensor] is not None

    def read(self, data: memoryview, tensor: int, start: int) -> None:
        """Fill `data` with the bytes of the `tensor` from `start` on. Raises UnreadableError."""
        place = self._tensors[tensor]
        if place is None or not 0 <= start <= start + len(data) <= place[1]:  # PEERMEM-2
            raise UnreadableError(f"bytes {start} to {start + len(data)} of tensor {tensor} were not announced")
        self._copy(data, place[0] + start)

    def _copy(self, data: memoryview, address: int) -> None:
        buffer = (ctypes.c_char * len(data)).from_buffer(data)
        done = 0
        while done < len(data):
            here = _Span(ctypes.addressof(buffer) + done, len(data) - done)
            there = _Span(address + done, len(data) - done)
            count = _libc.process_vm_readv(self._pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if count <= 0:
                code = ctypes.get_errno() if count < 0 else errno.EFAULT
                raise UnreadableError(f"process {self._pid}: {os.strerror(code)}")
            done += count
        if not self.is_alive():  # PEERMEM-1
            raise UnreadableError(f"process {self._pid} has exited")

    def is_alive(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)


def _checked(number: Any, limit: int) -> int:
    """Raises WireError: it is no positive integer below `limit`."""
    if type(number) is not int or not 0 < number < limit:
        raise WireError(f"{number!r:.50} is no process id or address")
    return number
