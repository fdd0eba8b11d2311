"""One simulated generation: the members at its rendezvous, and the rounds of its collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import SPARE, Record
from elasticgang.protocol.sum_route import sum_route
from elasticgang.simulation.held_runs import Source
from elasticgang.simulation.invariants import Model, State

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A rank's contribution to the reduction of a step. `share`: index and count of its part of the slots; None for a
    learner. `runs`: those whose gradients are in it, in a job that keeps them."""

    attempt: Attempt
    state: State | None
    active: frozenset[str]
    share: tuple[int, int] | None
    model: Model
    runs: Mapping[int, Source] | None


class Round(Generic[T]):
    """One collective over all seats: `parts` by member. It completes when all connected members have added theirs. Each
    member then reads the outcome in its own move, or fails."""

    __slots__ = ("parts", "size")

    def __init__(self, size: int) -> None:
        self.parts: dict[str, T] = {}
        self.size = size

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.size


class Sum(Round[tuple[float, ...]]):
    """A vote, or totals. The first rank of an agent, of several, gives the outcome to the agent's other ranks."""

    __slots__ = ("_first_of", "_published")

    def __init__(self, size: int, first_of: Mapping[str, str]) -> None:
        """`first_of`: of each member."""
        super().__init__(size)
        self._first_of = first_of
        self._published: set[str] = set()  # first ranks that have the outcome

    def has_outcome(self, member: str) -> bool:
        """Whether `member` can read it (SUMS-1)."""
        first = self._first_of[member]
        is_alone = len(set(self._first_of.values())) == 1
        return self.is_complete and (is_alone or member == first or first in self._published)

    def read(self, member: str) -> list[float]:
        """`member` reads the outcome."""
        self._published.add(member)
        return [sum(column) for column in zip(*self.parts.values(), strict=True)]


class SimulatedGeneration:
    """`broken`: one of its connections is broken, so that waiting members may fail. `severed`: incomplete rounds never
    complete. `num_done`: by round and member, the runs that it has computed."""

    def __init__(self, record: Record, hosts: Mapping[str, str]) -> None:
        self.record = record
        self.seated = tuple(seat.member for seat in record.seats if seat.status != SPARE)
        self.hosts = {hosts[member] for member in self.seated}
        members = {rank: member for member, rank in record.plan.ranks.items()}
        firsts = {member: sum_route(record, rank).local[0] for rank, member in members.items()}
        self._first_of = {member: members[first] for member, first in firsts.items()}
        self.arrived: set[str] = set()
        self.has_begun = False
        self.broken = False
        self.severed = False
        self.reductions: dict[int, Round[Part]] = {}
        self.sums: dict[tuple[str, int], Sum] = {}
        self.num_done: dict[tuple[int, str], int] = {}

    @property
    def is_gathered(self) -> bool:
        return len(self.arrived) == len(self.seated) and (self.has_begun or not self.severed)

    def reduction(self, number: int) -> Round[Part]:
        if number not in self.reductions:
            self.reductions[number] = Round(-1 if self.severed else len(self.seated))
        return self.reductions[number]

    def totals(self, number: int) -> Sum:
        return self._sum("totals", number)

    def vote(self, number: int) -> Sum:
        return self._sum("vote", number)

    def division(self, number: int) -> Sum:
        """What each member says about the runs that it holds."""
        return self._sum("division", number)

    def last_save(self, number: int) -> Sum:
        """What each member says about its save of the final state (MANAGER-12)."""
        return self._sum("last save", number)

    def _sum(self, of: str, number: int) -> Sum:
        if (of, number) not in self.sums:
            self.sums[of, number] = Sum(-1 if self.severed else len(self.seated), self._first_of)
        return self.sums[of, number]

    def sever(self) -> None:
        """The network separates its members: incomplete rounds never complete."""
        self.broken = self.severed = True
        rounds: list[Round[Any]] = [*self.reductions.values(), *self.sums.values()]
        for round_ in rounds:
            if not round_.is_complete:
                round_.size = -1
