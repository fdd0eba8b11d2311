"""One simulated generation: the members at its rendezvous, and the rounds of its collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import SPARE, Record
from elasticgang.simulation.invariants import State

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A rank's contribution to the reduction of a step. `share`: index and count of its part of the slots; None for a
    learner."""

    attempt: Attempt
    state: State | None
    active: frozenset[str]
    share: tuple[int, int] | None


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
    def sums(self) -> list[float]:
        return [sum(column) for column in zip(*self.parts.values(), strict=True)]


class SimulatedGeneration:
    """`broken`: one of its connections is broken, so that waiting members may fail. `severed`: incomplete rounds never
    complete."""

    def __init__(self, record: Record, hosts: Mapping[str, str]) -> None:
        self.record = record
        self.seated = tuple(seat.member for seat in record.seats if seat.status != SPARE)
        self.hosts = {hosts[member] for member in self.seated}
        self.arrived: set[str] = set()
        self.has_begun = False
        self.broken = False
        self.severed = False
        self.reductions: dict[int, Round[Part]] = {}
        self.sums: dict[tuple[str, int], Sum] = {}

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

    def last_save(self, number: int) -> Sum:
        """What each member says about its save of the final state (MANAGER-12)."""
        return self._sum("last save", number)

    def _sum(self, of: str, number: int) -> Sum:
        if (of, number) not in self.sums:
            self.sums[of, number] = Sum(-1 if self.severed else len(self.seated))
        return self.sums[of, number]

    def sever(self) -> None:
        """The network separates its members: incomplete rounds never complete."""
        self.broken = self.severed = True
        rounds: list[Round[Any]] = [*self.reductions.values(), *self.sums.values()]
        for round_ in rounds:
            if not round_.is_complete:
                round_.size = -1
