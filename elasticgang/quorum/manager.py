"""The manager of one rank: steps, votes, and the state's way through generation changes.

Everything here runs on the training thread.

Q1  A step is committed only through a vote in which every active member took part, prepared (R4).
Q2  Between a vote that failed and the next record this rank holds a prepared attempt and nothing else happens to it.
Q3  Applying communicates nothing; `torn` brackets it; a torn state is no state (R10).
Q4  What forward changes is kept aside when a step begins and put back when it is dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from elasticgang.errors import (
    EvictedError,
    GangError,
    InternalError,
    InvalidOperationError,
    OperationalError,
    PeerLostError,
    StateLostError,
    StepAborted,
)
from elasticgang.gang import Gang, Gangs
from elasticgang.layout import ParallelLayout
from elasticgang.quorum.commit import Action, Attempt, action
from elasticgang.quorum.decide import ACTIVE, LEARNER, MemberReport, Record, Seat
from elasticgang.quorum.membership import CONTROL, Membership

log = logging.getLogger("elasticgang")

_MAX_LOST_STEPS = 100
_NEVER_DROPPED = (InternalError, OperationalError, EvictedError, StateLostError)


class StateKeeper(Protocol):
    """The state room, as the manager needs it."""

    address: str

    def register(self, **objects: object) -> None: ...

    def begin(self, attempt: Attempt | None) -> None:
        """A step begins on the state of `attempt` (None: on none): keep aside what forward changes, serve healers."""

    def forward_done(self) -> None:
        """The step's forward has changed what it changes: serve that to learners too."""

    def restore(self) -> None:
        """The step is dropped: put back what forward changed."""

    def hold(self) -> AbstractContextManager[None]:
        """While the state is changed: no healer reads; those that do are waited for, up to a limit, then dropped."""

    def heal(self, sources: Sequence[str], attempt: Attempt, cancelled: Callable[[], bool] = ...) -> bool:
        """Load the state of `attempt` from one of the peers at `sources`. Gives up waiting for a source to begin its
        step once `cancelled`."""

    def fetch_after(
        self, sources: Sequence[str], attempt: Attempt, cancelled: Callable[[], bool] = ...
    ) -> Callable[[], None] | None:
        """What the forward of the step on `attempt` has changed at one of `sources`, as a call that loads it here."""

    def close(self) -> None: ...


class Reducer(Protocol):
    """Something that reduces gradients, such as `DistributedDataParallel`."""

    def contribute(self) -> None:
        """If this rank's backward has reduced nothing in this step, start to reduce what it has accumulated."""

    def finish(self) -> None:
        """Wait for what `contribute` started. Raises nothing: a poisoned gang shows in the vote."""

    def drop(self, *, rebuild: bool) -> None:
        """Forget the step's gradients. `rebuild`: an exception left it in an unknown state."""


@dataclass(frozen=True)
class _Pending:
    attempt: Attempt
    apply: tuple[Callable[[], None], ...]


@dataclass(frozen=True)
class Share:
    """Which part of a step's slots falls to this rank: part `index` of `count`; a learner has none."""

    index: int
    count: int


class Step:
    """One try at one step. Used as `with step:`."""

    def __init__(self, manager: QuorumManager, index: int) -> None:
        self._manager = manager
        self.index = index
        self.generation = manager.generation
        self.share = manager._share()
        self.committed = False
        self.voted = False
        self.closed = False
        self._gangs = manager.gangs

    def __repr__(self) -> str:
        return f"Step(index={self.index}, generation={self.generation}, share={self.share})"

    def check(self) -> None:
        """Leave a lost step early. Raises StepAborted when the generation has ended."""
        if self._manager.poisoned:
            raise StepAborted(f"step {self.index} is lost: {self._manager.error}")

    def contribute(self) -> None:
        """For a rank without slots: reduce its zeros now, at the place in the program where the others' backward waits
        for them, so that collectives of the script's own may follow."""
        self._manager._contribute()

    def __enter__(self) -> Step:
        self._manager._begin(self)
        self._gangs.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._gangs.__exit__(kind, error, traceback)
        self.closed = True
        return self._manager._end(self, error)


class QuorumManager:
    """This rank's part in the job. Made by `elasticgang.join`; for the training thread only."""

    def __init__(
        self, membership: Membership, keeper: StateKeeper, layout: ParallelLayout, device: torch.device
    ) -> None:
        self.layout = layout
        self.device = device
        self._membership = membership
        self._keeper = keeper
        self._reducers: list[Reducer] = []
        self._step: Step | None = None
        self._tip: Attempt | None = None
        self._committed = Attempt(0, 0)
        self._pending: _Pending | None = None
        self._active: set[str] = set()
        self._entered = 0
        self._record: Record | None = None
        self._holds: tuple[int, int, int] | None = None
        self._regroup = True
        self._failure: Exception | None = None
        self._torn = False
        self._registered = False
        self._left = False

    # -- what the user sees

    @property
    def member(self) -> str:
        """This incarnation's id, unique in the job for ever."""
        return self._membership.member

    @property
    def gangs(self) -> Gangs:
        """A snapshot for the present generation; the gang objects keep their identity over generations."""
        return self._membership.gangs

    @property
    def generation(self) -> int:
        """The generation entered last; 0 before the first."""
        return self._entered

    @property
    def committed_steps(self) -> int:
        return self._committed.step

    @property
    def tip(self) -> Attempt | None:
        """The (step, generation) that this rank's state holds; None while it holds none."""
        return self._tip

    @property
    def num_active(self) -> int:
        """Members that take part in the votes of the present generation."""
        return len(self._active)

    @property
    def is_leader(self) -> bool:
        """Whether this rank does what one rank does: the active member of the lowest rank. After the loop, as of the
        last generation."""
        record = self._record
        if record is None or not self._active:
            return False
        return min(self._active, key=lambda member: record.plan.ranks[member]) == self.member

    @property
    def reduction(self) -> Gang:
        """The gang of `gangs.dp` that only gradients use."""
        return self._membership.reduction

    @property
    def error(self) -> GangError | None:
        return self._membership.error

    @property
    def poisoned(self) -> bool:
        """Whether the present generation is over for this rank: nothing of it can commit any more."""
        return self._membership.error is not None

    def register_state(self, **objects: object) -> None:
        """Name what makes up the training state: modules, optimizers, and objects with `state_dict()` and
        `load_state_dict()`. The same names on every rank, before the first step.

        Raises:
            TypeError: an object has no such methods.
        """
        self._keeper.register(**objects)
        self._registered = True

    def report_error(self, error: Exception) -> None:
        """Let the present step fail on every rank without ending the generation, for an error that is this rank's
        alone (a loss that is not finite, say). The step is tried again."""
        self._failure = error

    def steps(self, num_steps: int) -> Iterator[Step]:
        """Yield the next step until `num_steps` are committed; the same one again when it did not commit.

        Blocks between steps while a generation is agreed, and while this rank is a spare.

        Raises:
            OperationalError: 100 tries in a row were lost.
            StateLostError: nobody holds the committed state any more.
        """
        if self._reducers and not self._registered:
            raise InvalidOperationError("name the training state with `register_state` before the first step")
        if self._left:
            raise InvalidOperationError("this rank has left the job; there is one loop over `steps` to a job")
        lost = 0
        try:
            while True:
                if self._regroup or self.poisoned:
                    self._enter()
                if self._committed.step >= num_steps and self._tip is not None:
                    break
                if self._committed.step >= num_steps:
                    self._enter()  # without state: the job ends without this rank, or somebody still has it
                    continue
                step = Step(self, self._committed.step)
                yield step
                if not step.closed:
                    raise InvalidOperationError(f"step {step.index} was not used; write `with step:` in the loop")
                lost = 0 if self._committed.step > step.index else lost + 1
                if lost >= _MAX_LOST_STEPS:
                    raise OperationalError(f"step {step.index} was lost {lost} times in a row; the last: {self.error}")
        finally:
            self.leave(finished=self._committed.step >= num_steps and self._tip is not None)

    def leave(self, finished: bool = False) -> None:
        """Take part no more; the others go on without this rank. Idempotent."""
        if not self._left:
            self._left = True
            self._membership.leave(finished)
            self._keeper.close()

    # -- what the train room uses

    @property
    def step(self) -> Step:
        """The step under way. Raises InvalidOperationError outside `with step:`."""
        if self._step is None:
            raise InvalidOperationError("there is no step under way; use this inside `with step:`")
        return self._step

    def add_reducer(self, reducer: Reducer) -> None:
        self._reducers.append(reducer)

    def commit(self, weight: float, apply: Callable[[float], None]) -> bool:
        """Vote on the step under way and, when it is committed, call `apply(total weight)` on the reduced gradients.

        Returns when the step's fate is known, through a generation change if need be: True when this rank's state
        holds the step.
        """
        step = self.step
        if step.voted:
            raise InvalidOperationError(f"step {step.index} was voted on before; there is one `optim.step` in a step")
        step.voted = True
        step.committed = self._commit(step, weight, apply)
        return step.committed

    # -- one step

    def _begin(self, step: Step) -> None:
        if self._step is not None:
            raise InvalidOperationError(f"step {self._step.index} is still under way")
        self._step, self._failure = step, None
        self._keeper.begin(self._tip)

    def _end(self, step: Step, error: BaseException | None) -> bool:
        """Close the step. Returns whether `error` belongs to a lost step and is dropped with it."""
        self._step = None
        lost = self.poisoned or isinstance(error, GangError) or self.generation != step.generation
        dropped = isinstance(error, Exception) and not isinstance(error, _NEVER_DROPPED)
        dropped = dropped and lost and not step.committed
        if not step.committed:
            for reducer in self._reducers:
                reducer.drop(rebuild=error is not None)
            if error is None or dropped:
                self._keeper.restore()
        if error is None and not step.voted and not self.poisoned:
            raise InvalidOperationError(f"step {step.index} ended without `optim.step`, so that nothing can commit it")
        if dropped and isinstance(error, GangError) and not self.poisoned:
            self._membership.poison(error)
        return dropped

    def _commit(self, step: Step, weight: float, apply: Callable[[float], None]) -> bool:
        self._keeper.forward_done()
        self._contribute()
        if self._tip is None and not self.poisoned:
            self._heal()
        for reducer in self._reducers:
            reducer.finish()
        attempt = Attempt(step.index + 1, self.generation)
        after = self._after()
        try:
            total, num_failed = self._total_weight(weight)
            if num_failed:  # known to all before anybody is prepared, so that nobody can roll it forward
                return False
            if total <= 0:  # the same on every rank, so that all raise and none has voted
                raise InvalidOperationError(f"the weights of step {step.index} sum to {total:g} over all ranks")
            if self._tip is not None and after is not None:
                self._pending = _Pending(attempt, (lambda: apply(total), after))
            passed = self._vote(attempt)
        except GangError:
            if self._pending is None:
                return False  # not prepared: it did not vote, so nobody committed
            self._enter()
            return self._tip == attempt
        if not passed:
            self._pending = None
            return False
        return self._passed(attempt)

    def _contribute(self) -> None:
        for reducer in self._reducers:
            reducer.contribute()

    def _passed(self, attempt: Attempt) -> bool:
        self._committed = attempt
        self._membership.committed(*attempt)  # before applying: who dies in the act must not take this with it
        if self._pending is not None:
            self._apply()
        else:
            self._tip = None
        return self._tip == attempt

    def _total_weight(self, weight: float) -> tuple[float, int]:
        """The sum of the weights and the number of ranks that failed, before the vote: a step in doubt must be
        applicable without those who died."""
        if self.poisoned:
            raise StepAborted("the step is lost")
        active = self.member in self._active
        mine = [weight if active else 0.0, float(active and self._failure is not None)]
        total, num_failed = self._membership.sum("root", mine)
        return total / (self.layout.tp * self.layout.pp), int(num_failed)  # ranks of one tp or pp gang share samples

    def _vote(self, attempt: Attempt) -> bool:
        """One round over all seats. Learners take part, so that all know when they become active, but do not vote."""
        record = self._membership.record
        assert record is not None
        learners = [seat.member for seat in record.seats if seat.status == LEARNER]
        voter = self.member in self._active
        failed = float(voter and self._pending is None)
        joins = float(self._membership.join_noticed)
        whole = [float(member == self.member and self._pending is not None) for member in learners]
        check = [1.0, float(attempt.step), float(attempt.generation)]
        result = self._membership.sum(CONTROL, [failed, joins, *check, *whole])
        size = result[2]
        if result[3:5] != [size * value for value in check[1:]]:
            error = InternalError(f"the ranks voted on different attempts: mine is {attempt}, the sums are {result}")
            self._membership.poison(PeerLostError(str(error)))
            raise error
        if result[0] == 0.0:
            self._active.update(member for member, flag in zip(learners, result[5:], strict=True) if flag)
        self._regroup = self._regroup or result[1] > 0.0
        return result[0] == 0.0

    def _apply(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        self._torn, self._tip = True, None
        with self._keeper.hold():
            for act in pending.apply:
                act()
        self._torn, self._tip = False, pending.attempt

    def _heal(self) -> None:
        """Load the committed state. On failure this rank stays a learner, and tries again in the next step."""
        if self._keeper.heal(self._sources(), self._committed, lambda: self.poisoned):
            self._tip, self._torn = self._committed, False

    def _after(self) -> Callable[[], None] | None:
        """How this rank's state gets what forward changed in this step: by its own forward, or, for a learner, which
        ran none, from those that did; before the vote, since they may die after it. None: it cannot."""
        if self.member in self._active:
            return lambda: None
        if self._tip is None or self.poisoned:
            return None
        return self._keeper.fetch_after(self._sources(), self._tip, lambda: self.poisoned)

    def _sources(self) -> list[str]:
        """Addresses of the members that hold this rank's part of the state."""
        record = self._membership.record
        assert record is not None
        mine = record.model_coordinates(self.member)
        return [
            seat.address
            for seat in record.seats
            if seat.member in self._active
            and seat.member != self.member
            and record.model_coordinates(seat.member) == mine
        ]

    # -- from generation to generation

    def _enter(self) -> None:
        self._membership.enter(self._report, self._act)
        self._regroup = False

    def _report(self) -> MemberReport:
        return MemberReport(
            id=self.member,
            local_rank=self._membership.local_rank,
            address=self._keeper.address,
            tip=self._tip,
            pending=None if self._pending is None else self._pending.attempt,
            holds=self._holds,
            entered=self._entered,
            active=self.member in self._active,
        )

    def _act(self, record: Record, seat: Seat) -> None:
        """Bring this rank's state to what `record` says is committed."""
        if record.lowered:
            raise StateLostError(f"generation {record.generation} goes back to a checkpoint, and this job has none")
        pending = None if self._pending is None else self._pending.attempt
        todo = action(self._tip, pending, record.committed)
        if todo is Action.APPLY:
            self._apply()
        self._pending = None
        if todo is Action.HEAL or seat.status == LEARNER:
            # D4: before the first committed step, an active seat is where the state is taken from.
            fresh = seat.status == ACTIVE and record.committed.step == 0
            if fresh and self._torn:
                raise StateLostError("the only state left was torn while the first step was applied")
            self._tip = record.committed if fresh else None
        self._committed = record.committed
        self._entered, self._record = record.generation, record
        self._active = set(record.members(ACTIVE))
        self._holds = None
        if seat.member in record.plan.ranks:
            self._holds = record.model_coordinates(self.member)

    def _share(self) -> Share | None:
        """The replica groups whose seats are all active divide the slots; inside one, its `sdp` ranks do."""
        record = self._membership.record
        assert record is not None
        seated = Counter(
            record.plan.coordinates(member)["rdp"] for member in self._active if member in record.plan.ranks
        )
        whole = sorted(rdp for rdp, num_active in seated.items() if num_active == self.layout.unit)
        coordinates = record.plan.coordinates(self.member)
        if coordinates["rdp"] not in whole:
            return None
        index = whole.index(coordinates["rdp"]) * self.layout.sdp + coordinates["sdp"]
        return Share(index, len(whole) * self.layout.sdp)
