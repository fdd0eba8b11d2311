"""The event log of an agent, as JSON lines."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from elasticgang.errors import OperationalError


class EventLog:
    """Appends events to `events.jsonl` in `directory`. Drops events if that is None, and after the first failed write.
    Not thread-safe."""

    def __init__(self, directory: str | None, say: Callable[[str], None]) -> None:
        """`say`: prints the message that events are dropped.

        Raises:
            OperationalError: the file cannot be created.
        """
        self._say = say
        self._file: BinaryIO | None = None
        if directory is None:
            return
        try:
            os.makedirs(directory, exist_ok=True)
            self._file = open(os.path.join(directory, "events.jsonl"), "ab", buffering=0)  # noqa: SIM115
        except OSError as exc:
            raise OperationalError(f"cannot write events to --log-dir {directory}: {exc.strerror}") from exc

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Its `t` is CLOCK_MONOTONIC in seconds, which all processes of a host share."""
        if self._file is None:
            return
        line = json.dumps({"t": time.monotonic(), "wall": time.time(), "event": event, **fields}).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as exc:  # the job goes on without its log
            self._say(f"elasticgang: stopped writing events to {self._file.name}: {exc.strerror}")
            self._file.close()
            self._file = None
