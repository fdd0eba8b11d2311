"""Reads the status pages of the agent's ranks, and kills what `hang_detector.py` reports.

MONITOR-1  A signal goes only to a process that belongs to that rank at that moment, never to another one that has the
    pid by then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from elasticgang.process.status_page import StatusPage, ThreadState
from elasticgang.protocol.hang_detector import BlockedOn, Comm, HangDetector, HangReport, Reached, Reading, Standstill

_WAITS = frozenset({ThreadState.WAITING, ThreadState.REQUESTING, ThreadState.SPARE})


class HangMonitor:
    """`limit_s` None: adaptive."""

    def __init__(self, limit_s: float | None) -> None:
        self._detector = HangDetector(None if limit_s is None else int(limit_s * 1000))
        self._peers_blocked_on: dict[str, list[BlockedOn]] = {}
        self._blocked_on: list[BlockedOn] = []
        self._since_s = 0.0
        self._sent: list[BlockedOn] = []

    @property
    def interval_s(self) -> float:
        return self._detector.interval_ms / 1000

    def detect(self, now_s: float, pages: Mapping[str, StatusPage], *, finished: bool) -> list[HangReport]:
        """`pages`: by member. `finished`: so has the job."""
        readings = [read_status(member, page) for member, page in pages.items()]
        peer_edges = list(itertools.chain(*self._peers_blocked_on.values()))
        return self._detector.detect(int(now_s * 1000), readings, peer_edges, finished=finished)

    def standstill(self) -> Standstill | None:
        """After a look: whether to report that nobody makes progress."""
        return self._detector.standstill()

    # -- several agents

    def update_peer(self, agent: str, edges: Sequence[Sequence[Any]]) -> None:
        """What `agent` has told, in place of what it told before. Raises TypeError or ValueError when it is none."""
        self._peers_blocked_on[agent] = [
            BlockedOn(str(member), int(generation), group and int(group), reached and int(reached))
            for member, generation, group, reached in edges
        ]

    def retain_peers(self, agents: Collection[str]) -> None:
        """All but these."""
        self._peers_blocked_on = {agent: edges for agent, edges in self._peers_blocked_on.items() if agent in agents}

    def unsent(self, now_s: float) -> list[BlockedOn] | None:
        """What to tell the other agents after a look: waits that last, and that they are over. None: nothing new. Where
        steps are short beside the limit, there is none unless somebody hangs."""
        edges = self._detector.blocked_on()
        if edges != self._blocked_on:
            self._blocked_on, self._since_s = edges, now_s
        lasting = edges if now_s - self._since_s > self._detector.limit_ms / 4000 else []
        if lasting == self._sent:
            return None
        self._sent = lasting
        return lasting


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
    """MONITOR-1. End the comm process `pid` of the rank that leads the process group `group`."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if os.getpgid(pid) == group != pid:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
