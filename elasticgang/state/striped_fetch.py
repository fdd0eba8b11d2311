"""Striped fetch: downloads the state from all its holders at once, a part of it from each.

FETCH-1  A chunk counts only with the digest on which the holders agree. A holder that disagrees with the first one is
    not used. Once all that agreed have failed, the next one is the first.
FETCH-2  The small state (what forward changes) may differ between holders, so all of it comes from one of them.
FETCH-3  If a holder dies or sends wrong data, the other holders send the chunks that it has not delivered.
FETCH-4  Once `run` has returned, no thread of the fetch writes to the state.
FETCH-5  A received chunk is not requested again, in this fetch or the next, while its digest stays the agreed one
    (RECEIVED-2).
FETCH-6  A small state comes from one holder, which takes less time than from several. The others are asked if it fails.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from elasticgang.errors import OperationalError, WireError
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.device_errors import device_fault
from elasticgang.state import staging, transport
from elasticgang.state.authentication import Authenticator
from elasticgang.state.digests import Digest
from elasticgang.state.received_chunks import ReceivedChunks
from elasticgang.state.serialization import flatten, unflatten
from elasticgang.state.staging import Chunks
from elasticgang.state.transport import Channel
from elasticgang.testing import reached

log = logging.getLogger("elasticgang")

RUN = 4  # chunks in one request
NUM_REQUESTS = 2  # under way on one connection: the holder sends the next run while this rank receives one
STRIPE_BYTES = 16 << 20  # of the state for each holder that is asked at once (FETCH-6)
WRITE_END_S = 10.0
_MAX_REQUEST_BYTES = 1 << 16
_POLL_S = 0.02
_FAILURES = (OSError, WireError, ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError)


# -- the holder


class Digests:
    """The chunk digests of one attempt, kept for further healers."""

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._lock = threading.Lock()
        self._known: tuple[Attempt, list[str]] | None = None

    def of(self, attempt: Attempt, parts: Sequence[memoryview]) -> list[str]:
        with self._lock:
            if self._known is None or self._known[0] != attempt:
                self._known = attempt, list(map(self._digest, parts))
            return self._known[1]

    def forget(self) -> None:
        """The state is about to change, and has no readers."""
        with self._lock:
            self._known = None


def serve(channel: Channel, attempt: Attempt, small: Any, large: Any, digests: Digests, written: Any) -> None:
    """Answer a `StripedFetch` until it closes the connection. `large`: None if it wants the small state alone.
    `written`: a mark behind the last change of the state (PINNED-2)."""
    small_spec, small_tensors = flatten(small)
    manifest: dict[str, Any] = {"small": [small_spec, transport.shapes_of(small_tensors)]}
    parts, small_parts = Chunks([], written), Chunks(small_tensors, written)
    if large is not None:
        large_spec, large_tensors = flatten(large)
        parts = Chunks(large_tensors, written)
        manifest["large"] = [large_spec, transport.shapes_of(large_tensors), digests.of(attempt, parts)]
    channel.send(manifest)
    while True:
        wanted = channel.receive(_MAX_REQUEST_BYTES)
        if wanted == "small":
            for part in small_parts:
                channel.send_chunk(part)
        else:
            for index in wanted:
                channel.sock.sendall(parts[index])


# -- the healer


class _Request(NamedTuple):
    """What one holder was asked for: the small state, or chunks."""

    is_small: bool
    chunks: list[int]


class StripedFetch:
    """One fetch of the state of `attempt`. Call `run` once. `received`: of the large state, of about `num_bytes`; None
    to fetch the small state after the step's forward alone. `check_small`: raises if a small state is not this
    rank's."""

    def __init__(
        self,
        authenticator: Authenticator,
        sources: Sequence[str],
        attempt: Attempt,
        cancelled: Callable[[], bool],
        received: ReceivedChunks | None,
        num_bytes: int = 0,
        check_small: Callable[[dict[str, Any]], None] = lambda small: None,
    ) -> None:
        self._authenticator = authenticator
        self._attempt, self._cancelled, self._received = attempt, cancelled, received
        self._check_small = check_small
        self._changed = threading.Condition() if received is None else received.changed
        self._left = deque(sources)  # not asked yet
        self._num_live = min(len(sources), max(1, -(-num_bytes // STRIPE_BYTES)))  # FETCH-6
        self._agreed: list[Any] | None = None if received is not None else [{"dict": []}, [], []]
        self._num_agreed = 0  # holders in use
        self._open: list[int] = []  # missing chunks that no holder has been asked for
        self._small: dict[str, Any] | None = None
        self._small_requested = False
        self._channels: list[Channel] = []
        self._connecting: set[threading.Thread] = set()
        self.is_over = False  # nothing is requested any more
        self._fault: Exception | None = None  # of this rank's device
        self._num_writing = 0  # threads that may write to the state
        self.num_from: dict[str, int] = {}  # received chunks by source

    def run(self) -> dict[str, Any] | None:
        """The state, or None if these sources cannot deliver it. The tensors of its large part are those that
        `ReceivedChunks` has received.

        Raises:
            OperationalError: a thread that receives does not end. It could write to the state later.
        """
        threads = [threading.Thread(target=self._pull_from_any, daemon=True) for _ in range(self._num_live)]
        for thread in threads:
            thread.start()
        with self._changed:
            while not (self._is_done() or self._fault is not None or self._cancelled()) and self._num_live:
                self._changed.wait(_POLL_S)
            done, self.is_over = self._is_done(), True
            self._changed.notify_all()
            for channel in self._channels:
                channel.shut()
            # FETCH-4. A thread whose connection is closed ends at its next byte.
            if not self._changed.wait_for(lambda: not self._num_writing, WRITE_END_S):
                raise OperationalError(
                    f"a thread still receives state {WRITE_END_S:g} s after its connection was closed"
                )
            ending = [thread for thread in threads if thread not in self._connecting]
        for thread in ending:  # a process that ends beside a thread of it may abort
            thread.join(WRITE_END_S)
        if self._fault is not None:
            raise self._fault
        if not done or self._small is None or self._agreed is None:
            return None
        tensors = [] if self._received is None else self._received.tensors
        large: dict[str, Any] = unflatten(self._agreed[0], tensors)
        return {"small": self._small, "large": large}

    def _is_done(self) -> bool:
        is_large_here = self._received is None or not self._received.missing
        return self._small is not None and self._agreed is not None and is_large_here

    def _pull_from_any(self) -> None:
        try:
            while (source := self._next_source()) is not None:
                self._pull(source)
        finally:
            with self._changed:
                self._num_live -= 1
                self._connecting.discard(threading.current_thread())
                self._changed.notify_all()

    def _next_source(self) -> str | None:
        with self._changed:
            if not self._left or self.is_over or self._is_done() or self._cancelled():
                return None
            self._connecting.add(threading.current_thread())
            return self._left.popleft()

    def _pull(self, source: str) -> None:
        requests: deque[_Request] = deque()  # sent, and not answered
        has_agreed = False
        try:
            with self._authenticator.connect(source) as channel, self._writing(channel) as writer:
                small_manifest = self._agree(channel)
                has_agreed = True
                if self._received is not None:
                    reached("source_agreed")
                while self._request(channel, requests):
                    self._receive(channel, requests[0], small_manifest, writer, source)
                    requests.popleft()
        except _FAILURES as exc:
            if device_fault(exc) is not None:  # HEALER-3
                self._fault = exc
            elif not self.is_over:
                log.warning("could not heal from %s: %s", source, exc)
        finally:
            with self._changed:
                for request in requests:
                    self._open += request.chunks  # FETCH-3
                    self._small_requested = self._small_requested and not request.is_small
                self._num_agreed -= has_agreed
                if has_agreed and not self._num_agreed and not self._is_done() and self._received is not None:
                    self._agreed = self._small = None  # FETCH-1
                    self._small_requested = False
                self._changed.notify_all()

    @contextlib.contextmanager
    def _writing(self, channel: Channel) -> Iterator[staging.ChunkWriter]:
        """FETCH-4: in this context a thread may write to the state."""
        with self._changed:
            self._connecting.discard(threading.current_thread())
            if self.is_over:
                raise WireError("the fetch is over")
            self._channels.append(channel)
            self._num_writing += 1
        writer = staging.ChunkWriter()
        try:
            yield writer
        finally:
            try:
                writer.finish()
            finally:
                with self._changed:
                    self._num_writing -= 1
                    self._changed.notify_all()

    def _agree(self, channel: Channel) -> list[Any]:
        """FETCH-1. Returns the manifest of the small state at this source."""
        after = self._received is None
        channel.send({"attempt": list(self._attempt), "after": after})
        limit_s = transport.HEAL_TIMEOUT_S + after * transport.FORWARD_TIMEOUT_S
        transport.await_answer(channel.sock, lambda: self.is_over or self._cancelled(), limit_s)
        manifest = channel.receive(transport.MAX_MANIFEST_BYTES)
        if "refused" in manifest:
            raise WireError(manifest["refused"])
        small: list[Any] = manifest["small"]
        with self._changed:
            if self._received is None:
                self._num_agreed += 1
                return small
            if self._agreed is None:
                if self.is_over:
                    raise WireError("the generation ended")
                self._received.expect(*manifest["large"])
                self._open = sorted(self._received.missing)  # FETCH-5
                self._agreed = manifest["large"]
            elif manifest["large"] != self._agreed:
                raise WireError("its state differs from another holder's state of the same step")
            self._num_agreed += 1
            self._changed.notify_all()
        return small

    def _request(self, channel: Channel, requests: deque[_Request]) -> bool:
        """Keep `NUM_REQUESTS` requests under way. False: none is, and all has arrived."""
        while len(requests) < NUM_REQUESTS:
            request = self._take(waits=not requests)
            if request is None:
                break
            requests.append(request)
            channel.send("small" if request.is_small else request.chunks)
        return bool(requests)

    def _take(self, waits: bool) -> _Request | None:
        """What to request next: the small state (FETCH-2), or chunks. `waits`: while other holders have open requests.
        None: nothing, or nothing now."""
        with self._changed:
            while not (self._is_done() or self.is_over):
                if not self._small_requested:
                    self._small_requested = True
                    return _Request(True, [])
                if self._open:
                    chunks, self._open = self._open[:RUN], self._open[RUN:]
                    return _Request(False, chunks)
                if not waits:
                    break
                self._changed.wait(_POLL_S)
        return None

    def _receive(
        self, channel: Channel, request: _Request, small: list[Any], writer: staging.ChunkWriter, source: str
    ) -> None:
        if request.is_small:
            self._receive_small(channel, *small)
            return
        assert self._received is not None
        for index in list(request.chunks):
            self._received.receive(index, writer, lambda data: transport.receive_into(channel.sock, data))
            with self._changed:
                request.chunks.remove(index)
                self.num_from[source] = self.num_from.get(source, 0) + 1
            reached("chunk_received")

    def _receive_small(self, channel: Channel, spec: Any, shapes: list[Any]) -> None:
        tensors = transport.allocate(shapes)
        for part in itertools.chain(*map(transport.chunks, tensors)):
            channel.receive_chunk(part)
        state: dict[str, Any] = unflatten(spec, tensors)  # HEALER-2
        self._check_small(state)
        with self._changed:
            self._small = state
            self._changed.notify_all()
