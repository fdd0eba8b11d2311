"""The script of a rank of the simulation, and where it pauses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticgang.errors import GangError, OperationalError, StateLostError
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.member_instructions import Do, Instruction
from elasticgang.protocol.member_lifecycle import Next, Routine

if TYPE_CHECKING:
    from elasticgang.simulation.rank import Rank

STARTING, REQUESTING, CONFIGURING, BETWEEN, DIVIDING, COMPUTING, REDUCING, VOTING, APPLYING, SAVING, MOVING = (
    "starting",
    "asking",
    "configuring",
    "between steps",
    "dividing",
    "computing",
    "reducing",
    "voting",
    "applying",
    "saving",
    "moving",
)


class _Boundary(Instruction):
    """A pause between two steps, of the script's own."""


class _Divide(Instruction):
    """The ranks sum who holds which runs of the step."""


class _Compute(Instruction):
    """A run of the step is to be computed."""


BOUNDARY, DIVIDE, COMPUTE = _Boundary(), _Divide(), _Compute()

_PHASE_AT: dict[type[Instruction], str] = {
    do.Configure: CONFIGURING,
    do.Move: MOVING,
    do.Heal: REDUCING,
    _Divide: DIVIDING,
    _Compute: COMPUTING,
    _Boundary: BETWEEN,
}


class Torn(Exception):
    """An optimizer has raised in the midst of an apply."""


def phase_at(instruction: Instruction, votes: bool, saves: bool) -> str:
    """Where a rank is while it has paused at `instruction`. Empty: it does not. `votes`: its last sum is of a vote.
    `saves`: it is of the save of the final state."""
    if instruction is Do.AWAIT_SUMS:
        return SAVING if saves else VOTING if votes else ""
    if instruction is Do.FINISH_REDUCTION:
        return REDUCING
    if instruction is Do.AWAIT_RECORD:
        return REQUESTING
    if instruction is Do.APPLY:
        return APPLYING
    if instruction is Do.LEAVE_GENERATION:
        return BETWEEN
    return _PHASE_AT.get(type(instruction), "")


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
                yield from compute(rank)
                yield from lifecycle.commit(1.0, (number_of(rank.name),), measures=False)
            except Torn:  # the script has caught it
                pass
            except GangError as aborted:
                error = aborted
            yield from lifecycle.end(error)
    except (StateLostError, OperationalError):
        yield from fail(rank, num_steps)
    yield from lifecycle.leave(num_steps, returned=True)


def number_of(name: str) -> float:
    """What a rank of this name sums in each step: no two ranks of a job the same."""
    return float(int.from_bytes(name.encode()[-6:], "big"))


def compute(rank: Rank) -> Routine[None]:
    """The slots of a step, in a job that keeps their gradients."""
    if rank.held is None:
        return
    rank.divide((yield DIVIDE) if rank.begin_runs() else None)
    while rank.held.due:
        yield COMPUTE


def fail(rank: Rank, num_steps: int) -> Routine[None]:
    """An exception ends the loop and the process."""
    rank.raised = True
    yield from rank.lifecycle.leave(num_steps, returned=False)
    raise OperationalError
