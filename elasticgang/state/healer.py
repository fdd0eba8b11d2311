"""Healing: fetches the state of one attempt from peers, and loads it.

HEALER-1  A healer changes its own state only after all of it has arrived and every chunk's digest is right.
HEALER-2  Received data is never unpickled.
HEALER-3  A fault of this rank's device (CUDA-1) is not taken for a source that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from elasticgang.errors import WireError
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.device_errors import device_fault
from elasticgang.state import striped_fetch, transport
from elasticgang.state.authentication import Authenticator
from elasticgang.state.registered_state import RegisteredState
from elasticgang.state.serialization import unflatten
from elasticgang.testing import reached

log = logging.getLogger("elasticgang")

BY_RANGE_FROM_BYTES = 16 << 20  # a smaller state comes faster from one source than from several

_T = TypeVar("_T")


class Healer:
    def __init__(
        self, state: RegisteredState, authenticator: Authenticator, on_progress: Callable[[int, int], None]
    ) -> None:
        """`on_progress`: gets the bytes received, and how many there are; the caller of `heal` or a thread of its
        own."""
        self._state, self._authenticator, self._on_progress = state, authenticator, on_progress
        self._received: striped_fetch.ReceivedChunks | None = None  # of an unfinished heal

    def heal(self, sources: Sequence[str], attempt: Attempt, cancelled: Callable[[], bool]) -> bool:
        if self._state.num_bytes < BY_RANGE_FROM_BYTES:
            return self._from_first(sources, attempt, False, cancelled, self._load) is True
        if self._received is None:
            self._received = striped_fetch.ReceivedChunks(self._on_progress)
        fetch = striped_fetch.StripedFetch(self._authenticator, sources, attempt, cancelled, self._received)
        state = fetch.run()
        if state is None:
            return False
        self._received = None
        try:
            return self._load(state)
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as exc:
            if device_fault(exc) is not None:  # HEALER-3
                raise
            log.warning("could not load the state: %s", exc)
            return False

    def _load(self, state: dict[str, Any]) -> bool:
        """HEALER-1: called with the complete state."""
        self._state.load(state)
        return True

    @property
    def num_received(self) -> int:
        """Chunks that an unfinished heal has received."""
        return 0 if self._received is None else self._received.num_received

    def forget(self) -> None:
        """Drop what an unfinished heal has received."""
        if self._received is not None:
            self._received.close()
            self._received = None

    def fetch_after(
        self, sources: Sequence[str], attempt: Attempt, cancelled: Callable[[], bool]
    ) -> Callable[[], None] | None:
        def later(state: dict[str, Any]) -> Callable[[], None]:
            small = state["small"]
            return lambda: self._state.load_small(small)

        return self._from_first(sources, attempt, True, cancelled, later)

    def _from_first(
        self,
        sources: Sequence[str],
        attempt: Attempt,
        after: bool,
        cancelled: Callable[[], bool],
        use: Callable[[dict[str, Any]], _T],
    ) -> _T | None:
        for source in sources:
            if cancelled():
                return None
            try:
                return use(self._fetch(source, attempt, after, cancelled))
            except (OSError, WireError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as exc:
                if device_fault(exc) is not None:  # HEALER-3
                    raise
                log.warning("could not heal from %s: %s", source, exc)
        return None

    def _fetch(self, source: str, attempt: Attempt, after: bool, cancelled: Callable[[], bool]) -> dict[str, Any]:
        with self._authenticator.connect(source) as channel:
            channel.send({"attempt": list(attempt), "after": after})
            limit_s = transport.HEAL_TIMEOUT_S + after * transport.FORWARD_TIMEOUT_S
            transport.await_answer(channel.sock, cancelled, limit_s)
            manifest = channel.receive(transport.MAX_MANIFEST_BYTES)
            if "refused" in manifest:
                raise WireError(manifest["refused"])
            tensors = [transport.empty(shape, dtype) for shape, dtype in manifest["tensors"]]
            parts = [transport.chunks(tensor) for tensor in tensors]
            received, num_bytes = 0, sum(len(chunk) for part in parts for chunk in part)
            for part in parts:
                for chunk in part:
                    channel.receive_chunk(chunk)
                    received += len(chunk)
                    if not after:
                        self._on_progress(received, num_bytes)
                reached("tensor_received")
        state: dict[str, Any] = unflatten(manifest["spec"], tensors)  # HEALER-2
        return state
