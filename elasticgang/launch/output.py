"""The ranks' output, line by line with its rank and step in front.

A thread of its own reads the pipes, so that a terminal that is held up holds up no recovery.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
from typing import BinaryIO

_MAX_LINE = 1 << 16


class PrefixedOutput:
    """Reads every pipe that `open` made and writes its lines to this process's stdout or stderr."""

    def __init__(self, stdout: BinaryIO | None = None, stderr: BinaryIO | None = None) -> None:
        self._targets = (stdout or sys.stdout.buffer, stderr or sys.stderr.buffer)
        self._steps: dict[int, int] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._pump, name="output", daemon=True)
        self._thread.start()

    def open(self, local_rank: int) -> tuple[int, int]:
        writers = []
        for target in self._targets:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self._selector.register(reader, selectors.EVENT_READ, (local_rank, target, bytearray()))
            writers.append(writer)
        os.write(self._wake_writer, b"x")
        return writers[0], writers[1]

    def step(self, local_rank: int, step: int) -> None:
        self._steps[local_rank] = step

    def say(self, line: str) -> None:
        self._write(self._targets[1], line.encode() + b"\n")

    def close(self) -> None:
        """Write what is left in the pipes, and end."""
        self._closing = True
        os.write(self._wake_writer, b"x")
        self._thread.join(2.0)

    def _pump(self) -> None:
        while True:
            ready = self._selector.select()
            for key, _ in ready:
                if key.fd == self._wake_reader:
                    os.read(key.fd, 4096)
                else:
                    self._drain(key)
            if self._closing:
                for key in list(self._selector.get_map().values()):
                    if key.fd != self._wake_reader:
                        self._drain(key, last=True)
                return

    def _drain(self, key: selectors.SelectorKey, *, last: bool = False) -> None:
        local_rank, target, partial = key.data
        data: bytes | None
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            data = None
        partial += data or b""
        ended = last or data == b""
        *lines, rest = bytes(partial).split(b"\n")
        if rest and (ended or len(rest) > _MAX_LINE):
            lines, rest = [*lines, rest], b""
        partial[:] = rest
        if lines:
            prefix = f"[rank {local_rank} step {self._steps.get(local_rank, 0)}] ".encode()
            self._write(target, b"".join(prefix + line + b"\n" for line in lines))
        if ended:
            self._selector.unregister(key.fd)
            os.close(key.fd)

    def _write(self, target: BinaryIO, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # the reader of our output may be gone
            target.write(data)
            target.flush()
