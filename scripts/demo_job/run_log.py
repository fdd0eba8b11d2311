"""What the ranks of a job and their agent wrote, as records.

Pure: parsed lines in, records out; `driver.py` reads the files. Every `t` is CLOCK_MONOTONIC in seconds, which all
processes of a host share. A member is named as its history file is, with `-` for `/`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Part: TypeAlias = tuple[int, ...]
"""The part of the model that a rank holds: its (pp, sdp, tp), or () if every rank holds all of it."""


Sizes: TypeAlias = tuple[int, int, int]
"""Those of pp, sdp and tp: into how many parts a layout divides the model along each axis."""


class StepAttempt(NamedTuple):
    """One try at a step. `step` counts from 0; `generation` is the one in which its gradient was computed."""

    step: int
    generation: int


@dataclass(frozen=True)
class Prepared:
    """A member's share of an attempt, written before its vote. `active`: members whose votes the attempt needs.
    `sizes`: of the layout then in force, of which `part` is one; None if it is not said."""

    member: str
    t: float
    attempt: StepAttempt
    loss_sum: float
    tokens: int
    active: int
    samples: tuple[int, ...]
    part: Part = ()
    sizes: Sizes | None = None

    @property
    def of_samples(self) -> Part:
        """The part of the model without `sdp`, whose ranks divide the samples."""
        return self.part[:1] + self.part[2:]


@dataclass(frozen=True)
class Committed:
    member: str
    t: float
    attempt: StepAttempt


@dataclass(frozen=True)
class Finished:
    member: str
    t: float
    digest: str
    part: Part = ()
    sizes: Sizes | None = None


@dataclass(frozen=True)
class Spawned:
    member: str
    t: float
    local_rank: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """`status`: as of `subprocess`, negative for a signal. `seen_at`: when the agent noticed."""

    member: str
    seen_at: float
    status: int


@dataclass(frozen=True)
class Entered:
    """A member's way into a generation, each the time at which it had done that."""

    member: str
    generation: int
    began: float
    aborted: float
    agreed: float
    configured: float


@dataclass
class RunLog:
    """Everything read so far, in the order of each file. `noticed`: when the agent knew that a member began to exit."""

    started_at: float | None = None
    failure: str | None = None
    num_generations: int = 0
    spawned: dict[str, Spawned] = field(default_factory=dict)
    noticed: dict[str, float] = field(default_factory=dict)
    exited: dict[str, Exited] = field(default_factory=dict)
    entered: list[Entered] = field(default_factory=list)
    prepared: list[Prepared] = field(default_factory=list)
    committed: list[Committed] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    newest: StepAttempt | None = None
    generation: int = 0
    seated: int = 0
    spares: int = 0
    last_committed: dict[str, StepAttempt] = field(default_factory=dict)
    part_of: dict[str, Part] = field(default_factory=dict)  # when it committed last
    sizes: Sizes | None = None  # of the newest committed step
    agent: str | None = None  # the one whose events these are
    _active: dict[StepAttempt, int] = field(default_factory=dict)
    _passive: set[str] = field(default_factory=set)  # members to whom the newest generation gave no active seat
    _generation_of: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add_event(self, line: Mapping[str, Any]) -> None:
        """A line of the agent's `events.jsonl`; kinds that are not needed here are passed over."""
        match line["event"]:
            case "started":
                self.started_at, self.agent = line["t"], line.get("agent")
            case "spawned":
                member = member_name(line["member"])
                self.spawned[member] = Spawned(member, line["t"], line["local_rank"], line["pid"])
            case "exit_began":
                self.noticed[member_name(line["member"])] = line["monotonic"]
            case "exited":
                member = member_name(line["member"])
                self.exited[member] = Exited(member, line["monotonic"], line["status"])
            case "generation":
                self.num_generations += 1
                self.generation = line["generation"]
                self.seated, self.spares = line["active"] + line["learner"], line["spare"]
                live = self.live()
                here = [agent for agent in line["seats"] if self.agent in (None, agent["agent"])]
                statuses = {seat[0]: seat[2] for agent in here for seat in agent["seats"]}
                self._passive = {live[rank].member for rank in live if statuses.get(rank) != "active"}
                for local_rank in line["ranks"]:
                    if local_rank in live:
                        self._belongs(live[local_rank].member, line["generation"])
            case "entered":
                member = member_name(line["member"])
                times = {phase: line[phase] for phase in ("began", "aborted", "agreed", "configured")}
                self.entered.append(Entered(member, line["generation"], **times))
                self._belongs(member, line["generation"])
            case "failed":
                self.failure = line["reason"]

    def add_history(self, member: str, line: Mapping[str, Any]) -> None:
        """A line that `member` wrote."""
        part, sizes = tuple(line.get("part", ())), _sizes(line.get("sizes"))
        if line["kind"] == "finished":
            self.finished.append(Finished(member, line["t"], line["digest"], part, sizes))
            return
        attempt = StepAttempt(line["step"], line["generation"])
        self._belongs(member, attempt.generation)
        if line["kind"] == "prepared":
            share = (line["loss_sum"], line["tokens"], line["active"], tuple(line["samples"]), part, sizes)
            self.prepared.append(Prepared(member, line["t"], attempt, *share))
            self._active[attempt] = line["active"]
        elif line["kind"] == "committed":
            self.committed.append(Committed(member, line["t"], attempt))
            self.last_committed[member], self.part_of[member] = attempt, part
            if self.newest is None or attempt >= self.newest:
                self.newest, self.sizes = attempt, sizes

    def live(self) -> dict[int, Spawned]:
        """The members that run, as far as the agent has told, by local rank."""
        return {spawned.local_rank: spawned for name, spawned in self.spawned.items() if name not in self.exited}

    def holders(self) -> set[str]:
        """Live members that certainly hold the newest committed step, or will once its vote is resolved: they
        committed it, or the step before it in the same generation, where no vote passes without them. Whom the newest
        generation made a spare or a learner is none until it commits there: others may commit a step at any moment."""
        if self.newest is None:
            return set()
        step, generation = self.newest
        near = {StepAttempt(step, generation), StepAttempt(step - 1, generation)}
        holders = {
            spawned.member for spawned in self.live().values() if self.last_committed.get(spawned.member) in near
        }
        return holders if generation == self.generation else holders - self._passive

    def generation_of(self, member: str) -> int:
        """The last generation that `member` was seated in; 0 for none."""
        return self._generation_of.get(member, 0)

    def sharers(self) -> list[str]:
        """Members that prepared the newest committed step."""
        return [prepared.member for prepared in self.prepared if prepared.attempt == self.newest]

    def strength(self) -> int:
        """Members that voted for the newest committed step."""
        return 0 if self.newest is None else self._active.get(self.newest, 0)

    def _belongs(self, member: str, generation: int) -> None:
        self._generation_of[member] = max(generation, self._generation_of[member])


def _sizes(data: Sequence[int] | None) -> Sizes | None:
    if data is None:
        return None
    pp, sdp, tp = data
    return pp, sdp, tp


def parts_of(sizes: Sizes) -> list[Part]:
    """The (pp, sdp, tp) of each part of a model that a layout divides."""
    return list(itertools.product(*map(range, sizes)))


def member_name(member: str) -> str:
    return member.replace("/", "-")
