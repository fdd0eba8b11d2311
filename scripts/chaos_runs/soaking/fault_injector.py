"""What is done to a fleet, when, and to whom: drawn from a seed, aimed by what the fleet tells of itself.

FAULT-1  One live member of each part of the newest committed state, which holds that part, is left alone, with its
    agent, until the next fault: no job survives the loss of state. While a part is not known to be held, nothing is
    done.
FAULT-2  Only a process that is, at that moment, what it is taken for is sent a signal.
FAULT-3  What was stopped goes on later, or is left to --hang-timeout.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import psutil

from scripts.chaos_runs.soaking.comm_processes import comm_processes
from scripts.chaos_runs.soaking.fleet import AgentProcess, Fleet
from scripts.chaos_runs.soaking.holders import choose_safe
from scripts.demo_job.run_log import Spawned

# How often each is drawn. The aimed ones wait for their moment: a generation change, a learner, a vote.
WEIGHTS = {
    "rank": 5,
    "comm process": 3,
    "standby": 1,
    "stop rank": 2,
    "stop comm process": 1,
    "hang rank": 1,
    "several": 3,
    "in a change": 3,
    "in a heal": 3,
    "in a vote": 4,
    "drain": 1,
    "coordinator": 2,
    "agent": 2,
}
WEIGHTS_OF_FALLBACKS = {**WEIGHTS, "agent": 8}  # only a lost host makes a job take another layout
AIMED = ("in a change", "in a heal", "in a vote")

_AIM_LIMIT_S = 5.0
_STOPPED_S = (0.2, 1.2)
_SETTLED_S = 2.0  # beside --hang-timeout: then nothing kills any more whom a stop had held up


@dataclass(frozen=True)
class Fault:
    kind: str
    at: float
    victims: tuple[str, ...]


@dataclass
class FaultInjector:
    """`tick` does what is due. `done`: what was done, in order."""

    fleet: Fleet
    source: random.Random
    every_s: float
    weights: Mapping[str, int] = field(default_factory=lambda: WEIGHTS)
    done: list[Fault] = field(default_factory=list)
    _due: float = 0.0
    _aimed: tuple[str, float] | None = None
    _change: list[str] = field(default_factory=list)
    _stopped: list[tuple[float, int]] = field(default_factory=list)
    _hit: dict[str, float] = field(default_factory=dict)  # until then they may die of it
    _drained: set[str] = field(default_factory=set)

    def tick(self) -> None:
        now = time.monotonic()
        self._let_go_on(now)
        if self._aimed is not None:
            kind, since = self._aimed
            if (self._is_moment(kind) and self._strike(kind)) or now - since > _AIM_LIMIT_S:
                self._aimed = None
            return
        if now < self._due:
            return
        self._due = now + self.every_s * self.source.uniform(0.3, 1.7)
        kind = self.source.choices(list(self.weights), list(self.weights.values()))[0]
        if kind in AIMED:
            self._aimed = kind, now
        else:
            self._strike(kind)

    def stop(self) -> None:
        """No more of it: what is stopped goes on."""
        self._let_go_on(float("inf"))

    def counts(self) -> dict[str, int]:
        return dict(Counter(fault.kind for fault in self.done))

    def _let_go_on(self, now: float) -> None:
        """FAULT-3."""
        for until, pid in self._stopped:
            if until <= now:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self._stopped = [(until, pid) for until, pid in self._stopped if until > now]

    def _is_moment(self, kind: str) -> bool:
        events = [line for _, line in self.fleet.fresh]
        if kind == "in a change":
            return any(line["event"] in ("exited", "entered", "generation") for line in events)
        if kind == "in a heal":
            return any(line["event"] == "generation" and line["learner"] for line in events)
        return True

    def _strike(self, kind: str) -> bool:
        """Whether it was done."""
        safe = self._safe()
        if safe is None:
            return False
        allowed = [
            (agent, spawned)
            for name, (agent, spawned) in self.fleet.live().items()
            if name not in safe and name not in self._drained
        ]
        self.source.shuffle(allowed)
        victims = list(_STRIKES[kind](self, allowed, safe))
        if victims:
            self.done.append(Fault(kind, time.monotonic(), tuple(victims)))
        return bool(victims)

    def _safe(self) -> set[str] | None:
        """FAULT-1. Of those that hold the newest state, one of each part that has not been hit."""
        live, now = self.fleet.live(), time.monotonic()
        groups = [
            [
                name
                for name in members
                if self._hit.get(name, 0.0) <= now and name not in self._drained and not _is_stopped(live[name][1].pid)
            ]
            for members in self.fleet.holders()
        ]
        return choose_safe(groups, {name: agent.index for name, (agent, _) in live.items()}, self.source)

    # -- what is done; each yields whom it was done to

    def _kill_rank(self, allowed: list[tuple[AgentProcess, Spawned]], safe: Collection[str]) -> Iterator[str]:
        for _, spawned in allowed[:1]:
            self._send(spawned, signal.SIGKILL)
            yield spawned.member

    def _several(self, allowed: list[tuple[AgentProcess, Spawned]], safe: Collection[str]) -> Iterator[str]:
        for _, spawned in allowed[: self.source.randint(2, 3)]:
            if self.source.random() < 0.7:
                self._send(spawned, signal.SIGKILL)
                yield spawned.member
            else:
                yield from self._kill_comm([(_, spawned)], safe)

    def _kill_comm(self, allowed: list[tuple[AgentProcess, Spawned]], safe: Collection[str]) -> Iterator[str]:
        yield from self._to_comm(allowed, 0, signal.SIGKILL)

    def _kill_standby(self, allowed: list[tuple[AgentProcess, Spawned]], safe: Collection[str]) -> Iterator[str]:
        yield from self._to_comm(allowed, 1, signal.SIGKILL)

    def _stop_comm(self, allowed: list[tuple[AgentProcess, Spawned]], safe: Collection[str]) -> Iterator[str]:
        yield from self._to_comm(allowed, 0, signal.SIGSTOP)

    def _to_comm(self, allowed: list[tuple[AgentProcess, Spawned]], index: int, number: int) -> Iterator[str]:
        for _, spawned in allowed[:1]:
            pids = comm_processes(spawned.pid)
            if len(pids) > index:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[index], number)
                if number == signal.SIGSTOP:
                    self._stopped.append((time.monotonic() + self.source.uniform(*_STOPPED_S), pids[index]))
                yield spawned.member

    def _stop_rank(self, allowed: list[tuple[AgentProcess, Spawned]], safe: Collection[str]) -> Iterator[str]:
        for _, spawned in allowed[:1]:
            self._send(spawned, signal.SIGSTOP)
            until = time.monotonic() + self.source.uniform(*_STOPPED_S)
            self._stopped.append((until, spawned.pid))
            self._hit[spawned.member] = until + self.fleet.spec.hang_timeout_s + _SETTLED_S
            yield spawned.member

    def _hang_rank(self, allowed: list[tuple[AgentProcess, Spawned]], safe: Collection[str]) -> Iterator[str]:
        for _, spawned in allowed[:1]:
            self._send(spawned, signal.SIGSTOP)
            yield spawned.member

    def _in_vote(self, allowed: list[tuple[AgentProcess, Spawned]], safe: Collection[str]) -> Iterator[str]:
        """Who has prepared a step that it has not committed, as far as it has written."""
        run_log = self.fleet.run_log
        newest = {prepared.member: prepared.attempt for prepared in run_log.prepared[-4 * self.fleet.spec.ranks :]}
        for _, spawned in allowed:
            attempt = newest.get(spawned.member)
            if attempt is not None and run_log.last_committed.get(spawned.member) != attempt:
                self._send(spawned, signal.SIGKILL)
                yield spawned.member
                return

    def _drain(self, allowed: list[tuple[AgentProcess, Spawned]], safe: Collection[str]) -> Iterator[str]:
        """An agent whose ranks have all gone ends, and is started again; so only some of the ranks are let go."""
        gone = sum(name in self._drained for agent in self.fleet.agents for name in agent.members)
        for _, spawned in allowed[:1]:
            if gone < self.fleet.spec.max_drained:
                self._send(spawned, signal.SIGTERM)
                self._drained.add(spawned.member)
                yield spawned.member

    def _kill_coordinator(self, allowed: list[tuple[AgentProcess, Spawned]], safe: Collection[str]) -> Iterator[str]:
        if self.fleet.coordinator.poll() is None:
            self.fleet.coordinator.kill()
            yield "coordinator"

    def _kill_agent(self, allowed: list[tuple[AgentProcess, Spawned]], safe: Collection[str]) -> Iterator[str]:
        live = self.fleet.live()
        homes = {live[name][0].index for name in safe}
        others = [agent for agent in self.fleet.agents if agent.index not in homes and agent.process.poll() is None]
        for agent in others[:1]:
            self._hit.update((name, math.inf) for name in agent.live())
            agent.process.kill()
            yield f"agent {agent.index}"

    def _send(self, spawned: Spawned, number: int) -> None:
        """FAULT-2: a rank leads a process group of its own."""
        if number != signal.SIGTERM:
            self._hit[spawned.member] = math.inf
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(spawned.pid) == spawned.pid:
                os.kill(spawned.pid, number)


_Strike = Callable[[FaultInjector, list[tuple[AgentProcess, Spawned]], Collection[str]], Iterator[str]]

_STRIKES: dict[str, _Strike] = {
    "rank": FaultInjector._kill_rank,
    "comm process": FaultInjector._kill_comm,
    "standby": FaultInjector._kill_standby,
    "stop rank": FaultInjector._stop_rank,
    "stop comm process": FaultInjector._stop_comm,
    "hang rank": FaultInjector._hang_rank,
    "several": FaultInjector._several,
    "in a change": FaultInjector._kill_rank,
    "in a heal": FaultInjector._kill_rank,
    "in a vote": FaultInjector._in_vote,
    "drain": FaultInjector._drain,
    "coordinator": FaultInjector._kill_coordinator,
    "agent": FaultInjector._kill_agent,
}


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    except psutil.Error:
        return True
