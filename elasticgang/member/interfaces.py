"""What the driver of a member (`driver.py`) needs of the other rooms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from elasticgang.errors import GangError
from elasticgang.gang import Gang, Gangs
from elasticgang.member.drain import Drain
from elasticgang.process.status_page import StatusPage
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_instructions import Instruction, Observed
from elasticgang.protocol.record import Record


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


class Rendezvous(Protocol):
    """A rank's part in generations. Two kinds: `ElasticRendezvous`, and `LocalRendezvous` without an agent."""

    member: str
    local_rank: int
    page: StatusPage
    drain: Drain

    @property
    def gangs(self) -> Gangs: ...

    def reduction(self, family: str) -> Gang:
        """The ranks of `gangs.dp`, or of `gangs.rdp`, with a group of its own, which only gradients use: ranks without
        slots reduce later in their program than the others, so that the order among a user's collectives would
        differ."""

    @property
    def record(self) -> Record | None:
        """Of the present generation."""

    @property
    def error(self) -> GangError | None:
        """Why the present generation is over; None while it is sound or there is none."""

    def observe(self) -> Observed: ...

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Sum over all seats, apart from the tensors' traffic; one sum at a time. What is returned waits for the sums,
        the same on all ranks, and raises GangError."""

    def forbid_collectives(self) -> AbstractContextManager[None]:
        """Until it ends, collectives of the gangs raise InvalidOperationError."""

    def poison(self, error: GangError) -> None:
        """End the present generation, unless it has ended. It keeps its first error."""

    def perform(self, instruction: Instruction) -> Record | None:
        """Carry out an instruction that is for the groups or the agent. The outcome of `Do.AWAIT_RECORD` is the record.

        Raises:
            GangError: the generation of a `Configure` has ended before it has begun.
        """
