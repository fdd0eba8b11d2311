"""Division of the slots of a step that is tried again, when ranks hold gradients of slots from an earlier try.

Pure. A slot is a leaf of the summation tree here.

DIVISION-1  Every slot is in the part of exactly one rank. It is kept there, or it is due from there.
DIVISION-2  Every rank computes the parts of all ranks, from the same numbers.
DIVISION-3  The active ranks divide the slots that nobody holds as evenly as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticgang.train.partition import slots_of


@dataclass(frozen=True)
class Part:
    """The slots of one rank, ascending. `kept`: it has their gradients. `due`: it computes them."""

    kept: tuple[int, ...] = ()
    due: tuple[int, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(sorted(self.kept + self.due))


def holding(num_slots: int, rank: int, slots: Sequence[int]) -> list[float]:
    """Says that `rank` holds `slots`. The sum over all ranks is for `divide`."""
    held = set(slots)
    is_held = [float(slot in held) for slot in range(num_slots)]
    return is_held + [rank * each for each in is_held]


def divide(sums: Sequence[float], is_active: Sequence[bool]) -> list[Part]:
    """The part of each rank (DIVISION-2). `sums`: of `holding` over all ranks. `is_active`: which ranks have slots.

    If two ranks hold one slot, nobody keeps any: a rank has only the sums of whole nodes, so that it cannot drop one
    slot, and the others do not know which nodes it has.
    """
    num_slots = len(sums) // 2
    num_holders, ranks = sums[:num_slots], sums[num_slots:]
    kept: list[list[int]] = [[] for _ in is_active]
    missing = []
    for slot, (number, rank) in enumerate(zip(num_holders, ranks, strict=True)):
        if number == 1.0 and max(num_holders) == 1.0 and is_active[int(rank)]:
            kept[int(rank)].append(slot)
        else:
            missing.append(slot)  # DIVISION-1
    active = [rank for rank, is_one in enumerate(is_active) if is_one]
    due = {  # DIVISION-3
        rank: [missing[place] for place in slots_of(len(missing), index, len(active))]
        for index, rank in enumerate(active)
    }
    return [Part(tuple(of_rank), tuple(due.get(rank, ()))) for rank, of_rank in enumerate(kept)]
