"""Reads the status pages of the agent's ranks, and kills what `hang_detector.py` reports.

MONITOR-1  A signal goes only to a process that belongs to the rank at that moment, never to one that has reused its
    pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from elasticgang.process.status_page import StatusPage, ThreadState
from elasticgang.protocol.hang_detector import BlockedOn, Comm, HangDetector, HangReport, Reached, Reading, Standstill
from elasticgang.protocol.job_facts import Wait, furthest

_WAITS = frozenset({ThreadState.WAITING, ThreadState.REQUESTING, ThreadState.SPARE})


class HangMonitor:
    """`limit_s`: the hang timeout; None for an adaptive one."""

    def __init__(self, limit_s: float | None) -> None:
        self._detector = HangDetector(None if limit_s is None else int(limit_s * 1000))
        self._blocked_on: list[BlockedOn] = []
        self._since_s = 0.0

    @property
    def interval_s(self) -> float:
        return self._detector.interval_ms / 1000

    def detect(
        self, now_s: float, pages: Mapping[str, StatusPage], waits: Sequence[Wait] = (), *, finished: bool
    ) -> list[HangReport]:
        """`pages`: by member. `waits`: of other agents. `finished`: so has the job."""
        readings = [read_status(member, page) for member, page in pages.items()]
        peer_edges = [BlockedOn("", wait.generation, wait.group, wait.reached) for wait in waits]
        return self._detector.detect(int(now_s * 1000), readings, peer_edges, finished=finished)

    def standstill(self) -> Standstill | None:
        """The standstill to report after `detect`, if there is one."""
        return self._detector.standstill()

    def lasting_waits(self, now_s: float) -> tuple[Wait, ...]:
        """What the other agents must know after `detect`. While steps are short compared with the limit, there are none
        unless a rank hangs."""
        edges = self._detector.blocked_on()
        if edges != self._blocked_on:
            self._blocked_on, self._since_s = edges, now_s
        if now_s - self._since_s <= self._detector.limit_ms / 4000:
            return ()
        return furthest(Wait(edge.generation, edge.group, edge.reached) for edge in edges)


def read_status(member: str, page: StatusPage) -> Reading:
    doing, block = page.thread_state, page.comm
    comm = None
    if block is not None:
        groups = {
            stamps.group: Reached(
                stamps.submitted, stamps.completed, stamps.messages_submitted, stamps.messages_completed
            )
            for stamps in block.groups()
        }
        comm = Comm(block.pid, block.beats, groups)
    return Reading(
        member,
        page.generation,
        page.beats,
        page.pulses,
        page.steps,
        is_waiting=doing in _WAITS,
        is_requesting=doing is ThreadState.REQUESTING,
        paused=page.is_paused,
        takes_part=doing not in (ThreadState.STARTING, ThreadState.LEFT),
        has_left=doing is ThreadState.LEFT,
        comm=comm,
    )


def kill_comm(pid: int, group: int) -> None:
    """MONITOR-1. Kill the comm process `pid` of the rank that leads the process group `group`."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if os.getpgid(pid) == group != pid:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
