"""The manager of one rank: what a training script sees of it. Everything here runs on the training thread.

`member_lifecycle.py` decides what the rank does, `driver.py` carries it out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from elasticgang.errors import GangError, InvalidOperationError, StepAborted
from elasticgang.gang import Gang, Gangs
from elasticgang.layout import ParallelLayout
from elasticgang.member.driver import MemberDriver
from elasticgang.member.interfaces import Reducer, Rendezvous, StateServer
from elasticgang.member.seat_state import BuildFunction, SeatState
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_lifecycle import Next

log = logging.getLogger("elasticgang")


class Step:
    """One try at one step. Used as `with step:`."""

    def __init__(self, manager: QuorumManager, index: int) -> None:
        self._manager = manager
        self.index = index
        self.generation = manager.generation
        self.share = manager._state.share(manager.layout)
        self.committed = False
        self.closed = False
        self._gangs = manager.gangs

    def __repr__(self) -> str:
        return f"Step(index={self.index}, generation={self.generation}, share={self.share})"

    def check(self) -> None:
        """Leave a lost step early. Raises StepAborted when the generation has ended."""
        self._manager._rendezvous.page.beat()
        if self._manager.poisoned:
            raise StepAborted(f"step {self.index} is lost: {self._manager.error}")

    def contribute(self) -> None:
        """For a rank without slots: reduce its zeros now, at the place in the program where the others' backward waits
        for them, so that collectives of the script's own may follow."""
        self._manager._driver.contribute()

    def __enter__(self) -> Step:
        manager = self._manager
        manager._driver.run(manager._driver.lifecycle.begin())
        manager._step = self
        self._gangs.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        manager = self._manager
        self._gangs.__exit__(kind, error, traceback)
        self.closed, manager._step = True, None
        return manager._driver.run(manager._driver.lifecycle.end(error))


class QuorumManager:
    """This rank's part in the job. Made by `elasticgang.join`; for the training thread only."""

    def __init__(
        self, rendezvous: Rendezvous, state_server: StateServer, layout: ParallelLayout, device: torch.device
    ) -> None:
        self.layout = layout
        self.device = device
        self._rendezvous = rendezvous
        self._state_server = state_server
        self._driver = MemberDriver(rendezvous, state_server)
        self._state = self._driver.lifecycle.state
        self._step: Step | None = None
        self._registered = False

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
        return self._state.entered

    @property
    def committed_steps(self) -> int:
        """How many steps the job has committed, as far as this rank knows: the index of the next one."""
        return self._state.committed.step

    @property
    def tip(self) -> Attempt | None:
        """The (step, generation) that this rank's state holds; None while it holds none."""
        return self._state.tip

    @property
    def num_active(self) -> int:
        """Members that take part in the votes of the present generation."""
        return len(self._state.active)

    @property
    def num_members(self) -> int:
        """Ranks that have a seat in the present generation: active, learners and spares; 0 between two generations."""
        record = self._rendezvous.record
        return 0 if record is None else len(record.seats)

    @property
    def join_noticed(self) -> bool:
        """Whether a rank is known to wait for the next generation, which begins after this step then."""
        return 0 < self.generation == self._rendezvous.observe().joining

    @property
    def is_leader(self) -> bool:
        """Whether this rank does what one rank does: the active member of the lowest rank. After the loop, as of the
        last generation."""
        record, active = self._state.record, self._state.active
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
        if self._driver.seat_state is not None:
            raise InvalidOperationError("`build` was called before; one function builds all that depends on the seat")
        if self._state.entered or self._driver.lifecycle.has_left:
            raise InvalidOperationError("call `build` before the first step")
        self._driver.seat_state, self._registered = SeatState(build), True
        return self._driver.seat_state

    def paused(self, what: str) -> AbstractContextManager[None]:
        """While this rank does something of its own that the others may have to wait for (an evaluation, a checkpoint):
        it does not count as hung, however long it takes. `what`: its name, for the log.

        --collective-timeout goes on: who waits for longer than that tries its step again.
        """
        log.info("rank %d is paused: %s", self._rendezvous.local_rank, what)
        return self._rendezvous.page.paused()

    def report_error(self, error: Exception) -> None:
        """Let the present step fail on every rank without ending the generation, for an error that is this rank's
        alone (a loss that is not finite, say). The step is tried again."""
        self._driver.lifecycle.report_error()

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
        driver, lifecycle, drain = self._driver, self._driver.lifecycle, self._rendezvous.drain
        if driver.reducers and not self._registered:
            raise InvalidOperationError(
                "name the training state with `register_state` or `build` before the first step"
            )
        if lifecycle.has_left:
            raise InvalidOperationError("this rank has left the job; there is one loop over `steps` to a job")
        drain.in_loop = True
        returned = False
        try:
            while (what := driver.run(lifecycle.pass_boundary(num_steps))) is not Next.LEAVE:
                if what is not Next.STEP:
                    continue
                step = Step(self, self.committed_steps)
                yield step
                if not step.closed:
                    raise InvalidOperationError(f"step {step.index} was not used; write `with step:` in the loop")
            returned = True
        finally:
            drain.in_loop = False
            driver.run(lifecycle.leave(num_steps, returned=returned))

    def leave(self) -> None:
        """Go, and do not come back: the loop over `steps` ends once the step under way, or the next, is done, and the
        others go on without this rank and without losing a step. It stays while it alone holds its part of the state
        and others have yet to heal it: learners, spares, and ranks that are being started. May be called from a signal
        handler and from any thread."""
        self._rendezvous.drain.request()

    @property
    def leave_requested(self) -> bool:
        """Whether this rank was told to leave, by `leave` or SIGTERM. It goes at the end of a step."""
        return self._rendezvous.drain.requested

    # -- what the train room uses

    @property
    def step(self) -> Step:
        """The step under way. Raises InvalidOperationError outside `with step:`."""
        if self._step is None:
            raise InvalidOperationError("there is no step under way; use this inside `with step:`")
        return self._step

    def add_reducer(self, reducer: Reducer) -> None:
        self._driver.reducers.append(reducer)

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
        step.committed = self._driver.commit(weight, apply, measure, prepare)
        return step.committed
