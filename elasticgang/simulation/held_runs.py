"""The runs of a step that a rank of the simulation has computed, as `train/kept_gradients.py` keeps gradients."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from elasticgang.protocol.slot_division import Basis, Part, holding
from elasticgang.simulation.invariants import Model, State, Violation

NUM_RUNS = 6  # in a step

Source = tuple[State | None, Model]  # what a gradient was computed on; a torn state is none (MEMBER-3)


@dataclass
class HeldRuns:
    """`firm`, `loose`: the runs whose gradients it has, and what these are of. `due`: those that it computes yet.
    `num_done`: how many it has computed in this try."""

    num_loose: int = 0
    basis: Basis | None = None
    firm: dict[int, Source] = field(default_factory=dict)
    loose: dict[int, Source] = field(default_factory=dict)
    due: deque[int] = field(default_factory=deque)
    num_done: int = 0

    @property
    def sources(self) -> dict[int, Source]:
        return {**self.firm, **self.loose}

    def begin(self, basis: Basis | None, *, is_first: bool) -> None:
        """A try of a step begins. `is_first`: of its generation."""
        if not is_first or self.basis is None or not self.basis.allows(basis):
            self.drop()
        self.basis, self.due, self.num_done = basis, deque(), 0

    def message(self, group: int, *, is_active: bool) -> list[float]:
        return holding(NUM_RUNS, group, self.firm, self.loose) if is_active else holding(NUM_RUNS, group)

    def take(self, part: Part) -> None:
        """This rank's group has `part`."""
        if not (set(self.firm).isdisjoint(part.kept) or set(self.firm) <= set(part.kept)):
            raise Violation(f"DIVISION-4: a sum of the runs {list(self.firm)} is kept in part, as {part.kept}")
        if not set(part.kept) <= self.sources.keys():
            raise Violation(f"DIVISION-3: {part.kept} are kept, but {list(self.sources)} are held")
        self.firm = {run: source for run, source in self.sources.items() if run in part.kept}
        self.loose = {}
        self.due = deque(part.due)

    def compute(self, source: Source) -> None:
        """The next run that is due is finished."""
        self.loose[self.due.popleft()] = source
        self.num_done += 1
        if len(self.loose) > self.num_loose:
            oldest = next(iter(self.loose))
            self.firm[oldest] = self.loose.pop(oldest)

    def drop(self) -> None:
        self.firm, self.loose, self.basis = {}, {}, None
