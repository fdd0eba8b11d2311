"""Division of the slots of a step that is tried again, when replica groups hold gradients of slots from an earlier try.

Pure. A *run* is the slots that a replica group computes at one time: one on each rank of its sdp gang. Each rank of the
group then has its own part of the run's gradient. Runs are numbered in the order of the slots.

DIVISION-1  Every run is in the part of exactly one replica group. It is kept there, or it is due from there.
DIVISION-2  The active groups divide the runs that no group keeps as evenly as possible.
DIVISION-3  A group keeps a run only if each of its ranks holds its part of it. A rank that has come from another group
    or from no group holds what it holds.
DIVISION-4  A group in which a rank would have to leave out a run that is in a sum with others keeps nothing.
DIVISION-5  A gradient is used only for the same step on the same committed attempt, in the same layout and at the same
    model coordinates, and never at step 0: before the first commit, one attempt may name the initial states of two
    ranks.

Every rank computes the parts of all groups, from the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import Model, Record

_NUM_COLUMNS = 4


@dataclass(frozen=True)
class Part:
    """The runs of one group, or the slots of one rank, ascending. `kept`: it has their gradients. `due`: it computes
    them."""

    kept: tuple[int, ...] = ()
    due: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(self.kept + self.due))


@dataclass(frozen=True)
class Basis:
    """What a gradient of a run depends on beside the run (DIVISION-5). `checkpoint`: of the record, if the job has gone
    back to one. `layout`: its number in the record."""

    step: int
    tip: Attempt
    checkpoint: str
    num_slots: int
    layout: int
    model: Model

    @classmethod
    def of(cls, step: int, tip: Attempt | None, record: Record, num_slots: int, member: str) -> Basis | None:
        """None: gradients of this step are not to be kept. `tip`: of the state of `member`."""
        if tip is None or not tip.step:
            return None
        return cls(step, tip, record.checkpoint, num_slots, record.in_force, record.model_coordinates(member))

    def allows(self, later: Basis | None) -> bool:
        """Whether a gradient on this basis is one on `later` too."""
        return self == later


def max_ahead(layout: ParallelLayout) -> int:
    """How many runs a rank may have finished that another rank of its group has not, if the ranks of a group need each
    other in each slot: one for each stage."""
    return layout.pp if layout.unit > 1 else 0


def holding(num_runs: int, group: int, firm: Collection[int] = (), loose: Collection[int] = ()) -> list[float]:
    """Says which runs a rank of `group` holds: `firm` in sums with others, `loose` apart, so that it can leave them
    out. The sum over all ranks is for `divide`."""
    in_sums, held = {*firm}, {*firm, *loose}
    is_held = [float(run in held) for run in range(num_runs)]
    return [
        *is_held,
        *(group * each for each in is_held),
        *(group * group * each for each in is_held),
        *(float(run in in_sums) for run in range(num_runs)),
    ]


def divide(sums: Sequence[float], unit: int, is_active: Sequence[bool]) -> list[Part]:
    """The part of each group. `sums`: of `holding` over all ranks. `unit`: the ranks of a group. `is_active`: which
    groups have slots.

    If ranks of two groups hold one run, no group keeps any: the sums do not say which other runs they hold.
    """
    num_runs = len(sums) // _NUM_COLUMNS
    kept = _kept(sums, num_runs, unit, is_active)
    taken = {run for of_group in kept for run in of_group}
    missing = [run for run in range(num_runs) if run not in taken]  # DIVISION-1
    active = [group for group, is_one in enumerate(is_active) if is_one]
    due: list[Sequence[int]] = [()] * len(is_active)
    for index, group in enumerate(active):
        due[group] = _even_part(missing, index, len(active))
    return [Part(tuple(of_group), tuple(due[group])) for group, of_group in enumerate(kept)]


def _kept(sums: Sequence[float], num_runs: int, unit: int, is_active: Sequence[bool]) -> list[list[int]]:
    """The runs that each group keeps."""
    kept: list[list[int]] = [[] for _ in is_active]
    broken: set[int] = set()
    for run in range(num_runs):
        holders, groups, squares, firm = map(int, sums[run::num_runs])
        if not holders:
            continue
        group = _group_of(holders, groups, squares)
        if group is None:  # DIVISION-1
            return [[] for _ in is_active]
        if is_active[group] and _is_whole(holders, unit):
            kept[group].append(run)
        elif firm:
            broken.add(group)
    return [[] if _is_broken(group, broken) else of_group for group, of_group in enumerate(kept)]


def _group_of(holders: int, groups: int, squares: int) -> int | None:
    """The group of all holders of a run; None if they are of several ones. The arguments are their number, and the sums
    of the numbers of their groups and of the squares of these: only equal numbers have so small a sum of squares."""
    return groups // holders if holders * squares == groups * groups else None


def _is_whole(holders: int, unit: int) -> bool:
    """DIVISION-3."""
    return holders == unit


def _is_broken(group: int, broken: Collection[int]) -> bool:
    """DIVISION-4. `broken`: the groups of which some ranks, and not all, hold a run in a sum with others."""
    return group in broken


def _even_part(runs: Sequence[int], index: int, count: int) -> Sequence[int]:
    """DIVISION-2."""
    return runs[index * len(runs) // count : (index + 1) * len(runs) // count]
