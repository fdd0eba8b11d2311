"""What happened, as JSON lines."""

from __future__ import annotations

import json
import os
import time
from typing import Any, TextIO


class EventLog:
    """Appends events to `events.jsonl` in `directory`; drops them when it is None. One owner thread."""

    def __init__(self, directory: str | None) -> None:
        self._file: TextIO | None = None
        if directory is not None:
            os.makedirs(directory, exist_ok=True)
            self._file = open(os.path.join(directory, "events.jsonl"), "a", buffering=1)  # noqa: SIM115

    def write(self, event: str, **fields: Any) -> None:
        """`t` is CLOCK_MONOTONIC in seconds, which all processes of a host share."""
        if self._file is not None:
            self._file.write(json.dumps({"t": time.monotonic(), "wall": time.time(), "event": event, **fields}) + "\n")
