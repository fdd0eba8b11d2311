"""What a member's routines (`member_lifecycle.py`) yield to their driver, and what the driver tells them.

The driver carries out one instruction at a time and sends back its outcome: None where nothing else is said.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from elasticgang.errors import GangError
from elasticgang.layout import ParallelLayout
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import CheckpointRef, FormerState, Holder, MemberReport, Record, Seat
from elasticgang.protocol.values import value


class Observed(NamedTuple):
    """What other threads and processes have told this rank by now. `error`: what ended the present generation;
    `joining`: the newest generation that somebody waits to join; `draining`: this rank is asked to leave, `by_signal`
    or by its script; `num_successors`: as in `MemberState.ballot`; `connecting_s`: how long the last try to connect a
    generation took that was not connected; `has_timed_out`: it ended because this rank or another one had waited for
    the time limit; `ended_elsewhere`: because of what is known of another host."""

    error: GangError | None = None
    joining: int = 0
    draining: bool = False
    by_signal: bool = False
    is_job_over: bool = False
    num_successors: int = 0
    connecting_s: float = 0.0
    has_timed_out: bool = False
    ended_elsewhere: bool = False


@value(frozen=True)
class AbortNotice:
    """The agent's word that `generation` is over. It may come before this rank has entered it. `timed_out`,
    `is_elsewhere`: as of `EndCause`."""

    generation: int = 0
    reason: str = ""
    timed_out: bool = False
    is_elsewhere: bool = False

    def ends(self, generation: int) -> bool:
        return generation <= self.generation


class Instruction:
    """One thing for the driver to do."""


class Do(Instruction, enum.Enum):
    """Instructions without arguments."""

    CONTRIBUTE = "serve what forward has changed, and start to reduce what backward has accumulated"
    FINISH_REDUCTION = "wait for the reduction"
    AWAIT_SUMS = "wait for the sums of `StartSum`, which are the outcome"
    APPLY = "apply what `MakeReady` has made ready"
    REPORT_HEALED = "tell the agent that this rank has loaded the committed state"
    WARN_STAYS = "warn that this rank drains, but holds state that nobody else has"
    LEAVE_GENERATION = "end all groups, and wait until they have ended"
    AWAIT_RECORD = "wait for a record, a request to leave, or the end of the job; the outcome is the record or None"
    SAVE_LAST = (
        "save the final state, and wait for that up to a second; the outcome: is it being saved, and has it failed"
    )
    IS_SAVED = "whether a checkpoint of the final state is complete"
    DROP_SAVE = "give the save of the final state up, because another rank's share of it is missing"
    FIND_CHECKPOINT = "find the newest durable checkpoint that this rank can load; the outcome is its name or None"
    IS_SAVE_DUE = "whether all ranks of the generation save the state of this boundary"
    DIGEST_STATE = (
        "digest each tensor of the state that replicas have alike; the outcome: the digests, below 2**52, and a "
        "function that names the tensors with given numbers"
    )
    CLOSE = "end the comm processes and stop serving state"


@value(frozen=True)
class BuildSeat(Instruction):
    """Build the training state of these model coordinates, unless it is there. `layout`: the number of the layout that
    they are of."""

    coordinates: tuple[int, int, int]
    layout: int = 0


@value(frozen=True)
class KeepFormer(Instruction):
    """Keep the training state aside and serve it, before other state is built; None: drop what is kept. `is_dropped`:
    forward has changed it since, in a step that is not committed."""

    former: FormerState | None
    is_dropped: bool = False


@value(frozen=True)
class ServeState(Instruction):
    """The step `index` begins on the state of `tip`: keep aside what forward changes, and serve healers."""

    index: int
    tip: Attempt | None


@value(frozen=True)
class Heal(Instruction):
    """Load the state of `attempt` from the members of `sources`. The outcome: whether it is loaded, how much of it has
    arrived if not, or None if they all send it to others, and how many seconds it took."""

    sources: tuple[Seat, ...]
    attempt: Attempt


@value(frozen=True)
class LoadCheckpoint(Instruction):
    """Load the durable checkpoint `ref`. The outcome: whether it is loaded. Raises StateLostError: this rank has no
    directory of checkpoints. Raises CheckpointError: another checkpoint of this attempt is in its directory."""

    ref: CheckpointRef


@value(frozen=True)
class Move(Instruction):
    """Load this rank's part of the state of `attempt` from the members of `holders`, which keep the parts of `layout`.
    The outcome: whether it is loaded."""

    holders: tuple[tuple[Seat, Holder], ...]
    layout: ParallelLayout
    attempt: Attempt


@value(frozen=True)
class FetchForward(Instruction):
    """Get what forward has changed in the step on `attempt` from one of `sources`. The outcome: whether it is here."""

    sources: tuple[Seat, ...]
    attempt: Attempt


@value(frozen=True)
class StartSum(Instruction):
    """Start to sum `values` over `gang`: "root" for the totals of a step, "control" for a vote, "save" for what ranks
    say of the last save. `measures`: and what the optimizer measures of the reduced gradients."""

    gang: str
    values: tuple[float, ...]
    measures: bool = False


@value(frozen=True)
class SumState(Instruction):
    """Sum `values` over all seats at a boundary between steps. The outcome: the sums."""

    values: tuple[float, ...]


@value(frozen=True)
class ReportDifference(Instruction):
    """Tell the agent that the states of ranks differ after `step`, as was found in `generation`. `ends_job`: nobody can
    say which is right."""

    step: int
    generation: int
    text: str
    ends_job: bool = False


@value(frozen=True)
class MakeReady(Instruction):
    """Make the prepared gradients ready to be applied with the sum of the weights and of what was measured."""

    total: float
    measured: tuple[float, ...]


@value(frozen=True)
class ReportCommitted(Instruction):
    """Stamp `attempt` as committed; `announces`: and send it to the agent."""

    attempt: Attempt
    announces: bool


@value(frozen=True)
class EndStep(Instruction):
    """`is_dropped`: forget the gradients. `rebuilds`: an exception has left them in an unknown state. `restores`: put
    back what forward has changed. `is_computed`: this rank has computed its share."""

    is_dropped: bool
    rebuilds: bool
    restores: bool
    is_computed: bool


@value(frozen=True)
class Poison(Instruction):
    """End the present generation."""

    error: GangError


@value(frozen=True)
class Delay(Instruction):
    """Wait for `delay_s` before the next request, or until this rank is asked to leave or the job is over: `num` of
    `hosts`' generations in a row were not connected, the last because of `error`."""

    delay_s: float
    num: int
    hosts: str
    error: GangError | None


@value(frozen=True)
class SendRequest(Instruction):
    """Request the next generation's record. `error`: what ended the one before. `checkpoint`: the newest that this rank
    can load. `num_steps`: that the script takes. `model`: what the driver knows of the model, in words;
    empty if it depends on the seat. `saves`: which steps it saves, in words; empty if it saves none. `connected`: as in
    `RecordRequested`."""

    report: MemberReport
    error: GangError | None
    checkpoint: CheckpointRef | None = None
    num_steps: int = 0
    model: str = ""
    saves: str = ""
    connected: bool = True


@value(frozen=True)
class Configure(Instruction):
    """Configure the groups of `record` for `seat`. Raises GangError if the generation ends before it has begun."""

    record: Record
    seat: Seat


@value(frozen=True)
class ReportSpare(Instruction):
    record: Record


@value(frozen=True)
class SendLeft(Instruction):
    """Tell the agent that this rank takes part no more. `in_order`: at a boundary that the others come to as well;
    `by_script`: its script asked for it; `num_steps`: that it was to take. `raised`: an exception has left a step."""

    finished: bool
    in_order: bool
    by_script: bool
    num_steps: int
    raised: bool = False
