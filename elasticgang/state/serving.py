"""What a holder sends to a healer (`striped_fetch.py`): its manifest, digests, and chunks.

SERVING-1  A holder whose memory the healer may read sends the manifest at once, without the digests that it has not
    computed yet, and sends these when the healer requests them. Otherwise the manifest has them.
SERVING-2  While a healer waits for digests, it is told every `TELL_S` how many there are.
SERVING-3  If the state has a value that cannot be sent, holder and healer say which, because no rank can heal then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticgang.protocol.commit import Attempt
from elasticgang.state import received_small, transport
from elasticgang.state.digests import Digest, Digests
from elasticgang.state.dtensor import local
from elasticgang.state.serialization import flatten
from elasticgang.state.staging import Chunks
from elasticgang.state.transport import Channel

log = logging.getLogger("elasticgang")

_MAX_REQUEST_BYTES = 16 << 20  # the digests of a small state of 2 TB

Lend: TypeAlias = Callable[[Sequence[Tensor]], AbstractContextManager[dict[str, Any] | None]]


def serve(
    channel: Channel, attempt: Attempt, small: dict[str, Any], large: Any, digests: Digests, written: Any, lend: Lend
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
    with lend(tensors) as announced:
        if announced is not None:  # SERVING-1
            manifest["memory"] = announced
            manifest["digests_begun"] = digests.are_begun(attempt)
        known = digests_of_all() if announced is None else digests.known(attempt)
        manifest["large"] = [spec, transport.shapes_of(tensors), known]
        channel.send(manifest)
        _answer(channel, Chunks(small_parts, written), parts, digests.digest, digests_of_all)


def serve_small(channel: Channel, small: dict[str, Any], digest: Digest, written: Any) -> None:
    """As `serve`, to one that wants the small state alone."""
    flat = _flat(channel, (small,))
    if flat is None:
        return
    ((spec, tensors),) = flat
    parts = list(map(local, tensors))
    channel.send({"small": _announced(spec, tensors, parts)})
    _answer(channel, Chunks(parts, written), Chunks([], written), digest, list)


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
    channel: Channel, small_parts: Chunks, parts: Chunks, digest: Digest, digests_of_all: Callable[[], list[str]]
) -> None:
    """A healer that reads from memory requests no chunks, now and then, to show that it lives."""
    while True:
        wanted = channel.receive(_MAX_REQUEST_BYTES)
        if isinstance(wanted, dict):
            received_small.send(channel, small_parts, wanted["small"], digest)
        elif wanted == "digests":
            channel.send({"digests": digests_of_all()})
        else:
            for index in wanted:
                channel.sock.sendall(parts[index])


def _tell(channel: Channel, num: int) -> None:
    """SERVING-2. If the healer has gone, the digests are of use to the next one."""
    with contextlib.suppress(OSError):
        channel.send({"digested": num})
