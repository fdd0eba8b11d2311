"""Healing: fetches the state of one attempt from peers, and loads it.

HEALER-1  A rank takes the large state into the memory of its own tensors, chunk by chunk. Until all of it is there, and
    every chunk's digest is right, its state is of no attempt, and the small state is as it was. What cannot be this
    rank's state is refused before any of it is written.
HEALER-2  Received data is never unpickled.
HEALER-3  A fault of this rank's device (CUDA-1) is not taken for a source that fails.
HEALER-4  Before the first committed step a heal writes to memory of its own until all has arrived: this rank's initial
    state may yet become the job's (RECOVERY-3). There are no gradients and no state of optimizers then.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.device_errors import device_fault
from elasticgang.state import striped_fetch
from elasticgang.state.authentication import Authenticator
from elasticgang.state.digests import digest_for
from elasticgang.state.received_chunks import ReceivedChunks
from elasticgang.state.received_small import ReceivedSmall
from elasticgang.state.registered_state import RegisteredState

log = logging.getLogger("elasticgang")

_FAILURES = (ValueError, KeyError, TypeError, IndexError, RuntimeError)


class Healer:
    def __init__(
        self, state: RegisteredState, authenticator: Authenticator, on_progress: Callable[[int, int], None]
    ) -> None:
        """`on_progress`: gets the bytes received, and how many there are, in the caller of `heal` or a thread of its
        own; 0 of 0 once a heal has failed."""
        self._state, self._authenticator, self._on_progress = state, authenticator, on_progress
        self._digest = digest_for(authenticator.credentials)
        self._received: ReceivedChunks | None = None  # of an unfinished heal
        self._received_small = ReceivedSmall(self._digest)  # likewise
        self._in_place = False  # that one
        self.awaits_turn = False  # the last heal failed because all holders sent their state to others (FETCH-12)

    def heal(self, sources: Sequence[str], num_at_once: int, attempt: Attempt, cancelled: Callable[[], bool]) -> bool:
        """`sources`, `num_at_once`: as `StripedFetch` has them."""
        is_healed = self.awaits_turn = False
        try:
            is_healed = self._heal(sources, num_at_once, attempt, cancelled)
        finally:
            if not is_healed:
                self._end_progress()
        return is_healed

    def _end_progress(self) -> None:
        if self._received is None:
            self._on_progress(0, 0)
        else:
            self._received.pause()

    def _heal(self, sources: Sequence[str], num_at_once: int, attempt: Attempt, cancelled: Callable[[], bool]) -> bool:
        in_place = attempt.step > 0  # HEALER-4
        if self._received is None or in_place != self._in_place:
            targets = functools.partial(self._state.targets, in_place)
            self._received, self._in_place = ReceivedChunks(targets, self._digest, self._on_progress), in_place
        fetch = striped_fetch.StripedFetch(
            self._authenticator,
            sources,
            num_at_once,
            attempt,
            cancelled,
            self._received,
            self._received_small,
            self._state.objects.num_bytes,
            self._state.small.placed,
        )
        state = fetch.run()
        if state is None:
            self.awaits_turn = fetch.is_refused
            return False
        self.forget()
        try:
            self._state.load(state)
        except _FAILURES as exc:
            if device_fault(exc) is not None:  # HEALER-3
                raise
            log.warning("could not load the state: %s", exc)
            return False
        return True

    @property
    def num_received(self) -> int:
        """Chunks that an unfinished heal has of the present state, and digests that a holder has computed for it: more
        than ever before if the heal got further. A step that is committed without this rank may have changed them."""
        if self._received is None:
            return 0
        return self._received.num_here + self._received.num_digested + self._received_small.num_here

    def forget(self) -> None:
        """Drop what an unfinished heal has received."""
        self._received, self._received_small = None, ReceivedSmall(self._digest)

    def fetch_after(
        self, sources: Sequence[str], num_at_once: int, attempt: Attempt, cancelled: Callable[[], bool]
    ) -> Callable[[], None] | None:
        """The small state after the step's forward: returns what loads it. None: these sources cannot deliver it."""
        fetch = striped_fetch.StripedFetch(
            self._authenticator,
            sources,
            num_at_once,
            attempt,
            cancelled,
            None,
            ReceivedSmall(),
            place_small=self._state.small.placed,
        )
        state = fetch.run()
        return None if state is None else functools.partial(self._state.small.load, state["small"])
