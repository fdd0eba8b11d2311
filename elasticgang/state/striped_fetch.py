"""Striped fetch: downloads the state from all its holders at once, a part of it from each.

FETCH-1  A chunk counts only with the digest on which the holders agree. A holder that disagrees with the first one is
    not used. Once all that agreed have failed, the next one is the first.
FETCH-2  The small state (what forward changes) may differ between holders, so all of it comes from one of them.
FETCH-3  If a holder dies or sends wrong data, the other holders send the chunks that it has not delivered.
FETCH-4  Once `run` has returned, no thread of the fetch writes to the state.
FETCH-5  A received chunk is not requested again, in this fetch or the next, while its digest stays the agreed one
    (RECEIVED-2).
FETCH-6  A small state comes from one holder, which takes less time than from several. The others are asked if it fails.
FETCH-7  From the memory of a holder on the same host, `NUM_MEMORY_READERS` threads read. If the memory of a live holder
    cannot be read, its chunks come over a connection.
FETCH-8  From memory, chunks are read before their digests are known (RECEIVED-3). One holder is asked for the digests:
    one that computes them already, or any once there is nothing else to read. If it fails, another one is asked. The
    chunks of a holder that was not asked count by the digests of the other.
FETCH-9  While a holder computes digests, `HEAL_TIMEOUT_S` begins anew with each message that says that it has more.
FETCH-10  One request is for as many chunks as fill `RUN` of the full size, at most `MAX_RUN`: of a state of many small
    tensors, each is a chunk, and takes less time than a request.
FETCH-11  Why a source cannot be used is logged once for each source and reason: each step may try it again.
FETCH-12  A holder sends chunks to `MAX_SERVED` ranks at a time, and to a rank to which another holder sends some only
    if to no other. Before its first request for chunks, a rank asks a connection's holder for its *turn*, one holder
    after the other. One that does not answer that within `CONNECT_TIMEOUT_S` is not used: the others wait to be asked,
    and would end their connections. If no holder has a turn, the rank tries again in the next step: the ranks that have
    healed by then are holders too. So their number grows by a factor in each step, while the state of one holder would
    reach all others at once very late. At most `MAX_SOURCES` are asked at once.
FETCH-13  Where no thread is left, fewer holders are asked, or none. The rank then tries again in the next step.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from elasticgang.errors import OperationalError, WireError
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.device_errors import device_fault
from elasticgang.state import peer_memory, staging, transport
from elasticgang.state.authentication import Authenticator
from elasticgang.state.peer_memory import Offer, PeerMemory, UnreadableError
from elasticgang.state.received_chunks import ReceivedChunks
from elasticgang.state.received_small import ReceivedSmall
from elasticgang.state.serialization import unflatten
from elasticgang.state.transport import Channel
from elasticgang.testing import reached

log = logging.getLogger("elasticgang")

RUN = 4  # chunks of the full size in one request
MAX_RUN = 256  # smaller ones
_MAX_NOTED = 1024
NUM_MEMORY_READERS = 2
NUM_REQUESTS = 2  # under way on one connection: the holder sends the next run while this rank receives one
STRIPE_BYTES = 16 << 20  # of the state for each holder that is asked at once (FETCH-6)
MAX_SOURCES = 16
WRITE_END_S = 10.0
ALIVE_S = 5.0  # a healer that only reads from memory sends a request so often
_POLL_S = 0.02
_FAILURES = (OSError, WireError, ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError)


PlaceSmall: TypeAlias = Callable[[Any, Sequence[Tensor], Sequence[int]], dict[str, Any]]


def unplaced(spec: Any, tensors: Sequence[Tensor], divided: Sequence[int]) -> dict[str, Any]:
    """The small state of a peer as it is."""
    state: dict[str, Any] = unflatten(spec, tensors)
    return state


class _Request(NamedTuple):
    """What one holder was asked for: the small state, or chunks."""

    is_small: bool
    chunks: list[int]


class _NoTurnError(WireError):
    """FETCH-12."""


@dataclass
class _Connection:
    """To one holder that agrees. `requests`: sent, and not answered."""

    source: str
    channel: Channel
    memory: PeerMemory | None
    small: list[Any]  # its manifest
    writer: staging.ChunkWriter
    requests: deque[_Request]
    reader: staging.Reader
    has_turn: bool = False


class StripedFetch:
    """One fetch of the state of `attempt`. Call `run` once. `sources`: addresses of holders, in the order in which they
    are asked, at most `num_at_once` at a time. `received`: of the large state, of about `num_bytes`; None
    to fetch the small state after the step's forward alone. `place_small`: as `SmallState.placed`."""

    def __init__(
        self,
        authenticator: Authenticator,
        sources: Sequence[str],
        num_at_once: int,
        attempt: Attempt,
        cancelled: Callable[[], bool],
        received: ReceivedChunks | None,
        received_small: ReceivedSmall,
        num_bytes: int = 0,
        place_small: PlaceSmall = unplaced,
    ) -> None:
        self._authenticator = authenticator
        self._attempt, self._cancelled, self._received = attempt, cancelled, received
        self._received_small, self._place_small = received_small, place_small
        self._changed = threading.Condition() if received is None else received.changed
        self._left = deque(sources)  # not asked yet
        self._num_at_once = min(num_at_once, MAX_SOURCES, max(1, -(-num_bytes // STRIPE_BYTES)))  # FETCH-6
        self._num_live = self._num_at_once
        self._name = secrets.token_hex(16)  # FETCH-12
        self._num_turns = 0
        self._is_asking = False  # for a turn
        self._had_turn = self._was_refused = False
        # The structure and shapes, and the digests (FETCH-1).
        self._agreed: list[Any] | None = None if received is not None else [{"dict": []}, []]
        self._digests: list[str] | None = None if received is not None else []
        self._digests_requested = False
        self._early: set[int] = set()  # chunks that are being read, whose digests are not known (FETCH-8)
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
        self.num_from_memory = 0  # of these
        self._offers_memory = received is not None and num_bytes >= peer_memory.MIN_BYTES
        self._unreadable: set[str] = set()  # sources, by FETCH-7

    def run(self) -> dict[str, Any] | None:
        """The state, or None if these sources cannot deliver it. The tensors of its large part are those that
        `ReceivedChunks` has received.

        Raises:
            OperationalError: a thread that receives does not end. It could write to the state later.
        """
        threads = []
        try:
            for _ in range(self._num_at_once):
                thread = threading.Thread(target=self._pull_from_any, daemon=True)
                thread.start()
                threads.append(thread)
        except RuntimeError as exc:  # FETCH-13
            if not threads:
                _note_failure("any rank", str(exc))
        with self._changed:
            self._num_live -= self._num_at_once - len(threads)
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

    @property
    def is_refused(self) -> bool:
        """FETCH-12: whether no holder had a turn for this rank, and one sends its state to others."""
        return self._was_refused and not self._had_turn

    def _is_done(self) -> bool:
        is_large_here = self._received is None or not self._received.missing
        return self._small is not None and self._digests is not None and is_large_here

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
        connection: _Connection | None = None
        try:
            with self._authenticator.connect(source) as channel, self._writing(channel) as writer:
                offer = Offer() if self._offers_memory and source not in self._unreadable else None
                manifest = self._agree(channel, offer)
                has_agreed = True
                if self._received is not None:
                    reached("source_agreed")
                with self._memory_of(source, manifest, offer) as memory:
                    connection = _Connection(
                        source, channel, memory, manifest["small"], writer, requests, staging.Reader(None)
                    )
                    self._await_digests(connection, manifest.get("digests_begun") is True)
                    while self._request(connection):
                        self._receive(connection, requests[0])
                        requests.popleft()
        except UnreadableError as exc:
            if not self.is_over:  # FETCH-7
                _note_unreadable(str(exc))
            with self._changed:
                self._unreadable.add(source)
                self._left.appendleft(source)
        except _NoTurnError:
            self._was_refused = True
            log.debug("%s sends its state to others", source)
        except _FAILURES as exc:
            if device_fault(exc) is not None:  # HEALER-3
                self._fault = exc
            elif not self.is_over:
                _note_failure(source, str(exc))
        finally:
            with self._changed:
                self._num_turns -= connection is not None and connection.has_turn
                for request in requests:
                    self._open += request.chunks  # FETCH-3
                    self._small_requested = self._small_requested and not request.is_small
                self._num_agreed -= has_agreed
                if has_agreed and not self._num_agreed and not self._is_done() and self._received is not None:
                    self._agreed = self._digests = self._small = None  # FETCH-1
                    self._small_requested = self._digests_requested = False
                self._changed.notify_all()

    @contextlib.contextmanager
    def _writing(self, channel: Channel | None = None) -> Iterator[staging.ChunkWriter]:
        """FETCH-4: in this context a thread may write to the state."""
        with self._changed:
            self._connecting.discard(threading.current_thread())
            if self.is_over:
                raise WireError("the fetch is over")
            if channel is not None:
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

    def _agree(self, channel: Channel, offer: Offer | None) -> dict[str, Any]:
        """FETCH-1. Returns the manifest of this source."""
        after = self._received is None
        request = {"attempt": list(self._attempt), "after": after}
        channel.send(request if offer is None else {**request, "memory": offer.to_json()})
        limit_s = transport.HEAL_TIMEOUT_S + after * transport.FORWARD_TIMEOUT_S
        manifest = self._answer(channel, limit_s)
        if "refused" in manifest:
            raise WireError(manifest["refused"])
        with self._changed:
            if self._received is None:
                self._num_agreed += 1
                return manifest
            spec, shapes, digests = manifest["large"]
            if self._agreed is None:
                if self.is_over:
                    raise WireError("the generation ended")
                self._open = self._received.expect(spec, shapes, None if digests is None else len(digests))
                self._agreed, self._early = [spec, shapes], set()
            elif [spec, shapes] != self._agreed:
                raise WireError("its state differs from another holder's state of the same step")
            self._num_agreed += 1
            try:
                if digests is not None:
                    self._agree_on(digests)
            except BaseException:
                self._num_agreed -= 1
                if not self._num_agreed:
                    self._agreed = None
                raise
            self._changed.notify_all()
        return manifest

    def _agree_on(self, digests: list[str]) -> None:
        """FETCH-1"""
        assert self._received is not None
        with self._changed:
            if self._digests is None:
                self._received.expect_digests(digests)
                self._digests = digests
                self._open = sorted(self._received.missing - self._early)  # FETCH-5
            elif digests != self._digests:
                raise WireError("its state differs from another holder's state of the same step")
            self._changed.notify_all()
        reached("digests_agreed")

    def _answer(self, channel: Channel, limit_s: float) -> dict[str, Any]:
        """The next message, after those that only say how many digests there are (FETCH-9)."""
        known, deadline = 0, time.monotonic() + limit_s
        while True:
            left_s = max(deadline - time.monotonic(), 0)
            transport.await_answer(channel.sock, lambda: self.is_over or self._cancelled(), left_s)
            message: dict[str, Any] = channel.receive(transport.MAX_MANIFEST_BYTES)
            if (num := message.get("digested")) is None:
                return message
            if type(num) is int and num > known:
                known, deadline = num, time.monotonic() + transport.HEAL_TIMEOUT_S
                self._note_digested(num)

    def _note_digested(self, num: Any) -> None:
        if self._received is not None and type(num) is int:
            with self._changed:
                self._received.num_digested = max(self._received.num_digested, num)

    def _await_digests(self, to: _Connection, are_begun: bool) -> None:
        """FETCH-8: until the digests are known. Meanwhile this thread reads from memory."""
        if self._received is None:
            return
        is_asked = False
        alive_at = time.monotonic()
        try:
            while True:
                with self._changed:
                    if self._digests is not None and not is_asked:
                        return
                    chunks = [] if to.memory is None else self._take_those_in(to.memory)
                    asks = not self._digests_requested and (are_begun or not chunks or self._num_live == 1)
                    self._digests_requested = self._digests_requested or asks
                    is_asked = is_asked or asks
                    if not chunks and not is_asked:
                        if self.is_over:
                            raise WireError("the fetch is over")
                        self._changed.wait(_POLL_S)
                if asks:
                    to.channel.send("digests")
                elif time.monotonic() - alive_at >= ALIVE_S and not is_asked:
                    to.channel.send([])
                    alive_at = time.monotonic()
                answer: dict[str, Any] = {}
                if to.memory is not None and chunks:
                    self._read_all(to.memory, to.source, chunks, to.writer, to.reader)
                    if is_asked and transport.has_data(to.channel.sock):
                        answer = to.channel.receive(transport.MAX_MANIFEST_BYTES)
                        self._note_digested(answer.get("digested"))
                elif is_asked:
                    answer = self._answer(to.channel, transport.HEAL_TIMEOUT_S)
                if "digests" in answer:
                    self._agree_on(answer["digests"])
                    return
        finally:
            if is_asked:
                with self._changed:
                    self._digests_requested = self._digests is not None

    def _read_all(
        self, memory: PeerMemory, source: str, chunks: list[int], writer: staging.ChunkWriter, reader: staging.Reader
    ) -> None:
        """Chunks that `_take_those_in` has returned. Those that cannot be read are open again (FETCH-3)."""
        try:
            self._drop_those_here(chunks, reader)
            for index in list(chunks):
                self._read(memory, index, writer)
                self._count(source, chunks, index)
        finally:
            with self._changed:
                self._open += chunks
                self._early.difference_update(chunks)
                self._changed.notify_all()

    @contextlib.contextmanager
    def _memory_of(self, source: str, manifest: dict[str, Any], offer: Offer | None) -> Iterator[PeerMemory | None]:
        """FETCH-7: with the threads that read beside this one. They have ended at the end of the context."""
        announced = manifest.get("memory")
        if announced is None or offer is None or self._received is None:
            yield None
            return
        try:
            memory = PeerMemory(announced, offer, [tensor.nbytes for tensor in self._received.tensors])
        except UnreadableError as exc:
            _note_unreadable(str(exc))
            yield None
            return
        with memory:
            beside = [
                threading.Thread(target=self._read_beside, args=(memory, source), name="memory-reader", daemon=True)
                for _ in range(NUM_MEMORY_READERS - 1)
            ]
            started = []
            try:
                with contextlib.suppress(RuntimeError):  # no thread is left: this one reads alone
                    for thread in beside:
                        thread.start()
                        started.append(thread)
                yield memory
            finally:
                memory.stop()
                for thread in started:
                    thread.join()

    def _request(self, to: _Connection) -> bool:
        """Keep `NUM_REQUESTS` requests under way. False: none is, and all has arrived."""
        while len(to.requests) < NUM_REQUESTS:
            request = self._take(waits=not to.requests)
            if request is None:
                break
            to.requests.append(request)
            if request.is_small:
                to.channel.send({"small": self._received_small.expect(to.small[1])})
                continue
            self._drop_those_here(request.chunks, to.reader)
            wanted = [index for index in request.chunks if not self._is_in(to.memory, index)]
            if wanted and not to.has_turn:
                self._await_turn(to)
            to.channel.send(wanted)
        return bool(to.requests)

    def _await_turn(self, to: _Connection) -> None:
        """FETCH-12. `to.requests`: the last one is not sent yet. Raises WireError: it is not this rank's turn."""
        while len(to.requests) > 1:  # the answers to those before come first
            self._receive(to, to.requests[0])
            to.requests.popleft()
        with self._changed:
            while self._is_asking:
                if self.is_over:
                    raise WireError("the fetch is over")
                self._changed.wait(_POLL_S)
            self._is_asking = True
        try:
            to.channel.send({"turn": [self._name, self._num_turns]})
            has_turn = self._answer(to.channel, transport.CONNECT_TIMEOUT_S)["turn"] is True
        finally:
            with self._changed:
                self._is_asking = False
                self._changed.notify_all()
        if not has_turn:
            raise _NoTurnError
        with self._changed:
            to.has_turn = self._had_turn = True
            self._num_turns += 1

    def _is_in(self, memory: PeerMemory | None, index: int) -> bool:
        return memory is not None and self._received is not None and memory.has(self._received.place(index).tensor)

    def _drop_those_here(self, chunks: list[int], reader: staging.Reader) -> None:
        """FETCH-5."""
        assert self._received is not None
        for index in list(chunks):
            if self._received.is_here(index, reader):
                with self._changed:
                    chunks.remove(index)

    def _read_beside(self, memory: PeerMemory, source: str) -> None:
        """Read chunks as long as there are open ones."""
        assert self._received is not None
        try:
            with self._writing() as writer:
                reader = staging.Reader(None)
                while not memory.is_stopped and (chunks := self._take_those_in(memory)):
                    self._read_all(memory, source, chunks, writer, reader)
        except _FAILURES as exc:  # the thread of the connection meets it too, or is not concerned
            if device_fault(exc) is not None:  # HEALER-3
                self._fault = exc
            log.debug("stopped to read from memory: %s", exc)

    def _take(self, waits: bool) -> _Request | None:
        """What to request next: the small state (FETCH-2), or chunks. `waits`: while other holders have open requests.
        None: nothing, or nothing now."""
        with self._changed:
            while not (self._is_done() or self.is_over):
                if not self._small_requested:
                    self._small_requested = True
                    return _Request(True, [])
                if self._open:
                    return _Request(False, self._take_run())
                if not waits:
                    break
                self._changed.wait(_POLL_S)
        return None

    def _take_run(self) -> list[int]:
        """FETCH-10. Of the open chunks."""
        assert self._received is not None
        num, left = 0, RUN * staging.CHUNK_BYTES
        for index in self._open[:MAX_RUN]:
            place = self._received.place(index)
            left -= place.end - place.start
            if left < 0:
                break
            num += 1
        chunks, self._open = self._open[:num], self._open[num:]
        return chunks

    def _take_those_in(self, memory: PeerMemory) -> list[int]:
        with self._changed:
            if self.is_over or self._is_done():
                return []
            first = next((place for place, index in enumerate(self._open) if self._is_in(memory, index)), 0)
            run = self._open[first : first + RUN]
            chunks = [index for index in run if self._is_in(memory, index)]
            self._open[first : first + RUN] = [index for index in run if index not in chunks]
            if self._digests is None:
                self._early.update(chunks)
            return chunks

    def _receive(self, to: _Connection, request: _Request) -> None:
        if request.is_small:
            self._receive_small(to.channel, *to.small)
            return
        assert self._received is not None
        for index in sorted(request.chunks, key=lambda index: self._is_in(to.memory, index)):  # those on the wire first
            if to.memory is not None and self._is_in(to.memory, index):
                self._read(to.memory, index, to.writer)
            else:
                self._received.receive(index, to.writer, lambda data: transport.receive_into(to.channel.sock, data))
            self._count(to.source, request.chunks, index)

    def _count(self, source: str, chunks: list[int], index: int) -> None:
        with self._changed:
            chunks.remove(index)
            self._early.discard(index)
            if self._received is not None and self._digests is not None and index in self._received.missing:
                self._open.append(index)  # its digest was wrong, and was learnt in this instant (RECEIVED-3)
            self.num_from[source] = self.num_from.get(source, 0) + 1
        reached("chunk_received")

    def _read(self, memory: PeerMemory, index: int, writer: staging.ChunkWriter) -> None:
        assert self._received is not None
        if self.is_over:
            raise WireError("the fetch is over")
        place = self._received.place(index)
        self._received.receive(index, writer, lambda data: memory.read(data, place.tensor, place.start))
        with self._changed:
            self.num_from_memory += 1
        reached("chunk_read")

    def _receive_small(self, channel: Channel, spec: Any, shapes: list[Any], divided: list[int]) -> None:
        self._received_small.receive(channel)
        state = self._place_small(spec, self._received_small.tensors, divided)  # HEALER-2
        with self._changed:
            self._small = state
            self._changed.notify_all()


_noted: set[str] = set()


def _note_failure(source: str, reason: str) -> None:
    """FETCH-11."""
    line = f"could not heal from {source}: {reason}"
    log.log(logging.DEBUG if line in _noted else logging.WARNING, "%s", line)
    if len(_noted) < _MAX_NOTED:
        _noted.add(line)


def _note_unreadable(reason: str) -> None:
    """PEERMEM-4."""
    if reason not in _noted:
        _noted.add(reason)
        log.info("state of a rank on this host comes over a connection, since its memory cannot be read: %s", reason)
