"""Reads the event log of an agent, also while it is written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_POLL_S = 0.2

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


def complete_lines(path: Path, offset: int) -> tuple[list[bytes], int]:
    """The lines of a growing file from `offset` on, and the offset after them. A line that is being written is left for
    the next time, and a file that is not there yet has none. Raises OSError: the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return [], offset
    data = data[: data.rfind(b"\n") + 1]
    return data.splitlines(), offset + len(data)


def read_events(path: Path, warn: Callable[[str], None], *, follows: bool = False) -> Iterator[Event]:
    """Yield the events of a file. `warn` is called for a line that is no event, such as one that was cut off.
    `follows`: then wait for further ones, until the file is gone.

    Raises:
        OSError: the file cannot be read.
    """
    number = 0
    with path.open("rb") as file:
        rest = b""
        while True:
            data = file.readline()
            if not data.endswith(b"\n"):
                rest += data
                if follows and path.exists():
                    time.sleep(_POLL_S)
                    continue
                if rest:
                    warn(f"{path}: its last line is incomplete; left out")
                return
            number += 1
            line, rest = rest + data, b""
            try:
                event = json.loads(line)
                if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                    raise ValueError
            except ValueError:
                warn(f"{path}: line {number} is no event; left out")
                continue
            yield event
