"""The event log of an agent, as JSON lines, written by a thread of its own.

EVENTLOG-1  A caller never waits for the disk: a blocked one would delay the agent's heartbeats until its lease ends.
    What waits to be written is bounded, by `MAX_QUEUED_BYTES`; what comes beyond it is dropped and counted.
EVENTLOG-2  `close` waits up to `FLUSH_S` for what is queued, and for a last try to make a file that could not be made
    (EVENTLOG-3), and says how much was not written. A process that is killed loses what is queued, and no more.
EVENTLOG-3  The file at its path has all events. One that was renamed, deleted or replaced while the agent runs, as by
    logrotate, is made again from the file that the agent holds open: before the next event, and within `LOOK_S`. If it
    cannot be, because its directory was deleted or the disk is full, that is said once and tried again every `RETRY_S`.
EVENTLOG-4  A file that was truncated begins with the event `truncated`, because readers cannot know what it had.
EVENTLOG-5  What the disk refuses, because it is full for example, waits as in EVENTLOG-1, and is tried again every
    `RETRY_S`: a line that was cut off is continued. Else nobody saw the rest of a job of which the disk was once full.
EVENTLOG-6  A file beside the events that cannot be written is lost. The first one is told of, with the reason; of those
    that follow, only their number, once one can be written again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO, TypeAlias

from elasticgang.errors import OperationalError
from elasticgang.observe import log_lock
from elasticgang.observe.event_names import EventName

MAX_FILES = 64
MAX_BYTES = 64 << 20
MAX_QUEUED_BYTES = 16 << 20
FLUSH_S = 1.0
LOOK_S = 1.0
RETRY_S = 1.0
_BLOCK_BYTES = 1 << 20

_Item: TypeAlias = "tuple[str | None, bytes]"  # the name of a file beside the events, or None, and what is written


class EventLog:
    """Appends events to `events.jsonl` in `directory`. Drops events if that is None. Any thread may use it."""

    def __init__(self, directory: str | None, say: Callable[[str], None], *, is_bounded: bool = False) -> None:
        """`say`: prints the message that events are dropped, on any thread. `is_bounded`: drop events beyond
        `MAX_BYTES`, and keep the newest `MAX_FILES` files beside them: nobody has given this directory the space.

        Raises:
            OperationalError: the file cannot be created, or another process writes to `directory` (LOGLOCK-1).
        """
        self._say = say
        self._changed = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._num_queued_bytes = 0  # with what is being written
        self._num_dropped = 0
        self._is_closing = False
        self._writer: _Writer | None = None
        self._thread: threading.Thread | None = None
        self._lock: int | None = None  # a descriptor, which stays open until this process ends (LOGLOCK-1)
        if directory is None:
            return
        try:
            os.makedirs(directory, exist_ok=True)
            self._lock = log_lock.hold(directory)
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
            self._put(None, _line_of(event, **fields))

    def close(self) -> None:
        """EVENTLOG-2. Later events are dropped."""
        writer, self._writer = self._writer, None
        if writer is None or self._thread is None:
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(FLUSH_S)
        with self._changed:
            is_writing = self._num_queued_bytes > sum(len(data) for _, data in self._queue)
            num = len(self._queue) + self._num_dropped + is_writing
        if num:
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
                self._changed.wait_for(lambda: self._queue or self._is_closing, LOOK_S)
                if self._is_closing and not self._queue:
                    break
                item = self._queue.popleft() if self._queue else None
            if item is None:
                writer.flush()
                continue
            name, data = item
            if name is not None:
                writer.write_file(name, data)
            else:
                writer.append(data)
                while not writer.flush():  # EVENTLOG-5
                    if self._is_closing:
                        writer.close()
                        return
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closing, RETRY_S)
            with self._changed:
                self._num_queued_bytes -= len(data)
                num_dropped = 0 if self._queue else self._num_dropped
                self._num_dropped -= num_dropped
            if num_dropped:
                self._say(f"elasticgang: the disk of {writer.path} takes events again; {num_dropped} were dropped")
        writer.flush(is_last=True)
        writer.close()


def _line_of(event: EventName, **fields: Any) -> bytes:
    return json.dumps({"t": time.monotonic(), "wall": time.time(), "event": event, **fields}).encode() + b"\n"


class _Writer:
    """Writes to the disk. One thread uses it."""

    def __init__(self, directory: str, file: BinaryIO, say: Callable[[str], None], is_bounded: bool) -> None:
        self.path = file.name
        self._directory, self._say, self._is_bounded = directory, say, is_bounded
        self._file: BinaryIO | None = file
        self._num_bytes = os.fstat(file.fileno()).st_size  # what it has at least, after the last write
        self._can_look = file.seekable() and self._is_at_path(file)  # else it is a pipe
        self._paths: deque[str] = deque()  # the files beside the events, the oldest first
        self._line = self._unwritten = b""  # what was appended last; it, or the rest of it, and what goes before it
        self._is_refused = False  # the last write has failed
        self._makes_at_s: float | None = None  # when the file that could not be made again is tried again
        self._num_lost = 0  # files since the last one that was written (EVENTLOG-6)

    def append(self, line: bytes) -> None:
        """For the next `flush`."""
        self._line = line
        self._unwritten += line

    def flush(self, *, is_last: bool = False) -> bool:
        """Write what was appended. False: the disk refuses the rest, which the next call tries again (EVENTLOG-5).
        `is_last`: try again at once to make a file that could not be made (EVENTLOG-2)."""
        if is_last:
            self._makes_at_s = None if self._makes_at_s is None else 0.0
        self._look()
        return self._write()

    def _look(self) -> None:
        """Make sure that the file is still at its path, and notice that it was truncated."""
        file = self._file
        if file is None or not self._can_look:
            return
        if not self._is_at_path(file):
            if self._makes_at_s is not None and time.monotonic() < self._makes_at_s:
                return
            file = self._make_again(file)
        with contextlib.suppress(OSError):  # it may pass
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes < self._num_bytes:
                self._mark_truncated(num_bytes)

    def _mark_truncated(self, num_bytes: int) -> None:
        """EVENTLOG-4"""
        self._num_bytes = num_bytes
        text = "was truncated: `elasticgang status`, the page and the metrics do not show this job any more"
        self._say(f"elasticgang: warning: {self.path} {text}")
        line = self._line if self._unwritten else b""  # whole, whatever of it was written
        self._unwritten = b"\n" * bool(num_bytes) + _line_of("truncated") + line  # the rest of a line may be there

    def _is_at_path(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False
        except OSError:  # it may pass
            return True

    def _make_again(self, file: BinaryIO) -> BinaryIO:
        """EVENTLOG-3. Returns the file to write to."""
        draft, began_s = f"{self.path}.draft", time.monotonic()
        try:
            with open(f"/proc/self/fd/{file.fileno()}", "rb") as source, open(draft, "wb") as target:
                shutil.copyfileobj(source, target, _BLOCK_BYTES)
            copy = open(draft, "ab", buffering=0)  # noqa: SIM115
            os.replace(draft, self.path)
        except OSError as exc:  # the file that was renamed or deleted has the events all the same
            if self._makes_at_s is None:
                text = f"was renamed, deleted or replaced, and cannot be made again yet: {exc.strerror}"
                self._say(f"elasticgang: warning: {self.path} {text}")
            took_s = time.monotonic() - began_s  # long, where the disk has filled with the copy
            self._makes_at_s = time.monotonic() + RETRY_S + 20 * took_s
            with contextlib.suppress(OSError):
                os.unlink(draft)
            return file
        file.close()
        self._file, self._makes_at_s = copy, None
        self._can_look = self._is_at_path(copy)  # not where the numbers of files change by themselves
        text = "was renamed, deleted or replaced, and is made again, with all events"
        self._say(f"elasticgang: warning: {self.path} {text}")
        return copy

    def _write(self) -> bool:
        if self._file is None or not self._unwritten:
            return True
        if self._is_bounded and self._num_bytes + len(self._unwritten) > MAX_BYTES:
            text = f"it has {MAX_BYTES >> 20} MiB; with --log-dir there is no limit"
            self._say(f"elasticgang: stopped writing events to {self.path}: {text}")
            self.close()
            return True
        try:
            while self._unwritten:
                num = self._file.write(self._unwritten)
                self._num_bytes, self._unwritten = self._num_bytes + num, self._unwritten[num:]
        except OSError as exc:  # the job goes on without its log
            if not self._is_refused:
                text = f"events wait, because they cannot be written to {self.path}: {exc.strerror}"
                self._say(f"elasticgang: warning: {text}")
            self._is_refused = True
            return False
        if self._is_refused:
            self._is_refused = False
            self._say(f"elasticgang: events are written to {self.path} again")
        return True

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
            self._lose_file(path, exc)
            return
        if self._num_lost:
            self._say(f"elasticgang: {path} is written; files before it that were not: {self._num_lost}")
            self._num_lost = 0

    def _lose_file(self, path: str, exc: OSError) -> None:
        """EVENTLOG-6."""
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.draft")
        if not self._num_lost:
            lost = "files like it are lost until one can be"
            self._say(f"elasticgang: warning: {path} cannot be written: {exc.strerror}; {lost}")
        self._num_lost += 1

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
