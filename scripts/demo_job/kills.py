"""Whom to kill, when, and how to be sure who it was.

KILL-1  Only a process that is, at that moment, a rank of the job is ever sent a signal, whatever became of its pid.
KILL-2  No kill takes the last live member that holds a part of the state; before the first generation, nor the last
    live rank.
KILL-3  A kill counts once the agent has reaped that very process as killed by SIGKILL.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from scripts.demo_job.run_audit import Kill
from scripts.demo_job.run_log import Part, RunLog, Spawned

_HELD_UP_S = 0.005
_LAST_MOMENTS_S = 1.0

IsRank = Callable[[Spawned], bool]


@dataclass(frozen=True)
class DueKill:
    """A kill as drawn. `after_s`: from the start of the ranks."""

    after_s: float
    local_rank: int


def draw_schedule(seed: int, ranks: int, every_s: float) -> Iterator[DueKill]:
    """An endless schedule: waits between 0.6 and 1.4 times `every_s`, and ranks, each as likely as the other."""
    source = random.Random(f"kills {seed}")
    after_s = 0.0
    while True:
        after_s += every_s * source.uniform(0.6, 1.4)
        yield DueKill(after_s, source.randrange(ranks))


def choose(run_log: RunLog, local_rank: int, is_rank: IsRank, num_parts: int = 1) -> Spawned | None:
    """The live member of `local_rank`, or of the next rank that may be killed; None when none may (KILL-2).
    `num_parts`: into which the layout divides the model, if the ranks do not say that."""
    live = {rank: spawned for rank, spawned in run_log.live().items() if is_rank(spawned)}
    if run_log.num_generations == 0:
        needed: Mapping[Part, set[int]] = {(): set(live)}  # nobody holds anything yet, so anybody can begin
    else:
        needed = holding(run_log, live, num_parts)
        if not needed:
            return None
    for rank in sorted(live, key=lambda rank: (rank < local_rank, rank)):
        if all(ranks - {rank} for ranks in needed.values()):
            return live[rank]
    return None


def holding(run_log: RunLog, live: Mapping[int, Spawned], num_parts: int) -> Mapping[Part, set[int]]:
    """The local ranks among `live` that hold each part of the model; empty if some part may have no holder among them.
    Before the first commit too: who holds the state of step 0 is not written anywhere."""
    needed: defaultdict[Part, set[int]] = defaultdict(set)
    holders = run_log.holders()
    for rank, spawned in live.items():
        if spawned.member in holders:
            needed[run_log.part_of[spawned.member]].add(rank)
    whole = num_parts if run_log.sizes is None else math.prod(run_log.sizes)
    return needed if len(needed) >= whole else {}


class Killer:
    """Kills ranks of the job whose agent is `agent_pid`, a child of this process that it has not reaped; by `number`,
    which is SIGKILL or makes the agent send that."""

    def __init__(self, agent_pid: int, number: signal.Signals = signal.SIGKILL, num_parts: int = 1) -> None:
        self._agent_pid, self._num_parts = agent_pid, num_parts
        self._number = number
        self.sent: list[Kill] = []

    def kill(self, run_log: RunLog, local_rank: int) -> Kill | None:
        """Kill the member of `local_rank`, or of the next rank that may be killed. None: nobody may be, now."""
        sent = {kill.member for kill in self.sent}  # these may take a while to die
        victim = choose(
            run_log, local_rank, lambda who: who.member not in sent and self._is_rank(who.pid), self._num_parts
        )
        if victim is None:
            return None
        try:
            descriptor = os.pidfd_open(victim.pid)
        except ProcessLookupError:
            return None
        try:
            # KILL-1: the descriptor names one process for ever; that it is the rank is looked up only after it was
            # opened.
            if not self._is_rank(victim.pid):
                return None
            t = time.monotonic()
            signal.pidfd_send_signal(descriptor, self._number)
        except ProcessLookupError:
            return None
        finally:
            os.close(descriptor)
        step = 0 if run_log.newest is None else run_log.newest.step + 1
        self.sent.append(Kill(victim.member, victim.local_rank, victim.pid, t, step))
        return self.sent[-1]

    def all_held(self, run_log: RunLog) -> bool:
        """Whether the ranks of this agent that live, and were sent no signal, hold all parts of the model."""
        sent = {kill.member for kill in self.sent}
        live = {rank: spawned for rank, spawned in run_log.live().items() if spawned.member not in sent}
        return bool(holding(run_log, live, self._num_parts))

    def happened(self, run_log: RunLog) -> list[Kill]:
        """KILL-3. Those of `sent` that count, so far."""
        return [
            kill
            for kill in self.sent
            if kill.member in run_log.exited and run_log.exited[kill.member].status == -signal.SIGKILL
        ]

    def _is_rank(self, pid: int) -> bool:
        """KILL-1: whether `pid` runs and is a rank process: a child of the agent, and the leader of a process group."""
        try:
            with open(f"/proc/{pid}/stat") as file:
                # pid (comm) state ppid pgrp ...; comm may hold anything
                state, parent, group = file.read().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state not in "ZX" and int(parent) == self._agent_pid and int(group) == pid


class ScheduledKills:
    """Carries a drawn schedule out. A kill that may not be done when it is due is done as soon as it may be."""

    def __init__(self, seed: int, ranks: int, every_s: float, max_kills: int | None = None) -> None:
        """`max_kills`: after so many the ranks are left alone."""
        self._max_kills = math.inf if max_kills is None else max_kills
        self._schedule = draw_schedule(seed, ranks, every_s)
        self.drawn = [next(self._schedule)]
        self.carried_out: list[tuple[DueKill, Kill]] = []
        self._is_held_up = False  # nobody may be killed now (KILL-2), though it is time for the last one drawn

    def tick(self, killer: Killer, run_log: RunLog) -> float:
        """Kill whom it is time for. Returns for how many seconds there is nothing to do."""
        if run_log.started_at is None or run_log.finished or len(self.carried_out) >= self._max_kills:
            return math.inf
        due = self.drawn[-1]
        wait_s = run_log.started_at + due.after_s - time.monotonic()
        if wait_s > 0:
            return wait_s
        kill = killer.kill(run_log, due.local_rank)
        self._is_held_up = kill is None
        if kill is None:
            return _HELD_UP_S
        self.carried_out.append((due, kill))
        if len(self.carried_out) < self._max_kills:
            self.drawn.append(next(self._schedule))
        return 0.0

    def asked(self, run_log: RunLog, num_happened: int) -> list[DueKill]:
        """What was due while the job ran; at least one, since a run without a kill shows nothing. What was due in its
        last moments only if it happened: the job may end before that. Nor is one asked for that was held up to the end:
        on a slow machine the ranks may not be back before that."""
        if run_log.started_at is None or not run_log.finished:
            return self.drawn
        end_s = min(finished.t for finished in run_log.finished) - run_log.started_at - _LAST_MOMENTS_S
        possible = self.drawn[:-1] if self._is_held_up else self.drawn
        return self.drawn[: max(1, num_happened, sum(due.after_s <= end_s for due in possible))]
