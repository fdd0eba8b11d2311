"""Compares what this rank is about to train with what a peer trains, before anything of it reaches the others.

ALIKE-1  A rank without state compares the form of its own with that of a peer that holds its part of the model, or that
    is to load it, before it reduces or heals anything. If they differ it raises an error, and the others are as they
    would be without it. A rank of another form would reduce other gradients than they do, some under the names of
    others, and the job would end or train wrong.
ALIKE-2  In the first `_NUM_COMPARED` steps in which such a rank votes, it compares the settings of its optimizer, and
    in which order the elements of its gradients are reduced, with a peer that was there before, once both are about to
    vote. Some may come from the script alone, such as a learning rate that it sets in each step, or parameters that it
    has frozen, or laid out otherwise, in a step that this rank has not run. If they differ it raises an error before it
    votes.
ALIKE-3  Where ranks hold parts of the model, the backward of a rank sums with the others of its group what it trains.
    So in these steps a rank compares that with the same peer before its first forward: if it differs, the group would
    lose the step in backward, time and again. A rank without slots has no forward: then nothing is compared.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from elasticgang.errors import MismatchError
from elasticgang.member.interfaces import Reducer, StateServer
from elasticgang.process.status_page import StatusPage, ThreadState
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.form import UNKNOWN, Form, FormOf, Item, all_but_false, difference
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import Seat

_NUM_COMPARED = 3  # what a schedule does after the first of these steps is seen in the second


class FormComparison:
    """Compares for the rank with this `state`, what is registered there and `reducers`. `is_over`: its generation has
    ended, so that nothing is compared."""

    def __init__(
        self,
        state: MemberState,
        server: StateServer,
        reducers: Sequence[Reducer],
        page: StatusPage,
        is_over: Callable[[], bool],
    ) -> None:
        self._state, self._server, self._reducers, self._page, self._is_over = state, server, reducers, page, is_over
        self._forms = server.forms
        self._form: Form | None = None
        self._announced: tuple[int, ...] | None = None  # the part of the model that it was announced for
        self._is_compared = False  # of that part
        self._former: frozenset[str] = frozenset()  # members of the part that were there before this one
        self._num_compared = 0  # steps
        self._trained_in: Attempt | None = None  # the attempt that has begun to compare it

    def forget(self) -> None:
        """The rank is about to drop the objects of its seat."""
        self._forms.withdraw(FormOf.STATE)
        self._form = self._announced = None

    def compare_state(self, part: tuple[int, ...]) -> None:
        """ALIKE-1. `part`: the layout and the model coordinates. Raises MismatchError: the forms differ."""
        if self._form is None:  # read once for the objects of a seat
            of_wrappers = _of_wrappers(reducer.form for reducer in self._reducers)
            self._form = (*self._server.registered.objects.form, *of_wrappers)
        form = self._form
        if self._announced != part:
            self._forms.announce(FormOf.STATE, part, lambda: form)
            self._announced, self._is_compared = part, False
        state = self._state
        if self._is_compared or state.tip is not None or state.record is None:
            return
        if not (peers := state.sources() or state.first_of_part()):
            return
        self._former, self._num_compared = frozenset(peer.member for peer in peers), 0
        for peer in peers:
            other = self._fetch(peer, FormOf.STATE, part, form)
            if other is None:  # the heal finds out why
                continue
            self._is_compared = True
            if (what := difference(form, other)) is not None:
                raise MismatchError(
                    f"this rank makes other training state than rank {peer.local_rank} on {peer.host}: {what}. Start "
                    "it with the script, the arguments and the environment of the others."
                )
            return

    @contextlib.contextmanager
    def settings_announced(self, settings: Callable[[], Form]) -> Iterator[None]:
        """ALIKE-2. `settings`: of the optimizer. Peers may fetch them while the body runs, which votes. Raises
        MismatchError, before the body: a peer has others."""

        def form() -> Form:
            return (*settings(), *_of_wrappers(reducer.order for reducer in self._reducers))

        self._forms.announce(FormOf.SETTINGS, self._state.attempt(), form)
        try:
            self._compare_settings(form)
            yield
        finally:
            self._forms.withdraw(FormOf.SETTINGS)

    def _compare_settings(self, settings: Callable[[], Form]) -> None:
        if (peer := self._peer()) is None:
            return
        attempt, own = self._state.attempt(), settings()
        if (other := self._fetch(peer, FormOf.SETTINGS, attempt, own)) is None:  # the next step may tell
            return
        if (what := difference(own, other)) is not None:
            raise MismatchError(
                f"this rank is about to apply step {attempt.step - 1} with other settings than rank "
                f"{peer.local_rank} on {peer.host}: {what}. This rank has not run the steps before: let what the "
                "script sets depend on `step.index`, as by `if step.index >= 100:`, or on what is registered, as a "
                "learning rate schedule is by `register_state(schedule=schedule)`."
            )
        self._num_compared += 1
        if self._num_compared == _NUM_COMPARED:
            self._former = frozenset()

    def compare_trained(self) -> None:
        """ALIKE-3. A forward of the step under way is about to begin. Raises MismatchError: this rank trains
        something else than a peer."""
        trained = self.announce_trained(is_known=True)
        if trained is None or (peer := self._peer()) is None:
            return
        attempt, own = self._state.attempt(), trained()
        other = self._fetch(peer, FormOf.TRAINED, attempt, own)
        if other is not None and (what := difference(own, other)) is not None:
            raise MismatchError(
                f"this rank is about to compute gradients of other parameters in step {attempt.step - 1} than rank "
                f"{peer.local_rank} on {peer.host}: {what}. This rank has not run the steps before: let what is frozen "
                "depend on `step.index`, as by `if step.index >= 100:`."
            )

    def announce_trained(self, *, is_known: bool) -> Callable[[], Form] | None:
        """What this rank trains in the attempt under way. Not `is_known`: it has no slots, and cannot say. Returns its
        form, if this call is the first in the attempt, and ranks hold parts of the model."""
        state = self._state
        if state.record is None or state.record.layout.unit == 1 or self._trained_in == state.attempt():
            return None
        self._trained_in = state.attempt()
        trained = [[each.requires_grad for each in reducer.reduced] if is_known else None for reducer in self._reducers]
        form = functools.partial(_form_of_trained, trained)
        self._forms.announce(FormOf.TRAINED, self._trained_in, form)
        return form

    def _peer(self) -> Seat | None:
        """ALIKE-2"""
        state = self._state
        if not (self._former and state.is_active and state.tip is not None) or self._is_over():
            return None
        return next((source for source in state.sources() if source.member in self._former), None)

    def _fetch(self, peer: Seat, what: FormOf, of: Sequence[int], own: Form) -> Form | None:
        with self._page.in_thread_state(ThreadState.WAITING):
            return self._forms.fetch(peer.address, what, of, own, self._is_over)


def _form_of_trained(trained: Sequence[Sequence[bool] | None]) -> Form:
    described = [UNKNOWN if each is None else all_but_false(each) for each in trained]
    return _of_wrappers([("what requires gradients", each)] for each in described)


def _of_wrappers(forms: Iterable[Iterable[Item]]) -> Form:
    return tuple((f"{what} in wrapper {number}", how) for number, form in enumerate(forms) for what, how in form)
