"""Whether the stages of a pipeline have all that was saved, where the stages of another one have saved it.

Pure. A rank that loads its part knows the names of all that there is, and which of these its own stage has. In the
first step after that the ranks sum what they know, in two rounds: how many names there are, and which stage has which.

COVERAGE-1  A name that no stage has is an error on every rank. Otherwise a part of the model would be lost without a
    word.
COVERAGE-2  Nothing is judged unless a rank of each stage knows: one that has healed from a peer does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.shortened import shortened


@dataclass(frozen=True)
class Coverage:
    """`names`: of all that was saved, in one order on all ranks. `present`: those that this rank's stage has."""

    names: tuple[str, ...]
    present: frozenset[str]


def first_round(coverage: Coverage | None, stage: int, num_stages: int) -> list[float]:
    """What this rank knows, in the first round: how many names there are, and whether it knows, by stages."""
    known = [float(coverage is not None and number == stage) for number in range(num_stages)]
    return [0.0 if coverage is None else float(len(coverage.names)), *known]


def num_names(sums: Sequence[float]) -> int:
    """How many names there are, by the sums of the first round; 0: nothing is judged (COVERAGE-2)."""
    total, *known = sums
    return round(total / sum(known)) if all(known) else 0


def second_round(coverage: Coverage | None, num: int) -> list[float]:
    """Which of the `num` names this rank's stage has; no numbers if nothing is judged."""
    if coverage is None or not num:
        return [0.0] * num
    return [float(name in coverage.present) for name in coverage.names]


def left_out(coverage: Coverage | None, layout: ParallelLayout, sums: Sequence[float]) -> str | None:
    """Why the layout cannot take the state, by the sums of the second round (COVERAGE-1); None if it can."""
    absent = [number for number, num_ranks in enumerate(sums) if not num_ranks]
    if not absent:
        return None
    named = f"{len(absent)} of {len(sums)} names"
    if coverage is not None:
        named = shortened([coverage.names[number] for number in absent], 1)
    return f"no stage of the layout ({layout.sizes}) has {named}, which the state has that was loaded"
