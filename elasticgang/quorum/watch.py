"""The agent's eyes: reads the pages of its ranks, and ends what `progress.py` finds hung.

K1  Only a process that belongs to that rank at that moment is sent a signal, whatever became of its pid.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from elasticgang.comm.page import Doing, Page
from elasticgang.quorum.progress import Comm, Progress, Reached, Reading, Standstill, Verdict, Wait

_WAITS = frozenset({Doing.WAITING, Doing.ASKING, Doing.SPARE})


class Watch:
    """`limit_s` None: adaptive."""

    def __init__(self, limit_s: float | None) -> None:
        self._progress = Progress(None if limit_s is None else int(limit_s * 1000))
        self._heard: dict[str, list[Wait]] = {}
        self._waits: list[Wait] = []
        self._since_s = 0.0
        self._told: list[Wait] = []

    @property
    def interval_s(self) -> float:
        return self._progress.interval_ms / 1000

    def look(self, now_s: float, pages: Mapping[str, Page], *, finished: bool) -> list[Verdict]:
        """`pages`: by member. `finished`: so has the job."""
        readings = [read(member, page) for member, page in pages.items()]
        told = list(itertools.chain(*self._heard.values()))
        return self._progress.look(int(now_s * 1000), readings, told, finished=finished)

    def standstill(self) -> Standstill | None:
        """After a look: whether to report that nobody makes progress."""
        return self._progress.standstill()

    # -- several agents

    def hear(self, agent: str, waits: Sequence[Sequence[Any]]) -> None:
        """What `agent` has told, in place of what it told before. Raises TypeError or ValueError when it is none."""
        self._heard[agent] = [
            Wait(str(member), int(generation), group and int(group), reached and int(reached))
            for member, generation, group, reached in waits
        ]

    def forget(self, agents: Collection[str]) -> None:
        """All but these."""
        self._heard = {agent: waits for agent, waits in self._heard.items() if agent in agents}

    def news(self, now_s: float) -> list[Wait] | None:
        """What to tell the other agents after a look: waits that last, and that they are over. None: nothing new. Where
        steps are short beside the limit, there is none unless somebody hangs."""
        waits = self._progress.waits()
        if waits != self._waits:
            self._waits, self._since_s = waits, now_s
        lasting = waits if now_s - self._since_s > self._progress.limit_ms / 4000 else []
        if lasting == self._told:
            return None
        self._told = lasting
        return lasting


def read(member: str, page: Page) -> Reading:
    doing, block = page.doing, page.comm
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
        waits=doing in _WAITS,
        asks=doing is Doing.ASKING,
        paused=page.is_paused,
        takes_part=doing not in (Doing.STARTING, Doing.LEFT),
        has_left=doing is Doing.LEFT,
        comm=comm,
    )


def kill_comm(pid: int, group: int) -> None:
    """K1. End the comm process `pid` of the rank that leads the process group `group`."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if os.getpgid(pid) == group != pid:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
