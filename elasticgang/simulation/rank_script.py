"""The script of a rank of the simulation, and where it pauses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticgang.errors import GangError, OperationalError, StateLostError
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.member_instructions import Do, Instruction
from elasticgang.protocol.member_lifecycle import Next, Routine

if TYPE_CHECKING:
    from elasticgang.simulation.rank import Rank

STARTING, REQUESTING, CONFIGURING, BETWEEN, REDUCING, VOTING, APPLYING, SAVING, MOVING = (
    "starting",
    "asking",
    "configuring",
    "between steps",
    "reducing",
    "voting",
    "applying",
    "saving",
    "moving",
)


class _Boundary(Instruction):
    """A pause between two steps, of the script's own."""


BOUNDARY = _Boundary()


class Torn(Exception):
    """An optimizer has raised in the midst of an apply."""


def phase_at(instruction: Instruction, votes: bool, saves: bool) -> str:
    """Where a rank is while it has paused at `instruction`. Empty: it does not. `votes`: its last sum is of a vote.
    `saves`: it is of the save of the final state."""
    match instruction:
        case do.Configure():
            return CONFIGURING
        case do.Move():
            return MOVING
        case do.Heal() | Do.FINISH_REDUCTION:
            return REDUCING
        case Do.AWAIT_SUMS:
            return SAVING if saves else VOTING if votes else ""
        case Do.AWAIT_RECORD:
            return REQUESTING
        case Do.APPLY:
            return APPLYING
    return BETWEEN if instruction in (BOUNDARY, Do.LEAVE_GENERATION) else ""


def train(rank: Rank, num_steps: int) -> Routine[None]:
    """A loop over `manager.steps`."""
    lifecycle = rank.lifecycle
    try:
        while True:
            yield BOUNDARY
            what = yield from lifecycle.pass_boundary(num_steps)
            if what is Next.LEAVE:
                break
            if what is not Next.STEP:
                continue
            yield from lifecycle.begin()
            if rank.reports_error:
                lifecycle.report_error()
            error = None
            try:
                yield from lifecycle.commit(1.0, measures=False)
            except Torn:  # the script has caught it
                pass
            except GangError as aborted:
                error = aborted
            yield from lifecycle.end(error)
    except (StateLostError, OperationalError):
        yield from fail(rank, num_steps)
    yield from lifecycle.leave(num_steps, returned=True)


def fail(rank: Rank, num_steps: int) -> Routine[None]:
    """An exception ends the loop and the process."""
    yield from rank.lifecycle.leave(num_steps, returned=False)
    raise OperationalError
