"""What happened, as JSON lines."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from elasticgang.errors import OperationalError


class EventLog:
    """Appends events to `events.jsonl` in `directory`; drops them when it is None, or from the first that cannot be
    written. One owner thread."""

    def __init__(self, directory: str | None, say: Callable[[str], None]) -> None:
        """`say`: where it is told that events are dropped.

        Raises:
            OperationalError: the file cannot be made.
        """
        self._say = say
        self._file: BinaryIO | None = None
        if directory is None:
            return
        try:
            os.makedirs(directory, exist_ok=True)
            self._file = open(os.path.join(directory, "events.jsonl"), "ab", buffering=0)  # noqa: SIM115
        except OSError as exc:
            raise OperationalError(f"no events can be written to --log-dir {directory}: {exc.strerror}") from exc

    def write(self, event: str, **fields: Any) -> None:
        """`t` is CLOCK_MONOTONIC in seconds, which all processes of a host share."""
        if self._file is None:
            return
        line = json.dumps({"t": time.monotonic(), "wall": time.time(), "event": event, **fields}).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as exc:  # the log is not worth the job
            self._say(f"elasticgang: no more events are written to {self._file.name}: {exc.strerror}")
            self._file.close()
            self._file = None
