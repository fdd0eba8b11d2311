"""One attempt at one step, as a training script has it.

STEP-1  Samples are taken before the step is committed: the others do not know of later ones, and a loop over slots
    would raise StepAborted after a death, so that what follows it would be missing on this rank (as BAN-1).
STEP-2  Once a rank without slots has reduced its zeros, no backward of the step follows: its gradient would be in no
    sum, while its weight counts.
STEP-3  Once the step is committed, a loop over its slots goes on when a peer dies, and a rank that has none reduces
    nothing: the others do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from elasticgang.errors import InvalidOperationError, StepAborted
from elasticgang.gang.bans import Ban
from elasticgang.member.driver import MemberDriver
from elasticgang.member.interfaces import Rendezvous, SlotKeeper
from elasticgang.protocol.member_state import Share
from elasticgang.protocol.sample_positions import BatchShape


class Step:
    """One attempt at one step. Use it as `with step:`. `is_first`: of all attempts in its generation. `is_open`: it is
    under way."""

    def __init__(
        self,
        driver: MemberDriver,
        rendezvous: Rendezvous,
        keeper: Callable[[], SlotKeeper | None],
        *,
        is_first: bool,
    ) -> None:
        """`keeper`: returns what keeps the gradients of slots, if anything does."""
        state = driver.lifecycle.state
        self._driver, self._rendezvous, self._keeper = driver, rendezvous, keeper
        self.index, self.generation, self.is_first = state.committed.step, state.entered, is_first
        self.share = state.share()
        self._active = state.active_members
        self.num_slots: int | None = None  # of all ranks; `divide` sets it, or a loader
        self._part: tuple[Sequence[int], Sequence[int]] | None = None
        self.taken: set[tuple[BatchShape, int]] = set()  # the global batches of this step, each with its first position
        self.seeds: set[int] = set()  # of what has the slots of this step
        self.slot: int | None = None  # the number of the slot under way; the iteration over slots sets it
        self.unread: set[object] = set()  # the streams whose slots are not all read
        self._has_contributed = False  # STEP-2
        self.committed = False
        self.sums: tuple[float, ...] = ()  # of the numbers given to `QuorumManager.commit`, if the step is committed
        self.is_open = self.closed = False
        self.has_failed = False  # this rank has reported an error
        self._gangs = rendezvous.gangs

    def __repr__(self) -> str:
        return f"Step(index={self.index}, generation={self.generation}, share={self.share})"

    @property
    def shares(self) -> Sequence[Share | None]:
        """Of all ranks of the dp gang, as they were when the step began."""
        return self._active.shares

    def check(self) -> None:
        """Raise StepAborted if the generation has ended, so that the script leaves a lost step early."""
        self._rendezvous.page.beat()
        if (error := self._rendezvous.error) is not None and not self.committed:  # STEP-3
            raise StepAborted(f"step {self.index} is lost: {error}")

    def take_samples(self, shape: BatchShape) -> int:
        """The position of this step's first sample in the order of a global batch (POSITION-1). `GlobalBatch` calls it.

        Raises:
            InvalidOperationError: the step is committed (STEP-1).
            ValueError, MismatchError: as `SamplePositions.take` does.
        """
        if self.committed:
            raise InvalidOperationError(
                f"the slots of step {self.index} must be asked for before `optim.step`: afterwards a rank whose peer "
                "dies would leave the step, which is committed. Evaluate before `optim.step`, or take the slots of an "
                "evaluation by `batches.share(step.index, step.share)`, also of a loader's `batches`."
            )
        first = self._driver.samples.take(self.index, shape)
        self.taken.add((shape, first))
        self.seeds.add(shape.seed)
        return first

    def divide(self, num_slots: int) -> tuple[Sequence[int], Sequence[int]] | None:
        """The numbers of this rank's slots of `num_slots`: those that it computes, and those whose gradients it has
        kept from an earlier try. None: it computes those of `share`. `GlobalBatch` calls it, on every rank. Raises as
        `SlotKeeper.divide`."""
        if num_slots != self.num_slots:
            keeper = self._keeper()
            if keeper is not None and self.num_slots is not None:
                raise InvalidOperationError(
                    f"step {self.index} has slots of a batch of {self.num_slots} slots and of one of {num_slots}; use "
                    "one `GlobalBatch` in a step."
                )
            self.num_slots, self._part = num_slots, None
            if keeper is not None and (part := keeper.divide(self)) is not None:
                self._part = part.due, part.kept
        return self._part

    def end_slot(self) -> None:
        """The slot under way is finished; the iteration over slots calls it."""
        keeper = self._keeper()
        if keeper is not None and self.slot is not None and not self.committed:  # STEP-3
            keeper.end_slot(self.slot)

    def data_worker_lost(self, loss: dict[str, Any]) -> None:
        """A data worker of this rank is lost: the agent writes an event with the fields of `loss`. A loader calls it,
        from any thread, also after the step."""
        self._rendezvous.data_worker_lost(loss)

    def contribute(self) -> None:
        """Reduce this rank's gradients now. Call it on a rank without slots where the other ranks run backward: they
        wait for its zeros there, and the script's own collectives may follow."""
        if self.committed:  # STEP-3
            return
        self._has_contributed = True
        self._driver.contribute()

    def check_gradients(self) -> None:
        """A forward is about to begin, and then a backward. Raises InvalidOperationError: STEP-2; or
        MismatchError: ALIKE-3."""
        if self._has_contributed:
            raise InvalidOperationError(
                f"this rank's gradients of step {self.index} are reduced already, because a loop over slots has ended "
                "of which this rank had none: train on the slots of one `GlobalBatch` in a step, in one loop, and loop "
                "over those of an evaluation inside `torch.no_grad()`"
            )
        self._driver.comparison.compare_trained()

    def __enter__(self) -> Step:
        """Raises InvalidOperationError: it was entered before. Its samples would count as those of the next step."""
        if self.closed:
            raise InvalidOperationError(
                f"step {self.index} is over; write one `with step:` in the loop, which yields the next one"
            )
        self._driver.run(self._driver.lifecycle.begin())
        self.is_open = True
        self._rendezvous.ban(None)
        self._gangs.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._driver.is_forked:
            return False
        self._gangs.__exit__(kind, error, traceback)
        self._rendezvous.ban(Ban.NO_STEP)
        self.closed, self.is_open = True, False
        return self._driver.run(self._driver.lifecycle.end(error))
