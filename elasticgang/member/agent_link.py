"""A rank's connection to its agent.

LINK-1  One thread reads. It puts records into a queue, and calls one of two callbacks for other messages, which only
    set flags and send signals, and never wait.
LINK-2  When the agent has died, the thread kills the rank's whole process group: without its agent a rank cannot take
    part.
"""

from __future__ import annotations

import array
import contextlib
import os
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

from elasticgang.errors import OperationalError, WireError
from elasticgang.process import framing
from elasticgang.protocol.member_instructions import AbortNotice
from elasticgang.protocol.record import Record

_MAX_DIGEST = 256
_INT_BYTES = array.array("i").itemsize


class AgentDoor:
    """Makes further connections to the agent, for rendezvous keys, and receives the blocks of sums from it. `connect`
    is thread-safe; one thread calls `take_block`."""

    def __init__(self, fd: int) -> None:
        self._sock = socket.socket(fileno=fd)

    def connect(self) -> socket.socket:
        """Raises OperationalError: the agent is gone, or no descriptor is left."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs, contextlib.ExitStack() as failed:
                failed.enter_context(ours)
                socket.send_fds(self._sock, [b"c"], [theirs.fileno()])
                failed.pop_all()
        except OSError as exc:
            raise OperationalError(f"no connection to the agent can be made: {exc}") from exc
        return ours

    def take_block(self, digest: str) -> int | None:
        """As the function `take_block`."""
        return take_block(self._sock, digest)


def take_block(door: socket.socket, digest: str) -> int | None:
    """The descriptor of the block of sums of the record with that digest, which the agent sends before the record; None
    if it has none to send. The caller closes it. Blocks of other records are dropped (BLOCK-5)."""
    while True:
        try:
            # Not `socket.recv_fds`, which ignores its flags.
            data, ancillary, _, _ = door.recvmsg(_MAX_DIGEST, socket.CMSG_SPACE(_INT_BYTES), socket.MSG_DONTWAIT)
        except OSError:
            return None
        descriptors = array.array("i")
        for level, kind, received in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(received[: len(received) // _INT_BYTES * _INT_BYTES])
        if descriptors and data.decode() == digest:
            return descriptors[0]
        for descriptor in descriptors:
            os.close(descriptor)
        if not data:  # the agent is gone
            return None


class AgentLink:
    """Messages to and from the agent. `send` is thread-safe."""

    def __init__(self, fd: int, *, on_abort: Callable[[AbortNotice], None], on_join: Callable[[int], None]) -> None:
        self._sock = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._on_abort, self._on_join = on_abort, on_join
        self.records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()  # None only wakes the waiting thread
        self.is_job_over = False  # the job has finished without this rank
        self._thread = threading.Thread(target=self._read, name="agent-link", daemon=True)
        self._thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message. Errors are ignored: the reading thread notices that the agent has died."""
        data = framing.pack(kind, **fields)
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                return

    def _read(self) -> None:
        """LINK-1."""
        try:
            while (message := framing.receive(self._sock)) is not None:
                match message["kind"]:
                    case "record":
                        self.records.put(Record.from_text(message["text"]))
                    case "over":
                        self.is_job_over = True
                        self.records.put(None)
                    case "abort":
                        how = message["timed_out"], message["is_elsewhere"]
                        self._on_abort(AbortNotice(message["generation"], message["reason"], *how))
                    case "join":
                        self._on_join(message["generation"])
        except (OSError, WireError):
            pass
        except Exception:
            traceback.print_exc()  # the only trace: the process is killed next
        finally:
            os.killpg(0, signal.SIGKILL)  # LINK-2
