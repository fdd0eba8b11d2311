"""The event log of an agent, as JSON lines."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO

from elasticgang.errors import OperationalError
from elasticgang.observe.event_names import EventName

MAX_FILES = 64
MAX_BYTES = 64 << 20


class EventLog:
    """Appends events to `events.jsonl` in `directory`. Drops events if that is None, and after the first failed write.
    Not thread-safe."""

    def __init__(self, directory: str | None, say: Callable[[str], None], *, is_bounded: bool = False) -> None:
        """`say`: prints the message that events are dropped. `is_bounded`: drop events beyond `MAX_BYTES`, and keep
        the newest `MAX_FILES` files beside them: nobody has given this directory the space.

        Raises:
            OperationalError: the file cannot be created.
        """
        self._say = say
        self._directory = directory
        self._is_bounded = is_bounded
        self._paths: deque[str] = deque()  # the files beside the events, the oldest first
        self._file: BinaryIO | None = None
        if directory is None:
            return
        try:
            os.makedirs(directory, exist_ok=True)
            self._file = open(os.path.join(directory, "events.jsonl"), "ab", buffering=0)  # noqa: SIM115
        except OSError as exc:
            raise OperationalError(f"cannot write events to --log-dir {directory}: {exc.strerror}") from exc

    def write_file(self, name: str, text: str) -> None:
        """Write a file beside the events, unless these are dropped."""
        if self._file is None or self._directory is None:
            return
        path = os.path.join(self._directory, name)
        try:
            with open(f"{path}.draft", "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(f"{path}.draft", path)  # a reader finds the whole file, or none
            if self._is_bounded:
                self._paths.append(path)
                if len(self._paths) > MAX_FILES:
                    os.unlink(self._paths.popleft())
        except OSError as exc:  # the job goes on without it
            self._say(f"elasticgang: cannot write {path}: {exc.strerror}")

    def write(self, event: EventName, **fields: Any) -> None:
        """Append one event. Its `t` is CLOCK_MONOTONIC in seconds, which all processes of a host share."""
        if self._file is None:
            return
        line = json.dumps({"t": time.monotonic(), "wall": time.time(), "event": event, **fields}).encode() + b"\n"
        try:
            if self._is_bounded and self._file.tell() + len(line) > MAX_BYTES:
                raise OSError(errno.EFBIG, f"it has {MAX_BYTES >> 20} MiB; with --log-dir there is no limit")
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as exc:  # the job goes on without its log
            self._say(f"elasticgang: stopped writing events to {self._file.name}: {exc.strerror}")
            self._file.close()
            self._file = None
