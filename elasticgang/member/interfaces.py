"""The interfaces between the driver of a member (`driver.py`) and other packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from elasticgang.errors import GangError
from elasticgang.gang import Gang, Gangs
from elasticgang.gang.bans import Ban
from elasticgang.layout import ParallelLayout
from elasticgang.member.drain import Drain
from elasticgang.process.status_page import StatusPage
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.coverage import Coverage
from elasticgang.protocol.form import Form, FormOf
from elasticgang.protocol.member_instructions import Instruction, Observed
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import CheckpointRef, FormerState, Holder, Model, Record, Seat

if TYPE_CHECKING:
    from elasticgang.member.step import Step

_T = TypeVar("_T")


class Forms(Protocol):
    """Exchanges the forms of this rank and of its peers. `of`: the numbers that name a part of the model, for
    `FormOf.STATE`, or an attempt at a step."""

    def announce(self, what: FormOf, of: Sequence[int], form: Callable[[], Form]) -> None:
        """Answer peers that ask for the form of `what`, until `withdraw` or the next call. `form`: called on other
        threads, and returns the same always."""

    def withdraw(self, what: FormOf) -> None:
        """What was announced may change from now on."""

    def fetch(
        self, source: str, what: FormOf, of: Sequence[int], own: Form, cancelled: Callable[[], bool]
    ) -> Form | None:
        """The form that the peer at `source` has of `what`, or `own` if they are alike. None: it does not answer,
        `cancelled`, or it does not have it within a time limit; of the state it is waited for without one."""


class Objects(Protocol):
    """The objects that this rank's script has registered."""

    def is_registered(self, item: object) -> bool: ...

    def of_class(self, kind: type[_T]) -> list[_T]:
        """The objects of this class that are neither modules nor optimizers."""

    def without(self, parameters: Sequence[Tensor]) -> list[int]:
        """The numbers of those of `parameters` that are in nothing that is registered."""

    def changed_parameter(self) -> str | None:
        """The name of a parameter that was changed since the step began, or since it was dropped, if any."""

    def drop_gradients(self) -> None:
        """Set the gradients of what the registered optimizers train to None."""

    @property
    def optimizer_bytes(self) -> int:
        """The size of the state of optimizers on the host."""

    @property
    def model(self) -> str:
        """Names, shapes and dtypes of the registered parameters, in short."""

    @property
    def form(self) -> Form:
        """Of all objects. Read it before the first step, and when others are registered."""


class Small(Protocol):
    """The state that a step may change before its apply. `is_again`: the next step was begun before, and dropped."""

    is_again: bool

    def reach(self) -> None:
        """The script is about to get a step. The state of now is what a checkpoint of it has, or another layout."""

    def forget(self) -> None:
        """The next step is not one that was dropped: it is another one, or the state was loaded since."""


class Registered(Protocol):
    """The registered objects of this rank, and their state."""

    @property
    def objects(self) -> Objects: ...

    @property
    def small(self) -> Small: ...

    def restore(self) -> None:
        """Drop the step: restore what was changed since `begin`, without parameters."""

    def unlike_loaded(self) -> tuple[list[str], list[str]]:
        """The names of parameters that were frozen in the checkpoint that was loaded, and have required gradients in
        each of the steps since; and the settings of optimizers that it has replaced by others than those of the script,
        and that have stayed so since. Each is told once. Call it once in each step of which this rank has a part,
        before the apply."""


class StateServer(Protocol):
    """Serves this rank's state to learners, and heals it from peers."""

    address: str

    @property
    def forms(self) -> Forms: ...

    @property
    def registered(self) -> Registered: ...

    def register(self, name_of: Callable[[str], str] | None = None, /, **objects: object) -> None:
        """`name_of`: the whole model's name of a tensor, from the one in its module."""

    def unregister(self, names: Sequence[str]) -> None:
        """Drop the objects of these names."""

    def digest_state(self, beat: Callable[[], object]) -> tuple[list[int], Callable[[Sequence[int]], str]]:
        """The outcome of `Do.DIGEST_STATE`, of parameters and the state of optimizers. Waits for what the current
        stream of their device has queued. `beat`: called between tensors."""

    def wait_for_memory(self) -> None:
        """Wait until memory for a heal is there, up to a limit, once."""

    def release_memory(self) -> None:
        """This rank does not heal now, or has healed: give back what is left of that memory."""

    def prepare(self, attempt: Attempt) -> None:
        """Learners are about to request the state of `attempt`, which this rank holds. Does not block."""

    def begin(self, attempt: Attempt | None) -> None:
        """Begin a step on the state of `attempt` (None: on no state): snapshot what forward changes, or restore it if
        the step was begun before; and serve learners."""

    def forward_done(self) -> None:
        """The step's forward has ended: serve what it changed to learners too."""

    def exclusive(self) -> AbstractContextManager[None]:
        """A context for changes of the state, in which no learner reads. It waits for reading learners up to a limit,
        then drops them."""

    def heal(self, sources: Sequence[str], attempt: Attempt, cancelled: Callable[[], bool] = ...) -> bool:
        """Load the state of `attempt` from the peers at `sources`, until `cancelled`. A later call continues where this
        one stopped. Returns whether the state is loaded."""

    @property
    def num_received(self) -> int:
        """More than ever before if an unfinished heal has got further, over several calls of `heal`."""

    @property
    def awaits_turn(self) -> bool:
        """Whether the last call of `heal` failed because all peers sent their state to others."""

    def fetch_after(
        self, sources: Sequence[str], attempt: Attempt, cancelled: Callable[[], bool] = ...
    ) -> Callable[[], None] | None:
        """Fetch what the forward of the step on `attempt` has changed at one of `sources`. Returns a function that
        loads it, or None."""

    def close(self) -> None: ...


class Checkpoints(Protocol):
    """This rank's part in durable checkpoints."""

    coverage: Coverage | None
    """Of what was loaded last, if it was saved by other stages."""

    @property
    def proposes(self) -> bool:
        """Whether this rank's vote proposes to save the state."""

    @property
    def is_saving(self) -> bool:
        """Whether this rank's share of a save is not written yet."""

    @property
    def schedule(self) -> str:
        """Which steps are saved, in words."""

    def is_due(self, state: MemberState) -> bool:
        """Whether all ranks of the generation save the state that `state` describes, unless it is saved already."""

    def count(self, num_proposals: float, num_saving: float, generation: int) -> None:
        """A vote of `generation` has been counted, in which so many ranks proposed to save, and were saving."""

    def begin(self, member: str, state: MemberState) -> None:
        """A step begins on the state that `state` describes: save it, if it is due. Does not wait for the disk."""

    def newest(self, state: MemberState) -> CheckpointRef | None:
        """The newest checkpoint that this rank can load, as far as it knows. Raises CheckpointError: there are some and
        none can be used, or they cannot be listed; and this rank does not hold the state."""

    def load(self, ref: CheckpointRef, state: MemberState) -> bool:
        """Load the checkpoint `ref`. False: it cannot be used. Raises CheckpointError: it is of another model, or
        another one stands in its place."""

    def save_last(self, member: str, state: MemberState) -> tuple[bool, bool]:
        """The last step of the job is committed. Save its state, and wait up to a second for that. Returns whether it
        is being saved, and whether that has failed."""

    def has(self, attempt: Attempt) -> bool:
        """Whether a checkpoint of `attempt` is complete, as far as its manifest and file sizes say."""

    def drop(self) -> None:
        """Give up the save under way."""

    def close(self, member: str, state: MemberState, *, saves: bool = True) -> None:
        """This rank leaves. Save the state, if it is due and `saves`, and wait for the disk."""


class Mover(Protocol):
    """Moves the training state when the job takes another layout."""

    coverage: Coverage | None
    """Of what was moved last, if it is of other stages."""

    def keep(self, former: FormerState, layout: ParallelLayout, *, is_dropped: bool) -> None:
        """Keep the registered state for peers; `layout` is the one of `former`. `is_dropped`: forward has changed it
        since, in a step that is not committed."""

    def drop(self) -> None:
        """Keep nothing any longer."""

    def check_buffers(self, layout: ParallelLayout, layouts: Sequence[ParallelLayout]) -> None:
        """Warn once if the first step has changed buffers that cannot move from `layout` to another of `layouts`. Call
        it after each committed step."""

    def move(
        self,
        holders: Sequence[tuple[Seat, Holder]],
        former: ParallelLayout,
        attempt: Attempt,
        seat: tuple[ParallelLayout, Model],
        rank: int,
        cancelled: Callable[[], bool],
    ) -> bool:
        """Load the part of `seat`, in its layout and with its rank, of the state of `attempt` from `holders`, until
        `cancelled`. Returns whether it is loaded."""


class Reducer(Protocol):
    """Reduces gradients, as `DistributedDataParallel` does. `is_reproducible`: in one order of additions."""

    is_reproducible: bool

    @property
    def form(self) -> Form:
        """What the reductions of a step are, in order: all ranks of the gang must have the same."""

    @property
    def order(self) -> Form:
        """How the elements of gradients follow each other in the reductions of this step, where a script may have
        changed it: of each gradient that is not contiguous there, its strides."""

    @property
    def reduced(self) -> Sequence[Tensor]:
        """The parameters whose gradients it reduces, in the same order on all ranks."""

    @property
    def has_started(self) -> bool:
        """Whether all reductions of this step have started."""

    def contribute(self) -> None:
        """Start to reduce the accumulated gradients, unless this step's backward has done so."""

    @property
    def has_all(self) -> bool:
        """Whether this rank has a gradient of each parameter, after `contribute`; or the reductions tell which no rank
        has."""

    @property
    def exchanged(self) -> Sequence[str]:
        """What the ranks of this one's sdp gang have exchanged for it in this step, in order and in words."""

    def finish(self) -> None:
        """Wait for the reduction. Raises no GangError: the vote finds a poisoned gang."""

    def stages_of(self, parameter: Tensor) -> Sequence[int]:
        """The stages of a pipeline that have this parameter, if it is a tied one; () otherwise."""

    def leave_out_unused(self) -> None:
        """After `finish`, on every rank, if none of them has all: find out which gradients no rank has, and set them to
        None. Raises nothing."""

    def drop(self, *, rebuild: bool) -> None:
        """Drop the step's gradients. `rebuild`: an exception left the reducer in an unknown state."""

    def close(self) -> None:
        """Release the gradients: this rank has left the seat that the reducer was built for."""


class SlotPart(Protocol):
    """A rank's slots of a step, by number. `kept`: it has their gradients from an earlier try. `due`: it computes
    them."""

    @property
    def kept(self) -> Sequence[int]: ...

    @property
    def due(self) -> Sequence[int]: ...


class SlotKeeper(Protocol):
    """Keeps the gradients of finished slots when a step is tried again."""

    def divide(self, step: Step) -> SlotPart | None:
        """This rank's slots of `step`. None: those of its share. Call it on every rank. Raises GangError: the
        generation has ended."""

    def end_slot(self, slot: int) -> None:
        """The slot under way is finished; `slot` is its number."""


class Rendezvous(Protocol):
    """How a rank enters and leaves generations. `ElasticRendezvous` has an agent, `LocalRendezvous` has none.
    `compare_state`: the steps from one comparison of states to the next; 0: none."""

    member: str
    local_rank: int
    compare_state: int
    page: StatusPage
    drain: Drain

    @property
    def gangs(self) -> Gangs: ...

    def reduction(self, family: str) -> Gang:
        """The gang for gradients over the ranks of `gangs.dp`, or of `gangs.rdp`. It has a process group of its own:
        ranks without slots reduce later in their program than the others, so on a shared group their collectives
        would run in another order."""

    def empty(self, num: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized vector on the CPU, in memory that `reduction` need not copy, if there is such memory. It
        stays valid in all generations."""

    @property
    def record(self) -> Record | None:
        """The record of the present generation."""

    @property
    def error(self) -> GangError | None:
        """The error that ended the present generation; None while it goes on, and between two generations."""

    @property
    def num_collectives(self) -> int:
        """How many collectives were started so far on the gangs of the script, and on gangs made from them."""

    def observe(self) -> Observed: ...

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start to sum `values` over all seats, one sum at a time. The returned function waits for the sums, which are
        the same on all ranks. Both may raise GangError."""

    def ban(self, ban: Ban | None) -> Ban | None:
        """Refuse the collectives that this thread starts on the gangs (`gang/bans.py`); None: no longer. Returns the
        ban until now."""

    def data_worker_lost(self, loss: dict[str, Any]) -> None:
        """A data worker of this rank is lost; `loss` has the fields of the event. Any thread may call it."""

    def poison(self, error: GangError) -> None:
        """End the present generation. A generation keeps its first error."""

    def check_reduction(self) -> None:
        """The device has done the collectives of the step: end the present generation if one of them has failed,
        although its wait has returned (DATA-5)."""

    def tell_saved(self, ref: CheckpointRef, path: str, num_bytes: int, duration_s: float) -> None:
        """Tell the agent that a checkpoint has become complete. `path`: its directory or URL. `duration_s`: since the
        save began. Thread-safe."""

    def tell_unsaved(self, step: int) -> None:
        """Tell the agent, with the `SendLeft` that follows, that the job's final state, after `step`, was to be saved
        and is in no checkpoint."""

    def perform(self, instruction: Instruction) -> Record | None:
        """Carry out an instruction for the process groups or the agent. `Do.AWAIT_RECORD` returns the record.

        Raises:
            GangError: the generation of a `Configure` ended before this rank had entered it.
        """
