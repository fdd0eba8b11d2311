"""The ranks' output: each line is prefixed with its rank and step.

One thread each for stdout and stderr reads the pipes and writes. A blocked terminal therefore blocks the ranks that
print to it, once their pipe is full, but neither the agent nor the other stream.

OUTPUT-1  A carriage return begins the line anew, as on a terminal: of a progress bar, the newest state becomes a line
    of its own, at most one each `_PROGRESS_S`, and the last one.
OUTPUT-2  No line is lost because the reader is slow, also where another process has made stdout or stderr non-blocking:
    a terminal is one file for all that use it. After lines were lost, to a full disk for example, one says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO, TextIO, cast

_MAX_LINE = 1 << 16
_MAX_OWN_LINES = 1 << 13
_CLOSE_TIMEOUT_S = 1.0
_NUM_LAST_LINES = 50  # of each rank, for the file of an incident
_MAX_LAST_LINE = 1 << 11
_PROGRESS_S = 1.0


class PrefixedOutput:
    """Reads the pipes made by `open` and writes their lines to this process's stdout or stderr."""

    def __init__(self, stdout: BinaryIO | None = None, stderr: BinaryIO | None = None) -> None:
        self._steps: dict[int, Callable[[], int]] = {}
        self._tails: dict[int, deque[bytes]] = {}
        self._stdout = _Stream("stdout", stdout or _binary(sys.stdout), self._steps)
        self._stderr = _Stream("stderr", stderr or _binary(sys.stderr), self._steps)

    def open(self, local_rank: int) -> tuple[int, int]:
        tail = self._tails[local_rank] = deque(maxlen=_NUM_LAST_LINES)
        stdout = self._stdout.open(local_rank, tail)
        try:
            return stdout, self._stderr.open(local_rank, tail)
        except OSError:
            os.close(stdout)
            raise

    def track_steps(self, local_rank: int, step: Callable[[], int]) -> None:
        """Call `step`, on the output's threads, for the step number in the prefix."""
        self._steps[local_rank] = step

    def tail(self, local_rank: int) -> Callable[[], list[str]]:
        """A function that returns the last lines of the process of this rank that was opened last."""
        tail = self._tails[local_rank]
        return lambda: [line.decode(errors="backslashreplace") for line in tail.copy()]

    def when_read(self, local_rank: int, callback: Callable[[], None]) -> None:
        """Call `callback`, on one of the output's threads, once what this rank has written until now is in its tail."""
        self._stderr.when_read(local_rank, lambda: self._stdout.when_read(local_rank, callback))

    def write_line(self, line: str) -> None:
        """Write a line of this process's own to stderr. Never blocks; the oldest of `_MAX_OWN_LINES` that wait are
        dropped."""
        self._stderr.write_line(line)

    def print_line(self, line: str) -> None:
        """As `write_line`, to stdout."""
        self._stdout.write_line(line)

    def close(self) -> None:
        """Write the rest of the pipes and stop. Output that cannot be written within `_CLOSE_TIMEOUT_S` is dropped."""
        for stream in (self._stdout, self._stderr):
            stream.close()


def _binary(stream: TextIO | None) -> BinaryIO:
    """Unbuffered. `stream`: None if this process was started with it closed."""
    if stream is None:
        return open(os.devnull, "wb")
    stream.flush()
    return cast("BinaryIO", getattr(stream.buffer, "raw", stream.buffer))  # with `python -u` there is no buffer


def log_to(output: PrefixedOutput, level: str) -> None:
    """Write the runtime's log records of at least `level` ("info", ...) as lines of the agent."""
    logger = logging.getLogger("elasticgang")
    logger.setLevel(level.upper())
    logger.handlers[:] = [_OutputHandler(output)]
    logger.propagate = False


class _OutputHandler(logging.Handler):
    def __init__(self, output: PrefixedOutput) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.write_line(f"elasticgang: {self.format(record)}")


@dataclass
class _Source:
    """The pipe of one process of a rank. `shown_s`: when the state of a progress bar was written last."""

    local_rank: int
    tail: deque[bytes]
    partial: bytearray = field(default_factory=bytearray)
    shown_s: float = -_PROGRESS_S

    def lines_of(self, data: bytes, now_s: float, *, is_last: bool) -> list[bytes]:
        """The lines that end with `data`."""
        self.partial += data
        *ended, rest = bytes(self.partial).split(b"\n")
        if rest and (is_last or len(rest) > _MAX_LINE):
            ended, rest = [*ended, rest], b""
        lines = [line for raw in ended if (line := _visible(raw)) or b"\r" not in raw]
        if b"\r" in rest:  # OUTPUT-1
            newest, rest = _visible(rest), b"\r"
            if newest and now_s < self.shown_s + _PROGRESS_S:
                rest += newest
            elif newest:
                self.shown_s = now_s
                lines.append(newest)
        self.partial[:] = rest
        return lines


def _visible(line: bytes) -> bytes:
    """OUTPUT-1."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class _Stream:
    def __init__(self, name: str, target: BinaryIO, steps: dict[int, Callable[[], int]]) -> None:
        self._target = target
        self._steps = steps
        self._own_lines: deque[str] = deque(maxlen=_MAX_OWN_LINES)
        self._readers: deque[tuple[int, Callable[[], None]]] = deque()  # of `when_read`
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._closing = self._is_closed = False
        self._failure: OSError | None = None  # of the newest write, which has lost lines
        self._lock = threading.Lock()  # nobody writes to a descriptor that is closed, and maybe another one's by now
        self._thread = threading.Thread(target=self._pump, name=name, daemon=True)
        self._thread.start()

    def open(self, local_rank: int, tail: deque[bytes]) -> int:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._selector.register(reader, selectors.EVENT_READ, _Source(local_rank, tail))
        self._wake()
        return writer

    def when_read(self, local_rank: int, callback: Callable[[], None]) -> None:
        self._readers.append((local_rank, callback))
        self._wake()

    def write_line(self, line: str) -> None:
        self._own_lines.append(line)
        self._wake()

    def close(self) -> None:
        self._closing = True
        self._wake()
        self._thread.join(_CLOSE_TIMEOUT_S)
        with self._lock:
            if self._is_closed or self._thread.is_alive():
                return
            self._is_closed = True
            self._selector.close()
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # full: the thread is going to wake anyway
            if not self._is_closed:
                os.write(self._wake_writer, b"x")

    def _pump(self) -> None:
        is_over = has_failed = False
        while not is_over:
            try:
                is_over = self._turn()
            except Exception:  # without this thread the ranks would block once their pipes are full
                is_over = self._closing
                if not has_failed:
                    has_failed = True
                    self.write_line(f"elasticgang: error while writing the ranks' output:\n{traceback.format_exc()}")

    def _turn(self) -> bool:
        """Wait for output and write it. True: the stream is closed."""
        for key, _ in self._selector.select():
            if key.fd == self._wake_reader:
                os.read(key.fd, 4096)
            else:
                self._drain(key)
        is_closing = self._closing
        if is_closing:
            for key in list(self._selector.get_map().values()):
                if key.fd != self._wake_reader:
                    self._drain(key, last=True)
        while self._readers:
            local_rank, callback = self._readers.popleft()
            for key in list(self._selector.get_map().values()):  # what came after the look for output
                if key.fd != self._wake_reader and key.data.local_rank == local_rank:
                    self._drain(key)
            callback()
        while self._own_lines:
            self._write(self._own_lines.popleft().encode(errors="backslashreplace") + b"\n")
        return is_closing

    def _drain(self, key: selectors.SelectorKey, *, last: bool = False) -> None:
        source: _Source = key.data
        data: bytes | None
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            data = None
        ended = last or data == b""
        if lines := source.lines_of(data or b"", time.monotonic(), is_last=ended):
            step = self._steps[source.local_rank]() if source.local_rank in self._steps else 0
            prefix = f"[rank {source.local_rank} step {step}] ".encode()
            source.tail.extend(line[:_MAX_LAST_LINE] for line in lines)
            self._write(b"".join(prefix + line + b"\n" for line in lines))
        if ended:
            self._selector.unregister(key.fd)
            os.close(key.fd)

    def _write(self, data: bytes) -> None:
        """OUTPUT-2"""
        if self._failure is not None:
            text = f"elasticgang: warning: lines before this one were lost: {self._failure.strerror}"
            data = f"\n{text}\n".encode() + data  # a part of the last line may be there
        rest = memoryview(data)
        try:
            while rest:
                num = self._target.write(rest) or 0  # of a non-blocking one also None
                rest = rest[num:]
                if not num:
                    self._wait_writable()
            self._failure = None
        except OSError as exc:  # the reader of stdout or stderr may have exited
            self._failure = exc
        except ValueError:  # it is closed
            pass

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._target, select.POLLOUT)
        poll.poll()
