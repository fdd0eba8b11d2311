"""What a holder sends to a healer (`striped_fetch.py`): its manifest, digests, and chunks.

SERVING-1  A holder whose memory the healer may read sends the manifest at once, without the digests that it has not
    computed yet, and sends these when the healer requests them. Otherwise the manifest has them.
SERVING-2  While a healer waits for digests, it is told every `TELL_S` how many there are.
SERVING-3  If the state has a value that cannot be sent, holder and healer say which, because no rank can heal then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticgang.errors import WireError
from elasticgang.protocol.commit import Attempt
from elasticgang.state import received_small, transport
from elasticgang.state.digests import Digest, Digests
from elasticgang.state.dtensor import local
from elasticgang.state.serialization import flatten
from elasticgang.state.staging import Chunks
from elasticgang.state.transport import Channel

log = logging.getLogger("elasticgang")

MAX_SERVED = 4
MAX_NAME_CHARS = 64
_MAX_REQUEST_BYTES = 16 << 20  # the digests of a small state of 2 TB

Lend: TypeAlias = Callable[[Sequence[Tensor]], AbstractContextManager[dict[str, Any] | None]]


class Turns:
    """The fetches to which this rank sends chunks. At most `MAX_SERVED` at a time, so that each has the whole state
    soon, and its rank can send it to others (FETCH-12). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: Counter[str] = Counter()  # connections of each

    @contextlib.contextmanager
    def of_connection(self) -> Iterator[Turn]:
        """Its turn ends with the context."""
        turn = Turn(self)
        try:
            yield turn
        finally:
            if turn.fetch is not None:
                with self._lock:
                    self._served[turn.fetch] -= 1
                    self._served += Counter()  # those above 0

    def take(self, fetch: str, limit: int) -> bool:
        with self._lock:
            is_taken = fetch in self._served or len(self._served) < limit
            if is_taken:
                self._served[fetch] += 1
            return is_taken


class Turn:
    """Of one connection. `fetch`: the one that it is of, once it has its turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.fetch: str | None = None

    def take(self, fetch: str, *, is_served: bool) -> bool:
        """Whether `fetch` has its turn here. `is_served`: another holder sends it chunks already."""
        if self.fetch is None and self._turns.take(fetch, 1 if is_served else MAX_SERVED):
            self.fetch = fetch
        return self.fetch is not None


def serve(
    channel: Channel,
    attempt: Attempt,
    small: dict[str, Any],
    large: Any,
    digests: Digests,
    written: Any,
    lend: Lend,
    turns: Turns,
) -> None:
    """Answer a `StripedFetch` until it closes the connection. `written`: a mark behind the last change of the state
    (PINNED-2). `lend`: lets the healer read the memory of these tensors, as `Lender`."""
    flat = _flat(channel, (small, large))
    if flat is None:
        return
    (small_spec, small_tensors), (spec, tensors) = flat
    small_parts = list(map(local, small_tensors))
    parts = Chunks(tensors, written)

    def digests_of_all() -> list[str]:
        return digests.of(attempt, tensors, parts, tell=lambda num: _tell(channel, num))

    manifest: dict[str, Any] = {"small": _announced(small_spec, small_tensors, small_parts)}
    with lend(tensors) as announced, turns.of_connection() as turn:
        if announced is not None:  # SERVING-1
            manifest["memory"] = announced
            manifest["digests_begun"] = digests.are_begun(attempt)
        known = digests_of_all() if announced is None else digests.known(attempt)
        manifest["large"] = [spec, transport.shapes_of(tensors), known]
        channel.send(manifest)
        _answer(channel, Chunks(small_parts, written), parts, digests.digest, digests_of_all, turn)


def serve_small(channel: Channel, small: dict[str, Any], digest: Digest, written: Any) -> None:
    """As `serve`, to one that wants the small state alone."""
    flat = _flat(channel, (small,))
    if flat is None:
        return
    ((spec, tensors),) = flat
    parts = list(map(local, tensors))
    channel.send({"small": _announced(spec, tensors, parts)})
    _answer(channel, Chunks(parts, written), Chunks([], written), digest, list, Turn(Turns()))


def _announced(spec: Any, tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Any]:
    """What a manifest says of the small state: its structure, the shapes of the local parts of its tensors, and which
    of these are DTensors, by their numbers."""
    divided = [number for number, tensor in enumerate(tensors) if isinstance(tensor, DTensor)]
    return [spec, transport.shapes_of(parts), divided]


def _flat(channel: Channel, trees: Sequence[Any]) -> list[tuple[Any, list[Tensor]]] | None:
    """Each of `trees`, as of `flatten`. None: one cannot be sent, and the healer knows why (SERVING-3)."""
    try:
        return list(map(flatten, trees))
    except TypeError as exc:
        why = f"no rank can heal from this state: {exc}"
        if why not in _warned:
            _warned.add(why)
            log.warning("%s", why)
        channel.send({"refused": why})
        return None


_warned: set[str] = set()


def _answer(
    channel: Channel,
    small_parts: Chunks,
    parts: Chunks,
    digest: Digest,
    digests_of_all: Callable[[], list[str]],
    turn: Turn,
) -> None:
    """A healer that reads from memory requests no chunks, now and then, to show that it lives."""
    while True:
        wanted = channel.receive(_MAX_REQUEST_BYTES)
        if isinstance(wanted, dict) and "turn" in wanted:
            fetch, num_turns = wanted["turn"]
            channel.send({"turn": turn.take(str(fetch)[:MAX_NAME_CHARS], is_served=num_turns != 0)})
        elif isinstance(wanted, dict):
            received_small.send(channel, small_parts, wanted["small"], digest)
        elif wanted == "digests":
            channel.send({"digests": digests_of_all()})
        elif wanted and turn.fetch is None:
            raise WireError("chunks are requested out of turn")
        else:
            for index in wanted:
                channel.sock.sendall(parts[index])


def _tell(channel: Channel, num: int) -> None:
    """SERVING-2. If the healer has gone, the digests are of use to the next one."""
    with contextlib.suppress(OSError):
        channel.send({"digested": num})
