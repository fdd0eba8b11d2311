"""The manager of one rank: steps, votes, and the state's way through generation changes.

Everything here runs on the training thread.

MANAGER-1  A step is committed only through a vote in which every active member took part, prepared (RULE-4).
MANAGER-2  Between a vote that failed and the next record this rank holds a prepared attempt and nothing else happens to
    it.
MANAGER-3  Applying communicates nothing; `torn` brackets it; a torn state is no state (RULE-10).
MANAGER-4  A snapshot of what forward changes is taken when a step begins, and restored when the step is dropped.
MANAGER-5  The gradients of a prepared attempt are made ready to apply before this rank gets the outcome of its vote.

`member_state.py` decides what this rank knows and holds of the committed state.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
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
from elasticgang.gang import Gang, Gangs, compiled
from elasticgang.layout import ModelCoordinates, ParallelLayout
from elasticgang.member.drain import Drained
from elasticgang.member.rendezvous import CONTROL, Rendezvous
from elasticgang.member.seat_state import BuildFunction, SeatState
from elasticgang.process.status_page import ThreadState
from elasticgang.protocol.commit import Action, Attempt
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import MemberReport, Record, Seat
from elasticgang.testing import reached

log = logging.getLogger("elasticgang")

MAX_LOST_STEPS = 100
_NEVER_DROPPED = (InternalError, OperationalError, EvictedError, StateLostError)


class StateServer(Protocol):
    """The state room, as the manager needs it."""

    address: str

    def register(self, **objects: object) -> None: ...

    def unregister(self, names: Sequence[str]) -> None:
        """Forget the objects of these names."""

    def begin(self, attempt: Attempt | None) -> None:
        """A step begins on the state of `attempt` (None: on none): keep aside what forward changes, serve healers."""

    def forward_done(self) -> None:
        """The step's forward has changed what it changes: serve that to learners too."""

    def restore(self) -> None:
        """The step is dropped: put back what forward changed."""

    def exclusive(self) -> AbstractContextManager[None]:
        """While the state is changed: no healer reads; those that do are waited for, up to a limit, then dropped."""

    def heal(self, sources: Sequence[str], attempt: Attempt, cancelled: Callable[[], bool] = ...) -> bool:
        """Load the state of `attempt` from the peers at `sources`. Gives up once `cancelled`; what has come by then
        need not come again."""

    @property
    def num_received(self) -> int:
        """What a heal that has not ended has so far; grows from try to try."""

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

    def close(self) -> None:
        """Let go of what it reduces: this rank has left the seat that it was built for."""


class Step:
    """One try at one step. Used as `with step:`."""

    def __init__(self, manager: QuorumManager, index: int) -> None:
        self._manager = manager
        self.index = index
        self.generation = manager.generation
        self.share = manager._member_state.share(manager.layout)
        self.committed = False
        self.voted = False
        self.closed = False
        self._gangs = manager.gangs

    def __repr__(self) -> str:
        return f"Step(index={self.index}, generation={self.generation}, share={self.share})"

    def check(self) -> None:
        """Leave a lost step early. Raises StepAborted when the generation has ended."""
        self._manager._page.beat()
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
        self, rendezvous: Rendezvous, state_server: StateServer, layout: ParallelLayout, device: torch.device
    ) -> None:
        self.layout = layout
        self.device = device
        self._rendezvous = rendezvous
        self._state_server = state_server
        self._page, self._drain = rendezvous.page, rendezvous.drain
        self._reducers: list[Reducer] = []
        self._seat_state: SeatState | None = None
        self._seat_reducers: list[Reducer] = []
        self._step: Step | None = None
        self._member_state = MemberState(rendezvous.member)
        self._to_apply: tuple[Callable[[], None], ...] = ()  # what `MemberState.pending` names
        self._regroup = True
        self._failure: Exception | None = None
        self._registered = False
        self._left = False
        self._num_received = 0  # of `StateServer.num_arrived`, when the last try ended

    # -- what the user sees

    @property
    def member(self) -> str:
        """This incarnation's id, unique in the job for ever."""
        return self._rendezvous.member

    @property
    def gangs(self) -> Gangs:
        """A snapshot for the present generation; the gang objects keep their identity over generations."""
        return self._rendezvous.gangs

    @property
    def generation(self) -> int:
        """The generation entered last; 0 before the first."""
        return self._member_state.entered

    @property
    def committed_steps(self) -> int:
        """How many steps the job has committed, as far as this rank knows: the index of the next one."""
        return self._member_state.committed.step

    @property
    def tip(self) -> Attempt | None:
        """The (step, generation) that this rank's state holds; None while it holds none."""
        return self._member_state.tip

    @property
    def num_active(self) -> int:
        """Members that take part in the votes of the present generation."""
        return len(self._member_state.active)

    @property
    def num_members(self) -> int:
        """Ranks that have a seat in the present generation: active, learners and spares; 0 between two generations."""
        record = self._rendezvous.record
        return 0 if record is None else len(record.seats)

    @property
    def join_noticed(self) -> bool:
        """Whether a rank is known to wait for the next generation, which begins after this step then."""
        return self._rendezvous.join_noticed

    @property
    def is_leader(self) -> bool:
        """Whether this rank does what one rank does: the active member of the lowest rank. After the loop, as of the
        last generation."""
        record, active = self._member_state.record, self._member_state.active
        if record is None or not active:
            return False
        return min(active, key=lambda member: record.plan.ranks[member]) == self.member

    def reduction(self, family: str = "dp") -> Gang:
        """The gang of the ranks of `gangs.dp`, or of `gangs.rdp`, that only gradients use."""
        return self._rendezvous.reduction(family)

    @property
    def error(self) -> GangError | None:
        """What ended the present generation for this rank; None while it goes on."""
        return self._rendezvous.error

    @property
    def poisoned(self) -> bool:
        """Whether the present generation is over for this rank: nothing of it can commit any more."""
        return self._rendezvous.error is not None

    def register_state(self, **objects: object) -> None:
        """Name what makes up the training state: modules, optimizers, and objects with `state_dict()` and
        `load_state_dict()`. The same names on every rank, before the first step.

        Raises:
            TypeError: an object has no such methods.
        """
        self._state_server.register(**objects)
        self._registered = True

    def build(self, build: BuildFunction) -> SeatState:
        """For layouts in which what a rank trains depends on its seat: `build(seat)` makes the training state of the
        model coordinates `seat.pp`, `seat.sdp` and `seat.tp` (modules, optimizers, ...) and returns it by name, as
        `register_state` takes it. It is called before the first step, and again whenever this rank comes to other
        model coordinates; what it made is an attribute of what this returns:

            state = manager.build(lambda seat: {"model": Model(seat.tp), ...})
            for step in manager.steps(1000):
                with step:
                    ... state.model ...

        Values come from the peers, if there are any. Building communicates nothing, because the others train
        meanwhile: a collective of `manager.gangs` raises InvalidOperationError there. Rank, size and meshes of the
        gangs can be had.

        Raises:
            InvalidOperationError: called twice, or after the first step.
        """
        if self._seat_state is not None:
            raise InvalidOperationError("`build` was called before; one function builds all that depends on the seat")
        if self._member_state.entered or self._left:
            raise InvalidOperationError("call `build` before the first step")
        self._seat_state, self._registered = SeatState(build), True
        return self._seat_state

    def paused(self, what: str) -> AbstractContextManager[None]:
        """While this rank does something of its own that the others may have to wait for (an evaluation, a checkpoint):
        it does not count as hung, however long it takes. `what`: its name, for the log.

        --collective-timeout goes on: who waits for longer than that tries its step again.
        """
        log.info("rank %d is paused: %s", self._rendezvous.local_rank, what)
        return self._page.paused()

    def report_error(self, error: Exception) -> None:
        """Let the present step fail on every rank without ending the generation, for an error that is this rank's
        alone (a loss that is not finite, say). The step is tried again."""
        self._failure = error

    def steps(self, num_steps: int) -> Iterator[Step]:
        """Yield the next step until `num_steps` are committed; the same one again when it did not commit.

        Blocks between steps while a generation is agreed, and while this rank is a spare. A rank that is one when the
        job finishes ends here, with exit code 0: whoever comes past the loop holds the final state. Ends early, at a
        boundary between steps, once this rank is to go: see `leave`.

        Raises:
            SystemExit: so does one that was told to go by SIGTERM.
            OperationalError: 100 tries in a row were lost, in which no member was about to heal, or this one was and
                got nothing.
            StateLostError: nobody holds the committed state any more.
        """
        if self._reducers and not self._registered:
            raise InvalidOperationError(
                "name the training state with `register_state` or `build` before the first step"
            )
        if self._left:
            raise InvalidOperationError("this rank has left the job; there is one loop over `steps` to a job")
        lost = 0
        self._drain.in_loop = True
        try:
            while True:
                if self._is_leaving():
                    break
                is_done = self.committed_steps >= num_steps and self.tip is not None
                if not is_done and (self.poisoned or self._regroup):  # of those that are done, some may have gone
                    self._next_generation()
                if self.committed_steps >= num_steps and self.tip is not None:
                    break
                if self.committed_steps >= num_steps:
                    self._next_generation()  # without state: the job ends without this rank, or somebody still has it
                    continue
                self._build_for_seat()
                step = Step(self, self.committed_steps)
                yield step
                if not step.closed:
                    raise InvalidOperationError(f"step {step.index} was not used; write `with step:` in the loop")
                healed_on = self._healed_on()
                lost = 0 if self.committed_steps > step.index else lost + (not healed_on)
                if lost >= MAX_LOST_STEPS:
                    raise OperationalError(f"step {step.index} was lost {lost} times in a row; the last: {self.error}")
        except Drained:
            pass
        finally:
            finished = self.committed_steps >= num_steps and self.tip is not None
            self._drain.in_loop = False
            self._leave(finished, num_steps)
        if self._drain.by_signal and not finished:
            raise SystemExit(0)

    def leave(self) -> None:
        """Go, and do not come back: the loop over `steps` ends once the step under way, or the next, is done, and the
        others go on without this rank and without losing a step. It stays while it alone holds its part of the state
        and others have yet to heal it: learners, spares, and ranks that are being started. May be called from a signal
        handler and from any thread."""
        self._drain.request()

    @property
    def leave_requested(self) -> bool:
        """Whether this rank was told to leave, by `leave` or SIGTERM. It goes at the end of a step."""
        return self._drain.requested

    def _is_leaving(self) -> bool:
        return self._drain.requested and (self._drain.granted or not self.generation)

    def _leave(self, finished: bool, num_steps: int) -> None:
        if not self._left:
            self._left = True
            self._rendezvous.leave(finished, self._drain.granted, num_steps)
            self._state_server.close()

    # -- what the train room uses

    @property
    def step(self) -> Step:
        """The step under way. Raises InvalidOperationError outside `with step:`."""
        if self._step is None:
            raise InvalidOperationError("there is no step under way; use this inside `with step:`")
        return self._step

    def add_reducer(self, reducer: Reducer) -> None:
        self._reducers.append(reducer)

    def commit(
        self,
        weight: float,
        apply: Callable[..., None],
        measure: Callable[[], float] | None = None,
        *,
        prepare: Callable[..., None] | None = None,
    ) -> bool:
        """Vote on the step under way and, when it is committed, call `apply(total weight)` on the reduced gradients.

        `measure`: what to sum of the reduced gradients over the ranks of a replica group; `apply` gets the sum as its
        second argument. Given on every rank or on none.
        `prepare`: called with what `apply` is, once and before it, while the votes are on their way. It may change the
        gradients, and nothing else: the step may yet be dropped.

        Returns when the step's fate is known, through a generation change if need be: True when this rank's state
        holds the step.
        """
        step = self.step
        if step.voted:
            raise InvalidOperationError(f"step {step.index} was voted on before; there is one `optim.step` in a step")
        step.voted = True
        step.committed = self._commit(step, weight, apply, measure, prepare)
        return step.committed

    # -- one step

    def _begin(self, step: Step) -> None:
        if self._step is not None:
            raise InvalidOperationError(f"step {self._step.index} is still under way")
        self._step, self._failure = step, None
        self._page.begin_step(step.index)
        self._member_state.begin()
        self._state_server.begin(self.tip)

    def _end(self, step: Step, error: BaseException | None) -> bool:
        """Close the step. Returns whether `error` belongs to a lost step and is dropped with it."""
        self._step = None
        lost = self.poisoned or isinstance(error, GangError) or self.generation != step.generation
        dropped = isinstance(error, Exception) and not isinstance(error, _NEVER_DROPPED)
        dropped = dropped and lost and not step.committed
        if step.share is not None and error is None:
            self._page.step_done()
        if not step.committed:
            for reducer in self._reducers:
                reducer.drop(rebuild=error is not None)
            if error is None or dropped:
                self._state_server.restore()
        if error is None and not step.voted and not self.poisoned:
            raise InvalidOperationError(f"step {step.index} ended without `optim.step`, so that nothing can commit it")
        if dropped and isinstance(error, GangError) and not self.poisoned:
            self._rendezvous.poison(error)
        return dropped

    def _commit(
        self,
        step: Step,
        weight: float,
        apply: Callable[..., None],
        measure: Callable[[], float] | None,
        prepare: Callable[..., None] | None,
    ) -> bool:
        self._state_server.forward_done()
        self._contribute()
        if self.tip is None and not self.poisoned:
            self._heal()
        try:
            # What measures the reduced gradients waits for them; without, the round takes place beside theirs.
            early = None if measure is not None or self._member_state.only_heals else self._start_totals(weight, [])
        except GangError:
            early = None
        for reducer in self._reducers:
            reducer.finish()
        attempt = self._member_state.attempt()
        if self._member_state.only_heals:
            return self._make_active(attempt)
        after = self._after()
        try:
            asked = early or self._start_totals(weight, [] if measure is None else [measure()])
            total, num_failed, *sums = self._totals(asked)
            if num_failed:  # known to all before anybody is prepared, so that nobody can roll it forward
                return False
            if total <= 0:  # the same on every rank, so that all raise and none has voted
                raise InvalidOperationError(f"the weights of step {step.index} sum to {total:g} over all ranks")
            if self.tip is not None and after is not None:
                self._to_apply = (lambda: apply(total, *sums), after)
                self._member_state.prepare(attempt)
            voting = self._start_vote(attempt)
            if (
                prepare is not None and self._member_state.pending is not None
            ):  # MANAGER-5: before anything can go wrong
                prepare(total, *sums)
            passed = voting()
        except GangError:
            if self._member_state.pending is None:
                return False  # not prepared: it did not vote, so nobody committed
            self._next_generation()
            return self.tip == attempt
        return passed and self._passed(attempt)

    def _make_active(self, attempt: Attempt) -> bool:
        """MEMBER-5 of `member_state.py`. Nothing is prepared, so nothing can be in doubt."""
        with contextlib.suppress(GangError):
            self._start_vote(attempt)()
        return False

    def _contribute(self) -> None:
        for reducer in self._reducers:
            reducer.contribute()

    def _passed(self, attempt: Attempt) -> bool:
        applies = self._member_state.passed(attempt)
        self._rendezvous.committed(*attempt)  # before applying: who dies in the act must not take this with it
        reached("commit_recorded")
        if applies:
            self._apply()
        return self.tip == attempt

    def _start_totals(self, weight: float, measured: Sequence[float]) -> Callable[[], list[float]]:
        """Begin what `_totals` ends."""
        if self.poisoned:
            raise StepAborted("the step is lost")
        active = self._member_state.is_active
        fails = self._member_state.fails or (active and self._failure is not None)
        return self._rendezvous.start_sum("root", [weight if active else 0.0, float(fails), *measured])

    def _totals(self, asked: Callable[[], list[float]]) -> list[float]:
        """The sum of the weights, the number of ranks that failed, and the sums of what was measured, before the vote:
        a step in doubt must be applicable without those who died."""
        total, num_failed, *sums = asked()
        if self.poisoned:  # the gradients, maybe
            raise StepAborted("the step is lost")
        num_groups = self.gangs.root.size // self.layout.unit  # whose gradients are the same
        ranks_of_sample = self.layout.tp * self.layout.pp
        reached("totals_received")
        return [total / ranks_of_sample, num_failed, *(each / num_groups for each in sums)]

    def _start_vote(self, attempt: Attempt) -> Callable[[], bool]:
        """One round over all seats. What is returned waits for it, and tells whether it passed."""
        draining = self._drain.requested
        ballot = self._member_state.ballot(attempt, self._rendezvous.join_noticed, draining, self._page.successors)
        voting = self._rendezvous.start_sum(CONTROL, ballot)

        def wait() -> bool:
            votes = voting()
            reached("votes_received")
            try:
                count = self._member_state.count(attempt, votes, draining)
            except InternalError as error:
                self._rendezvous.poison(PeerLostError(str(error)))
                raise
            self._regroup = self._regroup or count.regroups
            self._drain.vote_counted(draining=draining, leaves=count.leaves)
            return count.passed

        return wait

    def _apply(self) -> None:
        attempt = self._member_state.begin_apply()
        with contextlib.ExitStack() as held:
            with self._page.in_thread_state(ThreadState.WAITING):
                held.enter_context(self._state_server.exclusive())
            held.enter_context(self._page.in_thread_state(ThreadState.USER_CODE))
            for act in self._to_apply:
                act()
        self._member_state.end_apply(attempt)
        reached("applied")

    def _heal(self) -> None:
        """Load the committed state. On failure this rank stays a learner, and tries again in the next step."""
        reached("healing")
        with self._page.in_thread_state(ThreadState.WAITING):
            healed = self._state_server.heal(self._sources(), self._member_state.committed, lambda: self.poisoned)
        if healed:
            self._member_state.healed()
            self._rendezvous.healed()
            reached("healed")

    def _healed_on(self) -> bool:
        """Whether the try that has ended served a heal that takes longer than a generation lives. Healers alone see
        whether one gets on: those that do not end by themselves."""
        had_arrived, self._num_received = self._num_received, self._state_server.num_received
        return self._member_state.awaits_learners if self._member_state.is_active else self._num_received > had_arrived

    def _after(self) -> Callable[[], None] | None:
        """How this rank's state gets what forward changed in this step: by its own forward, or, for a learner, which
        ran none, from those that did; before the vote, since they may die after it. None: it cannot."""
        if self._member_state.is_active:
            return lambda: None
        if self.tip is None or self.poisoned:
            return None
        with self._page.in_thread_state(ThreadState.WAITING):
            return self._state_server.fetch_after(self._sources(), self.tip, lambda: self.poisoned)

    def _sources(self) -> list[str]:
        """Addresses of the members that hold this rank's part of the state."""
        record = self._rendezvous.record
        assert record is not None
        mine = record.model_coordinates(self.member)
        return [
            seat.address
            for seat in record.seats
            if seat.member in self._member_state.active
            and seat.member != self.member
            and record.model_coordinates(seat.member) == mine
        ]

    # -- from generation to generation

    def _next_generation(self) -> None:
        self._rendezvous.next_generation(self._report, self._act)
        self._regroup = False
        if compiled.drop_stale():
            self._page.forget_steps()  # the next one may take long: it compiles

    def _build_for_seat(self) -> None:
        """Build what there is not yet, or is of other model coordinates. Between steps alone, so that a step's objects
        are the same ones throughout."""
        built, record = self._seat_state, self._member_state.record
        assert record is not None
        part = ModelCoordinates(*record.model_coordinates(self.member))
        if built is None or built.is_for(part):
            return
        self._page.forget_steps()
        with self._state_server.exclusive():  # no healer reads what goes
            self._state_server.unregister(built.clear())
            for reducer in self._seat_reducers:
                reducer.close()
                self._reducers.remove(reducer)
        others = list(self._reducers)
        with self._page.paused(), self._rendezvous.forbid_collectives():
            objects = built.make(part)
        self._seat_reducers = [reducer for reducer in self._reducers if reducer not in others]
        self._state_server.register(**objects)

    def _report(self) -> MemberReport:
        return self._member_state.report(self._rendezvous.local_rank, self._state_server.address, self._drain.requested)

    def _act(self, record: Record, seat: Seat) -> None:
        """Bring this rank's state to what `record` says is committed."""
        reached("record_received")
        if self._member_state.action_for(record) is Action.APPLY:
            self._apply()
        self._to_apply = ()
        self._member_state.enter(record, seat)
