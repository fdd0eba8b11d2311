"""Reads the event log of an agent, also while it is written.

EVENTFILE-1  What was read stays at its place in the file. Where it does not, because the file was truncated or another
    one is in its place, nothing more is read: the events between are unknown. A whole copy counts as the file.
EVENTFILE-2  A file of any size is read line by line.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

MISSING_S = 5.0  # longer than the agent takes to make a file again that is missing (EVENTLOG-3)
_POLL_S = 0.2
_BLOCK_BYTES = 1 << 20
_MAX_TIME_S = 1e11  # of the year 5138

Event = dict[str, Any]


def read_incident(directory: Path, generation: int, warn: Callable[[str], None]) -> Event | None:
    """What the agent has left about the change to `generation`. None: there is no file, or one that cannot be used."""
    path = directory / f"incident-{generation}.json"
    try:
        found = json.loads(path.read_bytes())
        for lost in found["lost"]:
            lost["local_rank"], lost["pid"], lost["stack"], lost["tail"]
        for rank in found["counters"]:
            rank["local_rank"], [(counts["submitted"], counts["completed"]) for counts in rank["groups"].values()]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        warn(f"{path} is left out: {type(exc).__name__}: {exc}")
        return None
    return dict(found)


class LineReader:
    """The complete lines of a growing file, each once. `offset`: where to begin. A file that is not there yet has
    none."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.has_partial_line = False  # at the end of the file, when it was read last
        self._path, self._offset = path, offset
        self._last = b""  # the line before the offset
        self._was_there = False
        self._missing_since: float | None = None

    def read(self) -> Iterator[bytes]:
        """Raises OSError: the file cannot be read, it has been missing for `MISSING_S`, or EVENTFILE-1."""
        try:
            file = self._path.open("rb", buffering=_BLOCK_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            now = time.monotonic()
            self._missing_since = now if self._missing_since is None else self._missing_since
            if self._was_there and now - self._missing_since >= MISSING_S:
                raise
            return
        self._was_there, self._missing_since = True, None
        with file:
            try:
                self._check(file)
                yield from self._lines(file)
            except OSError as exc:
                exc.filename = str(self._path)
                raise

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        self.has_partial_line = False
        for line in file:  # EVENTFILE-2
            self.has_partial_line = not line.endswith(b"\n")
            if self.has_partial_line:
                return  # it is being written
            self._offset, self._last = self._offset + len(line), line
            yield line

    def _check(self, file: BinaryIO) -> None:
        """EVENTFILE-1"""
        is_shorter = os.fstat(file.fileno()).st_size < self._offset
        file.seek(self._offset - len(self._last))
        if is_shorter or file.read(len(self._last)) != self._last:
            raise OSError(errno.ESTALE, "it was truncated or replaced")


def parse_event(line: bytes) -> Event:
    """Raises ValueError: it is no event, with a name and a time."""
    try:
        event = json.loads(line)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError("it has no name")
    if not (_is_time(event.get("t")) and _is_time(event.get("wall", 0))):
        raise ValueError("it has no time")
    return event


def _is_time(value: Any) -> bool:
    """Seconds that a date can be made of."""
    return isinstance(value, int | float) and 0 <= value < _MAX_TIME_S


def read_events(path: Path, warn: Callable[[str], None], *, follows: bool = False) -> Iterator[Event]:
    """Yield the events of a file. `warn` is called for a line that is no event, such as one that was cut off.
    `follows`: then wait for further ones, until the file is gone.

    Raises:
        OSError: the file cannot be read, see `LineReader`.
    """
    reader, number = LineReader(path), 0
    while True:
        try:
            for line in reader.read():
                number += 1
                try:
                    event = parse_event(line)
                except ValueError:
                    warn(f"{path}: line {number} is no event; left out")
                    continue
                yield event
        except (FileNotFoundError, NotADirectoryError):
            return
        if not follows:
            if reader.has_partial_line:
                warn(f"{path}: its last line is incomplete; left out")
            return
        time.sleep(_POLL_S)
