"""Striped fetch: downloads the state from all its holders at once, a part of it from each.

FETCH-1  A chunk counts only with the digest on which the holders agree. A holder that disagrees with the first one is
    not used.
FETCH-2  The small state (what forward changes) may differ between holders, so all of it comes from one of them.
FETCH-3  If a holder dies or sends wrong data, the other holders send the chunks that it has not delivered.
FETCH-4  The fetch writes to no memory of the caller. The returned state is complete, and no thread writes to it later.
FETCH-5  A received chunk is not requested again, in this fetch or the next, while its digest stays the agreed one. So a
    state that takes longer than one generation arrives over several.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from elasticgang.errors import WireError
from elasticgang.protocol.commit import Attempt
from elasticgang.state import transport
from elasticgang.state.authentication import Authenticator
from elasticgang.state.serialization import flatten, unflatten
from elasticgang.state.transport import Channel
from elasticgang.testing import reached

log = logging.getLogger("elasticgang")

RUN = 4  # chunks in one request
_MAX_REQUEST_BYTES = 1 << 16
_POLL_S = 0.02
_FAILURES = (OSError, WireError, ValueError, KeyError, TypeError, IndexError, RuntimeError)


# -- the holder


class Digests:
    """The chunk digests of one attempt, kept for further healers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: tuple[Attempt, list[str]] | None = None

    def of(self, attempt: Attempt, parts: Sequence[memoryview]) -> list[str]:
        with self._lock:
            if self._known is None or self._known[0] != attempt:
                self._known = attempt, [transport.digest(part).hex() for part in parts]
            return self._known[1]

    def forget(self) -> None:
        """The state is about to change, and has no readers."""
        with self._lock:
            self._known = None


def serve(channel: Channel, attempt: Attempt, small: Any, large: Any, digests: Digests) -> None:
    """Answer a `StripedFetch` until it closes the connection."""
    small_spec, small_tensors = flatten(small)
    large_spec, large_tensors = flatten(large)
    parts = list(itertools.chain(*map(transport.chunks, large_tensors)))
    manifest = {
        "small": [small_spec, transport.shapes_of(small_tensors)],
        "large": [large_spec, transport.shapes_of(large_tensors), digests.of(attempt, parts)],
    }
    channel.send(manifest)
    while True:
        wanted = channel.receive(_MAX_REQUEST_BYTES)
        if wanted == "small":
            for tensor in small_tensors:
                for part in transport.chunks(tensor):
                    channel.send_chunk(part)
        else:
            for index in wanted:
                channel.sock.sendall(parts[index])


# -- the healer


class ReceivedChunks:
    """The chunks received so far (FETCH-5). `changed` guards all fields. `on_progress` gets the bytes received, and
    those of the whole large state."""

    def __init__(self, on_progress: Callable[[int, int], None] = lambda received, total: None) -> None:
        self._on_progress = on_progress
        self._bytes = (0, 0)  # received, of
        self.changed = threading.Condition()
        self.tensors: list[Tensor] = []
        self.missing: set[int] = set()
        self.requested: set[int] = set()  # from a holder that may still send it, in this fetch or an earlier one
        self.num_received = 0
        self._shapes: list[Any] | None = None
        self._views: list[memoryview] = []
        self._digests: list[str] = []
        self._is_closed = False

    def expect(self, shapes: list[Any], digests: list[str]) -> None:
        """Expect the chunks with these `digests`. Received chunks that are among them are kept."""
        if shapes != self._shapes:
            tensors = [transport.empty(*shape) for shape in shapes]
            views = list(itertools.chain(*map(transport.chunks, tensors)))
            missing = set(range(len(views)))
        else:
            tensors, views = self.tensors, self._views
            missing = {
                index
                for index, (old, new) in enumerate(itertools.zip_longest(self._digests, digests))
                if index in self.missing or old != new
            }
        if len(views) != len(digests):
            raise WireError(f"{len(digests)} digests do not match {len(views)} chunks")
        self.tensors, self.missing, self._shapes, self._views, self._digests = tensors, missing, shapes, views, digests
        num_bytes = sum(map(len, views))
        self._count(num_bytes - sum(len(views[index]) for index in missing), num_bytes)

    def _count(self, received: int, total: int) -> None:
        self._bytes = (received, total)
        self._on_progress(received, total)

    def to_request(self) -> list[int]:
        """The missing chunks; those that an earlier fetch has requested come last."""
        return sorted(self.missing, key=lambda index: (index in self.requested, index))

    def num_bytes(self, index: int) -> int:
        return len(self._views[index])

    def put(self, index: int, digest: str, data: memoryview) -> bool:
        """Keep a chunk with this digest. False: it is not expected, or received already."""
        with self.changed:
            if self._is_closed or index not in self.missing or self._digests[index] != digest:
                return False
            self._views[index][:] = data
            self.missing.discard(index)
            self.num_received += 1
            self._count(self._bytes[0] + len(data), self._bytes[1])
            self.changed.notify_all()
            return True

    def close(self) -> None:
        """Accept no further chunk (FETCH-4)."""
        with self.changed:
            self._is_closed = True


class StripedFetch:
    """One fetch of the state of `attempt`. Call `run` once. Chunks that arrive after it was cancelled still go into
    `received`."""

    def __init__(
        self,
        authenticator: Authenticator,
        sources: Sequence[str],
        attempt: Attempt,
        cancelled: Callable[[], bool],
        received: ReceivedChunks,
    ) -> None:
        self._authenticator = authenticator
        self._sources, self._attempt, self._cancelled, self._received = sources, attempt, cancelled, received
        self._changed = received.changed
        self._agreed: list[Any] | None = None  # the large state's spec, shapes and digests
        self._open: list[int] = []  # missing chunks that no holder has been asked for
        self._small: dict[str, Any] | None = None
        self._small_requested = False
        self._channels: list[Channel] = []
        self._num_live = len(sources)
        self._is_over = False
        self.num_from: dict[str, int] = {}  # received chunks by source

    def run(self) -> dict[str, Any] | None:
        """The state, or None if these sources cannot deliver it."""
        threads = [threading.Thread(target=self._pull, args=(source,), daemon=True) for source in self._sources]
        for thread in threads:
            thread.start()
        with self._changed:
            while not self._is_done() and self._num_live and not self._cancelled():
                self._changed.wait(_POLL_S)
            done, self._is_over = self._is_done(), True
            for channel in self._channels if done else ():
                channel.shut()
        if not done or self._small is None or self._agreed is None:
            return None
        self._received.close()
        large: dict[str, Any] = unflatten(self._agreed[0], self._received.tensors)
        return {"small": self._small, "large": large}

    def _is_done(self) -> bool:
        return self._small is not None and self._agreed is not None and not self._received.missing

    def _pull(self, source: str) -> None:
        mine: list[int] = []
        requests_small = False
        try:
            with self._authenticator.connect(source) as channel:
                with self._changed:
                    if self._is_over:
                        return
                    self._channels.append(channel)
                small_manifest = self._agree(channel)
                reached("source_agreed")
                while True:
                    requests_small, mine = self._take()
                    if not requests_small and not mine:
                        return
                    if requests_small:
                        self._receive_small(channel, *small_manifest)
                        requests_small = False
                    self._receive_chunks(channel, mine, source)
                    self._returned(mine)
                    mine = []
        except _FAILURES as exc:
            if not self._is_over:
                log.warning("could not heal from %s: %s", source, exc)
        finally:
            self._returned(mine)
            with self._changed:
                self._open += mine  # FETCH-3
                self._small_requested = self._small_requested and not requests_small
                self._num_live -= 1
                self._changed.notify_all()

    def _agree(self, channel: Channel) -> list[Any]:
        """FETCH-1. Returns the manifest of the small state at this source."""
        channel.send({"attempt": list(self._attempt), "after": False, "by_range": True})
        transport.await_answer(channel.sock, lambda: self._is_over or self._cancelled())
        manifest = channel.receive(transport.MAX_MANIFEST_BYTES)
        if "refused" in manifest:
            raise WireError(manifest["refused"])
        with self._changed:
            if self._agreed is None:
                if self._is_over:
                    raise WireError("the generation ended")
                self._received.expect(*manifest["large"][1:])
                self._open = self._received.to_request()
                self._agreed = manifest["large"]
            elif manifest["large"] != self._agreed:
                raise WireError("its state differs from another holder's state of the same step")
            self._changed.notify_all()
        small: list[Any] = manifest["small"]
        return small

    def _take(self) -> tuple[bool, list[int]]:
        """What to request next: the small state (FETCH-2), and chunks; nothing once all have arrived. Waits while other
        holders have open requests."""
        with self._changed:
            while not (self._is_done() or self._is_over):
                self._open = [index for index in self._open if index in self._received.missing]
                if not self._small_requested or self._open:
                    requests_small, self._small_requested = not self._small_requested, True
                    mine, self._open = self._open[:RUN], self._open[RUN:]
                    self._received.requested.update(mine)
                    return requests_small, mine
                self._changed.wait(_POLL_S)
        return False, []

    def _returned(self, indices: Sequence[int]) -> None:
        with self._changed:
            self._received.requested.difference_update(indices)

    def _receive_small(self, channel: Channel, spec: Any, shapes: list[Any]) -> None:
        channel.send("small")
        tensors = [transport.empty(*shape) for shape in shapes]
        for part in itertools.chain(*map(transport.chunks, tensors)):
            channel.receive_chunk(part)
        state: dict[str, Any] = unflatten(spec, tensors)
        with self._changed:
            self._small = state
            self._changed.notify_all()

    def _receive_chunks(self, channel: Channel, indices: Sequence[int], source: str) -> None:
        if not indices:
            return
        assert self._agreed is not None
        channel.send(list(indices))
        for index in indices:
            part = memoryview(bytearray(self._received.num_bytes(index)))
            transport.receive_into(channel.sock, part)
            digest = self._agreed[2][index]
            if transport.digest(part).hex() != digest:
                raise WireError(f"the digest of chunk {index} is wrong")
            if self._received.put(index, digest, part):
                self.num_from[source] = self.num_from.get(source, 0) + 1
