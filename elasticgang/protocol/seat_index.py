"""The seats of one record, by what members look up in each step.

Pure. A lookup takes a time that does not grow with the number of ranks, but for the first one of its kind: a rank takes
thousands of steps in a generation.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from elasticgang.protocol.packed_counts import PackedCounts
from elasticgang.protocol.record import LEARNER, SPARE, Model, Record, Seat


class SeatIndex:
    """Of `record`."""

    def __init__(self, record: Record) -> None:
        self.record = record

    @cached_property
    def parts(self) -> tuple[Model, ...]:
        """The model coordinates, in one order on all members."""
        layout = self.record.layout
        return tuple(itertools.product(range(layout.pp), range(layout.sdp), range(layout.tp)))

    def number_of(self, part: Model) -> int:
        """The index in `parts`."""
        layout, (pp, sdp, tp) = self.record.layout, part
        return (pp * layout.sdp + sdp) * layout.tp + tp

    @cached_property
    def counts_of_parts(self) -> PackedCounts:
        """Of the members of each part."""
        plan = self.record.plan
        return PackedCounts(len(self.parts), plan.size // len(self.parts))

    @cached_property
    def counts_of_learners(self) -> PackedCounts:
        return PackedCounts(len(self.learners), 1)

    @cached_property
    def learners(self) -> tuple[str, ...]:
        return self.record.members(LEARNER)

    @cached_property
    def has_spares(self) -> bool:
        return bool(self.record.members(SPARE))

    def of_part(self, part: Model | None) -> Sequence[Seat]:
        """The seats of a part of the model."""
        return () if part is None else self._of_parts.get(part, ())

    @cached_property
    def _of_parts(self) -> Mapping[Model, Sequence[Seat]]:
        found: dict[Model, list[Seat]] = defaultdict(list)
        for seat in self.record.seats:
            if (part := self.record.part_of(seat)) is not None:
                found[part].append(seat)
        return found

    def num_draining(self, part: Model) -> int:
        """How many members of a part are known to drain."""
        return self._num_draining[part]

    @cached_property
    def _num_draining(self) -> Counter[Model | None]:
        seats = map(self.record.seat, self.record.draining_members)
        return Counter(self.record.part_of(seat) for seat in seats if seat is not None)
