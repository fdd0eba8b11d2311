"""The training state of one rank: serves one attempt of it to healing peers, and keeps them out of an apply.

SNAPSHOT-1  The served state belongs to exactly one attempt: live large state between two applies, and a copy of the
    small state from the beginning of the step (RULE-6). A learner runs no forward. It therefore also fetches the small
    state after the step's forward, and loads it right before the step's apply, which may change some of it.
SNAPSHOT-2  An apply waits for the readers, up to `EXCLUSIVE_TIMEOUT_S`, then closes their connections. It never
    overlaps a read of this rank's. A healer that reads this rank's memory (PEERMEM-1) and is later than that gets bytes
    without the right digest, which it drops (RECEIVED-2).
SNAPSHOT-3  A rank that wants to apply stops a thread of its own that computes digests for a healer, once the connection
    of that healer is closed.
SNAPSHOT-4  A holder that enters a generation with learners computes the digests meanwhile, before they are requested:
    one holder for each host, and each one for learners on other hosts. What is to change the state stops that at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from elasticgang.errors import OperationalError, WireError
from elasticgang.protocol.commit import Attempt
from elasticgang.session.credentials import Credentials
from elasticgang.session.host_addresses import addresses_of
from elasticgang.state import form_exchange, heal_addresses, serving, staging, state_bits, transport
from elasticgang.state.authentication import Authenticator
from elasticgang.state.digests import Digests, digest_for
from elasticgang.state.form_exchange import FormExchange
from elasticgang.state.healer import Healer
from elasticgang.state.memory_reserve import MemoryReserve
from elasticgang.state.peer_memory import Lender
from elasticgang.state.registered_state import RegisteredState
from elasticgang.state.serialization import flatten
from elasticgang.state.serving import Turns
from elasticgang.state.state_listener import StateListener
from elasticgang.state.transport import Channel
from elasticgang.testing import reached

log = logging.getLogger("elasticgang")

EXCLUSIVE_TIMEOUT_S = 10.0
READER_END_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 10.0
MAX_REQUEST_BYTES = 1 << 16


class Reader(Protocol):
    """Reads the state. An apply waits for it."""

    def shut(self) -> None:
        """End the read soon. The reader is removed once it has ended."""


class _Preparation:
    """SNAPSHOT-4"""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def shut(self) -> None:
        self.stopped.set()


class SnapshotServer:
    """The state of one rank, and the server from which its peers heal."""

    def __init__(
        self,
        host: str | None = None,
        job: str = "job",
        credentials: Credentials | None = None,
        on_heal_progress: Callable[[int, int], None] = lambda received, total: None,
        interfaces: Sequence[str] = (),
        reserved_bytes: int = 0,
    ) -> None:
        """`host`: the address to serve on; None serves nobody. `credentials`: what peers of the job need.
        `on_heal_progress`: gets the bytes received, and how many there are, on any one thread at a time; 0 of 0 once a
        heal has failed. `interfaces`: of this host, or addresses of them, by which peers on other hosts heal
        (HEALADDR-1). `reserved_bytes`: what a heal is likely to receive for optimizers (RESERVE-1).

        Raises:
            OperationalError: without credentials, other hosts could connect to `host`.
        """
        authenticator = self.authenticator = Authenticator(job, credentials or Credentials())
        self._state = RegisteredState(MemoryReserve(reserved_bytes))
        self._healer = Healer(self._state, authenticator, on_heal_progress)
        self.forms = FormExchange(authenticator)
        self._kinds: dict[str, Callable[[Channel, dict[str, Any]], None]] = {form_exchange.KIND: self.forms.serve}
        self._changed = threading.Condition()
        self._serving: Attempt | None = None
        self._forward_done = False
        self._forward_mark: Any = None  # behind what forward has changed (PINNED-2)
        self._readers: set[Reader] = set()
        self._digests = Digests(digest_for(authenticator.credentials))
        self._turns = Turns()
        self._lender = Lender(are_authenticated=authenticator.credentials.are_given)
        self._listeners = [] if host is None else self._listen(host, interfaces)
        main, *others = [listener.address for listener in self._listeners] or [""]
        self.address = heal_addresses.to_text(main, others)

    def _listen(self, host: str, interfaces: Sequence[str]) -> list[StateListener]:
        """At `host`, and at each of `interfaces` that is there."""
        listeners = [StateListener(host, self.authenticator, self._serve)]
        for name in interfaces:
            try:
                (address,) = addresses_of([name])
                listener = StateListener(address, self.authenticator, self._serve, is_one_of_several=True)
            except (OperationalError, OSError) as exc:
                log.warning("no rank heals from this one by %s: %s", name, exc)
            else:
                listeners.append(listener)
        return listeners

    def register(self, name_of: Callable[[str], str] | None = None, /, **objects: object) -> None:
        self._state.register(name_of, **objects)

    def unregister(self, names: Sequence[str]) -> None:
        """Forget the objects of these names, and what an unfinished heal has received for them. Call it inside
        `exclusive`."""
        self._healer.forget()
        self._state.unregister(names)

    def serve_kind(self, kind: str, serve: Callable[[Channel, dict[str, Any]], None]) -> None:
        """Call `serve` with the connection and the request of each peer whose request is of this `kind`, on a thread of
        its own. It may raise as a peer that sends invalid messages does."""
        self._kinds[kind] = serve

    # -- steps

    def wait_for_memory(self) -> None:
        """RESERVE-1. Call it before this rank requests a record."""
        if self._state.reserve is not None and not self._state.reserve.wait():
            self._state.reserve = None

    def digest_state(self, beat: Callable[[], object]) -> tuple[list[int], Callable[[Sequence[int]], str]]:
        """Of each tensor of the large state, below 2**52, and what names them. `beat`: called before each."""
        names, digests = state_bits.digest(self._state.large(), beat)
        return digests, functools.partial(state_bits.in_words, names)

    def release_memory(self) -> None:
        """RESERVE-2."""
        reserve, self._state.reserve = self._state.reserve, None
        if reserve is not None:
            reserve.release()

    def prepare(self, attempt: Attempt) -> None:
        """SNAPSHOT-4: learners are about to request the state of `attempt`, which this rank holds."""
        preparation, mark = _Preparation(), staging.device.mark()
        self.lend(preparation)
        thread = threading.Thread(target=self._prepare, args=(attempt, preparation, mark), daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # no thread is left
            self.give_back(preparation)
            log.debug("could not prepare the digests of the state: %r", exc)

    def _prepare(self, attempt: Attempt, preparation: _Preparation, mark: Any) -> None:
        try:
            if self._digests.are_begun(attempt):
                return
            _, tensors = flatten(self._state.large())
            self._digests.of(attempt, tensors, staging.Chunks(tensors, mark), preparation.stopped)
        except (WireError, TypeError, ValueError, RuntimeError) as exc:
            log.debug("could not prepare the digests of the state: %r", exc)
        finally:
            self.give_back(preparation)

    def begin(self, attempt: Attempt | None) -> None:
        if attempt is not None:
            self._healer.forget()
            self.release_memory()
        self._state.begin_step()
        with self._changed:
            self._serving, self._forward_done = attempt, False
            self._changed.notify_all()

    def forward_done(self) -> None:
        with self._changed:
            self._forward_done, self._forward_mark = True, staging.device.mark()
            self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """SNAPSHOT-2: no peer reads inside this context. Raises OperationalError: a reader does not end after its
        connection was closed. The state must not be changed."""
        deadline = time.monotonic() + EXCLUSIVE_TIMEOUT_S
        with self._changed:
            self._serving = None
            self._changed.notify_all()
            for reader in self._readers:
                if isinstance(reader, _Preparation):
                    reader.shut()
            while self._readers and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            for reader in self._readers:
                reader.shut()
            if self._readers:
                self._digests.stop()  # SNAPSHOT-3
            # A reader whose connection is closed ends at its next byte.
            if not self._changed.wait_for(lambda: not self._readers, READER_END_TIMEOUT_S):
                raise OperationalError(
                    f"a healer still reads the state {READER_END_TIMEOUT_S:g} s after its connection was closed"
                )
        self._digests.forget()
        yield

    @property
    def registered(self) -> RegisteredState:
        """The registered objects and their state. Read them while no apply runs, or after `lend`."""
        return self._state

    def lend(self, reader: Reader) -> None:
        """Keep applies waiting until `give_back` (SNAPSHOT-2). Call it between two applies."""
        with self._changed:
            self._readers.add(reader)

    def give_back(self, reader: Reader) -> None:
        with self._changed:
            self._readers.discard(reader)
            self._changed.notify_all()

    def close(self) -> None:
        self._healer.forget()
        self._digests.stop()
        with self._changed:
            self._serving = None
            self._changed.notify_all()
        for listener in self._listeners:
            listener.close()

    # -- serving

    def _serve(self, channel: Channel) -> None:
        try:
            request = channel.receive(MAX_REQUEST_BYTES)
            if (kind := request.get("kind")) is not None:
                self._kinds[kind](channel, request)
                return
            attempt = Attempt(*request["attempt"])
            refusal = self._admit(channel, attempt, request["after"])
            if refusal is not None:
                channel.send({"refused": refusal})
                return
            reached("serving")
            state, digests = self._state, self._digests
            if request["after"]:
                serving.serve_small(channel, state.small.live(), digests.digest, self._forward_mark)
            else:
                lend = functools.partial(self._lender.lend, request.get("memory"))
                serving.serve(
                    channel, attempt, state.small.begun, state.large(), digests, state.small.written, lend, self._turns
                )
        except (OSError, WireError, ValueError, KeyError, TypeError, RecursionError) as exc:
            log.debug("dropped a healer: %r", exc)
        finally:
            self.give_back(channel)

    def _admit(self, channel: Channel, attempt: Attempt, after: bool) -> str | None:
        """Wait until this rank's step on `attempt` has begun and, with `after`, until its forward is done. From then on
        no apply runs while `channel` reads (SNAPSHOT-1, SNAPSHOT-2). Returns why it may not read, or None."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._serving == attempt, READY_TIMEOUT_S):
                return f"it serves {_in_words(self._serving)}, not {_in_words(attempt)}"
            if after:
                reached("forward_awaited")
                ended = self._changed.wait_for(
                    lambda: self._serving != attempt or self._forward_done, transport.FORWARD_TIMEOUT_S
                )
                if self._serving != attempt:
                    return f"its step on {_in_words(attempt)} ended, and it serves {_in_words(self._serving)} now"
                if not ended:
                    limit = transport.FORWARD_TIMEOUT_S
                    return f"the forward of its step on {_in_words(attempt)} did not end within {limit:g} s"
            self._readers.add(channel)
            return None

    # -- healing

    def heal(self, sources: Sequence[str], attempt: Attempt, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Take the state of `attempt` from peers. On failure this rank's state is of no attempt (HEALER-1).

        Raises:
            OperationalError: somebody still reads the former state, as of `exclusive`; or a thread still receives.
        """
        with self.exclusive():
            return self._healer.heal(*heal_addresses.stripes(sources, self.address), attempt, cancelled)

    @property
    def num_received(self) -> int:
        """As `Healer.num_received`."""
        return self._healer.num_received

    @property
    def awaits_turn(self) -> bool:
        """As `Healer.awaits_turn`."""
        return self._healer.awaits_turn

    def fetch_after(
        self, sources: Sequence[str], attempt: Attempt, cancelled: Callable[[], bool] = lambda: False
    ) -> Callable[[], None] | None:
        return self._healer.fetch_after(*heal_addresses.stripes(sources, self.address), attempt, cancelled)


def _in_words(attempt: Attempt | None) -> str:
    return "no state" if attempt is None else f"the state after step {attempt.step} of generation {attempt.generation}"
