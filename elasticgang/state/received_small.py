"""The small state that a rank has received, in memory of its own.

SMALL-1  A small state that takes longer than one generation arrives over several. The rank names the digests of the
    chunks that it has, and the holder sends those of which its own have others. So all of it is what one holder has
    (FETCH-2), whoever has sent the chunks.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from elasticgang.state import transport
from elasticgang.state.digests import Digest
from elasticgang.state.staging import Chunks
from elasticgang.state.transport import Channel

_MAX_ANSWER_BYTES = 16


class ReceivedSmall:
    """One thread at a time uses it."""

    def __init__(self, digest: Digest | None = None) -> None:
        """`digest`: without it, nothing is kept for a later fetch."""
        self._digest_of = digest
        self._shapes: list[Any] | None = None
        self._chunks: list[memoryview] = []
        self._found: list[str | None] = []  # digests of the chunks that are here
        self.tensors: list[Tensor] = []

    def expect(self, shapes: list[Any]) -> list[str | None]:
        """Expect tensors of the `shapes` that a peer has sent. Returns what to request. Raises WireError, as
        `transport.allocate`."""
        if shapes != self._shapes:
            self._shapes, self.tensors = None, []  # first, so that there is one copy of it
            self._chunks, self._found = [], []
            self.tensors = transport.allocate(shapes)
            self._shapes = shapes
            self._chunks = list(itertools.chain(*map(transport.chunks, self.tensors)))
            self._found = [None] * len(self._chunks)
        last = max((number for number, found in enumerate(self._found) if found is not None), default=-1)
        return self._found[: last + 1]

    @property
    def num_here(self) -> int:
        """Chunks that are kept for a later fetch."""
        return len(self._found) - self._found.count(None)

    def receive(self, channel: Channel) -> None:
        """What `send` sends for the request that `expect` has returned. Raises OSError or WireError."""
        for number, chunk in enumerate(self._chunks):
            if self._found[number] is not None and channel.receive(_MAX_ANSWER_BYTES) is True:
                continue
            self._found[number] = None
            channel.receive_chunk(chunk)
            self._found[number] = None if self._digest_of is None else self._digest_of(chunk)


def send(channel: Channel, chunks: Chunks, known: list[str | None], digest: Digest) -> None:
    """SMALL-1. `known`: as `ReceivedSmall.expect` has returned it."""
    for number, chunk in enumerate(chunks):
        if number < len(known) and known[number] is not None:
            is_same = digest(chunk) == known[number]
            channel.send(is_same)
            if is_same:
                continue
        channel.send_chunk(chunk)
