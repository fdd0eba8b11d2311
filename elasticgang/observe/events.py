"""The event log of an agent, as JSON lines, written by a thread of its own.

EVENTLOG-1  A caller never waits for the disk: a blocked one would delay the agent's heartbeats until its lease ends.
    What waits to be written is bounded, by `MAX_QUEUED_BYTES`; what comes beyond it is dropped and counted.
EVENTLOG-2  `close` waits up to `FLUSH_S` for what is queued, and says how much was not written. A process that is
    killed loses what is queued, and no more.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO, TypeAlias

from elasticgang.errors import OperationalError
from elasticgang.observe.event_names import EventName

MAX_FILES = 64
MAX_BYTES = 64 << 20
MAX_QUEUED_BYTES = 16 << 20
FLUSH_S = 1.0

_Item: TypeAlias = "tuple[str | None, bytes]"  # the name of a file beside the events, or None, and what is written


class EventLog:
    """Appends events to `events.jsonl` in `directory`. Drops events if that is None, and after the first failed write.
    Any thread may use it."""

    def __init__(self, directory: str | None, say: Callable[[str], None], *, is_bounded: bool = False) -> None:
        """`say`: prints the message that events are dropped, on any thread. `is_bounded`: drop events beyond
        `MAX_BYTES`, and keep the newest `MAX_FILES` files beside them: nobody has given this directory the space.

        Raises:
            OperationalError: the file cannot be created.
        """
        self._say = say
        self._changed = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._num_queued_bytes = 0  # with what is being written
        self._num_dropped = 0
        self._is_closing = False
        self._writer: _Writer | None = None
        self._thread: threading.Thread | None = None
        if directory is None:
            return
        try:
            os.makedirs(directory, exist_ok=True)
            file = open(os.path.join(directory, "events.jsonl"), "ab", buffering=0)  # noqa: SIM115
        except OSError as exc:
            raise OperationalError(f"cannot write events to --log-dir {directory}: {exc.strerror}") from exc
        self._writer = _Writer(directory, file, say, is_bounded)
        self._thread = threading.Thread(target=self._write_all, args=(self._writer,), name="events", daemon=True)
        self._thread.start()

    def write_file(self, name: str, text: str) -> None:
        """Write a file beside the events, unless these are dropped. Does not wait for it (EVENTLOG-1)."""
        self._put(name, text.encode())

    def write(self, event: EventName, **fields: Any) -> None:
        """Append one event. Its `t` is CLOCK_MONOTONIC in seconds, which all processes of a host share. Does not wait
        for it (EVENTLOG-1)."""
        if self._writer is not None:
            line = json.dumps({"t": time.monotonic(), "wall": time.time(), "event": event, **fields}).encode() + b"\n"
            self._put(None, line)

    def close(self) -> None:
        """EVENTLOG-2. Later events are dropped."""
        writer, self._writer = self._writer, None
        if writer is None or self._thread is None:
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(FLUSH_S)
        if self._thread.is_alive():
            with self._changed:
                num = len(self._queue) + self._num_dropped + 1  # with the one that is being written
            self._say(f"elasticgang: {num} events were not written to {writer.path} within {FLUSH_S:g} s")

    def _put(self, name: str | None, data: bytes) -> None:
        """EVENTLOG-1."""
        if (writer := self._writer) is None:
            return
        with self._changed:
            is_full = bool(self._num_queued_bytes) and self._num_queued_bytes + len(data) > MAX_QUEUED_BYTES
            if not is_full:
                self._queue.append((name, data))
                self._num_queued_bytes += len(data)
                self._changed.notify()
                return
            self._num_dropped += 1
            is_first = self._num_dropped == 1
        if is_first:
            self._say(f"elasticgang: events are dropped: the disk of {writer.path} takes none")

    def _write_all(self, writer: _Writer) -> None:
        """The thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue:
                    writer.close()
                    return
                name, data = self._queue.popleft()
            if name is None:
                writer.append(data)
            else:
                writer.write_file(name, data)
            with self._changed:
                self._num_queued_bytes -= len(data)
                num_dropped = 0 if self._queue else self._num_dropped
                self._num_dropped -= num_dropped
            if num_dropped:
                self._say(f"elasticgang: the disk of {writer.path} takes events again; {num_dropped} were dropped")


class _Writer:
    """Writes to the disk. One thread uses it."""

    def __init__(self, directory: str, file: BinaryIO, say: Callable[[str], None], is_bounded: bool) -> None:
        self.path = file.name
        self._directory, self._say, self._is_bounded = directory, say, is_bounded
        self._file: BinaryIO | None = file
        self._paths: deque[str] = deque()  # the files beside the events, the oldest first

    def append(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            if self._is_bounded and self._file.tell() + len(line) > MAX_BYTES:
                raise OSError(errno.EFBIG, f"it has {MAX_BYTES >> 20} MiB; with --log-dir there is no limit")
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as exc:  # the job goes on without its log
            self._say(f"elasticgang: stopped writing events to {self.path}: {exc.strerror}")
            self.close()

    def write_file(self, name: str, data: bytes) -> None:
        if self._file is None:
            return
        path = os.path.join(self._directory, name)
        try:
            with open(f"{path}.draft", "wb") as file:
                file.write(data)
            os.replace(f"{path}.draft", path)  # a reader finds the whole file, or none
            if self._is_bounded:
                self._paths.append(path)
                if len(self._paths) > MAX_FILES:
                    os.unlink(self._paths.popleft())
        except OSError as exc:  # the job goes on without it
            self._say(f"elasticgang: cannot write {path}: {exc.strerror}")

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
