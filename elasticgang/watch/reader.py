"""Follows one agent: reads what its event file has grown by, and the status pages of its ranks.

READER-1  No part of a job waits for a reader: it sends nothing, takes no lock, and maps the pages read-only.
READER-2  Of a job whose events are incomplete, because the file was truncated, nothing is reported.
READER-3  The pages are those of the agent's ranks: an agent in another container or on another host has its own process
    ids, which may be those of other ranks here. Nor is its CLOCK_MONOTONIC that of another host.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elasticgang.observe import log_lock
from elasticgang.observe.event_file import LineReader, parse_event
from elasticgang.process.status_page import StatusPage
from elasticgang.watch.summary import RankStatus, Summary


class JobReader:
    """`on_reported`: gets what the events have of the history, at the first `read` (SUMMARY-4). `is_alive`: whether the
    agent runs; None: nobody knows. `warn` is called for a line of the file that is no event, `on_event` for all
    others. `offset`: the bytes of the file that are of earlier jobs."""

    def __init__(
        self,
        path: Path,
        is_alive: Callable[[], bool | None],
        warn: Callable[[str], None],
        on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
        offset: int = 0,
    ) -> None:
        self._path, self._is_alive, self._warn, self._on_event = path, is_alive, warn, on_event
        self._summary = Summary()
        self.on_reported: Callable[[dict[str, Any]], None] = lambda point: None
        self._pages: dict[str, StatusPage] = {}
        self._lines = LineReader(path, offset)
        self._num_lines = 0
        self._truncated_at: float | None = None  # seconds since 1970

    def read(self) -> dict[str, Any]:
        """What the job does now. A file that is not there yet counts as empty.

        Raises:
            OSError: the events cannot be read, see `LineReader`, or do not tell what the job does (READER-2).
        """
        is_alive = self._is_alive()  # first: the last events of an agent that ends are read then
        self._read_events()
        if self._truncated_at is not None:
            raise OSError(errno.ESTALE, "it was truncated while the job ran", str(self._path))
        holder = log_lock.holder(str(self._path.parent))
        is_here = holder is None or holder == self._summary.agent_pid  # READER-3
        ranks = self._read_pages() if is_alive and is_here else {}
        now_s = time.monotonic() if is_here else self._summary.clock_at(time.time())
        try:
            return self._summary.report(ranks, now_s, is_alive=is_alive)
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            raise OSError(errno.EBADMSG, f"it has an event of another version: {exc!r}", str(self._path)) from exc

    def _read_events(self) -> None:
        is_first = not self._num_lines
        for line in self._lines.read():
            self._num_lines += 1
            try:
                event = parse_event(line)
                self._check_truncated(event)
                self._summary.add(event)
                self._on_event(event)
                if is_first and event["event"] == "reported" and (point := self._summary.reported()) is not None:
                    self.on_reported(point)
            except (ValueError, KeyError, TypeError, AttributeError):
                self._warn(f"{self._path}: line {self._num_lines} is no event; left out")

    def _check_truncated(self, event: Mapping[str, Any]) -> None:
        """READER-2. The next job in the file has all of its events again."""
        match event["event"]:
            case "truncated":
                self._truncated_at = event["wall"]
            case "started" if self._truncated_at is not None:
                began_at = event["wall"] - (event["t"] - event["monotonic"])  # before that, if it is one that rejoins
                if began_at > self._truncated_at:
                    self._truncated_at = None

    def _read_pages(self) -> dict[str, RankStatus]:
        pids = self._summary.pids  # READER-1: /proc gives the pages without the agent's help
        self._pages = {member: page for member, page in self._pages.items() if member in pids}
        for member, pid in pids.items():
            if member not in self._pages and (page := StatusPage.of_process(pid)) is not None:
                self._pages[member] = page
        return {member: _read(page) for member, page in self._pages.items()}


def _read(page: StatusPage) -> RankStatus:
    numbers = {name: (found.last, found.total / found.num_reports) for name, found in page.numbers().items()}
    return RankStatus(
        *page.committed,
        page.thread_state.name,
        page.commit_times(),
        page.healing,
        numbers,
        page.saving,
    )
