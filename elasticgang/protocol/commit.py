"""Which attempt at a step is committed, decided at a generation change.

Pure: no clock, no socket, no torch. `next_record.py` asks; the members act on the answer through `action`.

A step number alone does not name a gradient: the same step may be tried in several generations, each time with other
ranks and another order of summation. An `Attempt` does.

COMMIT-1  If any member, dead or alive, committed an attempt, and a member that holds or has prepared it is present,
    then that attempt is the committed one.
COMMIT-2  All members that hold state after acting on one answer hold the same attempt.
COMMIT-3  The decision to roll forward is part of the record, so that it is agreed before anybody applies.
COMMIT-4  What was given up for good (a record that rolls back) does not come back, although it is higher than what
    followed: after the recorded attempt, only those of the recorded generation count.

Why COMMIT-1 holds: an attempt is committed only by a vote in which every active member took part, and a member votes
only once it is prepared. So when somebody may have committed `(s, g)`, every active member of `g` had it prepared, and
those whose state is whole still have; when one of them that is present has not, nobody can have committed it. To roll
forward what nobody committed does no harm, so members that cannot know are ignored: a torn member, which dropped the
attempt while it applied it, and a learner, unless only learners are left.
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
    """What one present member says of itself.

    `tip`: the committed attempt that its state holds; None when it holds none (new, torn, or still healing).
    `pending`: the attempt it has prepared and whose vote it does not know.
    `active`: it was to vote in the recorded generation.
    """

    tip: Attempt | None
    pending: Attempt | None
    active: bool


@dataclass(frozen=True)
class Fate:
    """`committed` is the truth from now on; `rolled_forward` says that it was pending until this decision."""

    committed: Attempt
    rolled_forward: bool


class Action(enum.Enum):
    """What a member does with its own state to reach the committed attempt."""

    KEEP = "keep"
    APPLY = "apply"
    HEAL = "heal"


def resolve(recorded: Attempt, generation: int, present: Collection[Standing], known: Iterable[Attempt] = ()) -> Fate:
    """Decide the fate of the attempt that the recorded `generation` may have left in doubt.

    `recorded` is the committed attempt of the record, `known` what agents have heard committed, from members that may
    have died since. Rules 1 and 3 of the design need no branch here: they are `action`.

    The caller sees to it that an active member of `generation` is among `present` while one lives, other than torn.
    """
    heard = [*(standing.tip for standing in present if standing.tip is not None), *known]
    highest = max((recorded, *(attempt for attempt in heard if attempt.generation == generation)))
    next_attempt = Attempt(highest.step + 1, generation)
    whole = [standing for standing in present if standing.tip is not None]
    prepared = [standing for standing in whole if standing.pending == next_attempt]
    if prepared and all(standing.pending == next_attempt for standing in whole if standing.active):
        return Fate(next_attempt, rolled_forward=True)
    return Fate(highest, rolled_forward=False)


def action(tip: Attempt | None, pending: Attempt | None, committed: Attempt) -> Action:
    """What a member with `tip` and `pending` does when `committed` is the truth. A pending attempt that is not
    applied is dropped, and its step tried again with the same samples. It is applied only to the state before it."""
    if tip == committed:
        return Action.KEEP
    if pending == committed and tip is not None and tip.step + 1 == committed.step:
        return Action.APPLY
    return Action.HEAL
