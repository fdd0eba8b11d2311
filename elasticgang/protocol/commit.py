"""Which attempt at a step is committed, decided at a generation change.

Pure: no clock, no socket, no torch. `recovery.py` calls `resolve`; the members act on its result through `action`.

A step number alone does not name a gradient: the same step may be tried in several generations, each time with other
ranks and another order of summation. An `Attempt` does.

COMMIT-1  If any member, dead or alive, committed an attempt, and a member that holds or has prepared it is present,
    then that attempt is the committed one.
COMMIT-2  All members that hold state after they acted on one record hold the same attempt.
COMMIT-3  The decision to roll forward is part of the record, so that it is agreed before anybody applies.
COMMIT-4  An attempt that a record rolled back is never committed again, although it is higher than what followed:
    beyond the recorded attempt, only attempts of the recorded generation count.

Why COMMIT-1 holds: an attempt is committed only by a vote in which every active member took part, and a member votes
only once it is prepared. The ballots go by way of other members, the first ranks of the hosts; who has a sum of some
has no outcome (SUMS-1, EXCHANGE-2). So if any member may have committed `(s, g)`, every active member of `g` had
prepared it, and those whose state is whole still have it prepared. If one that is present has not, no member can have
committed it. Rolling forward an attempt that no member committed does no harm, so members that cannot know are ignored:
a torn member, which dropped the attempt while it applied it, and a learner, unless only learners are left.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Attempt(NamedTuple):
    """`step` as computed in `generation`. Ordered by step, then generation.

    `step` counts committed steps: a tip of `Attempt(3, g)` means that three steps are in the state. The state before
    the first step is `Attempt(0, g)`, where `g` is the generation whose `rdp = 0` seats it was taken from.
    """

    step: int
    generation: int


class Standing(NamedTuple):
    """The state that one present member reports.

    `tip`: the committed attempt in its state; None without a whole state (new, torn, or healing).
    `pending`: the attempt that it has prepared and whose vote has failed or is not counted yet.
    `active`: whether it votes in the recorded generation.
    """

    tip: Attempt | None
    pending: Attempt | None
    active: bool


@dataclass(frozen=True)
class Fate:
    """`committed`: the committed attempt from now on. `rolled_forward`: it was in doubt until this decision."""

    committed: Attempt
    rolled_forward: bool


class Action(enum.Enum):
    """How a member brings its own state to the committed attempt."""

    KEEP = "keep"
    APPLY = "apply"
    HEAL = "heal"


def resolve(recorded: Attempt, generation: int, present: Collection[Standing], known: Iterable[Attempt] = ()) -> Fate:
    """Decide the fate of the attempt that the recorded `generation` may have left in doubt (COMMIT-1).

    `recorded`: the committed attempt of the record. `known`: attempts that agents know to be committed, from members
    that may have died since. Rules 1 and 3 of the design need no branch here: `action` implements them.

    The caller ensures that an active member of `generation` that is not torn is among `present`, while one lives.
    """
    reported = [*(standing.tip for standing in present if standing.tip is not None), *known]
    highest = max((recorded, *(attempt for attempt in reported if attempt.generation == generation)))  # COMMIT-4
    next_attempt = Attempt(highest.step + 1, generation)
    whole = [standing for standing in present if standing.tip is not None]
    prepared = [standing for standing in whole if standing.pending == next_attempt]
    if prepared and all(standing.pending == next_attempt for standing in whole if standing.active):
        return Fate(next_attempt, rolled_forward=True)  # COMMIT-3: the record contains it
    return Fate(highest, rolled_forward=False)


def action(tip: Attempt | None, pending: Attempt | None, committed: Attempt) -> Action:
    """How a member with `tip` and `pending` reaches `committed` (COMMIT-2). A pending attempt is applied only to the
    state right before it. Otherwise it is dropped, and its step is tried again with the same samples."""
    if tip == committed:
        return Action.KEEP
    if pending == committed and tip is not None and tip.step + 1 == committed.step:
        return Action.APPLY
    return Action.HEAL
