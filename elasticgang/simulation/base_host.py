"""What every host of the simulation has: its ranks, and how they and its agent reach each other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elasticgang.protocol.agent_events import (
    Committed,
    Event,
    Exited,
    MemberLeft,
    RecordRequested,
    ScriptRaised,
)
from elasticgang.protocol.record import PROTOCOL
from elasticgang.simulation.rank import Rank

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster


class BaseHost:
    """`mismatch`: what about it is not as the job is: "job", "layout" or "protocol". `num_seats`: how many it requests;
    None: one for each of its ranks."""

    def __init__(self, cluster: Cluster, name: str, num_ranks: int, mismatch: str) -> None:
        self.name = self.home = name
        self.mismatch = mismatch
        self.job = "another job" if mismatch == "job" else "job"
        self.layout = cluster.layout if mismatch != "layout" else replace(cluster.layout, min_replicas=2)
        self.protocol = PROTOCOL + (mismatch == "protocol")
        self.num_ranks = num_ranks
        self.num_spares = min(cluster.setting.num_spares, num_ranks - 1)
        self.num_seats = num_ranks - self.num_spares if self.num_spares else None
        self.alive = True
        self.ranks: list[Rank] = []
        self.num_exited = 0
        self.num_started = [0] * num_ranks

    def add_rank(self, cluster: Cluster, local_rank: int, agent: str) -> Rank:
        self.num_started[local_rank] += 1
        number = self.num_started[local_rank]
        name = f"{self.name}{local_rank}" + (f".{number}" if number > 1 else "")
        rank = Rank(name, self.name, local_rank, agent)
        self.ranks.append(rank)
        cluster.ranks[name] = rank
        cluster.actors.append(rank)
        return rank

    @staticmethod
    def next_event(rank: Rank) -> Event | ScriptRaised:
        """The next message of `rank`, as its agent reads it."""
        kind, what = rank.sent.popleft()
        if kind == "ask":
            report, layout, broken = what
            return RecordRequested(rank.name, report, layout, broken)
        if kind == "committed":
            return Committed(rank.name, what)
        if kind == "raised":
            return ScriptRaised(rank.name)
        return MemberLeft(rank.name, *what)

    def remove_rank(self, rank: Rank, at_s: float) -> Exited:
        self.ranks.remove(rank)
        self.num_exited += 1
        return Exited(
            rank.name,
            rank.status,
            draining=rank.draining,
            joined=True,
            raised=rank.raised,
            step=self.num_exited,
            at_s=at_s,
        )

    def send_to_ranks(self, members: Collection[str], kind: str, what: Any) -> None:
        for rank in self.ranks:
            if rank.alive and rank.name in members:
                rank.received.append((kind, what))
