"""The manager of one rank: the API of a training script. All of it runs on the training thread.

`member_lifecycle.py` decides what the rank does. `driver.py` carries that out.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from elasticgang.environment import checkpoint_dir
from elasticgang.errors import GangError, InvalidOperationError, NotSupportedError
from elasticgang.gang import Gang, Gangs
from elasticgang.gang.bans import Ban
from elasticgang.integers import integer_from, required_integer
from elasticgang.layout import ParallelLayout
from elasticgang.member.driver import MemberDriver
from elasticgang.member.interfaces import Checkpoints, Mover, Objects, Reducer, Rendezvous, SlotKeeper, StateServer
from elasticgang.member.seat_state import BuildFunction, NameFunction, SeatState
from elasticgang.member.step import Step
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.form import Form
from elasticgang.protocol.member_lifecycle import Next
from elasticgang.protocol.record import Record

log = logging.getLogger("elasticgang")


class QuorumManager:
    """This rank's part in the job. `elasticgang.join` makes it. Use it on the training thread only."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        state_server: StateServer,
        layout: ParallelLayout,
        device: torch.device,
        make_checkpoints: Callable[[str, int | None, float | None, int], Checkpoints] | None = None,
        mover: Mover | None = None,
    ) -> None:
        self._layout = layout
        self.device = device
        self._rendezvous = rendezvous
        self._state_server = state_server
        self._driver = MemberDriver(rendezvous, state_server, device)
        self._driver.mover = mover
        self._state = self._driver.lifecycle.state
        self._step: Step | None = None  # the last one
        self._stepped = 0  # the generation of the last step
        self._registered = False
        self.slot_keeper: SlotKeeper | None = None
        self._make_checkpoints = make_checkpoints
        rendezvous.ban(Ban.NO_STEP)  # BAN-1

    # -- for scripts

    @property
    def layout(self) -> ParallelLayout:
        """The layout in force, without its `fallback`: that of the generation that this rank entered last. Before the
        first one, the layout that the script has declared."""
        record = self._state.record
        return self._layout.options[0] if record is None else record.layout

    @property
    def layouts(self) -> tuple[ParallelLayout, ...]:
        """The layouts of the job in order of preference: the declared one and its `fallback`, each without a
        `fallback`."""
        return self._layout.options

    @property
    def member(self) -> str:
        """The id of this incarnation. No other incarnation of the job ever has it."""
        return self._rendezvous.member

    @property
    def gangs(self) -> Gangs:
        """The gangs of the present generation. Each gang object stays the same object across generations."""
        return self._rendezvous.gangs

    @property
    def generation(self) -> int:
        """The generation that this rank entered last; 0 before the first."""
        return self._state.entered

    @property
    def committed_steps(self) -> int:
        """The number of steps that this rank knows to be committed. It is the index of the next step."""
        return self._state.committed.step

    @property
    def tip(self) -> Attempt | None:
        """The committed attempt that this rank's state holds; None while it holds no whole state. That can be so right
        after `optim.step` has returned True, if the next generation has begun meanwhile, in another layout."""
        return self._state.tip

    @property
    def num_active(self) -> int:
        """The number of members that vote in the present generation."""
        return len(self._state.active)

    @property
    def num_members(self) -> int:
        """The number of active ranks, learners and spares in the present generation; 0 between two generations."""
        record = self._rendezvous.record
        return 0 if record is None else len(record.seats)

    @property
    def join_noticed(self) -> bool:
        """Whether a rank waits to join. The next generation then begins after the step under way."""
        return 0 < self.generation == self._rendezvous.observe().joining

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the active member of the lowest rank, which logs and saves for the job. After the loop:
        as of the last generation."""
        state = self._state
        return state.record is not None and state.active_members.first == self.member

    def reduction(self, family: str = "dp") -> Gang:
        """The gang for gradients over the ranks of `gangs.dp`, or of `gangs.rdp`."""
        return self._rendezvous.reduction(family)

    @property
    def error(self) -> GangError | None:
        """The error that ended the present generation for this rank; None while the generation goes on."""
        return self._rendezvous.error

    @property
    def poisoned(self) -> bool:
        """Whether the present generation has ended for this rank. Nothing of it can commit any more."""
        return self._rendezvous.error is not None

    def register_state(self, **objects: object) -> None:
        """Register the training state by name: modules, optimizers, and objects with `state_dict()` and
        `load_state_dict()`. Call it before the first step, with the same names on every rank, for modules of the same
        parameters and optimizers of the same class and groups (see `steps`).

        Raises:
            TypeError: an object has no such methods, or the extra state of a module cannot be sent.
            ValueError: a name is registered already, or has a colon.
            InvalidOperationError: an object has parameters or is an optimizer, and the layout has a `fallback`: make it
                in the function given to `build`.
        """
        for name, item in objects.items():
            if self._layout.fallback and (isinstance(item, torch.nn.Module) or hasattr(item, "param_groups")):
                raise InvalidOperationError(
                    f"{name!r} depends on the layout, which may change: make it in the function given to `build`"
                )
        self._state_server.register(**objects)
        self._registered = True

    def is_registered(self, item: object) -> bool:
        """Whether `item` is part of the training state, by `register_state` or `build`."""
        return self.objects.is_registered(item)

    def unreduced(self, parameters: Sequence[Tensor]) -> list[int]:
        """The numbers of those of `parameters` whose gradients no wrapped module reduces; none, if no module is
        wrapped, and the script may have summed them by a collective of its own, or is alone."""
        reducers = self._driver.reducers
        if not reducers and (self.num_collectives or self.gangs.dp.size == 1):
            return []
        if not all(isinstance(reducer, torch.nn.Module) for reducer in reducers):
            return []
        known = self._reduced()
        return [number for number, each in enumerate(parameters) if id(each) not in known]

    def reduced_before(self, parameters: Sequence[Tensor]) -> list[int]:
        """The numbers of those of `parameters` whose gradients a wrapped module reduces already."""
        known = self._reduced()
        return [number for number, each in enumerate(parameters) if id(each) in known]

    def _reduced(self) -> set[int]:
        return {id(each) for reducer in self._driver.reducers for each in reducer.reduced}

    def stages_of(self, parameter: Tensor) -> Sequence[int]:
        """The stages that have `parameter`, in ascending order, if a `PipelineParallel` has it as a tied one; ()
        otherwise."""
        return next(filter(None, (reducer.stages_of(parameter) for reducer in self._driver.reducers)), ())

    def build(self, build: BuildFunction, *, names: NameFunction | None = None) -> SeatState:
        """Register a function that makes the training state, for layouts in which the state depends on the seat.

        `build(seat)` makes the state of the model coordinates `seat.pp`, `seat.sdp` and `seat.tp` (modules,
        optimizers, ...) and returns it by name, as `register_state` takes it. The manager calls it before the first
        step, and again whenever this rank gets other model coordinates or the job takes another layout
        (`ParallelLayout(fallback=)`); `manager.layout` is then the new one. Each returned object is an attribute of the
        result:

            state = manager.build(lambda seat: {"model": Model(seat.tp), ...})
            for step in manager.steps(1000):
                with step:
                    ... state.model ...

        The values come from the peers, if there are any. `build` must not communicate, because the other ranks train
        meanwhile: a collective of `manager.gangs` raises InvalidOperationError in it. It may read the ranks, sizes and
        meshes of the gangs. No module may be sharded over the replica groups (the gangs `rdp`, `dp` and `root`), as
        `fully_shard` without `mesh` does it: `steps` raises ValueError then.

        A tensor is known by its name in its module. Where a stage of a pipeline has other names than the whole model,
        or the same ones for other tensors, `names(seat, name)` returns the whole model's name of the parameter or
        buffer that the module calls `name`, and likewise of the key of an extra state, as `layers.0._extra_state`.
        State moves between layouts of other `pp` by these names.

        Raises:
            InvalidOperationError: it was called before, or the first step has begun. Nothing has changed.
        """
        if self._driver.seat_state is not None:
            raise InvalidOperationError("`build` was called before; one function builds all that depends on the seat")
        if self._state.entered or self._driver.lifecycle.has_left:
            raise InvalidOperationError("call `build` before the first step")
        self._driver.seat_state, self._registered = SeatState(build, names), True
        return self._driver.seat_state

    def checkpoints(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = 2,
    ) -> None:
        """Save the training state to `directory` whenever so many steps are committed, or so much time has passed,
        beside the training, and begin the job with the newest checkpoint there. Call it before the first step, alike on
        every rank.

        `directory`: the same one on all hosts, or a URL of fsspec, such as `s3://bucket/run`; by default that of
        `elasticgang run --checkpoint-dir`. A relative one is that of the working directory at this call.
        `every_seconds`: the time from the beginning of one save to that of the next; the next step then saves. `keep`:
        how many complete checkpoints are kept.

        The state after the last step of `steps` is always saved: the loop ends once that is on the disk, or has failed.
        So is the state with which the last ranks that hold some part of it leave, after SIGTERM or `leave`.

        A job that is started again goes on at the newest valid checkpoint, with any number of ranks, any division of
        DTensors, and any stages whose tensors have the names of the whole model (see `build`). A save that fails costs
        that save: a warning says why, and training goes on.

        Raises:
            ValueError: no directory is given, neither or both of `every_steps` and `every_seconds` are, or a number is
                too small or no integer.
            InvalidOperationError: it was called before, or the first step has begun.
            OperationalError: the directory cannot be written, or the URL cannot be listed. If ranks of this host had
                trained before this one started, that is a warning.
            NotSupportedError: what the URL needs is missing: `pip install 'elasticgang[fsspec]'`, and fsspec's package
                for that kind of store; or the URL names the memory of a process (`memory://`).
        """
        if (every_steps is None) == (every_seconds is None):
            raise ValueError("give one of `every_steps` and `every_seconds`.")
        for name, value in (("every_steps", every_steps), ("keep", keep)):
            if value is not None and integer_from(1, value) is None:
                raise ValueError(f"`{name}` must be an integer of at least 1, but is {value!r} instead.")
        if every_seconds is not None and not (math.isfinite(every_seconds) and every_seconds > 0):
            raise ValueError(f"`every_seconds` must be finite and greater than 0, but is {every_seconds} instead.")
        directory = directory if directory is not None else checkpoint_dir()
        if directory is None or not os.fspath(directory):
            raise ValueError("`directory` must be given, here or by `elasticgang run --checkpoint-dir`.")
        if self._driver.checkpoints is not None:
            raise InvalidOperationError("`checkpoints` was called before; a job has one directory of them")
        if self._state.entered or self._driver.lifecycle.has_left:
            raise InvalidOperationError("call `checkpoints` before the first step")
        if self._make_checkpoints is None:
            raise NotSupportedError("this manager was made without `elasticgang.join`, and has no checkpoints")
        self._driver.checkpoints = self._make_checkpoints(os.fspath(directory), every_steps, every_seconds, keep)
        self._driver.lifecycle.saves_last = True

    def paused(self, what: str) -> AbstractContextManager[None]:
        """A context in which this rank does not count as hung, however long it takes. Use it for work of this rank that
        the other ranks wait for, such as an evaluation or a checkpoint. `what`: its name, for the log.

        --collective-timeout still applies: a rank that waits longer than that tries its step again.
        """
        log.info("rank %d is paused: %s", self._rendezvous.local_rank, what)
        return self._rendezvous.page.paused()

    def report_error(self, error: Exception) -> None:
        """Fail the present step on every rank without ending the generation. Use it for an error of this rank alone,
        such as a loss that is not finite. All ranks try the step again.

        The other ranks learn of it by the vote: go on to the same collectives as they, and to `optim.step`, which
        returns False on every rank. Where an exception has left the loop over the slots, let it leave `with step:` and
        catch it there instead.
        """
        self._driver.lifecycle.report_error()
        if self._step is not None and self._step.is_open:
            self._step.has_failed = True

    def report(self, **numbers: float) -> None:
        """Show numbers of this rank's share of a step, such as `loss=` and `tokens=`, in `elasticgang status`, on the
        page and in the metrics. Of `tokens` these show the sum over the ranks a second, of any other name the mean
        over the ranks. It writes to shared memory and never waits: call it in every step.

        Raises:
            TypeError: a value is no number (a tensor: pass `loss.item()`).
            ValueError: a name is longer than 32 bytes, or there are more than 8 names.
        """
        for name, value in numbers.items():
            if not isinstance(value, int | float):
                kind = type(value).__name__
                raise TypeError(f"`{name}` must be an int or a float, but is of type `{kind}` instead.")
        for name, value in numbers.items():
            self._rendezvous.page.report(name, float(value))

    def steps(self, num_steps: int) -> Iterator[Step]:
        """Yield the next step until `num_steps` are committed. A step that did not commit is yielded again.

        There is one such loop to a job, also for several epochs, which `step.index` tells apart.

        It blocks between steps while the job changes its generation, and while this rank is a spare. After the loop
        this rank holds the final state, unless the loop ended early: it does at a boundary between steps once this
        rank drains (see `leave`).

        Raises:
            ValueError: `num_steps` is not an integer.
            SystemExit: with code 0, on a rank that is a spare when the job finishes, or that SIGTERM has drained.
            OperationalError: 100 attempts in a row were lost, without progress of a heal in between. On a rank without
                state: or 20 in which the ranks did not connect.
            StateLostError: no rank holds the committed state any more.
            MismatchError: this rank comes without state, and what it has registered, built or wrapped is of another
                form than that of the ranks with the same part of the model. Nothing of theirs has changed.
        """
        num_steps = required_integer("num_steps", num_steps)
        driver, lifecycle, drain = self._driver, self._driver.lifecycle, self._rendezvous.drain
        if driver.reducers and not self._registered:
            raise InvalidOperationError(
                "name the training state with `register_state` or `build` before the first step"
            )
        if self._layout.fallback and driver.seat_state is None:
            raise InvalidOperationError(
                "a layout with a `fallback` needs `build`, which makes the state for each layout"
            )
        if lifecycle.has_left:
            raise InvalidOperationError(
                "this rank has left the job: there is one loop over `steps` to a job. Give it the steps of all epochs, "
                "and tell the epoch by `step.index`"
            )
        drain.in_loop = True
        returned = False
        try:
            while (what := driver.run(lifecycle.pass_boundary(num_steps))) is not Next.LEAVE:
                if what is not Next.STEP:
                    continue
                step = Step(driver, self._rendezvous, self.keeper, is_first=self._stepped != self.generation)
                self._step, self._stepped = step, self.generation
                driver.reach_step()
                yield step
                if not step.closed:
                    raise InvalidOperationError(f"step {step.index} was not used; write `with step:` in the loop")
                driver.leave_step()
            returned = True
        finally:
            if not driver.is_forked:
                self._leave_loop(num_steps, returned=returned)

    def _leave_loop(self, num_steps: int, *, returned: bool) -> None:
        driver, lifecycle = self._driver, self._driver.lifecycle
        try:
            driver.run(lifecycle.leave(num_steps, returned=returned))  # a signal does not interrupt it
        finally:
            self._rendezvous.drain.in_loop = False
        driver.run(lifecycle.leave(num_steps, returned=returned))  # one that has come since its end

    def leave(self) -> None:
        """Drain this rank: its loop over `steps` ends after the step under way or the next one, and the other ranks go
        on without losing a step. A rank that alone holds its part of the state first waits until a learner, a spare or
        a starting rank has healed. Signal handlers and any thread may call this."""
        self._rendezvous.drain.request()

    @property
    def leave_requested(self) -> bool:
        """Whether this rank drains, because of `leave` or SIGTERM."""
        return self._rendezvous.drain.requested

    # -- for the package `train`

    @property
    def step(self) -> Step:
        """The step under way. Raises InvalidOperationError outside `with step:`."""
        if self._step is None or not self._step.is_open:
            raise InvalidOperationError("there is no step under way; use this inside `with step:`")
        return self._step

    @property
    def objects(self) -> Objects:
        """The training state, by `register_state` or `build`."""
        return self._state_server.registered.objects

    def empty(self, num: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """An uninitialized vector of `num` elements for gradients, by default on the CPU: there `reduction` need not
        copy it."""
        if device is None or device.type == "cpu":
            return self._rendezvous.empty(num, dtype)
        return torch.empty(num, dtype=dtype, device=device)

    def add_reducer(self, reducer: Reducer) -> None:
        self._driver.reducers.append(reducer)

    def is_turn_of(self, reducer: Reducer) -> bool:
        """Whether all reducers that were added before `reducer` have started their reductions of this step: a rank
        without slots starts them in this order, and in no other."""
        reducers = self._driver.reducers
        before = itertools.takewhile(lambda each: each is not reducer, reducers)
        return all(each.has_started for each in before)

    @property
    def is_reproducible(self) -> bool:
        """Whether gradients are added in one order: with `reduction="reproducible"`."""
        return any(reducer.is_reproducible for reducer in self._driver.reducers)

    def keeper(self) -> SlotKeeper | None:
        """What keeps the gradients of slots, if anything does.

        Raises:
            InvalidOperationError: there are further reducers, whose gradients of these slots would be lost.
        """
        if self.slot_keeper is not None and len(self._driver.reducers) > 1:
            raise InvalidOperationError(
                f"`keep=True` needs one wrapper for all gradients, but there are {len(self._driver.reducers)}: wrap "
                "one module, or leave `keep` out."
            )
        return self.slot_keeper

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over all ranks with a seat, before this rank's totals and vote of a step. Call it on
        every rank. Raises GangError: the generation has ended."""
        return self._rendezvous.start_sum(values)()

    @property
    def num_collectives(self) -> int:
        """How many collectives were started so far on the gangs of the script."""
        return self._rendezvous.num_collectives

    @property
    def record(self) -> Record | None:
        """The record of the present generation."""
        return self._rendezvous.record

    def commit(
        self,
        weight: float,
        apply: Callable[..., None],
        measure: Callable[[], Sequence[float]] | None = None,
        *,
        prepare: Callable[..., None] | None = None,
        numbers: Sequence[float] = (),
        names: int = 0,
        settings: Callable[[], Form] = tuple,
        rates: float = 0.0,
    ) -> bool:
        """Vote on the step under way and, when it is committed, call `apply(total weight)` on the reduced gradients.

        `measure`: returns numbers about this rank's reduced gradients, equally many on every rank. `apply` gets their
        sums over all ranks as further arguments. Pass it on every rank or on none.
        `prepare`: called once before `apply`, with the same arguments, while the votes cross the network. It may
        change the gradients and nothing else, because the step may still be dropped.
        `numbers`: equally many on every rank. `step.sums` has their sums over all ranks once the step is committed.
        `names`: stands for their names, below 2**32 (MANAGER-16). `rates`: for the learning rates (AGREEMENT-2).
        `settings`: returns what `apply` and `prepare` depend on beside the state (ALIKE-2). Other threads may call it
        until this returns.

        Returns once the step's fate is known, if need be after a generation change. True: this rank's state holds the
        step.
        """
        step = self.step
        if step.unread and not step.has_failed:  # STREAM-3
            raise InvalidOperationError(
                f"the loop over the slots of step {step.index} was left early, so that the states of the splits were "
                "not exchanged"
            )
        self._driver.check_coverage()
        try:
            step.committed = self._driver.commit(
                weight, apply, measure, prepare, numbers, names, step.taken, settings, rates
            )
        finally:  # BAN-1
            self._rendezvous.ban(Ban.COMMITTED if step.committed else Ban.DROPPED)
        step.sums = self._driver.lifecycle.sums if step.committed else ()
        return step.committed
